"""Writes one rank's plan: buckets become objects, in parallel, made of the memory of their items."""

from __future__ import annotations

import contextlib
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

from dcp_s3.errors import DeadlineExceededError, SaveProtocolError, StagingError
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
from dcp_s3.format.control_files import AttachmentEntry, ObjectEntry
from dcp_s3.format.layout import data_object
from dcp_s3.format.safe_items import warn_of_unsafe_item
from dcp_s3.limit import Cancelled
from dcp_s3.memory import (
    Piece,
    combine_crc64nvme,
    copy_to_host,
    crc64nvme,
    crc_hex,
    is_plain,
    iterate_bytes,
    view_bytes,
)
from dcp_s3.save.plan import OBJECTS_PER_RANK, CopiedItems, WriteBucket
from dcp_s3.save.split import Rows
from dcp_s3.stage.memory import BufferPool, Slot
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
    """torch's WriteResult. An attachment has one, too, without storage data."""

    object_entry: ObjectEntry | None = None
    """The object's entry, in the result of its first item, for the coordinator; None in the others."""
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
    """
    if not buckets:
        return []
    started, deadline, device = time.monotonic(), store.limit.deadline, synchronized_device()
    total = sum(planned.size for planned in buckets if planned.copied is None)
    paths = [data_object(rank, number, nonce) for number in range(len(buckets))]
    keys = [url.key(path) for path in paths]
    batch = store.batch(total=total, ranks=ranks, keys=keys)
    watch(batch)
    chunk_size = min(batch.chunk_size, PINNED_BLOCK)
    # Besides what the store holds, each bucket fills a piece.
    blocks = (batch.in_flight + OBJECTS_PER_RANK) * batch.chunk_size // PINNED_BLOCK
    _pinned.generations = max(_pinned.generations, blocks)
    # What S3 does not copy is sent, but of many such objects no more are framed at a time than of others.
    sending = threading.Semaphore(max(OBJECTS_PER_RANK, sum(planned.copied is None for planned in buckets)))

    def write(number: int) -> list[WriteResult]:
        if device is not None:
            torch.accelerator.set_device_index(device)
        pieces, copied = ObjectPieces(buckets[number], planner, chunk_size), buckets[number].copied
        if copied is not None and batch.copy(keys[number], copied.ranges, copied.crc):
            return pieces.results(paths[number], StreamedObject(buckets[number].size, copied.crc), copied)
        with sending:
            stored = batch.put_stream(keys[number], buckets[number].size, pieces)
        return pieces.results(paths[number], stored)

    try:
        with batch:
            producers = Workers(len(buckets), "dcp_s3-bucket")
            try:
                futures: list[Future[list[WriteResult]]] = [producers.submit(write, each) for each in range(len(keys))]
                done, pending = wait(futures, None if deadline is None else deadline.left, FIRST_EXCEPTION)
                if any(future.exception() for future in done):
                    batch.stop()
                elif pending and deadline is not None:
                    raise deadline.error("the upload")
                results = [result for future in futures for result in future.result()]
            except Cancelled as cancelled:  # raise what has cancelled the others
                errors = [batch.error, *(future.exception() for future in futures)]
                raise next((e for e in errors if e is not None and not isinstance(e, Cancelled)), cancelled) from None
            except BaseException:
                batch.stop()
                raise
            finally:
                producers.close()
    except DeadlineExceededError as error:
        if deadline is None or error.setting != deadline.setting:
            raise
        raise deadline.error(
            f"the save to {url}", f"of about {format_size(total)} of rank {rank}, {batch.progress}"
        ) from error
    seconds = time.monotonic() - started
    logger.debug("wrote about %d bytes in %d objects in %.3f s", total, len(buckets), seconds)
    return results


def synchronized_device() -> int | None:
    """Wait for the accelerator, as other threads do not wait for the work on this thread's stream. Returns the device
    that each of them must set, or it would make a context on device 0; None if no accelerator is in use."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None:
        return None
    # A process only for checkpoints should not initialize it.
    if not getattr(torch.get_device_module(accelerator), "is_initialized", lambda: True)():
        return None
    torch.accelerator.synchronize()
    return torch.accelerator.current_device_index()


@dataclass
class _Written:
    """One item in an unfinished object, from byte ``offset`` on, ``length`` bytes."""

    offset: int
    length: int = 0
    raw_offset: int | None = None
    """First byte of the tensor's data in the item. None if it is not a framed raw tensor."""
    pieces: list[Piece] = field(default_factory=list)
    """The pieces that the recorded CRC covers. They have their CRCs once the object is finished."""
    block: int | None = None
    """Block size in bytes, for a raw tensor larger than one block."""


