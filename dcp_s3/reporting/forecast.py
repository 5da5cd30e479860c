"""How storage will grow: the cadence of saves, and what retention leaves of them. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from dcp_s3.checkpoint.info import CheckpointInfo
from dcp_s3.retention.plan import make_plan
from dcp_s3.retention.policy import PolicyFunction

DAY = 86400.0
MOST_INTERVALS = 20
"""Newest checkpoints that the cadence and the size are taken from: a run's habits change."""
POINTS = 48
"""Points in time at which a forecast is made, and the policy applied."""
LONGEST = 90 * DAY
"""Seconds that a forecast looks ahead at most."""
MOST_CHECKPOINTS = 3000
"""Most checkpoints that a forecast makes up, to bound its time."""


@dataclass(frozen=True)
class Cadence:
    """How often a run saves, and how much."""

    interval: float
    """Seconds between two saves."""
    steps: int
    """Training steps between two saves; 1 if the names have none."""
    size: int
    """Bytes of a checkpoint."""
    intervals: int
    """Number of intervals that this was concluded from."""

    @property
    def per_day(self) -> float:
        """Bytes that a day adds if nothing is deleted."""
        return self.size * DAY / self.interval


@dataclass(frozen=True)
class Forecast:
    """Bytes stored from now on, if the run goes on as it does."""

    cadence: Cadence
    times: tuple[float, ...]
    """Seconds since the epoch, the first one now."""
    without: tuple[float, ...]
    """Bytes at those times if nothing is deleted."""
    retained: tuple[float, ...] | None
    """Bytes at those times if the policy is applied at each of them; None without a policy."""
    budget: int | None = None
    """Bytes that storage should not exceed; None without a budget."""
    full_without: float | None = None
    """When the budget is used up if nothing is deleted, in seconds since the epoch; None without a budget."""
    full_retained: float | None = None
    """The same with the policy; None if there is none, or as far as can be told never."""

    @property
    def retained_per_day(self) -> float | None:
        """Bytes that a day adds with the policy, by the second half of the forecast."""
        return None if self.retained is None else _slope(self.times, self.retained) * DAY


def commit_times(infos: Iterable[CheckpointInfo]) -> list[tuple[float, CheckpointInfo]]:
    """The committed checkpoints whose time is known, with it, the oldest first."""
    found = [
        (info.created_at, info)
        for info in infos
        if info.committed and info.created_at is not None and math.isfinite(info.created_at)
    ]
    return sorted(found, key=lambda pair: (pair[0], pair[1].name))


def find_cadence(infos: Iterable[CheckpointInfo]) -> Cadence | None:
    """The cadence of the newest checkpoints; None with fewer than two that have a time.

    Intervals that are more than twice the median of the newer ones count as pauses, or as thinned out by retention.
    """
    timed = commit_times(infos)
    seconds: list[float] = []
    steps: list[int] = []
    for (before, older), (after, newer) in zip(timed[-2::-1], timed[:0:-1], strict=True):
        if len(seconds) >= MOST_INTERVALS:
            break
        if after <= before or (seconds and after - before > 2 * median(seconds)):
            continue
        seconds.append(after - before)
        if older.step is not None and newer.step is not None and newer.step > older.step:
            steps.append(newer.step - older.step)
    if not seconds:
        return None
    sizes = [info.size for _, info in timed[-MOST_INTERVALS:] if info.size is not None]
    return Cadence(median(seconds), max(1, int(median(steps))) if steps else 1, int(median(sizes or [0])), len(seconds))


def make_forecast(
    checkpoints: Sequence[CheckpointInfo],
    policy: PolicyFunction | None,
    *,
    now: float,
    grace: float,
    other: int = 0,
    budget: int | None = None,
) -> Forecast | None:
    """Forecast the bytes stored under a root; None if no cadence can be told.

    It assumes that saves go on with the median interval, steps and size of the newest checkpoints, and with the newest
    one's metrics; and that the policy is applied at each point of the forecast. It looks as far ahead as the
    checkpoints reach back, but at least a day, and at most `LONGEST` or `MOST_CHECKPOINTS` saves.

    Args:
        checkpoints: all under one root.
        policy: which ones to keep; None keeps all.
        now: seconds since the epoch, on the clock of S3.
        grace: seconds for which an uncommitted checkpoint counts as a save in progress.
        other: bytes of what belongs to no checkpoint, and stays.
        budget: bytes that storage should not exceed.

    Raises:
        PolicyError: the policy failed.
    """
    cadence = find_cadence(checkpoints)
    if cadence is None:
        return None
    timed = commit_times(checkpoints)
    history = now - timed[0][0]
    ahead = min(max(DAY, history), LONGEST, MOST_CHECKPOINTS * cadence.interval)
    times = tuple(now + ahead * point / POINTS for point in range(POINTS + 1))
    stored = sum(info.size or 0 for info in checkpoints) + other
    without = tuple(stored + cadence.size * int((time - now) / cadence.interval + 1e-9) for time in times)
    retained = None if policy is None else _retained(checkpoints, policy, cadence, times, grace, other)
    return Forecast(
        cadence=cadence,
        times=times,
        without=without,
        retained=retained,
        budget=budget,
        full_without=None if budget is None else _full(times, without, budget, cadence.size / cadence.interval),
        full_retained=None if budget is None or retained is None else _full(times, retained, budget),
    )


def _retained(
    checkpoints: Sequence[CheckpointInfo],
    policy: PolicyFunction,
    cadence: Cadence,
    times: Sequence[float],
    grace: float,
    other: int,
) -> tuple[float, ...]:
    """Bytes at ``times`` if the policy is applied at each of them."""
    newest = commit_times(checkpoints)[-1][1]
    kept: Sequence[CheckpointInfo] = checkpoints
    bytes_at: list[float] = []
    saves = 0
    for time in times:
        added = []
        while times[0] + (saves + 1) * cadence.interval <= time + 1e-6:
            saves += 1
            at = times[0] + saves * cadence.interval
            added.append(
                replace(
                    newest, name=f"forecast/{saves}",  # no checkpoint's: a name has no slash
                    step=None if newest.step is None else newest.step + saves * cadence.steps, created_at=at,
                    modified_at=at, written_at=None, size=cadence.size, pinned=False, leased_until=None, waiting=False,
                    deletions=(), damage=None,
                )
            )  # fmt: skip
        kept = make_plan([*kept, *added], policy, now=time, grace=grace).kept
        bytes_at.append(float(sum(info.size or 0 for info in kept) + other))
    return tuple(bytes_at)


def _full(times: Sequence[float], bytes_at: Sequence[float], budget: int, rate: float | None = None) -> float | None:
    """When ``bytes_at`` reaches the budget, beyond the last time at ``rate`` (bytes per second)."""
    for time, count in zip(times, bytes_at, strict=True):
        if count >= budget:
            return time
    slope = _slope(times, bytes_at) if rate is None else rate
    return times[-1] + (budget - bytes_at[-1]) / slope if slope > 0 else None


def _slope(times: Sequence[float], bytes_at: Sequence[float]) -> float:
    """Bytes per second over the second half."""
    middle = len(times) // 2
    return (bytes_at[-1] - bytes_at[middle]) / (times[-1] - times[middle])
