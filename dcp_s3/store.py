"""The interface of an object store, and the values that go in and come out."""

from __future__ import annotations

import abc
import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from types import TracebackType
from typing import NamedTuple, TypeVar

from dcp_s3 import errors
from dcp_s3.limit import Cancelled, Limit
from dcp_s3.memory import Piece, ReadTarget
from dcp_s3.units import format_size

SelfStore = TypeVar("SelfStore", bound="Store")
T = TypeVar("T")
U = TypeVar("U")

Moved = Callable[[int], None]
"""Called with the number of bytes that have just arrived."""
Into = memoryview | Sequence[ReadTarget]
"""Writable, contiguous memory, or several pieces of it, in order."""
UserMetadata = Mapping[str, str] | None
"""Names in lower case, and their values."""


class ListedObject(NamedTuple):
    """An object in a listing. A tuple: a listing has many."""

    key: str
    size: int
    modified_at: float
    """When the object was written, in seconds since the epoch."""
    etag: str = ""
    """ETag as the store gave it, with quotes; empty if it gave none."""


@dataclass(frozen=True)
class Page:
    """One page of a listing, or a whole one."""

    objects: tuple[ListedObject, ...]
    """In key order."""
    prefixes: tuple[str, ...]
    """The common prefixes, each ending with the delimiter; none without a delimiter."""
    next_token: str | None = None
    """Token that asks for the next page; None on the last."""
    server_time: float | None = None
    """The store's clock when it was asked, in seconds since the epoch; None if the store does not tell."""


@dataclass(frozen=True)
class ObjectHead:
    """The properties of an object, without its bytes."""

    key: str
    size: int
    modified_at: float
    """When the object was written, in seconds since the epoch."""
    etag: str
    """ETag as the store gave it, with quotes."""
    metadata: Mapping[str, str]
    """User metadata, names in lower case."""
    crc64nvme: str | None = None
    """CRC-64/NVME of the whole object, as 16 hexadecimal digits, if it was asked for and the store knows it."""
    server_time: float | None = None
    """The store's clock when it was asked, in seconds since the epoch; None if the store does not tell."""


@dataclass(frozen=True)
class StoredObject:
    """A small object that was read."""

    data: bytes
    metadata: Mapping[str, str]
    """User metadata, names in lower case."""
    etag: str
    """ETag as the store gave it, with quotes."""


@dataclass(frozen=True)
class Expect:
    """The condition of a write: what must be there before it."""

    etag: str = ""
    """ETag of the object that must be there; empty if there must be none."""
    required: bool = False
    """Whether a store that is known to lack such conditions must refuse (PreconditionFailedError), instead of writing
    without."""


ABSENT = Expect()

BATCH = 1000
"""Most objects that one request deletes: https://docs.aws.amazon.com/AmazonS3/latest/API/API_DeleteObjects.html."""


class DeleteTarget(NamedTuple):
    """An object to delete."""

    key: str
    etag: str = ""
    """Delete the object only while it has this ETag; if empty, in any case."""


@dataclass(frozen=True)
class Upload:
    """A multipart upload that is neither completed nor aborted."""

    key: str
    """Key of the object that the upload would become."""
    upload_id: str
    initiated_at: float = 0.0
    """When the upload was begun, in seconds since the epoch, on the store's clock."""


@dataclass(frozen=True)
class StreamedObject:
    """A data object that the store has taken."""

    size: int
    """Size in bytes."""
    crc64nvme: int | None
    """CRC-64/NVME of all bytes; None if checksums are off."""
    spilled: bool = False
    """Whether it waits on this host's disk to be put where it belongs."""


@dataclass(frozen=True)
class CopyRange:
    """A run of bytes of an object, to be copied into another one."""

    key: str
    start: int
    """First byte."""
    stop: int
    """Byte after the last."""
    size: int
    """Size of the whole object in bytes."""
    crc: int
    """CRC-64/NVME of the whole object."""


@dataclass(frozen=True)
class Counters:
    """What this process has seen of a store, since it began."""

    throttled: int = 0
    """Requests that it throttled."""
    hedged: int = 0
    """Reads that straggled, so that they were requested twice."""


class ReadWidth:
    """Number of reads at once of one transfer."""

    def __init__(self, connections: int) -> None:
        self.connections = connections

    def moved(self, count: int) -> None:
        """Note that ``count`` bytes have arrived. Called by any thread."""


