"""Makes the transfer for each item of a load plan: the bytes it needs, where they go, as which dtype. No I/O."""

from __future__ import annotations

import contextlib
import functools
import io
from collections.abc import Collection, Iterable, Sequence
from typing import IO, NamedTuple, cast

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem

from dcp_s3 import errors
from dcp_s3.format.archive import MAX_HEAD, ArchiveHead, HeadError, parse_head
from dcp_s3.format.blocks import Range
from dcp_s3.format.framing import Frame, FrameCache, FramingError
from dcp_s3.format.metadata import is_unproven
from dcp_s3.format.safe_items import check_storages
from dcp_s3.load.boxes import Box
from dcp_s3.load.items import ExpectedHead, ItemTransfer, StreamTransfer, TensorTransfer, is_whole, tensor_in
from dcp_s3.load.names import Conversion, keeps_values, warn_of_narrowing
from dcp_s3.load.plan import READ_GAP, StoredChunk, find_stored, ranges_of_box
from dcp_s3.memory import is_plain, view_bytes
from dcp_s3.torch_private import ReaderTransforms, narrow_tensor_by_index

SMALL_ITEM = 64 * 2**10
"""Items of up to this many bytes are fetched whole."""


class TransferFactory:
    """Decides for each read item which bytes it needs and where they go.

    Attributes:
        narrowed: prepared tensors, by name, that are converted to a dtype that does not hold all values.
        late: targets that another entry fills in part, each with what is to be copied into it, in order, at the end.
    """

    def __init__(
        self, url: str, metadata: Metadata, transforms: ReaderTransforms, *, allow_dtype_cast: bool = True
    ) -> None:
        self._url, self._metadata, self._transforms = url, metadata, transforms
        self._allow_dtype_cast = allow_dtype_cast
        self._unproven = is_unproven(metadata)
        self._heads = ArchiveHeads()
        self.narrowed: dict[str, Conversion] = {}
        self.late: list[tuple[torch.Tensor, torch.Tensor]] = []

    def prepare_all(
        self, items: Sequence[ReadItem], planner: LoadPlanner, shared: Collection[int] = ()
    ) -> list[ItemTransfer]:
        """The transfer for each item. ``shared``: numbers of items that come from other ranks: whole, or a box, packed.

        Raises:
            TensorMismatchError: a destination does not match what was saved.
            CorruptCheckpointError: the metadata contradicts itself.
        """
        transfers = [
            self._make(item, *self._find(item, planner), number in shared) for number, item in enumerate(items)
        ]
        overwritten, late = find_overwritten(transfers)
        for place, number in enumerate((*late, *overwritten)):
            target = cast(torch.Tensor, transfers[number].target)
            instead = torch.empty(items[number].lengths, dtype=target.dtype, device="cpu")
            if place < len(late):
                self.late.append((target, instead))
            transfers[number] = self._make(items[number], transfers[number].stored, instead, number in shared)
        warn_of_narrowing(self.narrowed, self._url)
        return transfers

    def _find(self, item: ReadItem, planner: LoadPlanner) -> tuple[StoredChunk, torch.Tensor | None]:
        """How an item is stored, and the tensor to load it into; None for an item that is no tensor."""
        fqn, url = item.storage_index.fqn, self._url
        stored = find_stored(self._metadata, item.storage_index, item.type, url)
        if item.type == LoadItemType.BYTE_IO:
            return stored, None
        target: torch.Tensor = planner.resolve_tensor(item)
        if target.requires_grad:
            target = target.detach()
        if target.size() != item.lengths:
            raise errors.TensorMismatchError(
                f"{item.dest_index.fqn}: the planner gave a tensor of shape {tuple(target.size())} for "
                f"{tuple(item.lengths)} of {url}", url=url, fqn=item.dest_index.fqn,
            )  # fmt: skip
        dtype = cast(TensorStorageMetadata, self._metadata.state_dict_metadata[fqn]).properties.dtype
        if dtype != target.dtype and not self._allow_dtype_cast:
            raise errors.TensorMismatchError(
                f"{item.dest_index.fqn} has {dtype} in {url}, {target.dtype} in the state to load into, and "
                "allow_dtype_cast is off. Remedy: build the state with the saved dtype, or convert on load with "
                "S3StorageReader(allow_dtype_cast=True)",
                url=url,
                fqn=item.dest_index.fqn,
            )
        if not keeps_values(dtype, target.dtype):
            self.narrowed[item.dest_index.fqn] = dtype, target.dtype
        return stored, target

    def _make(self, item: ReadItem, stored: StoredChunk, target: torch.Tensor | None, is_shared: bool) -> ItemTransfer:
        if target is None or (stored.whole and (is_shared or stored.crc is not None)):
            return self._decoded(item, stored, target)
        if stored.whole:
            return self._archived(item, stored, target)
        sizes, dtype, box = stored.sizes, stored.dtype, Box(item.storage_offsets, item.lengths)
        if is_shared:
            packed = [Range(0, box.numel * dtype.itemsize, None)]
            whole = Box((0,) * len(box.lengths), box.lengths)
            array = stored._replace(base=0, sizes=item.lengths)
            return TensorTransfer(item, stored, target, whole, packed, array=array)
        if is_whole(box, sizes):
            ranges = [Range(0, stored.nbytes, stored.crc)] if stored.nbytes else []
        else:
            ranges = ranges_of_box(sizes, box, dtype.itemsize, blocks=stored.blocks, max_gap=READ_GAP)
        if not self._unproven:
            return TensorTransfer(item, stored, target, box, ranges)
        raw_offset = stored.base - stored.info.offset
        if not 0 < raw_offset <= MAX_HEAD:
            raise errors.CorruptCheckpointError(
                f"the metadata of {self._url} is damaged: {item.storage_index.fqn!r} has {raw_offset} bytes before its "
                "own. Remedy: load an earlier checkpoint",
                url=self._url,
            )
        kind = ItemKind(dtype, sizes, stored.info.length)
        head = ExpectedHead(raw_offset, raw_offset, functools.partial(self._check_recorded, item, kind, raw_offset))
        return TensorTransfer(item, stored, target, box, ranges, head=head)

    def _decoded(self, item: ReadItem, stored: StoredChunk, target: torch.Tensor | None) -> ItemTransfer:
        """The transfer of a whole item, which is decoded when it has arrived."""
        return StreamTransfer(item, stored, target, functools.partial(self._decode, item, stored, target))

    def _check_recorded(self, item: ReadItem, kind: ItemKind, raw_offset: int, head: bytes) -> None:
        """Check that an item is what metadata says that no checksum proves."""
        fault = self._heads.find_fault(kind, raw_offset, head)
        if fault is not None:
            raise errors.CorruptCheckpointError(
                f"the metadata of {self._url} is damaged: where it places {item.storage_index.fqn!r}, {fault}. "
                "Remedy: load an earlier checkpoint",
                url=self._url,
            )

    def _archived(self, item: ReadItem, stored: StoredChunk, target: torch.Tensor) -> ItemTransfer:
        """The transfer of a tensor whose place is not recorded: from where this torch would have put it, or whole."""
        kind = None if stored.nbytes <= SMALL_ITEM else _kind_of(stored)
        head = None if kind is None else self._heads.expect(kind)
        if kind is None or head is None:
            return self._decoded(item, stored, target)
        array = stored._replace(base=stored.base + head.raw_offset, sizes=torch.Size(kind.shape), dtype=kind.dtype)
        box = Box(item.storage_offsets, item.lengths)
        ranges = ranges_of_box(kind.shape, box, kind.dtype.itemsize, blocks=None, max_gap=READ_GAP)

        def check(data: bytes) -> ItemTransfer | None:
            return None if self._heads.find(kind, data) == head else self._decoded(item, stored, target)

        expected = ExpectedHead(head.length, head.raw_offset, check)
        return TensorTransfer(item, stored, target, box, ranges, array=array, head=expected)

    def _decode(
        self, item: ReadItem, stored: StoredChunk, target: torch.Tensor | None, buffer: torch.Tensor
    ) -> io.BytesIO | None:
        """Decode a whole item: into ``target``, or to what is returned."""
        try:
            if target is None:
                return io.BytesIO(self._unwrap(item, stored, buffer).read(-1))
            kind = _kind_of(stored)
            head = None if kind is None else self._heads.find(kind, view_bytes(buffer))
            if head is not None:
                tensor = tensor_in(head, buffer)
            else:
                stream = self._unwrap(item, stored, buffer)
                seekable = stream if isinstance(stream, io.BytesIO) else io.BytesIO(stream.read(-1))
                check_storages(seekable)
                seekable.seek(0)
                tensor = cast(torch.Tensor, torch.load(seekable, map_location="cpu", weights_only=True))
            target.copy_(narrow_tensor_by_index(tensor, item.storage_offsets, item.lengths))
        except errors.DcpS3Error:
            raise
        except Exception as error:
            raise errors.CorruptCheckpointError(
                f"{item.storage_index.fqn!r} in {self._url} cannot be decoded: {type(error).__name__}: {error}. "
                "The stored data is damaged: load an earlier checkpoint",
                url=self._url,
            ) from error
        return None

    def _unwrap(self, item: ReadItem, stored: StoredChunk, buffer: torch.Tensor) -> IO[bytes]:
        """The bytes of an item without its stream extensions."""
        # Old checkpoints have no descriptor list.
        descriptors = getattr(stored.info, "transform_descriptors", None) or ()
        try:
            self._transforms.extension_registry.from_descriptor_list(descriptors)
        except ValueError as error:
            raise errors.CheckpointError(
                f"{item.storage_index.fqn!r} in {self._url} was saved through the stream extensions "
                f"{list(descriptors)}: {error}. Remedy: pass an _extension_registry that knows them to S3StorageReader",
                url=self._url,
            ) from error
        return self._transforms.transform_load_stream(item, descriptors, io.BytesIO(view_bytes(buffer)))


