"""``dcp-s3 prune``, ``pin``, ``unpin``, ``annotate`` and ``rm``."""

from __future__ import annotations

from typing import Annotated

import typer

from dcp_s3.cli import exits, tables
from dcp_s3.cli import prune as pruning
from dcp_s3.cli.app import (
    ROOT,
    URL,
    AsJSON,
    DryRun,
    app,
    ask,
    note,
    print_line,
    require_yes,
    wrong_usage,
)
from dcp_s3.errors import CorruptMetadataError, MetricsError, PolicyError, UnsafeMetadataError
from dcp_s3.retention import marks
from dcp_s3.retention.parse import parse_policy, policy_from_settings
from dcp_s3.retention.prune import check_grace
from dcp_s3.retention.remove import remove
from dcp_s3.retention.show import describe
from dcp_s3.settings import resolve_settings
from dcp_s3.units import format_size, parse_duration
from dcp_s3.url import parse_url

Yes = Annotated[bool, typer.Option("--yes", help="Delete without asking; required without a terminal.")]
AllVersions = Annotated[
    bool,
    typer.Option(
        "--all-versions", help="In a versioned bucket, delete all versions permanently. Otherwise: delete markers."
    ),
]


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
) -> None:
    """Delete the checkpoints under ROOT that no policy keeps, and the leftovers of failed saves.

    Never deleted: the newest checkpoint, pinned ones, and those being saved or loaded with a lease.
    """
    parse_url(root)
    settings = resolve_settings(None)
    with wrong_usage(PolicyError, hint="POLICY"):
        policy = parse_policy(" ".join(policies or ()))
    if policy is None:
        policy = policy_from_settings(settings)
    with wrong_usage(PolicyError, hint="--grace"):
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
    job = pruning.Job(root, policy, settings, seconds, dry_run, all_versions, force)
    if interval is not None:
        pruning.run_every(job, interval, as_json=as_json)
        return
    report = pruning.run_once(job, yes=yes, as_json=as_json)
    if pruning.is_empty(report.plan):
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


@app.command()
def pin(
    url: URL,
    reason: Annotated[str | None, typer.Option(help="Why it is pinned; shown later.")] = None,
) -> None:
    """Protect a checkpoint from every policy, until `unpin`."""
    marks.pin(url, reason)
    note(f"{url} is pinned")


@app.command()
def unpin(url: URL) -> None:
    """Remove the pin of a checkpoint."""
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
    with wrong_usage(ValueError, hint="NAME=VALUE"):
        given = dict(_metric(text) for text in metrics)
    with wrong_usage(MetricsError, hint="NAME=VALUE"):
        added = marks.annotate(url, given)
    print_line(tables.format_metrics(added))


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
    if not dry_run:
        require_yes(yes)
    if dry_run or not yes:
        try:
            tables.make_console().print(tables.facts(describe(url)))
        except (CorruptMetadataError, UnsafeMetadataError) as error:
            note(str(error))
    if not dry_run and not yes:
        ask("Delete it?")
    done = remove(url, force=force, all_versions=all_versions, dry_run=dry_run)
    what = "would be deleted" if dry_run else "is deleted"
    note(f"{url} {what}: {done.objects} objects, {format_size(done.size)}")
