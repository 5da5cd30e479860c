"""Saves without collectives, as a model: real ranks of the protocol with small states, and what must hold of the store.

`World` says what is saved, and makes the job that an `Adversary` plays against. `Invariants` looks at the store as a
reader does, after each change.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar
from unittest import mock

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from dcp_s3 import errors
from dcp_s3.coordination.claim import Claim, claim_of
from dcp_s3.coordination.identity import Attempt
from dcp_s3.coordination.joint import Clock, JointSave, find_commit, make_facts
from dcp_s3.coordination.participant import Participant
from dcp_s3.format.blocks import make_storage_info
from dcp_s3.format.control_files import ObjectEntry
from dcp_s3.format.layout import data_object, intent_object, new_nonce
from dcp_s3.format.part import Part, WrittenItem, digest_of, item_hash
from dcp_s3.url import CheckpointURL
from tests.coordination.adversary import Actor, Adversary
from tests.coordination.invariants import ONE, Invariants, Violation
from tests.coordination.moves import Move

T = TypeVar("T")

_ITEM_BYTES = 8
_TRIES = 4  # of a request that S3 does not answer


@dataclass(frozen=True)
class Item:
    """A tensor or a chunk of one (of 8 bytes each), or an object."""

    fqn: str
    holders: tuple[int, ...]
    writer: int | None
    """Rank that writes it by the rule that all ranks follow; None: the rule names a rank that does not hold it."""
    chunk: int | None = None
    """Number of the chunk; None: an object."""
    chunks: int = 1

    @property
    def planned(self) -> WriteItem:
        """As a plan has it."""
        if self.chunk is None:
            return WriteItem(MetadataIndex(self.fqn), WriteItemType.BYTE_IO)
        at, size, whole = (torch.Size((2 * each,)) for each in (self.chunk, 1, self.chunks))
        data = TensorWriteData(ChunkStorageMetadata(at, size), TensorProperties(dtype=torch.float32), whole)
        kind = WriteItemType.TENSOR if self.chunks == 1 else WriteItemType.SHARD
        return WriteItem(MetadataIndex(self.fqn, at), kind, tensor_data=data)

    def bytes_in(self, attempt: int, turn: int) -> bytes:
        """Its bytes in one save: no other save has them, all ranks of that save have the same."""
        text = f"{attempt} {turn} {self.fqn} {self.chunk}"
        return hashlib.blake2b(text.encode(), digest_size=_ITEM_BYTES).digest()


def replicas(ranks: int) -> tuple[Item, ...]:
    """DDP: all ranks hold all."""
    everyone = tuple(range(ranks))
    return (*(Item(f"w{each}", everyone, each, 0) for each in everyone), Item("step", everyone, 0))


def shards(ranks: int, copies: int = 1) -> tuple[Item, ...]:
    """FSDP, or HSDP with ``copies``: chunk c lies on ranks c, c + ranks / copies, and so on."""
    chunks = ranks // copies
    holders = [tuple(range(each, ranks, chunks)) for each in range(chunks)]
    return tuple(Item("w", holders[each], holders[each][each % copies], each, chunks) for each in range(chunks))


def unruly(ranks: int) -> tuple[Item, ...]:
    """Each rank has something of its own that the rule takes for a replica, written by another."""
    return (*replicas(ranks), *(Item(f"own{each}", (each,), None, 0) for each in range(ranks)))


@dataclass(frozen=True)
class Turn:
    """One save of each attempt."""

    url: CheckpointURL = ONE
    overwrite: bool = False


@dataclass
class World:
    """The job, and what its ranks report.

    Args:
        ranks: number of ranks.
        items: state of the ranks.
        turns: saves of each attempt, one after the other.
        rank_timeout: see `JointSave`.
        knows_before: whether each rank knows what all held before the first save, from a save before it.
        signs: whether ranks say what they hold before they write.
        overlaps: whether a rank begins its saves without waiting for the one before.
        attempt_of: the attempts, by number.
        newest_stays: whether their identities say which attempt is newer.
    """

    ranks: int
    items: tuple[Item, ...]
    turns: tuple[Turn, ...]
    rank_timeout: float = 3.0
    knows_before: bool = False
    signs: bool = True
    overlaps: bool = False
    attempt_of: Callable[[int], Attempt] = lambda number: Attempt("run", (number,), "", None, 0, 0)
    newest_stays: bool = True
    reports: list[tuple[Actor, Claim, Turn, str | Exception, str | None]] = field(default_factory=list)
    """Of each rank that came to the end of a save: who, which, what it said (save id or error), and the commit that
    stood at the URL then."""
    claims: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Attempt and turn by id of the save."""

    def __post_init__(self) -> None:
        for attempt in range(4):
            for turn in range(len(self.turns)):
                self.claims.setdefault(self.claim(attempt, turn).save, (attempt, turn))

    def job(self, attempt: int) -> Mapping[str, Callable[[Actor], object]]:
        """What the ranks of an attempt do."""
        turns = range(len(self.turns))
        if self.overlaps:
            return {
                f"rank{rank}.{turn}": self._work(rank, attempt, [turn]) for rank in range(self.ranks) for turn in turns
            }
        return {f"rank{rank}": self._work(rank, attempt, turns) for rank in range(self.ranks)}

    def claim(self, attempt: int, turn: int) -> Claim:
        """The claim of a save."""
        url = self.turns[turn].url
        number = sum(each.url == url for each in self.turns[: turn + 1])
        return claim_of(replace(self.attempt_of(attempt), world_size=self.ranks), str(url), number, turn)

    def is_needed(self, adversary: Adversary, actor: Actor) -> bool:
        """Whether an actor of the first attempt holds what no other living one does."""
        rank = adversary.actors.index(actor)
        living = {number for number, each in enumerate(adversary.actors) if not each.killed and each is not actor}
        return any(rank in each.holders and not living.intersection(each.holders) for each in self.items)

    def held_by(self, rank: int) -> dict[int, Item]:
        """What a rank holds, by hash."""
        return {item_hash(each.planned): each for each in self.items if rank in each.holders}

    def _work(self, rank: int, attempt: int, turns: Sequence[int]) -> Callable[[Actor], object]:
        def work(actor: Actor) -> None:
            known = self.knows_before
            for turn in turns:
                what = self.turns[turn]
                saving = _Saving(self, actor, rank, attempt, turn, known)
                outcome: str | Exception
                try:
                    outcome = saving.save()
                except errors.DcpS3Error as error:
                    outcome = error
                known = isinstance(outcome, str)
                stood = find_commit(actor.adversary.stored, saving.joint)
                self.reports.append((actor, saving.joint.claim, what, outcome, stood))

        return work


