"""A store as one rank reaches it that an `adversary` plays against: each request is a point."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from dcp_s3.limit import Limit
from dcp_s3.memory import Piece
from dcp_s3.store import (
    Batch,
    DeleteTarget,
    Expect,
    ObjectHead,
    Page,
    Store,
    StoredObject,
    StreamedObject,
    Upload,
    target_of,
)
from dcp_s3.stores.batch import PlainBatch

if TYPE_CHECKING:
    from tests.coordination.adversary import Actor, Adversary

T = TypeVar("T")


class ActorStore(Store):
    """The store as one rank reaches it."""

    def __init__(self, adversary: Adversary, actor: Actor, limit: Limit | None = None) -> None:
        self.adversary, self._actor = adversary, actor
        self._stored = adversary.stored
        self.name, self.limit = self._stored.name, limit or self._stored.limit

    def within(self, limit: Limit) -> ActorStore:
        return ActorStore(self.adversary, self._actor, limit)

    def _ask(self, text: str, call: Callable[[], T]) -> T:
        return self._actor.request(text, call, changes=False)

    def read(self, key: str, start: int, into: memoryview, etag: str | None = None) -> None:
        self._ask(f"read {key}", lambda: self._stored.read(key, start, into, etag))

    def get(self, key: str) -> StoredObject:
        return self._ask(f"get {key}", lambda: self._stored.get(key))

    def put(
        self,
        key: str,
        data: bytes | memoryview,
        *,
        expect: Expect | None = None,
        content_type: str = "application/octet-stream",
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        condition = "" if expect is None else f" if-match {expect.etag}" if expect.etag else " if-none-match"
        expect, data = expect if self.adversary.honours_conditions else None, bytes(data)
        self._actor.request(
            f"put {key}{condition}",
            lambda: self._stored.put(key, data, expect=expect, content_type=content_type, metadata=metadata),
            changes=True,
        )

    def put_stream(
        self, key: str, size: int, pieces: Iterable[Piece], *, part_size: int | None = None, resume: bool = False
    ) -> StreamedObject:
        write = lambda: self._stored.put_stream(key, size, pieces, part_size=part_size, resume=resume)  # noqa: E731
        return self._actor.request(f"put {key}", write, changes=True)

    def batch(self, *, total: int, ranks: int = 1, keys: Sequence[str] = ()) -> Batch:
        return PlainBatch(self)

    def head(self, key: str, *, checksum: bool = False) -> ObjectHead:
        return self._ask(f"head {key}", lambda: self._stored.head(key, checksum=checksum))

    def exists(self, key: str) -> bool:
        return self._ask(f"exists {key}", lambda: self._stored.exists(key))

    def page(self, prefix: str, delimiter: str = "", *, token: str | None = None) -> Page:
        return self._ask(f"list {prefix}", lambda: self._stored.page(prefix, delimiter, token=token))

    def delete(self, targets: Iterable[str | DeleteTarget]) -> Sequence[str]:
        wanted = [target_of(each) for each in targets]
        if not self.adversary.honours_conditions:
            wanted = [DeleteTarget(each.key, version_id=each.version_id) for each in wanted]
        names = " ".join(each.key for each in wanted)
        return self._actor.request(f"delete {names}", lambda: self._stored.delete(wanted), changes=True)

    def uploads(self, prefix: str) -> Sequence[Upload]:
        return ()

    def abort(self, upload: Upload) -> None:
        pass
