"""S3StorageWriter: DCP's StorageWriter on S3."""

from __future__ import annotations

import functools
import logging
import os
import secrets
import threading
import time
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from dcp_s3 import process
from dcp_s3.checkpoint.attachments import Attachment, make_attachment
from dcp_s3.checkpoint.commit import check_metrics
from dcp_s3.coordination.ownership import Replicas
from dcp_s3.coordination.processes import CountedSave
from dcp_s3.errors import CheckpointError, InvalidURLError, SaveProtocolError, SettingsError, TransferError
from dcp_s3.events import Listener, SaveFailed, SaveStarted, emit
from dcp_s3.failures import called_by_dcp, frames_of_others
from dcp_s3.format.control_files import check_extra
from dcp_s3.format.layout import metadata_object, step_of
from dcp_s3.s3.store import store_of
from dcp_s3.save.joint import begin_joint_save
from dcp_s3.save.plan import OBJECTS_PER_RANK
from dcp_s3.save.save import Save
from dcp_s3.settings import Settings, SettingsLike, resolve_settings
from dcp_s3.spill.saving import drain_url
from dcp_s3.stage.handover import AsyncSave, StagedState, current_save, wait_for_saves
from dcp_s3.stage.stager import shared_stager
from dcp_s3.units import one_line
from dcp_s3.url import CheckpointURL, is_s3_url, parse_url

logger = logging.getLogger(__name__)

_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.1, 2.0  # seconds between looks at S3


class _Here(threading.local):
    """What a writer knows of the saves of one thread: DCP makes all calls of a save in one thread."""

    url: CheckpointURL | None = None  # of the save under way, or of the next one
    save_id: str | None = None  # of the next save; None if not chosen yet
    save: Save | None = None  # under way, or the last one
    is_home: bool = False  # whether the writer was made in this thread

    def __reduce__(self) -> Any:
        return _Here, (), {"is_home": True}  # in another process, nothing has begun


