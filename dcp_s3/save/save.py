"""One save, from its beginning to its commit."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult

from dcp_s3.checkpoint.attachments import Attachment, check_distinct
from dcp_s3.checkpoint.commit import Commit, make_commit
from dcp_s3.checkpoint.commit_state import Beginning, CommitState, SaveIdentity, find_state
from dcp_s3.checkpoint.info import find_step
from dcp_s3.errors import CheckpointError, SaveProtocolError, TransferError
from dcp_s3.events import Committed, Listener, SaveFailed, SaveStarted, Written, emit
from dcp_s3.failures import frames_of_others
from dcp_s3.format.control_files import ObjectEntry
from dcp_s3.format.layout import DCP_VERSION, metadata_object, new_nonce
from dcp_s3.limit import Deadline, Limit
from dcp_s3.process import collector_paused, world_size
from dcp_s3.process import rank as rank_of_job
from dcp_s3.s3.store import store_of
from dcp_s3.save.objects import ItemWriteResult, ObjectNames, write_buckets
from dcp_s3.save.plan import OBJECTS_PER_RANK, WriteBucket, check_shards, plan_buckets
from dcp_s3.save.split import LargeChunk, find_large, split_replicated, with_rows
from dcp_s3.settings import Settings
from dcp_s3.spill.saving import drain_url, open_for_save
from dcp_s3.store import Store
from dcp_s3.torch_private import WriterTransforms
from dcp_s3.url import CheckpointURL

logger = logging.getLogger(__name__)

_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.1, 2.0  # seconds between looks at S3

StallSince = Callable[[float], "float | None"]
"""Seconds for which a save that began at a time (of time.monotonic) has held the training up; None: not known."""


@dataclass(frozen=True)
class SaveOptions:
    """A writer's options for its saves: the arguments of `S3StorageWriter`."""

    settings: Settings
    overwrite: bool
    metrics: Mapping[str, Any]
    separate: Sequence[str]
    transforms: WriterTransforms
    attachments: Sequence[Attachment] = ()
    """Small files that belong to this save."""
    on_event: Listener | None = None
    stall_since: StallSince | None = None
    """None: not known, as for a save that was staged elsewhere."""
    max_objects: int = OBJECTS_PER_RANK
    """See `S3StorageWriter.max_objects`."""
    splits: bool = False
    """See `S3StorageWriter.split_replicated`."""
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __getstate__(self) -> dict[str, Any]:
        # Some frameworks save in a process of their own: who listens is here, and so was the staging.
        return {**self.__dict__, "on_event": None, "stall_since": None}


class Attached(dict[tuple["CheckpointURL | None", str], Attachment]):
    """What was attached to saves that have not begun, by their URL (None: the next one, whatever its URL) and its name.

    Saves begin in other threads: each change is one operation.
    """

    _copied: frozenset[CheckpointURL | None] = frozenset()
    """URLs whose attachments went to another process, too, which may have saved them by now."""

    def add(self, url: CheckpointURL | None, attachment: Attachment) -> None:
        """Attach a file. SaveProtocolError if there is another one of that name, with other bytes."""
        if url in self._copied:
            self._copied -= {url}
            self._pop(url)  # of a save that has gone
        if self.setdefault((url, attachment.name), attachment).data != attachment.data:
            raise SaveProtocolError(
                f"{attachment.name!r} is already attached to this save, with other bytes. Remedy: attach it once, or "
                "under another name"
            )

    def take(self, url: CheckpointURL) -> list[Attachment]:
        """What is attached to the save to ``url`` that begins now. It is not kept."""
        found = Attached()
        for attachment in [*self._pop(None), *self._pop(url)]:
            found.add(None, attachment)
        return list(found.values())

    def __reduce__(self) -> tuple[Any, ...]:
        """Hand over to a copy of the writer, which saves in another process. Of which save it is nobody knows, so what
        is attached to a URL stays here, too, until more is attached to it."""
        other = dict(self)
        self._pop(None)
        self._copied = frozenset(url for url, _ in self)
        return Attached, (other,)

    def _pop(self, url: CheckpointURL | None) -> list[Attachment]:
        return [self.pop(key) for key in list(self) if key[0] == url]


@dataclass
class _PlanOrigin:
    """Travels in a rank's plan to the coordinator, to show that the plan belongs to the coordinator's save."""

    url: str | None  # None once it was checked: DCP may pass the same object again, from its cache of plans
    rank: int
    large: tuple[LargeChunk, ...] = ()
    """What the rank can write a part of, whether or not the planner has left it to this rank."""


