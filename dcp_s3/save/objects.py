"""Writes one rank's plan: buckets become objects, in parallel, each of the pieces of memory that make up its items."""

from __future__ import annotations

import io
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass, field

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from dcp_s3.errors import DeadlineExceededError, SaveProtocolError
from dcp_s3.format.archive import FramingError, compute_frame
from dcp_s3.format.blocks import (
    MIN_BLOCK,
    Blocks,
    block_size,
    crcs_of_beginnings,
    cuts_between,
    make_storage_info,
    moved_info,
    pack_crcs,
)
from dcp_s3.format.control_files import ObjectEntry
from dcp_s3.format.layout import data_object
from dcp_s3.format.safe_items import warn_of_unsafe_item
from dcp_s3.limit import Cancelled, Deadline
from dcp_s3.memory import Piece, copy_to_host, crc_hex, crc_of, is_plain, iterate_bytes, view_bytes
from dcp_s3.save.plan import OBJECTS_PER_RANK, CopiedItems, WriteBucket
from dcp_s3.save.split import Rows, stored_index
from dcp_s3.stage.memory import BufferPool
from dcp_s3.store import Batch, Store, StreamedObject
from dcp_s3.units import format_size
from dcp_s3.url import CheckpointURL
from dcp_s3.workers import Workers

logger = logging.getLogger(__name__)

PINNED_BLOCK = 16 * 2**20
"""Bytes that a tensor on a device is copied to the host at a time."""
_MIN_PINNED = 2**20  # bytes; a smaller tensor would leave a block mostly empty
_pinned = BufferPool(limit=None, spill_dir=None, generations=1)
"""This process's blocks for tensors on devices."""


@dataclass(frozen=True)
class ItemWriteResult(WriteResult):
    """torch's WriteResult. The first item of each object also carries the object's entry to the coordinator.

    An attachment is one, too, without storage data.
    """

    object_entry: ObjectEntry | None = None
    """The object's entry, in the result of its first item; None in the others."""
    spilled: bool = False
    """Whether the object is on a local disk, not on S3."""
    copied: bool = False
    """Whether S3 copied the object: its bytes were not sent."""
    rows: ChunkStorageMetadata | None = None
    """Place of the item in the tensor, if it is a part of a planned chunk."""


def write_buckets(
    store: Store,
    buckets: Sequence[WriteBucket],
    planner: SavePlanner,
    *,
    url: CheckpointURL,
    rank: int,
    nonce: str,
    ranks: int = 1,
    watch: Callable[[Batch], object] = lambda _: None,
) -> list[WriteResult]:
    """Write every bucket as one object. A thread per bucket resolves its items; the store sends them.

    All or nothing: on any failure, at the deadline and on KeyboardInterrupt, everything is cancelled, multipart uploads
    are aborted and objects that this call had completed are deleted before the error is raised.

    Args:
        url, rank, nonce: what the objects are named by.
        ranks: how many write at the same time.
        watch: called with what knows how many bytes were sent.

    Returns:
        One result per item, and one per attachment, without storage data.
    """
    if not buckets:
        return []
    started, deadline, device = time.monotonic(), store.limit.deadline, synchronized_device()
    total = sum(planned.size for planned in buckets if planned.copied is None)
    paths = [data_object(rank, number, nonce) for number in range(len(buckets))]
    keys = [url.key(path) for path in paths]
    batch = store.batch(total=total, ranks=ranks, keys=keys)
    watch(batch)
    # Besides what the store holds, each bucket fills a piece.
    blocks = (batch.in_flight + OBJECTS_PER_RANK) * batch.chunk_size // PINNED_BLOCK
    _pinned.generations = max(_pinned.generations, blocks)
    # What S3 does not copy is sent, but of many such objects no more are framed at a time than of others.
    sending = threading.Semaphore(max(OBJECTS_PER_RANK, sum(planned.copied is None for planned in buckets)))

    def write(number: int) -> list[WriteResult]:
        if device is not None:
            torch.accelerator.set_device_index(device)
        bucket, copied = buckets[number], buckets[number].copied
        if copied is not None and batch.copy(keys[number], copied.ranges, copied.crc):
            return _copied_results(bucket.items, copied, paths[number])
        with sending:
            pieces = ObjectPieces(bucket, planner, batch.chunk_size)
            stored = batch.put_stream(keys[number], bucket.size, pieces)
        return pieces.results(paths[number], stored)

    try:
        with batch:
            results = _in_threads(batch, deadline, range(len(buckets)), write)
            batch.settle()
    except DeadlineExceededError as error:
        if deadline is None or error.setting != deadline.setting:
            raise
        raise deadline.error(
            f"the save to {url}", f"of about {format_size(total)} of rank {rank}, {batch.progress}"
        ) from error
    seconds = time.monotonic() - started
    logger.debug("wrote about %d bytes in %d objects in %.3f s", total, len(buckets), seconds)
    return results


