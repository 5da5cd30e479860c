"""``dcp-s3 import``: a checkpoint of safetensors or torch files."""

from __future__ import annotations

from typing import Annotated

import typer

from dcp_s3.cli.app import URL, Overwrite, Rename, app, note, progress, wrong_usage
from dcp_s3.units import format_size, plural


@app.command("import")
def import_(
    source: Annotated[
        str,
        typer.Argument(metavar="SRC", help="Directory or s3://bucket/prefix with safetensors or torch files, or one."),
    ],
    url: URL,
    prefix: Annotated[str, typer.Option("--prefix", metavar="TEXT", help="Put before every name, as model.")] = "",
    rename: Rename = None,
    overwrite: Overwrite = False,
) -> None:
    """Make a checkpoint of safetensors or torch files."""
    from dcp_s3.offline import import_weights as importing
    from dcp_s3.offline.names import parse_rules

    with wrong_usage(ValueError, hint="--rename"):
        rules = parse_rules(rename or [])
    with progress("import") as callbacks:
        result = importing.import_weights(source, url, prefix=prefix, rename=rules, overwrite=overwrite, **callbacks)
    others = f", {result.objects} other entries" if result.objects else ""
    note(f"{url}: {plural(result.tensors, 'tensor')}{others}, {format_size(result.size)}")
