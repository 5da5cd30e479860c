"""One read item: which bytes it needs, and how they come to their place."""

from __future__ import annotations

import contextlib
import io
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import IO, cast

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
from dcp_s3.checkpoint.blocks import widen
from dcp_s3.checkpoint.contents import find_chunk
from dcp_s3.checkpoint.item_limits import check_limits
from dcp_s3.checkpoint.memory import is_direct, view_bytes
from dcp_s3.checkpoint.read_plan import Extent, covering_range, row_major_strides
from dcp_s3.transport.checksum import combine_crc64nvme
from dcp_s3.transport.download import Target
from dcp_s3.url import CheckpointURL


class ItemTransfer:
    """One read item: where its bytes lie, where they go, and what is done when they are there.

    Args:
        item: of the load plan.
        extent: bytes to fetch; None if there are none.
        target: the tensor to load into, None for an item that is not a tensor.
        direct: whether the bytes are received in the target's own memory.
        crc: expected CRC-64/NVME of the extent, None if it is not known.
        scatter: called with the transfer and the received bytes (a uint8 tensor) unless ``direct``.
        margin: bytes at the beginning of the extent that are fetched for the checksum only, as are, in a ``direct``
            transfer, those behind the target's.
    """

    def __init__(
        self,
        item: ReadItem,
        extent: Extent | None,
        *,
        target: torch.Tensor | None,
        direct: bool,
        crc: int | None,
        scatter: Callable[[ItemTransfer, torch.Tensor], None],
        margin: int = 0,
    ) -> None:
        self.item = item
        self.extent = extent
        self.target = target
        self.crc = crc
        self.loaded: io.BytesIO | None = None
        """What an item that is not a tensor came out as."""
        self._direct = direct
        self._scatter = scatter
        self._margin = margin
        self._missing = extent.length if extent else 0
        self._crcs: list[tuple[int, int, int]] = []
        self._lock = threading.Lock()
        self._buffer: torch.Tensor | None = None
        self._memory: list[memoryview] = []

    def targets_for(self, offset: int, length: int) -> list[Target]:
        """Where ``length`` bytes of the extent from ``offset`` on are to be received, in order."""
        with self._lock:
            if not self._memory:
                self._memory = self._allocate()
            targets, start = [], 0
            for memory in self._memory:
                view = memory[max(0, offset - start) : max(0, offset + length - start)]
                if view.nbytes:
                    targets.append(Target(view, checksum=self.crc is not None))
                start += memory.nbytes
            return targets

    def _allocate(self) -> list[memoryview]:
        size = self.extent.length if self.extent else 0
        if self._direct and self.target is not None:
            memory = view_bytes(self.target)
            after = size - self._margin - memory.nbytes
            return [memoryview(bytearray(self._margin)), memory, memoryview(bytearray(after))]
        self._buffer = torch.empty(size, dtype=torch.uint8)
        return [view_bytes(self._buffer)]

    def arrived(self, offset: int, targets: Sequence[Target]) -> bool:
        """Count the bytes of `targets_for`; True when these were the last."""
        with self._lock:
            for target in targets:
                self._crcs.append((offset, target.crc or 0, target.view.nbytes))
                self._missing -= target.view.nbytes
                offset += target.view.nbytes
            return self._missing == 0

    def found_crc(self) -> int:
        """CRC-64/NVME of the whole extent as it was received."""
        return combine_crc64nvme((crc, length) for _, crc, length in sorted(self._crcs))

    def forget(self) -> None:
        """Make ready to receive everything again."""
        with self._lock:
            self._crcs = []
            self._missing = self.extent.length if self.extent else 0

    def deliver(self) -> None:
        """Bring the received bytes to their place; gives up the buffer."""
        if not self._direct:
            self._scatter(
                self,
                self._buffer if self._buffer is not None else torch.empty(0, dtype=torch.uint8),
            )
        self._buffer, self._memory = None, []


class TransferFactory:
    """Decides for each read item which bytes it needs and where they go.

    Args:
        url: of the checkpoint.
        metadata: of the checkpoint.
        transforms: torch's stream extensions.
        allow_dtype_cast: whether a tensor may be converted to another dtype.
    """

    def __init__(
        self,
        url: CheckpointURL,
        metadata: Metadata,
        transforms: ReaderTransforms,
        *,
        allow_dtype_cast: bool,
    ) -> None:
        self._url = url
        self._metadata = metadata
        self._transforms = transforms
        self._allow_dtype_cast = allow_dtype_cast

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
            return self._prepare_encoded(number, item, info, target)
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
        element_size = dtype.itemsize
        box = covering_range(sizes, item.storage_offsets, item.lengths, element_size)
        chunk_bytes = sizes.numel() * element_size
        if raw_offset + chunk_bytes > info.length:
            raise errors.CorruptMetadataError(
                f"{item.storage_index.fqn!r} in {self._url}: a chunk of {chunk_bytes} bytes at {raw_offset} does "
                f"not fit into its item of {info.length} bytes: the metadata is damaged",
                url=str(self._url),
            )
        strides = row_major_strides(sizes)
        blocks = get_blocks(info, chunk_bytes) if box.length else None
        start, stop, crc = (
            widen(box.start, box.start + box.length, chunk_bytes, blocks)
            if blocks is not None
            else (box.start, box.start + box.length, None)
        )
        margin = box.start - start

        def scatter(_: ItemTransfer, buffer: torch.Tensor) -> None:
            if buffer.numel():
                wanted = buffer[margin : margin + box.length]
                target.copy_(wanted.view(dtype).as_strided(item.lengths, strides))

        return ItemTransfer(
            item,
            _extent(number, info, raw_offset + start, stop - start),
            target=target,
            direct=box.dense and dtype == target.dtype and is_direct(target),
            crc=crc,
            scatter=scatter,
            margin=margin,
        )

    def _prepare_encoded(self, number: int, item: ReadItem, info: StorageInfo, target: torch.Tensor) -> ItemTransfer:
        """A tensor whose raw bytes' place is not known: written by something else, or through an extension."""

        def scatter(_: ItemTransfer, buffer: torch.Tensor) -> None:
            with self._naming_damage(item):
                stream = self._decode(item, info, buffer)
                seekable = stream if isinstance(stream, io.BytesIO) else io.BytesIO(stream.read(-1))
                check_limits(seekable)
                seekable.seek(0)
                tensor = cast(torch.Tensor, torch.load(seekable, map_location="cpu", weights_only=True))
                target.copy_(narrow_tensor_by_index(tensor, item.storage_offsets, item.lengths))

        extent = _extent(number, info, 0, info.length)
        crc = get_crc(info) if get_raw_offset(info) is None else None
        return ItemTransfer(item, extent, target=target, direct=False, crc=crc, scatter=scatter)

    def _prepare_bytes(self, number: int, item: ReadItem, info: StorageInfo) -> ItemTransfer:
        if info.length == 0:
            raise errors.CorruptMetadataError(
                f"the metadata of {self._url} is damaged: {item.storage_index.fqn!r} has no bytes", url=str(self._url)
            )

        def scatter(transfer: ItemTransfer, buffer: torch.Tensor) -> None:
            with self._naming_damage(item):
                transfer.loaded = io.BytesIO(self._decode(item, info, buffer).read(-1))

        extent = _extent(number, info, 0, info.length)
        return ItemTransfer(item, extent, target=None, direct=False, crc=get_crc(info), scatter=scatter)

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


def _extent(number: int, info: StorageInfo, start: int, length: int) -> Extent | None:
    return Extent(number, info.relative_path, info.offset + start, length) if length else None
