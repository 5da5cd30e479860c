"""The exchange between the ranks of a load: each piece is fetched by its owner and sent to the others by gloo.

The ranks greet each other first (`messages`). From then on every rank goes through the pieces in the order of their
numbers to the end, whatever fails: instead of what it has not sent yet it sends the cause, and it drops what it still
receives. So nobody waits for it.

One thread sends the pieces that the rank owns, one receives the others, each within bounded memory of its own. There is
no deadlock: consider the smallest piece that is not done. Its owner has sent all that it owns before it, so the memory
to fetch it is free, and it is sent next; its receivers have received all before it, so they receive it next.
"""

from __future__ import annotations

import collections
import contextlib
import queue
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent import futures
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.planner import ReadItem

from dcp_s3 import errors
from dcp_s3.limit import Cancelled
from dcp_s3.load.assign import Assignment
from dcp_s3.load.fetch import Fetcher
from dcp_s3.load.items import ItemTransfer
from dcp_s3.load.messages import FAILED, FOLLOWS, HEADER, HEADER_BYTES, LOOKS_EVERY, PAYLOAD, Header, Messages
from dcp_s3.load.pieces import OwnedPiece, ReceivedPiece, SharedItems
from dcp_s3.workers import Workers

_HEADERS_AHEAD = 32
_PAYLOADS_AHEAD = 4
_POSTED = 64

_Works = list[tuple[int, Any, torch.Tensor]]
"""Messages that are being sent: the peer, gloo's work, and the memory."""


