"""What is shortened before ``sys.excepthook`` sees it, and what is not."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from types import TracebackType
from typing import Any

import pytest
from torch.distributed.checkpoint.api import CheckpointException

from dcp_s3 import S3StorageReader, S3StorageWriter, errors, uncaught
from dcp_s3.torch_private import wrap_exception

_CAUSE = errors.CheckpointNotFoundError("there is no checkpoint. Remedy: check the URL")


def _caught(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as raised:  # noqa: BLE001 - CheckpointException is no Exception
        return raised


def _checkpoint_exception(*causes: BaseException) -> CheckpointException:
    return CheckpointException("read", {rank: wrap_exception(cause) for rank, cause in enumerate(causes)})


def test_a_failure_of_ours_becomes_a_panel_under_the_users_frames_and_the_same_name() -> None:
    error = _caught(_checkpoint_exception(_CAUSE, _CAUSE))
    shown = uncaught.shorten(error, error.__traceback__)
    assert shown is not None
    text = "".join(traceback.format_exception(shown))
    assert text.splitlines()[-3:] == [
        "torch.distributed.checkpoint.api.CheckpointException: the save or load failed on ranks 0 to 1",
        "  Cause: CheckpointNotFoundError: there is no checkpoint",
        "  Remedy: check the URL",
    ]
    assert isinstance(shown, CheckpointException)
    assert shown.failures == error.failures  # type: ignore[attr-defined]
    again = uncaught.shorten(error, error.__traceback__)
    assert "Remedy" not in str(again), "said once"


def _with_cause() -> BaseException:
    try:
        raise _checkpoint_exception(_CAUSE) from ZeroDivisionError()
    except CheckpointException as raised:
        return raised


def _in_a_handler() -> BaseException:
    try:
        try:
            raise ZeroDivisionError
        except ZeroDivisionError:
            raise _checkpoint_exception(_CAUSE)  # noqa: B904
    except CheckpointException as raised:
        return raised


@pytest.mark.parametrize(
    "error",
    [
        ZeroDivisionError("of the user"),
        KeyboardInterrupt(),
        _checkpoint_exception(_CAUSE, ZeroDivisionError("in the user's planner")),
        _checkpoint_exception(),
        _with_cause(),
        _in_a_handler(),
    ],
    ids=["user", "interrupt", "mixed", "empty", "cause", "context"],
)
def test_whatever_is_not_ours_alone_is_left_as_it_is(error: BaseException) -> None:
    raised = _caught(error)
    assert uncaught.shorten(raised, raised.__traceback__) is None


def test_the_hook_that_was_there_prints_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[type[BaseException], BaseException, TracebackType | None]] = []
    monkeypatch.setattr(sys, "excepthook", lambda *arguments: seen.append(arguments))
    monkeypatch.setattr(uncaught, "_previous", None)
    S3StorageWriter()
    S3StorageReader()
    installed = sys.excepthook
    uncaught.install()
    assert sys.excepthook is installed, "once"
    for error in (ZeroDivisionError("of the user"), errors.InvalidURLError("what is wrong")):
        raised = _caught(error)
        sys.excepthook(type(raised), raised, raised.__traceback__)
    (kind, first, trace), (other_kind, second, _) = seen
    assert (kind, str(first), trace) == (ZeroDivisionError, "of the user", first.__traceback__)
    assert other_kind.__name__ == "InvalidURLError"
    assert (str(second), isinstance(second, errors.InvalidURLError)) == ("what is wrong", True)


def test_if_shortening_fails_the_error_is_printed_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(uncaught, "_previous", lambda *arguments: seen.append(arguments))

    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(uncaught, "shorten", fail)
    error = _caught(_checkpoint_exception(_CAUSE))
    uncaught._show(type(error), error, error.__traceback__)
    assert seen == [(type(error), error, error.__traceback__)]


def test_on_other_ranks_it_is_one_line_that_says_where_to_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uncaught.ranks, "rank", lambda: 3)
    for error in (
        _checkpoint_exception(_CAUSE),
        errors.SaveFailedError("the save failed\n  Cause: x", failures={0: _CAUSE}, rank=3),
        errors.PolicyError("no policy"),
    ):
        raised = _caught(error)
        shown = uncaught.shorten(raised, raised.__traceback__)
        assert shown is not None
        (line,) = "".join(traceback.format_exception(shown)).splitlines()
        assert f"{__file__}:" in line
        assert isinstance(error, errors.PolicyError) or "rank 0 says more" in line


def test_an_error_of_ours_has_its_frames_unless_it_leaves_through_dcp() -> None:
    error = errors.InvalidURLError("x")
    try:
        raise error
    except errors.InvalidURLError:
        pass
    assert error.__traceback__ is not None
    error._without_frames = True
    assert error.__traceback__ is None
    assert list(wrap_exception(error)[1]) == []


def test_torchrun_does_not_end_the_first_rank_before_it_has_said_why(monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[str] = []
    before = signal.signal(signal.SIGTERM, lambda *_: happened.append("ended"))
    shorten = uncaught.shorten

    def slowly(error: BaseException, trace: TracebackType | None) -> BaseException | None:
        os.kill(os.getpid(), signal.SIGTERM)  # another rank was faster
        return shorten(error, trace)

    monkeypatch.setattr(uncaught, "shorten", slowly)
    monkeypatch.setattr(uncaught, "_previous", lambda *_: happened.append("printed"))
    try:
        for error in (_CAUSE, ZeroDivisionError("of the user")):
            raised = _caught(error)
            uncaught._show(type(raised), raised, raised.__traceback__)
        monkeypatch.setattr(uncaught, "_previous", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
        raised = _caught(_CAUSE)
        uncaught._show(type(raised), raised, raised.__traceback__)  # a debugger that does not end, for example
    finally:
        signal.signal(signal.SIGTERM, before)
    assert happened == ["printed", "ended", "ended", "printed", "ended"]
