"""The queue of saves that wait for their upload, and what becomes of their failures."""

from __future__ import annotations

import functools
import threading
from concurrent.futures import Future
from typing import Any

import pytest

from dcp_s3 import errors
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


def test_one_that_has_ended_when_it_begins_holds_nobody_up() -> None:
    uploads = Uploads()
    uploads.start(1)
    for step in (2, 3):
        uploads.futures[step] = Future()
        uploads.fail(step)
    uploads.start(2, 3, 4)
    uploads.futures[1].set_result(None)
    assert uploads.begun == [1, 2, 3, 4]


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


def test_an_interrupt_while_one_begins_stops_neither_the_queue_nor_is_it_raised_again() -> None:
    uploads = Uploads()

    def interrupted() -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        uploads.saves.start(1, f"{ROOT}/1", interrupted, lambda: None)
    uploads.start(2)
    uploads.futures[2].set_result(None)
    uploads.saves.settle()
    uploads.saves.raise_failure()
    assert uploads.good == [2]


def test_each_failure_is_raised_once_the_last_one_with_the_others_as_its_context() -> None:
    uploads = Uploads()
    uploads.start(1, 2, 3, 4)
    for step in (1, 2, 3):
        uploads.fail(step)
    assert uploads.saves.newest_failure() == 3
    with pytest.raises(errors.SaveFailedError, match="no room for 2") as caught:
        uploads.saves.raise_failure(2)
    assert "no room for 1" in str(caught.value.__context__)
    with pytest.raises(errors.SaveFailedError, match="no room for 3"):
        uploads.saves.raise_failure()
    assert uploads.saves.newest_failure() == 0
    uploads.saves.raise_failure()


def test_who_waits_for_a_step_does_not_wait_for_newer_ones() -> None:
    uploads = Uploads()
    uploads.start(1, 2)
    uploads.futures[1].set_result(None)
    thread = threading.Thread(target=uploads.saves.settle_step, args=(1,), daemon=True)
    thread.start()
    thread.join(_PATIENCE_SECONDS)
    assert not thread.is_alive()
    assert uploads.saves.is_under_way


def test_a_full_queue_makes_the_next_save_wait() -> None:
    uploads = Uploads(queue=1)
    uploads.start(1, 2)
    thread = threading.Thread(target=uploads.saves.make_room, daemon=True)
    thread.start()
    thread.join(0.05)
    assert thread.is_alive()
    uploads.futures[1].set_result(None)
    thread.join(_PATIENCE_SECONDS)
    assert not thread.is_alive()
