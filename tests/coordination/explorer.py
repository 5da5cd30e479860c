"""Explores joint saves: every interleaving of the operations of a few processes, with a few faults; checks each state.

The processes run the generators of `dcp_s3.coordination.protocol`. A state is the store, what each process will do
next (its frames), writes that were not answered and may still arrive, faults left, verdicts told. Processes are stepped
one operation at a time in any order, so a stalled one is one that is not stepped. Faults: ``crash`` (a process is gone
at any operation), ``lost`` (no answer; the write arrives at any time later, or never), ``cut`` (the store is out of
reach until the time of the save is over, and perhaps longer; the rank lives on), ``fail`` (an upload fails for good),
``suspect`` (a live rank is taken for dead). That a dead, ended or passed rank is taken for dead is free.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dcp_s3.coordination import protocol, values
from dcp_s3.coordination.identity import Attempt
from dcp_s3.coordination.values import (
    ABORTED,
    CLAIM,
    COMMITTED,
    COMMITTING,
    LOST,
    METADATA,
    UNKNOWN,
    Claim,
    Found,
    Get,
    Key,
    Merged,
    Put,
    Wait,
)

ANY = "*"
"""Condition of a write, only of broken protocols."""
FAULTS = ("crash", "lost", "cut", "fail", "suspect")
JOINT = ("intent", "part", "roll", "merged", "data")
"""Kinds of keys that have a save's nonce."""


class BrokenError(Exception):
    """An invariant does not hold."""


# --- values of the model -----------------------------------------------------------------------------------


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


# --- the training that calls it ----------------------------------------------------------------------------


@dataclass
class Rank(values.Member):
    """A rank with what the explorer must know of it, and the protocol does not."""

    start: str = "a"
    index: int = 0
    is_numbered: bool = True
    at: int = 0
    passed: int = 0
    era: int = 0
    drawn: int = 0
    counts: dict[tuple[int, int], int] = field(default_factory=dict)
    undecided: dict[tuple[int, int, int], int | None] = field(default_factory=dict)
    is_leaving: bool = False

    def draw(self) -> str:
        self.drawn += 1
        return f"{self.index:08x}{self.drawn + self.index:08x}"

    def count(self, step: int | None) -> tuple[int, int, int]:
        key = self.era, step or 0
        self.counts[key] = self.counts.get(key, 0) + 1
        number = self.era, step or 0, self.counts[key]
        self.undecided[number] = step
        return number

    def hear(self, number: tuple[int, int, int] | None, verdict: str) -> None:
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
        except values.UnreachableError:
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
    claim = found.body
    there = yield Get(Key("checkpoint"))
    leftovers = tuple(name for name in names if name.kind in JOINT and is_leftover(name, claim, there))
    if leftovers:
        yield Delete(leftovers)


def is_leftover(key: Key, claim: Claim, there: Checkpoint | None) -> bool:
    nonce = key.id[: values.NONCE_DIGITS]
    if there is not None and there.nonce == nonce:
        return key not in there.named
    return claim.nonce != nonce or claim.state == ABORTED


# --- configurations ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Start:
    """One start of the job: the calls of each rank; a step of None is not known."""

    name: str
    token: int
    calls: tuple[Any, ...]
    world: int | None = None  # if not as many as there are calls


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


@dataclass
class Node:
    """Where a process stands: what it has asked for. Found again by replaying the answers that led there."""

    id: int
    parent: Node | None
    answer: Any
    pending: Any
    spec: int
    at: int = 0
    passed: int = 0
    is_leaving: bool = False


DEAD = -1
_STALE = {
    "take_part": ("found", "now", "present", "missing", "silent", "failed", "roll", "verdict", "part", "written"),
    "begin": ("found", "what", "replaces", "last", "claim"),
    "withdraw": ("found", "what", "replaces", "last", "claim"),
    "settle": ("found", "claim"),
}
"""Variables that are set before they are read again, while the claim is asked for: they do not tell states apart."""


