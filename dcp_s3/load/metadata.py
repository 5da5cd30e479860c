"""What a reader reads of a checkpoint besides its state: metadata (under a lease), attachments, ``extra``. Also while
the commit still waits on this host's disk."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

from torch.distributed.checkpoint.metadata import Metadata

from dcp_s3 import errors
from dcp_s3.checkpoint.attachments import check_bytes, find_attachments, missing_error, read_attachment, read_extra
from dcp_s3.checkpoint.commit_state import CommitState, SaveIdentity, find_state
from dcp_s3.checkpoint.lease import ReaderLease
from dcp_s3.checkpoint.stored_metadata import check_metadata, fetch_metadata
from dcp_s3.format.control_files import Manifest
from dcp_s3.format.layout import SAVE_ID_KEY, deletion_id
from dcp_s3.format.metadata import load_metadata
from dcp_s3.load.weights import fetch_weights, version_of
from dcp_s3.memory import crc64nvme
from dcp_s3.settings import Settings
from dcp_s3.spill.local import WaitingCommit, find_commits, with_copies
from dcp_s3.spill.store import open_store
from dcp_s3.store import Store
from dcp_s3.url import CheckpointURL

logger = logging.getLogger(__name__)


class FetchedMetadata(NamedTuple):
    metadata: Metadata
    version: int
    """Hash of its bytes."""
    lease: ReaderLease | None
    """Lease on the checkpoint; None if its commit waits on this host's disk."""


def fetch(
    store: Store, url: CheckpointURL, settings: Settings, rank: int | None, *, include_uncommitted: bool
) -> FetchedMetadata:
    """Fetch the global metadata, or that of one rank of a save without collectives; or make it of safetensors files.

    Raises:
        CheckpointNotFoundError, CheckpointDeletedError, CorruptCheckpointError, UnsafeMetadataError, WeightsError,
        StorageError
    """
    waiting = find_uncommitted(store, settings, url, rank) if include_uncommitted else None
    if waiting is not None:
        metadata = load_metadata(waiting.metadata, url=str(url), of_rank=rank is not None)
        return FetchedMetadata(metadata, crc64nvme(waiting.metadata), None)
    lease = ReaderLease(store, url, settings.reader_lease)
    lease.take()
    try:
        try:
            stored = fetch_metadata(store, url, rank)
        except errors.CheckpointNotFoundError:
            weights = fetch_weights(store, url) if rank is None else None
            if weights is None:
                raise
            lease.release()
            return FetchedMetadata(weights, version_of(weights), None)
        metadata = check_metadata(stored, url, rank)
        save_ids = stored.metadata.get(SAVE_ID_KEY), getattr(metadata.storage_meta, "save_id", None), None
        deletions = {deletion_id(each, stored.etag) for each in save_ids} if rank is None else None
        lease.check_not_deleted(deletions, rank=rank)
    except BaseException:
        lease.release()
        raise
    return FetchedMetadata(metadata, crc64nvme(stored.data), lease)


class UnreadableMetadata(Metadata):
    """Stands in for metadata that could not be read; raises the reason as soon as it is used."""

    def __init__(self, error: errors.DcpS3Error) -> None:
        object.__setattr__(self, "_reason", error)

    def fail(self) -> NoReturn:
        raise object.__getattribute__(self, "_reason")

    def __getattribute__(self, name: str) -> Any:
        if name in ("state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version"):
            UnreadableMetadata.fail(self)
        return object.__getattribute__(self, name)


class FailureTeller:
    """Metadata that a reader has read carries it, so that a planner can tell of a failure. Copies tell nobody."""

    def __init__(self, tell: Callable[[BaseException], None] | None = None) -> None:
        self._tell = tell

    def __call__(self, error: BaseException) -> None:
        if self._tell is not None:
            self._tell(error)

    def __reduce__(self) -> tuple[type[FailureTeller], tuple[()]]:
        return FailureTeller, ()


class AttachmentReader(ABC):
    """The part of `S3StorageReader` that reads what was stored with a checkpoint besides its state."""

    settings: Settings
    include_uncommitted: bool

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
        url, store, waiting = self._require_url(), self._store(), self._waiting_manifest()
        if waiting is None:
            return read_attachment(store, url, name)
        entry = waiting.attachments.get(name)
        if entry is None:
            raise missing_error(url, name, waiting.attachments)
        data = bytearray(entry.size)
        with with_copies(store, self.settings, url) as copies:
            copies.read(url.key(entry.path), 0, memoryview(data))
        return check_bytes(bytes(data), url, entry)

    def attachments(self) -> list[str]:
        """Names of the files that are attached to the checkpoint. Those of another library are not known.

        >>> S3StorageReader("s3://bucket/run/step-00002000").attachments()
        []

        Raises:
            CheckpointNotFoundError: no committed checkpoint is there.
            CorruptCheckpointError, StorageError
        """
        waiting = self._waiting_manifest()
        found = find_attachments(self._store(), self._require_url()) if waiting is None else waiting.attachments
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
        waiting = self._waiting_manifest()
        return read_extra(self._store(), self._require_url()) if waiting is None else waiting.extra

    def _waiting_manifest(self) -> Manifest | None:
        """The manifest of a commit that waits on this host's disk, if that is to be read."""
        url = self._require_url()
        found = find_uncommitted(self._store(), self.settings, url) if self.include_uncommitted else None
        return None if found is None else Manifest.from_json(found.manifest)

    @abstractmethod
    def _require_url(self) -> CheckpointURL: ...

    @abstractmethod
    def _store(self) -> Store: ...


def find_uncommitted(
    store: Store, settings: Settings, url: CheckpointURL, rank: int | None = None
) -> WaitingCommit | None:
    """The newest commit at ``url`` that is spilled on this host; None if S3 has a newer one.

    Raises:
        StorageError: missing bucket, credentials.
    """
    spill = open_store(settings)
    found = None
    for waiting in find_commits(spill) if spill else ():
        journal = waiting.journal
        if journal.url == str(url) and journal.commit is not None and journal.commit.rank == rank:
            found = waiting
    if found is None:
        return None
    journal = found.journal
    try:
        state = find_state(store, SaveIdentity(url, journal.save_id, rank), path=None, started_at=journal.created_at)
    except errors.TransferError as error:
        logger.warning("S3 does not say whether it has a newer checkpoint than this host: %s", error)
        return found
    return found if state is CommitState.WAITING else None