class _Saving:
    """One rank in one save, as the writer does it."""

    def __init__(self, world: World, actor: Actor, rank: int, attempt: int, turn: int, known: bool) -> None:
        self._world, self._actor, self._rank, self._attempt, self._turn = world, actor, rank, attempt, turn
        self._known = known
        self._held = world.held_by(rank)
        digests = [digest_of(world.held_by(each)) for each in range(world.ranks)]
        what = world.turns[turn]
        self.joint = JointSave(
            what.url, world.claim(attempt, turn), rank, what.overwrite, world.rank_timeout,
            before=lambda: digests if known else None,
        )  # fmt: skip
        clock = Clock(actor.now, actor.sleep)
        self._participant = Participant(actor.store, self.joint, clock, readers=1)

    def save(self) -> str:
        persistently(self._participant.begin)
        if self._participant.committed is None:
            if self._world.signs:  # as `alive` does it, in a thread of its own
                path = intent_object(self.joint.save, self._rank, digest_of(self._held))
                persistently(lambda: self._actor.store.put(self.joint.url.key(path), b"0"))
            mine = [hash_ for hash_, item in self._held.items() if item.writer == self._rank]
            part = self._write(mine, 0)
            persistently(lambda: self._participant.publish(part))
        return self._participant.wait(self._write)

    def _write(self, hashes: Sequence[int], number: int) -> Part:
        path = data_object(self._rank, number, new_nonce())
        items = [self._held[each] for each in hashes]
        data = b"".join(each.bytes_in(self._attempt, self._turn) for each in items)
        if items:
            persistently(lambda: self._actor.store.put(self.joint.url.key(path), data))
        written = tuple(
            WrittenItem(
                each.planned.index,
                each.planned.tensor_data,
                make_storage_info(path, _ITEM_BYTES * at, _ITEM_BYTES),
            )
            for at, each in enumerate(items)
        )
        tells = self._rank == 0 or number > 0
        facts = make_facts(
            started_at=time.time(), throttled=0, metrics={"turn": self._turn} if tells else None, extra=None
        )
        objects = (ObjectEntry(path, len(data), None),) if items else ()
        return Part(
            self.joint.save, self._rank, self._world.ranks, written, objects,
            frozenset(self._held), {each.fqn: (each.fqn,) for each in items}, number, facts,
        )  # fmt: skip


def persistently(request: Callable[[], T]) -> T:
    """The answer of a request that is repeated a few times."""
    for _ in range(_TRIES - 1):
        with contextlib.suppress(errors.TransferError):
            return request()
    return request()


# --- playing ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def repeatable() -> Iterator[None]:
    """Random names are counted."""
    counted = itertools.count(1)
    names = mock.Mock(token_hex=lambda length: f"{next(counted):0{2 * length}x}"[::-1])
    with mock.patch("dcp_s3.format.layout.secrets", names):
        yield


def play(world: World, moves: Sequence[Move], *, clean: bool = False, **options: Any) -> tuple[World, Adversary]:
    """Play moves against a new world.

    Args:
        world: as it is before.
        moves: what the adversary does.
        clean: whether nothing must be left over.
        options: for the adversary.

    Returns:
        The world after it, and the adversary.

    Raises:
        Violation: something does not hold; with the story of how it came about.
    """
    world = replace(world, reports=[])
    invariants = Invariants(world)
    with repeatable(), Adversary(world.job, check=invariants.check, **options) as adversary:
        try:
            adversary.play(moves)
            invariants.check_reports()
            if clean:
                invariants.check_clean(adversary)
            for each in adversary.actors:
                if each.error is not None:
                    raise Violation(f"{each.name} fails with {each.error!r}") from each.error
        except AssertionError as error:
            raise type(error)(f"{error}\n{adversary.story}") from error
    return world, adversary
