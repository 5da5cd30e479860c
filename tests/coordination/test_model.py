"""What saves without collectives promise, checked against an adversary; and that the check finds each broken protocol.

`make soak` plays many more moves.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st

from dcp_s3.coordination import merge, merger, participant
from dcp_s3.coordination.claim import claim_of
from dcp_s3.coordination.identity import Attempt
from tests.coordination import model
from tests.coordination.invariants import ONE, TWO, Violation
from tests.coordination.model import Turn, World, play, replicas, shards, unruly
from tests.coordination.moves import Kind, Move, moves

_EXAMPLES = int(os.environ.get("DCP_S3_TEST_FAULTS", "50"))
_ANY = list(Kind)
_ONCE = (Turn(),)
_AGAIN = (Turn(ONE, True), Turn(ONE, True))
_FURTHER = (Turn(ONE, True), Turn(TWO), Turn(ONE, True))
_APART = (Turn(ONE, True), Turn(TWO))


def _later_run(number: int) -> Attempt:
    return Attempt(f"run {number}", (0,), "", 1000.0 * number, 0, 0)


def _other_run(number: int) -> Attempt:
    return Attempt(f"run {number}", (0,), "", None, 0, 0)


_QUIET = [
    World(2, replicas(2), _ONCE),
    World(2, shards(2), _AGAIN),
    World(2, unruly(2), _AGAIN, knows_before=True),
    World(3, replicas(3), _FURTHER, knows_before=True, signs=False),
    World(3, unruly(3), _ONCE, signs=False),
    World(4, shards(4, copies=2), _AGAIN),
    World(1, shards(1), _AGAIN),
    World(2, unruly(2), _APART, overlaps=True),
    World(2, replicas(2), _AGAIN, overlaps=True),
    World(2, shards(2), _AGAIN, attempt_of=_later_run),
    World(2, replicas(2), _AGAIN, attempt_of=_other_run, newest_stays=False),
]
# Several ranks merge at the same time.
_HASTY = [World(2, replicas(2), turns, rank_timeout=0.05) for turns in (_ONCE, _AGAIN)]
_WORLDS = [*_QUIET, *_HASTY, World(3, unruly(3), _ONCE, rank_timeout=0.1)]
# Without saves that overlap at one URL: of those the last one is committed.
_IN_TURN = [each for each in _WORLDS if not each.overlaps or each.turns == _APART]


# --- broken protocols -----------------------------------------------------------------------------------


def _no_look_at_the_claim() -> AbstractContextManager[Any]:
    return mock.patch.object(merger, "is_still_ours", return_value=True)


def _same_save_in_all_attempts() -> AbstractContextManager[Any]:
    def claim(attempt: Any, *rest: Any) -> Any:
        return claim_of(dataclasses.replace(attempt, restart=(0,)), *rest)

    return mock.patch.object(model, "claim_of", claim)


def _no_condition() -> AbstractContextManager[Any]:
    return mock.patch("dcp_s3.checkpoint.commit.Expect", return_value=None)


def _one_manifest() -> AbstractContextManager[Any]:
    return mock.patch.object(merger, "new_save_id", return_value="0" * 16)


def _everybody_holds_the_same() -> AbstractContextManager[Any]:
    def digest_of(self: merger.Seen, rank: int) -> str | None:
        return next(iter(self.parts.values()), None)

    return mock.patch.object(merger.Seen, "digest_of", digest_of)


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


_Mutation = tuple[Callable[[], AbstractContextManager[Any]], list[World], list[Kind]]
_MUTATIONS: dict[str, _Mutation] = {
    "no look at the claim before the commit": (_no_look_at_the_claim, _QUIET, [Kind.RESTART]),
    "one save id in all attempts": (_same_save_in_all_attempts, _QUIET, [Kind.RESTART, Kind.CRASH]),
    "no condition of the commit": (_no_condition, _HASTY, [Kind.HOLD, Kind.DELAY]),
    "all mergers write one manifest": (_one_manifest, _HASTY, [Kind.HOLD, Kind.DELAY]),
    "everybody counts as a replica": (_everybody_holds_the_same, _QUIET, [Kind.KILL]),
    "not all parts are waited for": (_parts_are_not_waited_for, _QUIET, [Kind.HOLD]),
    "any commit at the URL counts": (_any_commit_is_ours, _QUIET, []),
    "parts are removed before the commit": (_cleans_first, _QUIET, []),
    "a part comes before its objects": (_part_before_its_objects, _QUIET, [Kind.HOLD, Kind.DELAY]),
    "objects of all saves have the same names": (_names_without_nonce, _QUIET, []),
    "the claim is written without a look": (_claims_without_looking, _QUIET, [Kind.RESTART]),
}


def _of(examples: int) -> settings:
    return settings(max_examples=max(1, examples), suppress_health_check=list(HealthCheck))


_played = st.tuples(st.sampled_from(_WORLDS), moves(_ANY), st.sampled_from([1000, 3]))


@pytest.mark.counted
def test_the_store_holds_whole_checkpoints_whatever_the_adversary_does() -> None:
    @_of(_EXAMPLES)
    @given(_played)
    def holds(played: tuple[World, list[Move], int]) -> None:
        world, schedule, page_size = played
        play(world, schedule, page_size=page_size)

    holds()


@pytest.mark.parametrize("mutation", _MUTATIONS)
def test_a_broken_protocol_is_found_out(mutation: str) -> None:
    def breaks(played: tuple[World, list[Move]]) -> bool:
        try:
            play(*played)
        except Violation:
            return True
        return False

    broken, worlds, kinds = _MUTATIONS[mutation]
    search = settings(_of(1000), phases=[Phase.generate], database=None)  # the first one will do
    with broken():
        assert find(st.tuples(st.sampled_from(worlds), moves(kinds)), breaks, settings=search)


@pytest.mark.counted
def test_without_faults_every_save_is_committed_in_any_order_of_requests() -> None:
    """No rank waits for another in vain, and none reports an error."""

    @_of(_EXAMPLES // 2)
    @given(st.sampled_from(_IN_TURN), moves([]))
    def commits(world: World, schedule: list[Move]) -> None:
        after, _ = play(_patient(world), schedule, clean=True)
        _check_committed(after, len(world.turns) * world.ranks)

    commits()


@pytest.mark.counted
def test_lost_refused_and_late_requests_keep_no_save_from_its_commit() -> None:
    @_of(_EXAMPLES // 2)
    @given(st.sampled_from(_IN_TURN), moves([Kind.LOSE, Kind.REFUSE, Kind.DELAY, Kind.REPEAT, Kind.LAND]))
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

    @_of(_EXAMPLES // 2)
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
    """As long as no request comes late, no attempt outlives the next one, and saves do not overlap."""

    @_of(_EXAMPLES // 2)
    @given(st.sampled_from(_IN_TURN), moves([Kind.REFUSE, Kind.LOSE, Kind.KILL, Kind.CRASH]))
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
