"""The read of one rank's plan: straight into the destination tensors, each item handed to the planner.

Items that are no tensors go to the planner in plan order, as with torch's readers. They arrive in any order, and those
that come early are held back. To bound that memory, a load of many such items reads them in batches.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner

from dcp_s3 import errors
from dcp_s3.format.safe_items import check_item
from dcp_s3.load.aliases import read_in_turn
from dcp_s3.load.archive_heads import one_of_each_kind
from dcp_s3.load.engine import Engine, Source
from dcp_s3.load.item_transfer import ItemTransfer
from dcp_s3.load.plan import READ_GAP, READ_WASTE, SMALL_HALF, ReadRequest, plan_requests
from dcp_s3.load.prepare import TransferFactory, warn_of_narrowing
from dcp_s3.process import collector_paused
from dcp_s3.ranks import world_size
from dcp_s3.s3.parts import GETS_PER_SECOND, plan_part_size
from dcp_s3.tensor_memory import counted_as_change, synchronize_accelerator
from dcp_s3.torch_private import ReaderTransforms


class Turns:
    """The queue of items that are no tensors, in plan order."""

    def __init__(self, transfers: Sequence[ItemTransfer]) -> None:
        self._waiting = collections.deque(transfer for transfer in transfers if transfer.target is None)

    def take(self) -> Iterator[ItemTransfer]:
        """Yield, once each, the items that have arrived with all before them."""
        while self._waiting and self._waiting[0].loaded is not None:
            yield self._waiting.popleft()


def in_batches(transfers: Sequence[ItemTransfer], max_held: int) -> list[list[ItemTransfer]]:
    """Split items into batches to be read one after the other, all tensors in the first.

    A batch holds at most ``max_held`` stored bytes of non-tensors, unless a single item has more.
    """
    batches: list[list[ItemTransfer]] = [[]]
    held = 0
    for transfer in transfers:
        if transfer.target is not None:
            batches[0].append(transfer)
            continue
        size = transfer.length
        if held and held + size > max_held:
            batches.append([])
            held = 0
        batches[-1].append(transfer)
        held += size
    return batches


class LoadExecutor:
    """Carries out one rank's load plan."""

    def __init__(
        self,
        source: Source,
        metadata: Metadata,
        transforms: ReaderTransforms,
        *,
        weights_only: bool = True,
        allow_dtype_cast: bool = True,
    ) -> None:
        self.source = source
        self.engine = Engine(source, "dcp_s3-download")
        self._url = source.url
        self._settings = source.settings
        self._weights_only = weights_only
        self._factory = TransferFactory(
            source.url,
            metadata,
            transforms,
            allow_dtype_cast=allow_dtype_cast,
            max_gap=READ_GAP,
        )
        self._turns = Turns([])

    def run(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        """Fetch every item of ``plan`` and hand it to ``planner``.

        The planner is called from this thread only.

        Raises:
            TensorMismatchError: before anything is fetched or changed; only without ``allow_dtype_cast``.
            UnsafeItemError: before the planner sees the item.
            CorruptCheckpointError: stored bytes are missing, cut short or not what was written.
            DeadlineExceededError: the source's deadline has passed.
            StorageError: S3 failed despite retries.
        """
        with collector_paused():
            transfers = self.prepare(plan, planner)
            with counted_as_change(find_changing(transfers, planner)):
                for numbers in read_in_turn(transfers):
                    for batch in self.in_batches([transfers[number] for number in numbers]):
                        self.read(batch, planner)
        synchronize_accelerator(transfer.target for transfer in transfers)

    def prepare(self, plan: LoadPlan, planner: LoadPlanner, whole: Collection[int] = ()) -> list[ItemTransfer]:
        """Prepare the transfer for each item. Changes nothing, and fetches at most heads of items.

        Args:
            plan: plan of this rank.
            planner: called from this thread only.
            whole: numbers of items to fetch whole, unless their raw bytes' place is recorded.
        """
        known = len(self._factory.narrowed)  # from an earlier round of the same load
        transfers = [
            self._factory.prepare(number, item, planner, whole=number in whole)
            for number, item in enumerate(plan.items)
        ]
        self._look(transfers)
        if len(self._factory.narrowed) > known:
            warn_of_narrowing(self._factory.narrowed, str(self._url))
        by_device = {transfer.target.device: transfer.target for transfer in transfers if transfer.target is not None}
        synchronize_accelerator(by_device.values())
        self.engine.pin = any(device.type == "cuda" for device in by_device)
        self._turns = Turns(transfers)
        return transfers

    def in_batches(self, transfers: Sequence[ItemTransfer]) -> list[list[ItemTransfer]]:
        """Split into batches to `read` one after the other, so that items held back take bounded memory."""
        return in_batches(transfers, self.source.buffers)

    def read(
        self,
        transfers: Sequence[ItemTransfer],
        planner: LoadPlanner,
        *,
        threads: int | None = None,
        on_error: Callable[[BaseException], None] = lambda _: None,
    ) -> None:
        """Fetch items and hand them to the planner.

        Args:
            transfers: transfers of the items.
            planner: called from this thread only.
            threads: number of requests at once; None: as many as fill the link.
            on_error: called with the error that will be raised, before it cancels what is in flight.
        """
        requests = self._plan(transfers)
        for transfer in transfers:
            if not transfer.ranges:
                transfer.finish()
                self.commit(transfer, planner)
        if not requests:
            return
        buffered = any(transfer.owned is None for transfer in transfers if transfer.ranges)
        total = sum([r.length for r in requests])
        most = max(len(requests), total // SMALL_HALF)
        if buffered:
            most = min(most, self.engine.max_buffers)
        with self.engine.fetch(requests, threads=threads, most=most, total=total, divide=True) as arrivals:
            try:
                for _, finished in arrivals:
                    for arrived in finished:
                        if isinstance(arrived, ItemTransfer):
                            self.commit(arrived, planner)
            except BaseException as error:
                on_error(error)
                raise

    def _look(self, transfers: list[ItemTransfer]) -> None:
        """Look at one item of each unknown kind of other writers, and prepare the items of these kinds again."""
        unknown = self._factory.unknown
        probes = one_of_each_kind(self._factory.heads, [item.probe for item in unknown])
        if not probes:
            return
        segments = [segment for probe in probes for segment in probe.segments()]
        requests = plan_requests(segments, max_request=self.engine.max_buffered, max_gap=0)
        with self.engine.fetch(requests, most=len(requests)) as arrivals:
            for _ in arrivals:
                pass
        for item in unknown:
            transfers[item.number] = item.prepare()

    def _plan(self, transfers: Sequence[ItemTransfer]) -> list[ReadRequest]:
        settings = self._settings
        segments = [segment for transfer in transfers for segment in transfer.segments()]
        total = sum([stop - start for start, stop, _ in segments])
        largest = plan_part_size(
            total, connections=self.source.connections, ranks=world_size(), most=settings.max_part_size,
            requests_per_second=GETS_PER_SECOND,
        )  # fmt: skip
        if settings.part_size != "auto":
            largest = min(largest, settings.part_size)
        buffered = min(largest, self.engine.max_buffered)
        if any(transfer.owned is None for transfer in transfers if transfer.ranges):
            largest = buffered
        return plan_requests(
            segments,
            max_request=largest,
            max_gap=READ_GAP,
            max_waste=READ_WASTE,
            max_shared=buffered,
        )

    def commit(self, transfer: ItemTransfer, planner: LoadPlanner) -> None:
        """Hand a tensor that is in place to the planner; for another item, all items whose turn it is."""
        if transfer.target is not None:
            planner.commit_tensor(transfer.item, transfer.target)
            return
        for due in self._turns.take():
            self._load_bytes(due, planner)

    def _load_bytes(self, transfer: ItemTransfer, planner: LoadPlanner) -> None:
        loaded, transfer.loaded = transfer.loaded, None
        if loaded is None:
            return
        fqn, url = transfer.item.storage_index.fqn, str(self._url)
        if self._weights_only:
            check_item(loaded, fqn=fqn, url=url, verified=transfer.checked)
        try:
            planner.load_bytes(transfer.item, loaded)
        except Exception as error:
            if transfer.checked:
                raise  # the bytes are what was saved: only the caller can judge why they cannot be unpickled
            raise errors.CorruptCheckpointError(
                f"{fqn!r} in {url} cannot be unpickled: {type(error).__name__}: {error}. It was saved without a "
                "checksum: either it is damaged, or a class is missing here",
                url=url,
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
