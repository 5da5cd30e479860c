"""What a report shows, gathered from a snapshot of the catalog. Pure."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from dcp_s3.checkpoint.directory import LEASE_MARGIN
from dcp_s3.checkpoint.info import CheckpointInfo, age_order, in_grace
from dcp_s3.reporting.forecast import Forecast, commit_times, make_forecast
from dcp_s3.reporting.problems import Problem, find_problems
from dcp_s3.reprs import one_line
from dcp_s3.retention.catalog import CatalogSnapshot
from dcp_s3.retention.plan import Decision, Plan
from dcp_s3.retention.policy import PolicyFunction, metric_value, policy_name
from dcp_s3.units import plural

STATES = ("committed", "pinned", "foreign", "damaged", "in progress", "waits on disk", "incomplete", "being deleted")
"""How a checkpoint is shown, one word or two."""

LONGEST_SAVE = 30 * 86400.0
"""Seconds; no save takes longer."""


@dataclass(frozen=True, repr=False)
class ReportData:
    """What lies under a root, what retention makes of it, and what is wrong.

    >>> len(report("s3://bucket/run", None).decisions)
    2
    """

    root: str
    """URL of the root."""
    plan: Plan
    """What a prune would do."""
    policy: str | None
    """The policy in one line; None without: everything that is committed stays."""
    problems: tuple[Problem, ...]
    """What is wrong, the worst first."""
    forecast: Forecast | None
    """How storage will grow; None with fewer than two committed checkpoints."""
    stored: int
    """Bytes of all data objects, also of those that belong to no checkpoint. Not: parts of open uploads, and older
    versions in a versioned bucket."""
    requests: int = 0
    """Number of requests that it took."""

    def __repr__(self) -> str:
        found = f"{plural(len(self.plan.decisions), 'checkpoint')}, {plural(len(self.problems), 'problem')}"
        return one_line("ReportData", repr(self.root), found, policy=self.policy)

    @property
    def now(self) -> float:
        """Seconds since the epoch, on the clock of S3."""
        return self.plan.now

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """The checkpoints, oldest first, with whether retention keeps them and why."""
        return self.plan.decisions

    @property
    def newest(self) -> CheckpointInfo | None:
        """The committed checkpoint with the highest step."""
        committed = [each.checkpoint for each in self.decisions if each.checkpoint.committed]
        return max(committed, key=age_order, default=None)

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the metrics that are numbers in some checkpoint."""
        names = {name for each in self.decisions for name in each.checkpoint.metrics}
        return tuple(
            sorted(
                name
                for name in names
                if any(isinstance(each.checkpoint.metrics.get(name), (int, float)) for each in self.decisions)
            )
        )

    def to_dict(self) -> dict[str, Any]:
        """The fields, for JSON."""
        return asdict(self) | {"now": self.now}


def gather(
    snapshot: CatalogSnapshot, policy: PolicyFunction | None, *, grace: float, budget: int | None = None
) -> ReportData:
    """Everything that a report says about a root.

    Args:
        snapshot: the contents of the root, from a deep scan.
        policy: which checkpoints to keep; None keeps all that are committed.
        grace: seconds for which an uncommitted checkpoint counts as a save in progress.
        budget: bytes that storage should not exceed.

    Raises:
        PolicyError: the policy failed.
    """
    plan = snapshot.plan(policy, grace=grace)
    other = sum(each.size for each in snapshot.leftovers)
    return ReportData(
        root=snapshot.root,
        plan=plan,
        policy=None if policy is None else policy_name(policy),
        problems=find_problems(plan, snapshot.root),
        forecast=make_forecast(snapshot.checkpoints, policy, now=snapshot.now, grace=grace, other=other, budget=budget),
        stored=sum(info.size or 0 for info in snapshot.checkpoints) + other,
        requests=snapshot.requests,
    )


def shown_state(info: CheckpointInfo, *, now: float, grace: float) -> str:
    """The state of a checkpoint in a word or two (`STATES`): what matters most about it."""
    info = in_grace(info, now=now, grace=grace)
    if info.damage is not None:
        return "damaged"
    if info.deletions and not (info.committed and info.pinned):
        return "being deleted"
    if info.waiting or info.state == "local":
        return "waits on disk"
    if not info.committed:
        return "in progress" if info.state == "in_progress" else "incomplete"
    if info.pinned:
        return "pinned"
    return "foreign" if info.foreign else "committed"


def is_leased(info: CheckpointInfo, now: float) -> bool:
    """Whether a reader has a lease on a checkpoint."""
    return info.leased_until is not None and now < info.leased_until + LEASE_MARGIN


def took(info: CheckpointInfo) -> float | None:
    """Seconds from the beginning of a checkpoint's save to its commit; None if not recorded."""
    if not info.committed or info.started_at is None or info.created_at is None:
        return None
    seconds = info.created_at - info.started_at
    return seconds if 0 <= seconds <= LONGEST_SAVE else None  # otherwise a clock was set


def plotted(info: CheckpointInfo, metric: str) -> float:
    """A metric's value for a curve; NaN if there is none."""
    value = metric_value(info, metric)
    return float("nan") if value is None else value


def growth(data: ReportData) -> tuple[list[float], list[float]]:
    """Times (seconds since the epoch) and the bytes of the checkpoints of today that were stored by then."""
    times: list[float] = []
    sizes: list[float] = []
    total = 0.0
    for at, info in commit_times(each.checkpoint for each in data.decisions):
        total += info.size or 0
        times.append(at)
        sizes.append(total)
    return [*times, data.now], [*sizes, float(data.stored)]
