"""``dcp-s3 report``: one page about the checkpoints under a root."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dcp_s3.cli import exits
from dcp_s3.cli.app import ROOT, AsJSON, app, local_directory, note, print_json, progress_of_steps, wrong_usage


@app.command()
def report(
    root: ROOT,
    out: Annotated[
        Path, typer.Option("-o", "--output", metavar="FILE", help="The page to write.", callback=local_directory)
    ] = Path("report.html"),
    policy: Annotated[
        str | None,
        typer.Option(metavar="POLICY", help="Show what this policy keeps, as in `prune`; default: DCP_S3_RETENTION."),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(metavar="10TiB", help="Say when storage will exceed this, with and without the policy."),
    ] = None,
    grace: Annotated[
        str | None,
        typer.Option(
            metavar="24h",
            help="How long an uncommitted save counts as in progress; the default is DCP_S3_RETENTION_GRACE.",
        ),
    ] = None,
    as_json: AsJSON = False,
) -> None:
    """Write an HTML page about the checkpoints under ROOT: timeline, metrics, retention, growth, problems.

    The page needs no network. Nothing in the bucket is changed. It needs bokeh (3.9 or later); --json does not.
    """
    from dcp_s3.errors import PolicyError
    from dcp_s3.reporting import report as reporting
    from dcp_s3.retention.parse import parse_policy
    from dcp_s3.units import parse_duration, parse_size, plural

    with wrong_usage(PolicyError, hint="--policy"):
        keep = None if policy is None else parse_policy(policy) or ""
    with wrong_usage(ValueError, hint="--budget"):
        limit = None if budget is None else parse_size(budget)
    with wrong_usage(ValueError, hint="--grace"):
        seconds = None if grace is None else parse_duration(grace)
    try:
        with progress_of_steps("report"):
            found = reporting.report(root, None if as_json else out, keep, grace=seconds, budget=limit)
    except ImportError as error:
        if error.name != "bokeh":
            raise
        note(f"dcp-s3: {error}")
        raise typer.Exit(exits.FAILED) from None
    if as_json:
        print_json(found.to_dict())
        return
    bad = sum(problem.severity == "bad" for problem in found.problems)
    worth = (
        f"{plural(len(found.problems), 'thing')} to look at, {bad} of them urgent"
        if found.problems
        else "nothing is wrong"
    )
    note(f"{out}: {plural(len(found.decisions), 'checkpoint')}, {worth}")
