"""What is wrong under a root, and which command helps. Pure."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Literal

from dcp_s3.checkpoint.info import CheckpointInfo
from dcp_s3.reporting.forecast import commit_times, find_cadence
from dcp_s3.retention.plan import Plan
from dcp_s3.units import format_size

FAR_LONGER = 3.0
"""A save interval that is this many times the usual one is a gap."""

Severity = Literal["bad", "warning", "note"]


@dataclass(frozen=True)
class Problem:
    """Something that somebody should look at."""

    severity: Severity
    """``bad``: a checkpoint or time of training is lost. ``warning``: it costs storage, or may. ``note``: good to
    know."""
    kind: str
    """What it is, in two or three words."""
    text: str
    """What was found."""
    remedy: str = ""
    """The command that helps; empty if none does."""
    since: float | None = None
    """Seconds since the epoch; None if not known."""


def find_problems(plan: Plan, root: str) -> tuple[Problem, ...]:
    """Everything that is wrong, the worst first.

    Args:
        plan: what a prune of the root would do.
        root: URL of the root.
    """
    infos = [decision.checkpoint for decision in plan.decisions]
    found = [
        *_damaged(infos),
        *_gaps(infos, plan.now),
        *_waiting(infos),
        *_left_over(plan, root),
        *_not_finite(infos),
        *_foreign(infos),
    ]
    order = {"bad": 0, "warning": 1, "note": 2}
    return tuple(sorted(found, key=lambda each: order[each.severity]))


def format_span(seconds: float) -> str:
    """``5400`` -> ``1 h 30 min``: the two largest units; below ten seconds with a decimal."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        rest = round(seconds % 60)
        return f"{int(seconds // 60)} min" + (f" {rest} s" if seconds < 600 and 0 < rest < 60 else "")
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h" + (f" {minutes} min" if minutes else "")
    days, hours = divmod(hours, 24)
    return f"{days} d" + (f" {hours} h" if hours else "")


def _command(*words: str) -> str:
    return " ".join(["dcp-s3", *map(shlex.quote, words)])


def _count(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _damaged(infos: Iterable[CheckpointInfo]) -> Iterable[Problem]:
    for info in infos:
        if info.damage is not None:
            kind = "damaged" if info.committed else "perhaps complete"
            text = f"{info.name}: {info.damage}"
            yield Problem("bad", kind, text, _command("verify", info.url), info.created_at)


def _gaps(infos: Sequence[CheckpointInfo], now: float) -> Iterable[Problem]:
    timed = commit_times(infos)
    cadence = find_cadence(infos)
    if cadence is None or len(timed) < 4:
        return
    last, newest = timed[-1]
    if now - last > FAR_LONGER * cadence.interval:
        text = (
            f"nothing was committed for {format_span(now - last)} since {newest.name}; the usual interval is "
            f"{format_span(cadence.interval)}. Has the run ended, or does it hang?"
        )
        yield Problem("bad", "no new checkpoint", text, _command("ls", newest.url.rpartition("/")[0], "--all"), last)
    pairs = [
        (after - before, (newer.step or 0) - (older.step or 0), older, newer, before)
        for (before, older), (after, newer) in pairwise(timed)
    ]
    # By the step: where retention has thinned out the past, both time and steps between two are long.
    paces = [seconds / steps for seconds, steps, *_ in pairs if steps > 0]
    for seconds, steps, older, newer, before in pairs:
        usual = max(cadence.interval, steps * median(paces)) if paces and steps > 0 else cadence.interval
        if seconds > FAR_LONGER * usual:
            text = (
                f"{format_span(seconds)} between {older.name} and {newer.name}, where {format_span(usual)} was to be "
                "expected: a crash, a queue, or saves that failed"
            )
            yield Problem("warning", "gap", text, since=before)


def _waiting(infos: Iterable[CheckpointInfo]) -> Iterable[Problem]:
    for info in infos:
        if info.waiting or info.state == "local":
            text = f"{info.name} waits in this host's spill directory for S3; until it is drained only this host has it"
            yield Problem("bad", "waits on disk", text, _command("drain"), info.created_at)


def _left_over(plan: Plan, root: str) -> Iterable[Problem]:
    prune = _command("prune", root, "--dry-run")
    for decision in plan.decisions:
        info = decision.checkpoint
        if not info.committed and decision.action == "delete":
            size = format_size(info.size or 0)
            text = (
                f"{info.name} was never committed: {_count(info.objects or 0, 'object')}, {size} of a save that failed"
            )
            yield Problem("warning", "incomplete save", text, prune, info.created_at)
    objects = Counter(each.leftover.checkpoint for each in plan.leftovers if each.action == "delete")
    for name, count in objects.items():
        left = sum(each.leftover.size for each in plan.leftovers if each.leftover.checkpoint == name)
        text = f"{name}: {_count(count, 'object')} of a save that failed or was replaced, {format_size(left)}"
        yield Problem("warning", "leftover objects", text, prune)
    for unfinished in plan.unfinished:
        text = f"{unfinished.checkpoint}: its deletion was begun and not finished"
        yield Problem("warning", "unfinished deletion", text, _command("prune", root, "--yes"))
    uploads = Counter(each.upload.checkpoint for each in plan.uploads if each.action == "delete")
    for name, count in uploads.items():
        since = min(each.upload.initiated_at for each in plan.uploads if each.upload.checkpoint == name)
        text = (
            f"{name}: {count} multipart uploads that nobody finishes; their parts cost storage and no listing shows it"
        )
        yield Problem("warning", "open uploads", text, prune, since)


def _not_finite(infos: Sequence[CheckpointInfo]) -> Iterable[Problem]:
    names = sorted({name for info in infos for name in info.metrics})
    for name in names:
        bad = [info for info in infos if _is_not_finite(info.metrics.get(name))]
        if bad:
            text = f"{name} is not a finite number in {_count(len(bad), 'checkpoint')}, first in {bad[0].name}"
            yield Problem("note", "metric", text, since=bad[0].created_at)


def _is_not_finite(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _foreign(infos: Iterable[CheckpointInfo]) -> Iterable[Problem]:
    foreign = [info for info in infos if info.foreign and info.committed]
    if foreign:
        more = f" and {len(foreign) - 1} more" if len(foreign) > 1 else ""
        text = f"{foreign[0].name}{more}: written by something other than dcp_s3, without checksums and metrics"
        yield Problem("note", "foreign", text, _command("show", foreign[0].url))
