"""Explores joint saves: every interleaving of the operations of a few processes, with a few faults; checks each state.

The processes run the generators of `dcp_s3.coordination.protocol`, one operation at a time in any order, so a stalled
one is one that is not stepped. Faults: ``crash`` (a process is gone at any operation), ``lost`` (no answer; the write
arrives at any time later, or never), ``cut`` (the store is out of reach until the time of the save is over, and perhaps
longer; the rank lives on), ``fail`` (an upload fails for good), ``suspect`` (a live rank is taken for dead). That a
dead, ended or passed rank is taken for dead is free.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from dcp_s3.coordination import protocol, values
from dcp_s3.coordination.identity import Attempt
from dcp_s3.coordination.protocol import COMMITTED, LOST, Get, Put, Task, Wait
from dcp_s3.coordination.values import CLAIM, COMMITTING, METADATA, Found, Key, Merged
from tests.coordination import model
from tests.coordination.model import FAULTS, JOINT, BrokenError, Checkpoint, Config, Gate, Part, State

DEAD = -1
_THROWN = {
    "cut": protocol.UnreachableError,
    "fail": lambda: protocol.FailedError("it failed"),
    "gone": lambda: protocol.FailedError("it is gone"),
}
_STALE = {
    "take_part": ("found", "now", "present", "missing", "silent", "roll", "verdict", "part"),
    "begin": ("found", "what", "replaces", "last", "claim"),
    "withdraw": ("found", "what", "replaces", "last", "claim"),
    "settle": ("found", "claim"),
}
"""Variables that are set before they are read again, while the claim is asked for: they do not tell states apart."""


@dataclass
class Node:
    """Where a process stands: the answers that led there, and what it asks for (None: it has ended)."""

    path: tuple[tuple[str, Any], ...]
    pending: Any
    at: int = 0
    passed: int = 0
    is_leaving: bool = False


class World(model.Storage):
    """One configuration."""

    part_id = staticmethod(lambda nonce: nonce)
    reads_intents = True  # a roll call sees by itself that some are not there

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.nodes: list[Node] = []
        self.node_of: dict[Any, int] = {}
        self.steps: dict[Any, int] = {}
        self.specs: list[tuple[Any, Any, Any]] = [
            (start, rank, script) for start in config.starts for rank, script in enumerate(start.calls)
        ]
        if config.prune:
            self.specs.append((None, None, None))
        self.splits: set[str] = set()

    # --- processes

    def make(self, spec: int) -> tuple[model.Rank | None, Any]:
        start, rank, script = self.specs[spec]
        if start is None:
            return None, model.prune(frozenset(range(max(len(each.calls) for each in self.config.starts))))
        attempt = Attempt("", (), str(start.token), float(start.token), len(start.calls), rank)
        numbered, process = self.config.numbered, f"{start.name}{rank}"
        me = model.Rank(rank, attempt, process, self.config.overwrite, index=spec, is_numbered=numbered)
        return me, model.live(me, script)

    def step(self, spec: int, node: int | None = None, answer: Any = None, thrown: str = "") -> int:
        """The node after an answer; without a node, the first one of a process."""
        last = ("throw", thrown) if thrown else ("is", answer)
        if (spec, node, last) in self.steps:
            return self.steps[spec, node, last]
        path = () if node is None else (*self.nodes[node].path, last)
        me, generator = self.make(spec)
        try:
            pending = next(generator)
            for how, value in path:
                if me is not None and value == "cut" and how == "throw":
                    me.is_leaving = True
                pending = generator.throw(_THROWN[value]()) if how == "throw" else generator.send(value)
        except StopIteration:
            pending = None
        except (AttributeError, TypeError, KeyError) as error:
            raise BrokenError(f"(d) a process fails: {error!r}") from error
        frames, each = [], generator
        while pending is not None and each is not None:
            frames.append(each.gi_frame)
            each = each.gi_yieldfrom
        is_asking = bool(frames) and frames[-1].f_code.co_name == "_get_claim"
        seen = [repr((spec, None if me is None else me.memory))]
        for frame in frames:
            name = frame.f_code.co_name
            hidden = ("me", *(_STALE.get(name, ()) if is_asking else ()))
            seen.append(
                repr((name, frame.f_lasti, sorted(each for each in frame.f_locals.items() if each[0] not in hidden)))
            )
        key = (tuple(seen), pending)
        if key not in self.node_of:
            self.node_of[key] = len(self.nodes)
            self.nodes.append(Node(path, pending, *(() if me is None else (me.at, me.passed, me.is_leaving))))
        self.steps[spec, node, last] = self.node_of[key]
        return self.node_of[key]

    def is_gone(self, node: int) -> bool:
        return node == DEAD or self.nodes[node].pending is None

    def mates(self, state: State, spec: int) -> list[tuple[int, int]]:
        """Rank and node of the others of a start."""
        start = self.specs[spec][0]
        others = (each for each, of in enumerate(self.specs) if of[0] is start and each != spec)
        return [(self.specs[each][1], state.nodes[each]) for each in others]

    def is_open(self, state: State, spec: int, gate: Gate) -> bool:
        start = self.specs[spec][0]
        if self.config.apart and gate.moment == 1:
            for each, of in enumerate(self.specs):
                if of[0] is not None and of[0].name < start.name and not self.is_gone(state.nodes[each]):
                    return False
        live = [self.nodes[node] for _, node in self.mates(state, spec) if not self.is_gone(node)]
        return not self.config.lockstep or all(mate.passed >= gate.moment - 1 for mate in live)

    def advance(self, state: State) -> None:
        """Do what is no operation on the store."""
        is_moving = True
        while is_moving:
            is_moving = False
            for spec, node in enumerate(state.nodes):
                pending = None if node == DEAD else self.nodes[node].pending
                if isinstance(pending, model.Told):
                    self.hear(state, *self.specs[spec][:2], pending)
                elif not isinstance(pending, Gate) or not self.is_open(state, spec, pending):
                    continue
                state.nodes[spec] = self.step(spec, node)
                is_moving = True

    def find_free(self, state: State, spec: int, wait: Wait) -> int | None:
        """The lowest of the ranks that are waited for that does not come any more."""
        if self.specs[spec][0] is None:
            ranks = (node for each, node in enumerate(state.nodes) if self.specs[each][0] is not None)
            return 0 if all(map(self.is_gone, ranks)) else None
        at = self.nodes[state.nodes[spec]].at
        free = [rank for rank in wait.ranks if rank >= len(self.specs[spec][0].calls)]
        for rank, node in self.mates(state, spec):
            if rank in wait.ranks and (self.is_gone(node) or self.nodes[node].passed >= at):
                free.append(rank)
        return min(free, default=None)

    # --- the store

    def beginning(self) -> State:
        budget = (self.config.faults, *(self.config.caps.get(each, 0) for each in FAULTS))
        state = State({}, [], (), budget)
        if self.config.there:
            kept, store = [], dict[Key, Any]()
            for name in ("0" * 16, "f" * 16):
                keys = [Key("data", name + f"{rank}", rank) for rank in range(2)]
                parts = tuple(Part(rank, name, (name, 0), (keys[rank],)) for rank in range(2))
                kept.append(Checkpoint(name, name + "0", parts))
                store |= {Key("merged", kept[-1].save_id): kept[-1], **{keys[part.rank]: part.items for part in parts}}
            old, new = kept
            shown = [old, new] if self.config.there == "done" else [old]
            attempt = Attempt("", (), "0", 0.0, 2, 0)
            last = values.open_claim(attempt, new.nonce, (0, 0, 1), None, str(self.body(old)), old.nonce)
            store |= {CLAIM: replace(last, state=COMMITTING, save_id=new.save_id), METADATA: shown[-1]}
            state.store = {key: self.body(value) for key, value in store.items()}
            state.decisions = tuple((each.nonce, (each.nonce, 0)) for each in kept)
            state.shown = tuple(each.nonce for each in shown)
        state.nodes = [self.step(spec) for spec in range(len(self.specs))]
        self.advance(state)
        return state

    def carry_out(self, state: State, spec: int, operation: Any) -> Any:
        """The answer to an operation that is no Put, no Wait; ``gone`` is thrown."""
        store, start, rank = state.store, *self.specs[spec][:2]
        if isinstance(operation, Get):
            key = METADATA if operation.key.kind == "checkpoint" else operation.key
            body = self.there(store, key)
            if body is None or operation.key.kind == "checkpoint":
                return body
            body = body.nonce if key == METADATA else body
            return Found(Merged(key.id, body) if key.kind == "merged" else body, str(store[key]))
        if isinstance(operation, model.ListAll):
            return tuple(sorted(store))
        if isinstance(operation, model.Delete):
            return self.delete(store, operation.keys)
        claim = operation.claim
        intents = frozenset(key.rank for key in store if key[:2] == ("intent", claim.nonce))
        has_all = len(intents) == claim.world_size
        if isinstance(operation, protocol.Look):
            parts = frozenset(key.rank for key in store if key[:2] == ("part", self.part_id(claim.nonce)))
            return protocol.Present(intents if self.reads_intents else frozenset(range(claim.world_size)), parts)
        if operation.what == "join":
            return values.Intent("", 0, "all" if self.config.replicas else str(rank))
        if operation.what == "write":
            items = (start.name, self.nodes[state.nodes[spec]].at)
            data = Key("data", f"{claim.nonce}{start.name}{rank}", operation.rank)
            store[data] = self.body(items)
            return b"" if claim.state == values.OPEN else Part(operation.rank, f"{start.name}{rank}", items, (data,))
        if operation.what == "call_roll":
            return "" if has_all or not self.reads_intents else "gone"
        if operation.what == "merge":
            parts = [
                self.there(store, Key("part", self.part_id(claim.nonce), each)) for each in range(claim.world_size)
            ]
            if None in parts:
                return "gone"
            checkpoint = Checkpoint(claim.nonce, f"{claim.nonce}{start.name}{rank}", tuple(parts))
            store[Key("merged", checkpoint.save_id)] = self.body(checkpoint)
            return Merged(checkpoint.save_id, checkpoint)  # type: ignore[arg-type]
        if METADATA in store and self.bodies[store[METADATA]].nonce == claim.nonce:  # clean
            of_save = [key for key in store if key.kind in JOINT and key.id.startswith(claim.nonce)]
            self.delete(store, [key for key in of_save if key.kind != "data"])
        return None

    # --- moves

    def moves(self, state: State) -> Iterator[tuple[int | None, Any, str]]:
        """All that can happen next: a process, how its operation is answered, and the fault that it takes."""
        can = {fault for fault, left in zip(FAULTS, state.left[1:], strict=True) if left and state.left[0]}
        asked = {spec: self.nodes[node].pending for spec, node in enumerate(state.nodes) if not self.is_gone(node)}
        # What is seen by nobody else at that time is done at once: its order does not matter.
        tasks = ("join",) if self.config.prune else ("join", "write", "call_roll", "merge")
        private = [spec for spec, each in asked.items() if isinstance(each, Task) and each.what in tasks]
        for spec in private[:1] or asked:
            operation, is_rank = asked[spec], self.specs[spec][0] is not None
            if not isinstance(operation, Gate):
                yield spec, "", ""
            if isinstance(operation, Wait):
                if self.find_free(state, spec, operation) is not None:
                    yield spec, "over", ""
                elif "suspect" in can:
                    yield spec, "suspect", "suspect"
            if not is_rank:
                continue
            if isinstance(operation, Put) and "lost" in can:
                yield spec, LOST, "lost"
            if isinstance(operation, Task) and operation.what == "write" and "fail" in can:
                yield spec, "fail", "fail"
            if "crash" in can:
                yield spec, "crash", "crash"
            is_leaving = self.nodes[state.nodes[spec]].is_leaving
            if not isinstance(operation, Gate) and (is_leaving or "cut" in can):
                yield spec, "cut", "" if is_leaving else "cut"
        for index in range(0 if private else len(state.air)):
            yield None, index, ""

    def move(self, state: State, spec: int | None, how: Any, fault: str = "") -> State:
        new = state.copy()
        if spec is None:
            key, body, expect = state.air[how]
            new.air = state.air[:how] + state.air[how + 1 :]
            self.apply(new, key, self.bodies[body], expect)
            return new
        node, answer, thrown = new.nodes[spec], None, ""
        operation = self.nodes[node].pending
        if how in ("cut", "fail"):
            thrown = how
        elif how == LOST:
            new.air = tuple(sorted((*new.air, (operation.key, self.body(operation.body), operation.expect))))
            answer = LOST
        elif isinstance(operation, Put):
            answer = self.apply(new, *operation)
        elif isinstance(operation, Wait):
            free = self.find_free(state, spec, operation) if how == "over" else None
            answer = min(operation.ranks) if how == "suspect" else free
        elif how != "crash":
            answer = self.carry_out(new, spec, operation)
            thrown = "gone" if answer == "gone" else ""
        new.nodes[spec] = DEAD if how == "crash" else self.step(spec, node, None if thrown else answer, thrown)
        if fault:
            spent = (0, 1 + FAULTS.index(fault))
            new.left = tuple(left - (number in spent) for number, left in enumerate(new.left))
        self.advance(new)
        return new

    def label(self, state: State, spec: int | None, how: Any) -> str:
        if spec is None:
            return f"      late: {state.air[how]}"
        return f"      {self.specs[spec][:2]} {str(self.nodes[state.nodes[spec]].pending)[:200]} {how}"

    def settle(self, state: State, bound: int = 80) -> None:
        """Run fairly without further faults: all live processes end, and what is left can be deleted."""
        for _ in range(bound):
            is_moving = False
            for spec in range(len(self.specs)):
                node = state.nodes[spec]
                operation = None if self.is_gone(node) else self.nodes[node].pending
                if operation is not None and not isinstance(operation, Gate):
                    is_over = isinstance(operation, Wait) and self.find_free(state, spec, operation) is not None
                    state, is_moving = self.move(state, spec, "over" if is_over else ""), True
            if not is_moving:
                break
        else:
            raise BrokenError(f"(d) still at work after {bound} of its own steps")
        if not all(map(self.is_gone, state.nodes)):
            raise BrokenError("(d) a rank never comes to its next call")
        told: dict[Any, set[str]] = {}  # ranks may hear different things of one moment
        for start, moment, _, verdict, _ in state.told:
            told.setdefault((start, moment), set()).add(verdict)
        self.splits |= {"+".join(sorted(each)) for each in told.values() if COMMITTED in each and len(each) > 1}
        state = state.copy()
        for _ in range(2):  # prunes, when nobody saves
            generator, answer = model.prune(frozenset(range(2))), None
            with contextlib.suppress(StopIteration):
                while True:
                    operation = generator.send(answer)
                    if isinstance(operation, Put):
                        answer = self.apply(state, *operation)
                    else:
                        answer = 0 if isinstance(operation, Wait) else self.carry_out(state, 0, operation)
        there, claim = self.there(state.store, METADATA), self.there(state.store, CLAIM)
        kept = {CLAIM, METADATA} | (there.named if there is not None else set())
        if left := sorted(state.store.keys() - kept):
            raise BrokenError(f"(e) never deleted: {left}")
        if there is not None:
            self.see_whole(state.store, there)
        is_lost = claim is not None and claim.state == COMMITTING and (there is None or there.nonce != claim.nonce)
        if is_lost and any(verdict == COMMITTED and nonce == claim.nonce for *_, verdict, nonce in state.told):
            raise BrokenError("(b) told committed, and it is not there")

    def explore(self, limit: int | None = None) -> tuple[int, bool]:
        """All states. Returns their number, and whether these are all."""
        limit = self.config.limit if limit is None else limit
        first = self.beginning()
        came: dict[int, Any] = {first.key(): None}
        stack = [(first, first.key())]
        while stack and len(came) <= limit:
            state, key = stack.pop()
            label = "      (then fairly, without faults)"
            try:
                if key % self.config.sample == 0:
                    self.settle(state)
                is_end = True
                for spec, how, fault in self.moves(state):
                    label = self.label(state, spec, how)
                    new = self.move(state, spec, how, fault)
                    of = new.key()
                    is_end = is_end and of == key
                    if of not in came:
                        came[of] = (key, label)
                        stack.append((new, of))
                if is_end and key % self.config.sample:
                    self.settle(state)
            except BrokenError as error:
                labels = [label]
                while came[key] is not None:
                    key, label = came[key]
                    labels.append(label)
                raise BrokenError("\n".join([str(error), *reversed(labels)])) from error
        return len(came), not stack

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
                    faults, plain = ([each for each in moves if bool(each[2]) is of] for of in (True, False))
                    chosen = draw.choice(faults) if faults and draw.random() < 0.04 else draw.choice(plain or moves)
                    labels.append(self.label(state, *chosen[:2]))
                    state = self.move(state, *chosen)
                    seen.add(state.key())
                    if draw.random() < 0.01:
                        self.settle(state)
                self.settle(state)
            except BrokenError as error:
                raise BrokenError("\n".join([str(error), *labels])) from error
        return len(seen)
