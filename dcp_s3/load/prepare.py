"""Makes the transfer for each item of a load plan: the bytes it needs, where they go, as which dtype. No I/O."""

from __future__ import annotations

import contextlib
import functools
import io
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import IO, NamedTuple, cast

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem

from dcp_s3 import errors
from dcp_s3.format.archive import MAX_HEAD, ArchiveHead
from dcp_s3.format.blocks import Range, get_blocks, get_crc, get_raw_offset
from dcp_s3.format.metadata import is_unproven
from dcp_s3.format.safe_items import check_storages
from dcp_s3.format.saved_entries import find_chunk
from dcp_s3.load.archive_heads import SMALL_ITEM, ArchiveHeads, HeadProbe, HeadProof, ItemKind, read_tensor
from dcp_s3.load.boxes import Box
from dcp_s3.load.item_transfer import (
    ArchivedTransfer,
    ItemTransfer,
    ProvenTransfer,
    StreamTransfer,
    TensorTransfer,
    is_whole,
)
from dcp_s3.load.plan import ranges_of_box
from dcp_s3.tensor_memory import is_direct, view_bytes
from dcp_s3.torch_private import ReaderTransforms, StorageInfo, narrow_tensor_by_index
from dcp_s3.url import CheckpointURL

logger = logging.getLogger(__name__)

_NAMED = 5  # names in a warning, for each conversion

Conversion = tuple[torch.dtype, torch.dtype]
"""The saved dtype, and the dtype of the tensor to load into."""


def keeps_values(saved: torch.dtype, target: torch.dtype) -> bool:
    """Whether ``target`` holds every value of ``saved`` exactly."""
    if saved == target or saved == torch.bool:
        return True
    if target == torch.bool or (saved.is_complex and not target.is_complex):
        return False
    if saved.is_floating_point or saved.is_complex:
        return (target.is_floating_point or target.is_complex) and _contains(target, saved)
    try:
        integer = torch.iinfo(saved)
        if not (target.is_floating_point or target.is_complex):
            other = torch.iinfo(target)
            return bool(other.min <= integer.min and integer.max <= other.max)
    except TypeError:  # quantized, or bare bits
        return False
    found = torch.finfo(target)
    return bool(integer.max <= 2 / found.eps and integer.max <= found.max)


def _contains(target: torch.dtype, saved: torch.dtype) -> bool:
    """Whether a floating-point ``target`` has the precision and range of ``saved``, subnormal numbers included."""
    large, small = torch.finfo(target), torch.finfo(saved)
    return bool(
        large.eps <= small.eps
        and large.max >= small.max
        and large.smallest_normal * large.eps <= small.smallest_normal * small.eps
    )


def warn_of_narrowing(narrowed: Mapping[str, Conversion], url: str) -> None:
    """Log one warning for all tensors that a load converts to a dtype that does not hold their values."""
    if not narrowed:
        return
    kinds: dict[Conversion, list[str]] = {}
    for name, conversion in narrowed.items():
        kinds.setdefault(conversion, []).append(name)
    parts = []
    for (saved, target), names in kinds.items():
        more = ", ..." if len(names) > _NAMED else ""
        parts.append(f"{len(names)} from {saved} to {target} ({', '.join(names[:_NAMED])}{more})")
    logger.warning(
        "%s: %d tensors are loaded into dtypes that do not hold all their values: %s. If that is not meant: build the "
        "state with the saved dtypes; S3StorageReader(allow_dtype_cast=False) makes it an error",
        url,
        len(narrowed),
        "; ".join(parts),
    )


class UnknownItem(NamedTuple):
    """An item of another writer, of an unknown kind."""

    number: int
    """Number of the item in the plan."""
    probe: HeadProbe
    """Probe that looks at the item."""
    prepare: Callable[[], ItemTransfer]
    """Makes the transfer after the look."""