def _kind_of(stored: StoredChunk) -> ItemKind | None:
    """The kind of an archive of torch.save; None if the item is none, or if the shape of its tensor is not known."""
    if stored.tensor is None or stored.info.transform_descriptors:
        return None
    return ItemKind(*stored.tensor, stored.nbytes)


# --- entries that share memory ------------------------------------------------------------------------


def find_overwritten(transfers: Sequence[ItemTransfer]) -> tuple[list[int], list[int]]:
    """Numbers of the items whose memory a later entry fills with something else; and of those that fill a part of what
    an earlier one fills, or more than that.

    Entries that share memory (tied parameters) are received at the same time, and what was saved for them is usually
    the same. Where it is not, or nobody knows, the last one in the plan wins, as with torch's readers.
    """
    spans: dict[str, tuple[int, int]] = {}
    numbers: dict[str, list[int]] = {}
    filled: list[tuple[int, int, str]] = []
    for number, transfer in enumerate(transfers):
        span = _span(transfer.target)
        if span is not None:
            name = transfer.item.dest_index.fqn
            filled.append((*span, name))
            low, high = spans.get(name, span)
            spans[name] = min(low, span[0]), max(high, span[1])
            numbers.setdefault(name, []).append(number)
    overwritten: list[int] = []
    late: list[int] = []
    order = {name: place for place, name in enumerate(spans)}
    for together in _overlapping(filled):
        names = sorted(together, key=order.__getitem__)
        if len({spans[name] for name in names}) > 1:
            late += [number for name in names[1:] for number in numbers[name]]
            continue
        contents = {tuple([_content_of(transfers[number]) for number in numbers[name]]) for name in names}
        if len(contents) > 1 or any(transfers[number].stored.crc is None for number in numbers[names[0]]):
            overwritten += [number for name in names[:-1] for number in numbers[name]]
    return overwritten, late


