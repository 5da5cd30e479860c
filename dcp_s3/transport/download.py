"""Ranged GET into given buffers; a body that breaks midway resumes at the byte reached."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from dcp_s3 import errors
from dcp_s3.transport import retry
from dcp_s3.transport.body import finish_response, readinto_response
from dcp_s3.transport.bucket import Bucket
from dcp_s3.transport.checksum import crc64nvme

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


def fetch_into(
    bucket: Bucket,
    key: str,
    start: int,
    targets: Sequence[Target],
    *,
    cancel: threading.Event | None = None,
) -> None:
    """Fetch the bytes of an object from byte ``start`` on that fill ``targets`` in order.

    One request unless it breaks. After a break the next request asks for the rest only, and only of the same
    version of the object (If-Match), and an attempt that made progress does not count towards the limit.

    Raises:
        ObjectNotFoundError: no such object.
        PreconditionFailedError: the object was replaced while it was read.
        StorageError: other failures; a range past the object's end among them.
        Cancelled: ``cancel`` was set.
    """
    total = sum(target.view.nbytes for target in targets)
    if total == 0:
        return
    cursor = _Cursor(targets)
    etag: list[str] = []

    def attempt() -> None:
        arguments = {"IfMatch": etag[0]} if etag else {}
        byte_range = f"bytes={start + cursor.done}-{start + total - 1}"
        answer = bucket.client.get_object(**bucket.common, Key=key, Range=byte_range, **arguments)
        if not etag and answer.get("ETag"):
            etag.append(answer["ETag"])
        body = answer["Body"]
        expected = total - cursor.done
        length = answer.get("ContentLength")
        complete = False
        try:
            if length is not None and length > expected:
                raise retry.TruncatedBodyError(
                    f"asked for {expected} bytes ({byte_range}), got {length}: no range support?"
                )
            while not cursor.full:
                if cancel is not None and cancel.is_set():
                    raise retry.Cancelled
                count = readinto_response(body, cursor.view)
                if count == 0:
                    raise retry.TruncatedBodyError(f"the body of {byte_range} ended {total - cursor.done} bytes early")
                cursor.advance(count)
            complete = True
        finally:
            finish_response(body, complete=complete)

    while True:
        before = cursor.done
        try:
            bucket.call("GetObject", key, attempt, cancel=cancel, data=True)
        except errors.TransferError:
            # All attempts are used up, but the last round moved on: a slow, flaky link, not a dead one.
            if cursor.done > before and not cursor.full and bucket.settings.retry_attempts > 1:
                continue
            raise
        return


class _Cursor:
    """The place in a list of targets up to which bytes have arrived."""

    def __init__(self, targets: Sequence[Target]) -> None:
        self._targets = [target for target in targets if target.view.nbytes]
        self._index = 0
        self._offset = 0
        self.done = 0

    @property
    def full(self) -> bool:
        return self._index >= len(self._targets)

    @property
    def view(self) -> memoryview:
        """Memory for the next bytes, at most a block."""
        return self._targets[self._index].view[self._offset : self._offset + _BLOCK]

    def advance(self, count: int) -> None:
        target = self._targets[self._index]
        target.received(self._offset, count)
        self.done += count
        self._offset += count
        if self._offset == target.view.nbytes:
            self._index += 1
            self._offset = 0