def _in_threads(
    batch: Batch, deadline: Deadline | None, numbers: Sequence[int], write: Callable[[int], list[WriteResult]]
) -> list[WriteResult]:
    """Write the buckets with these numbers, each in its own thread."""
    producers = Workers(len(numbers), "dcp_s3-bucket")
    try:
        futures: list[Future[list[WriteResult]]] = [producers.submit(write, number) for number in numbers]
        done, pending = wait(futures, None if deadline is None else deadline.left, FIRST_EXCEPTION)
        if any(future.exception() for future in done):
            batch.stop()
        elif pending and deadline is not None:
            raise deadline.error("the upload")
        return [result for future in futures for result in future.result()]
    except Cancelled as cancelled:  # raise what has cancelled the others
        errors = [batch.error, *(future.exception() for future in futures)]
        raise next((e for e in errors if e is not None and not isinstance(e, Cancelled)), cancelled) from None
    except BaseException:
        batch.stop()
        raise
    finally:
        producers.close()


def _copied_results(items: Sequence[WriteItem], copied: CopiedItems, path: str) -> list[WriteResult]:
    entry = ObjectEntry(path, sum(each.stop - each.start for each in copied.ranges), crc_hex(copied.crc))
    return [
        ItemWriteResult(
            stored_index(item), info.length, moved_info(info, path, offset), None if position else entry,
            copied=True, rows=item.chunk if isinstance(item, Rows) else None,
        )
        for position, (item, (info, offset)) in enumerate(zip(items, copied.places, strict=True))
    ]  # fmt: skip


def synchronized_device() -> int | None:
    """Wait for the accelerator, as other threads do not wait for the work on this thread's stream. Returns the device
    that each of them must set, or it would make a context on device 0; None if no accelerator is in use."""
    if not (torch.accelerator.is_available() and _is_initialized()):
        return None
    torch.accelerator.synchronize()
    return torch.accelerator.current_device_index()


def _is_initialized() -> bool:
    """Whether this process has used the accelerator. A process only for checkpoints should not initialize it."""
    accelerator = torch.accelerator.current_accelerator()
    module = None if accelerator is None else torch.get_device_module(accelerator)
    return bool(getattr(module, "is_initialized", lambda: True)())


@dataclass
class _Written:
    """One item in an unfinished object."""

    item: WriteItem
    """The planned item."""
    offset: int
    """First byte of the item in the object."""
    length: int = 0
    """Length of the item in bytes."""
    raw_offset: int | None = None
    """First byte of the tensor's data in the item. None if it is not a framed raw tensor."""
    pieces: list[Piece] = field(default_factory=list)
    """The pieces that the recorded CRC covers. They have their CRCs once the object is finished."""
    block: int | None = None
    """Block size in bytes, for a raw tensor larger than one block."""


