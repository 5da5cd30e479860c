"""What is explored: ranks that train and save, and a prune beside them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from dcp_s3.coordination import protocol, values
from dcp_s3.coordination.protocol import COMMITTED, UNKNOWN, Get, Wait
from dcp_s3.coordination.values import ABORTED, CLAIM, COMMITTING, METADATA, Claim, Key, Merged, Number

ANY = "*"
"""Condition of a write, only of broken protocols."""
FAULTS = ("crash", "lost", "cut", "fail", "suspect")
JOINT = ("intent", "part", "roll", "merged", "data")
"""Kinds of keys that have a save's nonce."""


class Part(NamedTuple):
    rank: int
    by: str
    items: Any
    keys: tuple[Key, ...]


class Checkpoint(NamedTuple):
    """What is in ``.metadata``, and in the object that is to become it."""

    nonce: str
    save_id: str
    parts: tuple[Part, ...]

    @property
    def named(self) -> set[Key]:
        return {key for part in self.parts for key in part.keys}


class Gate(NamedTuple):
    """A rank has come to a moment of the training."""

    moment: int


class Told(NamedTuple):
    moment: int
    verdict: str
    nonce: str | None


class ListAll(NamedTuple):
    """All keys."""


class Delete(NamedTuple):
    keys: tuple[Key, ...]


@dataclass
class Rank(protocol.Member):
    """A rank with what the explorer must know of it, and the protocol does not."""

    index: int = 0
    is_numbered: bool = True
    at: int = 0
    passed: int = 0
    era: int = 0
    drawn: int = 0
    counts: dict[tuple[int, int], int] = field(default_factory=dict)
    undecided: dict[Number, int | None] = field(default_factory=dict)
    is_leaving: bool = False

    def draw(self) -> str:
        self.drawn += 1
        return f"{self.index:08x}{self.drawn + self.index:08x}"

    def count(self, step: int | None) -> Number:
        key = self.era, step or 0
        self.counts[key] = self.counts.get(key, 0) + 1
        number = self.era, step or 0, self.counts[key]
        self.undecided[number] = step
        return number

    def hear(self, number: Number | None, verdict: str) -> None:
        if number is not None and verdict != UNKNOWN:
            self.undecided.pop(number, None)

    @property
    def memory(self) -> tuple[Any, ...]:
        """All that it remembers, to tell states apart."""
        counted = (frozenset(self.counts.items()), frozenset(self.undecided.items()))
        return (frozenset(self.left), self.intent, self.at, self.passed, self.era, self.drawn, self.is_leaving, counted)


def live(me: Rank, calls: tuple[tuple[str, int, int | None], ...]) -> protocol.Steps[None]:
    """A rank's life: one call at each moment. ``skip``: it fails before the library is called."""
    for kind, moment, step in calls:
        me.at, me.is_leaving = moment, False
        yield Gate(moment)
        verdict, nonce = None, None
        if kind == "save":
            number = me.count(step) if me.is_numbered else None
            verdict, nonce = yield from protocol.save(me, number, step)
            me.hear(number, verdict)
        elif kind in ("fail", "restore"):
            verdict = yield from _withdraw_all(me, kind, step)
        me.passed = moment
        if verdict is not None:
            yield Told(moment, verdict, nonce)


def _withdraw_all(me: Rank, kind: str, step: int | None) -> protocol.Steps[str]:
    """As `processes.withdraw` and `processes.end_era` do."""
    if kind == "fail":
        me.count(step)
    else:
        me.era += 1
    verdict = "restored"
    for number, of in list(me.undecided.items()) if kind == "restore" else list(me.undecided.items())[-1:]:
        try:
            found = yield from protocol.withdraw(me, number, of, "why", is_new=kind == "fail")
        except protocol.UnreachableError:
            verdict = UNKNOWN
        else:
            me.hear(number, found)
            verdict = found if kind == "fail" else verdict
    return verdict


