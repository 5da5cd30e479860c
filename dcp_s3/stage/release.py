"""Frees the staged copy of a failed asynchronous save, even if its future or its error is kept.

An error holds its traceback, which holds the frames of DCP and dcp_s3, which hold the staged state, for as long as the
caller keeps the future. Nobody needs the frames: DCP's CheckpointException has the text of each rank's traceback. They
are cut off when the save ends.

Errors that were not raised (of other buckets and parts that failed too) may still be in cycles with their own frames.
Training loops that turn the collector off would keep those, so whoever waits for memory collects them.
"""

from __future__ import annotations

import inspect
from concurrent.futures import Future
from types import FrameType, TracebackType
from typing import Any

from dcp_s3 import torch_private

_GENERATORS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


_count = 0


def count_released() -> int:
    """Number of failed saves in this process whose memory was freed."""
    return _count


def release_when_over() -> None:
    """Free the memory of the asynchronous save that runs in this thread when it ends. Elsewhere: do nothing."""
    future = torch_private.find_upload_future()
    if future is not None:
        future.add_done_callback(release)


def release(future: Future[Any]) -> None:
    """Cut the tracebacks of an ended save."""
    if future.cancelled():
        return
    error = future.exception()
    if error is not None:
        let_go(error)
        global _count
        _count += 1


def let_go(error: BaseException) -> None:
    """Free what the frames of an error hold, and those of the errors that caused it."""
    pending, seen = [error], set()
    while pending:
        link = pending.pop()
        if id(link) in seen:
            continue
        seen.add(id(link))
        trace, link.__traceback__ = link.__traceback__, None
        pending += _causes(link)
        before: TracebackType | None = None
        while trace is not None:
            following = trace.tb_next
            pending += _errors_in(trace)
            if _clear(trace.tb_frame):
                # Others may hold the traceback by now (a function holds what it encloses): cut its links too.
                trace.tb_next = None
                if before is not None:
                    before.tb_next = None
            before, trace = trace, following


def _causes(error: BaseException) -> list[BaseException]:
    # CheckpointException has them by rank, with the text of the traceback.
    failures: Any = getattr(error, "failures", None)
    others = [failure[0] for failure in failures.values()] if isinstance(failures, dict) else []
    return [each for each in (error.__cause__, error.__context__, *others) if isinstance(each, BaseException)]


def _errors_in(trace: TracebackType) -> list[BaseException]:
    """The errors among a frame's variables. DCP's step keeps what a rank failed with there, and the raised exception
    has a copy of it."""
    found = []
    for value in trace.tb_frame.f_locals.values():
        if type(value) is tuple and value:
            value = value[0]
        if isinstance(value, BaseException):
            found.append(value)
    return found


def _clear(frame: FrameType) -> bool:
    """Free a frame's variables. False if they may still be needed."""
    if frame.f_code.co_flags & _GENERATORS:
        return False  # it may be suspended; clearing would close it
    try:
        frame.clear()
    except RuntimeError:  # it is still running
        return False
    frame.f_locals  # noqa: B018 - up to Python 3.12 this updates a copy of the variables
    return True
