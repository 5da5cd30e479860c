"""The ranks of one load: in which group they exchange data, and messages in it by gloo.

When a timeout of gloo runs out, it closes the group's connections, and the caller could not load anything else with the
group. So the ranks greet each other first, and look for greetings rather than wait: a rank that failed before does not
come. The thread that handles signals takes no lock here, which a signal might leave locked.
"""

from __future__ import annotations

import logging
import queue
import secrets
import struct
import threading
import time
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from dcp_s3 import errors, process
from dcp_s3.memory import view_bytes

logger = logging.getLogger(__name__)

# --- the group ---------------------------------------------------------------------------------------


class Offer(NamedTuple):
    """What a rank says of itself in its local plan, so that the coordinator can tell which ranks may share."""

    rank: int  # rank in the default group
    shares: bool  # whether it shares what it reads
    checkpoint: str  # endpoint and URL of the checkpoint
    version: int  # hash of the metadata that it read
    world_size: int  # number of ranks of the default group; 0 if that cannot carry CPU tensors
    given: int
    """Hash of the ranks in the reader's ``process_group``; 0 if there is none, or if it cannot carry CPU tensors."""


def make_offer(checkpoint: str, version: int, given: dist.ProcessGroup | None, *, shares: bool) -> Offer:
    """The offer of this rank, for a checkpoint and a reader's ``process_group``."""
    has_gloo = ["cpu:gloo" in dist.get_backend_config(group).split(",") for group in (None, given)]
    return Offer(
        rank=process.rank(),
        shares=shares,
        checkpoint=checkpoint,
        version=version,
        world_size=process.world_size() if has_gloo[0] else 0,
        given=hash(tuple(dist.get_process_group_ranks(given))) if given is not None and has_gloo[1] else 0,
    )


def choose_group(offers: Sequence[Offer], url: str) -> tuple[str, str]:
    """In which process group the ranks with these offers, in order, can exchange data: ``given`` (the readers' own) or
    ``default``, and nothing; or nothing, and the reason.

    Raises:
        CorruptCheckpointError: they have read different metadata of the checkpoint at ``url``.
    """
    first = offers[0]
    for offer in offers:
        if offer.checkpoint == first.checkpoint and offer.version != first.version:
            raise errors.CorruptCheckpointError(
                f"{url} changed while it was read: ranks {first.rank} and {offer.rank} read different metadata. "
                "Remedy: load it again",
                url=url,
            )
    if len(offers) == 1 or not all(offer.shares and offer.checkpoint == first.checkpoint for offer in offers):
        return "", "not all ranks load it with load_sharing"
    members = [offer.rank for offer in offers]
    if all(offer.given == hash(tuple(members)) for offer in offers):
        return "given", ""
    if members == list(range(first.world_size)) and all(offer.world_size == len(members) for offer in offers):
        return "default", ""
    return "", (
        f"no process group with gloo for CPU tensors is known that has just these {len(members)} ranks. To read what "
        'several of them need once: init_process_group("cpu:gloo,cuda:nccl"), which async_save needs as well, or '
        "S3StorageReader(process_group=...) with the group that dcp.load is given"
    )


# --- messages ----------------------------------------------------------------------------------------

PATIENCE = 300.0
"""Seconds for which a rank waits for the others to begin to read."""

# Tags of messages are this or greater: those of other users of a process group are small.
_FIRST_TAG = 1 << 29
# Tags of one load. gloo tells messages apart by sender and tag, and keeps their order.
_TAGS = 5
GREETING, VERDICT, HEADER, PAYLOAD, PROBE = range(_TAGS)
LOOKS_EVERY = 0.002
_PROBES_EVERY = 2.0
HEADER_BYTES = 512
_HEADER_STRUCT = struct.Struct("<BiQQH")  # outcome, rank that failed; bytes and CRC-64/NVME that follow; bytes of text
FOLLOWS, FAILED = 1, 2  # never 0

_unanswered: list[Any] = []  # messages to ranks that did not come: gloo may use their memory at any time


