"""S3StorageReader: DCP's StorageReader on S3."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import time
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from dcp_s3 import errors, process
from dcp_s3.checkpoint.directory import list_directory
from dcp_s3.checkpoint.info import find_step
from dcp_s3.checkpoint.lease import ReaderLease
from dcp_s3.events import Listener, Loaded, LoadFailed, LoadStarted, emit
from dcp_s3.failures import called_by_dcp
from dcp_s3.format.layout import new_save_id
from dcp_s3.limit import Deadline, Limit
from dcp_s3.load.fetch import Fetcher
from dcp_s3.load.metadata import AttachmentReader, FailureTeller, UnreadableMetadata, fetch
from dcp_s3.load.peers.assign import MAX_PIECE, plan_sharing
from dcp_s3.load.peers.exchange import Exchange
from dcp_s3.load.peers.messages import Offer, choose_group, make_offer, new_tag
from dcp_s3.load.peers.pieces import Assignment
from dcp_s3.load.plan import READ_GAP
from dcp_s3.load.planner import check_filled, log_unexpected
from dcp_s3.load.read import LoadExecutor
from dcp_s3.process import collector_paused, launch
from dcp_s3.s3.store import store_of
from dcp_s3.settings import Settings, SettingsLike, resolve_settings
from dcp_s3.spill.local import with_copies
from dcp_s3.store import Counters, Store
from dcp_s3.stores.wrapper import Overlay
from dcp_s3.torch_private import ReaderTransforms
from dcp_s3.units import one_line
from dcp_s3.url import CheckpointURL, is_s3_url, parse_url

logger = logging.getLogger(__name__)


class S3StorageReader(AttachmentReader, StorageReader):
    """Reads checkpoints from S3; pass it to `dcp.load` as ``storage_reader``.

    Reads what `S3StorageWriter` wrote, and what torch's FileSystemWriter (uploaded), FsspecWriter and
    s3torchconnector wrote; also safetensors files as Hugging Face's libraries write them, in a directory of their own.

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
            names the tensors whose values may not all fit. False: `TensorMismatchError`, before anything is changed.
        load_sharing: whether data that several ranks of a load need is read from S3 once and sent between the ranks.
            Needs a process group with gloo for CPU tensors. False on one rank means False on all.
        process_group: a group of the ranks that load together, in the same order, with gloo for CPU tensors. In it they
            exchange what several of them need, which is then read once. Needed where ``dcp.load`` is given a group of
            some ranks, or where the default group has no gloo. None: the default group, if all its ranks load.
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
        _extension_registry: Any = None,
    ) -> None:
        super().__init__()
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
        self._metadata: Metadata | None = None
        self._version = 0
        self._error: errors.DcpS3Error | None = None
        self._deadline: Deadline | None = None
        self._lease: ReaderLease | None = None
        self._began: tuple[float, Counters] | None = None
        """When it began, and what the store's counters were then."""
        self._is_coordinator = self._together = False
        self._asked_for_url = False

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
            rank: read the metadata of this rank, of a save of an earlier version with ``use_collectives=False``. DCP's
                loader asks for it if the global metadata could not be read.

        DCP's loader takes any error raised here for missing metadata, and replaces it by an AssertionError. It asks for
        `checkpoint_id` right before: then a failure is raised as soon as the returned object is used.

        Raises:
            CheckpointNotFoundError: no committed checkpoint is there.
            CheckpointDeletedError: a prune is about to delete it (checked only with the setting ``reader_lease``).
            CorruptCheckpointError, UnsafeMetadataError: the metadata cannot, or must not, be unpickled.
            WeightsError: safetensors files are there, and damaged.
            StorageError: missing bucket, credentials, network.
        """
        rank: int | None = kwargs.get("rank")
        if rank is None:  # it begins a load; one before had its own
            self._deadline = self._error = None
        if self._url is not None and (rank is None or self._began is None):
            self._began = time.monotonic(), self._store().counters()
            emit(LoadStarted(url=str(self._url), step=self._step, rank=process.rank()), self.on_event)
        is_load, self._asked_for_url = self._asked_for_url, False
        if rank is None:
            try:
                metadata = self._fetch_metadata(None)
            except errors.DcpS3Error as error:
                self._error = error
                if is_load and not (_is_missing(error) and self._may_have_ranks()):
                    return UnreadableMetadata(error)
                raise  # DCP asks for that of the rank next
        else:
            if self._error is not None and not _is_missing(self._error):
                return UnreadableMetadata(self._error)
            try:
                metadata = self._fetch_metadata(self._own_rank(rank))
            except errors.DcpS3Error as error:
                return UnreadableMetadata(self._error or error if _is_missing(error) else error)
        if getattr(metadata, "storage_meta", None) is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id  # type: ignore[union-attr]
        metadata.storage_meta.checkpoint_id = str(self._url)  # type: ignore[union-attr]  # a copy was saved elsewhere
        metadata.tell_failed = FailureTeller(self._tell_failed)  # type: ignore[attr-defined]
        return metadata

    def _fetch_metadata(self, rank: int | None) -> Metadata:
        found = fetch(
            self._store(), self._require_url(), self.settings, rank, include_uncommitted=self.include_uncommitted
        )
        self._version = found.version
        self._lease = found.lease or self._lease
        return found.metadata

    def _may_have_ranks(self) -> bool:
        """Whether single ranks may have metadata: else DCP need not log, with a traceback, that it looks for it."""
        with contextlib.suppress(errors.StorageError):
            return self.include_uncommitted or bool(list_directory(self._store(), self._require_url(), "__").ranks)
        return True

    def _own_rank(self, rank: int) -> int:
        """The rank whose metadata to read when torch asks for that of ``rank``.

        Without a process group every rank is torch's 0. So is the first one of a group that the reader is given.
        """
        if rank or self._process_group is not None:
            return rank
        return process.rank() if process.is_initialized() else launch().rank

    @called_by_dcp
    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Called by DCP on every rank before planning.

        Raises:
            CorruptCheckpointError: it does not say where its items lie. Also what `read_metadata` could not raise.
        """
        if isinstance(metadata, UnreadableMetadata):
            metadata.fail()
        if not isinstance(metadata.storage_data, dict):
            raise errors.CorruptCheckpointError(
                f"the metadata of {self._url} does not say where its items lie (storage_data is "
                f"{type(metadata.storage_data).__name__})",
                url=str(self._url),
            )
        self._deadline = Deadline.start("DCP_S3_LOAD_TIMEOUT", self.settings.load_timeout)
        self._metadata, self._is_coordinator = metadata, is_coordinator
        self._together = kwargs.get("use_collectives", True) and process.is_initialized()

    @called_by_dcp
    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Say what this rank can share, unless the planner uses ``storage_data`` itself."""
        if not self._together or plan.storage_data is not None:
            return plan
        shares = self.load_sharing and not self.include_uncommitted
        offer = make_offer(
            f"{self.settings.endpoint_url or ''} {self._url}", self._version, self._process_group, shares=shares
        )
        return dataclasses.replace(plan, storage_data=offer)

    @called_by_dcp
    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Assign what several ranks read to one of them each, if all can share.

        Raises:
            CorruptCheckpointError: the checkpoint was replaced between the ranks' reads of its metadata.
        """
        offers = [plan.storage_data for plan in plans if isinstance(plan.storage_data, Offer)]
        if not offers:
            return plans
        assignments: Sequence[Assignment | None] | None = None
        if len(offers) == len(plans) and self._metadata is not None:
            group, reason = choose_group(offers, str(self._url))
            if group:
                max_piece = min(MAX_PIECE, self.settings.max_part_size)
                with collector_paused():
                    assignments = plan_sharing(
                        self._metadata, [plan.items for plan in plans], max_piece=max_piece, max_gap=READ_GAP,
                        group=group, tag=new_tag(),
                    )  # fmt: skip
            elif len(plans) > 1 and any(offer.shares for offer in offers):
                logger.info("every rank reads %s by itself: %s", self._url, reason)
        return [
            dataclasses.replace(plan, storage_data=told) if isinstance(plan.storage_data, Offer) else plan
            for plan, told in zip(plans, assignments or [None] * len(plans), strict=True)
        ]

    @called_by_dcp
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Load this rank's items. Returns when all are in place.

        Raises:
            TensorMismatchError: before any tensor is changed; only without ``allow_dtype_cast``.
            DeadlineExceededError: `load_timeout` has passed; some tensors are loaded, others are not.
            UnsafeItemError: an item needs what ``weights_only`` refuses.
            PeerReadError: another rank failed to read bytes that this one needs too, or did not begin to.
            CorruptCheckpointError, StorageError
        """
        if self._metadata is None:
            raise errors.SaveProtocolError("read_data was called before set_up_storage_reader")
        url, assignment = self._require_url(), plan.storage_data
        sharing: contextlib.AbstractContextManager[Exchange | None] = contextlib.nullcontext()
        if isinstance(assignment, Assignment):
            group: Any = self._process_group if assignment.group == "given" else dist.group.WORLD
            sharing = Exchange(group, assignment, url=str(url), deadline=self._deadline)
        with sharing as exchange, contextlib.ExitStack() as stack:
            check_filled(plan, planner, self._metadata, str(url))
            if self._is_coordinator:
                log_unexpected(planner, self._metadata, str(url))
            store = stack.enter_context(with_copies(self._store(), self.settings, url))
            if self._lease is not None:
                stack.enter_context(self._lease.renewed())
            fetcher = Fetcher(store, url, self.settings, "dcp_s3-download")
            executor = LoadExecutor(
                fetcher, self._metadata, self._transforms,
                weights_only=self.weights_only, allow_dtype_cast=self.allow_dtype_cast,
            )  # fmt: skip
            executor.run(plan, planner, exchange)
            self._tell_loaded(sum(fetcher.fetched), store.near.read_bytes if isinstance(store, Overlay) else 0)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @property
    def checkpoint_id(self) -> str | None:
        """URL of the checkpoint being read, None before there is one.

        >>> S3StorageReader("s3://bucket/run/step-00002000").checkpoint_id
        's3://bucket/run/step-00002000'
        """
        self._asked_for_url = True
        return None if self._url is None else str(self._url)

    @property
    def _step(self) -> int | None:
        """The step in the name of the checkpoint."""
        return None if self._url is None else find_step(self._url.name, self.settings)

    def _tell_loaded(self, size: int, disk_size: int) -> None:
        """Tell subscribers that everything is in place: bytes that this rank fetched, and those of the local disk."""
        if self._began is None:
            return
        (began, before), now = self._began, self._store().counters()
        event = Loaded(
            url=str(self._url), step=self._step, rank=process.rank(), ranks=process.world_size(), bytes=size,
            disk_bytes=disk_size, seconds=time.monotonic() - began, hedged=now.hedged - before.hedged,
            throttled=now.throttled - before.throttled,
        )  # fmt: skip
        logger.log(logging.INFO if event.rank == 0 else logging.DEBUG, "%s", event)
        emit(event, self.on_event)

    def _tell_failed(self, error: BaseException) -> None:
        """Tell subscribers to events that a load failed on this rank."""
        url = None if self._url is None else str(self._url)
        emit(LoadFailed(url=url, step=self._step, rank=process.rank(), error=error), self.on_event)

    @called_by_dcp
    def storage_meta(self) -> StorageMeta:
        """What `dcp.save` asks first: refuse to save, with SaveProtocolError."""
        raise errors.SaveProtocolError(
            "dcp.save was given an S3StorageReader, which is for dcp.load. Remedy: storage_writer=S3StorageWriter(url)"
        )

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this is an S3 URL, as text or as a path, which has one slash left."""
        return is_s3_url(checkpoint_id)

    def _require_url(self) -> CheckpointURL:
        if self._url is None:
            raise errors.InvalidURLError(
                "S3StorageReader has no URL. Remedy: S3StorageReader('s3://bucket/prefix'), or pass "
                "checkpoint_id='s3://bucket/prefix' to dcp.load"
            )
        return self._url

    def _store(self) -> Store:
        limit = Limit(deadline=self._deadline, hang=self.settings.load_timeout)
        return store_of(self._require_url(), self.settings, limit)


def _is_missing(error: errors.DcpS3Error) -> bool:
    """Whether single ranks may have metadata although the global one cannot be read."""
    return isinstance(error, errors.CheckpointNotFoundError) and not isinstance(error, errors.CheckpointDeletedError)
