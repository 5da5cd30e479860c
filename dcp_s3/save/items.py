"""Turns write items into the pieces of memory that make up their bytes in an object."""

from __future__ import annotations

import io
import queue
import threading
import weakref
from collections.abc import Iterator, Sequence
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
from dcp_s3.memory import Piece, crc_of, sent_pieces
from dcp_s3.stage.buffers import HostBuffer
from dcp_s3.tensor_memory import copy_to_host, is_plain, iterate_bytes, view_bytes
from dcp_s3.torch_private import StorageInfo, WriterTransforms

BLOCK_SIZE = 16 * 2**20
_MIN_SIZE = 2**20  # bytes; a smaller tensor would leave a block mostly empty


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


class ItemWriter:
    """Resolves items, and makes the pieces that they are sent as. Thread-safe.

    Args:
        planner: the save's planner. Its `resolve_data` is called lazily, once per item and try.
        transforms: torch's stream extensions, applied to each item as FileSystemWriter does.
        chunk_size: bytes of a strided tensor that are made contiguous at a time.
        device_memory: bytes of pinned memory, in total, for copies of tensors on a device.
    """

    def __init__(
        self, planner: SavePlanner, transforms: WriterTransforms, *, chunk_size: int, device_memory: int
    ) -> None:
        self._planner = planner
        self._transforms = transforms
        self._chunk_size = chunk_size
        self._device_memory = device_memory
        self._frames = FrameCache()

    def pieces(self, written: WrittenItem) -> Iterator[Piece]:
        """The bytes of an item; fills in ``written``.

        Raises:
            SaveProtocolError: the planner resolved the item to something that cannot be stored.
        """
        item = written.item
        data = self._planner.resolve_data(item)
        if item.type == WriteItemType.BYTE_IO:
            if not isinstance(data, io.BytesIO):
                raise SaveProtocolError(
                    f"the planner resolved {item.index.fqn!r} to a {type(data).__name__}, expected BytesIO"
                )
        elif not isinstance(data, torch.Tensor):
            raise SaveProtocolError(
                f"the planner resolved {item.index.fqn!r} to a {type(data).__name__}, expected a tensor"
            )
        if isinstance(data, io.BytesIO):
            warn_of_unsafe_item(item.index.fqn, data)
        if self._transforms.extensions:
            yield _whole(written, self._transform(written, data))
        elif isinstance(data, torch.Tensor):
            yield from self._tensor_pieces(written, data.detach())
        else:
            yield _whole(written, data.getbuffer())

    def _tensor_pieces(self, written: WrittenItem, tensor: torch.Tensor) -> Iterator[Piece]:
        if tensor.device.type == "meta":
            raise SaveProtocolError(
                f"{written.item.index.fqn!r} is on the meta device: it has no data to save. Remedy: materialise the "
                "model before saving"
            )
        try:
            frame = self._frames.get(tensor.dtype, tensor.shape) if is_plain(tensor) else None
        except FramingError:
            frame = None
        if frame is None:
            yield _whole(written, _serialise(tensor))
            return
        planned = written.item.tensor_data
        if planned is not None and planned.properties.dtype == tensor.dtype and planned.chunk.sizes == tensor.shape:
            written.raw_offset = len(frame.header)
            if tensor.nbytes > MIN_BLOCK:
                written.block = block_size(tensor.nbytes)
        covers_frame = written.raw_offset is None
        header, trailer = Piece.of(frame.header), Piece.of(frame.trailer)
        if covers_frame:
            written.pieces.append(header)
        yield header
        done = 0
        for view in self._host_bytes(tensor):
            cuts = cuts_between(done, done + view.nbytes, written.block) if written.block else ()
            piece = Piece.of(view, cuts=cuts)
            done += piece.size
            written.pieces.append(piece)
            yield piece
        if covers_frame:
            written.pieces.append(trailer)
        yield trailer

    def _host_bytes(self, tensor: torch.Tensor) -> Iterator[memoryview]:
        if tensor.device.type == "cpu":
            return iterate_bytes(tensor, self._chunk_size)
        ring = shared_ring(self._device_memory)
        return iterate_bytes(tensor, min(self._chunk_size, ring.block_size), ring.copy)

    def _transform(self, written: WrittenItem, data: torch.Tensor | io.BytesIO) -> memoryview:
        buffer = io.BytesIO()
        stream, _ = self._transforms.transform_save_stream(written.item, buffer)
        if isinstance(data, torch.Tensor):
            for block in _blocks(_serialise(data.detach())):
                stream.write(block)
        else:
            stream.write(data.getbuffer())
        stream.close()
        # In the order in which a reader must undo them: the first one is next to the stored bytes. torch 2.13 writes
        # them reversed. Then neither its reader nor ours can load an item that went through two that do not commute.
        written.transform_descriptors = [extension.get_descriptor() for extension in self._transforms.extensions]
        return buffer.getbuffer()


class ObjectPieces:
    """The bytes of one object, item after item. Each iteration begins anew."""

    def __init__(self, writer: ItemWriter, items: Sequence[WriteItem]) -> None:
        self._writer = writer
        self._items = items
        self.written: list[WrittenItem] = []
        """The items, whole once the iteration has ended."""

    def __iter__(self) -> Iterator[Piece]:
        self.written = []
        size = 0
        for item in self._items:
            written = WrittenItem(item, size)
            self.written.append(written)
            for piece in self._writer.pieces(written):
                size += piece.size
                yield piece
            written.length = size - written.offset


class PiecesOf:
    """Bytes as one piece."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def __iter__(self) -> Iterator[Piece]:
        yield Piece.of(self._data)


def _whole(written: WrittenItem, data: memoryview) -> Piece:
    """The only piece of an item."""
    piece = Piece.of(data)
    written.pieces.append(piece)
    return piece


def _serialise(tensor: torch.Tensor) -> memoryview:
    """Serialise, with torch.save, a tensor that does not fit a frame (sparse, quantized, a subclass) or goes through a
    transform. Its storage is cut down to its own elements."""
    tensor = tensor.cpu()
    if tensor.layout == torch.strided and tensor.untyped_storage().size() != tensor.nbytes:
        tensor = tensor.clone()
    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    return buffer.getbuffer()


def _blocks(data: memoryview, size: int = 2**20) -> Iterator[memoryview]:
    for start in range(0, data.nbytes, size):
        yield data[start : start + size]


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
        stream = self._stream(tensor.device)
        if stream is None:
            _copy(tensor, target)
        else:
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

    def _stream(self, device: torch.device) -> torch.Stream | None:
        """A stream for each thread and device, so that copies of several threads overlap."""
        if device.type == "cpu":
            return None
        streams: dict[torch.device, torch.Stream] | None = getattr(self._local, "streams", None)
        if streams is None:
            streams = self._local.streams = {}
        if device not in streams:
            streams[device] = torch.Stream(device)
        return streams[device]


def _copy(tensor: torch.Tensor, target: torch.Tensor) -> None:
    plain = tensor.resolve_conj().resolve_neg().contiguous()
    target.copy_(plain.view(-1).view(torch.uint8), non_blocking=True)


_rings: dict[int, PinnedRing] = {}
_rings_lock = threading.Lock()


def shared_ring(memory: int) -> PinnedRing:
    """This process's ring of about ``memory`` bytes."""
    with _rings_lock:
        if memory not in _rings:
            _rings[memory] = PinnedRing(max(1, memory // BLOCK_SIZE), pin=torch.cuda.is_available())
        return _rings[memory]
