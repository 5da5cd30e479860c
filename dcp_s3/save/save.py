"""One save, from its beginning to its commit."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult

from dcp_s3.checkpoint.attachments import Attachment, check_distinct
from dcp_s3.checkpoint.commit import Commit, make_commit, publish
from dcp_s3.checkpoint.commit_state import (
    Beginning,
    CommitState,
    Previous,
    SaveIdentity,
    check_absent,
    check_newest,
    find_previous,
    find_state,
    is_committed,
)
from dcp_s3.checkpoint.info import find_step
from dcp_s3.collector import collector_paused
from dcp_s3.errors import (
    CheckpointError,
    CheckpointExistsError,
    DeadlineExceededError,
    SaveProtocolError,
    SpillError,
    TransferError,
)
from dcp_s3.events import Listener
from dcp_s3.format.layout import DCP_VERSION, metadata_object, new_nonce
from dcp_s3.limit import Deadline, Limit
from dcp_s3.ranks import world_size
from dcp_s3.s3.store import S3Store
from dcp_s3.save.objects import ItemWriteResult, ObjectNames, refused_by_both, write_buckets
from dcp_s3.save.plan import OBJECTS_PER_RANK, WriteBucket, check_filled, plan_buckets
from dcp_s3.save.progress import Progress, StallSince, spilled_bytes, unknown_stall
from dcp_s3.settings import Settings, launch
from dcp_s3.spill.background import drain_in_background, wait_until_drained
from dcp_s3.spill.drain import commit_if_complete
from dcp_s3.spill.session import SpillSession, spill_commit
from dcp_s3.spill.store import SpillStore
from dcp_s3.torch_private import WriterTransforms
from dcp_s3.tracebacks import without_tracebacks
from dcp_s3.url import CheckpointURL

logger = logging.getLogger(__name__)

_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.1, 2.0  # seconds between looks at S3


@dataclass(frozen=True)
class SaveOptions:
    """A writer's options for its saves: the arguments of `S3StorageWriter`."""

    settings: Settings
    spill_store: SpillStore | None
    overwrite: bool
    metrics: Mapping[str, Any]
    separate: Sequence[Sequence[str]]
    transforms: WriterTransforms
    attachments: Sequence[Attachment] = ()
    """Small files that belong to this save."""
    on_event: Listener | None = None
    stall_since: StallSince = unknown_stall
    max_objects: int = OBJECTS_PER_RANK
    """See `S3StorageWriter.max_objects`."""

    def __getstate__(self) -> dict[str, Any]:
        # Some frameworks save in a process of their own: who listens is here, and so was the staging.
        return {**self.__dict__, "on_event": None, "stall_since": unknown_stall}

    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class _PlanOrigin:
    """Travels in a rank's plan to the coordinator, to show that the plan belongs to the coordinator's save."""

    url: str | None  # None once it was checked: DCP may pass the same object again, from its cache of plans
    rank: int


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
    """One rank's part in one save: the coordinator commits for all; without collectives each rank for itself."""

    def __init__(
        self,
        url: CheckpointURL,
        save_id: str,
        options: SaveOptions,
        *,
        rank: int,
        is_coordinator: bool,
        use_collectives: bool,
    ) -> None:
        self.url, self.save_id = url, save_id
        self.written = False
        """Whether all of this rank's data is written."""
        self._options, self._settings, self._spill_store = options, options.settings, options.spill_store
        self._rank, self._is_coordinator, self._use_collectives = rank, is_coordinator, use_collectives
        self._world_size = world_size()  # now: data may be written in a process that has no process group
        self._identity = SaveIdentity(url, save_id, None if use_collectives else rank)
        self._overwrite = options.overwrite and use_collectives
        self._previous = Previous()
        self._unseen = False
        self._without_disk = False  # the disk takes nothing: S3 may be slow
        self._beginning = Beginning()
        self._an_object: str | None = None  # path of an object that this rank wrote
        self._deadline: Deadline | None = None

    @property
    def storage_meta(self) -> StorageMeta:
        """URL and save id, for DCP's logs and for ``.metadata``."""
        return StorageMeta(checkpoint_id=str(self.url), save_id=self.save_id)

    # --- in the order of DCP's calls ----------------------------------------------------------------

    def begin(self) -> None:
        """Say so, and start to drain what an earlier process left on the local disk."""
        step = find_step(self.url.name, self._settings)
        self._progress = Progress(
            self.url, step, self._rank, self._store(), self._options.on_event, self._options.stall_since
        )
        self._drain()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Check the URL, and mark the plan with this save's URL."""
        if self._is_coordinator or not self._use_collectives:
            try:
                if self._overwrite:
                    self._previous = find_previous(self._store(), self._identity)
                else:
                    self._check_none_waits()
                    check_absent(self._store(), self._identity)
            except TransferError as error:
                if self._spill_store is None:
                    raise
                logger.warning("whether %s is free is checked at its commit: %s", self.url, error)
                self._unseen = True
        return dataclasses.replace(plan, storage_data=_PlanOrigin(str(self.url), self._rank))

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Check that all plans are of this save. Nothing else needs coordination: names are unique."""
        if self._use_collectives and world_size() == 1 < launch().world_size:
            check_filled(plans)
        for plan in plans:
            origin = plan.storage_data
            if isinstance(origin, _PlanOrigin) and origin.url is not None:
                self._check_same_save(origin.url, origin.rank)
                origin.url = None
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
        with self._spill_session(names, len(buckets)) as session:
            results = write_buckets(
                self._store(), buckets, planner, self._options.transforms, names, session, ranks=self._world_size
            )
        if session is not None and session.sealed:
            self._drain()
        self._an_object = names.relative_path(0) if buckets else None
        self.written = True
        self._progress.written(results, time.monotonic() - began)
        return _RankResults(str(self.url), results, self._progress.throttled)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit what all ranks have written; without collectives, what this rank has written."""
        self._deadline = self._deadline or self._start_deadline()
        for rank, written in enumerate(results):
            if isinstance(written, _RankResults):
                self._check_same_save(written.url, rank)
        with collector_paused():
            all_results = [result for rank in results for result in rank]
            ours = [result for result in all_results if isinstance(result, ItemWriteResult)]
            metadata.version = DCP_VERSION
            metadata.storage_data = {
                result.index: result.storage_data for result in all_results if result.storage_data is not None
            }
            metadata.storage_meta = self.storage_meta
            objects = [result.object_entry for result in ours if result.object_entry is not None]
            check_distinct(objects)
            commit = make_commit(
                self._identity,
                # A copy: with plan caching, the next save gets this very object while it is being pickled.
                dataclasses.replace(metadata),
                objects,
                step=self._progress.step,
                world_size=len(results) if self._use_collectives else self._world_size,
                metrics=self._options.metrics,
                extra=self._options.extra,
                started_at=self._beginning.at,
            )
        if self._commit(commit, spilled=any(result.spilled for result in ours)):
            self._progress.committed(
                commit,
                ranks=len(results) if self._use_collectives else 1,
                spilled=spilled_bytes(ours),
                throttled=sum(rank.throttled for rank in results if isinstance(rank, _RankResults)),
            )

    # --- after the save -----------------------------------------------------------------------------

    def is_committed(self) -> bool:
        """Whether the save is committed on S3. For a rank that wrote nothing: whether any checkpoint is there.

        Raises:
            CheckpointError: a save that began later has replaced it.
            StorageError: S3 refuses the request.
        """
        store = S3Store(self.url.bucket, self._settings)
        if self._an_object is None:
            return store.exists(self._identity.metadata_key)
        state = find_state(store, self._identity, path=self._an_object, started_at=self._beginning.at)
        if state is CommitState.REPLACED:
            raise CheckpointError(
                f"{self.url} holds a checkpoint that began later: this save was replaced", url=str(self.url)
            )
        return state is CommitState.COMMITTED

    # --- internal -----------------------------------------------------------------------------------

    def _check_same_save(self, url: str, rank: int) -> None:
        if url != str(self.url):
            raise SaveProtocolError(
                f"two saves overlapped: rank {rank} saves to {url}, this rank to {self.url}; neither was committed. "
                "Remedy: begin saves in the same order on every rank, or give each overlapping save its own process "
                "group (process_group=dist.new_group(backend='gloo'))"
            )

    def _store(self) -> S3Store:
        # What S3 does not take goes to disk: find out soon.
        patience = None if self._spill_store is None or self._without_disk else self._settings.spill_after
        limit = Limit(deadline=self._deadline, patience=patience).within(patience, self._settings.save_timeout)
        return S3Store(self.url.bucket, self._settings, limit)

    def _start_deadline(self) -> Deadline | None:
        return Deadline.start("DCP_S3_SAVE_TIMEOUT", self._settings.save_timeout)

    @contextlib.contextmanager
    def _spill_session(self, names: ObjectNames, count: int) -> Iterator[SpillSession | None]:
        if self._spill_store is None:
            yield None
            return
        session = SpillSession(
            self._spill_store,
            url=str(self.url),
            save_id=self.save_id,
            rank=self._rank,
            settings=self._settings,
            keys=[names.key(number) for number in range(count)],
            on_event=self._options.on_event,
        )
        try:
            session.__enter__()
        except SpillError as error:
            logger.warning("this save cannot spill: %s", error)
            self._without_disk = True
            try:
                yield None
            except TransferError as refusal:
                raise refused_by_both(refusal, error) from refusal
            return
        with contextlib.ExitStack() as stack:
            stack.push(session)
            yield session

    def _check_none_waits(self) -> None:
        """Refuse to save to a URL where the commit of an earlier save waits for S3."""
        identity = self._identity
        for save in self._spill_store.scan() if self._spill_store is not None else ():
            commit = save.journal.commit
            if commit is not None and save.journal.url == str(identity.url) and commit.rank == identity.rank:
                raise CheckpointExistsError(
                    f"a checkpoint for {identity.url} waits in {save.path} to be committed; it is untouched. Remedy: "
                    "save to another URL, or pass overwrite=True to replace it",
                    url=str(identity.url),
                )

    def _drain(self) -> None:
        if self._spill_store is not None:
            drain_in_background(self._spill_store, patience=self._settings.spill_after)

    def _commit(self, commit: Commit, *, spilled: bool) -> bool:
        """Commit on S3 at once if all objects are there, and return True; otherwise leave the commit to the drain."""
        if self._spill_store is None:
            if spilled:
                raise SpillError(
                    f"{commit.identity.url} cannot be committed: objects of it wait in the spill directory of another "
                    "rank, but this rank, which would commit them once they are on S3, has no spill directory. "
                    "Remedy: set DCP_S3_SPILL_DIR on every rank"
                )
            self._publish(commit)
            return True
        if not spilled and not self._unseen:
            try:
                self._publish(commit)
            except TransferError as error:
                logger.warning("the commit of %s waits for S3: %s", commit.identity.url, error)
                without_tracebacks(error)
            else:
                return True
        try:
            save = spill_commit(
                self._spill_store, commit, self._settings, created_at=self._beginning.at, overwrite=self._overwrite
            )
        except SpillError as error:
            self._commit_without_disk(commit, error)
            return True
        self._drain()
        if self._settings.durability == "s3":
            deadline = self._deadline
            try:
                wait_until_drained(self._spill_store, save, timeout=None if deadline is None else deadline.left)
            except TimeoutError as error:
                if deadline is None:
                    raise
                raise deadline.error(
                    f"the save to {commit.identity.url}",
                    f"it is complete on local disks ({self._settings.spill_dir}), from where it still goes to S3",
                ) from error
        return False

    def _commit_without_disk(self, commit: Commit, error: SpillError) -> None:
        """Commit when the objects that wait on local disks are on S3, from memory: the disk did not take the commit."""
        logger.warning("the commit of %s waits for S3 in memory: %s", commit.identity.url, error)
        self._without_disk = True
        self._drain()
        store, spill_store, created_at = self._store(), self._spill_store, self._beginning.at
        assert spill_store is not None  # noqa: S101 - it was the disk that refused
        try:
            while not is_committed(store, commit.identity) and (
                reason := commit_if_complete(
                    store, spill_store, commit, created_at=created_at, overwrite=self._overwrite
                )
            ):
                if self._deadline is not None and self._deadline.passed:
                    raise self._deadline.error(f"the save to {commit.identity.url}", reason)
                time.sleep(1)
        except TransferError as refusal:
            raise refused_by_both(refusal, error) from refusal

    def _publish(self, commit: Commit) -> None:
        look_again = self._look_again if self._overwrite and self._spill_store is not None else None
        try:
            publish(self._store(), commit, self._previous, look_again=look_again, is_late=self._beginning.is_late)
        except DeadlineExceededError as error:
            if self._deadline is None:
                raise
            progress = "every rank had written its data, but it was not committed"
            if error.key == commit.identity.metadata_key and error.attempts:
                progress += "; S3 may still carry out the commit request that it did not answer"
            raise self._deadline.error(f"the save to {commit.identity.url}", progress) from error

    def _look_again(self) -> Previous:
        """The checkpoint to overwrite, if it changed since this save began: an older save that had spilled."""
        store, identity = self._store(), self._identity
        previous = find_previous(store, identity)
        check_newest(store, identity, previous, self._beginning.at)
        return previous


def wait_committed(
    url: CheckpointURL, save: Save | None, spill_store: SpillStore | None, settings: Settings, timeout: float | None
) -> None:
    """Wait until ``save`` is committed on S3; if it is None, until any checkpoint is there.

    Raises:
        TimeoutError: the save is not committed within ``timeout`` seconds; the drain goes on.
        CheckpointError: the save cannot be committed, or another save has replaced it.
        StorageError: S3 refuses the request.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    if spill_store is not None:
        drain_in_background(spill_store, patience=settings.spill_after)
        for spilled in spill_store.scan():
            if spilled.journal.url == str(url):
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                wait_until_drained(spill_store, spilled, timeout=left)
    store, pause = S3Store(url.bucket, settings), _SHORTEST_PAUSE
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