class ObjectPieces:
    """The bytes of one object, item after item. Each iteration begins anew.

    Args:
        planner: its `resolve_data` is called once per item and iteration.
        chunk_size: bytes of a strided tensor that are made contiguous at a time.

    Raises:
        SaveProtocolError: while it is iterated: the planner resolved an item to something that cannot be stored.
    """

    def __init__(self, bucket: WriteBucket, planner: SavePlanner, chunk_size: int) -> None:
        self._bucket, self._planner, self._chunk_size = bucket, planner, chunk_size
        self._streams: dict[torch.device, torch.Stream] = {}
        self._written: list[_Written] = []

    def __iter__(self) -> Iterator[Piece]:
        if self._bucket.attachment is not None:
            yield Piece.of(self._bucket.attachment.data)
            return
        self._written, size = [], 0
        for item in self._bucket.items:
            written = _Written(item, size)
            self._written.append(written)
            data = self.resolve(item)
            if isinstance(data, torch.Tensor):
                for piece in self._frame(written, data):
                    size += piece.size
                    yield piece
            else:
                written.pieces.append(Piece.of(data))
                size += written.pieces[0].size
                yield written.pieces[0]
            written.length = size - written.offset

    def resolve(self, item: WriteItem) -> torch.Tensor | memoryview:
        """What to store of an item: a tensor that may be framed, or bytes."""
        data = self._planner.resolve_data(item)
        fqn, is_bytes = item.index.fqn, item.type == WriteItemType.BYTE_IO
        if not isinstance(data, io.BytesIO if is_bytes else torch.Tensor):
            expected = "BytesIO" if is_bytes else "a tensor"
            raise SaveProtocolError(f"the planner resolved {fqn!r} to a {type(data).__name__}, expected {expected}")
        if isinstance(data, io.BytesIO):
            warn_of_unsafe_item(fqn, data)
            return data.getbuffer()
        tensor = (item.narrow(data) if isinstance(item, Rows) else data).detach()
        if tensor.device.type == "meta":
            raise SaveProtocolError(
                f"{fqn!r} is on the meta device: it has no data to save. Remedy: materialise the model before saving"
            )
        if not is_plain(tensor):
            return _serialise(tensor)
        try:
            compute_frame(tensor.dtype, tensor.shape)
        except FramingError:
            return _serialise(tensor)
        return tensor

    def _frame(self, written: _Written, tensor: torch.Tensor) -> Iterator[Piece]:
        """The bytes of a dense tensor: its memory, in the frame that torch.save would put around it."""
        frame = compute_frame(tensor.dtype, tensor.shape)
        planned = written.item.tensor_data
        if planned is not None and planned.properties.dtype == tensor.dtype and planned.chunk.sizes == tensor.shape:
            written.raw_offset = len(frame.header)
            if tensor.nbytes > MIN_BLOCK:
                written.block = block_size(tensor.nbytes)
        header, trailer = Piece.of(frame.header), Piece.of(frame.trailer)
        yield header
        done = 0
        for view in self.views(tensor):
            cuts = cuts_between(done, done + view.nbytes, written.block) if written.block else ()
            piece = Piece.of(view, cuts=cuts)
            done += piece.size
            written.pieces.append(piece)
            yield piece
        if written.raw_offset is None:  # then the CRC covers the frame, too
            written.pieces = [header, *written.pieces, trailer]
        yield trailer

    def views(self, tensor: torch.Tensor) -> Iterator[memoryview]:
        """The bytes of a plain tensor."""
        if tensor.device.type == "cpu":
            return iterate_bytes(tensor, self._chunk_size)
        return iterate_bytes(tensor, min(self._chunk_size, PINNED_BLOCK), self._copy_from_device)

    def _copy_from_device(self, tensor: torch.Tensor) -> memoryview:
        """The bytes of at most a block of a tensor, in row-major order: in pinned memory while earlier ones are
        uploaded. If none is free, in ordinary memory rather than wait; the upload's limit on parts in flight bounds
        that. Returns when they are there."""
        slot = None
        if _MIN_PINNED <= tensor.nbytes <= PINNED_BLOCK:
            slot = _pinned.acquire_at_once(PINNED_BLOCK, pin=torch.cuda.is_available())
        if slot is None:
            return copy_to_host(tensor)
        target, device = torch.frombuffer(slot.lease, dtype=torch.uint8, count=tensor.nbytes), tensor.device
        if (stream := self._streams.get(device)) is None:  # so that the copies of several objects overlap
            stream = self._streams[device] = torch.Stream(device)
        stream.wait_stream(torch.accelerator.current_stream(device))  # on which the planner worked
        with stream:
            plain = tensor.resolve_conj().resolve_neg().contiguous()
            target.copy_(plain.view(-1).view(torch.uint8), non_blocking=True)
        stream.synchronize()
        return view_bytes(target)

    def results(self, path: str, stored: StreamedObject) -> list[WriteResult]:
        """The results of the items, or of the attachment, once the object is stored at ``path``."""
        attachment, crc = self._bucket.attachment, stored.crc64nvme
        if attachment is not None:
            entry: ObjectEntry = attachment.entry(path)
            return [ItemWriteResult(MetadataIndex(attachment.name), entry.size, None, entry, stored.spilled)]
        entry = ObjectEntry(path, stored.size, None if crc is None else crc_hex(crc))
        results: list[WriteResult] = []
        for each in self._written:
            item_crc = blocks = None
            if crc is not None:
                sent = [part for piece in each.pieces for part in piece.parts or (piece,)]
                item_crc = crc_of(sent)
                if each.block is not None:
                    beginnings = [(piece.size, piece.crc or 0, piece.cuts, piece.marks) for piece in sent]
                    blocks = Blocks(each.block, pack_crcs(crcs_of_beginnings(beginnings, each.block)), item_crc)
            info = make_storage_info(
                path, each.offset, each.length, raw_offset=each.raw_offset, crc64nvme=item_crc, blocks=blocks
            )
            rows, first = each.item.chunk if isinstance(each.item, Rows) else None, None if results else entry
            index = stored_index(each.item)
            results.append(ItemWriteResult(index, each.length, info, first, stored.spilled, rows=rows))
        return results


def _serialise(tensor: torch.Tensor) -> memoryview:
    """Serialise, with torch.save, a tensor that does not fit a frame (sparse, quantized, a subclass). Its storage is
    cut down to its own elements."""
    tensor = tensor.cpu()
    if tensor.layout == torch.strided and tensor.untyped_storage().size() != tensor.nbytes:
        tensor = tensor.clone()
    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    return buffer.getbuffer()