def new_tag() -> int:
    """The first tag of a load's messages, another one for each load."""
    return _FIRST_TAG + _TAGS * secrets.randbelow(_FIRST_TAG // _TAGS)


class Header(NamedTuple):
    """What a rank says before it sends, or instead."""

    outcome: int  # `FOLLOWS` or `FAILED`
    rank: int  # the rank that failed first
    nbytes: int = 0  # bytes that follow
    crc: int = 0  # CRC-64/NVME of them
    text: str = ""  # why it failed

    def pack(self) -> torch.Tensor:
        encoded = self.text.encode()[: HEADER_BYTES - _HEADER_STRUCT.size]
        packed = _HEADER_STRUCT.pack(*self[:4], len(encoded)) + encoded
        return torch.frombuffer(bytearray(packed.ljust(HEADER_BYTES, b"\0")), dtype=torch.uint8)

    @classmethod
    def unpack(cls, message: torch.Tensor) -> Header:
        view = bytes(view_bytes(message))
        outcome, rank, nbytes, crc, length = _HEADER_STRUCT.unpack_from(view)
        return cls(outcome, rank, nbytes, crc, view[_HEADER_STRUCT.size :][:length].decode(errors="replace"))


class Messages:
    """Messages between this rank and its ``peers`` in a group, with tags from ``tag`` on; and what failed first.

    Attributes:
        failure: the first failure of the load, here or on another rank: the error, that rank, and the cause as text.
    """

    def __init__(self, group: dist.ProcessGroup, peers: Collection[int], url: str, tag: int) -> None:
        self.group, self.rank, self.peers, self.url, self._tag = group, dist.get_rank(group), peers, url, tag
        self.failure: tuple[BaseException, int, str] | None = None
        self._lost: set[int] = set()
        self._greetings: list[tuple[int, torch.Tensor, Any]] = []
        self._local = threading.local()
        self._waiting: list[queue.SimpleQueue[Any]] = []

    def fail(self, error: BaseException, rank: int | None = None, text: str = "") -> None:
        """Send no more, and tell the peers why. Only the first failure counts. Safe to call at any time."""
        try:
            text = text or f"{type(error).__name__}: {error}"
        except Exception:  # noqa: BLE001 - its __str__ raises
            text = type(error).__name__
        if self.failure is None:
            self.failure = error, self.rank if rank is None else rank, text
            self._give_up()

    def _give_up(self) -> None:
        """Cancel what is under way. Called once, on any thread."""

    def fail_as(self, header: Header) -> None:
        """Fail because another rank did."""
        told = f"rank {header.rank} of the load failed to read {self.url}: {header.text}"
        self.fail(errors.PeerReadError(told, url=self.url, rank=header.rank), header.rank, header.text)

    def _lose(self, peer: int, why: str, remedy: str = "see what ended that rank") -> None:
        if peer not in self._lost:
            # DCP's own collective may fail next, and hide what is raised here.
            logger.warning("rank %d, with which this one loads %s, is lost: %s", peer, self.url, why)
        self._lost.add(peer)
        text = f"{self.url} was not loaded: {why}. Remedy: {remedy}"
        self.fail(errors.PeerReadError(text, url=self.url, rank=peer), peer, why)

    def refusal(self) -> torch.Tensor:
        """What is sent instead of data."""
        _, rank, text = self.failure or (None, self.rank, "")
        return Header(FAILED, rank, text=text).pack()

    def greet(self) -> bool:
        """Begin, if all peers are there: each says that it is, and then whether it has met all of its own. True for a
        rank that has said yes twice: it goes through the schedule. Peers that said no are lost."""
        began = time.monotonic()
        here = self._exchange_greetings(GREETING, began + PATIENCE)
        for peer in self.peers:
            if peer not in here and self.failure is None:
                self._lose(
                    peer,
                    f"rank {peer} did not begin to read within {PATIENCE:.0f} s",
                    "see what it says; or its planner's finish_plan dropped the plan's storage_data",
                )
        if self.failure is not None:
            self._tell(self.refusal(), VERDICT)
            return False
        verdicts = self._exchange_greetings(VERDICT, began + 2 * PATIENCE)
        for peer in self.peers:
            verdict = verdicts.get(peer, Header(FAILED, peer, text=f"no sign for {PATIENCE:.0f} s"))
            if verdict.outcome != FOLLOWS:
                self._lost.add(peer)
                self.fail_as(verdict)
        return True

    def _exchange_greetings(self, kind: int, until: float) -> dict[int, Header]:
        """Greet the peers; returns what each has answered by then, or until a failure of this rank's first greeting."""
        answers = {peer: torch.zeros(HEADER_BYTES, dtype=torch.uint8, device="cpu") for peer in self.peers}
        waiting = {peer: self.post(dist.irecv, answer, peer, kind) for peer, answer in answers.items()}
        self._tell(Header(FOLLOWS, self.rank).pack(), kind)
        found, probed = {}, time.monotonic()
        while waiting.keys() - self._lost and time.monotonic() < until:
            if self.failure is not None and kind == GREETING:
                break
            for peer, work in list(waiting.items()):
                if int(answers[peer][0]):
                    del waiting[peer]
                    if self.wait(work, peer, answers[peer]):
                        found[peer] = Header.unpack(answers[peer])
            if waiting and time.monotonic() - probed > _PROBES_EVERY:
                probed = time.monotonic()
                self._probe(waiting)
            if waiting:
                time.sleep(LOOKS_EVERY)
        _unanswered.extend((answers[peer], work) for peer, work in waiting.items())
        return found

    def _tell(self, message: torch.Tensor, kind: int) -> None:
        self._greetings += [(peer, message, self.post(dist.isend, message, peer, kind)) for peer in self.peers]

    def _probe(self, peers: Collection[int]) -> None:
        """Find out who was killed: sending to it fails. Nobody receives this."""
        message = Header(FAILED, self.rank).pack()
        _unanswered.extend((message, self.post(dist.isend, message, peer, PROBE)) for peer in peers)

    def end(self) -> None:
        """Wait until the peers have got the greetings, unless something failed: then some may never come for them."""
        if self.failure is None:
            for peer, message, work in self._greetings:
                self.wait(work, peer, message)
        else:
            _unanswered.extend(self._greetings)
        for asked in self._waiting:
            asked.put(None)

    def wait(self, work: Any, peer: int, message: Any) -> bool:
        """Whether the transfer of ``message`` is done; False if ``peer`` is lost.

        Another thread waits, and may be left behind: of a lost connection gloo may forget a message that was under way,
        and the wait for that ends only with the timeout of the group.
        """
        if work is None or peer in self._lost:
            return False
        if getattr(self._local, "queues", None) is None:
            self._local.queues = asked, answers = queue.SimpleQueue[Any](), queue.SimpleQueue[Any]()
            self._waiting.append(asked)
            threading.Thread(target=_wait_for, args=(asked, answers), name="dcp_s3-wait", daemon=True).start()
        asked, answers = self._local.queues
        asked.put((work, message))
        began = time.monotonic()
        while True:
            try:  # ever fewer probes: each stays with gloo
                error = answers.get(timeout=max(_PROBES_EVERY, (time.monotonic() - began) / 10))
                break
            except queue.Empty:
                self._probe([peer])
            if peer in self._lost:
                self._local.queues = None
                return False
        if error is not None:
            self._lose(peer, f"the connection to rank {peer} was lost: {error}")
        return error is None

    def post(self, operation: Any, tensor: torch.Tensor, peer: int, kind: int) -> Any:
        """Begin `dist.isend` or `dist.irecv`; None if ``peer`` is lost."""
        if peer in self._lost:
            return None
        to = {"group_dst" if operation is dist.isend else "group_src": peer}
        try:
            return operation(tensor, group=self.group, tag=self._tag + kind, **to)
        except RuntimeError as error:
            self._lose(peer, f"the connection to rank {peer} was lost: {error}")
            return None


def _wait_for(asked: queue.SimpleQueue[Any], answers: queue.SimpleQueue[Any]) -> None:
    """Wait for each transfer that comes, with the memory that it uses, and answer with its error or None."""
    while (each := asked.get()) is not None:
        try:
            each[0].wait()
        except RuntimeError as error:
            answers.put(error)
        else:
            answers.put(None)
        del each
