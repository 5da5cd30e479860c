"""How errors leave dcp_s3 for DCP: `called_by_dcp`, on the methods that DCP calls.

DCP sends the traceback of each rank's error to all ranks, and each prints all of them. The message of a dcp_s3 error
says what happened and what to do about it. So the error leaves without its frames, and without the errors of botocore
and urllib3 that caused it. Those are in the log, at level DEBUG. Any other exception keeps its frames.

Nobody may ever look at the future of an asynchronous save. So its failure is logged too: on every rank, whatever
failed.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from torch.distributed.checkpoint.api import CheckpointException

from dcp_s3.errors import DcpS3Error
from dcp_s3.failures import explain
from dcp_s3.torch_private import find_upload_future
from dcp_s3.tracebacks import without_tracebacks

logger = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])

_watched: weakref.WeakSet[Future[Any]] = weakref.WeakSet()


def called_by_dcp(method: F) -> F:
    """Decorate a method of a writer, reader or planner: its errors leave without their frames."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except DcpS3Error as error:
            logger.debug("%s failed:", method.__qualname__, exc_info=True)
            without_tracebacks(error)
            error.__cause__ = error.__context__ = None
            failure = error
        finally:
            _watch(self)
        try:
            raise failure
        finally:
            del failure, self, args, kwargs  # no cycle, and no state kept: the traceback has this frame

    return call  # type: ignore[return-value]


def _watch(called: Any) -> None:
    """Log the failure of the asynchronous save that this call is part of, if it is part of one."""
    if getattr(called, "caller_reports", False):
        return
    future = find_upload_future()
    if future is not None and future not in _watched:
        _watched.add(future)
        future.add_done_callback(functools.partial(_log_failure, getattr(called, "checkpoint_id", None)))


def _log_failure(url: str | None, future: Future[Any]) -> None:
    error = future.exception()
    if error is None:
        return
    where = f" to {url}" if url else ""
    if isinstance(error, CheckpointException):
        cause = " " + explain({rank: cause for rank, (cause, _) in error.failures.items()})
    else:
        cause = f": {type(error).__name__}: {error}"
    logger.error("the asynchronous save%s failed%s", where, cause)
