from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_s3 import KeepBest, KeepEvery, KeepLatest
from dcp_s3.checkpoint.info import CheckpointInfo
from dcp_s3.reporting.forecast import DAY, MOST_CHECKPOINTS, find_cadence, make_forecast
from tests.retention.histories import NOW, histories, info

HOUR = 3600.0


def saved(step: int, hours_ago: float, size: int = 100, **fields: object) -> CheckpointInfo:
    at = NOW - hours_ago * HOUR
    return info(f"step-{step}", created_at=at, modified_at=at, size=size, **fields)


def hourly(count: int, **fields: object) -> list[CheckpointInfo]:
    return [saved(100 * number, count - number, **fields) for number in range(1, count + 1)]


def forecast(infos: list[CheckpointInfo], policy: object = None, **arguments: object) -> object:
    return make_forecast(infos, policy, now=NOW, grace=DAY, **arguments)  # type: ignore[arg-type]


def test_the_cadence_is_the_median_of_the_newest() -> None:
    found = find_cadence(hourly(30))
    assert found is not None
    assert (found.interval, found.steps, found.size, found.intervals) == (HOUR, 100, 100, 20)
    assert found.per_day == 2400


def test_a_crash_and_what_retention_thinned_out_do_not_change_the_cadence() -> None:
    crash = [*hourly(5), *(saved(500 + 100 * number, -24 - number) for number in range(1, 6))]
    thinned = [saved(100 * step, 300 - step) for step in (0, 100, 200, 298, 299, 300)]
    for infos in (crash, thinned):
        found = find_cadence(infos)
        assert found is not None
        assert found.interval == HOUR
        assert found.steps == 100


def test_too_few_times_give_no_forecast() -> None:
    assert forecast([]) is None
    assert forecast([saved(1, 1)]) is None
    assert forecast([saved(1, 1), saved(2, 1)]) is None  # at the same time
    assert forecast([saved(1, 2), info("step-2", created_at=math.nan)]) is None
    assert forecast([saved(1, 2), saved(2, 1, state="incomplete")]) is None


def test_without_a_policy_it_grows_by_all_that_is_saved() -> None:
    found = forecast(hourly(48), other=7)
    assert found.without[0] == 48 * 100 + 7
    assert found.times[0] == NOW
    assert found.times[-1] == pytest.approx(NOW + 47 * HOUR)
    assert found.without[-1] == 48 * 100 + 7 + 47 * 100
    assert found.retained is None
    assert found.retained_per_day is None


def test_a_policy_of_the_latest_does_not_grow_and_one_of_multiples_does() -> None:
    found = forecast(hourly(48), KeepLatest(3))
    assert found.retained == tuple([300.0] * len(found.times))
    assert found.retained_per_day == 0
    found = forecast(hourly(48), KeepEvery(1000) | KeepLatest(1))
    assert found.retained[-1] > found.retained[0]
    assert found.retained_per_day == pytest.approx(240, rel=0.3)
    assert found.retained[-1] < found.without[-1]


def test_pinned_ones_stay_and_the_best_count_once() -> None:
    infos = hourly(24, metrics={"loss": 1.0})
    infos[3] = saved(400, 20, pinned=True, metrics={"loss": 1.0})
    found = forecast(infos, KeepBest(2, "loss", "min"))
    assert set(found.retained) == {300.0}


def test_a_budget_is_used_up_when_growth_says_so() -> None:
    found = forecast(hourly(24), KeepLatest(2), budget=10_000)
    assert found.full_without == pytest.approx(NOW + 76 * HOUR, abs=HOUR)
    assert found.full_retained is None  # it does not grow
    found = forecast(hourly(24), KeepLatest(2), budget=1000)
    assert found.full_without == NOW  # it is exceeded already
    assert found.full_retained is None
    found = forecast(hourly(24), KeepEvery(1000), budget=100_000)
    assert found.full_retained == pytest.approx(NOW + 100_000 / 240 * DAY, rel=0.4)


def test_checkpoints_without_steps_and_sizes() -> None:
    found = forecast([info(f"run{letter}", step=None, created_at=NOW - at * HOUR, size=None)
                      for at, letter in enumerate("abcd")], KeepLatest(1))  # fmt: skip
    assert found.without[-1] == 0
    assert found.cadence.steps == 1


def test_many_quick_saves_bound_the_horizon() -> None:
    infos = [saved(number, (200 - number) / 3600) for number in range(200)]
    found = forecast(infos, KeepLatest(5))
    assert found.times[-1] == pytest.approx(NOW + MOST_CHECKPOINTS)


@given(histories(), st.sampled_from([KeepLatest(2), KeepEvery(10), None]))
def test_it_holds_for_any_run(infos: list[CheckpointInfo], policy: object) -> None:
    found = make_forecast(infos, policy, now=NOW, grace=DAY, budget=1000)  # type: ignore[arg-type]
    if found is None:
        return
    assert list(found.without) == sorted(found.without)
    assert all(math.isfinite(each) for each in (*found.times, *found.without, *(found.retained or ())))
    assert found.retained is None or len(found.retained) == len(found.times)
    assert found.full_without is None or found.full_without >= NOW
