"""``dcp-s3 ls``: the checkpoints under a root."""

from __future__ import annotations

from typing import Annotated

import typer

from dcp_s3.cli import exits
from dcp_s3.cli.app import AsJSON, app, note, print_json


@app.command()
def ls(
    root: Annotated[str, typer.Argument(metavar="ROOT", help="s3://bucket/prefix above the checkpoints.")],
    as_json: AsJSON = False,
    everything: Annotated[bool, typer.Option("--all", help="Show incomplete ones too.")] = False,
) -> None:
    """List the checkpoints under ROOT, oldest first."""
    import time

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
