"""One save, from its beginning to its commit."""

from __future__ import annotations

import dataclasses
import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from dcp_s3.checkpoint.attachments import Attachment
from dcp_s3.checkpoint.commit import Beginning, Committer, make_commit
from dcp_s3.checkpoint.commit_state import CommitState, SaveIdentity, find_state
from dcp_s3.errors import CheckpointError, SaveProtocolError
from dcp_s3.events import Committed, Listener, Written, emit
from dcp_s3.format.control_files import ObjectEntry, check_distinct
from dcp_s3.format.layout import DCP_VERSION, metadata_object, step_of
from dcp_s3.limit import Deadline, Limit
from dcp_s3.process import collector_paused, world_size
from dcp_s3.s3.multipart import can_copy
from dcp_s3.s3.store import store_of
from dcp_s3.save.incremental import find_unchanged, plan_changes, recall, remember
from dcp_s3.save.objects import ItemWriteResult, write_buckets
from dcp_s3.save.plan import OBJECTS_PER_RANK, WriteBucket, check_shards, plan_buckets
from dcp_s3.save.split import LargeChunk, find_large, split_replicated, with_rows
from dcp_s3.settings import Settings
from dcp_s3.spill.saving import SpillingCommitter, SpillingStore
from dcp_s3.spill.store import open_store
from dcp_s3.store import Batch, Store
from dcp_s3.url import CheckpointURL

logger = logging.getLogger(__name__)


@dataclass
class _PlanOrigin:
    """Shows the coordinator that a rank's plan, in which it travels, belongs to its save."""

    url: str | None  # None once it was checked: DCP may pass the same object again, from its cache of plans
    rank: int
    large: tuple[LargeChunk, ...] = ()
    """What the rank can write a part of, whether or not the planner has left it to this rank."""


class _RankResults(list[WriteResult]):
    """What one rank wrote, and for which checkpoint. DCP passes it to the coordinator unchanged."""

    url = ""
    throttled = 0
    """Requests of the rank that S3 throttled."""


