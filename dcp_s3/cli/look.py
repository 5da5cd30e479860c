"""The commands that look at checkpoints: ``ls``, ``latest``, ``show``, ``inspect``, ``diff`` and ``report``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dcp_s3.cli import exits
from dcp_s3.cli.app import (
    ROOT,
    URL,
    AsJSON,
    app,
    local_directory,
    note,
    print_json,
    print_line,
    progress,
    progress_of_steps,
    wrong_usage,
)

if TYPE_CHECKING:
    from dcp_s3.offline.diff import CheckpointDiff
    from dcp_s3.offline.inspect import CheckpointEntries


@app.command()
def ls(
    root: Annotated[str, typer.Argument(metavar="ROOT", help="s3://bucket/prefix above the checkpoints.")],
    as_json: AsJSON = False,
    everything: Annotated[bool, typer.Option("--all", help="Show incomplete ones too.")] = False,
) -> None:
    """List the checkpoints under ROOT, oldest first."""
    from dcp_s3.cli import tables
    from dcp_s3.retention.catalog import CheckpointCatalog, check_newest

    catalog = CheckpointCatalog(root)
    found = catalog.checkpoints()
    if found:
        check_newest(catalog, found)
    shown = [info for info in found if everything or info.committed]
    if as_json:
        print_json([info.to_dict() for info in shown])
    elif shown:
        console = tables.make_console()
        width = console.width if console.is_terminal else None
        console.print(tables.checkpoints(shown, now=time.time(), width=width))
    hidden = len(found) - len(shown)
    if hidden:
        note(f"{hidden} incomplete checkpoint{'s' if hidden > 1 else ''} not shown: see --all")
    elif not shown:
        note(f"no checkpoints right under {root}; one checkpoint by its own URL: dcp-s3 show")
    if not shown:
        raise typer.Exit(exits.NOTHING_THERE)


@app.command()
def latest(
    root: ROOT,
    as_json: AsJSON = False,
    include_uncommitted: Annotated[
        bool, typer.Option("--include-uncommitted", help="Also those that wait in this host's DCP_S3_SPILL_DIR.")
    ] = False,
) -> None:
    """Print the URL of the newest checkpoint under ROOT that can be loaded, and nothing else: $(dcp-s3 latest ROOT)."""
    from dcp_s3.retention.catalog import latest as find_latest

    found = find_latest(root, include_uncommitted=include_uncommitted)
    if found is None:
        if as_json:
            print_json(None)
        note(f"no complete checkpoint under {root}: dcp-s3 ls --all shows what is there")
        raise typer.Exit(exits.NOTHING_THERE)
    if as_json:
        print_json(found.to_dict())
    else:
        print_line(found.url)


@app.command()
def show(url: URL, as_json: AsJSON = False) -> None:
    """Show one checkpoint: its properties, its objects and what was saved."""
    from dcp_s3.cli import tables
    from dcp_s3.retention.show import describe

    details = describe(url)
    if as_json:
        print_json(details.to_dict())
        return
    console = tables.make_console()
    console.print(tables.facts(details))
    console.print(tables.objects(details.objects))
    if details.entries:
        console.print(tables.entries(details.entries))


Filter = Annotated[
    list[str] | None,
    typer.Option("--filter", metavar="GLOB", help="Only the entries that match, as 'model.*'; may be repeated."),
]


@app.command()
def inspect(
    url: URL,
    filter: Filter = None,
    top: Annotated[
        int | None, typer.Option("--top", min=1, metavar="N", help="Show the N largest entries instead.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="A line for each entry, also for those alike.")] = False,
    as_json: AsJSON = False,
) -> None:
    """Show what a checkpoint holds: names with parameters, bytes, dtypes, shapes and chunks. Reads no data."""
    from dcp_s3.cli.tables import add_row, make_console, make_table
    from dcp_s3.offline.inspect import inspect as look
    from dcp_s3.offline.names import group_alike
    from dcp_s3.units import format_count, format_size

    contents = look(url, filter or None)
    if as_json:
        largest = {} if top is None else {"largest": [vars(entry) for entry in contents.largest(top)]}
        print_json(contents.to_dict() | largest)
        return
    for line in _head(contents):
        print_line(line)
    entries = {entry.fqn: entry for entry in (contents.entries if top is None else contents.largest(top))}
    alone = everything or top is not None
    groups = group_alike((name, name if alone else (each.dtype, each.shape)) for name, each in entries.items())
    table = make_table(("name", ">entries", ">parameters", ">size", "dtype", "shape", ">chunks"))
    for group in groups:
        found = [entries[name] for name in group.names]
        shape = None if found[0].shape is None else "x".join(map(str, found[0].shape)) or "scalar"
        count = None if found[0].shape is None else format_count(sum(each.parameters for each in found))
        size, chunks = format_size(sum(each.size for each in found)), sum(each.chunks for each in found)
        add_row(
            table, (group.label, len(found) if len(found) > 1 else None, count, size, found[0].dtype, shape, chunks)
        )
    make_console().print(table)


def _head(contents: CheckpointEntries) -> list[str]:
    """The checkpoint in two lines."""
    from dcp_s3.cli.tables import format_age, format_metrics
    from dcp_s3.units import format_count, format_size

    info = contents.info
    facts = [
        None if info.step is None else f"step {info.step}",
        None if info.world_size is None else _count(info.world_size, "rank"),
        None if info.created_at is None else f"{format_age(time.time() - info.created_at)} old",
        None if info.size is None else f"{format_size(info.size)} in {_count(info.objects or 0, 'object')}",
        "written by something other than dcp_s3" if info.foreign else None,
    ]
    others = len(contents.entries) - contents.tensors
    holds = [
        f"{_count(contents.tensors, 'tensor')} with {format_count(contents.parameters)} parameters",
        f"{others} other entr{'y' if others == 1 else 'ies'}" if others else None,
        f"attachments {', '.join(contents.attachments)}" if contents.attachments else None,
        f"metrics {format_metrics(info.metrics)}" if info.metrics else None,
    ]
    return [
        f"{info.url}: {', '.join(fact for fact in facts if fact)}",
        "; ".join(part for part in holds if part),
    ]


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


_LINES = 40


@app.command()
def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="s3://bucket/prefix of one checkpoint.")],
    b: Annotated[str, typer.Argument(metavar="B", help="s3://bucket/prefix of the other.")],
    full: Annotated[
        bool, typer.Option("--full", help="Read and compare what the checksums cannot tell, and only that.")
    ] = False,
    filter: Filter = None,
    everything: Annotated[
        bool, typer.Option("--all", help="A line for each entry, also for those that are the same.")
    ] = False,
    as_json: AsJSON = False,
) -> None:
    """Compare two checkpoints: names, shapes, dtypes, and which values changed.

    Without --full no data is read: the checksums of chunks tell, where both checkpoints have the same chunks. Ends with
    status 0 if everything is the same, and 5 if something differs or is not known to be the same. Metrics are shown,
    and do not count.
    """
    from dcp_s3.offline.diff import diff as compare

    with progress("diff") as callbacks:
        found = compare(a, b, full=full, filter=filter or None, **callbacks)
    if as_json:
        print_json(found.to_dict(everything=everything))
    else:
        print_line(found.summary)
        _print_table(found, everything=everything)
        for name, (before, after) in found.metrics.items():
            print_line(f"metric {name}: {before} -> {after}")
        if not full and any(each.status == "unknown" for each in found.entries):
            note("what is unknown: --full reads and compares it")
    if not found.same:
        raise typer.Exit(exits.DIFFERENT)


def _print_table(found: CheckpointDiff, *, everything: bool) -> None:
    from dcp_s3.cli.tables import add_row, make_console, make_table
    from dcp_s3.offline.names import AlikeNames, group_alike
    from dcp_s3.units import format_size

    entries = {each.fqn: each for each in found.entries if everything or each.status != "same"}
    if everything:
        groups = [AlikeNames(fqn, (fqn,)) for fqn in entries]
    else:
        groups = group_alike((each.fqn, (each.status, each.what)) for each in entries.values())
    rows: list[tuple[object, ...]] = []
    for group in groups:
        found_here = [entries[name] for name in group.names]
        first, size = found_here[0], format_size(sum(each.size for each in found_here))
        count = len(found_here) if len(found_here) > 1 else None
        rows.append((group.label, count, first.status, first.what, size))
    attachments = {name: status for name, status in found.attachments.items() if everything or status != "same"}
    rows += [(name, None, status, "attachment", None) for name, status in attachments.items()]
    shown = rows if everything else rows[:_LINES]
    if not shown:
        return
    table = make_table(("name", ">entries", "status", "what", ">size"))
    for row in shown:
        add_row(table, row)
    make_console().print(table)
    if len(rows) > len(shown):
        note(f"{len(rows) - len(shown)} more lines: see --all, or choose with --filter")


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
    grace: Annotated[
        str | None,
        typer.Option(
            metavar="24h",
            help="How long an uncommitted save counts as in progress; the default is DCP_S3_RETENTION_GRACE.",
        ),
    ] = None,
    as_json: AsJSON = False,
) -> None:
    """Write an HTML page about the checkpoints under ROOT: sizes, seconds, metrics, retention, problems.

    The page needs no network. Nothing in the bucket is changed. It needs bokeh (3.9 or later); --json does not.
    """
    from dcp_s3.errors import SettingsError
    from dcp_s3.reporting import report as reporting
    from dcp_s3.retention.parse import parse_policy
    from dcp_s3.units import parse_duration, plural

    with wrong_usage(SettingsError, hint="--policy"):
        keep = None if policy is None else parse_policy(policy) or ""
    with wrong_usage(ValueError, hint="--grace"):
        seconds = None if grace is None else parse_duration(grace)
    try:
        with progress_of_steps("report"):
            found = reporting.report(root, None if as_json else out, keep, grace=seconds)
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
    note(f"{out}: {plural(len(found.plan.decisions), 'checkpoint')}, {worth}")
