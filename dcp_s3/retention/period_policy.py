"""Policies by the calendar: one checkpoint of each hour, day or week. Pure."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from dcp_s3.checkpoint.info import CheckpointInfo, age_order
from dcp_s3.retention.policy import Policy, Reasons, check_count


@dataclass(frozen=True)
class _KeepPerPeriod(Policy):
    """Keeps the newest checkpoint of each of the last ``n`` periods."""

    n: int

    def __post_init__(self) -> None:
        check_count(self, "n", self.n)

    def __call__(self, checkpoints: Sequence[CheckpointInfo], now: float, /) -> Reasons:
        newest: dict[str, CheckpointInfo] = {}
        reasons: dict[str, list[str]] = {}
        for info in sorted(checkpoints, key=_time_order):
            time = _commit_time(info)
            if time is None:
                reasons[info.name] = [f"{self}, its time is not known"]
            else:
                newest[self._period(min(time, now))] = info
        for period in sorted(newest, reverse=True)[: self.n]:
            reasons[newest[period].name] = [f"{self}, last of {period}"]
        return reasons

    @abstractmethod
    def _period(self, time: float) -> str:
        """Name of the period in which ``time`` (seconds since the epoch) lies; names sort as the periods do."""


class KeepHourly(_KeepPerPeriod):
    """Keeps the newest checkpoint, by time of commit, of each of the last ``n`` hours (UTC) that have any.

    A run that pauses keeps what it has: hours without checkpoints do not count. A time in the future counts as now.
    Checkpoints whose time is not known are kept.

    >>> KeepLatest(3) | KeepHourly(24)
    KeepLatest(k=3) | KeepHourly(n=24)

    Raises:
        PolicyError: ``n`` is not a whole number above 0.
    """

    def _period(self, time: float) -> str:
        return _utc(time).strftime("%Y-%m-%d %Hh")

    def __str__(self) -> str:
        return f"hourly:{self.n}"


class KeepDaily(_KeepPerPeriod):
    """Keeps the newest checkpoint, by time of commit, of each of the last ``n`` days (UTC) that have any.

    A run that pauses keeps what it has: days without checkpoints do not count. A time in the future counts as now.
    Checkpoints whose time is not known are kept.

    >>> prune("s3://bucket/run", KeepLatest(3) | KeepDaily(7)).deleted
    ()

    Raises:
        PolicyError: ``n`` is not a whole number above 0.
    """

    def _period(self, time: float) -> str:
        return _utc(time).strftime("%Y-%m-%d")

    def __str__(self) -> str:
        return f"daily:{self.n}"


class KeepWeekly(_KeepPerPeriod):
    """Keeps the newest checkpoint, by time of commit, of each of the last ``n`` weeks (UTC) that have any.

    A run that pauses keeps what it has: weeks without checkpoints do not count. A time in the future counts as now.
    Checkpoints whose time is not known are kept.

    >>> str(KeepDaily(7) | KeepWeekly(8))
    'daily:7 weekly:8'

    Raises:
        PolicyError: ``n`` is not a whole number above 0.
    """

    def _period(self, time: float) -> str:
        year, week, _ = _utc(time).isocalendar()
        return f"{year:04}-W{week:02}"

    def __str__(self) -> str:
        return f"weekly:{self.n}"


def _commit_time(info: CheckpointInfo) -> float | None:
    time = info.modified_at if info.created_at is None else info.created_at
    return time if time is not None and math.isfinite(time) else None


def _time_order(info: CheckpointInfo) -> tuple[Any, ...]:
    return (_commit_time(info) or 0.0, *age_order(info))


def _utc(time: float) -> datetime:
    try:
        return datetime.fromtimestamp(max(time, 0.0), timezone.utc)
    except (OverflowError, ValueError, OSError):
        return datetime.max.replace(tzinfo=timezone.utc)
