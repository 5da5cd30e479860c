"""What is kept whatever the policies say, and what a plan promises."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_s3.checkpoint.info import CheckpointInfo, age_order
from dcp_s3.retention.plan import LEASE_MARGIN, CatalogSnapshot, LeftoverObject, Plan
from dcp_s3.retention.policy import KeepEvery, KeepLatest, Policy
from tests.retention import histories as random
from tests.retention.histories import DAY, NOW, info


def keep_nothing(checkpoints: Any, now: float) -> dict[str, list[str]]:
    return {}


def plan(*infos: CheckpointInfo, policy: Any = keep_nothing, grace: float = DAY, **found: Any) -> Plan:
    return CatalogSnapshot("s3://bucket/run", NOW, infos, **found).plan(policy, grace=grace)


def kept(*infos: CheckpointInfo, **arguments: Any) -> set[str]:
    return {found.name for found in plan(*infos, **arguments).kept}


def reasons(found: Plan) -> dict[str, tuple[str, ...]]:
    return {each.checkpoint.name: each.reasons for each in found.decisions}


INFOS: dict[str, tuple[list[CheckpointInfo], set[int]]] = {
    "after a rollback also the last committed one": (
        [info("step-900", modified_at=NOW - 3 * DAY), info("step-500", modified_at=NOW - DAY),
         info("step-100", modified_at=NOW - 9 * DAY)], {900, 500},
    ),
    "the last one by the clock of S3": (
        [info("step-1", created_at=NOW + 99 * DAY, modified_at=NOW - 9 * DAY), info("step-2", modified_at=NOW - DAY),
         info("step-3", modified_at=NOW - 2 * DAY)], {2, 3},
    ),
    "pinned, leased and without a step": (
        [info("step-1", pinned=True), info("step-2", leased_until=NOW + 9),
         info("step-3", leased_until=NOW - LEASE_MARGIN + 1), info("step-4", leased_until=NOW - LEASE_MARGIN),
         info("final"), info("step-5", foreign=True), info("step-6")], {1, 2, 3, 0, 6},
    ),
    "a pinned leftover": ([info("step-1", state="incomplete", modified_at=0.0, pinned=True)], {1}),
}  # fmt: skip


@pytest.mark.parametrize("why", INFOS)
def test_what_is_kept_whatever_the_policies_say(why: str) -> None:
    infos, steps = INFOS[why]
    assert {found.step or 0 for found in plan(*infos).kept} == steps


def test_a_damaged_newest_one_does_not_cost_the_last_good_one() -> None:
    found = plan(info("step-1"), info("step-2"), info("step-3", damage="gone"), info("step-4", damage="gone"))
    assert {each.name for each in found.kept} == {"step-2", "step-4"}
    assert "not known to be damaged" in reasons(found)["step-2"][0]
    found = plan(info("step-1"), info("step-2", modified_at=NOW - DAY), info("step-3", modified_at=NOW, damage="gone"))
    assert {each.name for each in found.kept} == {"step-1", "step-2", "step-3"}  # the last commit, and the newest


def test_a_save_in_progress_is_kept_until_the_grace_period_ends() -> None:
    for state in ("incomplete", "in_progress", "leftover"):  # by the plan's own grace period, whatever the catalog's
        infos = [
            info("step-1", state=state, modified_at=NOW - 99),
            info("step-2", state=state, modified_at=NOW - 100),
            info("step-3", state=state, modified_at=NOW + 5),
            info("step-4", state=state, modified_at=None),
            info("step-5", state=state, modified_at=NOW - 101, created_at=NOW),
        ]
        assert kept(*infos, grace=100) == {"step-1", "step-3", "step-4"}


def test_leftovers_of_a_committed_checkpoint_go_together_after_the_grace_period() -> None:
    def leftover(name: str, age: float, **fields: Any) -> LeftoverObject:
        return LeftoverObject(f"run/{name}/{age}", 7, NOW - age, name, **fields)

    infos = [info("step-1"), info("step-2"), info("step-3")]
    found = plan(
        *infos,
        leftovers=[
            leftover("step-1", 60), leftover("step-1", 9 * DAY),
            leftover("step-2", 8 * DAY), leftover("step-2", 60, is_lease=True),
            leftover("step-3", 9 * DAY),
        ],
    )  # fmt: skip
    assert {each.checkpoint for each in found.leftovers} == {"step-2", "step-3"}
    assert [each.name for each in found.deleted] == ["step-2"]  # step-1 is being overwritten
    assert found.freed == infos[1].size + 3 * 7  # type: ignore[operator]


def test_without_a_policy_only_leftovers_go() -> None:
    found = plan(info("step-1"), info("step-2"), info("step-3", state="incomplete", modified_at=0.0), policy=None)
    assert [each.name for each in found.deleted] == ["step-3"]
    assert reasons(found)["step-1"] == ("no policy",)


def test_deletions_that_were_cut_off_are_finished_unless_the_checkpoint_is_there_again() -> None:
    foreign = info("step-4", save_id=None)
    found = plan(
        info("step-1", state="incomplete", save_id=None, deletions=("ab",)),
        info("step-2", deletions=("ab", "cd")),
        dataclasses.replace(foreign, deletions=(foreign.deletion_id,)),
        policy=None,
    )
    assert [(each.checkpoint, each.deletion) for each in found.unfinished] == [("step-1", "ab"), ("step-2", "cd")]
    assert not found.empty


def test_all_reasons_are_told_floors_first() -> None:
    found = plan(info("step-7", pinned=True), policy=KeepLatest(1) | KeepEvery(7))
    assert reasons(found)["step-7"] == (
        "the newest committed checkpoint", "the last one that was committed", "pinned", "latest:1, number 1",
        "every:7, first from 7 on",
    )  # fmt: skip


# --- laws ----------------------------------------------------------------------------------------

scenes = st.fixed_dictionaries({"uploads": random.uploads, "leftovers": random.leftovers})


@given(random.histories(), random.policies, scenes)
def test_floors_hold(history: list[CheckpointInfo], policy: Policy, scene: dict[str, Any]) -> None:
    deleted = {each.name for each in plan(*history, policy=policy, **scene).deleted}
    committed = sorted((each for each in history if each.committed), key=age_order)
    good = [each for each in committed if each.damage is None]
    for newest in (committed[-1:], good[-1:]):
        assert not deleted & {each.name for each in newest}
    stamped = [each for each in committed if each.modified_at is not None and not math.isnan(each.modified_at)]
    last = max((each.modified_at for each in stamped if each.modified_at is not None), default=None)
    assert last is None or any(each.name not in deleted for each in stamped if each.modified_at == last)
    for each in history:
        young = not each.committed and (each.modified_at is None or each.modified_at > NOW - DAY)
        leased = each.leased_until is not None and each.leased_until > NOW
        overwritten = any(
            upload.initiated_at > NOW - DAY for upload in scene["uploads"] if upload.checkpoint == each.name
        )
        if each.pinned or leased or young or overwritten or each.waiting or each.state == "local":
            assert each.name not in deleted


@given(random.histories(), random.policies, random.policies, scenes)
def test_union_law_and_more_policies_never_delete_more(
    history: list[CheckpointInfo], one: Policy, other: Policy, scene: dict[str, Any]
) -> None:
    def found(policy: Any) -> set[str]:
        return kept(*history, policy=policy, **scene)

    assert found(one | other) == found(one) | found(other)
    assert found(one) <= found(one | other) <= found(None)


@given(random.histories(), random.policies, scenes, st.randoms())
def test_the_order_does_not_matter(
    history: list[CheckpointInfo], policy: Policy, scene: dict[str, Any], shuffled: Any
) -> None:
    before = plan(*history, policy=policy, **scene)
    for each in (history, scene["uploads"], scene["leftovers"]):
        shuffled.shuffle(each)
    after = plan(*history, policy=policy, **scene)
    assert repr(before.decisions) == repr(after.decisions)
    assert set(before.uploads) == set(after.uploads)


@given(random.histories(), random.policies, scenes)
def test_a_second_plan_after_the_first_deletes_nothing(
    history: list[CheckpointInfo], policy: Policy, scene: dict[str, Any]
) -> None:
    first = plan(*history, policy=policy, **scene)
    second = plan(
        *first.kept,
        policy=policy,
        uploads=[each for each in scene["uploads"] if each not in first.uploads],
        leftovers=[each for each in scene["leftovers"] if each not in first.leftovers],
    )
    assert second.empty
