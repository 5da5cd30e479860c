"""The read of one rank's plan: straight into the destination tensors, each item handed to the planner.

Items that are no tensors go to the planner in plan order, as with torch's readers. They arrive in any order, and those
that come early are held back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner

from dcp_s3 import errors
from dcp_s3.format.safe_items import check_item
from dcp_s3.load.fetch import Fetcher
from dcp_s3.load.items import ItemTransfer
from dcp_s3.load.peers.exchange import Exchange
from dcp_s3.load.plan import SMALL_HALF, plan_requests
from dcp_s3.load.prepare import TransferFactory, find_exclusive
from dcp_s3.load.weights import get_etags
from dcp_s3.memory import counted_as_change, synchronize_accelerator
from dcp_s3.process import collector_paused, world_size
from dcp_s3.s3.parts import GETS_PER_SECOND, plan_part_size
from dcp_s3.torch_private import ReaderTransforms


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
        fetcher.etags = get_etags(metadata)
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
            direct = [transfer for number, transfer in enumerate(transfers) if number not in shared]
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
                for target, received in self._factory.late:
                    target.copy_(received)
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
