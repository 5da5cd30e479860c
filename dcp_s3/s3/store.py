"""The S3 store, on boto3."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from dcp_s3.limit import UNLIMITED, Limit
from dcp_s3.memory import Piece
from dcp_s3.s3 import download, listing, multipart
from dcp_s3.s3.bucket import Bucket, map_in_threads
from dcp_s3.s3.pressure import Tuning
from dcp_s3.s3.upload import Uploader
from dcp_s3.settings import Settings
from dcp_s3.store import Counters, ReadWidth, Store, StreamedObject
from dcp_s3.url import CheckpointURL


@dataclass(frozen=True)
class S3Store(Bucket, Store):
    """A bucket as a `Store`. The functions of this package that take a `Bucket` are its methods."""

    read = download.read
    page = listing.page
    delete = listing.delete
    uploads = listing.uploads
    abort = multipart.abort
    map = map_in_threads

    def read_width(self) -> int:
        return min(self.known.width("download").connections, self.settings.max_connections)

    def adapt_reads(self, *, resize: Callable[[int], None], is_busy: Callable[[], bool], most: int) -> ReadWidth:
        most = min(most, self.settings.max_connections)
        return Tuning(self.known, "download", resize=resize, is_busy=is_busy, most=most)

    def counters(self) -> Counters:
        return Counters(self.known.gate.count, self.known.hedges.state.started)

    def put_stream(
        self, key: str, size: int, pieces: Iterable[Piece], *, part_size: int | None = None
    ) -> StreamedObject:
        uploader = Uploader(self)
        with uploader:
            return uploader.put_stream(key, size, pieces, part_size=part_size)

    def batch(self, *, total: int, ranks: int = 1, keys: Sequence[str] = ()) -> Uploader:
        return Uploader(self, total=total, ranks=ranks)

    def copy(self, source: Store, source_key: str, key: str) -> None:
        if isinstance(source, S3Store):
            multipart.copy_object(self, source, source_key, key)
        else:
            super().copy(source, source_key, key)


def store_of(url: CheckpointURL, settings: Settings, limit: Limit = UNLIMITED) -> S3Store:
    """The store of a URL's bucket."""
    return S3Store(url.bucket, settings, limit)
