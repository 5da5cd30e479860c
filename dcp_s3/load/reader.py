"""S3StorageReader: DCP's StorageReader on S3."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from dcp_s3 import errors, process
from dcp_s3.checkpoint.attachments import check_bytes, find_attachments, missing_error, read_attachment, read_extra
from dcp_s3.events import Listener, Loaded, LoadFailed, LoadStarted, emit
from dcp_s3.failures import called_by_dcp
from dcp_s3.format.control_files import Manifest
from dcp_s3.format.layout import step_of
from dcp_s3.load.assign import MAX_PIECE, Assignment, plan_sharing
from dcp_s3.load.exchange import Exchange
from dcp_s3.load.fetch import Fetcher
from dcp_s3.load.messages import Offer, choose_group, make_offer, new_tag
from dcp_s3.load.plan import READ_GAP
from dcp_s3.load.planner import check_filled
from dcp_s3.load.read import LoadExecutor
from dcp_s3.load.weights import Fetched, fetch, find_uncommitted
from dcp_s3.process import collector_paused, launch
from dcp_s3.s3.store import store_of
from dcp_s3.settings import Settings, SettingsLike, resolve_settings
from dcp_s3.spill.local import LocalObjects
from dcp_s3.store import Counters, Store
from dcp_s3.torch_private import ReaderTransforms
from dcp_s3.units import one_line
from dcp_s3.url import CheckpointURL, is_s3_url, parse_url

logger = logging.getLogger(__name__)


class S3StorageReader(StorageReader):
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
        weights_only: load items that are no tensors (numbers, texts and so on; they are pickles) only if they cannot
            run code: what torch's weights-only unpickler accepts, your ``torch.serialization.add_safe_globals``
            included, and the plain values named in docs/security.md. Others are an UnsafeItemError. The check takes
            about 0.1 ms for a small item, at most 0.15 s for each MB of pickled numbers and texts. False: everything is
            unpickled, so anybody who can write to the bucket can run code here.
        allow_dtype_cast: whether a load may convert a saved tensor to another dtype, as torch's readers do. One warning
            names the tensors whose values may not all fit. False: `TensorMismatchError`, before anything is changed.
        load_sharing: whether data that several ranks of a load need is read from S3 once and sent between the ranks.
            Needs a process group with gloo for CPU tensors. False on one rank means False on all.
        process_group: a group of the ranks that load together, in the same order, with gloo for CPU tensors. The ranks
            send each other through it what several of them need. Needed if ``dcp.load`` is given a group of some
            ranks, or if the default group has no gloo. None: the default group, if all its ranks load.
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
        self.load_id: str = secrets.token_hex(8)
        self._metadata: Metadata | None = None
        self._fetched: Fetched | None = None
        self._began: tuple[float, Counters] | None = None
        """When it began, and what the store's counters were then."""
        self._step: int | None = None
        """The step in the name of the checkpoint."""
        self._together = self._asked_for_url = False

    @called_by_dcp
    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new load, from ``checkpoint_id`` if given.

        Raises:
            InvalidURLError: ``checkpoint_id`` is not an S3 URL.
        """
        if checkpoint_id is not None:
            self._url = parse_url(checkpoint_id)
        if self._fetched is not None and self._fetched.lease is not None:
            self._fetched.lease.release()
        self._begin_load()

    @called_by_dcp
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Fetch and unpickle the checkpoint's metadata; if there is none, that of this rank, of a save of an earlier
        version with ``use_collectives=False``. The rank is that in the reader's ``process_group``, or the launcher's.

        Args:
            rank: read the metadata of this rank.

        DCP's loader takes any error raised here for missing metadata, and replaces it by an AssertionError. It asks for
        `checkpoint_id` right before: then a failure is raised as soon as the returned object is used.

        Raises:
            CheckpointNotFoundError: no committed checkpoint is there.
            CheckpointDeletedError: a prune is about to delete it (checked only with the setting ``reader_lease``).
            CorruptCheckpointError, UnsafeMetadataError: the metadata cannot, or must not, be unpickled.
            WeightsError: safetensors files are there, and damaged.
            StorageError: missing bucket, credentials, network.
        """
        is_load, self._asked_for_url = self._asked_for_url, False
        try:
            url, store = self._here()
            self._step = step_of(url.name)
            self._began = time.monotonic(), store.counters()
            emit(LoadStarted(url=str(url), step=self._step, rank=process.rank()), self.on_event)
            metadata = self._fetch_metadata(kwargs.get("rank"))
        except errors.DcpS3Error as error:
            if is_load:
                return _UnreadableMetadata(error)
            raise
        if getattr(metadata, "storage_meta", None) is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id  # type: ignore[union-attr]
        metadata.storage_meta.checkpoint_id = str(url)  # type: ignore[union-attr]  # a copy was saved elsewhere
        metadata.failure_teller = _FailureTeller(self._tell_failed)  # type: ignore[attr-defined]
        return metadata

    def _fetch_metadata(self, rank: int | None) -> Metadata:
        """The metadata of all ranks, or of one."""
        (url, store), uncommitted = self._here(), self.include_uncommitted
        try:
            self._fetched = fetch(store, url, self.settings, rank, include_uncommitted=uncommitted)
        except errors.CheckpointNotFoundError as error:
            if rank is not None or isinstance(error, errors.CheckpointDeletedError):
                raise
            if self._process_group is not None:
                rank = dist.get_rank(self._process_group)
            else:
                rank = process.rank() if process.is_initialized() else launch().rank
            try:
                self._fetched = fetch(store, url, self.settings, rank, include_uncommitted=uncommitted)
            except errors.CheckpointNotFoundError as own:
                raise (own if isinstance(own, errors.CheckpointDeletedError) else error) from None
        return self._fetched.metadata

    @called_by_dcp
    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Called by DCP on every rank before planning.

        Raises:
            CorruptCheckpointError: it does not say where its items lie. Also what `read_metadata` could not raise.
        """
        if not isinstance(metadata.storage_data, dict):  # which raises, if it is unreadable
            raise errors.CorruptCheckpointError(
                f"the metadata of {self._url} does not say where its items lie (storage_data is "
                f"{type(metadata.storage_data).__name__})",
                url=str(self._url),
            )
        self._metadata = metadata
        self._together = kwargs.get("use_collectives", True) and process.is_initialized()

    @called_by_dcp
    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Say what this rank can share, unless the planner uses ``storage_data`` itself."""
        fetched = self._fetched
        if not self._together or plan.storage_data is not None or fetched is None or fetched.rank is not None:
            return plan
        shares = self.load_sharing and not self.include_uncommitted
        where = f"{self.settings.endpoint_url or ''} {self._url}"
        return replace(plan, storage_data=make_offer(where, fetched.version, self._process_group, shares=shares))

    @called_by_dcp
    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Assign what several ranks read to one of them each, if all can share.

        Raises:
            CorruptCheckpointError: the checkpoint was replaced between the ranks' reads of its metadata.
        """
        offers = [plan.storage_data for plan in plans if isinstance(plan.storage_data, Offer)]
        told: Sequence[Assignment | None] = [None] * len(plans)
        if offers and len(offers) == len(plans) and self._metadata is not None:
            group, reason = choose_group(offers, str(self._url))
            if group:
                with collector_paused():
                    items, most, tag = [plan.items for plan in plans], self.settings.max_part_size, new_tag()
                    found = plan_sharing(self._metadata, items, max_gap=READ_GAP, max_piece=min(MAX_PIECE, most))
                    told = [each._replace(group=group, tag=tag) for each in found] if found else told
            elif len(plans) > 1 and any(offer.shares for offer in offers):
                logger.info("every rank reads %s by itself: %s", self._url, reason)
        return [
            replace(plan, storage_data=mine) if isinstance(plan.storage_data, Offer) else plan
            for plan, mine in zip(plans, told, strict=True)
        ]

    @called_by_dcp
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Load this rank's items. Returns when all are in place.

        Raises:
            TensorMismatchError: before any tensor is changed; only without ``allow_dtype_cast``.
            DeadlineExceededError: S3 made no progress for `stall_timeout`; some tensors are loaded, others are not.
            UnsafeItemError: an item needs what ``weights_only`` refuses.
            PeerReadError: another rank failed to read bytes that this one needs too, or did not begin to.
            CorruptCheckpointError, StorageError
        """
        if self._metadata is None:
            raise errors.SaveProtocolError("read_data was called before set_up_storage_reader")
        (url, store), assignment = self._here(), plan.storage_data
        with contextlib.ExitStack() as stack:
            exchange = None
            if isinstance(assignment, Assignment):
                group: Any = self._process_group if assignment.group == "given" else dist.group.WORLD
                exchange = stack.enter_context(Exchange(group, assignment, url=str(url)))
            check_filled(plan, planner, self._metadata, str(url))
            copies = store if self.settings.spill_dir is None else LocalObjects(store, self.settings, url)
            if self._fetched is not None and self._fetched.lease is not None:
                stack.enter_context(self._fetched.lease.renewed())
            fetcher = Fetcher(copies, url, self.settings)
            executor = LoadExecutor(
                fetcher, self._metadata, self._transforms,
                weights_only=self.weights_only, allow_dtype_cast=self.allow_dtype_cast,
            )  # fmt: skip
            executor.run(plan, planner, exchange)
            if self._began is not None:
                (began, before), now = self._began, store.counters()
                event = Loaded(
                    url=str(url), step=self._step, rank=process.rank(), ranks=process.world_size(),
                    bytes=sum(fetcher.fetched), disk_bytes=sum(copies.sizes) if isinstance(copies, LocalObjects) else 0,
                    seconds=time.monotonic() - began, hedged=now.hedged - before.hedged,
                    throttled=now.throttled - before.throttled,
                )  # fmt: skip
                logger.log(logging.INFO if event.rank == 0 else logging.DEBUG, "%s", event)
                emit(event, self.on_event)
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

    def _tell_failed(self, error: BaseException) -> None:
        """Tell subscribers to events that a load failed on this rank."""
        url = None if self._url is None else str(self._url)
        emit(LoadFailed(url=url, step=self._step, rank=process.rank(), error=error), self.on_event)

    def _here(self) -> tuple[CheckpointURL, Store]:
        """The checkpoint's URL and store."""
        if self._url is None:
            raise errors.InvalidURLError(
                "S3StorageReader has no URL. Remedy: S3StorageReader('s3://bucket/prefix'), or pass "
                "checkpoint_id='s3://bucket/prefix' to dcp.load"
            )
        return self._url, store_of(self._url, self.settings)

    # --- what was stored besides the state --------------------------------------------------------------

    def attachment(self, name: str) -> bytes:
        """The bytes of a small file that was attached to the checkpoint (`S3StorageWriter.attach`).

        Of a checkpoint that another library wrote: those of the object ``{checkpoint}/{name}``. Every call asks S3;
        no rank needs another one for it.

        >>> writer = S3StorageWriter("s3://bucket/run/step-3000")
        >>> writer.attach("config.json", b'{"layers": 32}')
        >>> saved = dcp.save(state, storage_writer=writer)
        >>> S3StorageReader("s3://bucket/run/step-3000").attachment("config.json")
        b'{"layers": 32}'

        Raises:
            EntryNotFoundError: there is none of that name.
            CheckpointNotFoundError: no committed checkpoint is there.
            CorruptCheckpointError: its bytes are not those that were attached.
            StorageError
        """
        (url, store), waiting = self._here(), self._waiting_manifest()
        if waiting is None:
            return read_attachment(store, url, name)
        entry = waiting.attachments.get(name)
        if entry is None:
            raise missing_error(url, name, waiting.attachments)
        data = bytearray(entry.size)
        LocalObjects(store, self.settings, url).read(url.key(entry.path), 0, memoryview(data))
        return check_bytes(bytes(data), url, entry)

    def attachments(self) -> list[str]:
        """Names of the files that are attached to the checkpoint. Those of another library are not known.

        >>> S3StorageReader("s3://bucket/run/step-00002000").attachments()
        []

        Raises:
            CheckpointNotFoundError: no committed checkpoint is there.
            CorruptCheckpointError, StorageError
        """
        (url, store), waiting = self._here(), self._waiting_manifest()
        found = find_attachments(store, url) if waiting is None else waiting.attachments
        return sorted(found or ())

    def extra(self) -> dict[str, Any]:
        """What was stored with the checkpoint as ``extra``, of `S3StorageWriter` or `CheckpointManager.save`. Empty if
        nothing was, or if another library wrote the checkpoint.

        >>> writer = S3StorageWriter("s3://bucket/run/step-3000", extra={"commit": "a1b2c3"})
        >>> saved = dcp.save(state, storage_writer=writer)
        >>> S3StorageReader("s3://bucket/run/step-3000").extra()
        {'commit': 'a1b2c3'}

        Raises:
            CheckpointNotFoundError: no committed checkpoint is there.
            CorruptCheckpointError, StorageError
        """
        (url, store), waiting = self._here(), self._waiting_manifest()
        return read_extra(store, url) if waiting is None else waiting.extra

    def _waiting_manifest(self) -> Manifest | None:
        """The manifest of a commit that waits on this host's disk, if that is to be read."""
        url, store = self._here()
        found = find_uncommitted(store, self.settings, url, None) if self.include_uncommitted else None
        return None if found is None else Manifest.from_json(found.manifest)


# --- metadata on its way through DCP ------------------------------------------------------------------


class _UnreadableMetadata(Metadata):
    """Stands in for metadata that could not be read; raises the reason as soon as it is used."""

    def __init__(self, error: errors.DcpS3Error) -> None:
        object.__setattr__(self, "_reason", error)

    def __getattribute__(self, name: str) -> Any:
        if name in ("state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version"):
            raise object.__getattribute__(self, "_reason")
        return object.__getattribute__(self, name)


@dataclass(eq=False)
class _FailureTeller:
    """Metadata that a reader has read carries it, so that a planner can tell of a failure. Copies tell nobody."""

    tell: Callable[[BaseException], None] = lambda _: None

    def __reduce__(self) -> tuple[type[_FailureTeller], tuple[()]]:
        return _FailureTeller, ()
