"""``dcp-s3 download``: S3 to a local directory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dcp_s3.cli.app import URL, AsJSON, Overwrite, app, local_directory, note, print_json, progress
from dcp_s3.units import format_size, plural


@app.command()
def download(
    url: URL,
    directory: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="Empty, or from an interrupted download.", callback=local_directory),
    ],
    overwrite: Overwrite = False,
    as_json: AsJSON = False,
) -> None:
    """Copy a checkpoint into DIR, where torch's FileSystemReader reads it."""
    from dataclasses import asdict

    from dcp_s3.offline import replicate

    with progress("download") as callbacks:
        result = replicate.download(url, directory, overwrite=overwrite, **callbacks)
    if as_json:
        print_json(asdict(result))
    note(f"{directory}: {plural(result.files, 'file')}, {format_size(result.size)} ({format_size(result.moved)} moved)")
