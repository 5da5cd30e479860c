"""One read item: which bytes it needs, and how they come to their place."""

from __future__ import annotations

import contextlib
import io
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import IO, NamedTuple, cast

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem

from dcp_s3 import errors
from dcp_s3.checkpoint._torch import (
    ReaderTransforms,
    StorageInfo,
    get_blocks,
    get_crc,
    get_raw_offset,
    narrow_tensor_by_index,
)
from dcp_s3.checkpoint.archive_heads import (
    SMALL_ITEM,
    ArchiveHeads,
    HeadProof,
    ItemKind,
    Probe,
    in_order,
    read_tensor,
)
from dcp_s3.checkpoint.boxes import Box, boxes_of_run, covering_run, intersect
from dcp_s3.checkpoint.contents import find_chunk
from dcp_s3.checkpoint.item_limits import check_limits
from dcp_s3.checkpoint.memory import is_direct, view_bytes
from dcp_s3.checkpoint.read_plan import ChunkRange, Extent, ranges_of_box
from dcp_s3.format.archive import ArchiveHead
from dcp_s3.transport.checksum import combine_crc64nvme
from dcp_s3.url import CheckpointURL


class ItemTransfer:
    """One read item: where its bytes lie, what is to be checked, and where they go.

    The bytes have an offset of the item's own: `TensorTransfer` counts from the beginning of the saved chunk,
    `StreamTransfer` from that of the stored item.

    Attributes:
        item: of the load plan.
        extents: what is to be fetched.
        ranges: the runs of bytes in them, with their checksums.
        target: the tensor to load into, None for an item that is not a tensor.
        loaded: what an item that is not a tensor came out as.
        owned: (start, stop) of the bytes that can be received in `memory`, where they belong; None if there are none.
    """

    __slots__ = ("_crcs", "_lock", "_missing", "extents", "item", "loaded", "owned", "ranges", "target")

    def __init__(
        self,
        item: ReadItem,
        extents: Sequence[Extent],
        ranges: Sequence[ChunkRange],
        target: torch.Tensor | None,
        owned: tuple[int, int] | None,
    ) -> None:
        self.item = item
        self.extents = extents
        self.ranges = ranges
        self.target = target
        self.loaded: io.BytesIO | None = None
        self.owned = owned
        self._missing = sum([extent.length for extent in extents])
        self._crcs: list[tuple[int, int, int]] = []
        self._lock = threading.Lock()

    @property
    def checked(self) -> bool:
        """Whether there is a checksum."""
        return any(part.crc is not None for part in self.ranges)

    def memory(self, start: int, stop: int) -> memoryview:
        """The place of bytes within `owned`."""
        raise NotImplementedError

    def put(self, offset: int, data: torch.Tensor) -> None:
        """Bring bytes outside of `owned` (uint8, from ``offset`` on) to their place."""

    def arrived(self, offset: int, length: int, crc: int) -> bool:
        """Count bytes and remember their checksum; True when these were the last."""
        with self._lock:
            self._crcs.append((offset, crc, length))
            self._missing -= length
            return self._missing == 0

    def is_damaged(self, offset: int, length: int, crc: int) -> bool:
        """Whether these bytes are a range of this item with another checksum."""
        return any(
            part.crc is not None and part.crc != crc and part.start == offset and part.stop == offset + length
            for part in self.ranges
        )

    def mismatches(self) -> list[tuple[ChunkRange, int]]:
        """The ranges whose bytes are not what was saved, with the CRC-64/NVME that was found."""
        wrong = []
        for part in self.ranges:
            if part.crc is None:
                continue
            pieces = self._crcs if len(self.ranges) == 1 else self._pieces(part)
            found = pieces[0][1] if len(pieces) == 1 else combine_crc64nvme((c, n) for _, c, n in sorted(pieces))
            if found != part.crc:
                wrong.append((part, found))
        return wrong

    def _pieces(self, part: ChunkRange) -> list[tuple[int, int, int]]:
        return [piece for piece in self._crcs if part.start <= piece[0] < part.stop]

    def forget(self, part: ChunkRange) -> Extent:
        """Make ready to receive a range again; where it lies."""
        with self._lock:
            self._crcs = [piece for piece in self._crcs if not part.start <= piece[0] < part.stop]
            self._missing += part.stop - part.start
        return self.extent_of(part)

    def extent_of(self, part: ChunkRange) -> Extent:
        """Where a range lies in its object."""
        found = next(extent for extent in self.extents if extent.offset <= part.start < extent.offset + extent.length)
        skipped = part.start - found.offset
        return found._replace(start=found.start + skipped, length=part.stop - part.start, offset=part.start)

    def finish(self) -> ItemTransfer | None:
        """All bytes are at their place, and right.

        Returns:
            What is to be fetched instead, if they are not where they were expected.
        """
        return None


