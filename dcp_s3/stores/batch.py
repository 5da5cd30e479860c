"""A batch for stores that take one object like another."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator
from dataclasses import replace
from types import TracebackType

from dcp_s3 import errors
from dcp_s3.limit import Cancelled
from dcp_s3.memory import Piece
from dcp_s3.store import Batch, Store, StreamedObject

logger = logging.getLogger(__name__)


class PlainBatch(Batch):
    """Puts each object in the caller's thread."""

    def __init__(self, store: Store) -> None:
        self._cancel = threading.Event()
        self._store = store.within(replace(store.limit, cancel=self._cancel))
        self._lock = threading.Lock()
        self._written: list[str] = []

    def put_stream(self, key: str, size: int, pieces: Iterable[Piece]) -> StreamedObject:
        result = self._store.put_stream(key, size, self._until_cancelled(pieces))
        with self._lock:
            self._written.append(key)
            self.sent += result.size
        return result

    def _until_cancelled(self, pieces: Iterable[Piece]) -> Iterator[Piece]:
        for piece in pieces:
            if self._cancel.is_set():
                raise Cancelled
            yield piece

    def stop(self) -> None:
        self._cancel.set()

    def __enter__(self) -> PlainBatch:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if kind is None:
            return
        self.stop()
        try:
            self._store.within(self._store.limit.for_cleanup()).delete(self._written)
        except errors.StorageError as failure:
            logger.warning("objects of a failed batch are left: %s", failure)