class Store(abc.ABC):
    """Objects by key, each written whole: a reader sees only objects that are completely written.

    Keys are text, compared by their UTF-8 bytes. A missing object raises `ObjectNotFoundError`. A store that
    cannot be reached, refuses, or does not answer in time raises another `StorageError`. Thread safe.
    """

    name: str
    """Name of the store in messages: a bucket, a directory."""
    limit: Limit
    """Limit on the store's requests."""

    @abc.abstractmethod
    def within(self: SelfStore, limit: Limit) -> SelfStore:
        """The same store with its requests bounded by ``limit`` only."""

    @abc.abstractmethod
    def read(self, key: str, start: int, into: Into, etag: str | None = None, *, moved: Moved | None = None) -> None:
        """Fill memory with the bytes of an object from byte ``start`` on; nothing is requested if it is empty. ``etag``
        is that of the version to read; None for any, but all bytes are of one version.

        Raises:
            PreconditionFailedError: the object has another ETag, or was replaced while it was read.
            OutOfRangeError: the object has fewer bytes.
            Cancelled: the limit's ``cancel`` was set.
        """

    def distrust(self, key: str) -> None:  # noqa: B027 - most stores have no copies
        """Read this object from where it counts from now on: what was read is not what its checksum says."""

    def read_width(self) -> int:
        """Number of reads at once that suit the store, to begin with."""
        return 4

    def adapt_reads(self, *, resize: Callable[[int], None], is_busy: Callable[[], bool], most: int) -> ReadWidth:
        """Adapts the number of reads at once while a transfer runs: calls ``resize``, from a thread of its own."""
        return ReadWidth(min(most, self.read_width()))

    def counters(self) -> Counters:
        return Counters()

    @abc.abstractmethod
    def get(self, key: str) -> StoredObject:
        """Read a small object, whole."""

    @abc.abstractmethod
    def put(
        self, key: str, data: bytes | memoryview, *, expect: Expect | None = None, metadata: UserMetadata = None
    ) -> None:
        """Write a small object, whole. A store without conditional writes writes whatever is expected, after one
        warning.

        Raises:
            PreconditionFailedError: the object is not as expected, nor has it these bytes: somebody else wrote it.
            ObjectNotFoundError: an object with an ETag was expected, and there is none.
            StorageError: the object may or may not have been written.
        """

    @abc.abstractmethod
    def put_stream(
        self, key: str, size: int, pieces: Iterable[Piece], *, part_size: int | None = None
    ) -> StreamedObject:
        """Write a data object of about ``size`` bytes, made of pieces that are sent as they are, without copies.

        Each piece (or what it was split into, `Piece.parts`) has its CRC when this returns, unless checksums are off,
        and no memory any more. ``part_size`` is the size of its parts in bytes; None: what suits the store.

        Raises:
            StorageError: the object is not there.
        """

    def batch(self, *, total: int, ranks: int = 1, keys: Sequence[str] = ()) -> Batch:
        """A batch of data objects of about ``total`` bytes in all, while ``ranks`` ranks write as much at a time.

        ``keys`` are those of all its objects: a store that spills must know them beforehand.
        """
        return PlainBatch(self)

    def copy(self, source: Store, source_key: str, key: str) -> None:
        """Copy an object with its user metadata, on S3 without moving its bytes; what is at ``key`` is replaced.

        ``source`` is reached in the same way: a bucket of the same endpoint. It may be this one.

        Raises:
            PreconditionFailedError: the object was replaced while it was copied.
            StorageError: the store refuses, or cannot copy by itself.
        """
        found = source.get(source_key)
        self.put(key, found.data, metadata=found.metadata)

    @abc.abstractmethod
    def head(self, key: str, *, checksum: bool = False) -> ObjectHead:
        """The properties of an object, with ``checksum`` also that. ObjectNotFoundError may mean that there is no such
        bucket."""

    def exists(self, key: str) -> bool:
        """Whether the object exists."""
        try:
            self.head(key)
        except errors.ObjectNotFoundError:
            return False
        return True

    @abc.abstractmethod
    def page(self, prefix: str, delimiter: str = "", *, token: str | None = None) -> Page:
        """Some of the objects whose keys start with ``prefix``, in key order.

        Keys with the same text up to a delimiter after the prefix count as one common prefix. ``token`` is the
        ``next_token`` of the page before.
        """

    def list(self, prefix: str, delimiter: str = "") -> Page:
        """All objects whose keys start with ``prefix``, as one page."""
        pages = [self.page(prefix, delimiter)]
        while pages[-1].next_token is not None:
            pages.append(self.page(prefix, delimiter, token=pages[-1].next_token))
        objects, prefixes = zip(*((page.objects, page.prefixes) for page in pages), strict=True)
        return Page(tuple(chain(*objects)), tuple(chain(*prefixes)), None, pages[0].server_time)

    @abc.abstractmethod
    def delete(self, targets: Iterable[str | DeleteTarget]) -> Sequence[str]:
        """Delete objects, given as keys or `DeleteTarget`s; those that do not exist count as deleted.

        Returns the keys left alone because their objects have another ETag. A store without conditional deletes deletes
        them. After a StorageError some may be deleted.
        """

    def uploads(self, prefix: str) -> Sequence[Upload]:
        """Every open multipart upload whose key starts with ``prefix``, in key order; none if the store has none."""
        return ()

    def abort(self, upload: Upload) -> None:  # noqa: B027 - most stores have no uploads
        """Abort a multipart upload; one that is gone counts as aborted. After a StorageError it may stay open."""

    def map(self: SelfStore, function: Callable[[SelfStore, T], U], items: Iterable[T]) -> Sequence[U]:
        """Results of ``function(store, item)`` for all items, in their order.

        Where requests take time, many items are under way at once, in other threads.

        The function makes its requests on the store that it is given. The first failure is raised: it sets the
        ``cancel`` of that store's limit, no other item is begun, and those under way have ended.

        Raises:
            Cancelled: the limit's ``cancel`` was set.
        """
        results = []
        for item in items:
            self.limit.check(f"work on {item}")
            results.append(function(self, item))
        return results


