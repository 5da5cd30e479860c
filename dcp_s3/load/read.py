"""The read of one rank's plan: straight into the destination tensors, each item handed to the planner.

items -> transfers (which bytes, where to, as which dtype) -> requests -> Fetcher -> planner
"""

from __future__ import annotations

import contextlib
import functools
import io
import logging
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from itertools import dropwhile
from operator import itemgetter
from typing import cast

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from dcp_s3 import errors
from dcp_s3.format.archive import MAX_HEAD, ArchiveHead, FramingError, compute_frame, parse_head
from dcp_s3.format.blocks import Range
from dcp_s3.format.metadata import is_unproven
from dcp_s3.format.safe_items import check_item, check_storages
from dcp_s3.load.exchange import Exchange
from dcp_s3.load.fetch import Fetcher
from dcp_s3.load.items import Transfer, elements_of
from dcp_s3.load.plan import READ_GAP, SMALL_HALF, Box, StoredChunk, find_stored, plan_requests, ranges_of_box
from dcp_s3.load.planner import some
from dcp_s3.load.weights import WeightsMetadata
from dcp_s3.memory import counted_as_change, is_plain, synchronize_accelerator, view_bytes
from dcp_s3.process import collector_paused, world_size
from dcp_s3.s3.multipart import GETS_PER_SECOND, plan_part_size
from dcp_s3.torch_private import ReaderTransforms, narrow_tensor_by_index

logger = logging.getLogger(__name__)

SMALL_ITEM = 64 * 2**10
"""Items of up to this many bytes are fetched whole."""


