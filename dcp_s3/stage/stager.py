"""S3Stager: DCP's AsyncStager with a pool of buffers."""

from __future__ import annotations

import functools
import logging
import time
from concurrent.futures import Future
from typing import Any

from torch.distributed.checkpoint.staging import AsyncStager

from dcp_s3.errors import StagingError
from dcp_s3.events import Listener, SaveFailed, Staged, emit
from dcp_s3.failures import without_tracebacks
from dcp_s3.process import local_world_size, world_size
from dcp_s3.settings import Settings, SettingsLike, resolve_settings
from dcp_s3.stage.handover import AsyncSave, StagedState, failed_staging, wait_for_saves
from dcp_s3.stage.memory import BufferPool, measure_available
from dcp_s3.stage.snapshot import Snapshot
from dcp_s3.units import format_size, one_line
from dcp_s3.workers import InTurn

logger = logging.getLogger(__name__)


class S3Stager(AsyncStager):
    """Copies the state to host memory for `dcp.async_save`, so that training can go on and change it.

    Buffers are reused, but never while a save can still read them. ``DCP_S3_STAGING_LIMIT`` bounds the memory; what
    exceeds it is staged in files in ``DCP_S3_SPILL_DIR``. One stager serves any number of saves, with any writer, by
    one thread at a time.

    >>> stager = S3Stager(asynchronous=True)
    >>> writer = S3StorageWriter("s3://bucket/run/step-3000")
    >>> saving = dcp.async_save(state, storage_writer=writer, async_stager=stager)
    >>> copied = saving.staging_completion.result()  # from here on the state may change
    >>> committed = saving.upload_completion.result()

    Args:
        asynchronous: `stage` returns at once and copies in the background; `dcp.async_save` then returns an
            AsyncSaveResponse. The state must not be changed before its ``staging_completion``. In-place changes that
            increment the versions of tensors are detected and fail the save. Not detected: changes through ``.data``,
            by torch's fused optimizers, and by its foreach optimizers to DTensors.
        on_event: called with `dcp_s3.events.Staged` for each copy, in the thread that made it; with `SaveFailed` if it
            cannot be made, and there are no other ranks that fail, too.

    Raises:
        SettingsError: a setting is not allowed.
    """

    def __init__(
        self,
        settings: SettingsLike = None,
        *,
        asynchronous: bool = False,
        on_event: Listener | None = None,
    ) -> None:
        self._on_event = on_event
        self.settings: Settings = resolve_settings(settings)
        self.asynchronous = asynchronous
        limit = self.settings.staging_limit
        if isinstance(limit, float):  # a fraction of what is there, which the ranks of this host share
            limit = int(limit * measure_available() / local_world_size())
        self._pool = BufferPool(limit=limit, spill_dir=self.settings.spill_dir)
        self._background = InTurn("dcp_s3-staging")
        self._closed = False

    def __repr__(self) -> str:
        return one_line("S3Stager", asynchronous=self.asynchronous or None)

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any] | Future[dict[str, Any]]:
        """A training-safe copy of ``state_dict`` in CPU memory, or with ``asynchronous`` a future of it.

        `dcp.async_save` calls this. It first waits for the asynchronous save before it. The copy is for that one save;
        its memory is free when the save has ended.

        Each tensor is copied by itself, and only what it covers of its storage. Tied weights (one view under two names)
        are copied once; overlapping views do not share memory in the copy.

        With several ranks a failure does not raise here, because the other ranks could not learn of it. Instead, the
        returned state makes the save fail on all ranks, with the cause.

        Raises:
            StagingError: there is no room (``DCP_S3_STAGING_LIMIT`` without ``DCP_S3_SPILL_DIR``, memory, disk), or
                something in the state cannot be copied.
        """
        if self._closed:
            raise StagingError("this S3Stager was closed. Remedy: close it after the last save, or make a new one")
        began = time.monotonic()
        wait_for_saves()
        save = AsyncSave()
        try:
            result: dict[str, Any] | Future[dict[str, Any]] = self._stage(state_dict, save, began)
            save.stall_seconds = time.monotonic() - began
        except BaseException:  # an interrupt at any place, too: later saves would wait for this one
            save.end()
            raise
        return result

    def stage_now(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """A training-safe copy for whatever you like, made before returning, whether or not the stager is
        ``asynchronous``. Its memory is free when nothing refers to it any more.

        >>> copied = S3Stager().stage_now(state)
        >>> copied["weight"].data_ptr() != state["weight"].data_ptr()
        True
        """
        staged: dict[str, Any] = self._stage(state_dict, None, time.monotonic())
        return staged

    def synchronize_staging(self) -> None:
        """Wait for copies under way."""
        self._background.join()

    def close(self) -> None:
        """Wait for copies under way, and free the buffers: at once, or when the last save that reads them ends."""
        self._closed = True
        self._background.join()
        self._pool.close()

    def __enter__(self) -> S3Stager:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _stage(self, state_dict: dict[str, Any], save: AsyncSave | None, began: float) -> Any:
        """The copy, made now or, for a save of an asynchronous stager, a future of it."""
        in_background, copying = save is not None and self.asynchronous, Future[StagedState]()
        try:
            snapshot = Snapshot(state_dict, watched=in_background)
            if in_background:
                copying = self._background.submit(self._copy, snapshot, save, began)
        except Exception as error:  # noqa: BLE001 - raised if this is the only rank
            copying.set_result(failed := self._failed(error, save))
            return copying if in_background else failed
        if not in_background:
            return self._copy(snapshot, save, began)

        def log_failure(copying: Future[StagedState]) -> None:  # the save ends before its writer learns of it
            if (error := copying.exception()) is not None:
                what = "the asynchronous save failed: its state could not be staged: %s: %s"
                logger.error(what, type(error).__name__, error)

        copying.add_done_callback(log_failure)
        return copying

    def _copy(self, snapshot: Snapshot, save: AsyncSave | None, began: float) -> StagedState:
        started = time.monotonic()
        try:
            filled, tensors, buffers = snapshot.copy(self._pool)
        except Exception as error:  # noqa: BLE001 - raised if this is the only rank
            return self._failed(error, save)
        ended = time.monotonic()
        size = sum(buffer.size for buffer in buffers)
        on_disk = sum(buffer.size for buffer in buffers if buffer.kind == "file")
        logger.debug("staged %s (%s on disk) in %.3f s", format_size(size), format_size(on_disk), ended - started)
        state = StagedState(filled, tensors, buffers, self._pool)
        stalled = None if save is None else save.stall_seconds  # None: the training still waits
        stalled = ended - began if stalled is None else stalled
        emit(Staged(bytes=size, disk_bytes=on_disk, seconds=ended - started, stall_seconds=stalled), self._on_event)
        if save is not None:
            save.go_with(state)
        return state

    def _failed(self, error: Exception, save: AsyncSave | None) -> StagedState:
        """A state that carries a failure to the other ranks. If there are none, the failure is raised."""
        logger.debug("staging failed:", exc_info=error)
        without_tracebacks(error)  # their frames hold a generation, and the error may be kept
        if world_size() < 2:
            emit(SaveFailed(url=None, step=None, error=error), self._on_event)  # its writer will never be asked
            if save is not None:
                save.end()
            raise error
        failed = failed_staging(error)
        if save is not None:
            save.go_with(failed)
        return failed


@functools.lru_cache(maxsize=8)
def shared_stager(limit: int | float | None, spill_dir: str | None) -> S3Stager:
    """The blocking stager that all writers of this process with these settings share."""
    return S3Stager({"staging_limit": limit, "spill_dir": spill_dir})
