"""Pieces on their way between the ranks of a load: fetched by their owners, sent to the others.

Every rank goes through the pieces in the order of their numbers: one thread sends the pieces that the rank owns, one
receives the others. Each has bounded memory of its own. There is no deadlock: consider the smallest piece that is not
done. Its owner has sent all that it owns before it, so the memory to fetch it is free, and it is sent next; its
receivers have received all before it, so they receive it next.

A rank that fails still goes through its schedule to the end, so that nobody waits for it. Instead of what it has not
sent yet it sends the cause, and it drops what it still receives. A rank that is told of a failure fails too.

No wait here has a timeout of its own: when one runs out, gloo closes the group's connections, and the caller could
not load anything else with the group. The group's own timeout applies.
"""

from __future__ import annotations

import collections
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from dcp_s3 import errors
from dcp_s3.limit import Cancelled, Deadline
from dcp_s3.load.peers.exchange_header import HEADER_BYTES, pack_header, unpack_header
from dcp_s3.load.peers.interrupts import Latch, wait_through
from dcp_s3.workers import Workers

logger = logging.getLogger(__name__)

# gloo tells messages apart by sender and tag. Each piece has two tags.
_FIRST_TAG = 1 << 29
_HEADERS_AHEAD = 32
_PAYLOADS_AHEAD = 4
_POSTED = 64


