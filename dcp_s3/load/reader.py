"""S3StorageReader: DCP's StorageReader on S3."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from dcp_s3 import errors, ranks
from dcp_s3.boundary import called_by_dcp, check_role
from dcp_s3.checkpoint.directory import list_directory
from dcp_s3.checkpoint.info import find_step
from dcp_s3.checkpoint.lease import ReaderLease
from dcp_s3.checkpoint.previous import look_for_previous
from dcp_s3.checkpoint.stored_metadata import check_metadata, fetch_metadata
from dcp_s3.collector import collector_paused
from dcp_s3.events import Listener, LoadFailed, emit
from dcp_s3.format.layout import SAVE_ID_KEY, deletion_id, metadata_object, new_save_id
from dcp_s3.format.metadata import load_metadata
from dcp_s3.limit import Deadline, Limit
from dcp_s3.load.attachments import AttachmentReader
from dcp_s3.load.check_state import check_filled, check_state
from dcp_s3.load.engine import LOAD_BUFFERS, Source
from dcp_s3.load.host_metadata import fetch_metadata_for_host
from dcp_s3.load.peers.agree import LoadGroup, join_load
from dcp_s3.load.peers.assign import MAX_PIECE, plan_sharing
from dcp_s3.load.peers.assignment import Assignment, Offer, all_offered
from dcp_s3.load.peers.shared_read import SharedRead, decline
from dcp_s3.load.plan import READ_GAP
from dcp_s3.load.progress import LoadProgress
from dcp_s3.load.read import LoadExecutor
from dcp_s3.load.uncommitted import find_uncommitted
from dcp_s3.load.unreadable import UnreadableMetadata
from dcp_s3.reprs import one_line
from dcp_s3.s3.store import S3Store
from dcp_s3.settings import Settings, SettingsLike, launch, most_ranks_on_host, resolve_settings
from dcp_s3.spill.local import LocalObjects
from dcp_s3.spill.store import open_store
from dcp_s3.store import StoredObject
from dcp_s3.torch_private import (
    Caller,
    ExtensionRegistry,
    ReaderTransforms,
    find_load_group,
    is_first_look,
    is_load_without_group,
    is_loading,
)
from dcp_s3.uncaught import install
from dcp_s3.url import CheckpointURL, is_s3_url, parse_url

logger = logging.getLogger(__name__)


class S3StorageReader(AttachmentReader, StorageReader):
    """Reads checkpoints from S3; pass it to `dcp.load` as ``storage_reader``.

    Reads what `S3StorageWriter` wrote, and what torch's FileSystemWriter (uploaded), FsspecWriter and
    s3torchconnector wrote.

    >>> dcp.load(state, storage_reader=S3StorageReader("s3://bucket/run/step-00002000"))
    >>> state["step"]
    2000

    Args:
        url: ``s3://bucket/prefix`` of the checkpoint. May be left out if each load passes ``checkpoint_id``.
        include_uncommitted: also read a checkpoint whose commit still waits in this host's spill directory. With
            several hosts, other hosts' parts may be missing there.
        weights_only: items that are no tensors (numbers, texts, whatever the state held) are pickles. The planner
            unpickles them without restriction, so it is given only what cannot run code: what torch's weights-only
            unpickler accepts, with its own list (``torch.serialization.add_safe_globals``) as it is when the item has
            arrived, and the plain values named in docs/security.md. The check reads each such item once more, without
            its tensors: about 0.1 ms for a small one, 0.15 s for each MB of pickled numbers and texts. False:
            everything is unpickled, so whoever can write to the bucket can run code here.
        allow_dtype_cast: whether a load may convert a saved tensor to another dtype, as torch's readers do. One warning
            names the tensors whose values may not all fit. False: `DtypeMismatchError`, before anything is changed.
        load_sharing: whether data that several ranks of a load need is read from S3 once and sent between the ranks.
            Needs a process group with gloo for CPU tensors. False on one rank means False on all.
        process_group: the ranks that load together: the group of ``dcp.load(process_group=...)``, or another one with
            the same ranks in the same order, for example gloo where DCP's is only NCCL. What several ranks need is then
            read once. None: the group that ``dcp.load`` uses.
        settings: a `Settings`, or a mapping of those that differ from the environment.
        on_event: called with each event of its loads on this rank, see `dcp_s3.events`.
        _extension_registry: torch's registry of stream extensions (experimental there).

    Attributes:
        load_id: ID of this load, new with each `reset`, as in torch's FileSystemReader.

    Raises:
        InvalidURLError: ``url`` is not an S3 URL.
        SettingsError: a setting, in the environment or given here, is not allowed.
    """

    def __init__(
        self,
        url: str | os.PathLike[str] | None = None,
        *,
        include_uncommitted: bool = False,
        weights_only: bool = True,
        allow_dtype_cast: bool = True,
        load_sharing: bool = True,
        process_group: dist.ProcessGroup | None = None,
        settings: SettingsLike = None,
        on_event: Listener | None = None,
        _extension_registry: ExtensionRegistry | None = None,
    ) -> None:
        super().__init__()
        install()  # first: what is wrong with the arguments is told as well
        self.settings: Settings = resolve_settings(settings)
        self.on_event = on_event
        self.include_uncommitted = include_uncommitted
        self.weights_only = weights_only
        self.allow_dtype_cast = allow_dtype_cast
        self.load_sharing = load_sharing
        self._process_group = process_group
        self._transforms = ReaderTransforms(_extension_registry)
        self._url: CheckpointURL | None = None if url is None else parse_url(url)
        self._begin_load()

    def __repr__(self) -> str:
        return one_line("S3StorageReader", *([] if self._url is None else [repr(str(self._url))]))

    def _begin_load(self) -> None:
        self.load_id: str = new_save_id()
        self._is_new = True
        self._metadata: Metadata | None = None
        self._error: errors.DcpS3Error | None = None
        self._saved_ranks: list[int] | None = None
        self._deadline: Deadline | None = None
        self._lease: ReaderLease | None = None
        self._group: LoadGroup | None = None
        self._progress: LoadProgress | None = None

    @called_by_dcp
    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new load, from ``checkpoint_id`` if given.

        Raises:
            InvalidURLError: ``checkpoint_id`` is not an S3 URL.
        """
        if checkpoint_id is not None:
            self._url = parse_url(checkpoint_id)
        if self._lease is not None:
            self._lease.release()
        self._begin_load()

    @called_by_dcp
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Fetch and unpickle the checkpoint's metadata.

        Args:
            rank: read the metadata of this rank, of a save with ``use_collectives=False``. DCP's loader asks for it if
                the global metadata could not be read.

        To DCP's loader a failure is raised when the returned object is used: the loader takes any error raised here for
        missing metadata, and replaces it by an AssertionError.

        Raises:
            CheckpointNotFoundError: no committed checkpoint is there.
            CheckpointDeletedError: a prune is about to delete it (checked only with the setting ``reader_lease``).
            CorruptMetadataError, UnsafeMetadataError: the metadata cannot, or must not, be unpickled.
            StorageError: missing bucket, credentials, network.
        """
        rank: int | None = kwargs.get("rank")
        if self._url is not None and (rank is None or self._progress is None):  # without a rank it begins a load
            self._progress = LoadProgress(self._store(), self._url, self.on_event)
        if rank is None:
            try:
                caller = self._find_caller()
            except errors.SettingsError as error:
                return UnreadableMetadata(error)
            self._group = None if caller is None else join_load(
                caller, self.checkpoint_id, self.settings,
                sharing=self.load_sharing, willing=not self.include_uncommitted,
            )  # fmt: skip
            try:
                metadata = self._fetch_metadata(None)
            except errors.DcpS3Error as error:
                self._error = error
                if is_first_look() and not self._may_be_of_ranks(error):
                    return UnreadableMetadata(error)
                raise
        else:
            self._group = None
            if self._error is not None and not isinstance(self._error, errors.CheckpointNotFoundError):
                return UnreadableMetadata(self._error)
            try:
                rank = self._own_rank(rank)
                metadata = self._fetch_metadata(rank)
            except errors.CheckpointDeletedError as error:
                return UnreadableMetadata(error)
            except errors.CheckpointNotFoundError as error:
                return UnreadableMetadata(self._explain_missing(rank) or self._error or error)
            except errors.DcpS3Error as error:
                return UnreadableMetadata(error)
        if getattr(metadata, "storage_meta", None) is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id  # type: ignore[union-attr]
        metadata.storage_meta.checkpoint_id = self.checkpoint_id  # type: ignore[union-attr]  # a copy was saved elsewhere
        return metadata

    def _find_caller(self) -> Caller | None:
        """The ranks of the calling `dcp.load`; None if there are no others, or if not all of them call.

        Raises:
            SettingsError: ``process_group`` has other ranks.
        """
        is_new, self._is_new = self._is_new, False
        caller, group = find_load_group(), self._process_group
        if group is None:
            return caller
        if caller is not None:
            theirs, given = dist.get_process_group_ranks(caller.group), dist.get_process_group_ranks(group)
            if theirs != given:
                raise errors.SettingsError(
                    f"S3StorageReader has a process_group of ranks {given}, dcp.load one of ranks {theirs}. Remedy: "
                    "give both the same"
                )
            return caller._replace(group=group)
        rank, world_size = dist.get_rank(group), dist.get_world_size(group)
        if is_first_look() or not (is_new and is_loading()) or world_size < 2 or rank < 0:
            return None
        # torch's loader has changed: what its planner will do with shared plans is unknown.
        return Caller(group, rank, world_size, plain_finish=False)

    def _fetch_metadata(self, rank: int | None) -> Metadata:
        url = self._require_url()
        waiting = find_uncommitted(self._store(), self.settings, url, rank) if self.include_uncommitted else None
        if waiting is not None:
            return load_metadata(waiting.metadata, url=str(url), of_rank=rank is not None)
        store, group = self._store(), self._group if rank is None else None
        lease = ReaderLease(store, url, self.settings.reader_lease)
        failure = None if group is None else group.raised
        try:
            if failure is None:
                lease.take()
        except BaseException as error:
            if group is None:
                raise
            failure = error  # raised later: the others wait for this rank
        try:
            if group is None:
                stored = self._fetch_alone(store, url, rank)
            else:
                stored = group.fetch_once(lambda: fetch_metadata(store, url), str(url), failure)
            metadata = check_metadata(stored, url, rank)
            save_ids = stored.metadata.get(SAVE_ID_KEY), getattr(metadata.storage_meta, "save_id", None), None
            deletions = {deletion_id(each, stored.etag) for each in save_ids} if rank is None else None
            lease.check_not_deleted(deletions, rank=rank)
        except BaseException:
            lease.release()
            raise
        self._lease = lease
        return metadata

    def _fetch_alone(self, store: S3Store, url: CheckpointURL, rank: int | None) -> StoredObject:
        if rank is not None or not self.load_sharing:
            return fetch_metadata(store, url, rank)
        return fetch_metadata_for_host(store, url, store.client.meta.endpoint_url, ranks=most_ranks_on_host())

    def _find_ranks(self) -> list[int] | None:
        """The ranks of a save without collectives that have metadata on S3; None if S3 does not answer."""
        if self._saved_ranks is None:
            with contextlib.suppress(errors.StorageError):
                self._saved_ranks = list_directory(self._store(), self._require_url(), "__").ranks
        return self._saved_ranks

    def _own_rank(self, rank: int) -> int:
        """The rank whose metadata to read when torch asks for that of ``rank``, which is 0 without a process group."""
        if not is_load_without_group() or self._find_ranks() == [rank]:
            return rank
        return ranks.rank() if ranks.is_initialized() else launch().rank

    def _may_be_of_ranks(self, error: errors.DcpS3Error) -> bool:
        """Whether single ranks may have metadata although ``error`` says that the global one is missing."""
        is_missing = isinstance(error, errors.CheckpointNotFoundError)
        return is_missing and (self.include_uncommitted or self._find_ranks() != [])

    def _explain_missing(self, rank: int) -> errors.CheckpointNotFoundError | None:
        """The error for a checkpoint saved without collectives that lacks this rank; None if it has no ranks."""
        url, found = self._require_url(), self._find_ranks()
        if not found:
            return None
        return errors.CheckpointNotFoundError(
            f"{url} was saved without collectives and has no {metadata_object(rank)}, only those of ranks {found}. "
            "Remedy: load it with as many ranks as saved it; if one of them is missing, the save was cut off",
            url=str(url),
        )

    @called_by_dcp
    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Called by DCP on every rank before planning.

        Raises:
            MissingKeysError, ShapeMismatchError, CorruptMetadataError: see `check_state`.
        """
        if isinstance(metadata, UnreadableMetadata):
            metadata.fail()
        check_state(metadata, self.checkpoint_id, is_coordinator)
        self._deadline = Deadline.start("DCP_S3_LOAD_TIMEOUT", self.settings.load_timeout)
        self._metadata = metadata

    @called_by_dcp
    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Offer to share what other ranks read too."""
        if self._group is None or not self._group.shares_data or plan.storage_data is not None:
            return plan
        return dataclasses.replace(plan, storage_data=Offer(self._group.rank, self._group.world_size))

    @called_by_dcp
    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Assign what several ranks read to one of them each, if all offer to share."""
        assignments = None
        if self._metadata is not None and all_offered([plan.storage_data for plan in plans]):
            with collector_paused():
                assignments = plan_sharing(
                    self._metadata,
                    [plan.items for plan in plans],
                    max_piece=min(MAX_PIECE, self.settings.max_part_size),
                    max_gap=READ_GAP,
                    max_objects=LOAD_BUFFERS,
                )
        if assignments is not None:
            return [dataclasses.replace(p, storage_data=a) for p, a in zip(plans, assignments, strict=True)]
        return [
            dataclasses.replace(plan, storage_data=None) if isinstance(plan.storage_data, Offer) else plan
            for plan in plans
        ]

    @called_by_dcp
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Load this rank's items. Returns when all are in place.

        Raises:
            DtypeMismatchError: before any tensor is changed; only without ``allow_dtype_cast``.
            DeadlineExceededError: `load_timeout` has passed; some tensors are loaded, others are not.
            UnsafeItemError: an item needs what ``weights_only`` refuses.
            PeerReadError: another rank failed to read bytes that this one needs too.
            CorruptCheckpointError, StorageError
        """
        if self._metadata is None:
            raise errors.SaveProtocolError("read_data was called before set_up_storage_reader")
        url, group = self._require_url(), self._group if isinstance(plan.storage_data, Assignment) else None
        with contextlib.ExitStack() as stack:
            try:
                check_filled(plan, planner, self._metadata, str(url))
                spill = open_store(self.settings)
                local = stack.enter_context(contextlib.closing(LocalObjects(spill, str(url)))) if spill else None
                if self._lease is not None:
                    stack.enter_context(self._lease.renewed())
                source = Source(self._store(), url, local)
                executor = LoadExecutor(
                    source, self._metadata, self._transforms,
                    weights_only=self.weights_only, allow_dtype_cast=self.allow_dtype_cast,
                )  # fmt: skip
                shared = None if group is None else SharedRead(executor, self._metadata, group)
            except BaseException:
                if group is not None:
                    decline(group)
                raise
            if shared is not None:
                shared.run(plan, planner)
            else:
                executor.run(plan, planner)
            if self._progress is not None:
                on_disk = 0 if local is None else local.read_bytes
                self._progress.loaded(executor.engine.fetched_bytes, on_disk)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @property
    def checkpoint_id(self) -> str | None:
        """URL of the checkpoint being read, None before there is one.

        >>> S3StorageReader("s3://bucket/run/step-00002000").checkpoint_id
        's3://bucket/run/step-00002000'
        """
        check_role(self, "load")
        return None if self._url is None else str(self._url)

    def _tell_failed(self, error: BaseException) -> None:
        """Tell subscribers to events that a load failed on this rank."""
        url = self._url
        step = None if url is None else find_step(url.name, self.settings)
        event = LoadFailed(url=None if url is None else str(url), step=step, rank=ranks.rank(), error=error)
        emit(event, self.on_event)

    def _last_good(self, url: str) -> str:
        """URL of the newest checkpoint beside ``url``, for messages; empty: none, or S3 does not say within seconds."""
        return look_for_previous(self.settings, parse_url(url))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this is an S3 URL, as text or as a path, which has one slash left."""
        return is_s3_url(checkpoint_id)

    def _require_url(self) -> CheckpointURL:
        if self._url is None:
            raise errors.MissingURLError(
                "S3StorageReader has no URL. Remedy: S3StorageReader('s3://bucket/prefix'), or pass "
                "checkpoint_id='s3://bucket/prefix' to dcp.load"
            )
        return self._url

    def _store(self) -> S3Store:
        limit = Limit(deadline=self._deadline, hang=self.settings.load_timeout)
        return S3Store(self._require_url().bucket, self.settings, limit)
