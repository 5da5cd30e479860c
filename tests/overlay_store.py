"""One store in front of another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from dcp_s3 import errors
from dcp_s3.limit import Limit
from dcp_s3.memory import Piece
from dcp_s3.store import DeleteTarget, Expect, ObjectHead, Page, Store, StoredObject, StreamedObject, Upload

T = TypeVar("T")


class Overlay(Store):
    """Reads objects from the near store if they are there, else from the far one; all else goes to the far one.

    An object to write or delete is first removed from the near store, so that nobody reads the old one.

    Args:
        near: store asked first: a cache, or what waits on this host to be uploaded.
        far: store that counts.
    """

    def __init__(self, near: Store, far: Store) -> None:
        self._near = near
        self._far = far
        self.name = far.name
        self.limit = far.limit

    def within(self, limit: Limit) -> Overlay:
        return Overlay(self._near.within(limit), self._far.within(limit))

    def _find(self, ask: Callable[[Store], T]) -> T:
        try:
            return ask(self._near)
        except (errors.ObjectNotFoundError, errors.PreconditionFailedError, errors.OutOfRangeError):
            return ask(self._far)

    def read(self, key: str, start: int, into: memoryview, etag: str | None = None) -> None:
        self._find(lambda store: store.read(key, start, into, etag))

    def get(self, key: str) -> StoredObject:
        return self._find(lambda store: store.get(key))

    def head(self, key: str, *, checksum: bool = False) -> ObjectHead:
        return self._find(lambda store: store.head(key, checksum=checksum))

    def exists(self, key: str) -> bool:
        return self._near.exists(key) or self._far.exists(key)

    def put(
        self,
        key: str,
        data: bytes | memoryview,
        *,
        expect: Expect | None = None,
        content_type: str = "application/octet-stream",
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        self._near.delete([key])
        self._far.put(key, data, expect=expect, content_type=content_type, metadata=metadata)

    def put_stream(
        self, key: str, size: int, pieces: Iterable[Piece], *, part_size: int | None = None, resume: bool = False
    ) -> StreamedObject:
        self._near.delete([key])
        return self._far.put_stream(key, size, pieces, part_size=part_size, resume=resume)

    def page(self, prefix: str, delimiter: str = "", *, token: str | None = None) -> Page:
        return self._far.page(prefix, delimiter, token=token)

    def delete(self, targets: Iterable[str | DeleteTarget]) -> Sequence[str]:
        targets = list(targets)
        self._near.delete([each if isinstance(each, str) else each.key for each in targets])
        return self._far.delete(targets)

    def uploads(self, prefix: str) -> Sequence[Upload]:
        return self._far.uploads(prefix)

    def abort(self, upload: Upload) -> None:
        self._far.abort(upload)
