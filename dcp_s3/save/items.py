"""Turns write items into the pieces of memory that make up their bytes in an object."""

from __future__ import annotations

import io
import queue
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem, WriteItemType

from dcp_s3.errors import SaveProtocolError, StagingError
from dcp_s3.format.blocks import (
    MIN_BLOCK,
    Blocks,
    block_size,
    crcs_of_beginnings,
    cuts_between,
    make_storage_info,
    pack_crcs,
)
from dcp_s3.format.framing import FrameCache, FramingError
from dcp_s3.format.safe_items import warn_of_unsafe_item
from dcp_s3.memory import Piece, copy_to_host, crc_of, is_plain, iterate_bytes, sent_pieces, view_bytes
from dcp_s3.save.plan import WriteBucket
from dcp_s3.save.split import Rows
from dcp_s3.stage.buffers import HostBuffer
from dcp_s3.torch_private import StorageInfo, WriterTransforms

BLOCK_SIZE = 16 * 2**20
_MIN_SIZE = 2**20  # bytes; a smaller tensor would leave a block mostly empty
_STREAMED = 2**20  # bytes that a transform is given at a time


@dataclass
class WrittenItem:
    """One item in an unfinished object. Its storage info is known once the object is finished."""

    item: WriteItem
    """The planned item."""
    offset: int
    """First byte of the item in the object."""
    length: int = 0
    """Length of the item in bytes."""
    raw_offset: int | None = None
    """First byte of the tensor's data in the item. None if it is not a framed raw tensor."""
    transform_descriptors: list[str] | None = None
    """Descriptors of the stream extensions."""
    pieces: list[Piece] = field(default_factory=list)
    """The pieces that the recorded CRC covers. They have their CRCs once the object is finished."""
    block: int | None = None
    """Block size in bytes, for a raw tensor larger than one block."""

    def storage_info(self, relative_path: str, *, checksum: bool) -> StorageInfo:
        """The record of this item in ``.metadata``."""
        crc = blocks = None
        if checksum:
            sent = sent_pieces(self.pieces)
            crc = crc_of(sent)
            if self.block is not None:
                beginnings = [(piece.size, piece.crc or 0, piece.cuts, piece.marks) for piece in sent]
                blocks = Blocks(self.block, pack_crcs(crcs_of_beginnings(beginnings, self.block)), crc)
        return make_storage_info(
            relative_path,
            self.offset,
            self.length,
            transform_descriptors=self.transform_descriptors,
            raw_offset=self.raw_offset,
            crc64nvme=crc,
            blocks=blocks,
        )


@dataclass(frozen=True)
class ItemSource:
    """What the items of all objects of a save are made from. Thread-safe."""

    planner: SavePlanner
    """Its `resolve_data` is called lazily, once per item and try."""
    transforms: WriterTransforms
    """torch's stream extensions, applied to each item as FileSystemWriter does."""
    chunk_size: int
    """Bytes of a strided tensor that are made contiguous at a time."""
    device_memory: int
    """Bytes of pinned memory, in total, for copies of tensors on a device."""
    frames: FrameCache = field(default_factory=FrameCache)


class ObjectPieces:
    """The bytes of one object, item after item. Each iteration begins anew.

    Raises:
        SaveProtocolError: while it is iterated: the planner resolved an item to something that cannot be stored.
    """

    def __init__(self, source: ItemSource, bucket: WriteBucket) -> None:
        self._source, self._bucket = source, bucket
        self.written: list[WrittenItem] = []
        """The items, whole once the iteration has ended."""

    def __iter__(self) -> Iterator[Piece]:
        if self._bucket.attachment is not None:
            yield Piece.of(self._bucket.attachment.data)
            return
        self.written, size = [], 0
        for item in self._bucket.items:
            written = WrittenItem(item, size)
            self.written.append(written)
            for piece in self._item(written):
                size += piece.size
                yield piece
            written.length = size - written.offset

    def _item(self, written: WrittenItem) -> Iterator[Piece]:
        """The bytes of an item; fills in ``written``."""
        item = written.item
        data = self._source.planner.resolve_data(item)
        expected: type = io.BytesIO if item.type == WriteItemType.BYTE_IO else torch.Tensor
        if not isinstance(data, expected):
            what = "BytesIO" if expected is io.BytesIO else "a tensor"
            raise SaveProtocolError(
                f"the planner resolved {item.index.fqn!r} to a {type(data).__name__}, expected {what}"
            )
        if isinstance(data, io.BytesIO):
            warn_of_unsafe_item(item.index.fqn, data)
        elif isinstance(item, Rows):
            data = item.narrow(data)
        if self._source.transforms.extensions:
            whole = self._transform(written, data)
        elif isinstance(data, io.BytesIO):
            whole = data.getbuffer()
        elif is_plain(tensor := data.detach()) or tensor.device.type == "meta":
            yield from self._tensor(written, tensor)
            return
        else:
            whole = _serialise(tensor)
        written.pieces.append(Piece.of(whole))
        yield written.pieces[0]

    def _tensor(self, written: WrittenItem, tensor: torch.Tensor) -> Iterator[Piece]:
        """The bytes of a dense tensor: its memory, in the frame that torch.save would put around it."""
        if tensor.device.type == "meta":
            raise SaveProtocolError(
                f"{written.item.index.fqn!r} is on the meta device: it has no data to save. Remedy: materialise the "
                "model before saving"
            )
        try:
            frame = self._source.frames.get(tensor.dtype, tensor.shape)
        except FramingError:
            written.pieces.append(Piece.of(_serialise(tensor)))
            yield written.pieces[0]
            return
        planned = written.item.tensor_data
        if planned is not None and planned.properties.dtype == tensor.dtype and planned.chunk.sizes == tensor.shape:
            written.raw_offset = len(frame.header)
            if tensor.nbytes > MIN_BLOCK:
                written.block = block_size(tensor.nbytes)
        header, trailer = Piece.of(frame.header), Piece.of(frame.trailer)
        yield header
        if tensor.device.type == "cpu":
            views = iterate_bytes(tensor, self._source.chunk_size)
        else:
            ring = shared_ring(self._source.device_memory)
            views = iterate_bytes(tensor, min(self._source.chunk_size, ring.block_size), ring.copy)
        done = 0
        for view in views:
            cuts = cuts_between(done, done + view.nbytes, written.block) if written.block else ()
            piece = Piece.of(view, cuts=cuts)
            done += piece.size
            written.pieces.append(piece)
            yield piece
        if written.raw_offset is None:  # then the CRC covers the frame, too
            written.pieces = [header, *written.pieces, trailer]
        yield trailer

    def _transform(self, written: WrittenItem, data: torch.Tensor | io.BytesIO) -> memoryview:
        buffer, transforms = io.BytesIO(), self._source.transforms
        stream, _ = transforms.transform_save_stream(written.item, buffer)
        whole = data.getbuffer() if isinstance(data, io.BytesIO) else _serialise(data.detach())
        for start in range(0, whole.nbytes, _STREAMED):
            stream.write(whole[start : start + _STREAMED])
        stream.close()
        # In the order in which a reader must undo them: the first one is next to the stored bytes. torch 2.13 writes
        # them reversed. Then neither its reader nor ours can load an item that went through two that do not commute.
        written.transform_descriptors = [extension.get_descriptor() for extension in transforms.extensions]
        return buffer.getbuffer()


