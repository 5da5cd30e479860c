"""``dcp-s3 latest``: the checkpoint to resume from, for scripts."""

from __future__ import annotations

from typing import Annotated

import typer

from dcp_s3.cli import exits
from dcp_s3.cli.app import ROOT, AsJSON, app, note, print_json, print_line


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