def is_whole(item: ReadItem, sizes: torch.Size) -> bool:
    """Whether an item needs all of a saved chunk of ``sizes``."""
    return item.lengths == sizes and not any(item.storage_offsets)


class TensorTransfer(ItemTransfer):
    """A box of a saved chunk, whose raw bytes' place is known, into a tensor.

    That of another writer's item is expected; its head comes along (before byte 0 of the chunk) and must prove it.

    Args:
        number: of the item.
        item: of the load plan.
        info: where it is stored.
        raw_start: first byte of the chunk in the object.
        ranges: of the chunk, to be fetched.
        target: the tensor to load into.
        sizes: shape of the chunk.
        dtype: of the chunk.
        proof: of another writer's item.
        instead: makes the transfer to be tried if the proof fails.
    """

    __slots__ = ("_box", "_dtype", "_instead", "_into", "_proof", "_sizes")

    def __init__(
        self,
        number: int,
        item: ReadItem,
        info: StorageInfo,
        raw_start: int,
        ranges: Sequence[ChunkRange],
        target: torch.Tensor,
        sizes: torch.Size,
        dtype: torch.dtype,
        proof: HeadProof | None = None,
        instead: Callable[[ArchiveHead | None], ItemTransfer] | None = None,
    ) -> None:
        self._box = Box(item.storage_offsets, item.lengths)
        self._sizes = sizes
        self._into = target
        self._dtype = dtype
        self._proof = proof
        self._instead = instead
        whole = is_whole(item, sizes)
        if proof is not None:
            # Row-major, as everything else is, with the dimensions in the order in which they are stored.
            self._box, self._sizes, self._into = in_order(proof.expected.order, self._box, sizes, target)
        owned = None
        if dtype == target.dtype and target.nbytes and is_direct(self._into):
            start, stop = (0, math.prod(sizes)) if whole else covering_run(self._sizes, self._box)
            if stop - start == target.numel():
                owned = start * dtype.itemsize, stop * dtype.itemsize
        extents = [
            Extent(number, info.relative_path, raw_start + start, stop - start, start) for start, stop, _ in ranges
        ]
        if proof is not None:
            extents = _with_head(extents, number, info, proof.expected)
        super().__init__(item, extents, ranges, target, owned)

    def memory(self, start: int, stop: int) -> memoryview:
        """See `ItemTransfer`."""
        first = self.owned[0] if self.owned else 0
        return view_bytes(self._into)[start - first : stop - first]

    def put(self, offset: int, data: torch.Tensor) -> None:
        """See `ItemTransfer`. The bytes are whole elements."""
        if offset < 0 and self._proof is not None:
            self._proof.put(offset, view_bytes(data))
            data = data[-offset:]
            offset = 0
        if self.owned is not None or not data.numel():
            return  # what is needed is received in place; this is there for a checksum
        if data.storage_offset() % self._dtype.itemsize:
            data = data.clone()
        elements = data.view(self._dtype)
        first = offset // self._dtype.itemsize
        for run in boxes_of_run(self._sizes, first, first + elements.numel()):
            source, elements = elements[: run.numel], elements[run.numel :]
            wanted = intersect(run, self._box)
            if wanted is not None:
                place = [start - own for start, own in zip(wanted.offsets, self._box.offsets, strict=True)]
                within = [start - own for start, own in zip(wanted.offsets, run.offsets, strict=True)]
                narrow_tensor_by_index(self._into, place, wanted.lengths).copy_(
                    narrow_tensor_by_index(source.view(run.lengths), within, wanted.lengths)
                )

    def finish(self) -> ItemTransfer | None:
        """See `ItemTransfer`."""
        if self._proof is None or self._instead is None or self._proof.holds():
            return None
        return self._instead(self._proof.found())


