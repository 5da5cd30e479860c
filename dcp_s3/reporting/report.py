"""`report`: what lies under a root, what a prune would keep and why, and what is wrong."""

from __future__ import annotations

import math
import os
import shlex
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Literal

from dcp_s3.checkpoint.info import CheckpointInfo, age_order
from dcp_s3.errors import CheckpointNotFoundError
from dcp_s3.retention.catalog import CheckpointCatalog
from dcp_s3.retention.parse import parse_policy, policy_from_settings
from dcp_s3.retention.plan import CatalogSnapshot, Plan
from dcp_s3.retention.policy import PolicyFunction, policy_name
from dcp_s3.settings import SettingsLike, resolve_settings
from dcp_s3.units import format_seconds, format_size, one_line, parse_duration, plural
from dcp_s3.url import URLLike

_FAR_LONGER = 3.0  # than the usual interval between saves: then something is wrong
_NEWEST = 20  # checkpoints that tell the usual interval


@dataclass(frozen=True)
class Problem:
    """Something that somebody should look at."""

    severity: Literal["bad", "warning"]
    """``bad``: a checkpoint or time of training is lost. ``warning``: it costs storage."""
    kind: str
    """What it is, in two or three words."""
    text: str
    """What was found."""
    remedy: str = ""
    """The command that helps; empty if none does."""


@dataclass(frozen=True, repr=False)
class ReportData:
    """What lies under a root, what retention makes of it, and what is wrong.

    >>> report("s3://bucket/run", None).problems
    ()
    """

    root: str
    """URL of the root."""
    plan: Plan
    """What a prune would do: a decision for each checkpoint, oldest first, with all reasons."""
    policy: str | None
    """The policy in one line; None without: everything that is committed stays."""
    problems: tuple[Problem, ...]
    """What is wrong, the worst first."""
    stored: int
    """Bytes of all data objects, also of those that belong to no checkpoint. Not: parts of open uploads, and older
    versions in a versioned bucket."""

    def __repr__(self) -> str:
        found = f"{plural(len(self.plan.decisions), 'checkpoint')}, {plural(len(self.problems), 'problem')}"
        return one_line("ReportData", repr(self.root), found, policy=self.policy)

    @property
    def newest(self) -> CheckpointInfo | None:
        """The committed checkpoint with the highest step."""
        committed = [each.checkpoint for each in self.plan.decisions if each.checkpoint.committed]
        return max(committed, key=age_order, default=None)

    def to_dict(self) -> dict[str, Any]:
        """The fields, for JSON."""
        return asdict(self)


def report(
    root: URLLike,
    path: str | os.PathLike[str] | None,
    policy: PolicyFunction | str | None = None,
    *,
    grace: float | str | None = None,
    settings: SettingsLike = None,
) -> ReportData:
    """Write one HTML page about the checkpoints under ``root``: sizes, seconds, metrics, retention and problems.

    The page needs neither a network nor JavaScript. Nothing in the bucket is changed. It takes as many requests as a
    dry run of `prune`: two listings, and about five small requests for each checkpoint.

    >>> report("s3://bucket/run", None).policy is None
    True

    ``path`` is the file to write, over what is there; with None, what it would show is only returned. ``policy`` (an
    object, or one line for `parse_policy`) and ``grace`` are those of `prune`, whose decisions are shown.

    Raises:
        CheckpointNotFoundError: there is nothing under the root. No file was written.
        SettingsError, InvalidURLError
        StorageError: the root could not be looked at.
        OSError: the file could not be written.
    """
    resolved = resolve_settings(settings)
    keep = parse_policy(policy) if isinstance(policy, str) else policy
    keep = policy_from_settings(resolved) if policy is None else keep
    snapshot = CheckpointCatalog(root, settings=resolved).scan()
    if not snapshot.checkpoints and not snapshot.uploads:
        raise CheckpointNotFoundError(
            f"there are no checkpoints under {snapshot.root}. Remedy: give the URL above the checkpoints, for example "
            "s3://bucket/run for s3://bucket/run/step-1000",
            url=snapshot.root,
        )
    found = gather(snapshot, keep, grace=resolved.retention_grace if grace is None else parse_duration(grace))
    if path is not None:
        from dcp_s3.reporting.page import render  # imports this module

        Path(path).write_text(render(found), encoding="utf-8")
    return found


def gather(snapshot: CatalogSnapshot, policy: PolicyFunction | None, *, grace: float) -> ReportData:
    """Everything that a report says about the contents of a root, from a deep scan. Pure."""
    plan = snapshot.plan(policy, grace=grace)
    infos = [decision.checkpoint for decision in plan.decisions]
    root = snapshot.root
    problems = (*_not_loadable(infos), *_silence(infos, plan.now, root), *_left_over(plan, root))
    stored = sum(info.size or 0 for info in infos) + sum(each.size for each in snapshot.leftovers)
    return ReportData(root, plan, None if policy is None else policy_name(policy), problems, stored)


# --- problems ----------------------------------------------------------------------------------------------


def _command(*words: str) -> str:
    return shlex.join(["dcp-s3", *words])


def _not_loadable(infos: Iterable[CheckpointInfo]) -> Iterable[Problem]:
    for info in infos:
        if info.damage is not None:
            kind = "damaged" if info.committed else "perhaps complete"
            yield Problem("bad", kind, f"{info.name}: {info.damage}", _command("verify", info.url))
        if info.waiting or info.state == "local":
            text = f"{info.name} waits in this host's spill directory for S3; until it is drained only this host has it"
            yield Problem("bad", "waits on disk", text, _command("drain"))


def _silence(infos: Iterable[CheckpointInfo], now: float, root: str) -> Iterable[Problem]:
    committed = [(info.created_at, info.name) for info in infos if info.committed and info.created_at is not None]
    timed = sorted(each for each in committed if math.isfinite(each[0]))
    intervals = [after - before for (before, _), (after, _) in pairwise(timed[-_NEWEST:])]
    if len(intervals) < 3 or not median(intervals):
        return
    (last, newest), usual = timed[-1], median(intervals)
    if now - last > _FAR_LONGER * usual:
        text = (
            f"nothing was committed for {format_seconds(now - last)} since {newest}; the usual interval is "
            f"{format_seconds(usual)}. Has the run ended, or does it hang?"
        )
        yield Problem("bad", "no new checkpoint", text, _command("ls", root, "--all"))


def _left_over(plan: Plan, root: str) -> Iterable[Problem]:
    found = [
        (
            "incomplete save",
            f"{info.name} was never committed: {plural(info.objects or 0, 'object')}, {format_size(info.size or 0)} of "
            "a save that failed",
        )
        for info in (each.checkpoint for each in plan.decisions if each.action == "delete")
        if not info.committed
    ]
    left = plan.leftovers
    for name, count in Counter(each.checkpoint for each in left).items():
        size = format_size(sum(each.size for each in left if each.checkpoint == name))
        text = f"{name}: {plural(count, 'object')} of a save that failed or was replaced, {size}"
        found.append(("leftover objects", text))
    found += [
        ("unfinished deletion", f"{each.checkpoint}: its deletion was begun and not finished")
        for each in plan.unfinished
    ]
    uploads = Counter(each.checkpoint for each in plan.uploads)
    for name, count in uploads.items():
        text = f"{name}: {plural(count, 'multipart upload')} that nobody finishes; the parts cost storage"
        found.append(("open uploads", f"{text} and no listing shows them"))
    return [Problem("warning", kind, text, _command("prune", root, "--dry-run")) for kind, text in found]
