"""Pieces on their way between the ranks of a load: fetched by their owners, sent to the others.

The ranks greet each other first, with a time limit: a rank that failed before does not come. From then on every rank
goes through the pieces in the order of their numbers to the end, whatever fails: instead of what it has not sent yet it
sends the cause, and it drops what it still receives. So nobody waits for it.

One thread sends the pieces that the rank owns, one receives the others, each within bounded memory of its own. There is
no deadlock: consider the smallest piece that is not done. Its owner has sent all that it owns before it, so the memory
to fetch it is free, and it is sent next; its receivers have received all before it, so they receive it next.

When a timeout of gloo runs out, it closes the group's connections, and the caller could not load anything else with the
group. So greetings are looked for rather than waited for. The thread that handles signals takes no lock here, which a
signal might leave locked.
"""

from __future__ import annotations

import collections
import logging
import queue
import struct
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent import futures
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from dcp_s3 import errors
from dcp_s3.limit import Cancelled, Deadline
from dcp_s3.load.peers.assignment import Assignment
from dcp_s3.load.peers.shared_pieces import OwnedPiece, ReceivedPiece
from dcp_s3.tensor_memory import view_bytes
from dcp_s3.workers import Workers

logger = logging.getLogger(__name__)

PATIENCE = 300.0
"""Seconds for which a rank waits for the others to begin to read."""

FIRST_TAG = 1 << 29
"""Tags of messages are this or greater: those of other users of a process group are small."""
TAGS = 5
"""Tags of one load. gloo tells messages apart by sender and tag, and keeps their order."""

_GREETING, _VERDICT, _HEADER, _PAYLOAD, _PROBE = range(TAGS)
_LOOKS_EVERY = 0.002
_PROBES_EVERY = 2.0

_HEADERS_AHEAD = 32
_PAYLOADS_AHEAD = 4
_POSTED = 64

_HEADER_BYTES = 512
_HEADER_STRUCT = struct.Struct("<BiQQH")  # outcome, rank that failed; bytes and CRC-64/NVME that follow; bytes of text
_FOLLOWS, _DECLINED, _FAILED = 1, 2, 3  # never 0

_unanswered: list[Any] = []  # messages to ranks that did not come: gloo may use their memory at any time


class _Failure(NamedTuple):
    error: BaseException
    rank: int
    text: str


class _Prepared(NamedTuple):
    """What to send and to receive, by the numbers of the pieces."""

    outgoing: Mapping[int, OwnedPiece]
    incoming: Mapping[int, ReceivedPiece]
    threads: int
    memory: int


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


