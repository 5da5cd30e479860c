"""The read of one rank's plan: straight into the destination tensors, each item handed to the planner.

Items that are no tensors go to the planner in plan order, as with torch's readers. They arrive in any order, and those
that come early are held back.

Entries of a state that share memory (tied parameters) are received at the same time, and what was saved for them is
usually the same. Where it is not (a checkpoint of untied parameters is loaded into tied ones), they are read one after
the other, and the last one in the plan wins, as with torch's readers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner

from dcp_s3 import errors
from dcp_s3.format.safe_items import check_item
from dcp_s3.load.fetch import Fetcher
from dcp_s3.load.items import ItemTransfer
from dcp_s3.load.peers.exchange import Exchange
from dcp_s3.load.plan import SMALL_HALF, plan_requests
from dcp_s3.load.prepare import TransferFactory
from dcp_s3.process import collector_paused
from dcp_s3.ranks import world_size
from dcp_s3.s3.parts import GETS_PER_SECOND, plan_part_size
from dcp_s3.tensor_memory import counted_as_change, is_plain, synchronize_accelerator
from dcp_s3.torch_private import ReaderTransforms

Key = TypeVar("Key", int, str)


class LoadExecutor:
    """Carries out one rank's load plan."""

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
        self._url, self._weights_only = str(fetcher.url), weights_only
        self._factory = TransferFactory(self._url, metadata, transforms, allow_dtype_cast=allow_dtype_cast)
        self._waiting: deque[ItemTransfer] = deque()
        """Items that are no tensors and that the planner has not got, in plan order."""

    def run(self, plan: LoadPlan, planner: LoadPlanner, exchange: Exchange | None = None) -> None:
        """Fetch every item of ``plan``, or get it from other ranks, and hand it to ``planner``.

        The planner is called from this thread only.

        Raises:
            TensorMismatchError: before anything is fetched or changed; only without ``allow_dtype_cast``.
            UnsafeItemError: before the planner sees the item.
            CorruptCheckpointError: stored bytes are missing, cut short or not what was written.
            DeadlineExceededError: the store's deadline has passed.
            PeerReadError: another rank failed.
            StorageError: S3 failed despite retries.
        """
        with collector_paused():
            shared = set() if exchange is None else exchange.join(plan.items, self.fetcher)
            transfers = self._factory.prepare_all(plan.items, planner, shared)
            devices = {each.target.device: each.target for each in transfers if each.target is not None}
            synchronize_accelerator(devices.values())
            self.fetcher.pin = any(device.type == "cuda" for device in devices)
            self._waiting = deque(transfer for transfer in transfers if transfer.target is None)
            first, *later = read_in_turn(transfers)
            direct = [transfers[number] for number in first if number not in shared]
            with counted_as_change(find_changing(transfers, planner)):
                threads = None
                if exchange is not None:
                    exclusive = find_exclusive(transfers)
                    mine = {number: transfers[number] for number in shared}
                    alone = {number for number in shared if exclusive[number]}
                    threads = exchange.provide(mine, alone, sum([each.length for each in direct]))
                self._read(direct, planner, threads)
                if exchange is not None:
                    for transfer in exchange.arrivals():
                        self._commit(transfer, planner)
                for numbers in later:
                    self.run(LoadPlan([plan.items[number] for number in numbers]), planner)
        synchronize_accelerator(devices.values())

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
            fqn = due.item.storage_index.fqn
            if self._weights_only:
                check_item(loaded, fqn=fqn, url=self._url, verified=due.checked)
            try:
                planner.load_bytes(due.item, loaded)
            except Exception as error:
                if due.checked:
                    raise  # the bytes are what was saved: only the caller can judge why they cannot be unpickled
                raise errors.CorruptCheckpointError(
                    f"{fqn!r} in {self._url} cannot be unpickled: {type(error).__name__}: {error}. It was saved "
                    "without a checksum: either it is damaged, or a class is missing here",
                    url=self._url,
                ) from error