def _with_head(extents: list[Extent], number: int, info: StorageInfo, head: ArchiveHead) -> list[Extent]:
    """The head of an item comes along: in one run with the beginning of the chunk, if that is needed."""
    first = Extent(number, info.relative_path, info.offset, head.length, -head.raw_offset)
    # Cuts fall on multiples of 64 bytes from where an extent begins, and must not divide elements.
    if extents and extents[0].start == info.offset + head.length and head.length % 64 == 0:
        return [first._replace(length=head.length + extents[0].length), *extents[1:]]
    return [first, *extents]


class StreamTransfer(ItemTransfer):
    """A whole stored item, decoded when it is there.

    Args:
        number: of the item.
        item: of the load plan.
        info: where it is stored.
        crc: CRC-64/NVME of the item, None if it is not known.
        target: the tensor to load into, None for an item that is not a tensor.
        decode: called with the item's bytes (uint8).
        unpack: as ``decode``, for a small item without checksum: called with bytes that are somebody else's memory
            as soon as they have come in one piece. Returns whether it could.
    """

    __slots__ = ("_buffer", "_decode", "_size", "_unpack", "_unpacked")

    def __init__(
        self,
        number: int,
        item: ReadItem,
        info: StorageInfo,
        crc: int | None,
        target: torch.Tensor | None,
        decode: Callable[[StreamTransfer, torch.Tensor], None],
        unpack: Callable[[torch.Tensor], bool] | None = None,
    ) -> None:
        size = info.length
        extents = [Extent(number, info.relative_path, info.offset, size)] if size else []
        owned = (0, size) if unpack is None else None
        super().__init__(item, extents, [ChunkRange(0, size, crc)] if size else [], target, owned)
        self._size = size
        self._decode = decode
        self._unpack = unpack
        self._unpacked = False
        self._buffer: torch.Tensor | None = None

    def memory(self, start: int, stop: int) -> memoryview:
        """See `ItemTransfer`."""
        with self._lock:
            if self._buffer is None:
                self._buffer = torch.empty(self._size, dtype=torch.uint8)
            return view_bytes(self._buffer)[start:stop]

    def put(self, offset: int, data: torch.Tensor) -> None:
        """See `ItemTransfer`."""
        if self._unpack is not None and data.numel() == self._size and self._unpack(data):
            self._unpacked = True
        else:
            self.memory(offset, offset + data.numel())[:] = view_bytes(data)

    def finish(self) -> ItemTransfer | None:
        """Decode the item."""
        if not self._unpacked:
            self._decode(self, torch.empty(0, dtype=torch.uint8) if self._buffer is None else self._buffer)
        self._buffer = None
        return None


class UnknownItem(NamedTuple):
    """An item of another writer of whose kind nothing is known.

    Attributes:
        number: of the item.
        probe: where to look.
        prepare: makes the transfer when that is done.
    """

    number: int
    probe: Probe
    prepare: Callable[[], ItemTransfer]


