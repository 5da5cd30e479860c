"""Files on S3 as streams: one that is written from front to back, one that is read anywhere."""

from __future__ import annotations

import bisect
import contextlib
import io
import queue
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy
import torch

from dcp_s3 import errors
from dcp_s3.checksum import combine_crc64nvme
from dcp_s3.limit import Cancelled
from dcp_s3.memory import Piece, ReadTarget
from dcp_s3.store import Store, StreamedObject
from dcp_s3.tensor_memory import view_bytes

_SHORT = 2**18
"""Bytes up to which a write is copied without a look at whose memory it is."""
_CHUNK = 2**23
"""Bytes of copied writes that are sent as one piece, and of the requests that read a whole file."""
_BLOCK = 2**20
"""Bytes that are read at once for shorter reads."""


class TensorMemory:
    """The CPU memory of the tensors in dicts, lists and tuples."""

    def __init__(self, data: object) -> None:
        self.size = 0
        """Bytes of the tensors."""
        self._views: dict[int, memoryview] = {}
        self._collect(data)
        self._starts = sorted(self._views)

    def _collect(self, value: object) -> None:
        if isinstance(value, (dict, list, tuple)):
            for each in value.values() if isinstance(value, dict) else value:
                self._collect(each)
        elif isinstance(value, torch.Tensor):
            local = getattr(value, "_local_tensor", value)  # of a DTensor
            self.size += local.nbytes
            if local.device.type == "cpu" and local.layout == torch.strided:
                whole = torch.empty(0, dtype=torch.uint8).set_(local.untyped_storage())
                self._views[whole.data_ptr()] = view_bytes(whole)

    def find(self, view: memoryview) -> memoryview | None:
        """The same memory as a view that keeps its tensor alive; None if it is no tensor's."""
        address: int = numpy.frombuffer(view, numpy.uint8).ctypes.data
        index = bisect.bisect_right(self._starts, address) - 1
        if index < 0:
            return None
        own, start = self._views[self._starts[index]], address - self._starts[index]
        return own[start : start + view.nbytes] if start + view.nbytes <= own.nbytes else None


class WriteStream(io.RawIOBase):
    """Sends what is written while it is written. The object is there once the ``with`` block has ended without error.

    Args:
        data: what will be serialised. The memory of its tensors is sent as it is: it must not change before the end.
        done: called with the object once the store has it.
    """

    def __init__(self, store: Store, key: str, data: object, done: Callable[[StreamedObject], None]) -> None:
        self._memory, self._copied, self._done = TensorMemory(data), bytearray(), done
        self._waiting: queue.Queue[Piece | None] = queue.Queue(4)
        self._given_up = False
        thread = ThreadPoolExecutor(1, "dcp_s3-file")
        self._sending = thread.submit(self._send, store, key)
        thread.shutdown(wait=False)

    def __enter__(self) -> WriteStream:
        # Of this thread. CRC-64 guards the bytes; the archive's CRC-32, which no torch.load compares, costs half of the
        # rest's CPU.
        self._computes_crc32 = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(False)
        return self

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        own = self._memory.find(view) if view.nbytes > _SHORT else None
        if own is None:
            self._copied += view
        if self._copied and (own is not None or len(self._copied) >= _CHUNK):
            self._pass_on(Piece.of(self._copied))
            self._copied = bytearray()
        if own is not None:
            self._pass_on(Piece.of(own))
        return view.nbytes

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        torch.serialization.set_crc32_options(self._computes_crc32)
        if kind is None:
            self.close()
        else:
            self._give_up()

    def __del__(self) -> None:
        self._give_up()

    def close(self) -> None:
        if self.closed:
            return
        super().close()
        if self._copied:
            self._pass_on(Piece.of(self._copied))
        self._pass_on(None)
        self._done(self._sending.result())

    def _give_up(self) -> None:
        if not self.closed:
            super().close()
            self._given_up = True
            with contextlib.suppress(Exception):  # another failure is on its way
                self._pass_on(None)
                self._sending.result()

    def _pass_on(self, piece: Piece | None) -> None:
        while not self._sending.done():
            with contextlib.suppress(queue.Full):
                self._waiting.put(piece, timeout=0.2)
                return
        self._sending.result()  # its failure

    def _send(self, store: Store, key: str) -> StreamedObject:
        with store.batch(total=self._memory.size) as batch:
            return batch.put_stream(key, self._memory.size, self._pieces())

    def _pieces(self) -> Iterator[Piece]:
        while (piece := self._waiting.get()) is not None:
            yield piece
        if self._given_up:
            raise Cancelled


class OpenFile:
    """One version of a file. Checks its CRC once long reads, by any threads and streams, have covered all of it.

    Raises:
        PreconditionFailedError: the file was replaced since it was opened.
        CorruptCheckpointError: its bytes are not those that were committed.
    """

    def __init__(self, store: Store, key: str, size: int, etag: str, crc: str | None) -> None:
        self.key, self.size = key, size
        self._store, self._etag, self._crc = store, etag, crc
        self._read: dict[int, tuple[int, int]] = {}

    def read(self, start: int, into: memoryview, store: Store | None = None) -> None:
        target = ReadTarget(into, checksum=True)
        (store or self._store).read(self.key, start, [target], self._etag)
        self._read[start] = (target.crc or 0, into.nbytes)
        parts, end = [], 0
        while part := self._read.get(end):
            parts.append(part)
            end += part[1]
        if end == self.size and self._crc and combine_crc64nvme(parts) != int(self._crc, 16):
            raise damaged_error(self._store.name, self.key)


def damaged_error(bucket: str, key: str) -> errors.CorruptCheckpointError:
    return errors.CorruptCheckpointError(
        f"s3://{bucket}/{key} is not what was committed: its size or CRC-64/NVME is another. Remedy: load an earlier "
        "checkpoint, or restore the object from a backup"
    )


class ReadStream(io.RawIOBase):
    """A file that is read anywhere: long reads go into the reader's memory, short ones come from a block."""

    def __init__(self, file: OpenFile) -> None:
        self._file, self._position = file, 0
        self._block_start, self._block = 0, memoryview(b"")

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._file.size}[whence]
        if base + offset < 0:
            raise ValueError(f"{base + offset} is before the start of the file")
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        start = self._position
        # An error must not keep memory exported: torch-checkpointing then unmaps it.
        with memoryview(buffer) as given, given.cast("B") as whole:
            count = max(0, min(whole.nbytes, self._file.size - start))
            with whole[:count] as view:
                if count >= _BLOCK:
                    self._file.read(start, view)
                elif count:
                    view[:] = self._find_block(start, count)
        self._position += count
        return count

    def _find_block(self, start: int, count: int) -> memoryview:
        if not self._block_start <= start <= start + count <= self._block_start + len(self._block):
            self._block_start = min(start, max(0, self._file.size - _BLOCK))
            self._block = memoryview(bytearray(min(_BLOCK, self._file.size - self._block_start)))
            self._file.read(self._block_start, self._block)
        return self._block[start - self._block_start :][:count]

    def read_whole(self, store: Store) -> bytearray:
        """All of the file, in parallel requests."""
        data = bytearray(self._file.size)
        view = memoryview(data)
        store.map(
            lambda store, start: self._file.read(start, view[start : start + _CHUNK], store),
            range(0, len(data), _CHUNK),
        )
        return data