class Exchange(Messages):
    """One rank's part of an exchange: `join`, `provide`, then `arrivals`.

    Use it as a context manager around all that may fail: when it is entered the other ranks begin to count on this
    one, and an error that leaves it is told to them. The group has gloo for CPU tensors, and the ranks of the
    assignment. All of them have an assignment.
    """

    def __init__(self, group: dist.ProcessGroup, assignment: Assignment, *, url: str) -> None:
        pieces, me = assignment.pieces, dist.get_rank(group)
        self._assignment = assignment
        self._owned = [(piece.number, [peer.rank for peer in piece.peers]) for piece in pieces if piece.owner == me]
        self._received = [(piece.number, piece.owner) for piece in pieces if piece.owner != me]
        peers = {rank for _, ranks in self._owned for rank in ranks} | {owner for _, owner in self._received}
        super().__init__(group, sorted(peers), url, assignment.tag)
        self._fetcher: Fetcher | None = None
        self._has_ended = False
        self._threads = self._memory = 0
        self._outgoing: list[OwnedPiece] = []
        self._incoming: dict[int, ReceivedPiece] = {}
        self._provided: queue.SimpleQueue[bool] = queue.SimpleQueue()
        """Something when `provide` has set what comes before, or when this rank has failed."""
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
        cause = None if self.failure is None else self.failure[0]
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

    def provide(self, transfers: Mapping[int, ItemTransfer], direct: int) -> int:
        """Begin to send and receive pieces.

        Args:
            transfers: the items that `join` returned, by their numbers.
            direct: bytes that this rank reads besides.

        Returns:
            Number of threads left for these.
        """
        fetcher, pieces = self._fetcher, self._assignment.pieces
        assert fetcher is not None  # noqa: S101 - `join` comes first
        items = SharedItems(transfers, self._finished.put)
        self._outgoing = [OwnedPiece(each, items, fetcher) for each in pieces if each.owner == self.rank]
        self._incoming = {p.number: ReceivedPiece(p, items, self.url) for p in pieces if p.owner != self.rank}
        width, own = fetcher.store.read_width(), sum(piece.nbytes for piece in self._outgoing)
        self._threads = max(1, min(width - 1 if direct else width, round(width * own / (own + direct)))) if own else 0
        self._memory = fetcher.buffers
        self._provided.put(True)
        return max(1, width - self._threads)

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
            raise self.failure[0]

    def _run(self) -> None:
        try:
            is_on = False
            with self._reporting():
                is_on = self.greet()
            if is_on:
                self._provided.get()
                receiver = threading.Thread(target=self._receive_all, name="dcp_s3-receive")
                try:
                    receiver.start()
                except RuntimeError as error:  # no thread is left
                    self.fail(error)
                    self._send_all()
                    self._receive_all()
                else:
                    self._send_all()
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
        self._provided.put(False)
        if self._fetcher is not None:
            self._fetcher.cancel()

    # --- sending ----------------------------------------------------------------------------------------

    def _send_all(self) -> None:
        """Fetch the pieces that this rank owns, ahead as far as memory allows, and send each to its peers in order."""
        posted: collections.deque[tuple[OwnedPiece | None, _Works]] = collections.deque()
        fetches: list[futures.Future[Any]] = []
        pieces: list[OwnedPiece] = []
        held = sending = 0
        limit = self._memory // 2

        def retire() -> None:
            """Wait until the first piece that is under way has been sent."""
            nonlocal held, sending
            piece, works = posted.popleft()
            done = [self.wait(work, peer, message) for peer, work, message in works]
            if piece is not None:
                held, sending = held - piece.nbytes, sending - piece.nbytes
                if all(done) and self.failure is None:
                    with self._reporting():
                        piece.sent()

        with self._reporting(), contextlib.ExitStack() as stack:
            if self._outgoing:
                with self._reporting():
                    pool = Workers(min(self._threads, len(self._owned)), "dcp_s3-fetch")
                    stack.callback(pool.close)
                    pieces = self._outgoing
            for index, (_, peers) in enumerate(self._owned):
                while self.failure is None and len(fetches) < len(pieces):
                    size = pieces[len(fetches)].nbytes
                    if held == 0 or held + size <= limit:
                        fetches.append(pool.submit(pieces[len(fetches)].fetch))
                        held += size
                    elif len(fetches) <= index:
                        retire()  # everything held is posted, so there is one
                    else:
                        break
                piece = pieces[index] if index < len(fetches) and self._is_fetched(fetches[index]) else None
                posted.append(self._post_piece(piece, peers))
                sending += piece.nbytes if piece is not None and posted[-1][0] is piece else 0
                while len(posted) > _POSTED or 2 * sending > limit > 0:
                    retire()
            while posted:
                retire()

    def _is_fetched(self, fetch: futures.Future[Any]) -> bool:
        """Whether a piece has been fetched; False when anything has failed."""
        while self.failure is None and not futures.wait([fetch], 0.1).done:
            pass
        if self.failure is not None:
            return False
        error = fetch.exception()
        while isinstance(error, Cancelled) and self.failure is None:  # the cause is about to be reported
            time.sleep(LOOKS_EVERY)
        if error is not None:
            self.fail(error)
        return self.failure is None

    def _post_piece(self, piece: OwnedPiece | None, peers: Sequence[int]) -> tuple[OwnedPiece | None, _Works]:
        """Begin to send a piece, or the cause of a failure instead."""
        messages: list[tuple[int, torch.Tensor, int]] = []
        try:
            if piece is not None:
                messages = [(peer, *piece.message(peer)) for peer in peers]
        except BaseException as error:  # noqa: BLE001
            self.fail(error)
            piece = None
        if piece is None:
            refusal = self.refusal()
            return None, [(peer, self.send(refusal, peer, HEADER), refusal) for peer in peers]
        works: _Works = []
        for peer, message, crc in messages:
            header = Header(FOLLOWS, self.rank, message.numel(), crc).pack()
            works.append((peer, self.send(header, peer, HEADER), header))
            if message.numel():
                works.append((peer, self.send(message, peer, PAYLOAD), message))
        return piece, works

    # --- receiving --------------------------------------------------------------------------------------

    def _receive_all(self) -> None:
        """Receive the pieces of other ranks, a few of them at a time, and put them in place."""
        upcoming = iter(self._received)
        headers: collections.deque[tuple[int, int, torch.Tensor, Any]] = collections.deque()
        pending: collections.deque[tuple[ReceivedPiece | None, Header, int, torch.Tensor, Any]] = collections.deque()
        held, limit = 0, self._memory // 8

        def finish() -> None:
            """Wait for a piece and put it in place."""
            nonlocal held
            piece, header, owner, buffer, work = pending.popleft()
            held -= header.nbytes
            if self.wait(work, owner, buffer) and piece is not None and self.failure is None:
                with self._reporting():
                    piece.received(header.crc)

        with self._reporting():
            while True:
                while len(headers) < _HEADERS_AHEAD and (coming := next(upcoming, None)) is not None:
                    number, owner = coming
                    message = torch.empty(HEADER_BYTES, dtype=torch.uint8, device="cpu")
                    headers.append((number, owner, message, self.receive(message, owner, HEADER)))
                if not headers:
                    break
                number, owner, message, work = headers.popleft()
                if not self.wait(work, owner, message):
                    continue
                header = Header.unpack(message)
                if header.outcome == FAILED:
                    self.fail_as(header)
                elif header.nbytes:
                    while pending and (len(pending) >= _PAYLOADS_AHEAD or held + header.nbytes > limit):
                        finish()
                    piece, buffer = self._incoming.get(number), None
                    if piece is not None and self.failure is None:
                        with self._reporting():
                            buffer = piece.buffer(header.nbytes)
                    if buffer is None:  # it is dropped
                        piece, buffer = None, torch.empty(header.nbytes, dtype=torch.uint8, device="cpu")
                    held += header.nbytes
                    pending.append((piece, header, owner, buffer, self.receive(buffer, owner, PAYLOAD)))
            while pending:
                finish()
