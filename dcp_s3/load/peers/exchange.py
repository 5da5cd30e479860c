"""Pieces on their way between the ranks of a load: fetched by their owners, sent to the others.

The ranks greet each other first, with a time limit: a rank that failed before does not come. From then on every rank
goes through the pieces in the order of their numbers to the end, whatever fails: instead of what it has not sent yet it
sends the cause, and it drops what it still receives. So nobody waits for it.

One thread sends the pieces that the rank owns, one receives the others, each within bounded memory of its own. There is
no deadlock: consider the smallest piece that is not done. Its owner has sent all that it owns before it, so the memory
to fetch it is free, and it is sent next; its receivers have received all before it, so they receive it next.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import queue
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent import futures
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.planner import ReadItem

from dcp_s3 import errors
from dcp_s3.limit import Cancelled, Deadline
from dcp_s3.load.fetch import Fetcher
from dcp_s3.load.items import ItemTransfer
from dcp_s3.load.peers.messages import FAILED, FOLLOWS, HEADER, HEADER_BYTES, LOOKS_EVERY, PAYLOAD, Header, Messages
from dcp_s3.load.peers.pieces import Assignment, OwnedPiece, ReceivedPiece, SharedItems
from dcp_s3.workers import Workers

logger = logging.getLogger(__name__)

_HEADERS_AHEAD = 32
_PAYLOADS_AHEAD = 4
_POSTED = 64


class _Prepared(NamedTuple):
    """What to send and to receive, by the numbers of the pieces; on how many threads, and in how much memory."""

    outgoing: Mapping[int, OwnedPiece]
    incoming: Mapping[int, ReceivedPiece]
    threads: int
    memory: int


_NOTHING = _Prepared({}, {}, 0, 0)


class _PendingSend(NamedTuple):
    piece: OwnedPiece | None
    nbytes: int
    works: list[tuple[int, Any]]
    kept: list[torch.Tensor]


class _PendingReceive(NamedTuple):
    piece: ReceivedPiece | None
    nbytes: int
    crc: int
    buffer: torch.Tensor
    owner: int
    work: Any


class Exchange(Messages):
    """One rank's part of an exchange: `join`, `provide`, then `arrivals`.

    Use it as a context manager around all that may fail: when it is entered the other ranks begin to count on this
    one, and an error that leaves it is told to them. The group has gloo for CPU tensors, and the ranks of the
    assignment. All of them have an assignment.
    """

    def __init__(
        self, group: dist.ProcessGroup, assignment: Assignment, *, url: str, deadline: Deadline | None = None
    ) -> None:
        pieces, me = assignment.pieces, dist.get_rank(group)
        self._assignment = assignment
        self._owned = [(piece.number, [peer.rank for peer in piece.peers]) for piece in pieces if piece.owner == me]
        self._received = [(piece.number, piece.owner) for piece in pieces if piece.owner != me]
        peers = {rank for _, ranks in self._owned for rank in ranks} | {owner for _, owner in self._received}
        super().__init__(group, sorted(peers), url, assignment.tag, deadline)
        self._fetcher: Fetcher | None = None
        self._has_ended = False
        self._provided: queue.SimpleQueue[_Prepared | None] = queue.SimpleQueue()
        self._finished: queue.SimpleQueue[ItemTransfer | None] = queue.SimpleQueue()
        """Items of which all has arrived; None when this rank is done with all pieces."""

    def __enter__(self) -> Exchange:
        try:
            threading.Thread(target=self._run, name="dcp_s3-send").start()
        except BaseException as error:
            self.fail(error)  # an interrupt: it may have started
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.fail(error)
        while not self._has_ended:  # whatever a signal raises here: the other ranks count on this one
            with contextlib.suppress(BaseException):  # a second interrupt
                try:
                    self._has_ended = self._finished.get() is None
                except BaseException as raised:  # noqa: BLE001
                    self.fail(raised)
        cause = None if self.failure is None else self.failure.error
        if cause is not None and cause is not error and (error is None or isinstance(error, Exception)):
            raise cause  # ``error`` is what came of it

    def join(self, items: Sequence[ReadItem], fetcher: Fetcher) -> set[int]:
        """Take part with the items of this rank's plan. Returns the numbers of those that arrive in pieces.

        Raises:
            SaveProtocolError: the planner has changed the plan since it was shared out.
        """
        self._fetcher = fetcher
        if self.failure is not None:  # it came before there was something to cancel
            fetcher.cancel()
        if tuple(items) != self._assignment.items:
            raise errors.SaveProtocolError(
                f"the planner's finish_plan changed the plan for {self.url} after it was decided which rank reads what "
                "for others. Remedy: S3StorageReader(load_sharing=False)"
            )
        return self._assignment.shared_items()

    def provide(self, transfers: Mapping[int, ItemTransfer], alone: Collection[int], direct: int) -> int:
        """Begin to send and receive pieces.

        Args:
            transfers: the items that `join` returned, by their numbers.
            alone: numbers of those that share their memory with no other.
            direct: bytes that this rank reads besides.

        Returns:
            Number of threads left for these.
        """
        fetcher, assigned = self._fetcher, self._assignment
        assert fetcher is not None  # noqa: S101 - `join` comes first
        items = SharedItems(transfers, alone, self._finished.put)
        owned = {p.number: OwnedPiece(p, items, fetcher) for p in assigned.pieces if p.owner == self.rank}
        received = {p.number: ReceivedPiece(p, items, self.url) for p in assigned.pieces if p.owner != self.rank}
        width, own = fetcher.store.read_width(), sum(piece.nbytes for piece in owned.values())
        fetching = max(1, min(width - 1 if direct else width, round(width * own / (own + direct)))) if own else 0
        self._provided.put(_Prepared(owned, received, fetching, fetcher.buffers))
        return max(1, width - fetching)

    def arrivals(self) -> Iterator[ItemTransfer]:
        """Yield the items as they arrive, until the exchange has ended.

        Raises:
            PeerReadError: another rank failed.
            Exception: this rank failed.
        """
        while (transfer := self._finished.get()) is not None:
            if self.failure is None:
                yield transfer
        self._has_ended = True
        if self.failure is not None:
            raise self.failure.error

    # --- the exchange -----------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with self._reporting():
                self.greet()
            if self.is_on:
                prepared = self._provided.get() or _NOTHING
                receiver = threading.Thread(target=self._receive_all, args=(prepared,), name="dcp_s3-receive")
                try:
                    receiver.start()
                except RuntimeError as error:  # no thread is left
                    self.fail(error)
                    self._send_all(_NOTHING)
                    self._receive_all(_NOTHING)
                else:
                    self._send_all(prepared)
                    receiver.join()
            self.end()
        finally:
            self._finished.put(None)

    @contextlib.contextmanager
    def _reporting(self) -> Iterator[None]:
        """Fail with an error of the block, which goes no further: the schedule goes on, and the caller raises it."""
        try:
            yield
        except BaseException as error:  # noqa: BLE001
            self.fail(error)

    def _give_up(self) -> None:
        self._provided.put(None)
        if self._fetcher is not None:
            self._fetcher.cancel()

    # --- sending ----------------------------------------------------------------------------------------

    def _send_all(self, prepared: _Prepared) -> None:
        posted: collections.deque[_PendingSend] = collections.deque()
        fetches: list[futures.Future[Any]] = []
        pieces: list[OwnedPiece] = []
        held, limit = 0, prepared.memory // 2
        with self._reporting(), contextlib.ExitStack() as stack:
            if prepared.outgoing:
                with self._reporting():
                    pool = Workers(min(prepared.threads, len(self._owned)), "dcp_s3-fetch")
                    stack.callback(pool.close)
                    pieces = [prepared.outgoing[number] for number, _ in self._owned]
            for index, (_, peers) in enumerate(self._owned):
                while self.failure is None and len(fetches) < len(pieces):
                    size = pieces[len(fetches)].nbytes
                    if held == 0 or held + size <= limit:
                        fetches.append(pool.submit(pieces[len(fetches)].fetch))
                        held += size
                    elif len(fetches) <= index:
                        held -= self._retire(posted.popleft())  # everything held is posted, so this is not empty
                    else:
                        break
                fetched = index < len(fetches) and self._wait_for(fetches[index])
                posted.append(self._send_piece(pieces[index] if fetched else None, peers))
                while len(posted) > _POSTED or 2 * sum(sent.nbytes for sent in posted) > limit > 0:
                    held -= self._retire(posted.popleft())
            while posted:
                self._retire(posted.popleft())

    def _wait_for(self, fetch: futures.Future[Any]) -> bool:
        """Whether a piece has been fetched; False when anything has failed."""
        while self.failure is None and not futures.wait([fetch], 0.1).done:
            if self.deadline is not None and self.deadline.left <= 0:
                self.fail(self.deadline.error(f"the load of {self.url}"))
        if self.failure is not None:
            return False
        error = fetch.exception()
        while isinstance(error, Cancelled) and self.failure is None:  # the cause is about to be reported
            time.sleep(LOOKS_EVERY)
        if error is not None:
            self.fail(error)
        return self.failure is None

    def _send_piece(self, piece: OwnedPiece | None, peers: Sequence[int]) -> _PendingSend:
        messages: list[tuple[int, torch.Tensor, int]] | None = None
        if piece is not None:
            with self._reporting():
                messages = [(peer, *piece.message(peer)) for peer in peers]
        if piece is None or messages is None:
            refusal = self.refusal()
            return _PendingSend(None, 0, [(peer, self.send(refusal, peer, HEADER)) for peer in peers], [refusal])
        works: list[tuple[int, Any]] = []
        kept: list[torch.Tensor] = []
        for peer, message, crc in messages:
            header = Header(FOLLOWS, self.rank, message.numel(), crc).pack()
            kept += [header, message]
            works.append((peer, self.send(header, peer, HEADER)))
            if message.numel():
                works.append((peer, self.send(message, peer, PAYLOAD)))
        return _PendingSend(piece, piece.nbytes, works, kept)

    def _retire(self, sent: _PendingSend) -> int:
        """Wait until a piece has been sent; returns its bytes."""
        done = [self.wait(work, peer, sent.kept) for peer, work in sent.works]
        if sent.piece is not None and all(done) and self.failure is None:
            with self._reporting():
                sent.piece.sent()
        return sent.nbytes

    # --- receiving --------------------------------------------------------------------------------------

    def _receive_all(self, prepared: _Prepared) -> None:
        with self._reporting():
            self._receive_pieces(prepared)

    def _receive_pieces(self, prepared: _Prepared) -> None:
        upcoming = iter(self._received)
        headers: collections.deque[tuple[int, int, torch.Tensor, Any]] = collections.deque()
        pending: collections.deque[_PendingReceive] = collections.deque()
        held, limit = 0, prepared.memory // 8
        while True:
            while len(headers) < _HEADERS_AHEAD and (piece := next(upcoming, None)) is not None:
                number, owner = piece
                header = torch.empty(HEADER_BYTES, dtype=torch.uint8, device="cpu")
                headers.append((number, owner, header, self.receive(header, owner, HEADER)))
            if not headers:
                break
            number, owner, header, work = headers.popleft()
            if not self.wait(work, owner, header):
                continue
            told = Header.unpack(header)
            if told.outcome == FAILED:
                self.fail_as(told.rank, told.text)
            elif told.nbytes:
                while pending and (len(pending) >= _PAYLOADS_AHEAD or held + told.nbytes > limit):
                    held -= self._finish(pending.popleft())
                incoming = prepared.incoming.get(number)
                buffer = self._buffer_for(incoming, told.nbytes, owner)
                held += told.nbytes
                work = self.receive(buffer, owner, PAYLOAD)
                pending.append(_PendingReceive(incoming, told.nbytes, told.crc, buffer, owner, work))
        while pending:
            self._finish(pending.popleft())

    def _buffer_for(self, piece: ReceivedPiece | None, nbytes: int, owner: int) -> torch.Tensor:
        if piece is not None and self.failure is None:
            with self._reporting():
                if piece.nbytes == nbytes:
                    return piece.buffer()
                text = f"rank {owner} sends {nbytes} bytes where {piece.nbytes} of {self.url} are needed: report it"
                raise errors.PeerReadError(text, url=self.url, rank=owner)
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")  # dropped

    def _finish(self, received: _PendingReceive) -> int:
        """Wait for a piece and put it in place; returns its bytes."""
        if (
            self.wait(received.work, received.owner, received.buffer)
            and received.piece is not None
            and self.failure is None
        ):
            with self._reporting():
                received.piece.received(received.crc)
        return received.nbytes