class Outgoing(Protocol):
    """A piece that this rank owns.

    Attributes:
        number: number of the piece.
        nbytes: bytes of memory that it takes while in flight.
        peers: ranks in the group that receive bytes of it.
    """

    @property
    def number(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

    @property
    def peers(self) -> Sequence[int]: ...

    def fetch(self) -> None:
        """Fetch and verify the piece. Called on any thread."""

    def message(self, peer: int) -> tuple[torch.Tensor, int]:
        """The message for ``peer`` (uint8 in CPU memory, not empty), and the CRC-64/NVME of its sections."""

    def sent(self) -> None:
        """Note that nobody needs the piece's memory any more."""


class Incoming(Protocol):
    """A piece that another rank owns.

    Attributes:
        number: number of the piece.
        nbytes: bytes of the message, at least 1.
        owner: rank of the owner in the group.
    """

    @property
    def number(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

    @property
    def owner(self) -> int: ...

    def buffer(self) -> torch.Tensor:
        """Memory to receive the message in: ``nbytes`` of uint8 on the CPU."""

    def received(self, crc: int) -> None:
        """Take the message that has arrived; ``crc`` is the checksum that its owner sent."""


class _Failure(NamedTuple):
    error: BaseException
    rank: int
    text: str


class _PendingSend(NamedTuple):
    piece: Outgoing
    nbytes: int
    works: list[tuple[int, Any]]
    kept: list[torch.Tensor]
    whole: bool


class _PendingReceive(NamedTuple):
    piece: Incoming
    crc: int
    buffer: torch.Tensor
    work: Any


class Exchange:
    """One rank's part of an exchange: `prepare`, then either `abandon`, or `start` and `join`.

    Args:
        group: process group with gloo for CPU tensors.
        rank: rank of this process in the group.
        outgoing: pieces that this rank owns, in order.
        incoming: pieces that this rank receives, in order.
        url: URL of the checkpoint, for errors.
        threads: number of threads that fetch.
        memory: bytes of pieces in flight: half for pieces being fetched or sent, an eighth for pieces being received.
            One piece is always allowed.
        on_failure: called once, from any thread, when anything fails, here or elsewhere.
        on_end: called when this rank is done with all pieces.
        deadline: deadline of the load.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        rank: int,
        outgoing: Sequence[Outgoing],
        incoming: Sequence[Incoming],
        *,
        url: str,
        threads: int,
        memory: int,
        on_failure: Callable[[], None] = lambda: None,
        on_end: Callable[[], None] = lambda: None,
        deadline: Deadline | None = None,
    ) -> None:
        self._group, self._rank, self._url = group, rank, url
        self._outgoing, self._incoming = outgoing, incoming
        self._send_bytes, self._receive_bytes = memory // 2, memory // 8
        self._on_failure, self._on_end = on_failure, on_end
        self._deadline = deadline
        self._changed = threading.Condition()
        self._failure: _Failure | None = None
        self._lost: set[int] = set()
        self._count = min(threads, len(outgoing))
        self._pool: Workers | None = None
        self._dropped = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._running = 2
        self._begun, self._abandoned, self._ended = threading.Event(), False, Latch()
        self._interrupts: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    def prepare(self) -> None:
        """Acquire threads and memory; without them the peers would wait forever."""
        # Untouched, so only addresses, unless something fails.
        size = max((piece.nbytes for piece in self._incoming), default=0)
        self._dropped = torch.empty(size, dtype=torch.uint8, device="cpu")
        self._pool = Workers(self._count, "dcp_s3-fetch")
        for name, function in {"send": self._send_all, "receive": self._receive_all}.items():
            threading.Thread(target=self._guard, args=(function,), name=f"dcp_s3-{name}").start()
        threading.Thread(target=self._take_interrupts, name="dcp_s3-interrupts").start()

    def abandon(self) -> None:
        """Undo `prepare`; nothing is sent or received."""
        self._abandoned = True
        self._begun.set()
        self._interrupts.put(None)
        if self._pool is not None:
            self._pool.close()

    def start(self) -> None:
        """Start sending and receiving. `join` must follow."""
        self._begun.set()

    def join(self) -> None:
        """Wait until this rank is done with all pieces, failed or not. An interrupted wait is a failure."""
        wait_through(self._ended, self._interrupts.put)
        while not self._interrupts.empty() and (late := self._interrupts.get()) is not None:
            self.fail(late)

    def interrupt(self, error: BaseException) -> None:
        """`fail`, for the thread that handles signals: locks nothing, which the next signal would leave locked."""
        self._interrupts.put(error)

    def fail(self, error: BaseException) -> None:
        """Send no more, and tell the peers why. Only the first failure counts."""
        try:
            text = f"{type(error).__name__}: {error}"
        except Exception:  # noqa: BLE001 - its __str__ raises
            text = type(error).__name__
        self._fail(_Failure(error, self._rank, text))

    @property
    def error(self) -> BaseException | None:
        """The first failure, None without."""
        return None if self._failure is None else self._failure.error

    def _fail(self, failure: _Failure) -> None:
        with self._changed:
            if self._failure is not None:
                return
            self._failure = failure
            self._changed.notify_all()
        self._on_failure()

    def _take_interrupts(self) -> None:
        while (error := self._interrupts.get()) is not None:
            try:
                self.fail(error)
            except Exception:  # the failure stands; nobody may take the exchange for ended
                logger.exception("a load was not cancelled at once")
        self._ended.set()

    def _guard(self, function: Callable[[], None]) -> None:
        self._begun.wait()
        if self._abandoned:
            return
        try:
            function()
        except BaseException as error:  # noqa: BLE001 - the caller's thread raises it
            self.fail(error)
        finally:
            with self._changed:
                self._running -= 1
                last = self._running == 0
            if last:
                try:
                    self._on_end()
                finally:
                    self._interrupts.put(None)

    # --- gloo -------------------------------------------------------------------------------------------

    def _wait(self, work: Any, peer: int) -> bool:
        """Whether the transfer is done; False if the connection to ``peer`` is lost."""
        if work is None:
            return False
        try:
            work.wait()
        except RuntimeError as error:
            self._lose(peer, error)
            return False
        return True

    def _post(self, operation: Any, tensor: torch.Tensor, peer: int, tag: int) -> Any:
        if peer in self._lost:
            return None
        try:
            return operation(tensor, tag, peer)
        except RuntimeError as error:
            self._lose(peer, error)
            return None

    def _send(self, tensor: torch.Tensor, tag: int, peer: int) -> Any:
        return dist.isend(tensor, group=self._group, group_dst=peer, tag=tag)

    def _receive(self, tensor: torch.Tensor, tag: int, peer: int) -> Any:
        return dist.irecv(tensor, group=self._group, group_src=peer, tag=tag)

    def _lose(self, peer: int, error: Exception) -> None:
        if peer not in self._lost:
            # DCP's own collective fails next, and hides what is raised here.
            logger.warning("the connection to rank %d was lost while it loaded %s: %s", peer, self._url, error)
        self._lost.add(peer)
        text = f"the connection to rank {peer} was lost: {error}"
        lost = errors.PeerReadError(
            f"{self._url} was not loaded: {text}. Remedy: see what ended that rank",
            url=self._url, rank=peer,
        )  # fmt: skip
        self._fail(_Failure(lost, peer, text))

    # --- sending ----------------------------------------------------------------------------------------

    def _send_all(self) -> None:
        pool = self._pool
        if pool is None:
            raise RuntimeError("the exchange was not prepared")
        try:
            self._send_pieces(pool)
        finally:
            pool.close()

    def _send_pieces(self, pool: Workers) -> None:
        pieces = self._outgoing
        posted: collections.deque[_PendingSend] = collections.deque()
        futures: list[Future[Any]] = []
        held = 0
        for index, piece in enumerate(pieces):
            while self._failure is None and len(futures) < len(pieces):
                size = pieces[len(futures)].nbytes
                if held == 0 or held + size <= self._send_bytes:
                    future = pool.submit(pieces[len(futures)].fetch)
                    future.add_done_callback(self._notify)
                    futures.append(future)
                    held += size
                elif len(futures) <= index:
                    held -= self._retire(posted.popleft())  # everything held is posted, so this is not empty
                else:
                    break
            fetched = index < len(futures) and self._wait_for(futures[index])
            posted.append(self._send_piece(piece, fetched))
            while len(posted) > _POSTED or 2 * sum(sent.nbytes for sent in posted) > self._send_bytes:
                held -= self._retire(posted.popleft())
        while posted:
            self._retire(posted.popleft())

    def _notify(self, _: object) -> None:
        with self._changed:
            self._changed.notify_all()

    def _wait_for(self, future: Future[Any]) -> bool:
        """Whether a piece has been fetched; False when anything has failed."""
        with self._changed:
            left = None if self._deadline is None else self._deadline.left
            self._changed.wait_for(lambda: future.done() or self._failure is not None, left)
        if self._failure is not None:
            return False
        if not future.done():
            if self._deadline is not None:
                self.fail(self._deadline.error(f"the load of {self._url}"))
            return False
        error = future.exception()
        if isinstance(error, Cancelled):  # because of a failure that is about to be reported
            with self._changed:
                self._changed.wait_for(lambda: self._failure is not None, left)
        if error is not None:
            self.fail(error)
        return error is None

    def _send_piece(self, piece: Outgoing, fetched: bool) -> _PendingSend:
        messages: list[tuple[int, torch.Tensor, int]] = []
        if fetched:
            try:
                messages = [(peer, *piece.message(peer)) for peer in piece.peers]
            except BaseException as error:  # noqa: BLE001 - the peers are told
                self.fail(error)
                fetched = False
        works: list[tuple[int, Any]] = []
        kept: list[torch.Tensor] = []
        tag = _FIRST_TAG + 2 * piece.number
        if not fetched:
            header = self._failed_header()
            kept.append(header)
            works = [(peer, self._post(self._send, header, peer, tag)) for peer in piece.peers]
        for peer, message, crc in messages:
            header = pack_header(True, self._rank, crc, "")
            kept += [header, message]
            works.append((peer, self._post(self._send, header, peer, tag)))
            works.append((peer, self._post(self._send, message, peer, tag + 1)))
        return _PendingSend(piece, piece.nbytes if fetched else 0, works, kept, fetched)

    def _failed_header(self) -> torch.Tensor:
        failure = self._failure
        if failure is None:
            return pack_header(False, self._rank, 0, "it failed")
        return pack_header(False, failure.rank, 0, failure.text)

    def _retire(self, sent: _PendingSend) -> int:
        """Wait until a piece has been sent; returns its bytes."""
        done = [self._wait(work, peer) for peer, work in sent.works]
        if sent.whole and all(done) and self._failure is None:
            try:
                sent.piece.sent()
            except BaseException as error:  # noqa: BLE001 - the schedule goes on
                self.fail(error)
        return sent.nbytes

    # --- receiving --------------------------------------------------------------------------------------

    def _receive_all(self) -> None:
        upcoming = iter(self._incoming)
        headers: collections.deque[tuple[Incoming, torch.Tensor, Any]] = collections.deque()
        pending: collections.deque[_PendingReceive] = collections.deque()
        held = 0
        while True:
            while len(headers) < _HEADERS_AHEAD and (piece := next(upcoming, None)) is not None:
                header = torch.empty(HEADER_BYTES, dtype=torch.uint8, device="cpu")
                tag = _FIRST_TAG + 2 * piece.number
                headers.append((piece, header, self._post(self._receive, header, piece.owner, tag)))
            if not headers:
                break
            piece, header, work = headers.popleft()
            if not self._wait(work, piece.owner):
                continue
            follows, rank, crc, text = unpack_header(header)
            if not follows:
                told = f"rank {rank} of the load failed to read {self._url}: {text}"
                self._fail(_Failure(errors.PeerReadError(told, url=self._url, rank=rank), rank, text))
                continue
            while pending and (len(pending) >= _PAYLOADS_AHEAD or held + piece.nbytes > self._receive_bytes):
                held -= self._finish(pending.popleft())
            buffer = self._buffer_for(piece)
            held += piece.nbytes
            work = self._post(self._receive, buffer, piece.owner, _FIRST_TAG + 2 * piece.number + 1)
            pending.append(_PendingReceive(piece, crc, buffer, work))
        while pending:
            self._finish(pending.popleft())

    def _buffer_for(self, piece: Incoming) -> torch.Tensor:
        if self._failure is None:
            try:
                return piece.buffer()
            except BaseException as error:  # noqa: BLE001 - the schedule goes on
                self.fail(error)
        return self._dropped[: piece.nbytes]

    def _finish(self, received: _PendingReceive) -> int:
        """Wait for a piece and put it in place; returns its bytes."""
        if self._wait(received.work, received.piece.owner) and self._failure is None:
            try:
                received.piece.received(received.crc)
            except BaseException as error:  # noqa: BLE001 - the schedule goes on
                self.fail(error)
        return received.piece.nbytes
