"""``dcp-s3 ls``: the checkpoints under a root."""

from __future__ import annotations

from typing import Annotated

import typer

from dcp_s3.cli import exits
from dcp_s3.cli.app import AsJSON, app, note, print_json


@app.command()
def ls(
    root: Annotated[
        str, typer.Argument(metavar="ROOT", help="s3://bucket/prefix above the checkpoints, or of one, or s3://bucket.")
    ],
    as_json: AsJSON = False,
    everything: Annotated[bool, typer.Option("--all", help="Show incomplete ones too.")] = False,
) -> None:
    """List the checkpoints under ROOT, oldest first; if there are none, the roots further down that have some."""
    import time
    from dataclasses import asdict

    from dcp_s3.cli import tables
    from dcp_s3.retention.browse import browse

    contents = browse(root)
    if contents.roots:
        if as_json:
            print_json([asdict(found) for found in contents.roots])
        else:
            tables.make_console().print(tables.roots(contents.roots))
        more = "" if contents.complete else "; not everything was looked at: see dcp-s3 ls on a longer prefix"
        note(f"no checkpoints right under {root}, but further down{more}")
        return
    found = contents.checkpoints if contents.itself is None else (contents.itself,)
    shown = [info for info in found if everything or info.committed or contents.itself is not None]
    if as_json:
        print_json([info.to_dict() for info in shown])
    elif shown:
        console = tables.make_console()
        width = console.width if console.is_terminal else None
        console.print(tables.checkpoints(shown, now=time.time(), width=width))
    hidden = len(found) - len(shown)
    if hidden:
        note(f"{hidden} incomplete checkpoint{'s' if hidden > 1 else ''} not shown: see --all")
    elif contents.itself is not None:
        note(f"this is one checkpoint; what is in it: dcp-s3 show {root}")
    elif not shown:
        more = "" if contents.complete else ", as far as was looked: try a longer prefix"
        note(f"no checkpoints under {root}{more}")
    if not shown:
        raise typer.Exit(exits.NOTHING_THERE)