@dataclass(eq=False)
class ObjectPieces:
    """The bytes of one object, item after item. Each iteration begins anew. A SaveProtocolError if the planner resolves
    an item to something that cannot be stored."""

    bucket: WriteBucket
    planner: SavePlanner
    """Its `resolve_data` is called once per item and iteration."""
    chunk_size: int
    """Bytes of a tensor that is strided, or on a device, that are copied at a time."""
    _streams: dict[torch.device, torch.Stream] = field(default_factory=dict)
    _written: list[_Written] = field(default_factory=list)

    def __iter__(self) -> Iterator[Piece]:
        if self.bucket.attachment is not None:
            yield Piece.of(self.bucket.attachment.data)
            return
        self._written, size = [], 0
        for item in self.bucket.items:
            written = _Written(size)
            self._written.append(written)
            data = self.resolve(item)
            if not isinstance(data, torch.Tensor):
                written.pieces.append(Piece.of(data))
                size += written.pieces[0].size
                yield written.pieces[0]
                written.length = size - written.offset
                continue
            # A dense tensor: its memory, in the frame that torch.save would put around it.
            frame, planned = compute_frame(data.dtype, data.shape), item.tensor_data
            if planned is not None and planned.properties.dtype == data.dtype and planned.chunk.sizes == data.shape:
                written.raw_offset = len(frame.header)
                if data.nbytes > MIN_BLOCK:
                    written.block = block_size(data.nbytes)
            header, trailer = Piece.of(frame.header), Piece.of(frame.trailer)
            yield header
            done = 0
            for view in iterate_bytes(data, self.chunk_size, self.copy):
                cuts = cuts_between(done, done + view.nbytes, written.block) if written.block else ()
                piece = Piece.of(view, cuts=cuts)
                done += piece.size
                written.pieces.append(piece)
                yield piece
            if written.raw_offset is None:  # then the CRC covers the frame, too
                written.pieces = [header, *written.pieces, trailer]
            yield trailer
            written.length = len(frame.header) + done + len(frame.trailer)
            size += written.length

    def resolve(self, item: WriteItem) -> torch.Tensor | memoryview:
        """What to store of an item: a tensor that may be framed, or bytes."""
        data = self.planner.resolve_data(item)
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
        if is_plain(tensor):
            with contextlib.suppress(FramingError):
                compute_frame(tensor.dtype, tensor.shape)
                return tensor
        # No frame fits it (sparse, quantized, a subclass): torch.save writes it, with no more than its own elements.
        tensor = tensor.cpu()
        if tensor.layout == torch.strided and tensor.untyped_storage().size() != tensor.nbytes:
            tensor = tensor.clone()
        buffer = io.BytesIO()
        torch.save(tensor, buffer)
        return buffer.getbuffer()

    def copy(self, tensor: torch.Tensor) -> memoryview:
        """The bytes of a tensor that is strided, or on a device, in row-major order: from a device to pinned memory
        while earlier ones are uploaded. If none is free, to ordinary memory rather than wait; the upload's limit on
        parts in flight bounds that. Returns when they are there."""
        slots: list[Slot] = []
        if tensor.device.type != "cpu" and _MIN_PINNED <= tensor.nbytes <= PINNED_BLOCK:
            with contextlib.suppress(StagingError):
                slots = _pinned.acquire([PINNED_BLOCK], pin=torch.cuda.is_available(), wait=False)
        if not slots:
            return copy_to_host(tensor)
        target, device = torch.frombuffer(slots[0].lease, dtype=torch.uint8, count=tensor.nbytes), tensor.device
        if (stream := self._streams.get(device)) is None:  # so that the copies of several objects overlap
            stream = self._streams[device] = torch.Stream(device)
        stream.wait_stream(torch.accelerator.current_stream(device))  # on which the planner worked
        with stream:
            plain = tensor.resolve_conj().resolve_neg().contiguous()
            target.copy_(plain.view(-1).view(torch.uint8), non_blocking=True)
        stream.synchronize()
        return view_bytes(target)

    def results(self, path: str, stored: StreamedObject, copied: CopiedItems | None = None) -> list[WriteResult]:
        """The results of the items, or of the attachment, once the object is stored at ``path``. ``copied``: how S3
        has made it."""
        attachment, crc = self.bucket.attachment, stored.crc64nvme
        if attachment is not None:
            data, index = attachment.data, MetadataIndex(attachment.name)
            attached = AttachmentEntry(path, len(data), crc_hex(crc64nvme(data)), attachment.name)
            return [ItemWriteResult(index, len(data), None, attached, stored.spilled)]
        infos = [] if copied is None else [moved_info(info, path, offset) for info, offset in copied.places]
        for each in self._written if copied is None else ():
            item_crc = blocks = None
            if crc is not None:
                sent = [part for piece in each.pieces for part in piece.parts or (piece,)]
                item_crc = combine_crc64nvme((part.checksum(), part.size) for part in sent)
                if each.block is not None:
                    beginnings = [(piece.size, piece.crc or 0, piece.cuts, piece.marks) for piece in sent]
                    blocks = Blocks(each.block, pack_crcs(crcs_of_beginnings(beginnings, each.block)), item_crc)
            info = make_storage_info(
                path, each.offset, each.length, raw_offset=each.raw_offset, crc64nvme=item_crc, blocks=blocks
            )
            infos.append(info)
        entry: ObjectEntry | None = ObjectEntry(path, stored.size, None if crc is None else crc_hex(crc))
        results: list[WriteResult] = []
        for item, info in zip(self.bucket.items, infos, strict=True):
            rows, is_copied = item.chunk if isinstance(item, Rows) else None, copied is not None
            index = item.index if rows is None else MetadataIndex(item.index.fqn, rows.offsets)
            results.append(ItemWriteResult(index, info.length, info, entry, stored.spilled, is_copied, rows))
            entry = None
        return results
