"""How errors leave dcp_s3 for DCP: `called_by_dcp`, on the methods that DCP calls.

DCP sends the traceback of each rank's error to all ranks, and each prints all of them. The message of a dcp_s3 error
says what happened and what to do about it. So the error leaves without frames, and without the errors of botocore and
urllib3 that caused it. Those are in the log, at level DEBUG. Any other exception keeps its frames.
"""

from __future__ import annotations

import functools
import logging
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

from torch.distributed.checkpoint.api import CheckpointException

from dcp_s3.errors import DcpS3Error
from dcp_s3.tracebacks import without_tracebacks

logger = logging.getLogger(__name__)

_MOST_FRAMES = 8

F = TypeVar("F", bound=Callable[..., Any])


def called_by_dcp(method: F) -> F:
    """Decorate a method of a writer, reader or planner: its errors leave without their frames.

    The object's ``_tell_failed``, if it has one, is told of each.
    """

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except DcpS3Error as error:
            logger.debug("%s failed:", method.__qualname__, exc_info=True)
            without_tracebacks(error)
            error.__cause__ = error.__context__ = None
            error._without_frames = True
            failure = error
            _tell_failed(self, method, error)
        except Exception as error:
            _tell_failed(self, method, error)
            raise
        try:
            raise failure
        finally:
            del failure, self, args, kwargs  # no cycle, and no state kept: the traceback has this frame

    return call  # type: ignore[return-value]


def _tell_failed(called: Any, method: Callable[..., Any], error: Exception) -> None:
    tell = getattr(called, "_tell_failed", None)
    # DCP asks for global metadata first, and for that of the rank if there is none: no failure yet.
    if tell is not None and method.__name__ != "read_metadata":
        tell(error)


def frames_of_others(error: BaseException) -> str:
    """Where an error that is none of dcp_s3's was raised, as text for the log; empty if all causes are of dcp_s3."""
    causes = [(error, traceback.extract_tb(error.__traceback__))]
    if isinstance(error, CheckpointException):
        causes = list(error.failures.values())
    for cause, frames in causes:
        if not isinstance(cause, DcpS3Error) and frames:
            return "\nTraceback (most recent call last):\n" + "".join(traceback.format_list(frames[-_MOST_FRAMES:]))
    return ""
