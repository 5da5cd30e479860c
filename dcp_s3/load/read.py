"""The read of one rank's plan: straight into the destination tensors, each item handed to the planner.

    items -> transfers (which bytes, where to, as which dtype) -> requests -> Fetcher -> planner

Items that are no tensors go to the planner in plan order, as with torch's readers. They arrive in any order, and those
that come early are held back.
"""

from __future__ import annotations

import contextlib
import functools
import io
import logging
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import IO, NamedTuple, cast

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from dcp_s3 import errors
from dcp_s3.format.archive import MAX_HEAD, ArchiveHead, FramingError, HeadError, compute_frame, parse_head
from dcp_s3.format.blocks import Range
from dcp_s3.format.metadata import is_unproven
from dcp_s3.format.safe_items import check_item, check_storages
from dcp_s3.load.exchange import Exchange
from dcp_s3.load.fetch import Fetcher
from dcp_s3.load.items import ItemTransfer, StreamTransfer, TensorTransfer, elements_of
from dcp_s3.load.plan import READ_GAP, SMALL_HALF, Box, StoredChunk, find_stored, plan_requests, ranges_of_box
from dcp_s3.load.planner import some
from dcp_s3.load.weights import get_etags
from dcp_s3.memory import counted_as_change, is_plain, synchronize_accelerator, view_bytes
from dcp_s3.process import collector_paused, world_size
from dcp_s3.s3.multipart import GETS_PER_SECOND, plan_part_size
from dcp_s3.torch_private import ReaderTransforms, narrow_tensor_by_index

logger = logging.getLogger(__name__)

SMALL_ITEM = 64 * 2**10
"""Items of up to this many bytes are fetched whole."""


