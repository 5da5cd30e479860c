"""What saves without collectives promise, checked against an adversary; and that the check finds each broken protocol.

`make soak` plays many more moves.
"""

from __future__ import annotations

import dataclasses
import os
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st

from dcp_s3.coordination import dead, merge, merger, participant
from dcp_s3.coordination.claim import claim_of
from tests.coordination import model
from tests.coordination.adversary import Kind, Move, moves
from tests.coordination.model import (
    ONE,
    TWO,
    Turn,
    Violation,
    World,
    play,
    replicas,
    shards,
    unruly,
)

_EXAMPLES = int(os.environ.get("DCP_S3_TEST_FAULTS", "60"))
_ANY = list(Kind)
_ONCE = (Turn(),)
_AGAIN = (Turn(ONE, True), Turn(ONE, True))
_FURTHER = (Turn(ONE, True), Turn(TWO), Turn(ONE, True))
_WORLDS = [
    World(2, replicas(2), _ONCE),
    World(2, shards(2), _AGAIN),
    World(2, unruly(2), _AGAIN, knows_before=True),
    World(3, replicas(3), _FURTHER, knows_before=True, signs=False),
    World(3, unruly(3), _ONCE, signs=False),
    World(4, shards(4, copies=2), _AGAIN),
    World(1, shards(1), _AGAIN),
]


# --- broken protocols -----------------------------------------------------------------------------------


def _same_save_in_all_attempts() -> AbstractContextManager[Any]:
    def claim(attempt: Any, *rest: Any) -> Any:
        return claim_of(dataclasses.replace(attempt, restart=(0,)), *rest)

    return mock.patch.object(model, "claim_of", claim)


def _no_condition() -> AbstractContextManager[Any]:
    return mock.patch("dcp_s3.checkpoint.commit.Expect", return_value=None)


def _one_manifest() -> AbstractContextManager[Any]:
    return mock.patch.object(merger, "new_save_id", return_value="0" * 16)


def _everybody_holds_the_same() -> AbstractContextManager[Any]:
    def digest_of(self: dead.Seen, rank: int) -> str | None:
        return next(iter(self.parts.values()), None)

    return mock.patch.object(dead.Seen, "digest_of", digest_of)


def _parts_are_not_waited_for() -> AbstractContextManager[Any]:
    def ranks(self: merge.Merging) -> frozenset[int]:
        return frozenset(range(self._world_size)) if self._parts else frozenset()

    return mock.patch.object(merge.Merging, "ranks", property(ranks))


def _any_commit_is_ours() -> AbstractContextManager[Any]:
    def find_commit(store: Any, joint: Any) -> str | None:
        key = joint.url.key(".metadata")
        return store.head(key).metadata["dcp-s3-save-id"] if store.exists(key) else None

    return mock.patch.object(participant, "find_commit", find_commit)


def _cleans_first() -> AbstractContextManager[Any]:
    commit = merger.Merger._commit

    def clean_and_commit(self: merger.Merger, made_up: Any) -> Any:
        self._clean()
        return commit(self, made_up)

    return mock.patch.object(merger.Merger, "_commit", clean_and_commit)


def _part_before_its_objects() -> AbstractContextManager[Any]:
    write = model._Saving._write

    def publish_and_write(self: Any, hashes: Any, number: int) -> Any:
        with mock.patch.object(model, "persistently"):
            part = write(self, hashes, number)
        self._participant.publish(part)
        return write(self, hashes, number)

    return mock.patch.object(model._Saving, "_write", publish_and_write)


def _names_without_nonce() -> AbstractContextManager[Any]:
    return mock.patch.object(model, "new_nonce", return_value="abc")


def _claims_without_looking() -> AbstractContextManager[Any]:
    def claim(store: Any, url: Any, ours: Any) -> None:
        store.put(url.key(".dcp_s3/claim.json"), ours.to_json())

    return mock.patch.object(participant, "claim", claim)


_MUTATIONS = {
    "no look at the claim before the commit": lambda: mock.patch.object(merger, "is_still_ours", return_value=True),
    "one save id in all attempts": _same_save_in_all_attempts,
    "no condition of the commit": _no_condition,
    "all mergers write one manifest": _one_manifest,
    "everybody counts as a replica": _everybody_holds_the_same,
    "not all parts are waited for": _parts_are_not_waited_for,
    "any commit at the URL counts": _any_commit_is_ours,
    "parts are removed before the commit": _cleans_first,
    "a part comes before its objects": _part_before_its_objects,
    "objects of all saves have the same names": _names_without_nonce,
    "the claim is written without a look": _claims_without_looking,
}


