"""``dcp-s3 cp``: a checkpoint from one place to another."""

from __future__ import annotations

from typing import Annotated

import typer

from dcp_s3.cli.app import AsJSON, Overwrite, app, note, print_json, progress
from dcp_s3.units import format_size, plural


@app.command()
def cp(
    source: Annotated[str, typer.Argument(metavar="FROM", help="s3://bucket/prefix or directory of the checkpoint.")],
    destination: Annotated[str, typer.Argument(metavar="TO", help="s3://bucket/prefix or directory of the copy.")],
    overwrite: Overwrite = False,
    as_json: AsJSON = False,
) -> None:
    """Copy a checkpoint; from S3 to S3 without moving its bytes. An interrupted copy goes on when repeated.

    Both URLs are reached through one endpoint with one set of credentials. Elsewhere: copy by way of a directory.
    """
    from dataclasses import asdict

    from dcp_s3.offline.copy import copy

    with progress("copy") as callbacks:
        result = copy(source, destination, overwrite, **callbacks)
    if as_json:
        print_json(asdict(result))
    note(
        f"{destination}: {plural(result.files, 'object')}, {format_size(result.size)} "
        f"({format_size(result.moved)} copied)"
    )