class LoadExecutor:
    """Carries out one rank's load plan; ``weights_only``, ``allow_dtype_cast``: see `S3StorageReader`."""

    def __init__(
        self,
        fetcher: Fetcher,
        metadata: Metadata,
        transforms: ReaderTransforms,
        *,
        weights_only: bool = True,
        allow_dtype_cast: bool = True,
    ) -> None:
        self.fetcher = fetcher
        fetcher.etags = metadata.etags if isinstance(metadata, WeightsMetadata) else {}
        self._url, self._metadata, self._transforms = str(fetcher.url), metadata, transforms
        self._weights_only, self._allow_dtype_cast = weights_only, allow_dtype_cast
        self._unproven = is_unproven(metadata)
        self._waiting: deque[Transfer] = deque()
        """Items that are no tensors and that the planner has not got. It gets them in plan order, as from torch's
        readers."""

    def run(self, plan: LoadPlan, planner: LoadPlanner, exchange: Exchange | None = None) -> None:
        """Fetch every item of ``plan``, or get it from other ranks, and hand it to ``planner``, on this thread only.

        Raises:
            TensorMismatchError: before anything is fetched or changed; only without ``allow_dtype_cast``.
            UnsafeItemError: before the planner sees the item.
            CorruptCheckpointError, PeerReadError, StorageError
        """
        with collector_paused():
            shared = set() if exchange is None else exchange.shared
            transfers, late = self.prepare(plan.items, planner, shared)
            targets = [each.target for each in transfers if each.target is not None]
            devices = {target.device: target for target in targets}
            synchronize_accelerator(devices.values())
            self.fetcher.pin = any(device.type == "cuda" for device in devices)
            self._waiting = deque(each for each in transfers if each.target is None)
            # DTensors and other wrappers have a version counter of their own, which is the parameter's. Torch's
            # planners have them in ``state_dict``; of other planners only the targets are known.
            changing, state = [*targets, *(target for target, _ in late)], getattr(planner, "state_dict", None)
            if isinstance(state, Mapping):
                names = dict.fromkeys(item.dest_index.fqn for item in plan.items)
                changing += [entry for entry in map(state.get, names) if isinstance(entry, torch.Tensor)]
            direct = [each for number, each in enumerate(transfers) if number not in shared]
            with counted_as_change(changing):
                threads = None if exchange is None else exchange.provide(plan.items, transfers, self.fetcher)
                self._read(direct, planner, threads)
                if exchange is not None:
                    for transfer in exchange.arrivals():
                        self._commit(transfer, planner)
                for target, received in late:
                    target.copy_(received)
        synchronize_accelerator(devices.values())

    # --- what each item needs ----------------------------------------------------------------------------

    def prepare(
        self, items: Sequence[ReadItem], planner: LoadPlanner, shared: Collection[int] = ()
    ) -> tuple[list[Transfer], list[tuple[torch.Tensor, torch.Tensor]]]:
        """Decide for each item which bytes it needs, and where they go. No I/O.

        Args:
            shared: numbers of items that come from other ranks: whole, or their box, packed.

        Returns:
            The transfer of each item; and targets of which another entry has a part, each with what is to be copied
            into it at the end, in order.
        """
        url, narrowed = self._url, dict[tuple[torch.dtype, torch.dtype], dict[str, None]]()
        transfers: list[Transfer] = []
        for number, item in enumerate(items):
            stored = find_stored(self._metadata, item.storage_index, item.type, url)
            target: torch.Tensor | None = None
            if item.type != LoadItemType.BYTE_IO:
                target, fqn = planner.resolve_tensor(item), item.dest_index.fqn
                target = target.detach() if target.requires_grad else target
                entry = cast(TensorStorageMetadata, self._metadata.state_dict_metadata[item.storage_index.fqn])
                dtype = entry.properties.dtype
                if target.size() != item.lengths:
                    raise errors.TensorMismatchError(
                        f"{fqn}: the planner gave a tensor of shape {tuple(target.size())} for {tuple(item.lengths)} "
                        f"of {url}", url=url, fqn=fqn,
                    )  # fmt: skip
                if dtype != target.dtype:
                    if not self._allow_dtype_cast:
                        raise errors.TensorMismatchError(
                            f"{fqn} has {dtype} in {url}, {target.dtype} in the state to load into, and "
                            "allow_dtype_cast is off. Remedy: build the state with the saved dtype, or convert on load "
                            "with S3StorageReader(allow_dtype_cast=True)", url=url, fqn=fqn,
                        )  # fmt: skip
                    if not keeps_values(dtype, target.dtype):
                        narrowed.setdefault((dtype, target.dtype), {})[fqn] = None
            transfers.append(self._make(item, stored, target, number in shared))
        late: list[tuple[torch.Tensor, torch.Tensor]] = []
        for number in find_late(transfers):
            item, target = items[number], cast(torch.Tensor, transfers[number].target)
            late.append((target, torch.empty(item.lengths, dtype=target.dtype, device="cpu")))
            transfers[number] = self._make(item, transfers[number].stored, late[-1][1], number in shared)
        if narrowed:
            logger.warning(
                "%s: %d tensors are loaded into dtypes that do not hold all their values: %s. If that is not meant: "
                "build the state with the saved dtypes; S3StorageReader(allow_dtype_cast=False) makes it an error",
                url, sum(map(len, narrowed.values())),
                "; ".join(f"{len(names)} from {a} to {b} ({some(names)})" for (a, b), names in narrowed.items()),
            )  # fmt: skip
        return transfers, late

    def _make(self, item: ReadItem, stored: StoredChunk, target: torch.Tensor | None, is_shared: bool) -> Transfer:
        """The transfer of an item; of one that is shared, that of its box, packed."""
        box, ranges = Box(item.storage_offsets, item.lengths), [Range(0, stored.nbytes, stored.crc)]
        if target is None or stored.whole:
            seeks = target is not None and not is_shared and stored.crc is None and stored.nbytes > SMALL_ITEM
            kind = _kind_of(stored) if seeks else None
            expected = None if kind is None else expect_head(kind)[1]
            if kind is None or expected is None:
                return Transfer(item, stored, target, ranges if stored.nbytes else [], None, complete=self._decode)
            # Probably a tensor where this torch would have put it. Its head is fetched along, to prove that.
            (dtype, sizes, _), head = kind, expected.raw_offset
            ranges = ranges_of_box(sizes, box, dtype.itemsize, blocks=None, max_gap=READ_GAP)
            array = stored._replace(base=stored.base + head, sizes=sizes, dtype=dtype)
            return Transfer(item, stored, target, ranges, target, array=array, box=box, head=head, complete=self._prove)
        sizes, size = stored.sizes, stored.dtype.itemsize
        if is_shared:
            array = stored._replace(base=0, sizes=item.lengths)
            return Transfer(item, stored, target, [Range(0, box.numel * size, None)], target, array=array)
        if box.lengths != sizes or any(box.offsets):
            ranges = ranges_of_box(sizes, box, size, blocks=stored.blocks, max_gap=READ_GAP)
        elif not stored.nbytes:
            ranges = []
        if not self._unproven:
            return Transfer(item, stored, target, ranges, target, box=box)
        # Metadata without a checksum: the item's head must prove what it says.
        head = stored.base - stored.info.offset
        is_head = 0 < head <= MAX_HEAD
        transfer = Transfer(
            item, stored, target, ranges, target, box=box, head=head if is_head else 0, complete=self._prove
        )
        if not is_head:
            self._prove(transfer)  # which raises
        return transfer

    def _prove(self, transfer: Transfer) -> Transfer | None:
        """Compare the head that came with raw bytes with what should be there. If another writer placed them elsewhere,
        return the whole item instead; if this library's metadata misplaces them, that is an error."""
        item, stored, head = transfer.item, transfer.stored, bytes(transfer.head)
        if (kind := _kind_of(stored)) is not None:
            if find_head(kind, head) == expect_head(kind)[1]:
                return None
            ranges = [Range(0, stored.nbytes, stored.crc)]
            return Transfer(item, stored, transfer.target, ranges, None, complete=self._decode)
        kind = stored.dtype, stored.sizes, stored.info.length
        found = find_head(kind, head)
        known = head and head == expect_head(kind)[0]  # also of dtypes that `parse_head` does not know
        if not known and (found is None or found.raw_offset != stored.base - stored.info.offset):
            raise errors.CorruptCheckpointError(
                f"the metadata of {self._url} is damaged: where it places {item.storage_index.fqn!r}, there is no "
                f"{stored.dtype} of {tuple(stored.sizes)}. Remedy: load an earlier checkpoint",
                url=self._url,
            )
        return None

    def _decode(self, transfer: Transfer) -> None:
        """Decode a whole item: into its target, or to its ``loaded``."""
        item, stored, target, name = transfer.item, transfer.stored, transfer.target, transfer.item.storage_index.fqn
        buffer, transfer.into = transfer.into, None
        data = memoryview(b"") if buffer is None else view_bytes(buffer)
        try:
            kind = None if target is None else _kind_of(stored)
            head = None if kind is None else find_head(kind, data)
            if head is not None:
                raw = data[head.raw_offset : head.raw_offset + head.nbytes]
                tensor = elements_of(raw, head.dtype) if raw.nbytes else torch.empty(0, dtype=head.dtype)
                tensor = tensor.view(head.shape)
            else:
                # Old checkpoints have no descriptor list.
                descriptors = getattr(stored.info, "transform_descriptors", None) or ()
                try:
                    self._transforms.extension_registry.from_descriptor_list(descriptors)
                except ValueError as error:
                    raise errors.CheckpointError(
                        f"{name!r} in {self._url} was saved through the stream extensions {list(descriptors)}: "
                        f"{error}. Remedy: pass an _extension_registry that knows them to S3StorageReader",
                        url=self._url,
                    ) from error
                stored_stream = io.BytesIO(data)
                stream = self._transforms.transform_load_stream(item, descriptors, stored_stream)
                seekable = stored_stream if stream is stored_stream else io.BytesIO(stream.read(-1))
                if target is None:
                    transfer.loaded = seekable
                    return
                check_storages(seekable)
                seekable.seek(0)
                tensor = cast(torch.Tensor, torch.load(seekable, map_location="cpu", weights_only=True))
            cast(torch.Tensor, target).copy_(narrow_tensor_by_index(tensor, item.storage_offsets, item.lengths))
        except errors.DcpS3Error:
            raise
        except Exception as error:
            raise errors.CorruptCheckpointError(
                f"{name!r} in {self._url} cannot be decoded: {type(error).__name__}: {error}. The stored data is "
                "damaged: load an earlier checkpoint",
                url=self._url,
            ) from error

    # --- on their way --------------------------------------------------------------------------------------

    def _read(self, transfers: Sequence[Transfer], planner: LoadPlanner, threads: int | None = None) -> None:
        """Fetch items, on so many threads or as many as fill the link, and hand them to the planner."""
        for transfer in transfers:
            if not transfer.ranges:
                if transfer.complete is not None:
                    transfer.complete(transfer)
                self._commit(transfer, planner)
        segments = [segment for transfer in transfers for segment in transfer.segments()]
        if not segments:
            return
        fetcher, settings = self.fetcher, self.fetcher.settings
        total = sum([stop - start for start, stop, _ in segments])
        largest = plan_part_size(
            total, connections=fetcher.store.read_width(), ranks=world_size(), most=settings.max_part_size,
            requests_per_second=GETS_PER_SECOND,
        )  # fmt: skip
        if settings.part_size != "auto":
            largest = min(largest, settings.part_size)
        buffered = min(largest, fetcher.max_buffered)
        all_direct = all(transfer.owned is not None for transfer in transfers if transfer.ranges)
        requests = plan_requests(segments, max_request=largest if all_direct else buffered, max_shared=buffered)
        fetched = sum([request.length for request in requests])
        most = max(len(requests), fetched // SMALL_HALF)
        most = most if all_direct else min(most, fetcher.max_buffers)
        with contextlib.closing(fetcher.fetch(requests, threads=threads, most=most)) as arrivals:
            for finished in arrivals:
                self._commit(finished, planner)

    def _commit(self, transfer: Transfer, planner: LoadPlanner) -> None:
        """Hand a tensor that is in place to the planner; for another item, all items whose turn it is."""
        if transfer.target is not None:
            planner.commit_tensor(transfer.item, transfer.target)
            return
        while self._waiting and (loaded := self._waiting[0].loaded) is not None:
            due = self._waiting.popleft()
            due.loaded = None
            if self._weights_only:
                check_item(loaded, fqn=due.item.storage_index.fqn, url=self._url, verified=due.checked)
            try:
                planner.load_bytes(due.item, loaded)
            except Exception as error:
                if due.checked:
                    raise  # the bytes are what was saved: only the caller can judge why they cannot be unpickled
                raise errors.CorruptCheckpointError(
                    f"{due.item.storage_index.fqn!r} in {self._url} cannot be unpickled: {type(error).__name__}: "
                    f"{error}. It was saved without a checksum: either it is damaged, or a class is missing here",
                    url=self._url,
                ) from error


def keeps_values(saved: torch.dtype, target: torch.dtype) -> bool:
    """Whether ``target`` holds every value of ``saved`` exactly."""
    if saved == target or saved == torch.bool:
        return True
    if target == torch.bool or (saved.is_complex and not target.is_complex):
        return False
    try:
        if saved.is_floating_point or saved.is_complex:
            small, large = torch.finfo(saved), torch.finfo(target)  # TypeError for an integer target
            finest = large.smallest_normal * large.eps <= small.smallest_normal * small.eps  # subnormal numbers
            return bool(large.eps <= small.eps and large.max >= small.max and finest)
        integer = torch.iinfo(saved)
        if target.is_floating_point or target.is_complex:
            return bool(integer.max <= min(2 / torch.finfo(target).eps, torch.finfo(target).max))
        return bool(torch.iinfo(target).min <= integer.min and integer.max <= torch.iinfo(target).max)
    except TypeError:  # quantized, or bare bits
        return False


# --- entries that share memory ------------------------------------------------------------------------


def find_late(transfers: Sequence[Transfer]) -> list[int]:
    """Numbers of the items that must not be received where they belong, because an earlier entry's are: they are copied
    there at the end, in this order.

    Of entries that share memory (tied parameters) the last one in the plan wins, as with torch's readers, unless what
    was saved for them is known to be the same.
    """
    places: dict[int, tuple[int, int]] = {}  # in memory: of the first byte, and of that after the last
    for number, transfer in enumerate(transfers):
        target = transfer.target
        if target is None or not is_plain(target) or target.numel() == 0:
            continue  # no memory of its own
        start, size = target.data_ptr(), target.nbytes
        if not target.is_contiguous():
            last = sum((size - 1) * stride for size, stride in zip(target.shape, target.stride(), strict=True))
            size = (last + 1) * target.element_size()
        places[number] = start, start + size
    groups: list[list[int]] = []  # that overlap, directly or through others
    end = -1
    for number, (start, stop) in sorted(places.items(), key=itemgetter(1)):
        if start >= end:
            groups.append([])
        groups[-1].append(number)
        end = max(end, stop)
    late: list[int] = []
    for group in groups:
        if len(group) == 1:  # most share no memory
            continue
        group.sort()
        contents: dict[str, list[object]] = {}  # of each entry: its items may lie between those of another
        for number in group:
            item, stored = transfers[number].item, transfers[number].stored
            where = places[number], item.dest_offsets, item.lengths, item.storage_offsets
            contents.setdefault(item.dest_index.fqn, []).append((where, stored.sizes, stored.crc))
        known = all(transfers[number].stored.crc is not None for number in group)
        if len(set(map(tuple, contents.values()))) > 1 or not known:
            first = next(iter(contents))
            late += dropwhile(lambda number: transfers[number].item.dest_index.fqn == first, group)  # noqa: B023
    return sorted(late)


# --- heads of stored items ----------------------------------------------------------------------


ItemKind = tuple[torch.dtype, torch.Size, int]
"""What the heads of items depend on: dtype and shape of the saved tensor, bytes of the item."""


def _kind_of(stored: StoredChunk) -> ItemKind | None:
    """The kind of an archive of torch.save; None if the item is none, or if the shape of its tensor is not known."""
    if stored.tensor is None or stored.info.transform_descriptors:
        return None
    return (*stored.tensor, stored.nbytes)


@functools.lru_cache(maxsize=4096)
def expect_head(kind: ItemKind) -> tuple[bytes, ArchiveHead | None]:
    """What this torch writes before the bytes of items of ``kind``, and what that says; nothing if they are of another
    length than this torch would write them.

    It is the same for all tensors of one dtype and shape, up to the version of torch. So the place of the bytes is
    expected; the item's own head is fetched with them, and must say the same.
    """
    header = b""
    with contextlib.suppress(FramingError, RuntimeError, MemoryError):  # RuntimeError: too much for torch
        dtype, shape, length = kind
        frame = compute_frame(dtype, shape)
        if frame.length == length:
            header = frame.header
            return header, parse_head(header)
    return header, None


def find_head(kind: ItemKind, data: bytes | memoryview) -> ArchiveHead | None:
    """The head of a row-major item of ``kind`` that begins with ``data``: 0.5 us if it is expected, else 35 us. None if
    there is no head, or it is of another kind."""
    header, head = expect_head(kind)
    if head is not None and bytes(data[: head.length]) == header:
        return head
    head = parse_head(bytes(data[:MAX_HEAD]))
    dtype, shape, length = kind
    if head is None or (head.dtype, head.shape) != (dtype, tuple(shape)) or head.raw_offset + head.nbytes > length:
        return None
    return head