class S3StorageWriter(StorageWriter, AsyncStager):
    """Writes checkpoints to S3. Pass it to `dcp.save` or `dcp.async_save` as ``storage_writer``.

    Readers see nothing of a save before its commit, at the end. If any rank fails, there is no new checkpoint, and an
    old one at the same URL stays whole.

    One writer serves several saves if each is given its own ``checkpoint_id``. A save keeps its URL, arguments and id.
    It first waits for the asynchronous saves that this process began before. If an asynchronous one fails, its rank
    logs the error; this needs dcp_s3's own stager: pass no other one as ``async_stager``.

    >>> saved = dcp.save(state, storage_writer=S3StorageWriter("s3://bucket/run/step-3000", metrics={"val_loss": 1.75}))
    >>> latest("s3://bucket/run").metrics
    {'val_loss': 1.75}

    Args:
        url: ``s3://bucket/prefix`` of the checkpoint. Optional if each save passes ``checkpoint_id``.
        overwrite: replace a committed checkpoint at the URL. Otherwise CheckpointExistsError.
        metrics: user metrics (numbers, text, bools), stored beside the checkpoint.
        extra: other values to store with the checkpoint: text, numbers, bools, None, lists and dicts of these, at most
            64 KiB as JSON. The first rank's are stored. `S3StorageReader.extra` reads them.
        replicas: for saves without collectives: the ranks that hold the same plain tensors and objects as this one; or
            a function that returns them for a FQN, and is also asked about shards made by hand (DTensors need no such
            answer). None: all ranks. Items that end up without a writer are written after the rest; none is lost.
        step: the step of an asynchronous save without collectives. Needed to tell saves apart if several go to one URL
            that names no step. Make a writer for each of them.
        split_replicated: split tensor chunks above 64 MiB that several ranks hold (DDP, HSDP) by rows among these
            ranks, so that all write about the same number of bytes. The replicas must have equal values. Not in saves
            without collectives. None: the setting ``split_replicated``.
        incremental: have S3 copy tensor chunks that have not changed since the last save of this process (frozen
            layers, adapters), instead of sending them. Each checkpoint stays whole on its own. Needs checksums. None:
            the setting ``incremental``.
        max_objects: most objects that a rank writes, 1 or more, besides attachments; small states get fewer. None: 4.
            With ``incremental`` twice as many are sent at most, and at most 32 are made by S3.
        process_group: the group that is passed to `dcp.save`, which does not pass it on. None: the default group.
        settings: a `Settings`, or a mapping of settings that override the environment.
        on_event: called with each event of its saves on this rank, see `dcp_s3.events`. Not called in the process of an
            `AsyncCheckpointerType.PROCESS`.

    Raises:
        InvalidURLError: ``url`` is not an S3 URL.
        SettingsError: a setting, in the environment or given here, or ``max_objects`` is not allowed, or something in
            ``extra`` cannot be stored.
        SaveProtocolError: a metric cannot be stored.
    """

    caller_reports = False
    """Whether the caller logs asynchronous saves that fail."""
    stall_seconds: float | None = None
    """For which the next save has held the training up, if the caller knows better."""
    staged: dict[str, Any] | None = None
    """A copy of the next state, if the caller has made it (`S3Stager.stage_now`)."""
    counted: CountedSave | None = None
    """The next save, which is one without collectives, if the caller has counted it (`count_save`)."""
    _was_sent = False  # whether this is a copy in another process, whose state was staged elsewhere

    def __init__(
        self,
        url: str | os.PathLike[str] | None = None,
        *,
        overwrite: bool = False,
        metrics: Mapping[str, Any] | None = None,
        extra: Mapping[str, Any] | None = None,
        split_replicated: bool | None = None,
        incremental: bool | None = None,
        max_objects: int | None = None,
        replicas: Replicas = None,
        step: int | None = None,
        process_group: dist.ProcessGroup | None = None,
        settings: SettingsLike = None,
        on_event: Listener | None = None,
    ) -> None:
        super().__init__()
        self.settings: Settings = resolve_settings(settings, split_replicated=split_replicated, incremental=incremental)
        self.overwrite, self.replicas, self.step, self.on_event = overwrite, replicas, step, on_event
        self.metrics, self.extra = dict(metrics or {}), check_extra(extra)
        check_metrics(self.metrics)  # fail now, not at the end of a save
        self.max_objects = OBJECTS_PER_RANK if max_objects is None else max_objects
        if not isinstance(self.max_objects, int) or self.max_objects < 1:
            raise SettingsError(f"max_objects = {self.max_objects!r}, expected a whole number above 0")
        self._url = None if url is None else parse_url(url)  # of saves that were given none
        self._had_others = False  # whether it was another one before
        self._attached: dict[str, Attachment] = {}  # to the next save
        self._members = None if process_group is None else dist.get_process_group_ranks(process_group)  # None: all
        self._is_one_of_several = process.world_size() > 1
        self._here = _Here()
        self._here.is_home = True
        self._last: Save | None = None

    def __repr__(self) -> str:
        url = [] if self.checkpoint_id is None else [repr(self.checkpoint_id)]
        return one_line("S3StorageWriter", *url, overwrite=self.overwrite or None)

    @called_by_dcp
    def __getstate__(self) -> dict[str, Any]:
        # For AsyncCheckpointerType.PROCESS: only DCP knows how the save ends, in the default group.
        attached, self._attached = self._attached, {}
        return {
            **self.__dict__, "_attached": attached, "_last": None, "on_event": None, "_was_sent": True,
            "_members": None, "_is_one_of_several": process.world_size() > 1,
        }  # fmt: skip

    # --- StorageWriter: a save, in the order of DCP's calls ------------------------------------------

    @called_by_dcp
    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new save, to ``checkpoint_id`` if given (InvalidURLError if it is not an S3 URL).

        In the thread that made the writer, it also becomes the URL of later saves without one; but asynchronous ones
        need their own, once the writer has had several. In another thread, it is for that asynchronous save alone.
        """
        self._here.save_id = None
        if checkpoint_id is None:
            return
        url = self._here.url = parse_url(checkpoint_id)
        if self._here.is_home:
            self._had_others |= self._url not in (None, url)
            self._url = url

    @called_by_dcp
    def storage_meta(self) -> StorageMeta | None:
        """URL and id of this thread's next save, for DCP's logs and planners."""
        wait_for_saves()  # before the ranks exchange anything, even failures
        here, background = self._here, current_save()
        here.url, here.save_id = self._choose_url(), here.save_id or secrets.token_hex(8)
        if background is not None:
            error = CheckpointError(
                "it was not committed: another rank failed, or something other than dcp_s3. Remedy: the future of "
                "dcp.async_save has the error",
                url=str(here.url),
            )
            background.if_unfinished = functools.partial(self._tell_failed, error, here.url)
        return StorageMeta(checkpoint_id=str(here.url), save_id=here.save_id)

    @called_by_dcp
    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Begin the save, on every rank, before planning.

        Raises:
            InvalidURLError: neither the writer nor the save has a URL.
            SaveProtocolError: several URLs are possible for this save, or this rank is not to save alone.
        """
        wait_for_saves()  # some frameworks do not call storage_meta
        here, url = self._here, self._choose_url()
        save_id = here.save_id or secrets.token_hex(8)
        use_collectives, rank = bool(kwargs.get("use_collectives", True)), kwargs.get("rank")
        rank = process.rank() if rank is None else int(rank)  # some do not pass it either
        if self.counted is None:  # a save of some ranks must not be taken for the whole
            if self._is_one_of_several and not process.is_initialized():
                raise SaveProtocolError(
                    f"the save to {url} does not begin: the process group has been destroyed since its writer was "
                    "made, and what this rank alone holds must not be taken for the whole. Remedy: wait for the saves, "
                    "or close the CheckpointManager, before destroy_process_group(); to save this process's state, "
                    "make a new writer"
                )
            is_part = self._members is not None and len(self._members) < process.world_size()
            if not use_collectives and process.is_initialized() and (is_part or rank != process.rank()):
                raise SaveProtocolError(
                    f"the save to {url} is one of some ranks, and without collectives all ranks of the job save "
                    "together. Remedy: save in a process group with collectives; to save the state of this rank alone, "
                    "no_dist=True without use_collectives=False"
                )
        background, stall_seconds = current_save(), self.stall_seconds
        if background is not None:
            stall_seconds = background.stall_seconds if stall_seconds is None else stall_seconds
            if use_collectives and not is_coordinator:
                background.if_unfinished = None  # the coordinator knows whether it is committed
        attached, self._attached = self._attached, {}
        options: dict[str, Any] = {
            "overwrite": self.overwrite, "metrics": dict(self.metrics), "extra": check_extra(self.extra),
            "attachments": list(attached.values()), "max_objects": self.max_objects,
            "on_event": self.on_event, "stall_seconds": stall_seconds,
            # In another thread it may be a save that somebody else staged.
            "is_blocking": background is None and here.is_home and not self._was_sent,
        }  # fmt: skip
        if use_collectives:
            save = Save(url, save_id, self.settings, rank=rank, is_coordinator=is_coordinator, **options)
        else:
            counted, self.counted = self.counted, None
            save = begin_joint_save(
                url, save_id, self.settings, replicas=self.replicas, counted=counted, step=self.step, **options
            )
        here.url, here.save_id, here.save, self._last = url, None, save, save
        emit(SaveStarted(url=str(url), step=save.step, rank=save.rank), self.on_event)

    @called_by_dcp
    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Check the URL before any data is uploaded: on the coordinator, or on every rank without collectives.

        Raises:
            CheckpointExistsError, StagingError, StorageError
        """
        background = current_save()
        if background is not None and background.error is not None:
            raise background.error
        return self._save.prepare_local_plan(plan)

    @called_by_dcp
    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Check that the ranks' plans are of one save, and their shards of the same tensors.

        Raises:
            SaveProtocolError: they are of different saves.
            ShardingError: a tensor has another shape on another rank.
        """
        return self._save.prepare_global_plan(plans)

    @called_by_dcp
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Upload this rank's items. Returns when all objects are complete, or raises and leaves nothing open.

        Raises:
            DeadlineExceededError: `save_timeout` has passed.
            StorageError, SaveProtocolError
        """
        future: Future[list[WriteResult]] = Future()
        future.set_result(self._save.write_data(plan, planner))
        return future

    @called_by_dcp
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit. Called on the coordinator when every rank has written; without collectives, on each rank.

        Raises:
            DeadlineExceededError: `save_timeout` has passed since this rank began to write.
            CheckpointDeletedError: the save took so long that a prune deleted its objects as leftovers.
            SaveProtocolError: a rank wrote for another save.
            CheckpointExistsError, StorageError
        """
        self._save.finish(metadata, results)
        if (background := current_save()) is not None:
            background.if_unfinished = None

    # --- beside the save -----------------------------------------------------------------------------

    def attach(self, name: str, data: bytes | bytearray | memoryview) -> None:
        """Add a small file to this rank's next save. It is committed, copied, verified and deleted with the checkpoint.

        If several asynchronous saves have attachments, make a writer for each. `S3StorageReader.attachment` reads the
        file. Ranks may attach the same bytes under one name; a file of one rank needs a name of its own.

        >>> writer = S3StorageWriter("s3://bucket/run/step-3000")
        >>> writer.attach("config.json", b'{"layers": 32}')
        >>> saved = dcp.save(state, storage_writer=writer)
        >>> S3StorageReader("s3://bucket/run/step-3000").attachments()
        ['config.json']

        Args:
            name: path relative to the checkpoint, at most 90 bytes of UTF-8, for example ``common.pt``.
            data: bytes of the file, at most 256 MiB. They are copied.

        Raises:
            SaveProtocolError: the name cannot be one, other bytes are attached under it, or there is too much data.
        """
        attachment = make_attachment(name, data)
        if self._attached.setdefault(name, attachment).data != attachment.data:
            raise SaveProtocolError(
                f"{name!r} is already attached to this save, with other bytes. Remedy: attach it once, or under "
                "another name"
            )

    def wait_committed(self, timeout: float | None = None) -> None:
        """Wait until the save of this writer that began last is committed on S3, after ``DCP_S3_DURABILITY=local``.

        Every rank may call it. A writer that has not saved in this process, or had nothing to write, waits for any
        checkpoint at its URL.

        >>> writer = S3StorageWriter("s3://bucket/run/step-3000")
        >>> saved = dcp.save(state, storage_writer=writer)
        >>> writer.wait_committed(timeout=600)

        Args:
            timeout: seconds; None: no limit.

        Raises:
            TimeoutError: the save is not committed yet; the drain goes on.
            CheckpointError: the save cannot be committed, or another save has replaced it.
            StorageError: S3 refuses the request.
        """
        save = self._last
        url = self._choose_url() if save is None else save.url
        deadline = None if timeout is None else time.monotonic() + timeout
        drain_url(self.settings, str(url), timeout)
        store, pause = store_of(url, self.settings), _SHORTEST_PAUSE
        while True:
            try:
                if save.is_committed() if save is not None else store.exists(url.key(metadata_object())):
                    return
                reason = "other hosts may still drain"
            except TransferError as error:
                reason = str(error)
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"{url} is not committed after {timeout:g} s: {reason}")
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    @property
    def checkpoint_id(self) -> str | None:
        """URL of this thread's save, or of the next one. None if there is none yet.

        >>> S3StorageWriter("s3://bucket/run/step-3000").checkpoint_id
        's3://bucket/run/step-3000'
        """
        url = self._here.url or self._url or (self._last.url if self._last is not None else None)
        return None if url is None else str(url)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this is an S3 URL, as text or as a path (which has only one slash left)."""
        return is_s3_url(checkpoint_id)

    # --- AsyncStager ----------------------------------------------------------------------------------

    def stage(self, state_dict: dict[str, Any]) -> Any:
        """A training-safe copy of the state, from a blocking `S3Stager` that all writers with these settings share.

        `dcp.async_save` calls this if it is given no ``async_stager``. The process keeps the buffers for its next save.
        """
        staged, self.staged = self.staged, None
        if staged is None:
            return shared_stager(self.settings.staging_limit, self.settings.spill_dir).stage(state_dict)
        if isinstance(staged, StagedState):
            wait_for_saves()
            AsyncSave().go_with(staged)
        return staged

    def synchronize_staging(self) -> None:
        """Return: the copy is complete when `stage` returns."""

    def close(self) -> None:
        """Return: threads end with each save, and connections belong to the process."""

    # --- internal -------------------------------------------------------------------------------------

    @property
    def _save(self) -> Save:
        save = self._here.save or self._last  # a framework may write in a different thread than it plans in
        if save is None:
            raise SaveProtocolError("there is no save under way: DCP calls set_up_storage_writer first")
        return save

    def _choose_url(self) -> CheckpointURL:
        """URL of this thread's next save, of which there must be one (InvalidURLError), and only one."""
        url = self._here.url or self._url
        if url is None:
            raise InvalidURLError(
                "S3StorageWriter has no URL. Remedy: S3StorageWriter('s3://bucket/prefix'), or pass "
                "checkpoint_id='s3://bucket/prefix' to dcp.save"
            )
        if self._here.url is None and self._had_others:
            raise SaveProtocolError(
                f"it is unclear which URL this asynchronous save is for: {url}, or one that the writer had before; "
                "nothing was written. Remedy: pass checkpoint_id=... to each dcp.async_save, or make a writer for each"
            )
        return url

    def _tell_failed(self, error: Exception, url: CheckpointURL | None = None) -> None:
        """This rank's save failed: tell subscribers, and the log if it is asynchronous: that to ``url``, or the one of
        this thread."""
        is_logged = url is not None
        if url is None:
            url = self._here.url or (self._last.url if self._last is not None else self._url)
            if (background := current_save()) is not None:
                background.error, background.if_unfinished, is_logged = error, None, True
        step = None if url is None else step_of(url.name)
        if is_logged and not self.caller_reports:
            logger.error(
                "the asynchronous save%s to %s failed on rank %d: %s: %s%s",
                "" if step is None else f" of step {step}", url, process.rank(), type(error).__name__, error,
                frames_of_others(error),
            )  # fmt: skip
        emit(SaveFailed(url=None if url is None else str(url), step=step, error=error), self.on_event)
