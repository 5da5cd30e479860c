"""Ranks as threads over a store in memory: who is given up, who makes up for whom, and what everybody hears."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import random
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from dcp_s3 import errors
from dcp_s3.coordination import driving, protocol, values
from dcp_s3.coordination.driving import Driver, Watch
from dcp_s3.coordination.identity import Attempt
from dcp_s3.coordination.processes import settle_saves
from dcp_s3.coordination.protocol import COMMITTED, DONE, EXISTS, SUPERSEDED, TAKEN, UNKNOWN, Get, Member, Put
from dcp_s3.coordination.values import ABORTED, CLAIM, COMMITTING, FULL, OPEN, Claim, Intent, Key, Merged
from dcp_s3.format.layout import METADATA, data_object
from dcp_s3.retention.prune import prune
from dcp_s3.save.joint import verdict_error
from dcp_s3.store import Expect, Store
from dcp_s3.url import parse_url
from tests.memory_store import FaultyStore, MemoryStore

URL = parse_url("s3://bucket/run/step-1")
ATTEMPT = Attempt("run", (0,), "token", 10.0, 2, 0)


@dataclass
class Work:
    """What one rank writes: one object, whose bytes are those of its items."""

    store: Store
    rank: int
    digest: str = ""
    writes: tuple[int, ...] = ()
    leaves: tuple[int, ...] = ()
    before: Callable[[Work], object] = lambda _: None
    """Called before it has written."""
    driver: Any = None
    moved: int = 0
    asked: list[int] = field(default_factory=list)

    def join(self) -> Intent:
        return Intent("", 0, self.digest or str(self.rank), self.writes, self.leaves)

    def write(self, claim: Claim, rank: int, intent: Intent | None) -> bytes:
        if claim.state == OPEN:
            self.before(self)
        else:
            self.asked = self.driver.read_roll(claim, rank)
        path = data_object(rank, 0, claim.nonce + f"{self.rank:02x}")
        self.store.put(URL.key(path), b"data")
        return json.dumps({"rank": rank, "by": self.rank, "path": path}).encode()

    def merge(self, claim: Claim, parts: Iterator[bytes]) -> Merged:
        merged = Merged(claim.nonce + f"{self.rank:02x}", json.dumps([json.loads(each) for each in parts]).encode())
        self.store.put(URL.key(Key("merged", merged.save_id).path), merged.data)
        return merged

    def clean(self, claim: Claim) -> None:
        pass


class _DeadError(BaseException):
    """A thread that is gone, without a word."""


def die(_: Work) -> None:
    raise _DeadError


def run_one(
    work: Work, rank_timeout: float, *, clock: dict[str, Any] | None = None, number: int | None = 1,
    attempt: Attempt = ATTEMPT, world_size: int = 2, overwrite: bool = False,
) -> str:  # fmt: skip
    """What one rank hears."""
    place = dataclasses.replace(attempt, rank=work.rank, world_size=world_size)
    me, ended = Member(work.rank, place, f"process-{work.rank}", overwrite), threading.Event()
    work.driver = Driver(work.store, URL, me, rank_timeout, work, **(clock or {}))
    if clock is None:
        threading.Thread(target=work.driver.show_progress, args=(ended,), daemon=True).start()
    try:
        return work.driver.run(protocol.save(me, None if number is None else (0, 1, number), 1))[0]
    finally:
        ended.set()


def save(works: Sequence[Work], *, rank_timeout: float = 0.4, **options: Any) -> dict[int, str]:
    """One save of all ranks; the verdict of each that lives."""
    told: dict[int, str] = {}

    def run(work: Work) -> None:
        with contextlib.suppress(_DeadError):
            told[work.rank] = run_one(work, rank_timeout, world_size=len(works), **options)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
        assert not each.is_alive(), "a save does not end"
    return told


def works_of(count: int, store: Store | None = None, **options: Any) -> list[Work]:
    store = store or MemoryStore()
    return [Work(store, rank, **options) for rank in range(count)]


def committed(store: Store) -> list[dict[str, Any]]:
    """The parts of the checkpoint, whose objects are there; none if there is no checkpoint."""
    if not store.exists(URL.key(METADATA)):
        return []
    found: list[dict[str, Any]] = json.loads(store.get(URL.key(METADATA)).data)
    assert all(store.exists(URL.key(part["path"])) for part in found)
    return found


def claim_of(store: Store) -> Any:
    return values.parse_claim(store.get(URL.key(CLAIM.path)).data)


# --- whole saves -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [1, None])
@pytest.mark.parametrize("count", [2, 5, 20])
def test_all_ranks_commit_one_checkpoint(count: int, number: int | None) -> None:
    works = works_of(count)
    assert save(works, rank_timeout=20.0, number=number) == dict.fromkeys(range(count), COMMITTED)
    found = committed(works[0].store)
    assert [part["rank"] for part in found] == [part["by"] for part in found] == list(range(count))
    assert claim_of(works[0].store).state == COMMITTING


@pytest.mark.parametrize(
    ("at", "overwrite", "what", "verdict"),
    [
        ("__1_", False, "save", EXISTS),  # while rank 1 writes
        ("__1_", True, "save", EXISTS),
        (METADATA, False, "save", EXISTS),  # after the decision
        (METADATA, True, "prune", COMMITTED),
    ],
)
def test_who_knows_no_claims_and_saves_or_prunes_meanwhile(at: str, overwrite: bool, what: str, verdict: str) -> None:
    store, raced = MemoryStore(), list[str]()
    if overwrite:
        save(works_of(2, store), rank_timeout=20.0)

    def race(method: str, key: str) -> None:
        if method == "put" and at in key and not raced:
            raced.append(key)
            store.delete([URL.key(METADATA)]) if what == "prune" else store.put(URL.key(METADATA), b"[]")

    works = works_of(2, FaultyStore(store, race))
    assert set(save(works, number=2, overwrite=overwrite, rank_timeout=20.0).values()) == {verdict}
    parts = [claim_of(store).nonce in part["path"] for part in committed(store)]
    assert parts == ([True, True] if verdict == COMMITTED else [])


@pytest.mark.parametrize(
    ("holds", "gone", "why"),
    [
        (["same"] * 2, 1, ""),
        (["same"] * 4, 1, ""),
        (["same", "same", "other"], 2, "rank 2 has stopped"),
    ],
)
def test_who_holds_the_same_writes_for_a_rank_that_is_gone_and_nobody_else(
    holds: list[str], gone: int, why: str
) -> None:
    works = works_of(len(holds))
    for work, digest in zip(works, holds, strict=True):
        work.digest = digest
    works[gone].before = die
    alive = [rank for rank in range(len(holds)) if rank != gone]
    assert save(works) == dict.fromkeys(alive, ABORTED if why else COMMITTED)
    assert why in claim_of(works[0].store).why
    own = [part["by"] == part["rank"] for part in committed(works[0].store)]
    assert own == ([] if why else [rank in alive for rank in range(len(holds))])


def test_a_failure_of_one_rank_is_told_to_all() -> None:
    def fail(_: Work) -> None:
        raise errors.AccessDeniedError("no right")

    works = works_of(3)
    works[1].before = fail
    assert save(works, rank_timeout=20.0) == dict.fromkeys(range(3), ABORTED)
    assert committed(works[0].store) == []
    assert claim_of(works[0].store).why == "rank 1: AccessDeniedError: no right"


def test_a_rank_that_never_comes_ends_the_save_for_all() -> None:
    works = works_of(2)
    assert [run_one(work, 0.3, world_size=3) for work in works] == [ABORTED, ABORTED]
    assert "has not begun it" in claim_of(works[0].store).why


def test_what_all_leave_to_others_is_written_before_the_parts() -> None:
    works = works_of(3)
    works[0].writes, works[0].leaves = (1,), (2,)
    works[1].leaves = (1, 2)
    works[2].leaves = (1, 3)
    assert set(save(works, rank_timeout=20.0).values()) == {COMMITTED}
    assert [work.asked for work in works] == [[2], [], [3]]


def test_a_merger_that_dies_is_given_up_however_often_the_claim_is_read() -> None:
    now = [0.0]
    watch, claim = Watch(lambda: now[0], 10.0), values.open_claim(ATTEMPT, "0" * 16, None, 1, "", "")
    silent = None
    while silent is None and now[0] < 30:
        now[0] += 0.5
        watch.see_claim(dataclasses.replace(claim, state=FULL))
        watch.see([([kind, str(rank)], "sign") for kind in ("intent", "part") for rank in range(2)], 2)
        silent = watch.find_silent(frozenset({1}), 1.0)
    assert (silent, now[0]) == (1, 10.5)


def test_who_slept_looks_before_it_gives_others_up() -> None:
    now = [0.0]
    watch = Watch(lambda: now[0], 10.0)
    watch.see_claim(values.open_claim(ATTEMPT, "0" * 16, None, 1, "", ""))
    watch.see([(["intent", "1"], "first")], 2)
    now[0] = 100.0  # of SIGSTOP; rank 1 went on
    assert watch.find_silent(frozenset({1}), 1.0) is None
    watch.see([(["intent", "1"], "second")], 2)
    assert watch.find_silent(frozenset({1}), 1.0) is None
    now[0] = 111.0
    watch.see([(["intent", "1"], "second")], 2)
    assert watch.find_silent(frozenset({1}), 1.0) == 1
    watch.see([(["intent", str(rank)], "second") for rank in range(2)], 2)
    assert watch.find_silent(frozenset({1}), 1.0) is None  # now it is waited for something else: the roll


def test_others_are_waited_for_while_they_move() -> None:
    store, now = MemoryStore(), [0.0]

    def sleep(_: float) -> None:  # the other rank moves bytes for a while
        now[0] += 1.0
        if now[0] > 150.0:
            return
        other = Intent("process-1", int(now[0]), "another").to_json()  # nobody can write in its place
        store.put(URL.key(Key("intent", claim_of(store).nonce, 1).path), other)

    assert run_one(Work(store, 0), 10.0, clock={"now": lambda: now[0], "sleep": sleep}) == ABORTED
    assert 160.0 < now[0] < 190.0  # the later, if this rank called the roll in place of the other: that is progress
    assert "rank 1 " in claim_of(store).why


# --- attempts --------------------------------------------------------------------------------------------------


def test_a_run_id_that_is_used_again_with_restarts_from_0_is_named_with_the_remedy() -> None:
    again = dataclasses.replace(ATTEMPT, token="", began=None)
    last = dataclasses.replace(again, restart=(2,))
    works = works_of(2)
    assert set(save(works, attempt=last, rank_timeout=20.0).values()) == {COMMITTED}
    assert set(save(works, attempt=again, rank_timeout=20.0, overwrite=True).values()) == {SUPERSEDED}
    error = verdict_error(URL, SUPERSEDED, claim_of(works[0].store), None, None)
    assert re.search("Remedy: .* restarts counted from 0 again, give each start of the job a DCP_S3_RUN_ID", str(error))


# --- stores ----------------------------------------------------------------------------------------------------


class _Unconditional(MemoryStore):
    """Ignores some conditions, or refuses what has them."""

    def put(self, key: str, data: bytes | memoryview, *, expect: Expect | None = None, **options: Any) -> None:
        lacks, is_match = self.name.removeprefix("without "), expect is not None and bool(expect.etag)
        if lacks == "If-Match, which it refuses" and is_match and expect.required:
            raise errors.PreconditionFailedError("refused, whatever is there")
        ignores = lacks == "all" or (lacks == "If-Match" and is_match)
        super().put(key, data, expect=None if ignores else expect, **options)


@pytest.mark.parametrize("lacks", ["all", "If-Match", "If-Match, which it refuses"])
def test_a_store_without_conditional_writes_is_refused_before_a_byte_moves(lacks: str) -> None:
    store = _Unconditional(f"without {lacks}")
    with pytest.raises(errors.SaveProtocolError, match=r"conditional writes .* Remedy: save with collectives"):
        run_one(Work(store, 0), 1.0)
    assert store.list("").objects == ()


def test_a_put_holds_to_its_condition() -> None:
    driver = Driver(MemoryStore(), URL, Member(0, ATTEMPT, "process"), 1.0)
    first, second, third = (values.open_claim(ATTEMPT, each * 16, None, 1, "", "") for each in "012")
    assert [driver.carry_out(Put(CLAIM, each, "")) for each in (first, second)] == [DONE, TAKEN]
    assert driver.carry_out(Put(CLAIM, second, '"another"')) == TAKEN
    found = driver.carry_out(Get(CLAIM))
    assert found.body == first
    assert driver.carry_out(Put(CLAIM, third, found.etag)) == DONE


def test_a_store_that_does_not_answer_for_a_rank_timeout_ends_the_save_of_this_rank() -> None:
    away = FaultyStore(MemoryStore(), lambda method, _: errors.TransferError("away") if method == "get" else None)
    work = Work(away, 0)
    assert run_one(work, 0.2) == UNKNOWN
    assert isinstance(work.driver.error, errors.TransferError)


class _Lossy(MemoryStore):
    """Loses requests or their answers, carries requests out that it has refused before, or says that a condition did
    not hold which did."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._draw = random.Random(seed)
        self.late: list[threading.Timer] = []

    def put(self, key: str, data: bytes | memoryview, **options: Any) -> None:
        fate = self._draw.random()
        if fate < 0.05:
            raise errors.TransferError("409 again and again, or lost on the way there")
        if fate < 0.1:
            self.late.append(threading.Timer(2 * self._draw.random(), self._arrive, (key, data, options)))
            self.late[-1].start()
            raise errors.TransferError("late")
        time.sleep(0.02 * self._draw.random())
        super().put(key, data, **options)
        if fate > 0.9:
            raise errors.TransferError("lost on the way back")
        if fate > 0.87 and options.get("expect") is not None:
            raise errors.PreconditionFailedError("it was sent twice on the way")

    def _arrive(self, key: str, data: bytes | memoryview, options: Any) -> None:
        with contextlib.suppress(errors.StorageError):
            super().put(key, data, **options)

    def get(self, key: str) -> Any:
        if self._draw.random() < 0.05:
            raise errors.TransferError("lost")
        return super().get(key)


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(4, 100))])
def test_whatever_answers_are_lost_all_hear_the_same_and_it_is_true(seed: int) -> None:
    store, draw = _Lossy(seed), random.Random(seed)
    driving._checked.add((store.name, None))
    works = [Work(store, rank, digest="same") for rank in range(3)]
    if draw.random() < 0.5:
        works[draw.randrange(3)].before = die
    told = save(works, rank_timeout=1.0, number=None if seed % 2 else 1)
    assert len(set(told.values())) == 1, told
    for each in store.late:
        each.join()
    store._draw = random.Random(-1)
    found = super(_Lossy, store).get(URL.key(METADATA)) if store.exists(URL.key(METADATA)) else None
    assert (found is not None) == (set(told.values()) == {COMMITTED}), told


