"""``dcp-s3 prune``: delete what no policy keeps."""

from __future__ import annotations

from typing import Annotated

import typer

from dcp_s3.cli import exits
from dcp_s3.cli.app import ROOT, AllVersions, AsJSON, DryRun, Yes, app, note, require_yes, wrong_usage
from dcp_s3.cli.metrics import MetricsAddress, MetricsPort, serving
from dcp_s3.errors import PolicyError
from dcp_s3.units import parse_duration
from dcp_s3.url import parse_url


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
    from dcp_s3.cli import prune_runs
    from dcp_s3.retention.parse import parse_policy, policy_from_settings
    from dcp_s3.retention.prune import check_grace
    from dcp_s3.settings import resolve_settings

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
    job = prune_runs.Job(root, policy, settings, seconds, dry_run, all_versions, force)
    with serving(metrics_port, metrics_address, needs="--every 10m" if interval is None else ""):
        if interval is not None:
            prune_runs.run_every(job, interval, as_json=as_json)
            return
        report = prune_runs.run_once(job, yes=yes, as_json=as_json)
    if prune_runs.is_empty(report.plan):
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
