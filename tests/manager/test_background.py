"""Retention behind the training, without S3."""

from __future__ import annotations

import logging
import threading

import pytest

from dcp_s3.errors import CheckpointError
from dcp_s3.manager.background import BackgroundRetention
from tests.manager.making import StandInPrune

ROOT = "s3://bucket/run"


def committed(_: float) -> None:
    """A save that is."""


def test_saves_that_commit_while_a_prune_runs_share_the_next_one() -> None:
    prune = StandInPrune()
    prune.go.clear()
    retention = BackgroundRetention(prune, ROOT)
    retention.saved(committed)
    assert prune.began.acquire(timeout=60)
    for _ in range(5):
        retention.saved(committed)  # returns at once
    prune.go.set()
    assert retention.close(60)
    assert prune.calls == 2


def test_a_prune_that_fails_is_logged_and_the_next_save_tries_again(caplog: pytest.LogCaptureFixture) -> None:
    prune = StandInPrune()
    prune.error = CheckpointError("S3 is away")
    retention = BackgroundRetention(prune, ROOT)
    retention.saved(committed)
    assert prune.began.acquire(timeout=60)
    retention.saved(committed)
    assert retention.close(60)
    assert prune.calls == 2
    assert caplog.text.count("retention under s3://bucket/run failed") == 2
    assert "S3 is away" in caplog.text


def test_nothing_is_pruned_before_the_commit() -> None:
    prune, commit = StandInPrune(), threading.Event()
    waited = threading.Semaphore(0)

    def wait_committed(_: float) -> None:
        waited.release()
        if not commit.wait(0.01):
            raise TimeoutError

    retention = BackgroundRetention(prune, ROOT)
    retention.saved(wait_committed)
    for _ in range(3):
        assert waited.acquire(timeout=60)
    assert prune.calls == 0
    commit.set()
    assert retention.close(60)
    assert prune.calls == 1


def test_a_later_save_takes_the_place_of_one_that_waits() -> None:
    prune = StandInPrune()
    waited = threading.Semaphore(0)

    def never(_: float) -> None:
        waited.release()
        raise TimeoutError

    retention = BackgroundRetention(prune, ROOT)
    retention.saved(never)
    assert waited.acquire(timeout=60)
    retention.saved(committed)
    assert retention.close(60)
    assert prune.calls == 1


def test_a_save_that_can_not_be_committed_deletes_nothing() -> None:
    prune = StandInPrune()

    def refused(_: float) -> None:
        raise CheckpointError("set aside")

    retention = BackgroundRetention(prune, ROOT)
    retention.saved(refused)
    assert retention.close(60)
    assert prune.calls == 0


def test_close_gives_up_on_a_prune_that_takes_too_long_and_tells_it_to_end(caplog: pytest.LogCaptureFixture) -> None:
    prune = StandInPrune()
    prune.go.clear()
    prune.error = CheckpointError("it was not told to end")
    retention = BackgroundRetention(prune, ROOT)
    retention.saved(committed)
    assert prune.began.acquire(timeout=60)
    thread = retention._thread
    assert thread is not None
    with caplog.at_level(logging.WARNING):
        assert not retention.close(0.01)
    assert "was not done within" in caplog.text
    prune.go.set()
    thread.join(60)
    assert not thread.is_alive()
    assert "it was not told to end" not in caplog.text
    retention.saved(committed)
    assert prune.calls == 1
