"""The read of one rank's plan when other ranks need a part of it too."""

from __future__ import annotations

import contextlib
import logging
import queue
from collections.abc import Callable, Sequence

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner

from dcp_s3 import errors
from dcp_s3.collector import collector_paused
from dcp_s3.load.aliases import find_exclusive, read_in_turn
from dcp_s3.load.item_transfer import ItemTransfer, StreamTransfer
from dcp_s3.load.peers.agree import LoadGroup
from dcp_s3.load.peers.assignment import Assignment, StoredChunk, find_stored
from dcp_s3.load.peers.exchange import Exchange
from dcp_s3.load.peers.interrupts import run_through
from dcp_s3.load.peers.shared_pieces import OwnedPiece, ReceivedPiece, SharedItems
from dcp_s3.load.read import LoadExecutor, find_changing
from dcp_s3.tensor_memory import counted_as_change, synchronize_accelerator

logger = logging.getLogger(__name__)


class SharedRead:
    """Reads the bytes that only this rank needs, and takes part in the exchange of the rest.

    Args:
        executor: reads from S3.
        metadata: metadata of the checkpoint.
        group: ranks of this load; all of them have an assignment.
    """

    def __init__(self, executor: LoadExecutor, metadata: Metadata, group: LoadGroup) -> None:
        self._executor = executor
        self._source = executor.source
        self._url = str(executor.source.url)
        self._metadata = metadata
        self._group = group
        self._finished: queue.SimpleQueue[ItemTransfer | None] = queue.SimpleQueue()

    def run(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        """Read the plan, like `LoadExecutor.run`. Collective.

        Raises:
            PeerReadError: another rank failed.
        """
        with collector_paused(), contextlib.ExitStack() as stack:
            transfers = self._run(plan, planner, stack)
        synchronize_accelerator(transfer.target for transfer in transfers)

    def _run(self, plan: LoadPlan, planner: LoadPlanner, stack: contextlib.ExitStack) -> list[ItemTransfer]:
        try:
            assignment = plan.storage_data
            if not isinstance(assignment, Assignment) or assignment.item_count != len(plan.items):
                raise errors.SaveProtocolError(f"the load plan of {self._url} is not the one that was shared out")
            shared = assignment.shared_items()
            transfers = self._executor.prepare(plan, planner, shared)
            owned, received = self._prepare(assignment, shared, transfers)
            now, *later = read_in_turn(transfers)
            direct, *batches = self._executor.in_batches([transfers[n] for n in now if n not in shared])
            exchange, threads = self._make_exchange(owned, received, direct)
            stack.enter_context(counted_as_change(find_changing(transfers, planner)))
        except BaseException:
            decline(self._group)
            raise
        failed, raised = run_through(lambda: self._begin(exchange))
        if not failed:
            self._read(exchange, raised, lambda: self._read_direct(exchange, direct, planner, threads))
            for batch in batches:
                self._executor.read(batch, planner)
            self._read_again(plan, later, planner)
            return transfers
        if raised is not None:
            raise raised
        logger.warning("every rank reads %s by itself: ranks %s could not prepare their load", self._url, failed)
        for number in shared:
            transfers[number].expect_sections(False)
        for numbers in (now, *later):
            for batch in self._executor.in_batches([transfers[number] for number in numbers]):
                self._executor.read(batch, planner)
        return transfers

    def _read_again(self, plan: LoadPlan, later: Sequence[Sequence[int]], planner: LoadPlanner) -> None:
        """Read entries whose contents differ from those before them in the same memory: the last one wins."""
        items = [plan.items[number] for numbers in later for number in numbers]
        if items:
            self._executor.run(LoadPlan(items), planner)

    def _begin(self, exchange: Exchange) -> list[int]:
        """Start the exchange, unless some ranks could not prepare theirs; returns these. Collective.

        Raises:
            Exception: this one could not.
        """
        failed: list[int] | None = None
        error: Exception | None = None
        try:
            exchange.prepare()
        except Exception as raised:  # noqa: BLE001 - raised when the others know
            error = raised
        try:
            failed = [rank for rank, (ok,) in enumerate(self._group.agree(error is None)) if not ok]
        finally:
            if failed == []:
                exchange.start()
            else:
                exchange.abandon()
        if error is not None:
            raise error
        return failed

    def _prepare(
        self, assignment: Assignment, shared: set[int], transfers: Sequence[ItemTransfer]
    ) -> tuple[list[OwnedPiece], list[ReceivedPiece]]:
        """Make the pieces that this rank sends, and the pieces that it receives."""
        alone = {number for number, is_alone in enumerate(find_exclusive(transfers)) if is_alone}
        alone |= {number for number in shared if isinstance(transfers[number], StreamTransfer)}  # a buffer of its own
        for number in shared:
            transfers[number].expect_sections(True)
        items = SharedItems(
            {number: transfers[number] for number in shared},
            {number: self._find_stored(transfers[number]) for number in shared},
            alone,
            self._finished.put,
        )
        owned, received = [], []
        for piece in assignment.pieces:
            if piece.owner == self._group.rank:
                owned.append(OwnedPiece(piece, items, self._executor.engine))
            elif (incoming := ReceivedPiece(piece, items, self._url)).nbytes:
                received.append(incoming)
        return owned, received

    def _find_stored(self, transfer: ItemTransfer) -> StoredChunk:
        item = transfer.item
        stored = find_stored(self._metadata, item.storage_index, item.type)
        if stored is None:
            raise errors.CorruptMetadataError(
                f"the metadata of {self._url} does not say how {item.storage_index.fqn!r} is stored", url=self._url
            )
        return stored

    def _make_exchange(
        self, owned: Sequence[OwnedPiece], received: Sequence[ReceivedPiece], direct: Sequence[ItemTransfer]
    ) -> tuple[Exchange, int]:
        """Make the exchange; returns it, and the number of threads left for direct reads."""
        mine = sum(transfer.length for transfer in direct)
        threads = self._source.connections
        fetching = _part_of(threads, sum(piece.nbytes for piece in owned), mine)
        exchange = Exchange(
            self._group.group, self._group.rank, owned, received,
            url=self._url, threads=fetching, memory=self._source.buffers,
            on_failure=self._source.cancel, on_end=lambda: self._finished.put(None), deadline=self._source.deadline,
        )  # fmt: skip
        return exchange, max(1, threads - fetching)

    def _read(self, exchange: Exchange, raised: BaseException | None, read: Callable[[], None]) -> None:
        """Complete a started exchange, and call ``read`` meanwhile, unless something was ``raised`` before."""
        try:
            if raised is not None:
                raise raised
            read()
        except BaseException as error:  # noqa: BLE001 - the peers must be told
            exchange.interrupt(error)
        finally:
            exchange.join()
        if exchange.error is not None:
            raise exchange.error

    def _read_direct(
        self,
        exchange: Exchange,
        direct: Sequence[ItemTransfer],
        planner: LoadPlanner,
        threads: int,
    ) -> None:
        self._executor.read(direct, planner, threads=threads, on_error=exchange.interrupt)
        self._commit_finished(exchange, planner)

    def _commit_finished(self, exchange: Exchange, planner: LoadPlanner) -> None:
        """Hand items to the planner as they arrive, until the exchange is complete."""
        while (transfer := self._finished.get()) is not None:
            if exchange.error is None:
                self._executor.commit(transfer, planner)


def decline(group: LoadGroup) -> None:
    """Tell the other ranks that this one takes no part in an exchange; then each reads alone. Collective."""
    run_through(lambda: group.agree(False))


def _part_of(threads: int, own: int, other: int) -> int:
    """How many of ``threads`` serve the ``own`` bytes, in proportion to ``own + other``."""
    if not own:
        return 0
    return max(1, min(threads - 1 if other else threads, round(threads * own / (own + other))))