class TransferFactory:
    """Decides for each read item which bytes it needs and where they go.

    Attributes:
        narrowed: prepared tensors, by name, that are converted to a dtype that does not hold all values.
        heads: known heads of items of other writers.
        unknown: items of unknown kinds: one of each kind should be looked at first. The transfers prepared for them
            fetch and decode all of the item.
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
        self._unproven = is_unproven(metadata)
        self.narrowed: dict[str, Conversion] = {}
        self.heads = ArchiveHeads()
        self.unknown: list[UnknownItem] = []

    def prepare(self, number: int, item: ReadItem, planner: LoadPlanner, *, whole: bool = False) -> ItemTransfer:
        """The transfer for ``item``, number ``number`` of the plan. No I/O.

        With ``whole`` it is a `StreamTransfer`, unless the raw bytes' place is recorded.

        Raises:
            TensorMismatchError: the destination does not match what was saved.
            CorruptCheckpointError: the metadata contradicts itself.
        """
        info = self._storage_info(item)
        if item.type == LoadItemType.BYTE_IO:
            return self._prepare_bytes(item, info)
        target = planner.resolve_tensor(item)
        if target.requires_grad:
            target = target.detach()
        if target.size() != item.lengths:
            raise errors.TensorMismatchError(
                f"{item.dest_index.fqn}: the planner gave a tensor of shape {tuple(target.size())} for "
                f"{tuple(item.lengths)} of {self._url}", url=str(self._url), fqn=item.dest_index.fqn,
            )  # fmt: skip
        saved = self._metadata.state_dict_metadata[item.storage_index.fqn]
        if not isinstance(saved, TensorStorageMetadata):
            raise errors.CorruptCheckpointError(
                f"{item.storage_index.fqn!r} in {self._url} is no tensor, but is to be loaded into one: the "
                "checkpoint was saved from another kind of state",
                url=str(self._url),
            )
        dtype = saved.properties.dtype
        if dtype != target.dtype and not self._allow_dtype_cast:
            raise errors.TensorMismatchError(
                f"{item.dest_index.fqn} has {dtype} in {self._url}, {target.dtype} in the state to load into, and "
                "allow_dtype_cast is off. Remedy: build the state with the saved dtype, or convert on load with "
                "S3StorageReader(allow_dtype_cast=True)",
                url=str(self._url),
                fqn=item.dest_index.fqn,
            )
        if not keeps_values(dtype, target.dtype):
            self.narrowed[item.dest_index.fqn] = dtype, target.dtype
        raw_offset = get_raw_offset(info)
        if raw_offset is None or info.transform_descriptors:
            return self._prepare_archived(number, item, info, target, saved, whole=whole)
        return self._prepare_raw(item, info, target, saved, raw_offset)

    def _prepare_raw(
        self,
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
            raise errors.CorruptCheckpointError(
                f"{item.storage_index.fqn!r} in {self._url}: a chunk of {nbytes} bytes at {raw_offset} does "
                f"not fit into its item of {info.length} bytes: the metadata is damaged",
                url=str(self._url),
            )
        if is_whole(item, sizes):
            ranges = [Range(0, nbytes, get_crc(info))] if nbytes else []
        else:
            blocks = get_blocks(info, nbytes) if nbytes else None
            box = Box(item.storage_offsets, item.lengths)
            ranges = ranges_of_box(sizes, box, dtype.itemsize, blocks=blocks, max_gap=self._max_gap)
        if not self._unproven:
            return TensorTransfer(item, info.relative_path, info.offset + raw_offset, ranges, target, sizes, dtype)
        if not 0 < raw_offset <= MAX_HEAD:
            raise errors.CorruptCheckpointError(
                f"the metadata of {self._url} is damaged: {item.storage_index.fqn!r} has {raw_offset} bytes before its "
                "own. Remedy: load an earlier checkpoint",
                url=str(self._url),
            )
        find_fault = functools.partial(self.heads.find_fault, ItemKind(dtype, sizes, info.length), raw_offset)
        return ProvenTransfer(
            item, info, raw_offset, ranges, target, sizes, dtype, find_fault=find_fault, url=str(self._url)
        )

    def _prepare_archived(
        self,
        number: int,
        item: ReadItem,
        info: StorageInfo,
        target: torch.Tensor,
        saved: TensorStorageMetadata,
        *,
        whole: bool,
    ) -> ItemTransfer:
        """Prepare a tensor whose raw bytes' place is not recorded: from another writer, or through an extension."""
        chunk = find_chunk(saved, item.storage_index)
        if info.transform_descriptors or chunk is None:
            return self._prepare_encoded(item, info, target, None)
        kind = ItemKind(saved.properties.dtype, chunk.sizes, info.length)
        # A recorded checksum covers the whole item.
        if whole or info.length <= SMALL_ITEM or get_crc(info) is not None:
            return self._prepare_encoded(item, info, target, kind)

        def again(found: ArchiveHead | None) -> ItemTransfer:
            return expected(found, lambda _: expected(None, again))

        def expected(head: ArchiveHead | None, instead: Callable[[ArchiveHead | None], ItemTransfer]) -> ItemTransfer:
            if head is None:
                return self._prepare_encoded(item, info, target, kind)
            proof = HeadProof(self.heads, kind, head)
            return ArchivedTransfer(item, info, target, proof, max_gap=self._max_gap, instead=instead)

        head = self.heads.expect(kind)
        if head is None:
            probe = HeadProbe(self.heads, kind, info.relative_path, info.offset)
            self.unknown.append(UnknownItem(number, probe, lambda: expected(self.heads.expect(kind), again)))
        return expected(head, again)

    def _prepare_encoded(
        self, item: ReadItem, info: StorageInfo, target: torch.Tensor, kind: ItemKind | None
    ) -> ItemTransfer:
        """Prepare a tensor that is fetched with all of its item; ``kind`` is for archives."""

        def unpack(data: memoryview) -> bool:
            head = None if kind is None else self.heads.find(kind, data)
            if head is None or not head.is_row_major:
                return False
            if head.nbytes:
                view_bytes(target)[:] = data[head.raw_offset : head.raw_offset + head.nbytes]
            return True

        def decode(_: StreamTransfer, buffer: torch.Tensor) -> None:
            head = None if kind is None else self.heads.find(kind, view_bytes(buffer))
            if head is not None:
                tensor = read_tensor(head, buffer)
                target.copy_(narrow_tensor_by_index(tensor, item.storage_offsets, item.lengths))
                return
            with self._naming_damage(item):
                stream = self._decode(item, info, buffer)
                seekable = stream if isinstance(stream, io.BytesIO) else io.BytesIO(stream.read(-1))
                check_storages(seekable)
                seekable.seek(0)
                tensor = cast(torch.Tensor, torch.load(seekable, map_location="cpu", weights_only=True))
                target.copy_(narrow_tensor_by_index(tensor, item.storage_offsets, item.lengths))

        crc = get_crc(info) if get_raw_offset(info) is None else None
        at_once = (
            kind is not None
            and crc is None
            and info.length <= SMALL_ITEM
            and kind.dtype == target.dtype
            and is_whole(item, torch.Size(kind.shape))
            and is_direct(target)
        )
        return StreamTransfer(item, info, crc, target, decode, unpack if at_once else None)

    def _prepare_bytes(self, item: ReadItem, info: StorageInfo) -> ItemTransfer:
        if info.length == 0:
            raise errors.CorruptCheckpointError(
                f"the metadata of {self._url} is damaged: {item.storage_index.fqn!r} has no bytes", url=str(self._url)
            )

        def decode(transfer: StreamTransfer, buffer: torch.Tensor) -> None:
            with self._naming_damage(item):
                transfer.loaded = io.BytesIO(self._decode(item, info, buffer).read(-1))

        crc = get_crc(info) if get_raw_offset(info) is None else None  # else it covers only a part of the item
        return StreamTransfer(item, info, crc, None, decode)

    def _decode(self, item: ReadItem, info: StorageInfo, buffer: torch.Tensor) -> IO[bytes]:
        # Old checkpoints have no descriptor list.
        descriptors = getattr(info, "transform_descriptors", None) or ()
        try:
            self._transforms.extension_registry.from_descriptor_list(descriptors)
        except ValueError as error:
            raise errors.CheckpointError(
                f"{item.storage_index.fqn!r} in {self._url} was saved through the stream extensions "
                f"{list(descriptors)}: {error}. Remedy: pass an _extension_registry that knows them to S3StorageReader",
                url=str(self._url),
            ) from error
        raw = io.BytesIO(view_bytes(buffer))
        return self._transforms.transform_load_stream(item, descriptors, raw)

    @contextlib.contextmanager
    def _naming_damage(self, item: ReadItem) -> Iterator[None]:
        """Report any error of decoding as damage to the stored item."""
        try:
            yield
        except errors.DcpS3Error:
            raise
        except Exception as error:
            raise errors.CorruptCheckpointError(
                f"{item.storage_index.fqn!r} in {self._url} cannot be decoded: {type(error).__name__}: {error}. "
                "The stored data is damaged: load an earlier checkpoint",
                url=str(self._url),
            ) from error

    def _storage_info(self, item: ReadItem) -> StorageInfo:
        try:
            return cast(StorageInfo, self._metadata.storage_data[item.storage_index])
        except KeyError:
            raise errors.CorruptCheckpointError(
                f"the metadata of {self._url} does not say where {item.storage_index.fqn!r} at "
                f"{item.storage_index.offset} lies: it is damaged or was merged wrongly",
                url=str(self._url),
            ) from None

    def _chunk_sizes(self, item: ReadItem, saved: TensorStorageMetadata) -> torch.Size:
        """Shape of the saved chunk that ``item`` reads from."""
        index = item.storage_index
        chunk = find_chunk(saved, index)
        if chunk is None:
            raise errors.CorruptCheckpointError(
                f"the metadata of {self._url} has no chunk of {index.fqn!r} at {index.offset}", url=str(self._url)
            )
        return chunk.sizes
