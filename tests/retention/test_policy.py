"""What each policy keeps, what is kept whatever policies say, and what a plan promises."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_s3 import KeepBest, KeepDaily, KeepEvery, KeepLatest, KeepWithin, Policy
from dcp_s3.checkpoint.info import CheckpointInfo, age_order
from dcp_s3.errors import SettingsError
from dcp_s3.retention.plan import LEASE_MARGIN, CatalogSnapshot, LeftoverObject, OpenUpload, Plan
from dcp_s3.retention.policy import AnyOf, PolicyFunction, best_first, parse_policy, policy_from_settings, run_policy
from dcp_s3.settings import Settings
from tests.retention.runs import keep_steps

NOW = 1_700_000_000.0
DAY = 86400.0


def info(name: str = "step-1", **fields: Any) -> CheckpointInfo:
    """A committed checkpoint an hour old."""
    step = int(name.rpartition("-")[2]) if name.rpartition("-")[2].isdigit() else None
    usual: dict[str, Any] = {
        "state": "committed", "step": step, "created_at": NOW - 3600, "world_size": 1, "objects": 1, "size": 10,
        "modified_at": NOW - 3600, "save_id": "ab", "etag": '"e"',
    }  # fmt: skip
    return CheckpointInfo(url=f"s3://bucket/run/{name}", name=name, **(usual | fields))


_times = st.one_of(
    st.none(), st.floats(NOW - 100 * DAY, NOW), st.floats(NOW, NOW + 10 * DAY), st.sampled_from([0.0, NOW, math.nan])
)
_values = st.one_of(
    st.floats(-3, 3),
    st.integers(-3, 3),
    st.booleans(),
    st.sampled_from([math.nan, math.inf, -math.inf, "good", 10**400]),
)
_infos = st.fixed_dictionaries(
    {
        "state": st.sampled_from(["committed"] * 6 + ["incomplete", "in_progress", "leftover", "local"]),
        "step": st.one_of(st.none(), st.integers(0, 60)),
        "created_at": _times,
        "modified_at": _times,
        "written_at": _times,
        "metrics": st.dictionaries(st.sampled_from(["loss", "acc"]), _values),
        "pinned": st.sampled_from([False] * 9 + [True]),
        "leased_until": st.one_of(st.none(), st.none(), st.floats(NOW - 200, NOW + 200)),
        "waiting": st.sampled_from([False] * 9 + [True]),
        "damage": st.sampled_from([None, None, None, "broken"]),
        "foreign": st.booleans(),
    }
)


# Checkpoints of one root, in any order of step and time.
histories = st.lists(_infos, max_size=12).map(
    lambda found: [info(f"c{number}", **fields) for number, fields in enumerate(found)]
)


_counts = st.integers(1, 6)
single_policies: st.SearchStrategy[Policy] = st.one_of(
    st.builds(KeepLatest, _counts),
    st.builds(KeepBest, _counts, st.sampled_from(["loss", "acc", "x:y"]), st.sampled_from(["min", "max"]),
              st.sampled_from(["keep", "drop"])),
    st.builds(KeepEvery, st.integers(1, 20)),
    st.builds(KeepWithin, st.integers(0, 50 * 86400)),
    st.builds(KeepDaily, _counts),
)  # fmt: skip
policies: st.SearchStrategy[Policy] = st.one_of(
    single_policies, st.lists(single_policies, min_size=1, max_size=3).map(lambda found: AnyOf(tuple(found)))
)

_places = st.integers(0, 14).map(lambda number: f"c{number}")
uploads = st.lists(
    st.builds(
        lambda place, number, time: OpenUpload(f"run/{place}/__{number}_0-ab.distcp", f"u{number}", time, place),
        _places, st.integers(0, 99), st.floats(NOW - 3 * DAY, NOW + 60),
    ),
    max_size=5,
)  # fmt: skip
leftovers = st.lists(
    st.builds(
        lambda place, number, time, lease: LeftoverObject(f"run/{place}/{number}", 5, time, place, is_lease=lease),
        _places, st.integers(0, 99), st.floats(NOW - 3 * DAY, NOW + 60), st.booleans(),
    ),
    max_size=5,
)  # fmt: skip


def keeps(policy: PolicyFunction, *infos: CheckpointInfo) -> set[str]:
    return set(run_policy(policy, sorted(infos, key=age_order), NOW))


def steps(*numbers: int) -> list[CheckpointInfo]:
    return [info(f"step-{number}") for number in numbers]


def at(name: str, *when: int, **fields: Any) -> CheckpointInfo:
    """A checkpoint of a time in UTC."""
    return info(name, created_at=datetime(*when, tzinfo=timezone.utc).timestamp(), **fields)  # type: ignore[arg-type]


LOSSES = [info(f"step-{number}", metrics={"loss": loss}) for number, loss in enumerate((3, 1.5, 2, -1))]
EQUAL = [info(f"step-{number}", metrics={"loss": 1}) for number in range(4)]
LONG_AGO = NOW - 3 * DAY
TIMES = [
    info("old-1", created_at=LONG_AGO, modified_at=LONG_AGO),
    info("copied-2", created_at=LONG_AGO, modified_at=NOW - DAY),
    info("slow-clock-3", created_at=0.0, modified_at=NOW - DAY),
    info("fast-clock-4", created_at=NOW + 30 * DAY, modified_at=NOW - DAY),
    info("unknown-5", created_at=None, modified_at=None),
    info("nan-6", created_at=math.nan, modified_at=None),
]
DAYS = [
    at("step-1", 2023, 1, 1, 5), at("step-2", 2023, 1, 1, 23, 59), at("step-3", 2023, 3, 7), at("step-4", 2023, 11, 1),
]  # fmt: skip
FUTURE = [
    info("step-2", created_at=NOW - 60), *(info(f"step-{n}", created_at=NOW + n * DAY) for n in (3, 4, 5)),
    info("step-1", created_at=NOW - DAY), info("step-9", created_at=None, modified_at=None),
]  # fmt: skip

KEPT: list[tuple[str, PolicyFunction, list[CheckpointInfo], str]] = [
    ("the highest steps", KeepLatest(2), steps(5, 40, 7), "step-40 step-7"),
    ("the newest of a step", KeepLatest(1), [info("a-3", created_at=NOW), info("b-3", created_at=NOW - 9)], "a-3"),
    ("of one time the last name", KeepLatest(1), [info("a-3"), info("b-3")], "b-3"),
    ("a step before none", KeepLatest(1), [info("late", created_at=NOW), *steps(1)], "step-1"),
    ("more than there are", KeepLatest(9), steps(1, 2), "step-1 step-2"),
    ("the lowest", KeepBest(2, "loss", "min"), LOSSES, "step-1 step-3"),
    ("the highest", KeepBest(2, "loss", "max"), LOSSES, "step-0 step-2"),
    ("of equal values the newest", KeepBest(1, "loss", "min"), EQUAL, "step-3"),
    ("of equal values the newest, too", KeepBest(1, "loss", "max"), EQUAL, "step-3"),
    ("each multiple", KeepEvery(100), steps(0, 50, 100, 150, 200, 250), "step-0 step-100 step-200"),
    ("the first after it", KeepEvery(100), steps(50, 90, 110, 190, 310), "step-110 step-310"),
    ("all of one step", KeepEvery(10), [info("a-10"), info("b-10"), info("c-11"), info("final")], "a-10 b-10"),
    ("by the later of two times", KeepWithin("48h"), TIMES, "copied-2 slow-clock-3 fast-clock-4 unknown-5 nan-6"),
    ("to the second", KeepWithin(60), [info("edge-1", created_at=NOW - 60, modified_at=None)], "edge-1"),
    ("days without any do not count", KeepDaily(2), DAYS, "step-3 step-4"),
    ("the last of each day", KeepDaily(9), DAYS, "step-2 step-3 step-4"),
    ("the last commit of a day, not the highest step", KeepDaily(1), [at("step-900", 2023, 1, 1, 5),
     at("step-300", 2023, 1, 1, 9)], "step-300"),
    ("the future is now, the unknown is kept", KeepDaily(2), FUTURE, "step-5 step-1 step-9"),
    ("times that are none", KeepDaily(1), [info("a-1", created_at=-1e300), info("a-2", created_at=1e300)], "a-2"),
]  # fmt: skip


@pytest.mark.parametrize(("policy", "infos", "names"), [pytest.param(*row[1:], id=row[0]) for row in KEPT])
def test_what_each_policy_keeps(policy: PolicyFunction, infos: list[CheckpointInfo], names: str) -> None:
    assert keeps(policy, *infos) == set(names.split())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, "0.1", None, 10**400])
def test_what_is_no_finite_number_counts_as_missing(value: object) -> None:
    infos = [info("step-1", metrics={"loss": 5}), info("step-2", metrics={"loss": value}), info("step-3")]
    for mode in ("min", "max"):
        assert keeps(KeepBest(1, "loss", mode), *infos) == {"step-1", "step-2", "step-3"}  # type: ignore[arg-type]
        assert keeps(KeepBest(1, "loss", mode, missing="drop"), *infos) == {"step-1"}  # type: ignore[arg-type]
    assert [found.name for found in best_first(infos, "loss", "min")] == ["step-1"]


def odd_steps(checkpoints: Sequence[CheckpointInfo], now: float) -> Mapping[str, Sequence[str]]:
    return {found.name: ["odd"] for found in checkpoints if (found.step or 0) % 2}


def test_any_function_is_a_policy() -> None:
    assert keeps(odd_steps, *steps(1, 2, 3)) == {"step-1", "step-3"}
    policy = KeepEvery(4) | odd_steps
    assert keeps(policy, *steps(1, 2, 4)) == {"step-1", "step-4"}
    assert str(policy) == "every:4 odd_steps"
    for none in ("latest:3", KeepLatest(1) | "latest:3"):  # type: ignore[operator]
        with pytest.raises(SettingsError, match="latest:3"):
            run_policy(none, [], NOW)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("answer", "said"),
    [(None, "mapping"), ({"step-7": ["typo"]}, "step-7"), ({"step-1": None}, "step-1"), ({"step-1": "x"}, "step-1"),
     (ZeroDivisionError("oops"), "oops")],
)  # fmt: skip
def test_nonsense_of_a_users_policy_is_an_error(answer: Any, said: str) -> None:
    def mine(checkpoints: Sequence[CheckpointInfo], now: float) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    for policy in (mine, KeepLatest(1) | mine):
        with pytest.raises(SettingsError, match=f"mine.*{said}|{said}.*mine") as caught:
            run_policy(policy, steps(1, 2), NOW)
        assert "nothing is deleted" in str(caught.value)


@pytest.mark.parametrize(
    "make",
    [
        lambda: KeepLatest(True), lambda: KeepLatest("3"), lambda: KeepDaily(-1), lambda: KeepEvery(1.5),  # type: ignore[arg-type]
        lambda: KeepBest(0, "loss", "min"), lambda: KeepBest(1, "a b", "min"),
        lambda: KeepBest(1, "loss", "min", missing="no"),  # type: ignore[arg-type]
        lambda: KeepWithin(math.nan), lambda: KeepWithin(math.inf), lambda: KeepWithin(timedelta(-1)),
        lambda: best_first([], "loss", "low"),  # type: ignore[arg-type]
    ],
)  # fmt: skip
def test_bad_arguments(make: Any) -> None:
    with pytest.raises(SettingsError, match="expected"):
        make()


def test_a_line_of_policies(monkeypatch: pytest.MonkeyPatch) -> None:
    line = "latest:3 best:2:val_loss:min every:10000 within:48h daily:7"
    policy = parse_policy(line)
    assert policy == (
        KeepLatest(3) | KeepBest(2, "val_loss", "min") | KeepEvery(10000) | KeepWithin("2d") | KeepDaily(7)
    )
    assert str(policy) == line
    assert KeepWithin("48h") == KeepWithin(timedelta(days=2)) == KeepWithin(2 * DAY)
    assert parse_policy(" latest:3\t") == KeepLatest(3)
    assert parse_policy("best:1:eval:loss:max:drop") == KeepBest(1, "eval:loss", "max", "drop")
    assert parse_policy("  ") is None
    assert policy_from_settings(Settings()) is None
    monkeypatch.setenv("DCP_S3_RETENTION", "latest:3 daily:7")
    assert policy_from_settings(Settings()) == KeepLatest(3) | KeepDaily(7)
    with pytest.raises(SettingsError, match=r"DCP_S3_RETENTION = 'latest:x'.*latest:K"):
        policy_from_settings(Settings(retention="latest:x"))


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("steps:3", "latest:K.*daily:N"), ("latest", "latest:K"), ("latest:0", "1 or more"),
        ("latest:\u0663", "latest:K"), ("latest:" + "9" * 5000, "latest:K"), ("latest:3,best:2", "latest:K"),
        ("best:2:val_loss", "best:K:METRIC"), ("best:2:val_loss:low", "min"), ("best:2::min", "metric"),
        ("every:1k", "every:STEPS"), ("within:soon", "48h"), ("within:4.5", "unit"),
    ],
)  # fmt: skip
def test_a_bad_word_is_named_with_what_is_allowed(word: str, said: str) -> None:
    with pytest.raises(SettingsError, match=said) as caught:
        parse_policy(f"daily:7 {word}")
    assert repr(word) in str(caught.value)


@given(policies)
def test_the_text_of_a_policy_is_the_policy(policy: Policy) -> None:
    parsed = parse_policy(str(policy))
    assert str(parsed) == str(policy)
    assert run_policy(parsed, steps(1, 20), NOW) == run_policy(policy, steps(1, 20), NOW)  # type: ignore[arg-type]


_NOTHING = keep_steps()


def plan(*infos: CheckpointInfo, policy: Any = _NOTHING, grace: float = DAY, **found: Any) -> Plan:
    return CatalogSnapshot("s3://bucket/run", NOW, infos, **found).plan(policy, grace=grace)


def kept(*infos: CheckpointInfo, **arguments: Any) -> set[str]:
    return {found.name for found in plan(*infos, **arguments).kept}


_WRONG_CLOCK = info("step-1", created_at=NOW + 99 * DAY, modified_at=NOW - 9 * DAY)
FLOORS: list[tuple[str, list[CheckpointInfo], str]] = [
    ("pinned, leased, or without a step", [
        info("step-1", pinned=True), info("step-2", leased_until=NOW + 9),
        info("step-3", leased_until=NOW - LEASE_MARGIN + 1), info("step-4", leased_until=NOW - LEASE_MARGIN),
        info("final"), info("step-5", foreign=True), info("step-6"),
        info("step-7", state="incomplete", modified_at=0.0, pinned=True),
        info("step-8", state="incomplete", modified_at=0.0),
    ], "step-1 step-2 step-3 final step-6 step-7"),
    ("after a rollback the last one committed by the clock of S3, too", [
        _WRONG_CLOCK, info("step-5", modified_at=NOW - DAY), info("step-9", modified_at=NOW - 3 * DAY),
    ], "step-5 step-9"),
    ("the last good one", [*steps(1, 2), info("step-3", damage="gone"), info("step-4", damage="gone")],
     "step-2 step-4"),
    ("the last commit, and the newest", [
        info("step-1"), info("step-2", modified_at=NOW - DAY), info("step-3", modified_at=NOW, damage="gone"),
    ], "step-1 step-2 step-3"),
    # By the plan's own grace period, whatever the catalog's.
    *((f"a save in progress that is {state}", [
        info("step-1", state=state, modified_at=NOW - DAY + 1), info("step-2", state=state, modified_at=NOW - DAY),
        info("step-3", state=state, modified_at=NOW + 5), info("step-4", state=state, modified_at=None),
        info("step-5", state=state, modified_at=NOW - DAY - 1, created_at=NOW),
    ], "step-1 step-3 step-4") for state in ("incomplete", "in_progress", "leftover")),
]  # fmt: skip


@pytest.mark.parametrize(("infos", "names"), [pytest.param(*row[1:], id=row[0]) for row in FLOORS])
def test_what_is_kept_whatever_policies_say(infos: list[CheckpointInfo], names: str) -> None:
    found = plan(*infos)
    assert {each.name for each in found.kept} == set(names.split())
    assert all(each.reasons for each in found.decisions)


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


scenes = st.fixed_dictionaries({"uploads": uploads, "leftovers": leftovers})


@given(histories, policies, scenes)
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


@given(histories, policies, policies, scenes)
def test_union_law_and_more_policies_never_delete_more(
    history: list[CheckpointInfo], one: Policy, other: Policy, scene: dict[str, Any]
) -> None:
    def found(policy: Any) -> set[str]:
        return kept(*history, policy=policy, **scene)

    assert found(one | other) == found(one) | found(other)
    assert found(one) <= found(one | other) <= found(None)


@given(histories, policies, scenes)
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