class _RankResults(list[WriteResult]):
    """What one rank wrote, and for which checkpoint. DCP passes it to the coordinator unchanged."""

    def __init__(self, url: str, results: Iterable[WriteResult], throttled: int = 0) -> None:
        super().__init__(results)
        self.url = url
        self.throttled = throttled
        """Requests of the rank that S3 throttled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.url, list(self), self.throttled)


class Save:
    """One rank's part in one save: the coordinator commits for all."""

    _spills = True

    def __init__(
        self,
        url: CheckpointURL,
        save_id: str,
        options: SaveOptions,
        *,
        rank: int,
        is_coordinator: bool,
    ) -> None:
        self.url, self.save_id = url, save_id
        self.written = False
        """Whether all of this rank's data is written."""
        self._options, self._settings = options, options.settings
        self._rank, self._is_coordinator = rank, is_coordinator
        self._world_size = world_size()  # now: data may be written in a process that has no process group
        self._identity = SaveIdentity(url, save_id)
        self._beginning, self._began = Beginning(), time.monotonic()
        self._s3 = store_of(url, self._settings)
        self._base_store, self._committer = open_for_save(
            self._s3, self._identity, self._beginning, rank=rank, overwrite=options.overwrite, spills=self._spills,
            on_event=options.on_event,
        )  # fmt: skip
        self.step = find_step(url.name, self._settings)
        self._throttled_before = self._s3.counters().throttled
        self._an_object: str | None = None  # path of an object that this rank wrote
        self._deadline: Deadline | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_throttled_before": 0}  # another process counts anew

    # --- in the order of DCP's calls ----------------------------------------------------------------

    def begin(self) -> None:
        """Tell subscribers, and drain what an earlier process left on the disk."""
        emit(SaveStarted(url=str(self.url), step=self.step, rank=self._rank), self._options.on_event)
        self._committer.begin()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Check the URL, and mark the plan with this save's URL."""
        if self._is_coordinator:
            self._committer.check_url(self._store())
        large = find_large(plan.items) if self._options.splits else ()
        return dataclasses.replace(plan, storage_data=_PlanOrigin(str(self.url), self._rank, large))

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Check that all plans are of this save, and their shards of the same tensors; with `splits`, cut what several
        ranks hold. Nothing else needs coordination: names are unique."""
        check_shards(plans, filled=world_size() == 1)
        for plan in plans:
            origin = plan.storage_data
            if isinstance(origin, _PlanOrigin) and origin.url is not None:
                self._check_same_save(origin.url, origin.rank)
                origin.url = None
        if self._options.splits:
            held = [each.large if isinstance(each := plan.storage_data, _PlanOrigin) else () for plan in plans]
            for plan, items in zip(plans, split_replicated(plans, held), strict=True):
                # In place: if torch caches plans it has cached these, and compares the next ones with what ranks write.
                plan.items[:] = items
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        """Upload this rank's items. Returns when all objects are complete, or raises and leaves nothing open."""
        self._deadline, began = self._start_deadline(), time.monotonic()
        buckets = plan_buckets(
            plan.items,
            max_buckets=self._options.max_objects,
            min_bucket_size=self._settings.max_part_size,
            separate=self._options.separate,
        )
        buckets += [WriteBucket((), len(each.data), each) for each in self._options.attachments]
        # Not in the plan: a planner may reuse a cached plan.
        names = ObjectNames(self.url, self._rank, new_nonce())
        results = write_buckets(
            self._store(), buckets, planner, self._options.transforms, names, ranks=self._world_size
        )
        self._tell_written(results, time.monotonic() - began)
        return _RankResults(str(self.url), results, self.throttled)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit what all ranks have written."""
        self._deadline = self._deadline or self._start_deadline()
        for rank, written in enumerate(results):
            if isinstance(written, _RankResults):
                self._check_same_save(written.url, rank)
        with collector_paused():
            all_results = [result for rank in results for result in rank]
            objects, spilled = _objects_of(all_results)
            check_distinct(objects)
            metadata.version = DCP_VERSION
            metadata.storage_data = {
                result.index: result.storage_data for result in all_results if result.storage_data is not None
            }
            metadata.storage_meta = self.storage_meta
            metadata.state_dict_metadata = _with_rows(metadata.state_dict_metadata, all_results)
            self._check_complete(metadata)
            commit = make_commit(
                self._identity,
                # A copy: with plan caching, the next save gets this very object while it is being pickled.
                dataclasses.replace(metadata),
                objects,
                step=self.step,
                world_size=len(results),
                metrics=self._options.metrics,
                extra=self._options.extra,
                started_at=self._beginning.at,
            )
        if self._committer.commit(self._store(), commit, spilled=bool(spilled)):
            throttled = sum(rank.throttled for rank in results if isinstance(rank, _RankResults))
            self._tell_committed(commit, ranks=len(results), spilled=sum(spilled), throttled=throttled)

    # --- what it tells --------------------------------------------------------------------------------

    @property
    def storage_meta(self) -> StorageMeta:
        """URL and save id, for DCP's logs and for ``.metadata``."""
        return StorageMeta(checkpoint_id=str(self.url), save_id=self.save_id)

    @property
    def throttled(self) -> int:
        """Requests of this process to the bucket that S3 has throttled since the save began."""
        return max(0, self._s3.counters().throttled - self._throttled_before)

    def is_committed(self) -> bool:
        """Whether the save is committed on S3. For a rank that wrote nothing: whether any checkpoint is there.

        Raises:
            CheckpointError: a save that began later has replaced it.
            StorageError: S3 refuses the request.
        """
        if self._an_object is None:
            return self._s3.exists(self._identity.metadata_key)
        state = find_state(self._s3, self._identity, path=self._an_object, started_at=self._beginning.at)
        if state is CommitState.REPLACED:
            raise CheckpointError(
                f"{self.url} holds a checkpoint that began later: this save was replaced", url=str(self.url)
            )
        return state is CommitState.COMMITTED

    def _tell_written(self, results: Sequence[WriteResult], seconds: float) -> None:
        """This rank's objects are complete; they took so many seconds."""
        self.written = True
        objects, spilled = _objects_of(results)
        self._an_object = objects[0].path if objects else None
        event = Written(
            url=str(self.url), step=self.step, rank=self._rank, bytes=sum(each.size for each in objects),
            objects=len(objects), spilled_bytes=sum(spilled), seconds=seconds,
        )  # fmt: skip
        emit(event, self._options.on_event)

    def _tell_committed(self, commit: Commit, *, ranks: int, spilled: int, throttled: int) -> None:
        """The checkpoint is committed; ``spilled`` bytes and ``throttled`` requests are those of all ranks."""
        stall_since = self._options.stall_since
        event = Committed(
            url=str(self.url), step=self.step, bytes=sum(entry.size for entry in commit.objects),
            objects=len(commit.objects), ranks=ranks, seconds=time.monotonic() - self._began,
            stall_seconds=None if stall_since is None else stall_since(self._began), throttled=throttled,
            spilled_bytes=spilled,
        )  # fmt: skip
        logger.info("%s", event)
        emit(event, self._options.on_event)

    # --- internal -----------------------------------------------------------------------------------

    def _check_same_save(self, url: str, rank: int) -> None:
        if url != str(self.url):
            raise SaveProtocolError(
                f"two saves overlapped: rank {rank} saves to {url}, this rank to {self.url}; neither was committed. "
                "Remedy: begin saves in the same order on every rank, or give each overlapping save its own process "
                "group (process_group=dist.new_group(backend='gloo'))"
            )

    def _check_complete(self, metadata: Metadata) -> None:
        """Check that all that was planned was written. If a save fails after torch has cached its global plan, later
        saves of that state may take the ranks' plans of an earlier one."""
        written = {(index.fqn, index.offset) for index in metadata.storage_data or {}}
        for fqn, saved in metadata.state_dict_metadata.items():
            places: list[Any] = [None]
            if isinstance(saved, TensorStorageMetadata):
                places = [chunk.offsets for chunk in saved.chunks if 0 not in chunk.sizes]
            if (fqn, None) not in written and not all((fqn, place) in written for place in places):
                raise SaveProtocolError(
                    f"{self.url} is not committed: {fqn!r} was planned, and no rank has written all of it. Remedy: "
                    "save with a planner that does not cache plans, or start the processes anew"
                )

    def _store(self) -> Store:
        return self._base_store.within(Limit(deadline=self._deadline).within(self._settings.save_timeout))

    def _start_deadline(self) -> Deadline | None:
        return Deadline.start("DCP_S3_SAVE_TIMEOUT", self._settings.save_timeout)


