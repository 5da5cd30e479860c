"""S3StorageWriter: DCP's StorageWriter on S3."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from dcp_s3.checkpoint._torch import CURRENT_DCP_VERSION, StreamTransformExtension, WriterTransforms
from dcp_s3.checkpoint.boundary import called_by_dcp
from dcp_s3.checkpoint.planning import plan_buckets
from dcp_s3.checkpoint.write import ItemWriteResult, ObjectNames, both, write_buckets
from dcp_s3.commit import (
    Commit,
    CommitState,
    Previous,
    SaveIdentity,
    check_absent,
    check_metrics,
    check_newest,
    find_previous,
    find_state,
    make_commit,
    publish,
)
from dcp_s3.completeness import Beginning
from dcp_s3.errors import (
    CheckpointError,
    CheckpointExistsError,
    DeadlineExceededError,
    MissingURLError,
    SpillError,
    TransferError,
)
from dcp_s3.format.layout import new_nonce, new_save_id
from dcp_s3.settings import Settings, SettingsLike, resolve_settings
from dcp_s3.spill.background import drain_in_background, wait_until_drained
from dcp_s3.spill.session import SpillSession, open_store, spill_commit
from dcp_s3.staging.failure import raise_if_failed
from dcp_s3.staging.stager import shared_stager
from dcp_s3.transport.bucket import Bucket, limit_timeouts
from dcp_s3.transport.deadline import Deadline
from dcp_s3.transport.retry import without_tracebacks
from dcp_s3.url import CheckpointURL, is_s3_url, parse_url

logger = logging.getLogger(__name__)

_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.1, 2.0  # seconds between looks at S3

Separate = Sequence[str | Sequence[str]]


class S3StorageWriter(StorageWriter, AsyncStager):
    """Writes checkpoints to S3; pass it to `dcp.save` or `dcp.async_save` as ``storage_writer``.

    Nothing is visible before the commit at the end: if any rank fails, there is no new checkpoint, and an old
    one at the same URL stays whole. One writer may be used for several saves, one at a time; for saves that
    overlap (`async_save` before the previous one is done) make one each.

    Args:
        url: ``s3://bucket/prefix`` of the checkpoint. May be left out if each save passes ``checkpoint_id``.
        overwrite: whether a committed checkpoint at the URL is replaced. Otherwise, and always without collectives
            (where it could not be atomic): CheckpointExistsError.
        metrics: user metrics (numbers, text, bools) stored beside the checkpoint.
        separate: FQN prefixes that get objects of their own, for example ``["model", "optimizer"]``; an entry may
            be a list of prefixes that share. What matches none shares the rest.
        settings: a `Settings`, or a mapping of those that differ from the environment.
        _extensions: torch's stream transforms (experimental there), as FileSystemWriter takes them.

    Raises:
        InvalidURLError: ``url`` is not an S3 URL.
        SettingsError: a setting, in the environment or given here, is not allowed.
        SaveProtocolError: a metric cannot be stored.
    """

    def __init__(
        self,
        url: str | os.PathLike[str] | None = None,
        *,
        overwrite: bool = False,
        metrics: Mapping[str, Any] | None = None,
        separate: Separate | None = None,
        settings: SettingsLike = None,
        _extensions: Sequence[StreamTransformExtension] | None = None,
    ) -> None:
        super().__init__()
        self.settings: Settings = resolve_settings(settings)
        self.overwrite = overwrite
        self.metrics = dict(metrics or {})
        check_metrics(self.metrics)  # fail now, not at the end of a save
        self.separate = [[entry] if isinstance(entry, str) else list(entry) for entry in separate or ()]
        self._transforms = WriterTransforms(_extensions)
        self._url: CheckpointURL | None = None if url is None else parse_url(url)
        self._store = open_store(self.settings)
        self._begin_save()

    def _begin_save(self) -> None:
        self._save_id = new_save_id()
        self._rank = 0
        self._is_coordinator = True
        self._use_collectives = True
        self._previous = Previous()
        self._unseen = False
        self._beginning = Beginning()
        self._began = self._beginning.at
        self._written: str | None = None  # path of an object of the save
        self._deadline: Deadline | None = None

    # --- StorageWriter ------------------------------------------------------------------------------

    @called_by_dcp
    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new save, to ``checkpoint_id`` if given.

        Raises:
            InvalidURLError: ``checkpoint_id`` is not an S3 URL.
        """
        if checkpoint_id is not None:
            self._url = parse_url(checkpoint_id)
        self._begin_save()

    @called_by_dcp
    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Called by DCP on every rank before planning."""
        self._begin_save()
        self._is_coordinator = is_coordinator
        self._rank = int(kwargs.get("rank") or 0)
        self._drain()  # what an earlier process left goes to S3, too
        self._use_collectives = bool(kwargs.get("use_collectives", True))

    @called_by_dcp
    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Check the URL before any byte moves: on the coordinator, or on every rank without collectives.

        The plan itself stays as it is: what DCP caches between saves (`enable_plan_caching`) must carry neither a
        URL nor a nonce along.

        Raises:
            CheckpointExistsError, StorageError
            StagingError: the state could not be staged on this rank.
        """
        raise_if_failed(item.index.fqn for item in plan.items)
        identity = self._identity()
        if self._is_coordinator or not self._use_collectives:
            try:
                if self.overwrite and self._use_collectives:
                    self._previous = find_previous(self._bucket(), identity)
                else:
                    self._check_none_waits(identity)
                    check_absent(self._bucket(), identity)
            except TransferError as error:
                if self._store is None:
                    raise
                logger.warning("whether %s is free will be seen at its commit: %s", identity.url, error)
                self._unseen = True
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Nothing to coordinate: names are unique by rank and nonce."""
        return plans

    @called_by_dcp
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Upload this rank's items. Returns when all objects are complete, or raises and leaves nothing open.

        Raises:
            DeadlineExceededError: `save_timeout` has passed.
            StorageError, SaveProtocolError
        """
        url = self._require_url()
        self._deadline = self._start_deadline()
        buckets = plan_buckets(
            plan.items,
            max_buckets=self.settings.buckets_per_rank,
            min_bucket_size=self.settings.part_size,
            separate=self.separate,
        )
        # A nonce of its own for every call: a planner may hand out a plan again that it has cached.
        names = ObjectNames(url, self._rank, new_nonce(), self.settings.prefix_spread)
        with self._spill_session(names, len(buckets)) as session:
            results = write_buckets(self._bucket(), buckets, planner, self._transforms, names, session)
        if session is not None and session.sealed:
            self._drain()
        self._written = names.relative_path(0) if buckets else None
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    @called_by_dcp
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit. Called on the coordinator when every rank has written, or on each rank without collectives.

        Raises:
            DeadlineExceededError: `save_timeout` has passed since this rank began to write.
            CheckpointDeletedError: the save took so long that a prune took what it wrote for a leftover.
        CheckpointExistsError, StorageError
        """
        self._deadline = self._deadline or self._start_deadline()
        metadata.version = CURRENT_DCP_VERSION
        metadata.storage_data = {result.index: result.storage_data for rank in results for result in rank}
        metadata.storage_meta = self.storage_meta()
        objects = [
            result.object_entry
            for rank in results
            for result in rank
            if isinstance(result, ItemWriteResult) and result.object_entry is not None
        ]
        commit = make_commit(
            self._identity(),
            # A copy: with plan caching, the next save gets this very object while it is being pickled.
            dataclasses.replace(metadata),
            objects,
            world_size=len(results) if self._use_collectives else _world_size(),
            metrics=self.metrics,
            started_at=self._began,
        )
        spilled = any(result.spilled for rank in results for result in rank if isinstance(result, ItemWriteResult))
        self._commit(commit, spilled=spilled)

    @called_by_dcp
    def storage_meta(self) -> StorageMeta | None:
        """URL and id of this save, for DCP's logs and for ``.metadata``."""
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self._save_id)

    def wait_committed(self, timeout: float | None = None) -> None:
        """Wait until the last save of this writer is committed on S3; of use with ``DCP_S3_DURABILITY=local``.

        Every rank may call it. A writer that has not written itself (that of a restart, or whose saves another process
        does, or of a rank that had nothing to write) waits for any checkpoint at its URL.

        Args:
            timeout: seconds; None to wait for as long as it takes.

        Raises:
            TimeoutError: it is not committed yet; the drain goes on.
            CheckpointError: it can not be committed, or another save has replaced it.
            StorageError: S3 refuses to tell.
        """
        url = self._require_url()
        deadline = None if timeout is None else time.monotonic() + timeout
        if self._store is not None:
            self._drain()
            for save in self._store.scan():
                if save.journal.url == str(url):
                    left = None if deadline is None else max(0.0, deadline - time.monotonic())
                    wait_until_drained(self._store, save, timeout=left)
        pause = _SHORTEST_PAUSE
        while True:
            try:
                if self._is_committed():
                    return
                reason = "other hosts may still drain"
            except TransferError as error:
                reason = str(error)
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"{url} is not committed after {timeout:g} s: {reason}")
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _is_committed(self) -> bool:
        url, identity = self._require_url(), self._identity()
        bucket = Bucket(url.bucket, self.settings)
        if self._written is None:
            return bucket.exists(identity.metadata_key)
        state = find_state(bucket, identity, path=self._written, started_at=self._began)
        if state is CommitState.REPLACED:
            raise CheckpointError(f"{url} holds a checkpoint that began later: this save was replaced", url=str(url))
        return state is CommitState.COMMITTED

    @called_by_dcp
    def __getstate__(self) -> dict[str, Any]:
        # For AsyncCheckpointerType.PROCESS: from here on DCP alone knows how the save ends.
        return self.__dict__.copy()

    @property
    def checkpoint_id(self) -> str | None:
        """URL of the checkpoint being written, None before there is one."""
        return None if self._url is None else str(self._url)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this is text that starts with ``s3://``."""
        return is_s3_url(checkpoint_id)

    # --- AsyncStager ----------------------------------------------------------------------------------

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """The training-safe copy of a blocking `S3Stager`, one for all writers of the process with these settings.

        `dcp.async_save` calls this if it is given no ``async_stager``. The buffers stay with the process, for its next
        save.
        """
        return shared_stager(self.settings).stage_now(state_dict)

    def synchronize_staging(self) -> None:
        """Nothing to wait for: `stage` is complete when it returns."""

    def close(self) -> None:
        """Nothing to release: threads end with each save, connections belong to the process."""

    # --- internal ---------------------------------------------------------------------------------------

    def _require_url(self) -> CheckpointURL:
        if self._url is None:
            raise MissingURLError(
                "S3StorageWriter has no URL. Remedy: S3StorageWriter('s3://bucket/prefix'), or pass "
                "checkpoint_id='s3://bucket/prefix' to dcp.save"
            )
        return self._url

    def _bucket(self) -> Bucket:
        url, settings, patience = self._require_url(), self.settings, None
        if self._store is not None:
            # There is another place for what S3 does not take: find out soon.
            patience = settings.spill_after
            settings = limit_timeouts(settings, patience)
        if settings.save_timeout is not None:
            settings = limit_timeouts(settings, settings.save_timeout)
        return Bucket(url.bucket, settings, patience, self._deadline)

    def _start_deadline(self) -> Deadline | None:
        return Deadline.start("DCP_S3_SAVE_TIMEOUT", self.settings.save_timeout)

    @contextlib.contextmanager
    def _spill_session(self, names: ObjectNames, count: int) -> Iterator[SpillSession | None]:
        if self._store is None:
            yield None
            return
        session = SpillSession(
            self._store,
            url=str(self._require_url()),
            save_id=self._save_id,
            rank=self._rank,
            settings=self.settings,
            keys=[names.key(number) for number in range(count)],
        )
        try:
            session.__enter__()
        except SpillError as error:
            logger.warning("this save can not spill: %s", error)
            try:
                yield None
            except TransferError as refusal:
                raise both(refusal, error) from refusal
            return
        with contextlib.ExitStack() as stack:
            stack.push(session)
            yield session

    def _check_none_waits(self, identity: SaveIdentity) -> None:
        """Refuse to save where the commit of an earlier save waits for S3."""
        for save in self._store.scan() if self._store is not None else ():
            commit = save.journal.commit
            if commit is not None and save.journal.url == str(identity.url) and commit.rank == identity.rank:
                raise CheckpointExistsError(
                    f"a checkpoint for {identity.url} waits in {save.path} to be committed; it is untouched. Remedy: "
                    "save to another URL, or pass overwrite=True to replace it",
                    url=str(identity.url),
                )

    def _drain(self) -> None:
        if self._store is not None:
            drain_in_background(self._store, patience=self.settings.spill_after)

    def _commit(self, commit: Commit, *, spilled: bool) -> None:
        """Commit on S3 at once if all is there; otherwise leave it to the drain."""
        if self._store is None:
            if spilled:
                raise SpillError(
                    f"{commit.identity.url} can not be committed: objects of it wait in the spill directory of another "
                    "rank, and this one, which commits when they are on S3, has none. Remedy: set DCP_S3_SPILL_DIR on "
                    "every rank"
                )
            self._publish(commit)
            return
        overwrite = self.overwrite and self._use_collectives
        refusal = None
        if not spilled and not self._unseen:
            try:
                self._publish(commit)
            except TransferError as error:
                logger.warning("the commit of %s waits for S3: %s", commit.identity.url, error)
                without_tracebacks(error)
                refusal = error
            else:
                return
        try:
            save = spill_commit(self._store, commit, self.settings, created_at=self._began, overwrite=overwrite)
        except SpillError as error:
            if refusal is None:
                raise
            raise both(refusal, error) from refusal
        self._drain()
        if self.settings.durability == "s3":
            try:
                wait_until_drained(self._store, save, timeout=None if self._deadline is None else self._deadline.left)
            except TimeoutError as error:
                if self._deadline is None:
                    raise
                raise self._deadline.error(
                    f"the save to {commit.identity.url}",
                    f"it is complete on local disks ({self.settings.spill_dir}), from where it still goes to S3",
                ) from error

    def _publish(self, commit: Commit) -> None:
        overwrite = self.overwrite and self._use_collectives
        look_again = self._look_again if overwrite and self._store is not None else None
        try:
            publish(self._bucket(), commit, self._previous, look_again=look_again, is_late=self._beginning.is_late)
        except DeadlineExceededError as error:
            if self._deadline is None:
                raise
            progress = "every rank had written its data, but it was not committed"
            if error.key == commit.identity.metadata_key and error.attempts:
                progress += "; S3 may still carry out the commit that it did not answer"
            raise self._deadline.error(f"the save to {commit.identity.url}", progress) from error

    def _look_again(self) -> Previous:
        """What this save overwrites if that is not what was there when it began: an older one that had been spilled."""
        bucket, identity = self._bucket(), self._identity()
        previous = find_previous(bucket, identity)
        check_newest(bucket, identity, previous, self._began)
        return previous

    def _identity(self) -> SaveIdentity:
        return SaveIdentity(self._require_url(), self._save_id, None if self._use_collectives else self._rank)


def _world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
