"""``dcp-s3 diff``: how two checkpoints differ."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from dcp_s3.cli import exits
from dcp_s3.cli.app import AsJSON, app
from dcp_s3.cli.inspect import Filter

if TYPE_CHECKING:
    from dcp_s3.offline.diff import CheckpointDiff

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
    from dcp_s3.cli.app import note, print_json, print_line, progress
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
    from dcp_s3.cli.app import note
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