def _overlapping(filled: Iterable[tuple[int, int, str]]) -> list[set[str]]:
    """Names of which spans overlap, directly or through others; only where there are several.

    Not what lies between the spans of one name: its shards may be anywhere in memory, with other tensors between them.
    """
    groups: dict[str, set[str]] = {}
    end, last = -1, ""
    for start, stop, name in sorted(filled):
        mine = groups.setdefault(name, {name})
        if start < end and groups[last] is not mine:
            groups[last] |= mine
            groups.update(dict.fromkeys(mine, groups[last]))
        if stop > end:
            end, last = stop, name
    return [group for group in {id(each): each for each in groups.values()}.values() if len(group) > 1]


def _content_of(transfer: ItemTransfer) -> object:
    """A value that tells the saved contents of two items apart."""
    item = transfer.item
    return item.dest_offsets, item.lengths, item.storage_offsets, transfer.stored.sizes, transfer.stored.crc


def find_exclusive(transfers: Sequence[ItemTransfer]) -> list[bool]:
    """Tell for each item whether it shares its memory with no other."""
    spans = sorted((*span, n) for n, each in enumerate(transfers) if (span := _span(each.target)) is not None)
    found = [True] * len(transfers)
    end, last = -1, -1
    for start, stop, number in spans:
        if start < end:
            found[number] = found[last] = False
        if stop > end:
            end, last = stop, number
    return found