def prune(everybody: frozenset[int]) -> protocol.Steps[None]:
    """Delete what no checkpoint names and no save that may still commit has written. By anybody, at any time."""
    names = yield ListAll()  # before the look at the claim: what is listed was claimed before
    found = yield from protocol.settle()
    if found is not None and found.body.is_undecided and (yield Wait(everybody, 1.0)) is not None:
        found = yield from protocol.settle(why="older than the grace period")
    if found is None:
        return
    there = yield Get(Key("checkpoint"))
    leftovers = tuple(name for name in names if name.kind in JOINT and is_leftover(name, found.body, there))
    if leftovers:
        yield Delete(leftovers)


def is_leftover(key: Key, claim: Claim, there: Checkpoint | None) -> bool:
    nonce = key.id[: values.NONCE_DIGITS]
    if there is not None and there.nonce == nonce:
        return key not in there.named
    return claim.nonce != nonce or claim.state == ABORTED


@dataclass(frozen=True)
class Start:
    """One start of the job: the calls of each rank; a step of None is not known."""

    name: str
    token: int
    calls: tuple[Any, ...]


@dataclass(frozen=True)
class Config:
    name: str
    starts: tuple[Start, ...]
    faults: int = 0
    caps: dict[str, int] = field(default_factory=dict)  # of each fault; not named: none
    numbered: bool = True
    lockstep: bool = False  # no rank comes to a moment before all live ranks have passed the moment before
    apart: bool = False  # a start begins when all processes of the one before are gone
    overwrite: bool = True
    replicas: bool = False
    there: str = ""  # "", "done": a checkpoint lies there; "decided": its .metadata is not written yet
    prune: bool = False
    sample: int = 40  # one state in so many is run to its end without further faults
    limit: int = 450_000  # states


# --- the store, and what must hold of it ----------------------------------------------------------------


class BrokenError(Exception):
    """An invariant does not hold."""


@dataclass
class State:
    store: dict[Key, int]  # ids of bodies
    nodes: list[int]  # by process
    air: tuple[tuple[Key, int, str], ...]  # writes that were not answered, and may arrive
    left: tuple[int, ...]  # faults: in all, and of each
    told: frozenset[Any] = frozenset()
    decisions: tuple[tuple[str, Any], ...] = ()  # nonce and items, in order
    shown: tuple[str, ...] = ()  # nonces that .metadata had

    def copy(self) -> State:
        return replace(self, store=dict(self.store), nodes=list(self.nodes))

    def key(self) -> int:
        stored = frozenset(self.store.items())
        return hash((stored, tuple(self.nodes), self.air, self.left, self.told, self.decisions, self.shown))


