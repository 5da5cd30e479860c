"""The commands that look at checkpoints: ``ls``, ``show``, ``diff`` and ``report``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from dcp_s3.cli import app as cli
from dcp_s3.units import format_size, plural


@cli.app.command()
def ls(
    root: cli.ROOT,
    as_json: cli.AsJSON = False,
    everything: Annotated[bool, typer.Option("--all", help="Show incomplete ones too.")] = False,
    latest: Annotated[
        bool,
        typer.Option(
            "--latest", help="Print only the URL of the newest that can be loaded: $(dcp-s3 ls --latest ROOT)."
        ),
    ] = False,
) -> None:
    """List the checkpoints under ROOT, oldest first."""
    from dcp_s3.cli import tables
    from dcp_s3.retention.catalog import CheckpointCatalog

    if latest:
        _print_latest(root, as_json)
        return
    found = CheckpointCatalog(root).checkpoints()
    shown = [info for info in found if everything or info.committed]
    if as_json:
        cli.print_json([info.to_dict() for info in shown])
    elif shown:
        tables.make_console().print(tables.checkpoints(shown, now=time.time()))
    hidden = len(found) - len(shown)
    if hidden:
        cli.note(f"{plural(hidden, 'incomplete checkpoint')} not shown: see --all")
    elif not shown:
        cli.note(f"no checkpoints right under {root}; one checkpoint by its own URL: dcp-s3 show")
    if not shown:
        raise typer.Exit(cli.NOTHING_THERE)


def _print_latest(root: str, as_json: bool) -> None:
    from dcp_s3.retention.catalog import latest as find_latest

    found = find_latest(root)
    if as_json:
        cli.print_json(None if found is None else found.to_dict())
    elif found is not None:
        cli.print_line(found.url)
    if found is None:
        cli.note(f"no complete checkpoint under {root}: dcp-s3 ls --all shows what is there")
        raise typer.Exit(cli.NOTHING_THERE)


Filter = Annotated[
    list[str] | None,
    typer.Option("--filter", metavar="GLOB", help="Only the entries that match, as 'model.*'; may be repeated."),
]


@cli.app.command()
def show(
    url: cli.URL,
    filter: Filter = None,
    everything: Annotated[
        bool, typer.Option("--all", help="A line for each entry, also for those alike, and for each object.")
    ] = False,
    as_json: cli.AsJSON = False,
) -> None:
    """Show one checkpoint: its properties, and what it holds. Reads no data.

    With --filter only the entries. Objects are listed with --all, and if one is missing or not used.
    """
    from dcp_s3.cli import tables
    from dcp_s3.offline.names import matches, no_match_error
    from dcp_s3.retention.show import describe

    details = describe(url)
    entries = [entry for entry in details.entries if not filter or matches(entry.fqn, filter)]
    if filter and not entries:
        raise no_match_error(f"{url} has no", filter, [entry.fqn for entry in details.entries], url)
    if as_json:
        cli.print_json(details.to_dict() | {"entries": [vars(entry) for entry in entries]})
        return
    console = tables.make_console()
    if not filter:
        console.print(tables.facts(details))
    if entries:
        console.print(tables.entries(entries, alone=everything))
    if not filter and (everything or any(each.size is None or not each.used for each in details.objects)):
        console.print(tables.objects(details.objects))


@cli.app.command()
def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="s3://bucket/prefix of one checkpoint.")],
    b: Annotated[str, typer.Argument(metavar="B", help="s3://bucket/prefix of the other.")],
    filter: Filter = None,
    everything: Annotated[
        bool, typer.Option("--all", help="A line for each entry, also for those that are the same.")
    ] = False,
    as_json: cli.AsJSON = False,
) -> None:
    """Compare two checkpoints: names, shapes, dtypes, and which values changed.

    No data is read: the checksums of chunks tell, where both checkpoints have the same chunks. Ends with status 0 if
    everything is the same, and 5 if something differs or is not known to be the same. Metrics are shown, and do not
    count.
    """
    from dcp_s3.cli import tables
    from dcp_s3.offline.diff import diff as compare

    found = compare(a, b, filter=filter or None)
    if as_json:
        cli.print_json(found.to_dict(everything=everything))
    else:
        cli.print_line(found.summary)
        table, left_out = tables.differences(found, everything=everything)
        if table.row_count:
            tables.make_console().print(table)
        if left_out:
            cli.note(f"{left_out} more lines: see --all, or choose with --filter")
        for name, (before, after) in found.metrics.items():
            cli.print_line(f"metric {name}: {before} -> {after}")
    if not found.same:
        raise typer.Exit(cli.DIFFERENT)


@cli.app.command()
def report(
    root: cli.ROOT,
    out: Annotated[
        Path, typer.Option("-o", "--output", metavar="FILE", help="The page to write.", callback=cli.local_directory)
    ] = Path("report.html"),
    policy: Annotated[
        str | None,
        typer.Option(metavar="POLICY", help="Show what this policy keeps, as in `prune`; default: DCP_S3_RETENTION."),
    ] = None,
    grace: cli.Grace = None,
    as_json: cli.AsJSON = False,
) -> None:
    """Write an HTML page about the checkpoints under ROOT: sizes, seconds, metrics, retention, problems.

    The page needs neither a network nor JavaScript. Nothing in the bucket is changed.
    """
    from dcp_s3.errors import SettingsError
    from dcp_s3.reporting import report as reporting
    from dcp_s3.retention.parse import parse_policy
    from dcp_s3.units import parse_duration

    with cli.wrong_usage(SettingsError, hint="--policy"):
        keep: Any = None if policy is None else parse_policy(policy) or ""
    with cli.wrong_usage(ValueError, hint="--grace"):
        seconds = None if grace is None else parse_duration(grace)
    with cli.progress_of_steps("report"):
        found = reporting.report(root, None if as_json else out, keep, grace=seconds)
    if as_json:
        cli.print_json(found.to_dict())
        return
    bad = sum(problem.severity == "bad" for problem in found.problems)
    worth = f"{plural(len(found.problems), 'thing')} to look at, {bad} of them urgent"
    cli.note(
        f"{out}: {plural(len(found.plan.decisions), 'checkpoint')}, {worth if found.problems else 'nothing is wrong'}, "
        f"{format_size(found.stored)}"
    )
