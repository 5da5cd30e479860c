"""The line of saves that wait for their upload, and what the ranks decide about it."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

import pytest

from dcp_s3 import CheckpointManager, errors
from dcp_s3.manager.line import Line, check_overlap
from dcp_s3.manager.saving import Saving
from tests.faulty import BUCKET

ROOT = f"s3://{BUCKET}/run"
_PATIENCE_SECONDS = 60

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@pytest.mark.parametrize(("overlap", "room"), [("wait", 0), ("queue", 1)])
def test_as_many_wait_as_there_are_staged_copies_beside_the_one_that_uploads(overlap: str, room: int) -> None:
    assert check_overlap(overlap) == room


@pytest.mark.parametrize(
    ("overlap", "message"),
    [("newest", "overlap = 'newest', expected one of 'wait', 'queue'"),
     ("supersede", "no longer supported.*should_save=SaveContinuously")],
)  # fmt: skip
def test_what_cannot_overlap_is_refused(overlap: Any, message: str) -> None:
    with pytest.raises(errors.SettingsError, match=message):
        CheckpointManager(ROOT, overlap=overlap)


# --- the line -------------------------------------------------------------------------------------------


class Uploads:
    """Uploads of a line, which a test ends."""

    def __init__(self, line: Line) -> None:
        self.begun: list[int] = []
        self.futures: dict[int, Future[None]] = {}
        self._line = line

    def add(self, *numbers: int) -> None:
        for number in numbers:
            self._line.add(lambda number=number: self._begin(number))  # type: ignore[misc]

    def _begin(self, number: int) -> Future[None]:
        self.begun.append(number)
        return self.futures.setdefault(number, Future())


def test_one_uploads_at_a_time_whether_or_not_the_one_before_succeeded() -> None:
    uploads = Uploads(Line(2))
    uploads.add(1, 2, 3)
    assert uploads.begun == [1]
    uploads.futures[1].set_exception(OSError("away"))
    assert uploads.begun == [1, 2]
    uploads.futures[2].set_result(None)
    assert uploads.begun == [1, 2, 3]


def test_one_that_has_ended_when_it_begins_holds_nobody_up() -> None:
    uploads = Uploads(Line(2))
    uploads.futures = {number: Future() for number in (1, 2)}
    for future in uploads.futures.values():
        future.set_exception(OSError("no thread can be started"))
    uploads.add(1, 2, 3)
    assert uploads.begun == [1, 2, 3]


def test_an_interrupt_while_one_begins_does_not_stop_the_line() -> None:
    line = Line(1)

    def interrupted() -> Future[None]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        line.add(interrupted)
    uploads = Uploads(line)
    uploads.add(2)
    assert uploads.begun == [2]


def test_who_waits_for_a_step_does_not_wait_for_newer_ones() -> None:
    saving = Saving(0, "queue", 1)
    futures: list[Future[None]] = [Future(), Future()]
    for step, future in enumerate(futures, 1):
        saving.begin(step, f"{ROOT}/{step}", future, on_success=lambda: None)
    futures[0].set_result(None)
    thread = threading.Thread(target=saving.settle_step, args=(1,), daemon=True)
    thread.start()
    thread.join(_PATIENCE_SECONDS)
    assert not thread.is_alive()
    assert saving.is_under_way