@dataclass(eq=False)
class Save:
    """One rank's part in one save: the coordinator commits for all."""

    url: CheckpointURL
    save_id: str
    settings: Settings
    rank: int = 0
    is_coordinator: bool = True
    # What `S3StorageWriter` documents, as it was when the save began.
    overwrite: bool = False
    metrics: Mapping[str, Any] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    attachments: Sequence[Attachment] = ()
    """Small files of this rank that belong to the save."""
    max_objects: int = OBJECTS_PER_RANK
    on_event: Listener | None = None
    is_blocking: bool = False
    """Whether the training waits for the save."""
    stall_seconds: float | None = None
    """For which the training has waited if it does not any more; None: not known, as if somebody else staged."""

    spills: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self.world_size = world_size()  # now: data may be written in a process that has no process group
        self._beginning, self._began = Beginning(), time.monotonic()
        self._s3 = store_of(self.url, self.settings)
        self._identity = SaveIdentity(self.url, self.save_id)
        disk = open_store(self.settings) if self.spills and self.settings.spill_dir is not None else None
        store: Store = self._s3
        if disk is None:
            self._committer = Committer(self._identity, self._beginning, self.overwrite)
        else:
            identity, listener = self._identity, self.on_event
            store = SpillingStore(self._s3, disk, str(self.url), self.save_id, self.rank, listener)
            self._committer = SpillingCommitter(store, identity, self._beginning, overwrite=self.overwrite)
        self.step = step_of(self.url.prefix)
        self._store = store.within(Limit(hang=self.settings.save_timeout))
        self._throttled_before = self._s3.counters().throttled
        self.throttled = 0
        """Requests of this process to the bucket that S3 throttled from the beginning until this rank had written."""
        self._an_object: str | None = None  # path of an object that this rank wrote

    def __getstate__(self) -> dict[str, Any]:
        # Some frameworks write in a process of their own. Who listens is in this one, and that one counts anew.
        return {**self.__dict__, "on_event": None, "_throttled_before": 0}

    # --- in the order of DCP's calls ----------------------------------------------------------------

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Check the URL, and mark the plan with this save's URL."""
        if self.is_coordinator:
            self._committer.check_url(self._store)
        large = find_large(plan.items) if self.settings.split_replicated else ()
        return dataclasses.replace(plan, storage_data=_PlanOrigin(str(self.url), self.rank, large))

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Check that all plans are of this save, and their shards of the same tensors; with ``split_replicated``, cut
        what several ranks hold. Nothing else needs coordination: names are unique."""
        check_shards(plans, filled=self.world_size == 1)
        for plan in plans:
            origin = plan.storage_data
            if isinstance(origin, _PlanOrigin) and origin.url is not None:
                self._check_same_save(origin.url, origin.rank)
                origin.url = None
        if self.settings.split_replicated:
            held = [each.large if isinstance(each := plan.storage_data, _PlanOrigin) else () for plan in plans]
            for plan, items in zip(plans, split_replicated(plans, held), strict=True):
                # In place: if torch caches plans it has cached these, and compares the next ones with what ranks write.
                plan.items[:] = items
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        """Upload this rank's items. Returns when all objects are complete, or raises and leaves nothing open."""
        self._start_deadline()
        began = time.monotonic()
        # The nonce is not in the plan: a planner may reuse a cached plan.
        results = _RankResults(self._write_items(plan.items, planner, secrets.token_hex(8)))
        self._tell_written(results, time.monotonic() - began)
        results.url, results.throttled = str(self.url), self.throttled
        return results

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit what all ranks have written."""
        self._start_deadline(self._store.limit.deadline)
        throttled = 0
        for rank, written in enumerate(results):
            if isinstance(written, _RankResults):
                self._check_same_save(written.url, rank)
                throttled += written.throttled
        with collector_paused():
            everything = [result for rank in results for result in rank]
            objects, spilled, copied = objects_of(everything)
            check_distinct(objects)
            metadata.version = DCP_VERSION
            metadata.storage_meta = StorageMeta(checkpoint_id=str(self.url), save_id=self.save_id)
            stored = {each.index: each.storage_data for each in everything if each.storage_data is not None}
            metadata.storage_data = stored
            parts = [each for each in everything if isinstance(each, ItemWriteResult) and each.rows is not None]
            if parts:
                rows = [(each.index.fqn, each.rows) for each in parts]
                metadata.state_dict_metadata = with_rows(metadata.state_dict_metadata, rows)
            # If a save fails after torch has cached its global plan, later saves of that state may take the ranks'
            # plans of an earlier one: then not all that was planned was written.
            done = {(index.fqn, index.offset) for index in stored}
            for fqn, saved in metadata.state_dict_metadata.items():
                places: list[Any] = [None]
                if isinstance(saved, TensorStorageMetadata):
                    places = [chunk.offsets for chunk in saved.chunks if 0 not in chunk.sizes]
                if (fqn, None) not in done and not all((fqn, place) in done for place in places):
                    raise SaveProtocolError(
                        f"{self.url} is not committed: {fqn!r} was planned, and no rank has written all of it. Remedy: "
                        "save with a planner that does not cache plans, or start the processes anew"
                    )
            commit = make_commit(
                self._identity,
                # A copy: with plan caching, the next save gets this very object while it is being pickled.
                dataclasses.replace(metadata),
                objects, step=self.step, world_size=len(results), metrics=self.metrics, extra=self.extra,
                started_at=self._beginning.at,
            )  # fmt: skip
        if self._committer.commit(self._store, commit, spilled=bool(spilled)):
            self._tell_committed(objects, ranks=len(results), spilled=spilled, copied=copied, throttled=throttled)

    # --- what it tells --------------------------------------------------------------------------------

    def is_committed(self) -> bool:
        """Whether the save is committed on S3; for a rank that wrote nothing, whether any checkpoint is there. A
        CheckpointError if a save that began later has replaced it."""
        if self._an_object is None:
            return self._s3.exists(self.url.key(metadata_object()))
        state = find_state(self._s3, self._identity, path=self._an_object, started_at=self._beginning.at)
        if state is CommitState.REPLACED:
            raise CheckpointError(
                f"{self.url} holds a checkpoint that began later: this save was replaced", url=str(self.url)
            )
        return state is CommitState.COMMITTED

    def _tell_written(self, results: Sequence[WriteResult], seconds: float) -> None:
        """This rank's objects are complete; they took so many seconds."""
        objects, spilled, copied = objects_of(results)
        self._an_object = objects[0].path if objects else None
        self.throttled = max(0, self._s3.counters().throttled - self._throttled_before)
        event = Written(
            url=str(self.url), step=self.step, rank=self.rank, bytes=sum(each.size for each in objects),
            objects=len(objects), spilled_bytes=spilled, copied_bytes=copied, seconds=seconds,
        )  # fmt: skip
        emit(event, self.on_event)

    def _tell_committed(
        self, objects: Sequence[ObjectEntry], *, ranks: int, spilled: int, copied: int | None, throttled: int
    ) -> None:
        """The checkpoint is committed; ``spilled`` and ``copied`` bytes and ``throttled`` requests are those of all
        ranks."""
        seconds, stalled = time.monotonic() - self._began, self.stall_seconds
        stalled = seconds if stalled is None and self.is_blocking else stalled
        event = Committed(
            url=str(self.url), step=self.step, bytes=sum(entry.size for entry in objects), objects=len(objects),
            ranks=ranks, seconds=seconds, stall_seconds=stalled, throttled=throttled, spilled_bytes=spilled,
            copied_bytes=copied,
        )  # fmt: skip
        logger.info("%s", event)
        emit(event, self.on_event)

    # --- internal -----------------------------------------------------------------------------------

    def _check_same_save(self, url: str, rank: int) -> None:
        if url != str(self.url):
            raise SaveProtocolError(
                f"two saves overlapped: rank {rank} saves to {url}, this rank to {self.url}; neither was committed. "
                "Remedy: begin saves in the same order on every rank, or give each overlapping save its own process "
                "group (process_group=dist.new_group(backend='gloo'))"
            )

    def _write_items(
        self,
        items: Sequence[WriteItem],
        planner: SavePlanner,
        nonce: str,
        *,
        again: bool = False,
        watch: Callable[[Batch], object] = lambda _: None,
    ) -> list[WriteResult]:
        """Write items, and the attachments. ``again``: these are more, which others were to write."""
        sizes: dict[str, int] = {"max_buckets": self.max_objects, "min_bucket_size": self.settings.max_part_size}
        remembers = self.settings.incremental and can_copy(self._s3)
        if remembers and not again and (saved := recall(self.url, self.rank)):
            buckets = plan_changes(items, find_unchanged(items, saved, planner), saved, **sizes)
        else:
            buckets = plan_buckets(items, **sizes)
        if not again:
            buckets += [WriteBucket((), len(each.data), each) for each in self.attachments]
        results = write_buckets(
            self._store, buckets, planner, url=self.url, rank=self.rank, nonce=nonce, ranks=self.world_size,
            watch=watch,
        )  # fmt: skip
        if remembers:
            remember(self.url, self.rank, items, results, more=again)
        return results

    def _start_deadline(self, begun: Deadline | None = None) -> None:
        """Bound what follows; anew in each step, as a disk that took nothing means that S3 may be slow from then on."""
        if begun is None and (seconds := self.settings.save_timeout) is not None:
            begun = Deadline("DCP_S3_SAVE_TIMEOUT", seconds, time.monotonic() + seconds)
        self._store = self._store.within(Limit(deadline=begun, hang=self.settings.save_timeout))


def objects_of(results: Sequence[WriteResult]) -> tuple[list[ObjectEntry], int, int]:
    """The objects that were written, the bytes of those in a spill directory, and the bytes that S3 copied."""
    written = [(each, each.object_entry) for each in results if isinstance(each, ItemWriteResult)]
    entries = [(each, entry) for each, entry in written if entry is not None]
    spilled = sum(entry.size for each, entry in entries if each.spilled)
    return [entry for _, entry in entries], spilled, sum(entry.size for each, entry in entries if each.copied)