# --- prunes ----------------------------------------------------------------------------------------------------


_DAY = 86400


def test_a_save_that_wakes_up_after_the_grace_period_does_not_commit_what_a_prune_deletes() -> None:
    now = [1e9]
    store = MemoryStore(clock=lambda: now[0])

    def sleep(_: Work) -> None:
        while not store.exists(URL.key(Key("part", claim_of(store).nonce, 0).path)):
            time.sleep(0.01)  # then rank 0 only waits
        now[0] += 3 * _DAY
        prune("s3://bucket/run", store=store, grace=_DAY)

    works = works_of(2, store)
    works[1].before = sleep
    told = save(works, rank_timeout=2.0)
    assert set(told.values()) <= {ABORTED, SUPERSEDED}, told
    assert not store.exists(URL.key(METADATA))


def test_what_was_decided_when_all_died_is_committed_by_a_prune() -> None:
    now = [1e9]
    store = MemoryStore(clock=lambda: now[0])
    lost = FaultyStore(store, lambda method, key: _DeadError() if (method, key) == ("put", URL.key(METADATA)) else None)
    assert save(works_of(2, lost), rank_timeout=20.0) == {}
    assert claim_of(store).state == COMMITTING
    now[0] += 3 * _DAY
    prune("s3://bucket/run", store=store, grace=_DAY)
    assert len(committed(store)) == 2


def test_an_open_save_is_not_touched_by_a_prune_in_time() -> None:
    works = works_of(2)
    works[1].before = lambda work: prune("s3://bucket/run", store=work.store, grace=_DAY)
    assert set(save(works, rank_timeout=20.0).values()) == {COMMITTED}


def test_settling_says_what_there_is() -> None:
    works = works_of(2)
    store = works[0].store
    assert settle_saves(store, URL, why="none") is None
    store.put(URL.key(CLAIM.path), b"of an earlier version")
    assert settle_saves(store, URL, why="none") is not None
    assert set(save(works, rank_timeout=20.0).values()) == {COMMITTED}
