"""Any store, with faults that a test sets while it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from dcp_s3.limit import Limit
from dcp_s3.memory import Piece
from dcp_s3.store import DeleteTarget, Expect, ObjectHead, Page, Store, StoredObject, StreamedObject, Upload

Rule = Callable[[str, str], Exception | None]


class FaultyStore(Store):
    """`rule` is asked before each call of ``store`` (with the method's name, and the key or prefix), and again after it
    (the method's name with ``after ``); an exception that it returns is raised."""

    def __init__(self, store: Store, rule: Rule = lambda method, key: None) -> None:
        self.store, self.rule = store, rule
        self.name, self.limit = store.name, store.limit

    def _through(self, method: str, key: str, call: Callable[[], object]) -> object:
        if (fault := self.rule(method, key)) is not None:
            raise fault
        result = call()
        if (fault := self.rule(f"after {method}", key)) is not None:
            raise fault
        return result

    def within(self, limit: Limit) -> FaultyStore:
        return FaultyStore(self.store.within(limit), lambda method, key: self.rule(method, key))

    def read(self, key: str, start: int, into: memoryview, etag: str | None = None) -> None:
        self._through("read", key, lambda: self.store.read(key, start, into, etag))

    def get(self, key: str) -> StoredObject:
        return self._through("get", key, lambda: self.store.get(key))  # type: ignore[return-value]

    def put(
        self,
        key: str,
        data: bytes | memoryview,
        *,
        expect: Expect | None = None,
        content_type: str = "application/octet-stream",
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        fields = {"expect": expect, "content_type": content_type, "metadata": metadata}
        self._through("put", key, lambda: self.store.put(key, data, **fields))  # type: ignore[arg-type]

    def put_stream(
        self, key: str, size: int, pieces: Iterable[Piece], *, part_size: int | None = None, resume: bool = False
    ) -> StreamedObject:
        return self._through("put_stream", key, lambda: self.store.put_stream(key, size, pieces))  # type: ignore[return-value]

    def head(self, key: str, *, checksum: bool = False) -> ObjectHead:
        return self._through("head", key, lambda: self.store.head(key, checksum=checksum))  # type: ignore[return-value]

    def exists(self, key: str) -> bool:
        return self._through("exists", key, lambda: self.store.exists(key))  # type: ignore[return-value]

    def page(self, prefix: str, delimiter: str = "", *, token: str | None = None) -> Page:
        return self._through("page", prefix, lambda: self.store.page(prefix, delimiter, token=token))  # type: ignore[return-value]

    def delete(self, targets: Iterable[str | DeleteTarget]) -> Sequence[str]:
        first, *_ = targets = list(targets) or [""]
        key = first if isinstance(first, str) else first.key
        return self._through("delete", key, lambda: self.store.delete(filter(None, targets)))  # type: ignore[return-value]

    def uploads(self, prefix: str) -> Sequence[Upload]:
        return self._through("uploads", prefix, lambda: self.store.uploads(prefix))  # type: ignore[return-value]

    def abort(self, upload: Upload) -> None:
        self._through("abort", upload.key, lambda: self.store.abort(upload))
