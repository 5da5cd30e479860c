"""The S3 store, on boto3."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from dcp_s3.limit import UNLIMITED, Limit
from dcp_s3.memory import Piece, targets_of
from dcp_s3.s3 import listing, multipart, operations
from dcp_s3.s3.bucket import Bucket
from dcp_s3.s3.download import fetch_into
from dcp_s3.s3.hedge import hedges_of
from dcp_s3.s3.pressure import Tuning, width_of
from dcp_s3.s3.upload import Uploader
from dcp_s3.settings import Settings
from dcp_s3.store import (
    Counters,
    DeleteTarget,
    Expect,
    Into,
    Moved,
    Page,
    ReadWidth,
    Store,
    StreamedObject,
    Upload,
    UserMetadata,
    target_of,
)
from dcp_s3.url import CheckpointURL


@dataclass(frozen=True)
class S3Store(Bucket, Store):
    """A bucket as a `Store`; it is read and asked as `Bucket` says."""

    def read(self, key: str, start: int, into: Into, etag: str | None = None, *, moved: Moved | None = None) -> None:
        fetch_into(self, key, start, targets_of(into), etag=etag, moved=moved)

    def read_width(self) -> int:
        return min(width_of(self.settings, self.name, "download").connections, self.settings.max_connections)

    def adapt_reads(self, *, resize: Callable[[int], None], is_busy: Callable[[], bool], most: int) -> ReadWidth:
        return Tuning(
            width_of(self.settings, self.name, "download"), self.gate, f"downloads from s3://{self.name}",
            resize=resize, is_busy=is_busy, most=min(most, self.settings.max_connections),
        )  # fmt: skip

    def counters(self) -> Counters:
        return Counters(self.gate.state.throttled, hedges_of(self).state.started)

    def put(
        self, key: str, data: bytes | memoryview, *, expect: Expect | None = None, metadata: UserMetadata = None
    ) -> None:
        operations.put(self, key, data, expect, metadata)

    def put_stream(
        self, key: str, size: int, pieces: Iterable[Piece], *, part_size: int | None = None, resume: bool = False
    ) -> StreamedObject:
        with Uploader(self) as uploader:
            return uploader.put_stream(key, size, pieces, part_size=part_size, resume=resume)

    def batch(self, *, total: int, ranks: int = 1, keys: Sequence[str] = ()) -> Uploader:
        return Uploader.planned(self, total=total, ranks=ranks)

    def copy(self, source: Store, source_key: str, key: str) -> None:
        if isinstance(source, S3Store):
            multipart.copy_object(self, source, source_key, key)
        else:
            super().copy(source, source_key, key)

    def page(self, prefix: str, delimiter: str = "", *, token: str | None = None) -> Page:
        return listing.page(self, prefix, delimiter, token=token)

    def delete(self, targets: Iterable[str | DeleteTarget]) -> Sequence[str]:
        return listing.delete(self, map(target_of, targets))

    def uploads(self, prefix: str) -> Sequence[Upload]:
        return listing.uploads(self, prefix)

    def abort(self, upload: Upload) -> None:
        multipart.abort(self, upload.key, upload.upload_id)


def store_of(url: CheckpointURL, settings: Settings, limit: Limit = UNLIMITED) -> S3Store:
    """The store of a URL's bucket."""
    return S3Store(url.bucket, settings, limit)
