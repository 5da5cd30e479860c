"""The commands that delete and mark checkpoints: ``prune``, ``rm``, ``pin`` and ``annotate``."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated

import typer

from dcp_s3.cli import app as cli
from dcp_s3.cli import group
from dcp_s3.errors import CorruptCheckpointError, SettingsError, UnsafeMetadataError
from dcp_s3.units import format_size, plural
from dcp_s3.url import parse_url

if TYPE_CHECKING:
    from dcp_s3.retention.prune import PruneReport


@cli.app.command()
def prune(
    root: cli.ROOT,
    policies: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[POLICY]...",
            help="What to keep: latest:K, best:K:METRIC:min|max, every:STEPS, steps:S,S, within:48h, hourly:N, "
            "daily:N, weekly:N. The default is DCP_S3_RETENTION; without that only leftovers are deleted.",
        ),
    ] = None,
    dry_run: cli.DryRun = False,
    yes: cli.Yes = False,
    as_json: cli.AsJSON = False,
    grace: cli.Grace = None,
    all_versions: cli.AllVersions = False,
    force: Annotated[
        bool, typer.Option("--force", help="Allow a --grace under an hour: saves in progress may lose their objects.")
    ] = False,
) -> None:
    """Delete the checkpoints under ROOT that no policy keeps, and the leftovers of failed saves.

    Never deleted: the newest checkpoint, pinned ones, and those being saved or loaded with a lease.
    """
    from dcp_s3.cli import tables
    from dcp_s3.retention import prune as pruning
    from dcp_s3.retention.parse import parse_policy, policy_from_settings
    from dcp_s3.settings import resolve_settings

    parse_url(root)
    settings = resolve_settings(None)
    with cli.wrong_usage(SettingsError, hint="POLICY"):
        policy = parse_policy(" ".join(policies or ()))
    if policy is None:
        policy = policy_from_settings(settings)
    with cli.wrong_usage(SettingsError, hint="--grace"):
        seconds = pruning.check_grace(settings.retention_grace if grace is None else grace, force=force)
    if not dry_run:
        cli.require_yes(yes)
    if policy is None:
        cli.note(
            "no policy (none is given, DCP_S3_RETENTION is not set): every committed checkpoint stays, only the "
            "leftovers of failed saves are deleted"
        )
    with cli.progress_of_steps("plan"):  # without a total: a pulsing bar
        # Empty text keeps all; None would mean the policy of the settings.
        report = pruning.prune(root, policy or "", grace=seconds, dry_run=True, force=force, settings=settings)
    plan = report.plan
    nothing = not (plan.decisions or plan.uploads or plan.leftovers or plan.unfinished or plan.boards)
    if not as_json and not nothing and (dry_run or not yes or tables.make_console().is_terminal):
        tables.make_console().print(tables.plan(plan))
        cli.note(tables.plan_summary(plan))
    if dry_run or plan.empty:
        report = dataclasses.replace(report, dry_run=dry_run)
    else:
        if not yes:
            cli.ask(f"{tables.plan_summary(plan)}. Delete?" if as_json else "Delete?")
        with cli.progress_of_steps("prune") as step:
            report = pruning.apply_plan(report.root, plan, all_versions=all_versions, progress=step)
    if as_json:
        cli.print_json(report.to_dict())
    elif not dry_run:
        _say_done(report)
    if nothing:
        cli.note(f"no checkpoints under {root}")
        raise typer.Exit(group.NOTHING_THERE)
    if not report.ok:
        raise typer.Exit(group.FAILED)


def _say_done(report: PruneReport) -> None:
    """Report what was deleted, one line per checkpoint, and what was not."""
    reasons = {decision.checkpoint.name: "; ".join(decision.reasons) for decision in report.plan.decisions}
    for each in report.deleted:
        cli.print_line(f"deleted {report.root}/{each.name} ({format_size(each.size)}): {reasons.get(each.name, '')}")
    for finished in report.finished:
        cli.print_line(f"finished the deletion of {report.root}/{finished.name} ({format_size(finished.size)})")
    for left in report.leftovers:
        what = plural(left.objects, "leftover object")
        cli.print_line(f"deleted {what} of {report.root}/{left.name} ({format_size(left.size)})")
    for alone in report.left_alone:
        cli.note(f"left alone: {report.root}/{alone.name}: {alone.reason}")
    for failure in report.failures:
        cli.note(f"failed: {report.root}/{failure.name}: {failure.error}")
    cli.note(
        f"{report.root}: {plural(len(report.deleted), 'checkpoint')} deleted, {len(report.plan.kept)} kept, "
        f"{plural(report.objects, 'object')} ({format_size(report.size)}), "
        f"{plural(len(report.aborted), 'upload')} aborted, "
        f"{plural(len(report.failures), 'failure')}"
    )


@cli.app.command()
def rm(
    url: cli.URL,
    dry_run: cli.DryRun = False,
    yes: cli.Yes = False,
    force: Annotated[
        bool,
        typer.Option("--force", help="Even if it is pinned, being loaded or being saved; that load or save fails."),
    ] = False,
    all_versions: cli.AllVersions = False,
) -> None:
    """Delete one checkpoint, committed or not."""
    from dcp_s3.cli import tables
    from dcp_s3.retention.prune import remove
    from dcp_s3.retention.show import describe

    if not dry_run:
        cli.require_yes(yes)
    if dry_run or not yes:
        try:
            tables.make_console().print(tables.facts(describe(url)))
        except (CorruptCheckpointError, UnsafeMetadataError) as error:
            cli.note(str(error))
    if not dry_run and not yes:
        cli.ask("Delete it?")
    done = remove(url, force=force, all_versions=all_versions, dry_run=dry_run)
    what = "would be deleted" if dry_run else "is deleted"
    cli.note(f"{url} {what}: {plural(done.objects, 'object')}, {format_size(done.size)}")


@cli.app.command()
def pin(
    url: cli.URL,
    reason: Annotated[str | None, typer.Option(help="Why it is pinned; shown later.")] = None,
    remove: Annotated[bool, typer.Option("--remove", help="Remove the pin.")] = False,
) -> None:
    """Protect a checkpoint from every policy, until `pin --remove`."""
    from dcp_s3.retention import marks

    if not remove:
        marks.pin(url, reason)
        cli.note(f"{url} is pinned")
    elif marks.unpin(url):
        cli.note(f"{url} is no longer pinned")
    else:
        cli.note(f"{url} is not pinned")
        raise typer.Exit(group.NOTHING_THERE)


@cli.app.command()
def annotate(
    url: cli.URL,
    metrics: Annotated[
        list[str],
        typer.Argument(metavar="NAME=VALUE...", help="Numbers, true, false or text; for example val_loss=1.23."),
    ],
) -> None:
    """Add metrics to a checkpoint, or replace some."""
    from dcp_s3.cli import tables
    from dcp_s3.format.control_files import check_added
    from dcp_s3.retention import marks

    with cli.wrong_usage(ValueError, hint="NAME=VALUE"):
        given = dict(_metric(text) for text in metrics)
    with cli.wrong_usage(SettingsError, hint="NAME=VALUE"):
        check_added(given, url=url)
    cli.print_line(tables.format_metrics(marks.annotate(url, given)))


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
