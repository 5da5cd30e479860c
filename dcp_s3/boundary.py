"""How errors leave dcp_s3 for DCP: `called_by_dcp`, on the methods that DCP calls; and how a failure is told.

DCP sends the traceback of each rank's error to all ranks, and each prints all of them. The message of a dcp_s3 error
says what happened and what to do about it. So the error leaves without frames, and without the errors of botocore and
urllib3 that caused it. Those are in the log, at level DEBUG. Any other exception keeps its frames.

Nobody may ever look at the future of an asynchronous save. So its failure is logged too, whatever failed: once for the
job, on the first rank, if all ranks know of it.
"""

from __future__ import annotations

import functools
import logging
import threading
import traceback
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from types import TracebackType
from typing import Any, TypeVar

from torch.distributed.checkpoint.api import CheckpointException

from dcp_s3 import errors, ranks
from dcp_s3.errors import DcpS3Error
from dcp_s3.failures import Failed, panel
from dcp_s3.torch_private import (
    FailedCall,
    find_direction,
    find_failed_call,
    find_saving_rank,
    find_upload_future,
)
from dcp_s3.tracebacks import without_tracebacks

logger = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])

_watched: weakref.WeakKeyDictionary[Future[Any], FailedCall] = weakref.WeakKeyDictionary()
"""The asynchronous saves that are logged here if they fail."""
_telling = threading.Lock()
_MOST_FRAMES = 8

# Where S3 cannot say what is there, it is not asked for the last good checkpoint.
_AWAY = (
    errors.TransferError,
    errors.DeadlineExceededError,
    errors.CredentialsError,
    errors.BucketNotFoundError,
    errors.InvalidURLError,
    errors.SettingsError,
)
# Nothing is wrong with the checkpoint: the one before would not fit either.
_STATE_DIFFERS = (errors.EntryNotFoundError, errors.TensorMismatchError)
_BEFORE_WRITING = (errors.CheckpointExistsError, errors.InvalidURLError, errors.SettingsError, errors.StagingError)
_BEFORE_READING = (
    errors.CheckpointNotFoundError,
    errors.EntryNotFoundError,
    errors.TensorMismatchError,
    errors.UnsafeMetadataError,
    errors.CredentialsError,
    errors.BucketNotFoundError,
    errors.InvalidURLError,
    errors.SettingsError,
    errors.SaveProtocolError,
)


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
            error._without_frames = bool(find_direction())
            failure = error
            _tell_failed(self, method, error)
        except Exception as error:
            _tell_failed(self, method, error)
            raise
        finally:
            _watch(self)
        try:
            raise failure
        finally:
            del failure, self, args, kwargs  # no cycle, and no state kept: the traceback has this frame

    return call  # type: ignore[return-value]


def _tell_failed(called: Any, method: Callable[..., Any], error: BaseException) -> None:
    """Let a writer or reader tell of its failure, unless the future of an asynchronous save will."""
    tell = getattr(called, "_tell_failed", None)
    # DCP asks for global metadata first, and for that of the rank if there is none: no failure yet.
    if tell is not None and method.__name__ != "read_metadata" and find_upload_future() is None:
        tell(error)


def check_role(storage: object, role: str) -> None:
    """Refuse a reader that is given to a save, or a writer to a load. For the property that DCP looks at first.

    Args:
        storage: the reader or writer.
        role: ``load`` or ``save``: what it is for.

    Raises:
        SaveProtocolError
    """
    found = find_direction(3)  # this function, the property, torch
    if found and found != role:
        right = "storage_writer=S3StorageWriter(url)" if found == "save" else "storage_reader=S3StorageReader(url)"
        raise errors.SaveProtocolError(
            f"dcp.{found} was given an {type(storage).__name__}, which is for dcp.{role}. Remedy: {right}"
        )


# --- what a failure says ---------------------------------------------------------------------------------