def _span(target: torch.Tensor | None) -> tuple[int, int] | None:
    """Addresses of a tensor's first byte and of the byte after its last; None if it has no memory of its own."""
    if target is None or not is_plain(target) or target.numel() == 0:
        return None
    start = target.data_ptr()
    if target.is_contiguous():
        return start, start + target.nbytes
    last = sum((size - 1) * stride for size, stride in zip(target.shape, target.stride(), strict=True))
    return start, start + (last + 1) * target.element_size()


# --- heads of stored items ----------------------------------------------------------------------


class ItemKind(NamedTuple):
    """Properties of items whose heads should be the same."""

    dtype: torch.dtype
    """Dtype of the saved tensor."""
    shape: tuple[int, ...]
    """Shape of the saved chunk."""
    length: int
    """Length of the item in bytes."""


class ArchiveHeads:
    """Heads of items, by kind, as this torch writes them. Thread-safe.

    What torch.save writes before a storage is the same for all tensors of one dtype and shape, up to the version of
    torch. Where an item is as long as this torch would write it, the place of its bytes is expected; its own head is
    fetched with them, and must say the same.
    """

    def __init__(self) -> None:
        self._frames = FrameCache()
        self._parsed: dict[ItemKind, tuple[bytes, ArchiveHead]] = {}

    def _frame(self, kind: ItemKind) -> Frame | None:
        """What this torch writes around the bytes of a contiguous tensor; None if it cannot be told."""
        with contextlib.suppress(FramingError, RuntimeError, MemoryError):  # RuntimeError: torch lacks that much memory
            return self._frames.get(kind.dtype, torch.Size(kind.shape))
        return None

    def expect(self, kind: ItemKind) -> ArchiveHead | None:
        """The head of items of ``kind`` if they are as long as this torch would write them; None if they are not."""
        if kind not in self._parsed:
            frame = self._frame(kind)
            if frame is None or frame.length != kind.length:
                return None
            with contextlib.suppress(HeadError):
                self._parsed[kind] = frame.header, parse_head(frame.header)
        known = self._parsed.get(kind)
        return None if known is None else known[1]

    def find(self, kind: ItemKind, data: bytes | memoryview) -> ArchiveHead | None:
        """The head of an item of ``kind`` that begins with ``data``: 0.5 us if it is expected, else 35 us.

        None if there is no head, or it is of another kind.
        """
        expected = self.expect(kind)
        if expected is not None and bytes(data[: expected.length]) == self._parsed[kind][0]:
            return expected
        with contextlib.suppress(HeadError):
            return _read(kind, bytes(data[:MAX_HEAD]))
        return None

    def find_fault(self, kind: ItemKind, raw_offset: int, data: bytes) -> str | None:
        """How the head that is ``data`` differs from that of a contiguous tensor of ``kind`` at ``raw_offset``."""
        frame = self._frame(kind)
        if frame is not None and frame.header == data:
            return None  # also of dtypes that `parse_head` does not know
        try:
            head = _read(kind, data)
        except HeadError as error:
            return str(error)
        if not head.is_row_major or head.raw_offset != raw_offset:
            return f"its bytes begin at {head.raw_offset}, the metadata has {raw_offset}"
        return None


def _read(kind: ItemKind, data: bytes) -> ArchiveHead:
    head = parse_head(data)
    if (head.dtype, head.shape) != (kind.dtype, tuple(kind.shape)):
        raise HeadError(f"it is a {head.dtype} of {head.shape}, the metadata has {kind.dtype} of {tuple(kind.shape)}")
    if head.raw_offset + head.nbytes > kind.length:
        raise HeadError(f"its {head.nbytes} bytes from {head.raw_offset} on are not in its {kind.length} bytes")
    return head
