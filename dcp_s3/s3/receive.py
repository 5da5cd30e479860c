"""Bodies of answers, received into given memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dcp_s3.limit import Cancelled
from dcp_s3.memory import ReadTarget
from dcp_s3.s3.botocore_private import Flight, finish_response, readinto_response
from dcp_s3.s3.diagnosis import TruncatedBodyError
from dcp_s3.s3.retry import current

# Bytes received before they are added to the checksum: most are then still in the CPU's cache.
_BLOCK = 4 * 2**20


class Cursor:
    """The place in a list of targets up to which bytes have arrived.

    Args:
        moved: called with the number of bytes that have arrived.

    Attributes:
        total: bytes of all targets.
        done: bytes that have arrived.
    """

    def __init__(
        self, targets: Sequence[ReadTarget], *, block: int = _BLOCK, moved: Callable[[int], None] | None = None
    ) -> None:
        self._block = block
        self._moved = moved
        self._targets = [target for target in targets if target.view.nbytes]
        self._index = 0
        self._offset = 0
        self.total = sum(target.view.nbytes for target in self._targets)
        self.done = 0

    @property
    def full(self) -> bool:
        return self._index >= len(self._targets)

    @property
    def view(self) -> memoryview:
        """Memory for the next bytes, at most a block."""
        return self._targets[self._index].view[self._offset : self._offset + self._block]

    def advance(self, count: int) -> None:
        """Note that ``count`` bytes have arrived in `view`."""
        target = self._targets[self._index]
        target.received(self._offset, count)
        self.done += count
        self._offset += count
        if self._moved is not None:
            self._moved(count)
        if self._offset == target.view.nbytes:
            self._index += 1
            self._offset = 0

    def fill(self, data: memoryview) -> None:
        while data:
            view = self.view[: data.nbytes]
            view[:] = data[: view.nbytes]
            self.advance(view.nbytes)
            data = data[view.nbytes :]


def receive(
    body: Any,
    cursor: Cursor,
    what: str,
    flight: Flight,
    advance: Callable[[int], None],
    stop: threading.Event | None = None,
) -> None:
    """Receive a body into what ``cursor`` still lacks; ``advance`` is called instead of its method."""
    attempts, awaited, complete = current(), 0, False
    try:
        while not cursor.full:
            if stop is not None and stop.is_set():
                raise Cancelled
            attempts.check()
            view = cursor.view
            if not awaited:
                flight.await_bytes(awaited := view.nbytes)
            count = readinto_response(body, view[:awaited])
            if count == 0:
                raise TruncatedBodyError(f"the body of {what} ended {cursor.total - cursor.done} bytes early")
            awaited -= count
            advance(count)
            attempts.moved(count)
        complete = True
    finally:
        finish_response(body, complete=complete)


def read_whole(answer: Mapping[str, Any]) -> bytes | bytearray:
    """Read the body of an answer. A large one is seen to move while it comes."""
    body, size = answer["Body"], answer.get("ContentLength") or 0
    if size <= _BLOCK:
        data: bytes = body.read()
        return data
    cursor = Cursor([ReadTarget(memoryview(found := bytearray(size)))])
    receive(body, cursor, "the object", Flight(), cursor.advance)
    return found
