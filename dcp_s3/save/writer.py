"""S3StorageWriter: DCP's StorageWriter on S3."""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from dcp_s3 import process
from dcp_s3.checkpoint.attachments import make_attachment
from dcp_s3.checkpoint.commit import check_metrics
from dcp_s3.coordination.ownership import Replicas
from dcp_s3.coordination.processes import CountedSave
from dcp_s3.errors import CheckpointError, InvalidURLError, SaveProtocolError, SettingsError
from dcp_s3.events import Listener
from dcp_s3.failures import called_by_dcp
from dcp_s3.format.control_files import check_extra
from dcp_s3.format.layout import new_save_id
from dcp_s3.save.group import SaveGroup
from dcp_s3.save.joint import begin_joint_save
from dcp_s3.save.plan import OBJECTS_PER_RANK
from dcp_s3.save.save import Attached, Save, SaveOptions, StallSince, tell_failed, wait_committed
from dcp_s3.settings import Settings, SettingsLike, resolve_settings
from dcp_s3.stage.handover import current_save, raise_if_failed, wait_for_saves
from dcp_s3.stage.stager import shared_stager
from dcp_s3.torch_private import WriterTransforms
from dcp_s3.units import one_line
from dcp_s3.url import CheckpointURL, is_s3_url, parse_url

Separate = Sequence[str]


class _Here(threading.local):
    """The save of one thread: DCP makes all calls of a save in one thread."""

    url: CheckpointURL | None = None
    """URL of the next save."""
    save_id: str | None = None
    """Id of the next save; None if not chosen yet."""
    save: Save | None = None
    """The save under way, or the last one."""
    is_home: bool = False
    """Whether the writer was made in this thread."""

    def __reduce__(self) -> Any:
        return _Here, (), {"is_home": True}  # in another process, nothing has begun


