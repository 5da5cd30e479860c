"""``dcp-s3 download``: S3 to a local directory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dcp_s3.cli.app import URL, Overwrite, app, local_directory, note, progress
from dcp_s3.units import format_size


@app.command()
def download(
    url: URL,
    directory: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="Empty, or from an interrupted download.", callback=local_directory),
    ],
    overwrite: Overwrite = False,
) -> None:
    """Copy a checkpoint into DIR, where torch's FileSystemReader reads it."""
    from dcp_s3.offline import replicate

    with progress("download") as callbacks:
        result = replicate.download(url, directory, overwrite=overwrite, **callbacks)
    note(f"{directory}: {result.files} files, {format_size(result.size)} ({format_size(result.moved)} moved)")