def _serialise(tensor: torch.Tensor) -> memoryview:
    """Serialise, with torch.save, a tensor that does not fit a frame (sparse, quantized, a subclass) or goes through a
    transform. Its storage is cut down to its own elements."""
    tensor = tensor.cpu()
    if tensor.layout == torch.strided and tensor.untyped_storage().size() != tensor.nbytes:
        tensor = tensor.clone()
    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    return buffer.getbuffer()


class PinnedRing:
    """Blocks of pinned memory for synchronous saves, into which tensors on a device are copied piece by piece, while
    earlier pieces are uploaded.

    A block is made when first needed, and free again when nothing refers to its bytes. If none is free, the copy goes
    to ordinary memory rather than wait; the upload's limit on parts in flight bounds that memory.
    """

    def __init__(self, blocks: int, *, block_size: int = BLOCK_SIZE, pin: bool) -> None:
        self.block_size = block_size
        self._pin = pin
        self._missing = blocks
        self._lock = threading.Lock()
        self._free: queue.SimpleQueue[HostBuffer] = queue.SimpleQueue()
        self._local = threading.local()

    def copy(self, tensor: torch.Tensor) -> memoryview:
        """The bytes of a small ``tensor`` in row-major order, in host memory. Returns when they are there."""
        block = self._take() if _MIN_SIZE <= tensor.nbytes <= self.block_size else None
        if block is None:
            return copy_to_host(tensor)
        lease = block.lease()
        weakref.finalize(lease, self._free.put, block).atexit = False
        target = torch.frombuffer(lease, dtype=torch.uint8, count=tensor.nbytes)
        del lease
        if tensor.device.type == "cpu":
            _copy(tensor, target)
            return view_bytes(target)
        streams = self._local.__dict__  # one for each thread and device, so that copies of several threads overlap
        if (stream := streams.get(str(tensor.device))) is None:
            stream = streams[str(tensor.device)] = torch.Stream(tensor.device)
        stream.wait_stream(torch.accelerator.current_stream(tensor.device))  # on which the planner worked
        with stream:
            _copy(tensor, target)
        stream.synchronize()
        return view_bytes(target)

    def _take(self) -> HostBuffer | None:
        try:
            return self._free.get_nowait()
        except queue.Empty:
            pass
        with self._lock:
            if not self._missing:
                return None
            self._missing -= 1
        try:
            block = HostBuffer(self.block_size, "private")
        except StagingError:
            with self._lock:
                self._missing += 1
            return None
        if self._pin:
            block.pin()
        return block


def _copy(tensor: torch.Tensor, target: torch.Tensor) -> None:
    plain = tensor.resolve_conj().resolve_neg().contiguous()
    target.copy_(plain.view(-1).view(torch.uint8), non_blocking=True)


_rings: dict[int, PinnedRing] = {}


def shared_ring(memory: int) -> PinnedRing:
    """This process's ring of about ``memory`` bytes."""
    if memory not in _rings:  # threads may meet here: the first ring is taken, and another one has no blocks yet
        _rings.setdefault(memory, PinnedRing(max(1, memory // BLOCK_SIZE), pin=torch.cuda.is_available()))
    return _rings[memory]
