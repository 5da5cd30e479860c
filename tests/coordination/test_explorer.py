"""Joint saves hold in every interleaving of a few ranks with a few faults; and broken protocols are found out."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from dcp_s3.coordination import protocol, values
from dcp_s3.coordination.identity import Attempt
from dcp_s3.coordination.protocol import COMMITTED, DONE, LOST, SUPERSEDED, UNKNOWN, Get, Member, Put
from dcp_s3.coordination.values import ABORTED, CLAIM, COMMITTING, METADATA, OPEN, Claim, Found, Key
from tests.coordination import model
from tests.coordination.explorer import World
from tests.coordination.model import ANY, BrokenError, Config, Start


def calls(*kinds: str, step: int | None = None) -> tuple[tuple[str, int, int | None], ...]:
    """Calls at moments 1, 2, ...; a kind may be followed by its step."""
    found = []
    for moment, kind in enumerate(kinds, 1):
        name, _, number = kind.partition(":")
        found.append((name, moment, int(number) if number else step))
    return tuple(found)


def both(script: Any, token: int = 1, name: str = "a") -> Start:
    return Start(name, token, (script, script))


ALL = {"crash": 2, "lost": 2, "cut": 2, "fail": 1, "suspect": 2}
ONE, TWO = calls("save"), calls("save", "save")
STEPS = calls("save:20", "save:30")
BACK = (calls("save", "restore", "save", step=20), calls("fail", "restore", "save", step=20))
REDO = (calls("save", "save", step=20), calls("fail", "save", step=20))
UNCOUNTED = (calls("save", "save"), calls("skip", "save"))
OLD, NEW = both(ONE), both(ONE, 2, "b")

CONFIGS = [
    Config("single", (OLD,), 2, ALL),
    Config("single-3-faults", (OLD,), 3, {"crash": 1, "lost": 1, "cut": 1, "fail": 1, "suspect": 2}),
    Config("overwrite", (OLD,), 2, ALL, there="done"),
    Config("overwrite-decided", (OLD,), 2, ALL, there="decided"),
    Config("no-overwrite", (OLD,), 2, ALL, there="decided", overwrite=False),
    Config("replicas", (OLD,), 2, ALL, replicas=True),
    Config(
        "replicas-lockstep", (Start("a", 1, UNCOUNTED),), 3, {"cut": 1, "suspect": 2}, numbered=False, lockstep=True,
        replicas=True,
    ),
    Config("two-saves", (both(TWO),), 1, ALL),
    Config("two-saves-lockstep", (both(TWO),), 1, ALL, numbered=False, lockstep=True),
    Config("rollback", (Start("a", 1, BACK),), 1, ALL),
    Config("redo-from-memory", (Start("a", 1, REDO),), 1, ALL),
    Config("uncounted-lockstep", (Start("a", 1, UNCOUNTED),), 2, ALL, numbered=False, lockstep=True),
    Config("uncounted-steps", (Start("a", 1, (STEPS, calls("skip:20", "save:30"))),), 1, ALL),
    Config("attempt-of-1", (OLD, Start("b", 2, (ONE,))), 1, {"crash": 1, "lost": 1}, sample=200),
    Config("attempt-of-1-suspect", (OLD, Start("b", 2, (ONE,))), 1, {"cut": 1, "suspect": 1}, sample=200),
    Config("attempt-apart", (OLD, NEW), 2, {"crash": 2, "lost": 1}, apart=True, sample=200),
    Config("attempt-overlapping", (OLD, NEW), 0, sample=400, limit=900_000),
    Config("attempt-overwrites", (OLD, Start("b", 2, (ONE,))), 0, there="decided", sample=100),
    Config("world-disagrees", (Start("a", 1, (ONE, ONE)), Start("b", 1, (ONE,))), 0),
    Config("twins-apart", (OLD, both(ONE, 1, "b")), 2, {"crash": 2}, apart=True, sample=400),
    Config("attempt-saves-twice", (OLD, Start("b", 2, (TWO,))), 0, sample=100),
    Config("prune", (OLD,), 1, {"crash": 1, "lost": 1, "suspect": 1}, prune=True, there="done", sample=400),
    Config("prune-two-saves", (both(TWO),), 0, prune=True, sample=400),
]  # fmt: skip
THREE = [
    Config("3 ranks", (Start("a", 1, (TWO,) * 3),), 3, ALL, there="done"),
    Config("3 ranks, prune", (Start("a", 1, (TWO,) * 3),), 3, ALL, there="done", prune=True),
    Config("3 ranks, replicas", (Start("a", 1, (TWO,) * 3),), 3, ALL, replicas=True, there="done"),
    Config("3 ranks, rollback", (Start("a", 1, (BACK[0], *BACK)),), 3, ALL),
    Config("3 ranks, lockstep", (Start("a", 1, (UNCOUNTED[0], *UNCOUNTED)),), 3, ALL, numbered=False, lockstep=True),
    Config("3 ranks, then 2", (Start("a", 1, (TWO,) * 3), both(TWO, 2, "b")), 3, ALL, prune=True),
    Config("3 ranks, then 2, then 1", (Start("a", 1, (ONE,) * 3), both(ONE, 2, "b"), Start("c", 3, (TWO,))), 3, ALL),
]
LATE = Config("late-metadata", (both(TWO),), 1, {"lost": 1})
LEFT = Config("left-by-both", (both(TWO),), 2, {"cut": 2}, numbered=False, lockstep=True)

_SPLIT = {f"{COMMITTED}+{UNKNOWN}", f"{COMMITTED}+{SUPERSEDED}", f"{COMMITTED}+{SUPERSEDED}+{UNKNOWN}"}
"""The verdicts on one save that may differ: of ranks that cannot know."""

_FAULTS = int(os.environ.get("DCP_S3_TEST_FAULTS", "100"))
"""How much of each configuration `make soak` looks at: all of it with 100."""


def find(name: str) -> Config:
    return next(config for config in [*CONFIGS, LATE, LEFT] if config.name == name)


@pytest.mark.parametrize("name", ["single", "two-saves-lockstep", "replicas", "prune-two-saves", "twins-apart"])
def test_it_holds_whatever_comes_first(name: str) -> None:
    """With one fault, or as many states as there is time for; the rest is in the soak."""
    world = World(replace(find(name), faults=1 if name == "single" else find(name).faults))
    states, _ = world.explore(15_000)
    assert states > 500


@pytest.mark.soak
@pytest.mark.parametrize("config", [*CONFIGS, LATE, LEFT], ids=lambda config: config.name)
def test_it_holds_in_every_interleaving(config: Config) -> None:
    world = World(config)
    states, _ = world.explore(None if _FAULTS >= 100 else 2_500 * max(_FAULTS, 2))
    assert states > 100
    if not config.replicas:
        assert world.splits <= _SPLIT


@pytest.mark.parametrize("runs", [10, pytest.param(7 * max(_FAULTS, 2), marks=pytest.mark.soak)])
@pytest.mark.parametrize("config", THREE, ids=lambda config: config.name)
def test_it_holds_in_random_walks(config: Config, runs: int) -> None:
    assert World(config).wander(1, runs) > runs


def test_a_save_that_was_left_is_not_joined_again() -> None:
    me = Member(0, Attempt("run", (0,), "token", 10.0, 2, 0), "process")
    claim = values.open_claim(me.attempt, "0" * 16, None, 1, "", "")
    steps = protocol.save(me, None, 1)
    assert next(steps) == Get(CLAIM)
    assert steps.send(Found(claim, "1")) == protocol.Task("join", claim)
    assert steps.throw(protocol.UnreachableError("away")) == Get(CLAIM)
    with pytest.raises(StopIteration) as ended:
        steps.throw(protocol.UnreachableError("still away"))
    assert ended.value.value == (UNKNOWN, claim.nonce)
    assert me.left == {claim.nonce}
    assert protocol.judge(claim, me, None, 1) == OPEN


# --- broken protocols ----------------------------------------------------------------------------------------

_judge = protocol.judge


def _unless(matches: Callable[[Key, Any], bool]) -> Callable[[Key, Any, str], Put]:
    """A Put without its condition, if it matches."""
    return lambda key, body, expect: Put(key, body, ANY if matches(key, body) else expect)


def _is_state(state: str) -> Callable[[Key, Any], bool]:
    return lambda key, body: key == CLAIM and body.state == state


def _key(kind: str, nonce: str, rank: int = 0) -> Key:
    return Key(kind, "0" * 16 if kind == "part" else nonce, rank)


def _answer(value: Any) -> Callable[..., protocol.Steps[Any]]:
    def answer(*_: Any) -> protocol.Steps[Any]:
        yield from ()
        return value

    return answer


def _look(claim: Claim | None) -> protocol.Steps[Any]:
    there = yield Get(METADATA)
    return ("", "") if there is None else (there.etag, there.body)


def _put(key: Key, body: Any, found: Any) -> protocol.Steps[Any]:
    return (yield Put(key, body, "" if found is None else found.etag)) in (DONE, LOST)


def _judge_any_number(found: Claim | None, me: Any, number: Any, step: Any) -> str:
    is_ours = found is not None and found.attempt == me.attempt.id and found.is_undecided
    return "join" if is_ours else _judge(found, me, number, step)


def _prune(everybody: frozenset[int]) -> protocol.Steps[Any]:
    found = yield from protocol.settle()
    there = yield Get(Key("checkpoint"))
    names = yield model.ListAll()
    kinds = [name for name in names if found and name.kind in model.JOINT]
    leftovers = tuple(name for name in kinds if model.is_leftover(name, found.body, there))
    if leftovers:
        yield model.Delete(leftovers)


MUTATIONS: dict[str, tuple[str, dict[tuple[Any, str], Any]]] = {
    "parts without the nonce": (
        "two-saves", {(protocol, "Key"): _key, (World, "part_id"): staticmethod(lambda _: "0" * 16)},
    ),
    "unconditional commit of the claim": ("single", {(protocol, "Put"): _unless(_is_state(COMMITTING))}),
    "unconditional .metadata": ("late-metadata", {(protocol, "Put"): _unless(lambda key, _: key == METADATA)}),
    "unconditional abort": ("single", {(protocol, "Put"): _unless(_is_state(ABORTED))}),
    "unconditional intent": ("twins-apart", {(protocol, "Put"): _unless(lambda key, _: key.kind == "intent")}),
    "no roll call": ("uncounted-lockstep", {(World, "reads_intents"): False}),
    "no abort after a failure": ("single", {(protocol, "abort"): _answer(ABORTED)}),
    "a decided commit is not done before the next claim": (
        "overwrite-decided", {(protocol, "_look_at_checkpoint"): _look},
    ),
    "committed is told before .metadata is there": ("single", {(protocol, "finish"): _answer(True)}),
    "a lost answer counts as done": ("single", {(protocol, "put"): _put}),
    "a claim of another number is joined": ("redo-from-memory", {(protocol, "judge"): _judge_any_number}),
    "a save that was left is joined again": (
        "left-by-both",
        {(protocol, "judge"): lambda found, me, *save: _judge(found, replace(me, left=set()), *save)},
    ),
    "an older attempt takes the claim of a newer one": (
        "attempt-of-1", {(values, "is_newer"): lambda claim, attempt: False},
    ),
    "a prune reads the claim before it lists": ("prune", {(model, "prune"): _prune}),
}  # fmt: skip


@pytest.mark.parametrize("title", MUTATIONS)
def test_a_broken_protocol_is_found_out(title: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, patches = MUTATIONS[title]
    for (place, name), value in patches.items():
        monkeypatch.setattr(place, name, value)
    with pytest.raises(BrokenError):
        World(replace(find(where), sample=10)).explore(250_000)
