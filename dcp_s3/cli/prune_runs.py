"""Runs of ``dcp-s3 prune``: plan, show, ask, act; once or again and again."""

from __future__ import annotations

import dataclasses
import logging
import random
import signal
import threading
from dataclasses import dataclass
from typing import Any

from dcp_s3.cli import tables
from dcp_s3.cli.app import ask, note, print_json, print_line, progress_of_steps, to_json
from dcp_s3.errors import DcpS3Error
from dcp_s3.retention.plan import Plan
from dcp_s3.retention.policy import Policy
from dcp_s3.retention.prune import PruneReport, apply_plan, prune
from dcp_s3.settings import Settings
from dcp_s3.units import format_size, plural

logger = logging.getLogger(__name__)

_JITTER = 0.1  # of the interval, to either side


@dataclass(frozen=True)
class Job:
    """What to prune, and how."""

    root: str
    """URL above the checkpoints."""
    policy: Policy | None
    """Which checkpoints to keep. None: all that are committed."""
    settings: Settings
    """Settings in effect."""
    grace: float | None
    """Grace period in seconds. None: that of the settings."""
    dry_run: bool
    """Only show what would be done."""
    all_versions: bool
    """Delete all versions of the objects."""
    force: bool
    """Allow a grace period under an hour."""

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments for `prune`."""
        # Empty text keeps all; None would mean the policy of the settings.
        return {
            "policy": self.policy or "",
            "grace": self.grace,
            "force": self.force,
            "settings": self.settings,
        }


def is_empty(plan: Plan) -> bool:
    """Whether there is nothing under the root."""
    return not (plan.decisions or plan.uploads or plan.leftovers or plan.unfinished or plan.boards)


def run_once(job: Job, *, yes: bool, as_json: bool) -> PruneReport:
    """Plan, show the plan, ask (unless ``yes``), act, and report."""
    with progress_of_steps("plan"):  # without a total: a pulsing bar
        report = prune(job.root, dry_run=True, **job.arguments)
    shown = job.dry_run or not yes or tables.make_console().is_terminal
    if shown and not as_json and not is_empty(report.plan):
        tables.make_console().print(tables.plan(report.plan))
        note(tables.plan_summary(report.plan))
    if not job.dry_run and not report.plan.empty:
        if not yes:
            ask(f"{tables.plan_summary(report.plan)}. Delete?" if as_json else "Delete?")
        with progress_of_steps("prune") as progress:
            report = apply_plan(
                job.root, report.plan, all_versions=job.all_versions, settings=job.settings, progress=progress
            )
    else:
        report = dataclasses.replace(report, dry_run=job.dry_run)
    if as_json:
        print_json(report.to_dict())
    elif not job.dry_run:
        say_done(report)
    return report


def run_every(job: Job, interval: float, *, as_json: bool) -> None:
    """Prune again and again, until SIGTERM or Ctrl-C. A run that fails is logged; the next one follows.

    Args:
        job: what to prune. Nobody is asked.
        interval: seconds between the end of one run and the beginning of the next, plus or minus a tenth.
        as_json: print one line of JSON for each run.
    """

    stop = threading.Event()

    def end(number: int, _: object) -> None:
        stop.set()
        signal.signal(number, signal.SIG_DFL)  # the second one does not wait for the step under way

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    while not stop.is_set():
        _run_again(job, stop, as_json=as_json)
        stop.wait(interval * random.uniform(1 - _JITTER, 1 + _JITTER))
    note("ended")


class _Stopped(Exception):  # noqa: N818 - not an error
    """Ends a run early; the next prune finishes it."""


def _run_again(job: Job, stop: threading.Event, *, as_json: bool) -> None:
    def check(*_: object) -> None:
        if stop.is_set():
            raise _Stopped

    try:
        report = prune(job.root, dry_run=job.dry_run, all_versions=job.all_versions, progress=check, **job.arguments)
    except _Stopped:
        return
    except (DcpS3Error, OSError) as error:
        logger.error("the prune of %s failed and is tried again: %s", job.root, error)  # noqa: TRY400
        return
    except Exception:
        logger.exception("the prune of %s failed and is tried again", job.root)
        return
    if as_json:
        print_line(to_json(report.to_dict()))
    elif job.dry_run:
        tables.make_console().print(tables.plan(report.plan))
    else:
        say_done(report)


def say_done(report: PruneReport) -> None:
    """Report what was deleted, one line per checkpoint, and what was not."""
    reasons = {decision.checkpoint.name: "; ".join(decision.reasons) for decision in report.plan.decisions}
    for each in report.deleted:
        print_line(f"deleted {report.root}/{each.name} ({format_size(each.size)}): {reasons.get(each.name, '')}")
    for finished in report.finished:
        print_line(f"finished the deletion of {report.root}/{finished.name} ({format_size(finished.size)})")
    for left in report.leftovers:
        print_line(f"deleted {left.objects} leftover objects of {report.root}/{left.name} ({format_size(left.size)})")
    for alone in report.left_alone:
        note(f"left alone: {report.root}/{alone.name}: {alone.reason}")
    for failure in report.failures:
        note(f"failed: {report.root}/{failure.name}: {failure.error}")
    note(
        f"{report.root}: {plural(len(report.deleted), 'checkpoint')} deleted, {len(report.plan.kept)} kept, "
        f"{plural(report.objects, 'object')} ({format_size(report.size)}), "
        f"{plural(len(report.aborted), 'upload')} aborted, "
        f"{plural(len(report.failures), 'failure')}"
    )