def _search(count: int, *phases: Phase) -> settings:
    return settings(
        max_examples=count, phases=phases or (Phase.generate,), derandomize=True, database=None, deadline=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip


_played = st.tuples(st.sampled_from(_WORLDS), moves(_ANY), st.sampled_from([1000, 3]))


@pytest.mark.counted
def test_the_store_holds_whole_checkpoints_whatever_the_adversary_does() -> None:
    @_search(_EXAMPLES, Phase.generate, Phase.shrink)
    @given(_played)
    def holds(played: tuple[World, list[Move], int]) -> None:
        world, schedule, page_size = played
        play(world, schedule, page_size=page_size)

    holds()


@pytest.mark.parametrize("mutation", _MUTATIONS)
def test_a_broken_protocol_is_found_out(mutation: str) -> None:
    def breaks(played: tuple[World, list[Move], int]) -> bool:
        world, schedule, page_size = played
        try:
            play(world, schedule, page_size=page_size)
        except Violation:
            return True
        return False

    with _MUTATIONS[mutation]():
        find(_played, breaks, settings=_search(3000))


@pytest.mark.counted
def test_without_faults_every_save_is_committed_in_any_order_of_requests() -> None:
    """No rank waits for another in vain, and none reports an error."""

    @_search(_EXAMPLES // 2, Phase.generate, Phase.shrink)
    @given(st.sampled_from(_WORLDS), moves([]))
    def commits(world: World, schedule: list[Move]) -> None:
        after, _ = play(_patient(world), schedule)
        _check_committed(after, len(world.turns) * world.ranks)

    commits()


@pytest.mark.counted
def test_lost_refused_and_late_requests_keep_no_save_from_its_commit() -> None:
    @_search(_EXAMPLES // 2, Phase.generate, Phase.shrink)
    @given(st.sampled_from(_WORLDS), moves([Kind.LOSE, Kind.REFUSE, Kind.DELAY, Kind.REPEAT, Kind.LAND]))
    def commits(world: World, schedule: list[Move]) -> None:
        after, _ = play(_patient(world), schedule)
        _check_committed(after, len(world.turns) * world.ranks)

    commits()


@pytest.mark.counted
def test_survivors_commit_as_long_as_each_chunk_has_one() -> None:
    worlds = [
        World(2, replicas(2), _ONCE, rank_timeout=50.0, knows_before=True),
        World(3, replicas(3), _AGAIN, rank_timeout=50.0, knows_before=True, signs=False),
        World(4, shards(4, copies=2), _ONCE, rank_timeout=50.0, knows_before=True),
    ]

    @_search(_EXAMPLES // 2, Phase.generate, Phase.shrink)
    @given(st.sampled_from(worlds), moves([Kind.KILL], most=6, longest=15))
    def commits(world: World, schedule: list[Move]) -> None:
        after, adversary = play(world, schedule, spare=world.is_needed)
        survivors = [each for each in adversary.actors if not each.killed]
        of_survivors = [each for each in after.reports if each[0] in survivors]
        assert survivors
        _check_committed(dataclasses.replace(after, reports=of_survivors), len(world.turns) * len(survivors))

    commits()


@pytest.mark.counted
def test_a_store_that_ignores_conditions_still_holds_whole_checkpoints() -> None:
    """Of one attempt after the other, as long as all requests of the one have ended; nothing keeps the newest there."""

    @_search(_EXAMPLES // 2, Phase.generate, Phase.shrink)
    @given(st.sampled_from(_WORLDS), moves([Kind.REFUSE, Kind.LOSE, Kind.KILL, Kind.CRASH]))
    def holds(world: World, schedule: list[Move]) -> None:
        play(world, schedule, honours_conditions=False)

    holds()


def _patient(world: World) -> World:
    """The same, where nobody counts as dead while the others run."""
    return dataclasses.replace(world, rank_timeout=5000.0)


def _check_committed(world: World, reports: int) -> None:
    outcomes = [each[3] for each in world.reports]
    assert [each for each in outcomes if not isinstance(each, str)] == []
    assert len(outcomes) == reports