class TransferFactory:
    """Decides for each read item which bytes it needs and where they go.

    Args:
        url: of the checkpoint.
        metadata: of the checkpoint.
        transforms: torch's stream extensions.
        allow_dtype_cast: whether a tensor may be converted to another dtype.
        max_gap: bytes between two ranges of a chunk that are rather fetched than asked around.

    Attributes:
        heads: what is known of items of other writers.
        unknown: those of which so little is known that one of their kind should be looked at first. What was prepared
            for them fetches and decodes all of the item.
    """

    def __init__(
        self,
        url: CheckpointURL,
        metadata: Metadata,
        transforms: ReaderTransforms,
        *,
        allow_dtype_cast: bool,
        max_gap: int,
    ) -> None:
        self._url = url
        self._metadata = metadata
        self._transforms = transforms
        self._allow_dtype_cast = allow_dtype_cast
        self._max_gap = max_gap
        self.heads = ArchiveHeads()
        self.unknown: list[UnknownItem] = []

    def prepare(self, number: int, item: ReadItem, planner: LoadPlanner) -> ItemTransfer:
        """The transfer for ``item``, number ``number`` of the plan. No I/O.

        Raises:
            DtypeMismatchError, ShapeMismatchError: the destination does not match what was saved.
            CorruptMetadataError: the metadata contradicts itself.
        """
        info = self._storage_info(item)
        if item.type == LoadItemType.BYTE_IO:
            return self._prepare_bytes(number, item, info)
        target = planner.resolve_tensor(item).detach()
        if target.size() != item.lengths:
            raise errors.ShapeMismatchError(
                f"{item.dest_index.fqn}: the planner gave a tensor of shape {tuple(target.size())} for "
                f"{tuple(item.lengths)}", url=str(self._url), fqn=item.dest_index.fqn,
            )  # fmt: skip
        saved = self._metadata.state_dict_metadata[item.storage_index.fqn]
        if not isinstance(saved, TensorStorageMetadata):
            raise errors.CorruptMetadataError(
                f"{item.storage_index.fqn!r} in {self._url} is no tensor, but is to be loaded into one: the "
                "checkpoint was saved from another kind of state",
                url=str(self._url),
            )
        dtype = saved.properties.dtype
        if dtype != target.dtype and not self._allow_dtype_cast:
            raise errors.DtypeMismatchError(
                f"{item.dest_index.fqn}: the checkpoint has {dtype}, the state to load into {target.dtype}. Remedy: "
                "build the state with the saved dtype, or convert on load with DCP_S3_ALLOW_DTYPE_CAST=1",
                url=str(self._url),
                fqn=item.dest_index.fqn,
            )
        raw_offset = get_raw_offset(info)
        if raw_offset is None or info.transform_descriptors:
            return self._prepare_archived(number, item, info, target, saved)
        return self._prepare_raw(number, item, info, target, saved, raw_offset)

    def _prepare_raw(
        self,
        number: int,
        item: ReadItem,
        info: StorageInfo,
        target: torch.Tensor,
        saved: TensorStorageMetadata,
        raw_offset: int,
    ) -> ItemTransfer:
        dtype = saved.properties.dtype
        sizes = self._chunk_sizes(item, saved)
        nbytes = sizes.numel() * dtype.itemsize
        if raw_offset + nbytes > info.length:
            raise errors.CorruptMetadataError(
                f"{item.storage_index.fqn!r} in {self._url}: a chunk of {nbytes} bytes at {raw_offset} does "
                f"not fit into its item of {info.length} bytes: the metadata is damaged",
                url=str(self._url),
            )
        if is_whole(item, sizes):
            ranges = [ChunkRange(0, nbytes, get_crc(info))] if nbytes else []
        else:
            blocks = get_blocks(info, nbytes) if nbytes else None
            box = Box(item.storage_offsets, item.lengths)
            ranges = ranges_of_box(sizes, box, dtype.itemsize, blocks=blocks, max_gap=self._max_gap)
        return TensorTransfer(number, item, info, info.offset + raw_offset, ranges, target, sizes, dtype)

    def _prepare_archived(
        self, number: int, item: ReadItem, info: StorageInfo, target: torch.Tensor, saved: TensorStorageMetadata
    ) -> ItemTransfer:
        """A tensor whose raw bytes' place is not recorded: written by something else, or through an extension."""
        chunk = find_chunk(saved, item.storage_index)
        if info.transform_descriptors or chunk is None:
            return self._prepare_encoded(number, item, info, target, None)
        kind = ItemKind(saved.properties.dtype, chunk.sizes, info.length)
        # A recorded checksum is that of the whole item.
        if info.length <= SMALL_ITEM or get_crc(info) is not None:
            return self._prepare_encoded(number, item, info, target, kind)

        def again(found: ArchiveHead | None) -> ItemTransfer:
            return expected(found, lambda _: expected(None, again))

        def expected(head: ArchiveHead | None, instead: Callable[[ArchiveHead | None], ItemTransfer]) -> ItemTransfer:
            if head is None:
                return self._prepare_encoded(number, item, info, target, kind)
            proof = HeadProof(self.heads, kind, head)
            box, sizes, _ = in_order(head.order, Box(item.storage_offsets, item.lengths), chunk.sizes, target)
            ranges = ranges_of_box(sizes, box, kind.dtype.itemsize, blocks=None, max_gap=self._max_gap)
            start = info.offset + head.raw_offset
            return TensorTransfer(number, item, info, start, ranges, target, chunk.sizes, kind.dtype, proof, instead)

        head = self.heads.expect(kind)
        if head is None:
            probe = Probe(kind, info.relative_path, info.offset)
            self.unknown.append(UnknownItem(number, probe, lambda: expected(self.heads.expect(kind), again)))
        return expected(head, again)

    def _prepare_encoded(
        self, number: int, item: ReadItem, info: StorageInfo, target: torch.Tensor, kind: ItemKind | None
    ) -> ItemTransfer:
        """A tensor that is fetched with all of its item; ``kind`` is that of an archive."""

        def unpack(buffer: torch.Tensor) -> bool:
            head = None if kind is None else self.heads.find(kind, view_bytes(buffer))
            if head is None:
                return False
            tensor = read_tensor(head, buffer)
            if not is_whole(item, tensor.size()):
                tensor = narrow_tensor_by_index(tensor, item.storage_offsets, item.lengths)
            target.copy_(tensor)
            return True

        def decode(_: StreamTransfer, buffer: torch.Tensor) -> None:
            if unpack(buffer):
                return
            with self._naming_damage(item):
                stream = self._decode(item, info, buffer)
                seekable = stream if isinstance(stream, io.BytesIO) else io.BytesIO(stream.read(-1))
                check_limits(seekable)
                seekable.seek(0)
                tensor = cast(torch.Tensor, torch.load(seekable, map_location="cpu", weights_only=True))
                target.copy_(narrow_tensor_by_index(tensor, item.storage_offsets, item.lengths))

        crc = get_crc(info) if get_raw_offset(info) is None else None
        at_once = kind is not None and crc is None and info.length <= SMALL_ITEM
        return StreamTransfer(number, item, info, crc, target, decode, unpack if at_once else None)

    def _prepare_bytes(self, number: int, item: ReadItem, info: StorageInfo) -> ItemTransfer:
        if info.length == 0:
            raise errors.CorruptMetadataError(
                f"the metadata of {self._url} is damaged: {item.storage_index.fqn!r} has no bytes", url=str(self._url)
            )

        def decode(transfer: StreamTransfer, buffer: torch.Tensor) -> None:
            with self._naming_damage(item):
                transfer.loaded = io.BytesIO(self._decode(item, info, buffer).read(-1))

        return StreamTransfer(number, item, info, get_crc(info), None, decode)

    def _decode(self, item: ReadItem, info: StorageInfo, buffer: torch.Tensor) -> IO[bytes]:
        # A descriptor list is missing in old checkpoints.
        descriptors = getattr(info, "transform_descriptors", None) or ()
        try:
            self._transforms.extension_registry.from_descriptor_list(descriptors)
        except ValueError as error:
            raise errors.MissingExtensionError(
                f"{item.storage_index.fqn!r} in {self._url} was saved through the stream extensions "
                f"{list(descriptors)}: {error}. Remedy: pass an _extension_registry that knows them to S3StorageReader",
                url=str(self._url),
            ) from error
        raw = io.BytesIO(view_bytes(buffer))
        return self._transforms.transform_load_stream(item, descriptors, raw)

    @contextlib.contextmanager
    def _naming_damage(self, item: ReadItem) -> Iterator[None]:
        """Whatever decoding raises says that the stored item is not what it should be."""
        try:
            yield
        except errors.DcpS3Error:
            raise
        except Exception as error:
            raise errors.CorruptCheckpointError(
                f"{item.storage_index.fqn!r} in {self._url} can not be decoded: {type(error).__name__}: {error}. "
                "The stored data is damaged: load an earlier checkpoint",
                url=str(self._url),
            ) from error

    def _storage_info(self, item: ReadItem) -> StorageInfo:
        try:
            return cast(StorageInfo, self._metadata.storage_data[item.storage_index])
        except KeyError:
            raise errors.CorruptMetadataError(
                f"the metadata of {self._url} does not say where {item.storage_index.fqn!r} at "
                f"{item.storage_index.offset} lies: it is damaged or was merged wrongly",
                url=str(self._url),
            ) from None

    def _chunk_sizes(self, item: ReadItem, saved: TensorStorageMetadata) -> torch.Size:
        """Shape of the saved chunk that ``item`` reads from."""
        index = item.storage_index
        chunk = find_chunk(saved, index)
        if chunk is None:
            raise errors.CorruptMetadataError(
                f"the metadata of {self._url} has no chunk of {index.fqn!r} at {index.offset}", url=str(self._url)
            )
        return chunk.sizes