class S3StorageWriter(StorageWriter, AsyncStager):
    """Writes checkpoints to S3. Pass it to `dcp.save` or `dcp.async_save` as ``storage_writer``.

    Nothing is visible before the commit at the end. If any rank fails, there is no new checkpoint, and an old one at
    the same URL stays whole.

    One writer may be used for several saves, if each is given its ``checkpoint_id``. A save keeps its URL, arguments
    and id from beginning to end, and waits for the asynchronous saves of this process before it.

    An asynchronous save that fails is logged by the rank that fails, since nobody may look at its future, if dcp_s3
    staged its state (as it does unless ``async_stager`` is somebody else's).

    >>> saved = dcp.save(state, storage_writer=S3StorageWriter("s3://bucket/run/step-3000", metrics={"val_loss": 1.75}))
    >>> latest("s3://bucket/run").metrics
    {'val_loss': 1.75}

    Args:
        url: ``s3://bucket/prefix`` of the checkpoint. Optional if each save passes ``checkpoint_id``.
        overwrite: replace a committed checkpoint at the URL. Otherwise CheckpointExistsError.
        metrics: user metrics (numbers, text, bools), stored beside the checkpoint.
        extra: whatever else belongs to the checkpoint: text, numbers, bools, None, lists and dicts of these, at most
            64 KiB as JSON. That of the first rank is stored. Read by `S3StorageReader.extra`.
        replicas: for saves without collectives: ranks that hold the same plain tensors and objects as this one, or a
            function of the FQN that returns them, also for shards that are no DTensors (these know). None: all ranks of
            the save. What nobody wrote for it is written later than the rest, and nothing twice.
        step: of its asynchronous saves without collectives, if the URL does not name one and is saved to again: tells
            them apart. A writer for each step, then.
        separate: beginnings of FQNs that get their own objects, for example ``["model.", "optimizer."]``. Everything
            else shares the remaining objects.
        split_replicated: whether ranks share the writing of a tensor chunk above 64 MiB that several of them hold (DDP,
            HSDP), each some of its rows, so that all write about the same bytes. Whatever has the same name and offset
            on several ranks must then have the same values on them. Not in saves without collectives. None: as the
            setting ``split_replicated`` says.
        max_objects: most objects that a rank writes, 1 or more, besides attachments; small states get fewer. None: 4.
        process_group: the group that is passed to `dcp.save`, which does not pass it on. None: the default group.
        settings: a `Settings`, or a mapping of settings that override the environment.
        on_event: called with each event of its saves on this rank, see `dcp_s3.events`. Not called in the process of an
            `AsyncCheckpointerType.PROCESS`.
        _extensions: torch's stream transforms (experimental), as for FileSystemWriter.

    Raises:
        InvalidURLError: ``url`` is not an S3 URL.
        SettingsError: a setting, in the environment or given here, or ``max_objects`` is not allowed.
        SaveProtocolError: a metric cannot be stored.
        SettingsError: something in ``extra`` cannot be stored.
    """

    caller_reports = False
    """Whether the caller logs asynchronous saves that fail."""
    stall_since: StallSince | None = None
    """How long a save has held the training up, if the caller knows better."""
    counted: CountedSave | None = None
    """The next save, which is one without collectives, if the caller has counted it (`count_save`)."""
    _was_sent = False
    """Whether this is a copy in another process, whose state was staged elsewhere."""

    def __init__(
        self,
        url: str | os.PathLike[str] | None = None,
        *,
        overwrite: bool = False,
        metrics: Mapping[str, Any] | None = None,
        extra: Mapping[str, Any] | None = None,
        separate: Separate | None = None,
        split_replicated: bool | None = None,
        max_objects: int | None = None,
        replicas: Replicas = None,
        step: int | None = None,
        process_group: dist.ProcessGroup | None = None,
        settings: SettingsLike = None,
        on_event: Listener | None = None,
        _extensions: Sequence[Any] | None = None,
    ) -> None:
        super().__init__()
        self.settings: Settings = resolve_settings(settings)
        self.on_event = on_event
        self.overwrite = overwrite
        self.metrics = dict(metrics or {})
        check_metrics(self.metrics)  # fail now, not at the end of a save
        self.extra = check_extra(extra)
        if isinstance(separate, str) or not all(isinstance(each, str) for each in separate or ()):
            raise SettingsError(f"separate = {separate!r}: expected a list of beginnings of FQNs, such as ['model.']")
        self.separate = list(separate or ())
        self.max_objects = OBJECTS_PER_RANK if max_objects is None else max_objects
        if not isinstance(self.max_objects, int) or self.max_objects < 1:
            raise SettingsError(f"max_objects = {self.max_objects!r}, expected a whole number above 0")
        self.split_replicated = self.settings.split_replicated if split_replicated is None else split_replicated
        self.replicas, self.step = replicas, step
        self._transforms = WriterTransforms(_extensions)
        self._url = None if url is None else parse_url(url)  # of saves that were given none
        self._unused = set() if self._url is None else {self._url}  # that no save has begun with
        self._here = _Here()
        self._here.is_home = True
        self._attached = Attached()
        self._last: Save | None = None
        self._group = SaveGroup(process_group)

    def __repr__(self) -> str:
        url = [] if self.checkpoint_id is None else [repr(self.checkpoint_id)]
        return one_line("S3StorageWriter", *url, overwrite=self.overwrite or None)

    @called_by_dcp
    def __getstate__(self) -> dict[str, Any]:
        # For AsyncCheckpointerType.PROCESS: from here on only DCP knows how the save ends, in the default group.
        return {**self.__dict__, "_last": None, "on_event": None, "_was_sent": True, "_group": SaveGroup(None)}

    # --- StorageWriter ------------------------------------------------------------------------------

    @called_by_dcp
    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new save, to ``checkpoint_id`` if given.

        In the thread that made the writer, ``checkpoint_id`` also becomes the URL of later saves without one. DCP
        passes that of an asynchronous save in another thread; there it is for that save alone.

        Raises:
            InvalidURLError: ``checkpoint_id`` is not an S3 URL.
        """
        self._here.save_id = None
        if checkpoint_id is None:
            return
        url = self._here.url = parse_url(checkpoint_id)
        if self._here.is_home:
            self._url = url
            self._unused.add(url)

    @called_by_dcp
    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Begin the save, on every rank, before planning.

        Raises:
            InvalidURLError: neither the writer nor the save has a URL.
            SaveProtocolError: several URLs are possible for this save.
        """
        wait_for_saves()  # before the ranks exchange anything, even failures
        here, save_id = self._here, self._next_id
        url = self._choose_url()
        self._unused.discard(url)
        if self.counted is None:
            self._group.check_there(url)
        use_collectives = bool(kwargs.get("use_collectives", True))
        rank = kwargs.get("rank")
        if rank is None:  # some frameworks that call this directly do not pass it
            rank = process.rank()
        background = current_save()
        if background is not None and use_collectives and not is_coordinator:
            background.if_unfinished = None  # the coordinator knows whether it is committed
        stall_since = self.stall_since
        if background is not None:
            stalled = background.stall_seconds  # known, as `stage` has returned; ``background`` may hold the whole save
            stall_since = stall_since or (lambda _: stalled)
        elif here.is_home and not self._was_sent:  # in another thread it may be a save that somebody else staged
            stall_since = stall_since or (lambda began: time.monotonic() - began)
        options = SaveOptions(
            self.settings, self.overwrite, dict(self.metrics), self.separate, self._transforms,
            self._attached.take(url), self.on_event, stall_since, self.max_objects, self.split_replicated,
            check_extra(self.extra),
        )  # fmt: skip
        if use_collectives:
            save = Save(url, save_id, options, rank=int(rank), is_coordinator=is_coordinator)
        else:
            if self.counted is None:
                self._group.check_rank(url, int(rank))
            save = begin_joint_save(
                url, save_id, options, self.replicas, counted=self.counted, step=self.step,
                in_lockstep=here.is_home and background is None and not self._was_sent,
            )  # fmt: skip
            self.counted = None
        here.url, here.save_id, here.save = url, None, save
        self._last = save
        save.begin()

    @called_by_dcp
    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Check the URL before any data is uploaded: on the coordinator, or on every rank without collectives.

        Raises:
            CheckpointExistsError, StagingError, StorageError
        """
        raise_if_failed(item.index.fqn for item in plan.items)
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

    @called_by_dcp
    def storage_meta(self) -> StorageMeta | None:
        """URL and id of the save under way in this thread, or of its next save; for DCP's logs and planners."""
        here = self._here
        if here.save is not None and here.save_id is None and not here.save.written:
            return here.save.storage_meta
        wait_for_saves()
        here.url = self._choose_url()
        if (background := current_save()) is not None:
            error = CheckpointError(
                "it was not committed: another rank failed, or something other than dcp_s3. Remedy: the future of "
                "dcp.async_save has the error",
                url=str(here.url),
            )
            background.if_unfinished = functools.partial(
                tell_failed, here.url, error, self.settings, self.on_event, logged=not self.caller_reports
            )
        return StorageMeta(checkpoint_id=str(here.url), save_id=self._next_id)

    def attach(
        self, name: str, data: bytes | bytearray | memoryview, *, checkpoint_id: str | os.PathLike[str] | None = None
    ) -> None:
        """Add a small file to the next save, on this rank: it is there when the checkpoint is, and goes with it.

        `S3StorageReader.attachment` reads it. It also lies at ``{checkpoint}/{name}``, for other tools. Ranks may
        attach the same bytes under one name; a file of one rank needs a name of its own.

        >>> writer = S3StorageWriter("s3://bucket/run/step-3000")
        >>> writer.attach("config.json", b'{"layers": 32}')
        >>> saved = dcp.save(state, storage_writer=writer)
        >>> S3StorageReader("s3://bucket/run/step-3000").attachments()
        ['config.json']

        Args:
            name: path relative to the checkpoint, at most 90 bytes of UTF-8, for example ``common.pt``.
            data: bytes of the file, at most 256 MiB. They are copied.
            checkpoint_id: URL of the save, where several overlap. None: the next one that begins.

        Raises:
            InvalidURLError: ``checkpoint_id`` is not an S3 URL.
            SaveProtocolError: the name cannot be one, other bytes are attached under it, or there is too much data.
        """
        url = None if checkpoint_id is None else parse_url(checkpoint_id)
        self._attached.add(url, make_attachment(name, data))

    def wait_committed(self, timeout: float | None = None) -> None:
        """Wait until the last save of this writer is committed on S3. Useful with ``DCP_S3_DURABILITY=local``.

        Every rank may call it. The last save is the one that began last, in any thread. A writer that has not written
        itself (after a restart, on a rank with nothing to write, or if another process does its saves) waits for any
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
        wait_committed(url, save, self.settings, timeout)

    @property
    def checkpoint_id(self) -> str | None:
        """URL of this thread's save, or of the next one. None if there is none yet.

        >>> S3StorageWriter("s3://bucket/run/step-3000").checkpoint_id
        's3://bucket/run/step-3000'
        """
        url = self._here.url or self._url or (self._last.url if self._last is not None else None)
        return None if url is None else str(url)

    def _tell_failed(self, error: Exception) -> None:
        """Tell subscribers to events that a save failed on this rank; in an asynchronous save also the log."""
        url = self._here.url or (self._last.url if self._last is not None else self._url)
        background = current_save()
        if background is None or background.tell(error):
            logged = background is not None and not self.caller_reports
            tell_failed(url, error, self.settings, self.on_event, logged=logged)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this is an S3 URL, as text or as a path (which has only one slash left)."""
        return is_s3_url(checkpoint_id)

    # --- AsyncStager ----------------------------------------------------------------------------------

    def stage(self, state_dict: dict[str, Any]) -> Any:
        """A training-safe copy of the state, from a blocking `S3Stager` that all writers with these settings share.

        `dcp.async_save` calls this if it is given no ``async_stager``. The process keeps the buffers for its next save.
        """
        return shared_stager(self.settings.staging_limit, self.settings.spill_dir).stage(state_dict)

    def synchronize_staging(self) -> None:
        """Return: the copy is complete when `stage` returns."""

    def close(self) -> None:
        """Nothing to release: threads end with each save, and connections belong to the process."""

    @property
    def _save(self) -> Save:
        save = self._here.save or self._last  # a framework may write in a different thread than it plans in
        if save is None:
            raise SaveProtocolError("there is no save under way: DCP calls set_up_storage_writer first")
        return save

    @property
    def _next_id(self) -> str:
        """Random id of the next save in this thread."""
        if self._here.save_id is None:
            self._here.save_id = new_save_id()
        return self._here.save_id

    def _choose_url(self) -> CheckpointURL:
        """URL of the next save in this thread. An InvalidURLError if there is none, a SaveProtocolError if several are
        possible."""
        url = self._here.url or self._url
        if url is None:
            raise InvalidURLError(
                "S3StorageWriter has no URL. Remedy: S3StorageWriter('s3://bucket/prefix'), or pass "
                "checkpoint_id='s3://bucket/prefix' to dcp.save"
            )
        if self._here.url is None and (candidates := self._unused - {url}):
            raise SaveProtocolError(
                "it is unclear which URL this asynchronous save is for: before it began the writer was given "
                f"{', '.join(sorted(str(each) for each in candidates | {url}))}; nothing was written. Remedy: "
                "pass checkpoint_id=... to each dcp.async_save, or make a writer for each"
            )
        return url
