"""An object store as everything above sees it: one interface, and the values that go in and come out."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from dcp_s3.limit import Limit

SelfStore = TypeVar("SelfStore", bound="Store")


@dataclass(frozen=True)
class ListedObject:
    """One object of a listing."""

    key: str
    size: int
    modified_at: float
    """When it was written, seconds since the epoch."""
    etag: str = ""
    """As the store gave it, with quotes; empty if it gave none."""


@dataclass(frozen=True)
class Page:
    """One page of a listing, or a whole one."""

    objects: tuple[ListedObject, ...]
    """In key order."""
    prefixes: tuple[str, ...]
    """With a delimiter, the common prefixes, each with the delimiter at its end."""
    next_token: str | None = None
    """Asks for the next page; None on the last."""
    server_time: float | None = None
    """Seconds since the epoch on the store's clock when it was asked, None if it does not tell."""


@dataclass(frozen=True)
class ObjectHead:
    """What a store says of an object without giving it."""

    key: str
    size: int
    modified_at: float
    """When it was written, seconds since the epoch."""
    etag: str
    """As the store gave it, with quotes."""
    metadata: Mapping[str, str]
    """User metadata, names in lower case."""
    crc64nvme: str | None = None
    """CRC-64/NVME of all its bytes, as 16 hexadecimal digits, if it was asked for and the store knows it."""
    server_time: float | None = None
    """Seconds since the epoch on the store's clock when it was asked, None if it does not tell."""


@dataclass(frozen=True)
class StoredObject:
    """A small object as it was read."""

    data: bytes
    metadata: Mapping[str, str]
    """User metadata, names in lower case."""
    etag: str
    """As the store gave it, with quotes."""


@dataclass(frozen=True)
class Expect:
    """What has to be there when an object is put in its place."""

    etag: str = ""
    """That of the object that is there; empty: there is none."""


ABSENT = Expect()


@dataclass(frozen=True)
class Target:
    """An object to delete."""

    key: str
    etag: str = ""
    """Delete it only while it has this ETag; empty: in any case."""
    version_id: str = ""
    """Of one version that is to go for good; empty: the current one, by a delete marker where there are versions."""


@dataclass(frozen=True)
class Upload:
    """A multipart upload that is neither completed nor aborted."""

    key: str
    """Of the object that it would become."""
    upload_id: str
    initiated_at: float = 0.0
    """When it was begun, seconds since the epoch."""


class Store(abc.ABC):
    """Objects by key, each written whole: what is read is one that somebody has finished writing.

    Keys are text, compared by their UTF-8 bytes. A missing object is `ObjectNotFoundError`; a store that cannot be
    reached, refuses, or does not answer in time raises another `StorageError`. Thread safe.
    """

    name: str
    """What messages call it: a bucket, a directory."""
    limit: Limit
    """What bounds its requests."""

    @abc.abstractmethod
    def within(self: SelfStore, limit: Limit) -> SelfStore:
        """The same store, its requests bounded by ``limit`` and nothing else."""

    @abc.abstractmethod
    def read(self, key: str, start: int, into: memoryview, etag: str | None = None) -> None:
        """Fill memory with the bytes of an object from byte ``start`` on.

        Args:
            key: of the object.
            start: first byte, from 0.
            into: writable and contiguous; if it is empty, nothing is asked.
            etag: of the version to read; None for any, but all bytes are of one.

        Raises:
            ObjectNotFoundError: no such object.
            PreconditionFailedError: it has another ETag, or was replaced while it was read.
            OutOfRangeError: it has fewer bytes.
            Cancelled: the limit's ``cancel`` was set; other StorageErrors.
        """

    @abc.abstractmethod
    def get(self, key: str) -> StoredObject:
        """A small object, whole.

        Raises:
            ObjectNotFoundError: no such object; other StorageErrors.
        """

    @abc.abstractmethod
    def put(
        self,
        key: str,
        data: bytes | memoryview,
        *,
        expect: Expect | None = None,
        content_type: str = "application/octet-stream",
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        """Write a small object, whole.

        Args:
            key: of the object.
            data: its bytes.
            expect: what has to be there; None for anything. Where a store knows no conditions, it is written in any
                case, after one warning.
            content_type: MIME type.
            metadata: user metadata; names in lower case.

        Raises:
            PreconditionFailedError: something else is there, and it is not these bytes: somebody else wrote it.
            ObjectNotFoundError: an object with an ETag was expected, and there is none.
            StorageError: it may or may not be written.
        """

    @abc.abstractmethod
    def head(self, key: str, *, checksum: bool = False) -> ObjectHead:
        """What the store says of an object.

        Args:
            key: of the object.
            checksum: whether to ask for its checksum, too.

        Raises:
            ObjectNotFoundError: no such object (or no such bucket); other StorageErrors.
        """

    @abc.abstractmethod
    def exists(self, key: str) -> bool:
        """Whether there is such an object.

        Raises:
            StorageError: cannot tell.
        """

    @abc.abstractmethod
    def page(self, prefix: str, delimiter: str = "", *, token: str | None = None) -> Page:
        """Some of the objects whose keys start with ``prefix``, in key order.

        Args:
            prefix: of the keys.
            delimiter: keys that go on with it after the prefix count as one common prefix.
            token: of the page before, None for the first.

        Raises:
            StorageError: cannot tell.
        """

    def list(self, prefix: str, delimiter: str = "") -> Page:
        """All of them, as one page.

        Raises:
            StorageError: cannot tell.
        """
        pages = [self.page(prefix, delimiter)]
        while pages[-1].next_token is not None:
            pages.append(self.page(prefix, delimiter, token=pages[-1].next_token))
        return join(pages)

    @abc.abstractmethod
    def delete(self, targets: Iterable[str | Target]) -> Sequence[str]:
        """Delete objects, by their keys or as `Target`s; those that do not exist count as deleted.

        Returns:
            Keys that were left alone because they have another ETag. A store that knows no conditions deletes them.

        Raises:
            StorageError: some could not be deleted.
        """

    @abc.abstractmethod
    def uploads(self, prefix: str) -> Sequence[Upload]:
        """Every open multipart upload whose key starts with ``prefix``, by key; none where there are no such uploads.

        Raises:
            StorageError: cannot tell.
        """

    @abc.abstractmethod
    def abort(self, upload: Upload) -> None:
        """Abort a multipart upload; one that is gone counts as aborted.

        Raises:
            StorageError: it may stay open.
        """


def join(pages: Sequence[Page]) -> Page:
    """The pages of one listing as one."""
    return Page(
        tuple(each for page in pages for each in page.objects),
        tuple(each for page in pages for each in page.prefixes),
        None,
        pages[0].server_time,
    )


def same_etag(one: str | None, other: str | None) -> bool:
    """Whether two ETags are the same: some stores leave out the quotes at times."""
    return (one or "").strip('"') == (other or "").strip('"')


def target_of(each: str | Target) -> Target:
    """What `Store.delete` takes, as a `Target`."""
    return Target(each) if isinstance(each, str) else each