def _with_rows(entries: dict[str, Any], results: Sequence[WriteResult]) -> dict[str, Any]:
    """The metadata of all entries of a state, once tensors are cut."""
    rows: dict[str, list[ChunkStorageMetadata]] = {}
    for result in results:
        if isinstance(result, ItemWriteResult) and result.rows is not None:
            rows.setdefault(result.index.fqn, []).append(result.rows)
    return {**entries, **{fqn: with_rows(fqn, entries[fqn], chunks) for fqn, chunks in rows.items()}}


def _objects_of(results: Sequence[WriteResult]) -> tuple[list[ObjectEntry], list[int]]:
    """The objects that were written, and the sizes in bytes of those that went to a spill directory."""
    written = [(each.object_entry, each.spilled) for each in results if isinstance(each, ItemWriteResult)]
    entries = [(entry, spilled) for entry, spilled in written if entry is not None]
    return [entry for entry, _ in entries], [entry.size for entry, spilled in entries if spilled]


def wait_committed(url: CheckpointURL, save: Save | None, settings: Settings, timeout: float | None) -> None:
    """Wait until ``save`` is committed on S3; if it is None, until any checkpoint is there.

    Raises:
        TimeoutError: the save is not committed within ``timeout`` seconds; the drain goes on.
        CheckpointError: the save cannot be committed, or another save has replaced it.
        StorageError: S3 refuses the request.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    drain_url(settings, str(url), timeout)
    store, pause = store_of(url, settings), _SHORTEST_PAUSE
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


def tell_failed(
    url: CheckpointURL | None, error: Exception, settings: Settings, on_event: Listener | None, *, logged: bool
) -> None:
    """Tell subscribers to events that a save failed on this rank; with ``logged`` also the log."""
    step = None if url is None else find_step(url.name, settings)
    if logged:
        logger.error(
            "the asynchronous save%s to %s failed on rank %d: %s: %s%s",
            "" if step is None else f" of step {step}", url, rank_of_job(), type(error).__name__, error,
            frames_of_others(error),
        )  # fmt: skip
    emit(SaveFailed(url=None if url is None else str(url), step=step, error=error), on_event)
