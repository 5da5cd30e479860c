"""The exchange between the ranks of a load: each piece is fetched by its owner and sent to the others by gloo.

The ranks greet each other first. Then every rank goes through the pieces in the order of their numbers to the end,
whatever fails: instead of what it has not sent yet it sends the cause, and it drops what it still receives. So nobody
waits for it.

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
from collections.abc import Iterator, Sequence
from concurrent import futures
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.planner import ReadItem

from dcp_s3 import errors
from dcp_s3.limit import Cancelled
from dcp_s3.load.assign import Assignment
from dcp_s3.load.fetch import Fetcher
from dcp_s3.load.items import Transfer
from dcp_s3.load.messages import FAILED, FOLLOWS, HEADER, HEADER_BYTES, LOOKS_EVERY, PAYLOAD, Header, Messages
from dcp_s3.load.pieces import Piece
from dcp_s3.workers import Workers

_HEADERS_AHEAD = 32
_PAYLOADS_AHEAD = 4
_POSTED = 64

_Works = list[tuple[int, Any, torch.Tensor]]
"""Messages that are being sent: the peer, gloo's work, and the memory."""


class Exchange(Messages):
    """One rank's part of an exchange: `provide`, then `arrivals`.

    Use it as a context manager around all that may fail: when it is entered the other ranks begin to count on this
    one, and an error that leaves it is told to them. The group has gloo for CPU tensors, and the ranks of the
    assignment. All of them have an assignment.

    Attributes:
        shared: numbers of the items that arrive in pieces, and only so.
    """

    def __init__(self, group: dist.ProcessGroup, assignment: Assignment, *, url: str) -> None:
        pieces, me = assignment.pieces, dist.get_rank(group)
        self._assignment = assignment
        self.shared = {number for piece in pieces for part in piece.parts for number in part.items}
        self._owned = [[peer for peer, _ in piece.peers] for piece in pieces if piece.owner == me]
        self._received = [(piece.number, piece.owner) for piece in pieces if piece.owner != me]
        peers = {rank for ranks in self._owned for rank in ranks} | {owner for _, owner in self._received}
        super().__init__(group, sorted(peers), url, assignment.tag)
        self._fetcher: Fetcher | None = None
        self._has_ended = False
        self._threads = self._memory = 0
        self._outgoing: list[Piece] = []
        self._incoming: dict[int, Piece] = {}
        self._provided: queue.SimpleQueue[bool] = queue.SimpleQueue()
        """Something when `provide` has set what comes before, or when this rank has failed."""
        self._finished: queue.SimpleQueue[Transfer | None] = queue.SimpleQueue()
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

    def provide(self, items: Sequence[ReadItem], transfers: Sequence[Transfer], fetcher: Fetcher) -> int:
        """Begin to send and receive pieces, for the items of this rank's plan. Returns the number of threads left for
        items that are not shared.

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
        mine = {number: transfers[number] for number in self.shared}
        pieces = [(each, Piece(each, mine, self._finished.put, self.url)) for each in self._assignment.pieces]
        self._outgoing = [piece for each, piece in pieces if each.owner == self.rank]
        self._incoming = {each.number: piece for each, piece in pieces if each.owner != self.rank}
        direct = sum([each.length for number, each in enumerate(transfers) if number not in self.shared])
        width, own = fetcher.store.read_width(), sum(piece.nbytes for piece in self._outgoing)
        self._threads = max(1, min(width - 1 if direct else width, round(width * own / (own + direct)))) if own else 0
        self._memory = fetcher.buffers
        self._provided.put(True)
        return max(1, width - self._threads)

    def arrivals(self) -> Iterator[Transfer]:
        """Yield the items as they arrive, until the exchange has ended. Raises what failed here or elsewhere."""
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
                with self._reporting():  # no thread is left
                    receiver.start()
                self._send_all()
                if receiver.ident is None:
                    self._receive_all()
                else:
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
        posted: collections.deque[tuple[Piece | None, _Works]] = collections.deque()
        fetches: list[futures.Future[Any]] = []
        pieces: list[Piece] = []
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
            for index, peers in enumerate(self._owned):
                while self.failure is None and len(fetches) < len(pieces):
                    size = pieces[len(fetches)].nbytes
                    if held == 0 or held + size <= limit:
                        with self._reporting():  # no thread can be started
                            fetches.append(pool.submit(pieces[len(fetches)].fetch, self._fetcher))
                            held += size
                    elif len(fetches) <= index:
                        retire()  # everything held is posted, so there is one
                    else:
                        break
                # Wait until it has been fetched.
                piece = None
                if index < len(fetches):
                    while self.failure is None and not futures.wait([fetches[index]], 0.1).done:
                        pass
                    error = fetches[index].exception() if self.failure is None else None
                    while isinstance(error, Cancelled) and self.failure is None:  # the cause is about to be reported
                        time.sleep(LOOKS_EVERY)
                    if error is not None:
                        self.fail(error)
                    piece = pieces[index] if self.failure is None else None
                # Begin to send it, or the cause of a failure instead.
                messages: list[tuple[torch.Tensor, int]] = []
                if piece is not None:
                    with self._reporting():
                        messages = [piece.message(peer) for peer in peers]
                works: _Works = []
                if piece is not None and len(messages) == len(peers):
                    sending += piece.nbytes
                    for peer, (message, crc) in zip(peers, messages, strict=True):
                        header = Header(FOLLOWS, self.rank, message.numel(), crc).pack()
                        works.append((peer, self.post(dist.isend, header, peer, HEADER), header))
                        if message.numel():
                            works.append((peer, self.post(dist.isend, message, peer, PAYLOAD), message))
                else:
                    piece, refusal = None, self.refusal()
                    works = [(peer, self.post(dist.isend, refusal, peer, HEADER), refusal) for peer in peers]
                posted.append((piece, works))
                while len(posted) > _POSTED or 2 * sending > limit > 0:
                    retire()
            while posted:
                retire()

    # --- receiving --------------------------------------------------------------------------------------

    def _receive_all(self) -> None:
        """Receive the pieces of other ranks, a few of them at a time, and put them in place."""
        upcoming = iter(self._received)
        headers: collections.deque[tuple[int, int, torch.Tensor, Any]] = collections.deque()
        pending: collections.deque[tuple[Piece | None, Header, int, torch.Tensor, Any]] = collections.deque()
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
                    headers.append((number, owner, message, self.post(dist.irecv, message, owner, HEADER)))
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
                    pending.append((piece, header, owner, buffer, self.post(dist.irecv, buffer, owner, PAYLOAD)))
            while pending:
                finish()