class LoadExecutor:
    """Carries out one rank's load plan.

    Args:
        fetcher: fetches from the checkpoint.
        weights_only, allow_dtype_cast: see `S3StorageReader`.
    """

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
        fetcher.etags = get_etags(metadata)
        self._url, self._metadata, self._transforms = str(fetcher.url), metadata, transforms
        self._weights_only, self._allow_dtype_cast = weights_only, allow_dtype_cast
        self._unproven = is_unproven(metadata)
        self._waiting: deque[ItemTransfer] = deque()
        """Items that are no tensors and that the planner has not got, in plan order."""

    def run(self, plan: LoadPlan, planner: LoadPlanner, exchange: Exchange | None = None) -> None:
        """Fetch every item of ``plan``, or get it from other ranks, and hand it to ``planner``.

        The planner is called from this thread only.

        Raises:
            TensorMismatchError: before anything is fetched or changed; only without ``allow_dtype_cast``.
            UnsafeItemError: before the planner sees the item.
            CorruptCheckpointError: stored bytes are missing, cut short or not what was written.
            PeerReadError: another rank failed.
            StorageError: S3 failed despite retries.
        """
        with collector_paused():
            shared = set() if exchange is None else exchange.join(plan.items, self.fetcher)
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
                threads = None
                if exchange is not None:
                    mine = {number: transfers[number] for number in shared}
                    threads = exchange.provide(mine, sum([each.length for each in direct]))
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
    ) -> tuple[list[ItemTransfer], list[tuple[torch.Tensor, torch.Tensor]]]:
        """Decide for each item which bytes it needs, and where they go. No I/O.

        Args:
            shared: numbers of items that come from other ranks: whole, or their box, packed.

        Returns:
            The transfer of each item; and targets of which another entry has a part, each with what is to be copied
            into it at the end, in order.

        Raises:
            TensorMismatchError: a destination does not match what was saved.
            CorruptCheckpointError: the metadata contradicts itself.
        """
        url, narrowed = self._url, dict[tuple[torch.dtype, torch.dtype], dict[str, None]]()
        transfers: list[ItemTransfer] = []
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

    def _make(self, item: ReadItem, stored: StoredChunk, target: torch.Tensor | None, is_shared: bool) -> ItemTransfer:
        if target is None or stored.whole:
            return self._make_whole(item, stored, target, is_shared)
        sizes, dtype, box = stored.sizes, stored.dtype, Box(item.storage_offsets, item.lengths)
        if is_shared:
            packed = [Range(0, box.numel * dtype.itemsize, None)]
            whole = Box((0,) * len(box.lengths), box.lengths)
            array = stored._replace(base=0, sizes=item.lengths)
            return TensorTransfer(item, stored, target, whole, packed, array=array)
        if box.lengths == sizes and not any(box.offsets):
            ranges = [Range(0, stored.nbytes, stored.crc)] if stored.nbytes else []
        else:
            ranges = ranges_of_box(sizes, box, dtype.itemsize, blocks=stored.blocks, max_gap=READ_GAP)
        if not self._unproven:
            return TensorTransfer(item, stored, target, box, ranges)
        raw_offset = stored.base - stored.info.offset

        def check(head: bytes) -> None:
            """Of metadata without a checksum the item's head must prove what it says."""
            kind = ItemKind(dtype, sizes, stored.info.length)
            found = find_head(kind, head)
            known = head and head == expect_head(kind)[0]  # also of dtypes that `parse_head` does not know
            if not known and (found is None or found.raw_offset != raw_offset):
                raise errors.CorruptCheckpointError(
                    f"the metadata of {self._url} is damaged: where it places {item.storage_index.fqn!r}, there is no "
                    f"{dtype} of {tuple(sizes)}. Remedy: load an earlier checkpoint",
                    url=self._url,
                )

        if not 0 < raw_offset <= MAX_HEAD:
            check(b"")
        return TensorTransfer(item, stored, target, box, ranges, head=raw_offset, check=check)

    def _make_whole(
        self, item: ReadItem, stored: StoredChunk, target: torch.Tensor | None, is_shared: bool
    ) -> ItemTransfer:
        """The transfer of an item that is decoded when all of it has arrived, unless it is a tensor from where this
        torch would have put it."""
        decoded = functools.partial(
            StreamTransfer, item, stored, target, functools.partial(self._decode, item, stored, target)
        )
        kind = None if is_shared or stored.crc is not None or stored.nbytes <= SMALL_ITEM else _kind_of(stored)
        expected = None if kind is None else expect_head(kind)[1]
        if kind is None or expected is None or target is None:
            return decoded()
        base = stored.base + expected.raw_offset
        array = stored._replace(base=base, sizes=torch.Size(kind.shape), dtype=kind.dtype)
        box = Box(item.storage_offsets, item.lengths)
        ranges = ranges_of_box(kind.shape, box, kind.dtype.itemsize, blocks=None, max_gap=READ_GAP)

        def check(head: bytes) -> ItemTransfer | None:
            return None if find_head(kind, head) == expected else decoded()

        return TensorTransfer(item, stored, target, box, ranges, array=array, head=expected.raw_offset, check=check)

    def _decode(
        self, item: ReadItem, stored: StoredChunk, target: torch.Tensor | None, buffer: torch.Tensor
    ) -> io.BytesIO | None:
        """Decode a whole item: into ``target``, or to what is returned."""
        kind = _kind_of(stored)
        try:
            head = None if kind is None or target is None else find_head(kind, view_bytes(buffer))
            if head is not None:
                raw = view_bytes(buffer)[head.raw_offset : head.raw_offset + head.nbytes]
                tensor = elements_of(raw, head.dtype) if raw.nbytes else torch.empty(0, dtype=head.dtype)
                tensor = tensor.view(head.shape)
            else:
                stream = self._unwrap(item, stored, buffer)
                if target is None:
                    return io.BytesIO(stream.read(-1))
                seekable = stream if isinstance(stream, io.BytesIO) else io.BytesIO(stream.read(-1))
                check_storages(seekable)
                seekable.seek(0)
                tensor = cast(torch.Tensor, torch.load(seekable, map_location="cpu", weights_only=True))
            cast(torch.Tensor, target).copy_(narrow_tensor_by_index(tensor, item.storage_offsets, item.lengths))
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

    # --- on their way --------------------------------------------------------------------------------------

    def _read(self, transfers: Sequence[ItemTransfer], planner: LoadPlanner, threads: int | None = None) -> None:
        """Fetch items, on so many threads or as many as fill the link, and hand them to the planner."""
        for transfer in transfers:
            if not transfer.ranges:
                transfer.finish()
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
        with fetcher.fetch(requests, threads=threads, most=most) as arrivals:
            for finished in arrivals:
                if isinstance(finished, ItemTransfer):
                    self._commit(finished, planner)

    def _commit(self, transfer: ItemTransfer, planner: LoadPlanner) -> None:
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


