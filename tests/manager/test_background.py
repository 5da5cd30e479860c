"""What goes on behind the training, without S3: saves that wait for their upload, what becomes of their failures, and
retention."""

from __future__ import annotations

import functools
import logging
import threading
from concurrent.futures import Future
from typing import Any

import pytest

from dcp_s3 import errors
from dcp_s3.manager.background import BackgroundRetention
from dcp_s3.manager.inflight import SavesInFlight

ROOT = "s3://bucket/run"
_PATIENCE_SECONDS = 60


class Uploads:
    """Saves whose uploads a test ends."""

    def __init__(self, queue: int = 2) -> None:
        self.saves = SavesInFlight(0, queue=queue)
        self.begun: list[int] = []
        self.good: list[int] = []
        self.futures: dict[int, Future[None]] = {}

    def start(self, *steps: int) -> None:
        for step in steps:
            begin, done = functools.partial(self._begin, step), functools.partial(self.good.append, step)
            self.saves.start(step, f"{ROOT}/{step}", begin, done)

    def fail(self, step: int) -> None:
        self.futures[step].set_exception(OSError(f"no room for {step}"))

    def _begin(self, step: int) -> Future[None]:
        self.begun.append(step)
        return self.futures.setdefault(step, Future())


def test_one_uploads_at_a_time_whether_or_not_the_one_before_succeeded() -> None:
    uploads = Uploads()
    uploads.start(1, 2, 3)
    assert uploads.begun == [1]
    uploads.fail(1)
    assert uploads.begun == [1, 2]
    uploads.futures[2].set_result(None)
    assert uploads.begun == [1, 2, 3]
    assert uploads.good == [2]
    assert uploads.saves.is_under_way


def test_a_save_that_cannot_begin_is_raised_at_once_and_one_that_is_done_is_over() -> None:
    saves = SavesInFlight(0)

    def cannot() -> Any:
        raise OSError("no thread")

    with pytest.raises(errors.SaveFailedError, match="no thread"):
        saves.start(1, f"{ROOT}/1", cannot, lambda: None)
    saves.raise_failure()
    saves.start(2, f"{ROOT}/2", lambda: None, lambda: None)
    assert not saves.is_under_way
    assert saves.last_good == 2


def test_each_failure_is_raised_once_the_last_one_with_the_others_as_its_context() -> None:
    uploads = Uploads()
    uploads.start(1, 2, 3, 4)
    for step in (1, 2, 3):
        uploads.fail(step)
    with pytest.raises(errors.SaveFailedError, match="no room for 2") as caught:
        uploads.saves.raise_failure(2)
    assert "no room for 1" in str(caught.value.__context__)
    with pytest.raises(errors.SaveFailedError, match="no room for 3"):
        uploads.saves.raise_failure()
    uploads.saves.raise_failure()


def test_who_waits_for_a_step_does_not_wait_for_newer_ones() -> None:
    uploads = Uploads()
    uploads.start(1, 2)
    uploads.futures[1].set_result(None)
    thread = threading.Thread(target=uploads.saves.settle, args=(1,), daemon=True)
    thread.start()
    thread.join(_PATIENCE_SECONDS)
    assert not thread.is_alive()
    assert uploads.saves.is_under_way


# --- retention -----------------------------------------------------------------------------------


class StandInPrune:
    """Counts its calls, which end when the test lets them, or fail."""

    def __init__(self) -> None:
        self.calls = 0
        self.began = threading.Semaphore(0)
        self.go = threading.Event()
        self.go.set()
        self.error: Exception | None = None

    def __call__(self, check: Any) -> None:
        self.calls += 1
        self.began.release()
        assert self.go.wait(60)
        check()
        if self.error is not None:
            raise self.error


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


@pytest.mark.parametrize("error", [OSError("the disk cannot be read"), errors.CheckpointError("set aside")])
def test_a_save_that_can_not_be_committed_deletes_nothing_and_does_not_end_retention(error: Exception) -> None:
    prune, waited = StandInPrune(), threading.Event()

    def fails(_: float) -> None:
        waited.set()
        raise error

    for later, pruned in (((), 0), ((committed,), 1)):
        retention = BackgroundRetention(prune, ROOT)
        waited.clear()
        retention.saved(fails)
        assert waited.wait(60)
        for each in later:
            retention.saved(each)
        assert retention.close(60)
        assert prune.calls == pruned


def test_close_gives_up_on_a_prune_that_takes_too_long_and_tells_it_to_end(caplog: pytest.LogCaptureFixture) -> None:
    prune = StandInPrune()
    prune.go.clear()
    prune.error = errors.CheckpointError("it was not told to end")
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
