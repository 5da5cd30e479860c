"""The commands that delete and mark checkpoints: ``prune``, ``rm``, ``pin``, ``unpin`` and ``annotate``."""

from __future__ import annotations

import dataclasses
import logging
import random
import signal
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dcp_s3.cli import exits
from dcp_s3.cli.app import (
    ROOT,
    URL,
    AllVersions,
    AsJSON,
    DryRun,
    MetricsAddress,
    MetricsPort,
    Yes,
    app,
    ask,
    note,
    print_json,
    print_line,
    progress_of_steps,
    require_yes,
    serving,
    to_json,
    wrong_usage,
)
from dcp_s3.errors import CorruptCheckpointError, DcpS3Error, SettingsError, UnsafeMetadataError
from dcp_s3.units import format_size, parse_duration, plural
from dcp_s3.url import parse_url

if TYPE_CHECKING:
    from dcp_s3.retention.plan import Plan
    from dcp_s3.retention.policy import Policy
    from dcp_s3.retention.prune import PruneReport
    from dcp_s3.settings import Settings


@app.command()
def prune(
    root: ROOT,
    policies: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[POLICY]...",
            help="What to keep: latest:K, best:K:METRIC:min|max, every:STEPS, steps:S,S, within:48h, hourly:N, "
            "daily:N, weekly:N. The default is DCP_S3_RETENTION; without that only leftovers are deleted.",
        ),
    ] = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: AsJSON = False,
    grace: Annotated[
        str | None,
        typer.Option(
            metavar="24h",
            help="How long an uncommitted save counts as in progress; the default is DCP_S3_RETENTION_GRACE.",
        ),
    ] = None,
    every: Annotated[
        str | None, typer.Option(metavar="10m", help="Repeat until SIGTERM or Ctrl-C, with this pause between runs.")
    ] = None,
    all_versions: AllVersions = False,
    force: Annotated[
        bool, typer.Option("--force", help="Allow a --grace under an hour: saves in progress may lose their objects.")
    ] = False,
    metrics_port: MetricsPort = None,
    metrics_address: MetricsAddress = "127.0.0.1",
) -> None:
    """Delete the checkpoints under ROOT that no policy keeps, and the leftovers of failed saves.

    Never deleted: the newest checkpoint, pinned ones, and those being saved or loaded with a lease.
    """
    from dcp_s3.retention.parse import parse_policy, policy_from_settings
    from dcp_s3.retention.prune import check_grace
    from dcp_s3.settings import resolve_settings

    parse_url(root)
    settings = resolve_settings(None)
    with wrong_usage(SettingsError, hint="POLICY"):
        policy = parse_policy(" ".join(policies or ()))
    if policy is None:
        policy = policy_from_settings(settings)
    with wrong_usage(SettingsError, hint="--grace"):
        seconds = check_grace(settings.retention_grace if grace is None else grace, force=force)
    interval = None if every is None else _interval(every)
    if not dry_run:
        require_yes(yes)
        if interval is not None and not yes:
            raise typer.BadParameter("--every asks nobody. Remedy: --yes, or --dry-run", param_hint="--yes")
    if policy is None:
        note(
            "no policy (none is given, DCP_S3_RETENTION is not set): every committed checkpoint stays, only the "
            "leftovers of failed saves are deleted"
        )
    job = Job(root, policy, settings, seconds, dry_run, all_versions, force)
    with serving(metrics_port, metrics_address, needs="--every 10m" if interval is None else ""):
        if interval is not None:
            run_every(job, interval, as_json=as_json)
            return
        report = run_once(job, yes=yes, as_json=as_json)
    if is_empty(report.plan):
        note(f"no checkpoints under {root}")
        raise typer.Exit(exits.NOTHING_THERE)
    if not report.ok:
        raise typer.Exit(exits.FAILED)


def _interval(text: str) -> float:
    with wrong_usage(ValueError, hint="--every"):
        seconds = parse_duration(text)
        if seconds < 1:
            raise ValueError("expected a second or more")
    return seconds


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
    from dcp_s3.cli import tables
    from dcp_s3.retention import prune as pruning

    with progress_of_steps("plan"):  # without a total: a pulsing bar
        report = pruning.prune(job.root, dry_run=True, **job.arguments)
    shown = job.dry_run or not yes or tables.make_console().is_terminal
    if shown and not as_json and not is_empty(report.plan):
        tables.make_console().print(tables.plan(report.plan))
        note(tables.plan_summary(report.plan))
    if not job.dry_run and not report.plan.empty:
        if not yes:
            ask(f"{tables.plan_summary(report.plan)}. Delete?" if as_json else "Delete?")
        with progress_of_steps("prune") as progress:
            report = pruning.apply_plan(
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
        interval: seconds between the end of one run and the beginning of the next, plus or minus a tenth.
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
    from dcp_s3.cli import tables
    from dcp_s3.retention.prune import prune

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


@app.command()
def rm(
    url: URL,
    dry_run: DryRun = False,
    yes: Yes = False,
    force: Annotated[
        bool,
        typer.Option("--force", help="Even if it is pinned, being loaded or being saved; that load or save fails."),
    ] = False,
    all_versions: AllVersions = False,
) -> None:
    """Delete one checkpoint, committed or not."""
    from dcp_s3.cli import tables
    from dcp_s3.retention.prune import remove
    from dcp_s3.retention.show import describe

    if not dry_run:
        require_yes(yes)
    if dry_run or not yes:
        try:
            tables.make_console().print(tables.facts(describe(url)))
        except (CorruptCheckpointError, UnsafeMetadataError) as error:
            note(str(error))
    if not dry_run and not yes:
        ask("Delete it?")
    done = remove(url, force=force, all_versions=all_versions, dry_run=dry_run)
    what = "would be deleted" if dry_run else "is deleted"
    note(f"{url} {what}: {plural(done.objects, 'object')}, {format_size(done.size)}")


@app.command()
def pin(
    url: URL,
    reason: Annotated[str | None, typer.Option(help="Why it is pinned; shown later.")] = None,
) -> None:
    """Protect a checkpoint from every policy, until `unpin`."""
    from dcp_s3.retention import marks

    marks.pin(url, reason)
    note(f"{url} is pinned")


@app.command()
def unpin(url: URL) -> None:
    """Remove the pin of a checkpoint."""
    from dcp_s3.retention import marks

    if not marks.unpin(url):
        note(f"{url} is not pinned")
        raise typer.Exit(exits.NOTHING_THERE)
    note(f"{url} is no longer pinned")


@app.command()
def annotate(
    url: URL,
    metrics: Annotated[
        list[str],
        typer.Argument(metavar="NAME=VALUE...", help="Numbers, true, false or text; for example val_loss=1.23."),
    ],
) -> None:
    """Add metrics to a checkpoint, or replace some."""
    from dcp_s3.cli import tables
    from dcp_s3.format.control_files import check_added
    from dcp_s3.retention import marks

    with wrong_usage(ValueError, hint="NAME=VALUE"):
        given = dict(_metric(text) for text in metrics)
    with wrong_usage(SettingsError, hint="NAME=VALUE"):
        check_added(given, url=url)
    print_line(tables.format_metrics(marks.annotate(url, given)))


def _metric(text: str) -> tuple[str, float | int | bool | str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise ValueError(f"{text!r} is not NAME=VALUE")
    if value in ("true", "false"):
        return name, value == "true"
    for number in (int, float):
        try:
            return name, number(value)
        except ValueError:
            pass
    return name, value
