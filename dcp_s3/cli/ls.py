"""``dcp-s3 ls``: the checkpoints under a root."""

from __future__ import annotations

from typing import Annotated

import typer

from dcp_s3.cli import exits
from dcp_s3.cli.app import ROOT, AsJSON, app, note, print_json


@app.command()
def ls(
    root: ROOT,
    as_json: AsJSON = False,
    everything: Annotated[bool, typer.Option("--all", help="Show incomplete ones too.")] = False,
) -> None:
    """List the checkpoints under ROOT, oldest first."""
    import time

    from dcp_s3.cli import tables
    from dcp_s3.retention.catalog import CheckpointCatalog

    found = CheckpointCatalog(root).checkpoints()
    shown = [info for info in found if everything or info.committed]
    if as_json:
        print_json([info.to_dict() for info in shown])
    elif shown:
        tables.make_console().print(tables.checkpoints(shown, now=time.time()))
    hidden = len(found) - len(shown)
    if hidden:
        note(f"{hidden} incomplete checkpoint{'s' if hidden > 1 else ''} not shown: see --all")
    elif not shown:
        note(f"no checkpoints under {root} (for one checkpoint: dcp-s3 show)")
    if not shown:
        raise typer.Exit(exits.NOTHING_THERE)
