"""An asynchronous save that failed lets go of its staged copy, whoever keeps its future or its error.

An error holds its traceback, that the frames of DCP's and our functions, and those the staged state: for as long as
the caller keeps the future. Nobody needs the frames: DCP's CheckpointException has the text of the traceback of each
rank. They are cut off at the end of the save. Errors that lost (of other buckets and parts, which failed as well) may
still be cycles with their own frames, which training loops that turn the collector off would keep: whoever waits for
memory calls it.
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
    """Failed saves that have let go so far, in this process."""
    return _count


def release_when_over() -> None:
    """Called in the thread of an asynchronous save; elsewhere nothing."""
    future = torch_private.find_upload_future()
    if future is not None:
        future.add_done_callback(release)


def release(future: Future[Any]) -> None:
    """Cut the tracebacks of a save that has ended."""
    if future.cancelled():
        return
    error = future.exception()
    if error is not None:
        let_go(error)
        global _count
        _count += 1


def let_go(error: BaseException) -> None:
    """Free what the frames of an error hold, and those of the errors that led to it."""
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
                # What has taken hold of the traceback meanwhile loses it, too: functions hold what they enclose.
                trace.tb_next = None
                if before is not None:
                    before.tb_next = None
            before, trace = trace, following


def _causes(error: BaseException) -> list[BaseException]:
    failures: Any = getattr(error, "failures", None)  # of CheckpointException: by rank, with the text of the traceback
    others = [failure[0] for failure in failures.values()] if isinstance(failures, dict) else []
    return [each for each in (error.__cause__, error.__context__, *others) if isinstance(each, BaseException)]


def _errors_in(trace: TracebackType) -> list[BaseException]:
    """What a rank failed with is among the variables of DCP's step; the exception that all raise has a copy of it."""
    found = []
    for value in trace.tb_frame.f_locals.values():
        if type(value) is tuple and value:
            value = value[0]
        if isinstance(value, BaseException):
            found.append(value)
    return found


def _clear(frame: FrameType) -> bool:
    """Free a frame's variables; False if it may still need them."""
    if frame.f_code.co_flags & _GENERATORS:
        return False  # it may be suspended, and would be closed
    try:
        frame.clear()
    except RuntimeError:  # it still runs
        return False
    frame.f_locals  # noqa: B018 - up to Python 3.12 a copy of them, which is brought up to date here
    return True