def find_changing(transfers: Sequence[ItemTransfer], planner: LoadPlanner) -> list[torch.Tensor]:
    """The tensors that a load changes: targets, and the state's DTensors and other wrappers around them.

    A wrapper has a version counter of its own, the parameter's; what `resolve_tensor` returns of it often has one that
    nobody else knows. Torch's planners have the wrappers in ``state_dict``; of others only the targets are known.
    """
    found = [transfer.target for transfer in transfers if transfer.target is not None]
    state = getattr(planner, "state_dict", None)
    if isinstance(state, Mapping):
        names = dict.fromkeys(transfer.item.dest_index.fqn for transfer in transfers)
        found += [entry for entry in map(state.get, names) if isinstance(entry, torch.Tensor)]
    return found


# --- entries that share memory ----------------------------------------------------------------------


def read_in_turn(transfers: Sequence[ItemTransfer]) -> list[list[int]]:
    """Group the items' numbers in rounds, to be read one round after the other.

    There is one round, unless entries with different or unknown contents share memory.
    """
    if all(find_exclusive(transfers)):
        return [list(range(len(transfers)))]
    by_name: dict[str, list[int]] = {}
    spans: dict[tuple[int, str], tuple[int, int]] = {}  # parts of one tensor may interleave: its gaps are its own
    for number, transfer in enumerate(transfers):
        name, target, span = transfer.item.dest_index.fqn, transfer.target, _span(transfer.target)
        by_name.setdefault(name, []).append(number)
        if target is not None and span is not None:
            where = target.untyped_storage().data_ptr(), name
            low, high = spans.get(where, span)
            spans[where] = min(low, span[0]), max(high, span[1])
    order = {name: place for place, name in enumerate(by_name)}
    turns = dict.fromkeys(by_name, 0)
    for together in _overlapping((*span, name) for (_, name), span in spans.items()):
        names = sorted(set(together), key=order.__getitem__)
        contents = {tuple([_content_of(transfers[number]) for number in by_name[name]]) for name in names}
        known = all(transfers[number].stored.crc is not None for number in by_name[names[0]])
        if len(contents) > 1 or not known:
            turns.update({name: turn for turn, name in enumerate(names)})
    rounds: list[list[int]] = [[] for _ in range(1 + max(turns.values(), default=0))]
    for name, numbers in by_name.items():
        rounds[turns[name]] += numbers
    return [sorted(numbers) for numbers in rounds]


def find_exclusive(transfers: Sequence[ItemTransfer]) -> list[bool]:
    """Tell for each item whether it shares its memory with no other."""
    spans = ((*span, n) for n, each in enumerate(transfers) if (span := _span(each.target)) is not None)
    shared = {number for together in _overlapping(spans) for number in together}
    return [number not in shared for number in range(len(transfers))]


def _overlapping(spans: Iterable[tuple[int, int, Key]]) -> list[list[Key]]:
    """Keys of spans (first byte, end, key) that overlap, directly or through others; only groups of several."""
    found: list[list[Key]] = []
    end = -1
    for start, stop, key in sorted(spans):  # addresses of devices differ, too
        if start >= end:
            found.append([])
        found[-1].append(key)
        end = max(end, stop)
    return [keys for keys in found if len(keys) > 1]


def _content_of(transfer: ItemTransfer) -> object:
    """A value that tells the saved contents of two items apart."""
    item = transfer.item
    return item.dest_offsets, item.lengths, item.storage_offsets, transfer.stored.sizes, transfer.stored.crc


def _span(target: torch.Tensor | None) -> tuple[int, int] | None:
    """Addresses of a tensor's first byte and of the byte after its last; None if it has no memory of its own."""
    if target is None or not is_plain(target) or target.numel() == 0:
        return None
    start = target.data_ptr()
    if target.is_contiguous():
        return start, start + target.nbytes
    last = sum((size - 1) * stride for size, stride in zip(target.shape, target.stride(), strict=True))
    return start, start + (last + 1) * target.element_size()