class World:
    """One configuration. A state is a list: store (ids of bodies by key), nodes by process, writes in the air, faults
    left, verdicts, decisions (nonce and items, in order), nonces that ``.metadata`` had."""

    part_id = staticmethod(lambda nonce: nonce)
    reads_intents = True  # a roll call sees by itself that some are not there

    def __init__(self, config: Config) -> None:
        self.config = config
        self.nodes: list[Node] = []
        self.node_of: dict[Any, Node] = {}
        self.steps: dict[Any, int] = {}
        self.bodies: list[Any] = []
        self.body_of: dict[Any, int] = {}
        self.specs: list[tuple[Any, Any, Any]] = [
            (start, rank, script) for start in config.starts for rank, script in enumerate(start.calls)
        ]
        if config.prune:
            self.specs.append((None, None, None))
        self.splits: set[str] = set()

    # processes

    def make(self, spec: int) -> tuple[Rank | None, Any]:
        start, rank, script = self.specs[spec]
        if start is None:
            return None, prune(frozenset(range(max(len(each.calls) for each in self.config.starts))))
        config = self.config
        world = start.world or len(start.calls)
        attempt = Attempt("", (), str(start.token), float(start.token), world, rank)
        process = f"{start.name}{rank}"
        me = Rank(rank, attempt, process, config.overwrite, start=start.name, index=spec, is_numbered=config.numbered)
        return me, live(me, script)

    def replay(self, node: Node) -> tuple[Rank | None, Any]:
        answers = []
        spec = node.spec
        while node.parent is not None:
            answers.append(node.answer)
            node = node.parent
        me, generator = self.make(spec)
        generator.send(None)
        for answer in reversed(answers):
            self.feed(me, generator, answer)
        return me, generator

    @staticmethod
    def feed(me: Rank | None, generator: Any, answer: Any) -> Any:
        try:
            if answer == "cut":
                if me is not None:
                    me.is_leaving = True
                return generator.throw(values.UnreachableError())
            return generator.send(answer[1] if isinstance(answer, tuple) and answer[:1] == ("is",) else answer)
        except (AttributeError, TypeError, KeyError) as error:
            raise BrokenError(f"(d) a process fails: {error!r}") from error

    def node(self, spec: int, parent: Node | None, answer: Any) -> int:
        """The node after an answer; the first one of a process if there is no parent."""
        me, generator = self.make(spec) if parent is None else self.replay(parent)
        try:
            pending = generator.send(None) if parent is None else self.feed(me, generator, answer)
        except StopIteration:
            pending = None
        frames: list[Any] = [spec]
        inner, each = [], generator
        while pending is not None and each is not None:
            inner.append(each.gi_frame)
            each = each.gi_yieldfrom
        for frame in inner:
            is_asking = inner[-1].f_code.co_name == "_get_claim"
            stale = _STALE.get(frame.f_code.co_name, ()) if is_asking else ()
            names = tuple(sorted((name, value) for name, value in frame.f_locals.items() if name not in ("me", *stale)))
            frames.append((frame.f_code.co_name, frame.f_lasti, names))
        frames.append(None if me is None else me.memory)
        key = (repr(frames), pending)
        found = self.node_of.get(key)
        if found is None:
            found = self.node_of[key] = Node(len(self.nodes), parent, answer, pending, spec)
            if me is not None:
                found.at, found.passed, found.is_leaving = me.at, me.passed, me.is_leaving
            self.nodes.append(found)
        return found.id

    def step(self, node: int, answer: Any) -> int:
        key = (node, answer)
        found = self.steps.get(key)
        if found is None:
            parent = self.nodes[node]
            found = self.steps[key] = self.node(parent.spec, parent, answer)
        return found

    # the store

    def body(self, value: Any) -> int:
        found = self.body_of.get(value)
        if found is None:
            found = self.body_of[value] = len(self.bodies)
            self.bodies.append(value)
        return found

    def beginning(self) -> list[Any]:
        store: dict[Key, Any] = {}
        decisions: tuple[Any, ...] = ()
        shown: tuple[str, ...] = ()
        if self.config.there:
            kept = []
            for name in ("0" * 16, "f" * 16):
                keys = [Key("data", name + f"{rank}", rank) for rank in range(2)]
                parts = tuple(Part(rank, name, (name, 0), (keys[rank],)) for rank in range(2))
                kept.append(Checkpoint(name, name + "0", parts))
            old, new = kept
            for each in kept:
                store[Key("merged", each.save_id)] = each
                store |= {key: part.items for part in each.parts for key in part.keys}
            is_done = self.config.there == "done"
            attempt = Attempt("", (), "0", 0.0, 2, 0)
            last = values.open_claim(attempt, new.nonce, (0, 0, 1), None, str(self.body(old)), old.nonce)
            store[CLAIM] = Claim(**{**vars(last), "state": COMMITTING, "save_id": new.save_id})
            store[METADATA] = new if is_done else old
            decisions = ((old.nonce, (old.nonce, 0)), (new.nonce, (new.nonce, 0)))
            shown = (old.nonce, new.nonce) if is_done else (old.nonce,)
        ids = {key: self.body(value) for key, value in store.items()}
        nodes = [self.node(spec, None, None) for spec in range(len(self.specs))]
        state = [ids, nodes, (), (self.config.faults, *self.caps()), frozenset(), decisions, shown]
        self.advance(state)
        return state

    def caps(self) -> tuple[int, ...]:
        return tuple(self.config.caps.get(each, 0) for each in FAULTS)

    @staticmethod
    def key(state: list[Any]) -> int:
        store, nodes, air, budget, told, decisions, shown = state
        return hash((frozenset(store.items()), tuple(nodes), air, budget, told, decisions, shown))

    def is_gone(self, node: int) -> bool:
        return node == DEAD or self.nodes[node].pending is None

    def mates(self, state: list[Any], spec: int) -> list[tuple[int, int]]:
        start = self.specs[spec][0]
        return [(each, state[1][each]) for each, of in enumerate(self.specs) if of[0] is start and each != spec]

    def is_open(self, state: list[Any], spec: int, gate: Gate) -> bool:
        start = self.specs[spec][0]
        if self.config.apart and gate.moment == 1:
            for each, of in enumerate(self.specs):
                if of[0] is not None and of[0].name < start.name and not self.is_gone(state[1][each]):
                    return False
        if not self.config.lockstep:
            return True
        mates = [self.nodes[node] for _, node in self.mates(state, spec) if not self.is_gone(node)]
        return all(mate.passed >= gate.moment - 1 for mate in mates)

    def advance(self, state: list[Any]) -> None:
        """Do what is no operation on the store."""
        nodes = state[1]
        is_moving = True
        while is_moving:
            is_moving = False
            for spec, node in enumerate(nodes):
                if node == DEAD:
                    continue
                pending = self.nodes[node].pending
                if isinstance(pending, Told):
                    self.hear(state, spec, pending)
                elif not isinstance(pending, Gate) or not self.is_open(state, spec, pending):
                    continue
                nodes[spec] = self.step(node, None)
                is_moving = True

    def hear(self, state: list[Any], spec: int, told: Told) -> None:
        start, rank, _ = self.specs[spec]
        if told.verdict == COMMITTED and told.nonce is not None and told.nonce not in state[6]:
            raise BrokenError(f"(c) told committed, and its .metadata was never there: {told.nonce}")
        items = dict(state[5])
        if told.verdict == COMMITTED and told.nonce is not None and items[told.nonce] != (start.name, told.moment):
            raise BrokenError(f"(a) told committed, and the checkpoint holds {items[told.nonce]}")
        twins = [each for each in self.config.starts if each.token == start.token]
        if told.verdict == values.REFUSED and len(twins) == 1:
            raise BrokenError("(c) told that another process is in its place, and there is none")
        if told.verdict == ABORTED and told.nonce in items:
            raise BrokenError(f"(c) told aborted, and it is committed: {told.nonce}")
        state[4] |= {(start.name, told.moment, rank, told.verdict, told.nonce)}

    def find_free(self, state: list[Any], spec: int, wait: Wait) -> int | None:
        """The lowest of the ranks that are waited for that does not come any more."""
        if self.specs[spec][0] is None:
            gone = [self.is_gone(node) for each, node in enumerate(state[1]) if self.specs[each][0] is not None]
            return 0 if all(gone) else None
        at = self.nodes[state[1][spec]].at
        free = [rank for rank in wait.ranks if rank >= len(self.specs[spec][0].calls)]
        for each, node in self.mates(state, spec):
            if self.specs[each][1] in wait.ranks and (self.is_gone(node) or self.nodes[node].passed >= at):
                free.append(self.specs[each][1])
        return min(free, default=None)

    # operations

    def apply(self, store: dict[Key, int], operation: Put, state: list[Any]) -> str:
        """Carry out a write. Returns the answer; changes the store and what is known of it."""
        key, body = operation.key, operation.body
        there = store.get(key)
        if operation.expect not in (ANY, "" if there is None else str(there)):
            return values.TAKEN
        if isinstance(body, Merged):
            body = body.data
        old = None if there is None else self.bodies[there]
        if key == CLAIM:
            self.see_claim(state, store, old, body)
        elif key == METADATA:
            self.see_metadata(state, store, old, body)
        store[key] = self.body(body)
        return values.DONE

    def see_claim(self, state: list[Any], store: dict[Key, int], old: Claim | None, new: Claim) -> None:
        there = None if METADATA not in store else self.bodies[store[METADATA]]
        if old is not None and (new.began or 0) < (old.began or 0):
            raise BrokenError("(b) an older attempt replaces the claim of a newer one")
        is_done = there is not None and old is not None and there.nonce == old.nonce
        if old is not None and old.state == COMMITTING and new != old and (new.nonce == old.nonce or not is_done):
            raise BrokenError(f"(b) a decided commit is dropped: {old.nonce}")
        if new.state == COMMITTING and new != old:
            if old is None or not old.is_undecided or old.nonce != new.nonce:
                raise BrokenError(f"(b) committed, and the claim was not open for it: {new.nonce}")
            checkpoint = self.bodies[store[Key("merged", new.save_id)]]
            self.see_whole(store, checkpoint, new)
            for name, moment, _, verdict, nonce in state[4]:
                if verdict == ABORTED and nonce == new.nonce:
                    raise BrokenError(f"(c) committed after a rank was told aborted: {nonce}")
                if verdict == "restored" and new.number is not None and self.lived(name, moment, new):
                    raise BrokenError("(b) committed after a rank of its attempt had restored")
            state[5] = (*state[5], (new.nonce, checkpoint.parts[0].items))

    def lived(self, name: str, moment: int, new: Claim) -> bool:
        """Whether what is committed was saved before this restore."""
        start = next(start for start in self.config.starts if start.name == name)
        era = sum(1 for kind, at, _ in start.calls[0] if kind == "restore" and at <= moment)
        return float(start.token) == new.began and new.number is not None and new.number[0] < era

    def see_whole(self, store: dict[Key, int], checkpoint: Checkpoint, claim: Claim | None = None) -> None:
        ranks = sorted(part.rank for part in checkpoint.parts)
        if ranks != list(range(len(ranks))) or (claim is not None and len(ranks) != claim.world_size):
            raise BrokenError(f"(a) parts of the wrong ranks: {ranks}")
        if len({part.items for part in checkpoint.parts}) != 1:
            raise BrokenError(f"(a) TORN: {[part.items for part in checkpoint.parts]}")
        if missing := sorted(checkpoint.named - store.keys()):
            raise BrokenError(f"(a) what is named is not there: {missing}")

    def see_metadata(self, state: list[Any], store: dict[Key, int], old: Checkpoint | None, new: Checkpoint) -> None:
        decisions = [nonce for nonce, _ in state[5]]
        if new.nonce not in decisions:
            raise BrokenError("(b) .metadata without a decision")
        if old is not None and decisions.index(new.nonce) < decisions.index(old.nonce):
            raise BrokenError("(b) an older checkpoint replaces a newer one")
        self.see_whole(store, new)
        state[6] = (*state[6], new.nonce) if new.nonce not in state[6] else state[6]

    def delete(self, store: dict[Key, int], keys: Any) -> None:
        there = store.get(METADATA)
        claim = self.bodies[store[CLAIM]] if CLAIM in store else None
        named = set() if there is None else self.bodies[there].named
        is_done = there is not None and claim is not None and self.bodies[there].nonce == claim.nonce
        if claim is not None and claim.state == COMMITTING and not is_done:
            key = Key("merged", claim.save_id)
            named |= {key, *self.bodies[store[key]].named} if key in store else set()
        if lost := sorted(named & set(keys)):
            raise BrokenError(f"(e) deleted, and it is part of a checkpoint: {lost}")
        for key in keys:
            store.pop(key, None)

    def carry_out(self, state: list[Any], spec: int, operation: Any) -> Any:
        """The answer to an operation that is no Put, no Wait."""
        store, start, rank = state[0], *self.specs[spec][:2]
        if isinstance(operation, Get):
            key = METADATA if operation.key.kind == "checkpoint" else operation.key
            found = store.get(key)
            if found is None:
                return None
            body = self.bodies[found]
            if operation.key.kind == "checkpoint":
                return body
            if key == METADATA:
                body = body.nonce
            return Found(Merged(key.id, body) if key.kind == "merged" else body, str(found))
        if isinstance(operation, ListAll):
            return tuple(sorted(store))
        if isinstance(operation, Delete):
            return self.delete(store, operation.keys)
        claim = operation.claim
        present = {kind: frozenset(key.rank for key in store if key[:2] == (kind, claim.nonce)) for kind in JOINT}
        if isinstance(operation, values.Look):
            parts = frozenset(key.rank for key in store if key[:2] == ("part", self.part_id(claim.nonce)))
            return values.Present(present["intent"], parts)
        if isinstance(operation, values.Join):
            return values.Intent("", 0, "all" if self.config.replicas else str(rank))
        if isinstance(operation, values.Write):
            items = (start.name, self.nodes[state[1][spec]].at)
            data = Key("data", f"{claim.nonce}{start.name}{rank}", operation.rank)
            store[data] = self.body(items)
            return b"" if claim.state == values.OPEN else Part(operation.rank, f"{start.name}{rank}", items, (data,))
        if isinstance(operation, values.CallRoll):
            return "" if len(present["intent"]) == claim.world_size or not self.reads_intents else None
        if isinstance(operation, values.Merge):
            keys = [Key("part", self.part_id(claim.nonce), each) for each in range(claim.world_size)]
            if any(key not in store for key in keys):
                return None
            checkpoint = Checkpoint(
                claim.nonce, f"{claim.nonce}{start.name}{rank}", tuple(self.bodies[store[key]] for key in keys)
            )
            store[Key("merged", checkpoint.save_id)] = self.body(checkpoint)
            return Merged(checkpoint.save_id, checkpoint)  # type: ignore[arg-type]
        if METADATA in store and self.bodies[store[METADATA]].nonce == claim.nonce:
            of_save = [key for key in store if key.kind in JOINT and key.id.startswith(claim.nonce)]
            self.delete(store, [key for key in of_save if key.kind != "data"])
        return None

    def answer(self, state: list[Any], spec: int, how: str = "") -> list[Any]:
        new = [dict(state[0]), list(state[1]), *state[2:]]
        store, nodes = new[0], new[1]
        node = nodes[spec]
        operation = self.nodes[node].pending
        if how == "crash":
            nodes[spec] = DEAD
        elif how == LOST:
            new[2] = tuple(sorted((*new[2], (operation.key, self.body(operation.body), operation.expect))))
            nodes[spec] = self.step(node, LOST)
        elif how == "cut":
            nodes[spec] = self.step(node, how)
        elif how == "fail":
            nodes[spec] = self.step(node, ("is", values.Failed("it failed")))
        elif isinstance(operation, Put):
            nodes[spec] = self.step(node, self.apply(store, operation, new))
        elif isinstance(operation, Wait):
            silent = self.find_free(state, spec, operation) if how == "over" else None
            silent = min(operation.ranks) if how == "suspect" else silent
            nodes[spec] = self.step(node, ("is", silent))
        else:
            nodes[spec] = self.step(node, ("is", self.carry_out(new, spec, operation)))
        self.advance(new)
        return new

    def arrive(self, state: list[Any], index: int) -> list[Any]:
        new = [dict(state[0]), list(state[1]), *state[2:]]
        key, body, expect = state[2][index]
        new[2] = state[2][:index] + state[2][index + 1 :]
        self.apply(new[0], Put(key, self.bodies[body], expect), new)
        return new

    def moves(self, state: list[Any]) -> Iterator[tuple[int | None, Any, str]]:
        """All that can happen next: a process, how its operation is answered, and the fault that it takes."""
        budget = dict(zip(("all", *FAULTS), state[3], strict=True))

        def can(fault: str) -> bool:
            return budget["all"] > 0 and budget[fault] > 0

        # What is seen by nobody else at that time is done at once: its order does not matter.
        private = [
            spec for spec, node in enumerate(state[1]) if node != DEAD and self.is_private(self.nodes[node].pending)
        ]
        for spec, node in enumerate(state[1]):
            if node == DEAD or (private and spec != private[0]):
                continue
            operation, is_rank = self.nodes[node].pending, self.specs[spec][0] is not None
            if operation is None:
                continue
            if isinstance(operation, Gate):
                if is_rank and can("crash"):
                    yield spec, "crash", "crash"
                continue
            yield spec, "", ""
            if isinstance(operation, Wait):
                if self.find_free(state, spec, operation) is not None:
                    yield spec, "over", ""
                elif can("suspect"):
                    yield spec, "suspect", "suspect"
            if not is_rank:
                continue
            if isinstance(operation, Put) and can("lost"):
                yield spec, LOST, "lost"
            if isinstance(operation, values.Write) and can("fail"):
                yield spec, "fail", "fail"
            if can("crash"):
                yield spec, "crash", "crash"
            if self.nodes[node].is_leaving:
                yield spec, "cut", ""
            elif can("cut"):
                yield spec, "cut", "cut"
        for index in range(0 if private else len(state[2])):
            yield None, index, ""

    def is_private(self, operation: object) -> bool:
        if self.config.prune:
            return isinstance(operation, values.Join)
        return isinstance(operation, (values.Join, values.Write, values.CallRoll, values.Merge))

    def move(self, state: list[Any], spec: int | None, how: Any, fault: str) -> list[Any]:
        if spec is None:
            return self.arrive(state, how)
        new = self.answer(state, spec, how)
        if fault:
            left = list(state[3])
            left[0] -= 1
            left[1 + FAULTS.index(fault)] -= 1
            new[3] = tuple(left)
        return new

    def label(self, state: list[Any], spec: int | None, how: Any) -> str:
        if spec is None:
            key, body, _ = state[2][how]
            return f"late: PUT {key} {brief(self.bodies[body])}"
        operation = self.nodes[state[1][spec]].pending
        start, rank, _ = self.specs[spec]
        body = brief(operation.body) if isinstance(operation, Put) else ""
        what = f"{type(operation).__name__.upper()} {operation.key.kind if isinstance(operation, Get | Put) else ''}"
        return f"{'prune' if start is None else f'{start.name}{rank}'} {what} {body} {how}"

    # runs

    def settle(self, state: list[Any], bound: int = 80) -> list[Any]:
        """Run fairly without further faults: all live processes end, and what is left can be deleted."""
        state = [dict(state[0]), list(state[1]), *state[2:]]
        for _ in range(bound):
            is_moving = False
            for spec in range(len(self.specs)):
                node = state[1][spec]
                if self.is_gone(node) or isinstance(self.nodes[node].pending, Gate):
                    continue
                operation = self.nodes[node].pending
                is_over = isinstance(operation, Wait) and self.find_free(state, spec, operation) is not None
                state = self.answer(state, spec, "over" if is_over else "")
                is_moving = True
            if not is_moving:
                break
        else:
            raise BrokenError(f"(d) still at work after {bound} of its own steps")
        if not all(self.is_gone(node) for node in state[1]):
            raise BrokenError("(d) a rank never comes to its next call")
        self.see_splits(state)
        store = dict(state[0])
        for _ in range(2):
            self.sweep(store, state)
        there = None if METADATA not in store else self.bodies[store[METADATA]]
        kept = {CLAIM, METADATA} | (there.named if there is not None else set())
        if left := sorted(store.keys() - kept):
            raise BrokenError(f"(e) never deleted: {left}")
        if there is not None:
            self.see_whole(store, there)
        claim = self.bodies[store[CLAIM]] if CLAIM in store else None
        if claim is not None and claim.state == COMMITTING:
            is_told = any(verdict == COMMITTED and of == claim.nonce for _, _, _, verdict, of in state[4])
            if is_told and (there is None or there.nonce != claim.nonce):
                raise BrokenError("(b) told committed, and it is not there")
        return state

    def sweep(self, store: dict[Key, int], state: list[Any]) -> None:
        """A prune, when nobody saves."""
        generator: Any = prune(frozenset(range(2)))
        run, answer = [store, *state[1:]], None
        with contextlib.suppress(StopIteration):
            while True:
                operation = generator.send(answer)
                if isinstance(operation, Put):
                    answer = self.apply(store, operation, run)
                else:
                    answer = 0 if isinstance(operation, Wait) else self.carry_out(run, 0, operation)

    def see_splits(self, state: list[Any]) -> None:
        """Note where ranks were told different things of one moment."""
        told: dict[Any, set[str]] = {}
        for start, moment, _, verdict, _ in state[4]:
            told.setdefault((start, moment), set()).add(verdict)
        self.splits |= {"+".join(sorted(each)) for each in told.values() if COMMITTED in each and len(each) > 1}

    def explore(self, limit: int | None = None) -> tuple[int, bool]:
        """All states. Returns their number, and whether these are all."""
        limit = self.config.limit if limit is None else limit
        first = self.beginning()
        key = self.key(first)
        came: dict[int, Any] = {key: None}
        stack = [(first, key)]
        while stack:
            state, key = stack.pop()
            last: Any = None
            try:
                if key % self.config.sample == 0:
                    self.settle(state)
                is_end = True
                for spec, how, fault in self.moves(state):
                    last = spec, how
                    new = self.move(state, spec, how, fault)
                    of = self.key(new)
                    if of == key:
                        continue
                    is_end = False
                    if of not in came:
                        came[of] = (key, self.label(state, spec, how))
                        stack.append((new, of))
                last = None
                if is_end and key % self.config.sample:
                    self.settle(state)
            except BrokenError as error:
                label = "(then fairly, without faults)" if last is None else self.label(state, *last)
                raise BrokenError(f"{error}\n{trace(came, key, label)}") from error
            if len(came) > limit:
                return len(came), False
        return len(came), True

    def wander(self, seed: int, runs: int) -> int:
        """Random walks. Returns the number of states seen."""
        draw, seen = random.Random(seed), set()
        for _ in range(runs):
            state, labels = self.beginning(), list[str]()
            try:
                for _ in range(300):
                    moves = list(self.moves(state))
                    if not moves:
                        break
                    faults = [each for each in moves if each[2]]
                    plain = [each for each in moves if not each[2]]
                    chosen = draw.choice(faults) if faults and draw.random() < 0.04 else draw.choice(plain or moves)
                    labels.append(self.label(state, *chosen[:2]))
                    state = self.move(state, *chosen)
                    seen.add(self.key(state))
                    if draw.random() < 0.01:
                        self.settle(state)
                self.settle(state)
            except BrokenError as error:
                raise BrokenError(f"{error}\n" + "\n".join(f"      {each}" for each in labels)) from error
        return len(seen)


def trace(came: dict[int, Any], key: int, last: str) -> str:
    labels = [last]
    while came[key] is not None:
        key, label = came[key]
        labels.append(label)
    return "\n".join(f"      {each}" for each in reversed(labels))


def brief(body: Any) -> str:
    if isinstance(body, Claim):
        return f"{body.state}({body.nonce})"
    if isinstance(body, Checkpoint):
        return f"of {body.nonce}: {[part.items for part in body.parts]}"
    return f"of {body.items}" if isinstance(body, Part) else ""
