"""The adversary finds the races of toy protocols, each by the kind of move that it takes; mended ones have none."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import HealthCheck, find, settings
from hypothesis.errors import NoSuchExample

from dcp_s3 import errors
from dcp_s3.store import ABSENT, Expect
from tests.coordination.adversary import Actor, Adversary
from tests.coordination.moves import Kind, Move, moves

_LONG = settings(
    max_examples=300, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck)
)
_SHORT = settings(_LONG, max_examples=40)


class Broken(Exception):
    pass


Check = Callable[[Adversary], None]
Work = Callable[[Actor], object]


def shortest(
    work: Work, check: Check, kinds: Collection[Kind], search: settings = _LONG, **options: bool
) -> list[Move] | None:
    """The shortest moves found that break two ranks which do ``work``; None: none were found."""

    def breaks(schedule: list[Move]) -> bool:
        try:
            with Adversary(lambda _: {"a": work, "b": work}, check=check, **options) as adversary:  # type: ignore[arg-type]
                adversary.play(schedule)
        except Broken:
            return True
        return False

    try:
        return find(moves(kinds, most=5), breaks, settings=search)
    except NoSuchExample:
        return None


def persistently(write: Callable[[], object]) -> None:
    """Repeats a write until it is answered."""
    while True:
        try:
            write()
            return
        except errors.TransferError:
            continue


# --- the toys: two ranks each, and what must hold ------------------------------------------------------


def looks_then_commits(actor: Actor) -> None:
    if not actor.store.exists("commit"):
        actor.store.put("commit", actor.name.encode())


def commits_if_absent(actor: Actor) -> None:
    try:
        actor.store.put("commit", actor.name.encode(), expect=ABSENT)
    except errors.PreconditionFailedError:
        pass


def first_stays(adversary: Adversary) -> None:
    """What was committed first stays."""
    if adversary.stored.exists("commit"):
        found = adversary.stored.get("commit").data
        if vars(adversary).setdefault("first", found) != found:
            raise Broken


def sets_twice(actor: Actor) -> None:
    """Sets its own object to 1, then to 2."""
    key = actor.name
    for data in (b"1", b"2"):
        persistently(lambda data=data: actor.store.put(key, data))  # type: ignore[misc]
    actor.sleep(1)


def sets_twice_if_unchanged(actor: Actor) -> None:
    key, store = actor.name, actor.store
    for data in (b"1", b"2"):
        while not store.exists(key) or store.get(key).data != data:
            expect = Expect(store.get(key).etag) if store.exists(key) else ABSENT
            try:
                store.put(key, data, expect=expect)
            except (errors.TransferError, errors.PreconditionFailedError):
                continue


def never_back(adversary: Adversary) -> None:
    """No object goes back from 2 to 1."""
    for each in adversary.stored.list("").objects:
        seen = vars(adversary).setdefault("seen", {})
        data = adversary.stored.get(each.key).data
        if data < seen.get(each.key, b""):
            raise Broken
        seen[each.key] = data


def names_first(actor: Actor) -> None:
    """Commits what it writes only afterwards."""
    persistently(lambda: actor.store.put(f"{actor.name}.commit", b""))
    persistently(lambda: actor.store.put(f"{actor.name}.data", b""))


def writes_first(actor: Actor) -> None:
    persistently(lambda: actor.store.put(f"{actor.name}.data", b""))
    persistently(lambda: actor.store.put(f"{actor.name}.commit", b""))


def whole_at_the_end(adversary: Adversary) -> None:
    """What is committed is there, once its rank has ended."""
    for actor in adversary.actors:
        stored = adversary.stored
        if actor.has_ended and stored.exists(f"{actor.name}.commit") and not stored.exists(f"{actor.name}.data"):
            raise Broken


def counts(actor: Actor) -> None:
    """Adds one, once, whatever the answer."""
    store = actor.store
    while True:
        found = store.get("count") if store.exists("count") else None
        expect = Expect(found.etag) if found else ABSENT
        data = b"%d" % (int(found.data) + 1 if found else 1)
        try:
            store.put("count", data, expect=expect)
            return
        except (errors.TransferError, errors.PreconditionFailedError):
            continue


def counts_by_name(actor: Actor) -> None:
    persistently(lambda: actor.store.put(f"count/{actor.name}", b"1"))


def at_most_two(adversary: Adversary) -> None:
    """Two ranks do not count more than two in all."""
    stored = adversary.stored
    if stored.exists("count") and int(stored.get("count").data) > 2:
        raise Broken


def repairs(actor: Actor) -> None:
    """Takes a refused look for: it is not there."""
    store, key = actor.store, actor.name
    persistently(lambda: store.put(key, b"2"))
    try:
        there = store.exists(key)
    except errors.TransferError:
        there = False
    if not there:
        persistently(lambda: store.put(key, b"1"))


def repairs_what_is_missing(actor: Actor) -> None:
    store, key = actor.store, actor.name
    persistently(lambda: store.put(key, b"2"))
    persistently(lambda: store.exists(key) or store.put(key, b"1"))


def locks(actor: Actor) -> None:
    """Holds a lock that ends after 10 seconds, looks at the clock, then writes."""
    until = actor.now() + 10
    try:
        actor.store.put("until", f"{until} {actor.name}".encode(), expect=ABSENT)
    except errors.PreconditionFailedError:
        actor.sleep(30)
        return
    if actor.now() < until:
        actor.store.put("held", b"")


def in_time(adversary: Adversary) -> None:
    """Nobody writes after its lock has ended."""
    stored = adversary.stored
    if stored.exists("held") and "since" not in vars(adversary):
        vars(adversary)["since"] = adversary.time
        if adversary.time > float(stored.get("until").data.split()[0]):
            raise Broken


def takes_over(actor: Actor) -> None:
    """An attempt after the other takes the place, if it is newer."""
    store, data = actor.store, b"%d" % actor.attempt
    if not store.exists("x") or store.get("x").data < data:
        persistently(lambda: store.put("x", data))


def takes_over_if_unchanged(actor: Actor) -> None:
    store, data = actor.store, b"%d" % actor.attempt
    while True:
        found = store.get("x") if store.exists("x") else None
        if found is not None and found.data >= data:
            return
        try:
            store.put("x", data, expect=Expect(found.etag) if found else ABSENT)
        except errors.PreconditionFailedError:
            continue


def newest_stays(adversary: Adversary) -> None:
    """No older attempt takes the place of a newer one."""
    if adversary.stored.exists("x"):
        found = adversary.stored.get("x").data
        if found < vars(adversary).get("newest", b""):
            raise Broken
        vars(adversary)["newest"] = found


# --- tests -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("broken", "mended", "check", "kinds"),
    [
        (looks_then_commits, commits_if_absent, first_stays, []),
        (repairs, repairs_what_is_missing, never_back, [Kind.REFUSE]),
        (counts, counts_by_name, at_most_two, [Kind.LOSE]),
        (sets_twice, sets_twice_if_unchanged, never_back, [Kind.DELAY]),
        (sets_twice, sets_twice_if_unchanged, never_back, [Kind.REPEAT, Kind.LAND]),
        (names_first, writes_first, whole_at_the_end, [Kind.KILL]),
        (names_first, writes_first, whole_at_the_end, [Kind.CRASH]),
        (locks, commits_if_absent, in_time, [Kind.HOLD, Kind.FREE]),
        (takes_over, takes_over_if_unchanged, newest_stays, [Kind.RESTART]),
    ],
)
def test_a_race_is_found_by_the_moves_that_it_takes_and_gone_when_mended(
    broken: Work, mended: Work, check: Check, kinds: list[Kind]
) -> None:
    found = shortest(broken, check, kinds)
    assert found is not None
    assert len(found) <= 3
    assert {each.kind for each in found} <= {*kinds, Kind.RUN}
    if kinds:
        assert shortest(broken, check, [], _SHORT) is None
    assert shortest(mended, check, kinds, _SHORT) is None


def test_a_store_that_ignores_conditions_breaks_what_relies_on_them() -> None:
    assert shortest(commits_if_absent, first_stays, [], _SHORT) is None
    assert shortest(commits_if_absent, first_stays, [], honours_conditions=False) is not None


def test_the_same_moves_make_the_same_story() -> None:
    played = [Move(Kind.LOSE, 1, 3), Move(Kind.HOLD, 0, 4), Move(Kind.DELAY, 1, 2), Move(Kind.RESTART, 0, 2)]
    stories = set()
    for _ in range(20):
        with Adversary(lambda _: {"a": counts, "b": sets_twice}) as adversary:
            adversary.play(played)
        stories.add(adversary.story)
    assert len(stories) == 1
    assert "[delay]" in stories.pop()


def test_without_moves_all_end_in_virtual_time() -> None:
    def sleeps(actor: Actor) -> float:
        actor.sleep(1e6)
        return actor.now()

    with Adversary(lambda _: {"a": sleeps, "b": sleeps}) as adversary:
        adversary.play([])
    assert [each.result for each in adversary.actors] == [1e6, 1e6]


def test_no_code_of_a_dead_rank_reaches_the_store() -> None:
    def works(actor: Actor) -> None:
        try:
            actor.store.put("begun", b"")
        finally:
            for _ in range(3):
                try:
                    actor.store.put("after", b"")
                except BaseException:  # noqa: BLE001
                    continue

    with Adversary(lambda _: {"a": works}) as adversary:
        adversary.play([Move(Kind.KILL)])
    assert not adversary.stored.list("").objects
    assert adversary.actors[0].killed


def test_no_thread_outlives_an_example_that_fails() -> None:
    def polls(actor: Actor) -> None:
        while True:
            actor.sleep(1)

    before = threading.active_count()
    with (
        Adversary(lambda _: {"a": polls, "b": polls}) as adversary,
        pytest.raises(AssertionError, match="no end after"),
    ):
        adversary.play([Move(Kind.HOLD), Move(Kind.RESTART)])
    assert threading.active_count() == before


def test_requests_of_a_thread_that_the_adversary_does_not_know_are_an_error() -> None:
    def works(actor: Actor) -> None:
        with ThreadPoolExecutor(1) as threads:
            threads.submit(actor.store.exists, "x").exception()

    with Adversary(lambda _: {"a": works}) as adversary, pytest.raises(AssertionError, match="another thread"):
        adversary.play([])