class Batch(contextlib.AbstractContextManager["Batch"]):
    """Data objects that are written together, by any number of threads.

    A context manager, which owns the threads and what bounds the memory in flight. When it is left, what was written
    is durable. An exception that leaves it cancels what is under way, and removes the objects that it has written. In
    any case nothing is under way afterwards.
    """

    chunk_size: int = 2**24
    """Bytes of a piece that suit the store best, if it has to be made."""
    in_flight: int = 1
    """Pieces of this size that the batch may hold at a time."""
    sent: int = 0
    """Bytes that the store has taken."""
    error: BaseException | None = None
    """The failure that cancelled everything, if one did."""

    @abc.abstractmethod
    def put_stream(self, key: str, size: int, pieces: Iterable[Piece]) -> StreamedObject:
        """See `Store.put_stream`; ``pieces`` may be iterated again, from the first one on.

        Raises:
            Cancelled: another object of the batch has failed.
            StorageError
        """

    def copy(self, key: str, ranges: Sequence[CopyRange], crc: int) -> bool:
        """Make an object of ranges of other objects, without moving their bytes, and check it: ``crc`` is its CRC-64.

        Each range but the last has at least 5 MiB. Returns False if the store does not copy, or an object is gone or is
        another one: then the bytes have to be put.
        """
        return False

    @property
    def progress(self) -> str:
        """How far it has come, for messages."""
        return f"{format_size(self.sent)} were on S3"

    @abc.abstractmethod
    def stop(self) -> None:
        """Make everything under way fail soon."""


class PlainBatch(Batch):
    """Puts each object with `Store.put_stream`, in the caller's thread."""

    def __init__(self, store: Store) -> None:
        self._cancel, self._lock = threading.Event(), threading.Lock()
        self._store = store.within(replace(store.limit, cancel=self._cancel))
        self._written: list[str] = []

    def put_stream(self, key: str, size: int, pieces: Iterable[Piece]) -> StreamedObject:
        def until_cancelled() -> Iterator[Piece]:
            for piece in pieces:
                if self._cancel.is_set():
                    raise Cancelled
                yield piece

        result = self._store.put_stream(key, size, until_cancelled())
        with self._lock:
            self._written.append(key)
            self.sent += result.size
        return result

    def stop(self) -> None:
        self._cancel.set()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if kind is not None:
            self.stop()
            self._store.within(self._store.limit.for_cleanup()).delete(self._written)


def same_etag(one: str | None, other: str | None) -> bool:
    """Whether two ETags are the same, quotes aside: some stores leave them out at times."""
    return (one or "").strip('"') == (other or "").strip('"')
