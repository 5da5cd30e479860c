"""The metadata of a load: fetched under a lease, or what stands in for it when it cannot be read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

from torch.distributed.checkpoint.metadata import Metadata

from dcp_s3 import errors
from dcp_s3.checkpoint.lease import ReaderLease
from dcp_s3.checkpoint.stored_metadata import check_metadata, fetch_metadata
from dcp_s3.checksum import crc64nvme
from dcp_s3.format.layout import SAVE_ID_KEY, deletion_id
from dcp_s3.format.metadata import load_metadata
from dcp_s3.load.attachments import find_uncommitted
from dcp_s3.settings import Settings
from dcp_s3.store import Store
from dcp_s3.url import CheckpointURL


class FetchedMetadata(NamedTuple):
    metadata: Metadata
    version: int
    """Hash of its bytes."""
    lease: ReaderLease | None
    """Lease on the checkpoint; None if its commit waits on this host's disk."""


def fetch(
    store: Store, url: CheckpointURL, settings: Settings, rank: int | None, *, include_uncommitted: bool
) -> FetchedMetadata:
    """Fetch the global metadata, or that of one rank of a save without collectives.

    Raises:
        CheckpointNotFoundError, CheckpointDeletedError, CorruptCheckpointError, UnsafeMetadataError, StorageError
    """
    waiting = find_uncommitted(store, settings, url, rank) if include_uncommitted else None
    if waiting is not None:
        metadata = load_metadata(waiting.metadata, url=str(url), of_rank=rank is not None)
        return FetchedMetadata(metadata, crc64nvme(waiting.metadata), None)
    lease = ReaderLease(store, url, settings.reader_lease)
    lease.take()
    try:
        stored = fetch_metadata(store, url, rank)
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
        if name in (
            "state_dict_metadata",
            "planner_data",
            "storage_data",
            "storage_meta",
            "version",
        ):
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