def find_late(transfers: Sequence[ItemTransfer]) -> list[int]:
    """Numbers of the items that must not be received where they belong, because an earlier entry's are: they are copied
    there at the end, in this order.

    Entries that share memory (tied parameters) are received at the same time, and what was saved for them is usually
    the same. Where it is not, or nobody knows, the last one in the plan wins, as with torch's readers.
    """
    spans: dict[str, tuple[int, int]] = {}
    numbers: dict[str, list[int]] = {}
    filled: list[tuple[int, int, str]] = []
    for number, transfer in enumerate(transfers):
        target, name = transfer.target, transfer.item.dest_index.fqn
        if target is None or not is_plain(target) or target.numel() == 0:
            continue  # no memory of its own
        start, stop = target.data_ptr(), target.nbytes
        if not target.is_contiguous():
            last = sum((size - 1) * stride for size, stride in zip(target.shape, target.stride(), strict=True))
            stop = (last + 1) * target.element_size()
        filled.append((start, start + stop, name))
        low, high = spans.get(name, (start, start + stop))
        spans[name] = min(low, start), max(high, start + stop)
        numbers.setdefault(name, []).append(number)
    # Names of which spans overlap, directly or through others. Not what lies between the spans of one name: its shards
    # may be anywhere in memory, with other tensors between them.
    groups: dict[str, set[str]] = {}
    end, owner = -1, ""
    for start, stop, name in sorted(filled):
        mine = groups.setdefault(name, {name})
        if start < end and groups[owner] is not mine:
            groups[owner] |= mine
            groups.update(dict.fromkeys(mine, groups[owner]))
        if stop > end:
            end, owner = stop, name
    late: list[int] = []
    for together in {id(group): group for group in groups.values() if len(group) > 1}.values():
        names = [name for name in spans if name in together]  # in plan order
        contents = {tuple([_content_of(transfers[number]) for number in numbers[name]]) for name in names}
        known = all(transfers[number].stored.crc is not None for number in numbers[names[0]])
        if len({spans[name] for name in names}) > 1 or len(contents) > 1 or not known:
            late += [number for name in names[1:] for number in numbers[name]]
    return late


def _content_of(transfer: ItemTransfer) -> object:
    """A value that tells the saved contents of two items apart."""
    item = transfer.item
    return item.dest_offsets, item.lengths, item.storage_offsets, transfer.stored.sizes, transfer.stored.crc


# --- heads of stored items ----------------------------------------------------------------------


class ItemKind(NamedTuple):
    """Properties of items whose heads should be the same."""

    dtype: torch.dtype
    """Dtype of the saved tensor."""
    shape: tuple[int, ...]
    """Shape of the saved chunk."""
    length: int
    """Length of the item in bytes."""


def _kind_of(stored: StoredChunk) -> ItemKind | None:
    """The kind of an archive of torch.save; None if the item is none, or if the shape of its tensor is not known."""
    if stored.tensor is None or stored.info.transform_descriptors:
        return None
    return ItemKind(*stored.tensor, stored.nbytes)


@functools.lru_cache(maxsize=4096)
def expect_head(kind: ItemKind) -> tuple[bytes, ArchiveHead | None]:
    """What this torch writes before the bytes of items of ``kind``, and what that says; nothing if they are of another
    length than this torch would write them.

    What torch.save writes before a storage is the same for all tensors of one dtype and shape, up to the version of
    torch. Where an item is as long as this torch would write it, the place of its bytes is expected; its own head is
    fetched with them, and must say the same.
    """
    header = b""
    with contextlib.suppress(FramingError, HeadError, RuntimeError, MemoryError):  # RuntimeError: too much for torch
        frame = compute_frame(kind.dtype, torch.Size(kind.shape))
        if frame.length == kind.length:
            header = frame.header
            return header, parse_head(header)
    return header, None


def find_head(kind: ItemKind, data: bytes | memoryview) -> ArchiveHead | None:
    """The head of a row-major item of ``kind`` that begins with ``data``: 0.5 us if it is expected, else 35 us. None if
    there is no head, or it is of another kind."""
    header, head = expect_head(kind)
    if head is not None and bytes(data[: head.length]) == header:
        return head
    with contextlib.suppress(HeadError):
        head = parse_head(bytes(data[:MAX_HEAD]))
        right = (head.dtype, head.shape) == (kind.dtype, tuple(kind.shape))
        return head if right and head.raw_offset + head.nbytes <= kind.length else None
    return None