def describe(error: BaseException, call: FailedCall | None, *, saving: str = "save") -> Failed:
    """What to say of the error of a `dcp.save` or `dcp.load`. Looks for the last good checkpoint, for seconds at most.

    Args:
        error: the error; of a CheckpointException the causes count.
        call: the save or load; None if it is unknown.
        saving: what a save is called.
    """
    failures: dict[int, BaseException] = {}
    if isinstance(error, CheckpointException):
        failures = {rank: cause for rank, (cause, _) in error.failures.items()}
    causes = list(failures.values()) or [error]
    loading = call is not None and call.loading
    storage = None if call is None else call.storage
    url = None if call is None else call.url
    what = f"the load of {url}" if loading else f"the {saving}{f' to {url}' if url else ' or load' if not call else ''}"
    look = (
        None
        if any(isinstance(cause, (*_AWAY, *_STATE_DIFFERS)) for cause in causes)
        else getattr(storage, "_last_good", None)
    )
    good = look(url) if callable(look) and url else ""
    return Failed(
        what,
        failures,
        None if failures else error,
        left="" if call is None else left_by_load(causes) if loading else left_by_save(causes),
        last_good=good,
        resume=f'dcp.load(state, storage_reader=S3StorageReader("{good}"))' if good else "",
    )


def left_by_save(causes: Iterable[BaseException]) -> str:
    """What a save that failed has left behind, and what not."""
    if all(isinstance(cause, _BEFORE_WRITING) for cause in causes):
        return "nothing was written, and what was there is untouched"
    return "no new checkpoint, and the earlier ones untouched; `dcp-s3 prune` removes what was uploaded"


def left_by_load(causes: Iterable[BaseException]) -> str:
    """What a load that failed has left behind; empty: nothing."""
    return "" if all(isinstance(cause, _BEFORE_READING) for cause in causes) else "the state may be partly loaded"


def frames_of_others(error: BaseException) -> str:
    """Where an error that is none of dcp_s3's was raised, as text for the log; empty if all causes are of dcp_s3."""
    causes = [(error, traceback.extract_tb(error.__traceback__))]
    if isinstance(error, CheckpointException):
        causes = list(error.failures.values())
    for cause, frames in causes:
        if not isinstance(cause, DcpS3Error) and frames:
            return "\nTraceback (most recent call last):\n" + "".join(traceback.format_list(frames[-_MOST_FRAMES:]))
    return ""


def take_telling(error: BaseException) -> bool:
    """Whether the caller is the first in this process to ask: it is the one that tells people of the error."""
    with _telling:
        taken = getattr(error, "_dcp_s3_told", False)
        error._dcp_s3_told = True  # type: ignore[attr-defined]
        return not taken


def log_failed_save(text: str, error: BaseException, *, others_know: bool, rank: int) -> None:
    """Log that a save failed: the one place for it, of writers and of managers.

    Args:
        text: the panel.
        error: what is raised of it, if anything.
        others_know: whether every rank logs the same. Then only the first one logs an error.
        rank: this process's rank among those that save together.
    """
    if others_know and rank > 0:
        logger.debug("%s", text)
    elif take_telling(error):
        logger.error("%s", text)


# --- asynchronous saves ----------------------------------------------------------------------------------


def _watch(called: Any) -> None:
    """Tell of the failure of the asynchronous save that this call is part of, if it is part of one."""
    future = find_upload_future()
    if future is not None and future not in _watched:
        rank = find_saving_rank()  # none for the checkpoint process, whose ranks are those of the whole job
        url = getattr(called, "checkpoint_id", None)
        _watched[future] = FailedCall(called, False, ranks.rank() if rank is None else rank, url)
        future.add_done_callback(_log_failure)


def find_call(error: BaseException, trace: TracebackType | None) -> FailedCall | None:
    """The `dcp.save`, `dcp.load` or `dcp.async_save` that raised an error; None if it is unknown."""
    for future, call in list(_watched.items()):
        if future.done() and not future.cancelled() and future.exception() is error:
            return call
    return find_failed_call(trace)


def _log_failure(future: Future[Any]) -> None:
    error = future.exception()
    if error is None:
        return
    frames = frames_of_others(error)
    storage = _watched[future].storage
    if (tell := getattr(storage, "_tell_failed", None)) is not None:
        tell(error)
    if getattr(storage, "caller_reports", False):
        return
    call, shared = _watched[future], isinstance(error, CheckpointException)
    if shared and call.rank > 0:
        text = f"the asynchronous save to {call.url} failed"
    else:
        text = panel(describe(error, call, saving="asynchronous save"))
    # Nobody else may show where: the future keeps it, and may never be looked at.
    log_failed_save(text + frames, error, others_know=shared, rank=call.rank)
