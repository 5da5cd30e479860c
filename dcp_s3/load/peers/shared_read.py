"""The read of one rank's plan when other ranks need a part of it too."""

from __future__ import annotations

import contextlib
import logging
import queue
from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner

from dcp_s3 import errors
from dcp_s3.limit import Deadline
from dcp_s3.load.aliases import find_exclusive, read_in_turn
from dcp_s3.load.engine import Source
from dcp_s3.load.item_transfer import ItemTransfer, StreamTransfer
from dcp_s3.load.peers.assignment import Assignment, StoredChunk, find_stored
from dcp_s3.load.peers.exchange import Exchange
from dcp_s3.load.peers.shared_pieces import OwnedPiece, ReceivedPiece, SharedItems
from dcp_s3.load.read import LoadExecutor, find_changing
from dcp_s3.process import collector_paused
from dcp_s3.tensor_memory import counted_as_change, synchronize_accelerator

logger = logging.getLogger(__name__)


class SharedRead:
    """Reads the bytes that only this rank needs, and takes part in the exchange of the rest.

    Use it as a context manager around all that may fail: when it is entered the other ranks begin to count on this
    one, and an error that leaves it is told to them. All ranks of the group have an assignment.
    """

    def __init__(
        self, group: dist.ProcessGroup, assignment: Assignment, url: str, deadline: Deadline | None = None
    ) -> None:
        self._assignment, self._rank, self._url = assignment, dist.get_rank(group), url
        self._finished: queue.SimpleQueue[ItemTransfer | None] = queue.SimpleQueue()
        self._has_ended = False
        self._source: Source | None = None
        self._exchange = Exchange(
            group,
            assignment,
            url=url,
            on_failure=self._cancel,
            on_end=lambda: self._finished.put(None),
            deadline=deadline,
        )

    def __enter__(self) -> SharedRead:
        try:
            self._exchange.start()
        except BaseException as error:
            self._exchange.fail(error)  # an interrupt: it may have started
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._exchange.fail(error)
        while not self._has_ended:
            with contextlib.suppress(BaseException):  # a second interrupt
                self._wait()
        cause = self._exchange.error
        if cause is not None and cause is not error and (error is None or isinstance(error, Exception)):
            raise cause  # ``error`` is what came of it

    def _wait(self) -> None:
        """Wait until the exchange has ended, whatever a signal raises here: the other ranks count on this one."""
        while not self._has_ended:
            try:
                self._has_ended = self._finished.get() is None
            except BaseException as raised:  # noqa: BLE001
                self._exchange.fail(raised)

    def _cancel(self) -> None:
        if self._source is not None:
            self._source.cancel()

    def run(self, executor: LoadExecutor, metadata: Metadata, plan: LoadPlan, planner: LoadPlanner) -> None:
        """Read the plan, like `LoadExecutor.run`.

        Raises:
            PeerReadError: another rank failed.
        """
        if tuple(plan.items) != self._assignment.items:
            logger.info("this rank reads %s by itself: its planner changed the plan that was shared out", self._url)
            self._exchange.decline()
            executor.run(plan, planner)
            return
        self._source = executor.source
        if self._exchange.error is not None:  # it came before there was something to cancel
            executor.source.cancel()
        with collector_paused():
            shared = self._assignment.shared_items()
            transfers = executor.prepare(plan, planner, shared)
            now, *later = read_in_turn(transfers)
            direct, *batches = executor.in_batches([transfers[n] for n in now if n not in shared])
            with counted_as_change(find_changing(transfers, planner)):
                threads = self._provide(executor, metadata, transfers, direct)
                executor.read(direct, planner, threads=threads, on_error=self._exchange.fail)
                arrived = self._commit_finished(executor, planner, transfers)
                for batch in batches:
                    executor.read(batch, planner)
                missing = self._find_missing(transfers, now, shared - arrived) if self._exchange.is_incomplete else []
                for numbers in (missing, *later):  # later: of entries in the same memory the last one wins
                    if numbers:
                        executor.run(LoadPlan([plan.items[number] for number in numbers]), planner)
        synchronize_accelerator(transfer.target for transfer in transfers)

    def _provide(
        self,
        executor: LoadExecutor,
        metadata: Metadata,
        transfers: Sequence[ItemTransfer],
        direct: Sequence[ItemTransfer],
    ) -> int:
        """Give the exchange this rank's pieces; returns the number of threads left for direct reads."""
        source, shared = executor.source, self._assignment.shared_items()
        alone = {number for number, is_alone in enumerate(find_exclusive(transfers)) if is_alone}
        alone |= {number for number in shared if isinstance(transfers[number], StreamTransfer)}  # a buffer of its own
        for number in shared:
            transfers[number].expect_sections(True)
        items = SharedItems(
            {number: transfers[number] for number in shared},
            {number: self._find_stored(metadata, transfers[number]) for number in shared},
            alone,
            self._finished.put,
        )
        owned, received = {}, {}
        for piece in self._assignment.pieces:
            if piece.owner == self._rank:
                owned[piece.number] = OwnedPiece(piece, items, executor.engine)
            else:
                received[piece.number] = ReceivedPiece(piece, items, self._url)
        fetching = _part_of(
            source.connections,
            sum(piece.nbytes for piece in owned.values()),
            sum(transfer.length for transfer in direct),
        )
        self._exchange.provide(owned, received, threads=fetching, memory=source.buffers)
        return max(1, source.connections - fetching)

    def _find_stored(self, metadata: Metadata, transfer: ItemTransfer) -> StoredChunk:
        item = transfer.item
        stored = find_stored(metadata, item.storage_index, item.type)
        if stored is None:
            raise errors.CorruptCheckpointError(
                f"the metadata of {self._url} does not say how {item.storage_index.fqn!r} is stored", url=self._url
            )
        return stored

    def _commit_finished(
        self, executor: LoadExecutor, planner: LoadPlanner, transfers: Sequence[ItemTransfer]
    ) -> set[int]:
        """Hand items to the planner as they arrive, until the exchange has ended; returns their numbers.

        Raises:
            PeerReadError: another rank failed.
        """
        numbers = {id(transfer): number for number, transfer in enumerate(transfers)}
        arrived = set()
        while (transfer := self._finished.get()) is not None:
            if self._exchange.error is None:
                executor.commit(transfer, planner)
                arrived.add(numbers[id(transfer)])
        self._has_ended = True
        if self._exchange.error is not None:
            raise self._exchange.error
        return arrived

    def _find_missing(self, transfers: Sequence[ItemTransfer], numbers: Sequence[int], absent: set[int]) -> list[int]:
        """The items that a rank declined to send, and those that are held back because they come after one of these."""
        return [
            number for number in numbers
            if number in absent or (transfers[number].target is None and transfers[number].loaded is not None)
        ]  # fmt: skip


def _part_of(threads: int, own: int, other: int) -> int:
    """How many of ``threads`` serve the ``own`` bytes, in proportion to ``own + other``."""
    if not own:
        return 0
    return max(1, min(threads - 1 if other else threads, round(threads * own / (own + other))))
