"""One ranged GET into given memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from botocore.exceptions import ClientError

from dcp_s3.checksum import crc64nvme
from dcp_s3.limit import Cancelled
from dcp_s3.s3 import operations
from dcp_s3.s3.botocore_private import finish_response, readinto_response
from dcp_s3.s3.diagnosis import TruncatedBodyError
from dcp_s3.s3.flight import Flight
from dcp_s3.store import same_etag

if TYPE_CHECKING:
    from dcp_s3.s3.store import S3Store

# Bytes received before they are added to the checksum: most are then still in the CPU's cache. What a connection that
# breaks had received of the block is lost.
_BLOCK = 4 * 2**20


class Target:
    """Memory for a run of bytes that is to be received, and their CRC-64/NVME as they arrived.

    Attributes:
        view: the memory.
        crc: of the bytes so far, None if it was not asked for.
    """

    __slots__ = ("crc", "view")

    def __init__(self, view: memoryview, *, checksum: bool = False) -> None:
        self.view = view.cast("B") if view.format != "B" else view
        self.crc: int | None = 0 if checksum else None

    def start_again(self) -> None:
        """Nothing of what has been received counts."""
        self.crc = None if self.crc is None else 0

    def received(self, start: int, count: int) -> None:
        """``count`` more bytes are in the memory from ``start`` on; all before them are there."""
        if self.crc is not None:
            self.crc = crc64nvme(self.view[start : start + count], self.crc)


class Cursor:
    """The place in a list of targets up to which bytes have arrived.

    Args:
        targets: in order.
        block: most bytes of one `view`.

    Attributes:
        total: bytes of all targets.
        done: bytes that have arrived.
    """

    def __init__(self, targets: Sequence[Target], *, block: int = _BLOCK) -> None:
        self._block = block
        self._targets = [target for target in targets if target.view.nbytes]
        self._index = 0
        self._offset = 0
        self.total = sum(target.view.nbytes for target in self._targets)
        self.done = 0

    @property
    def full(self) -> bool:
        """Whether all bytes have arrived."""
        return self._index >= len(self._targets)

    @property
    def view(self) -> memoryview:
        """Memory for the next bytes, at most a block."""
        return self._targets[self._index].view[self._offset : self._offset + self._block]

    def advance(self, count: int) -> None:
        """``count`` bytes have arrived in `view`."""
        target = self._targets[self._index]
        target.received(self._offset, count)
        self.done += count
        self._offset += count
        if self._offset == target.view.nbytes:
            self._index += 1
            self._offset = 0

    def fill(self, data: memoryview) -> None:
        """Copy the bytes that come next."""
        while data:
            view = self.view[: data.nbytes]
            view[:] = data[: view.nbytes]
            self.advance(view.nbytes)
            data = data[view.nbytes :]


@dataclass(frozen=True)
class Timing:
    """A request that completed."""

    head: float
    """Seconds until the head of the answer."""
    body: float
    """Seconds from there to the end."""
    size: int
    """Bytes of the body."""


def _another_version() -> ClientError:
    error = {"Code": "PreconditionFailed", "Message": "the object has another ETag"}
    answer: Any = {"Error": error, "ResponseMetadata": {"HTTPStatusCode": 412}}
    return ClientError(answer, "GetObject")


def get_range(
    store: S3Store,
    key: str,
    start: int,
    cursor: Cursor,
    etag: list[str],
    *,
    flight: Flight,
    stop: threading.Event | None = None,
    advance: Callable[[int], None] | None = None,
) -> Timing:
    """One attempt to fetch what is missing of the bytes from ``start`` on that fill ``cursor``.

    Args:
        store: where it is.
        key: of the object.
        start: first byte of the range that the cursor's beginning is for.
        cursor: moves on with what arrives, also if the attempt fails.
        etag: of the version that is asked for; empty for any, and then that of the answer is put in.
        flight: is told of the progress.
        stop: when set, the attempt is given up.
        advance: called instead of the cursor's method.

    Raises:
        Cancelled: ``stop`` was set.
        Exception: what botocore, urllib3 or the socket raise.
    """
    byte_range = f"bytes={start + cursor.done}-{start + cursor.total - 1}"
    expected = cursor.total - cursor.done
    advance = advance or cursor.advance
    began = time.monotonic()
    flight.await_bytes(0)
    answer = store.send(operations.get_range(key, byte_range, etag[0] if etag else None))
    head_at = time.monotonic()
    body = answer["Body"]
    found = answer.get("ETag")
    if not etag and found:
        etag.append(found)
    elif found and not same_etag(found, etag[0]):
        body.close()
        raise _another_version()  # rclone takes no notice of If-Match
    length = answer.get("ContentLength")
    complete = False
    try:
        if length is not None and length > expected:
            raise TruncatedBodyError(f"asked for {expected} bytes ({byte_range}), got {length}: no range support?")
        while not cursor.full:
            if stop is not None and stop.is_set():
                raise Cancelled
            view = cursor.view
            flight.await_bytes(view.nbytes)
            count = readinto_response(body, view)
            if count == 0:
                missing = cursor.total - cursor.done
                raise TruncatedBodyError(f"the body of {byte_range} ended {missing} bytes early")
            advance(count)
        complete = True
    finally:
        finish_response(body, complete=complete)
    return Timing(head_at - began, time.monotonic() - head_at, expected)