class Exchange:
    """One rank's part of an exchange: `start`, then `provide`, `decline` or `fail`, then wait for ``on_end``.

    The group has gloo for CPU tensors, and the ranks of the assignment. ``on_failure`` is called from any thread when
    anything fails, here or elsewhere; ``on_end`` once, when this rank is done with all pieces.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        assignment: Assignment,
        *,
        url: str,
        on_failure: Callable[[], None] = lambda: None,
        on_end: Callable[[], None] = lambda: None,
        deadline: Deadline | None = None,
    ) -> None:
        self._group, self._rank, self._url, self._tag = group, dist.get_rank(group), url, assignment.tag
        pieces, me = assignment.pieces, self._rank
        self._owned = [(piece.number, [peer.rank for peer in piece.peers]) for piece in pieces if piece.owner == me]
        self._received = [(piece.number, piece.owner) for piece in pieces if piece.owner != me]
        receivers = {rank for _, ranks in self._owned for rank in ranks}
        self._peers = sorted(receivers | {owner for _, owner in self._received})
        self._on_failure, self._on_end, self._deadline = on_failure, on_end, deadline
        self._failure: _Failure | None = None
        self.error: BaseException | None = None
        """The first failure."""
        self._lost: set[int] = set()
        self._declined = self._is_on = False
        self._greetings: list[tuple[int, torch.Tensor, Any]] = []
        self._provided: queue.SimpleQueue[_Prepared | None] = queue.SimpleQueue()
        self.is_incomplete = False
        """Whether another rank declined to send its pieces."""

    def start(self) -> None:
        """Greet the peers. From now on they count on this rank, unless this raises because no thread is left."""
        threading.Thread(target=self._run, name="dcp_s3-send").start()

    def provide(
        self, outgoing: Mapping[int, OwnedPiece], incoming: Mapping[int, ReceivedPiece], *, threads: int, memory: int
    ) -> None:
        """Begin to send and receive pieces, by their numbers, fetching them on so many threads.

        ``memory`` is for bytes in flight: half for pieces being fetched or sent, an eighth for pieces being received.
        One piece is always allowed.
        """
        self._provided.put(_Prepared(outgoing, incoming, threads, memory))

    def decline(self) -> None:
        """Send nothing, instead of `provide`: the peers read for themselves what this rank would have sent."""
        self._declined = True
        self._provided.put(None)

    def fail(self, error: BaseException) -> None:
        """Send no more, and tell the peers why. Only the first failure counts. Safe to call at any time."""
        try:
            text = f"{type(error).__name__}: {error}"
        except Exception:  # noqa: BLE001 - its __str__ raises
            text = type(error).__name__
        self._fail(_Failure(error, self._rank, text))

    def _fail(self, failure: _Failure) -> None:
        if self._failure is not None:
            return
        self.error, self._failure = failure.error, failure
        self._provided.put(None)
        try:
            self._on_failure()
        except Exception:  # the failure stands; nobody may take the exchange for ended
            logger.exception("a load was not cancelled at once")

    def _lose(self, peer: int, why: str, remedy: str) -> None:
        if peer not in self._lost:
            # DCP's own collective may fail next, and hide what is raised here.
            logger.warning("rank %d, with which this one loads %s, is lost: %s", peer, self._url, why)
        self._lost.add(peer)
        lost = errors.PeerReadError(f"{self._url} was not loaded: {why}. Remedy: {remedy}", url=self._url, rank=peer)
        self._fail(_Failure(lost, peer, why))

    # --- the exchange -----------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._guard(self._greet)
            if self._is_on:
                self._send_and_receive(self._provided.get())
            if self._failure is None:
                for peer, _, work in self._greetings:
                    self._wait(work, peer)
            else:
                _unanswered.extend(self._greetings)
        finally:
            self._on_end()

    def _send_and_receive(self, prepared: _Prepared | None) -> None:
        receiver = threading.Thread(target=self._guard, args=(self._receive_all, prepared), name="dcp_s3-receive")
        try:
            receiver.start()
        except RuntimeError as error:  # no thread is left
            self.fail(error)
            self._guard(self._send_all, None)
            self._guard(self._receive_all, None)
        else:
            self._guard(self._send_all, prepared)
            receiver.join()

    def _guard(self, function: Callable[..., None], *arguments: Any) -> None:
        try:
            function(*arguments)
        except BaseException as error:  # noqa: BLE001 - the caller's thread raises it
            self.fail(error)

    def _greet(self) -> None:
        """Begin, if all peers are there: each says that it is, and then whether it has met all of its own.

        A rank that has said yes twice goes through the schedule. Peers that said no are lost.
        """
        began = time.monotonic()
        patience = PATIENCE if self._deadline is None else min(PATIENCE, self._deadline.left)
        here = self._exchange_greetings(_GREETING, began + patience)
        for peer in self._peers:
            if peer not in here and self._failure is None:
                self._lose(
                    peer,
                    f"rank {peer} did not begin to read within {patience:.0f} s",
                    "see what it says; or its planner's finish_plan dropped the plan's storage_data",
                )
        if self._failure is not None:
            self._tell(self._refusal(), _VERDICT)
            return
        self._is_on = True
        verdicts = self._exchange_greetings(_VERDICT, began + 2 * patience)
        for peer in self._peers:
            outcome, rank, _, _, text = verdicts.get(peer, (_FAILED, peer, 0, 0, f"no sign for {patience:.0f} s"))
            if outcome != _FOLLOWS:
                self._lost.add(peer)
                self._fail_as(rank, text)

    def _exchange_greetings(self, kind: int, until: float) -> dict[int, tuple[int, int, int, int, str]]:
        """Greet the peers; returns what each has answered by then, or until a failure of this rank's first greeting."""
        answers = {peer: torch.zeros(_HEADER_BYTES, dtype=torch.uint8, device="cpu") for peer in self._peers}
        waiting = {peer: self._receive(answer, peer, kind) for peer, answer in answers.items()}
        self._tell(_pack(_FOLLOWS, self._rank, 0, 0, ""), kind)
        found, probed = {}, time.monotonic()
        while waiting.keys() - self._lost and time.monotonic() < until:
            if self._failure is not None and kind == _GREETING:
                break
            for peer, work in list(waiting.items()):
                if int(answers[peer][0]):
                    del waiting[peer]
                    if self._wait(work, peer):
                        found[peer] = _unpack(answers[peer])
            if waiting and time.monotonic() - probed > _PROBES_EVERY:
                probed = time.monotonic()  # one that was killed is found out by sending to it
                self._tell(_pack(_FAILED, self._rank, 0, 0, ""), _PROBE, waiting)
            if waiting:
                time.sleep(_LOOKS_EVERY)
        _unanswered.extend((answers[peer], work) for peer, work in waiting.items())
        return found

    def _tell(self, message: torch.Tensor, kind: int, peers: Iterable[int] | None = None) -> None:
        for peer in self._peers if peers is None else peers:
            work = self._send(message, peer, kind)
            (_unanswered if kind == _PROBE else self._greetings).append((peer, message, work))

    def _fail_as(self, rank: int, text: str) -> None:
        """Fail because ``rank`` did."""
        told = f"rank {rank} of the load failed to read {self._url}: {text}"
        self._fail(_Failure(errors.PeerReadError(told, url=self._url, rank=rank), rank, text))

    # --- gloo -------------------------------------------------------------------------------------------

    def _wait(self, work: Any, peer: int) -> bool:
        """Whether the transfer is done; False if ``peer`` is lost."""
        if work is None:
            return False
        try:
            work.wait()
        except RuntimeError as error:
            self._lose_connection(peer, error)
            return False
        return True

    def _send(self, tensor: torch.Tensor, peer: int, kind: int) -> Any:
        return self._post(dist.isend, tensor, peer, self._tag + kind, group_dst=peer)

    def _receive(self, tensor: torch.Tensor, peer: int, kind: int) -> Any:
        return self._post(dist.irecv, tensor, peer, self._tag + kind, group_src=peer)

    def _post(self, operation: Any, tensor: torch.Tensor, peer: int, tag: int, **to: int) -> Any:
        if peer in self._lost:
            return None
        try:
            return operation(tensor, group=self._group, tag=tag, **to)
        except RuntimeError as error:
            self._lose_connection(peer, error)
            return None

    def _lose_connection(self, peer: int, error: Exception) -> None:
        self._lose(peer, f"the connection to rank {peer} was lost: {error}", "see what ended that rank")

    # --- sending ----------------------------------------------------------------------------------------

    def _send_all(self, prepared: _Prepared | None) -> None:
        pool: Workers | None = None
        try:
            if prepared is not None and self._owned:
                try:
                    pool = Workers(min(prepared.threads, len(self._owned)), "dcp_s3-fetch")
                except Exception as error:  # noqa: BLE001 - the schedule goes on
                    self.fail(error)
            self._send_pieces(prepared, pool)
        finally:
            if pool is not None:
                pool.close()

    def _send_pieces(self, prepared: _Prepared | None, pool: Workers | None) -> None:
        pieces: list[OwnedPiece] = []
        limit = 0
        if prepared is not None and pool is not None:
            pieces, limit = [prepared.outgoing[number] for number, _ in self._owned], prepared.memory // 2
        posted: collections.deque[_PendingSend] = collections.deque()
        fetches: list[futures.Future[Any]] = []
        held = 0
        for index, (_, peers) in enumerate(self._owned):
            while self._failure is None and len(fetches) < len(pieces) and pool is not None:
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
        while self._failure is None and not futures.wait([fetch], 0.1).done:
            if self._deadline is not None and self._deadline.left <= 0:
                self.fail(self._deadline.error(f"the load of {self._url}"))
        if self._failure is not None:
            return False
        error = fetch.exception()
        while isinstance(error, Cancelled) and self._failure is None:  # the cause is about to be reported
            time.sleep(_LOOKS_EVERY)
        if error is not None:
            self.fail(error)
        return self._failure is None

    def _send_piece(self, piece: OwnedPiece | None, peers: Sequence[int]) -> _PendingSend:
        messages: list[tuple[int, torch.Tensor, int]] = []
        if piece is not None:
            try:
                messages = [(peer, *piece.message(peer)) for peer in peers]
            except BaseException as error:  # noqa: BLE001 - the peers are told
                self.fail(error)
                piece = None
        works: list[tuple[int, Any]] = []
        kept: list[torch.Tensor] = []
        if piece is None:
            kept.append(self._refusal())
            works = [(peer, self._send(kept[0], peer, _HEADER)) for peer in peers]
        for peer, message, crc in messages if piece is not None else ():
            header = _pack(_FOLLOWS, self._rank, message.numel(), crc, "")
            kept += [header, message]
            works.append((peer, self._send(header, peer, _HEADER)))
            if message.numel():
                works.append((peer, self._send(message, peer, _PAYLOAD)))
        return _PendingSend(piece, 0 if piece is None else piece.nbytes, works, kept)

    def _refusal(self) -> torch.Tensor:
        failure = self._failure
        if failure is not None:
            return _pack(_FAILED, failure.rank, 0, 0, failure.text)
        return _pack(_DECLINED if self._declined else _FAILED, self._rank, 0, 0, "")

    def _retire(self, sent: _PendingSend) -> int:
        """Wait until a piece has been sent; returns its bytes."""
        done = [self._wait(work, peer) for peer, work in sent.works]
        if sent.piece is not None and all(done) and self._failure is None:
            try:
                sent.piece.sent()
            except BaseException as error:  # noqa: BLE001 - the schedule goes on
                self.fail(error)
        return sent.nbytes

    # --- receiving --------------------------------------------------------------------------------------

    def _receive_all(self, prepared: _Prepared | None) -> None:
        upcoming = iter(self._received)
        headers: collections.deque[tuple[int, int, torch.Tensor, Any]] = collections.deque()
        pending: collections.deque[_PendingReceive] = collections.deque()
        held, limit = 0, 0 if prepared is None else prepared.memory // 8
        while True:
            while len(headers) < _HEADERS_AHEAD and (piece := next(upcoming, None)) is not None:
                number, owner = piece
                header = torch.empty(_HEADER_BYTES, dtype=torch.uint8, device="cpu")
                headers.append((number, owner, header, self._receive(header, owner, _HEADER)))
            if not headers:
                break
            number, owner, header, work = headers.popleft()
            if not self._wait(work, owner):
                continue
            outcome, rank, nbytes, crc, text = _unpack(header)
            if outcome == _DECLINED:
                self.is_incomplete = True
            elif outcome == _FAILED:
                self._fail_as(rank, text)
            elif nbytes:
                while pending and (len(pending) >= _PAYLOADS_AHEAD or held + nbytes > limit):
                    held -= self._finish(pending.popleft())
                incoming = None if prepared is None else prepared.incoming[number]
                buffer = self._buffer_for(incoming, nbytes, owner)
                held += nbytes
                work = self._receive(buffer, owner, _PAYLOAD)
                pending.append(_PendingReceive(incoming, nbytes, crc, buffer, owner, work))
        while pending:
            self._finish(pending.popleft())

    def _buffer_for(self, piece: ReceivedPiece | None, nbytes: int, owner: int) -> torch.Tensor:
        if piece is not None and self._failure is None:
            try:
                if piece.nbytes == nbytes:
                    return piece.buffer()
                text = f"rank {owner} sends {nbytes} bytes where {piece.nbytes} of {self._url} are needed: report it"
                raise errors.PeerReadError(text, url=self._url, rank=owner)
            except BaseException as error:  # noqa: BLE001 - the schedule goes on
                self.fail(error)
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")  # dropped

    def _finish(self, received: _PendingReceive) -> int:
        """Wait for a piece and put it in place; returns its bytes."""
        if self._wait(received.work, received.owner) and received.piece is not None and self._failure is None:
            try:
                received.piece.received(received.crc)
            except BaseException as error:  # noqa: BLE001 - the schedule goes on
                self.fail(error)
        return received.nbytes


def _pack(outcome: int, rank: int, nbytes: int, crc: int, text: str) -> torch.Tensor:
    encoded = text.encode()[: _HEADER_BYTES - _HEADER_STRUCT.size]
    packed = _HEADER_STRUCT.pack(outcome, rank, nbytes, crc, len(encoded)) + encoded
    return torch.frombuffer(bytearray(packed.ljust(_HEADER_BYTES, b"\0")), dtype=torch.uint8)


def _unpack(header: torch.Tensor) -> tuple[int, int, int, int, str]:
    view = bytes(view_bytes(header))
    outcome, rank, nbytes, crc, length = _HEADER_STRUCT.unpack_from(view)
    return outcome, rank, nbytes, crc, view[_HEADER_STRUCT.size :][:length].decode(errors="replace")