class Storage:
    """The bodies of a world's objects, by id, which is their ETag. Watches what is written and deleted."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.bodies: list[Any] = []
        self.body_of: dict[Any, int] = {}

    def body(self, value: Any) -> int:
        if value not in self.body_of:
            self.body_of[value] = len(self.bodies)
            self.bodies.append(value)
        return self.body_of[value]

    def there(self, store: dict[Key, int], key: Key) -> Any:
        return self.bodies[store[key]] if key in store else None

    def apply(self, state: State, key: Key, body: Any, expect: str) -> str:
        """Carry out a write. Returns the answer; changes the store and what is known of it."""
        there = state.store.get(key)
        if expect not in (ANY, "" if there is None else str(there)):
            return protocol.TAKEN
        body = body.data if isinstance(body, Merged) else body
        old = None if there is None else self.bodies[there]
        if key == CLAIM:
            self.see_claim(state, old, body)
        elif key == METADATA:
            self.see_metadata(state, old, body)
        state.store[key] = self.body(body)
        return protocol.DONE

    def delete(self, store: dict[Key, int], keys: Any) -> None:
        there, claim = self.there(store, METADATA), self.there(store, CLAIM)
        named = set() if there is None else there.named
        if claim is not None and claim.state == COMMITTING and (there is None or there.nonce != claim.nonce):
            key = Key("merged", claim.save_id)
            named |= {key, *self.bodies[store[key]].named} if key in store else set()
        if lost := sorted(named & set(keys)):
            raise BrokenError(f"(e) deleted, and it is part of a checkpoint: {lost}")
        for key in keys:
            store.pop(key, None)

    def hear(self, state: State, start: Start, rank: int, told: Told) -> None:
        items, nonce = dict(state.decisions), told.nonce
        if told.verdict == COMMITTED and nonce is not None:
            if nonce not in state.shown:
                raise BrokenError(f"(c) told committed, and its .metadata was never there: {nonce}")
            if items[nonce] != (start.name, told.moment):
                raise BrokenError(f"(a) told committed, and the checkpoint holds {items[nonce]}")
        if told.verdict == protocol.REFUSED and sum(each.token == start.token for each in self.config.starts) == 1:
            raise BrokenError("(c) told that another process is in its place, and there is none")
        if told.verdict == ABORTED and nonce in items:
            raise BrokenError(f"(c) told aborted, and it is committed: {nonce}")
        state.told |= {(start.name, told.moment, rank, told.verdict, nonce)}

    def see_claim(self, state: State, old: Claim | None, new: Claim) -> None:
        there = self.there(state.store, METADATA)
        if old is not None and (new.began or 0) < (old.began or 0):
            raise BrokenError("(b) an older attempt replaces the claim of a newer one")
        is_done = there is not None and old is not None and there.nonce == old.nonce
        if old is not None and old.state == COMMITTING and new != old and (new.nonce == old.nonce or not is_done):
            raise BrokenError(f"(b) a decided commit is dropped: {old.nonce}")
        if new.state != COMMITTING or new == old:
            return
        if old is None or not old.is_undecided or old.nonce != new.nonce:
            raise BrokenError(f"(b) committed, and the claim was not open for it: {new.nonce}")
        checkpoint = self.bodies[state.store[Key("merged", new.save_id)]]
        self.see_whole(state.store, checkpoint, new.world_size)
        for name, moment, _, verdict, nonce in state.told:
            if verdict == ABORTED and nonce == new.nonce:
                raise BrokenError(f"(c) committed after a rank was told aborted: {nonce}")
            if verdict == "restored" and new.number is not None:
                start = next(start for start in self.config.starts if start.name == name)
                era = sum(kind == "restore" and at <= moment for kind, at, _ in start.calls[0])
                if float(start.token) == new.began and new.number[0] < era:
                    raise BrokenError("(b) committed after a rank of its attempt had restored")
        state.decisions = (*state.decisions, (new.nonce, checkpoint.parts[0].items))

    def see_whole(self, store: dict[Key, int], checkpoint: Checkpoint, world_size: int | None = None) -> None:
        ranks = sorted(part.rank for part in checkpoint.parts)
        if ranks != list(range(len(ranks) if world_size is None else world_size)):
            raise BrokenError(f"(a) parts of the wrong ranks: {ranks}")
        if len({part.items for part in checkpoint.parts}) != 1:
            raise BrokenError(f"(a) TORN: {[part.items for part in checkpoint.parts]}")
        if missing := sorted(checkpoint.named - store.keys()):
            raise BrokenError(f"(a) what is named is not there: {missing}")

    def see_metadata(self, state: State, old: Checkpoint | None, new: Checkpoint) -> None:
        decisions = [nonce for nonce, _ in state.decisions]
        if new.nonce not in decisions:
            raise BrokenError("(b) .metadata without a decision")
        if old is not None and decisions.index(new.nonce) < decisions.index(old.nonce):
            raise BrokenError("(b) an older checkpoint replaces a newer one")
        self.see_whole(state.store, new)
        state.shown = state.shown if new.nonce in state.shown else (*state.shown, new.nonce)
