"""``dcp-s3 upload``: a local directory to S3."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dcp_s3.cli.app import URL, AsJSON, Overwrite, app, local_directory, note, print_json, progress
from dcp_s3.units import format_size, plural


@app.command()
def upload(
    directory: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="Contains .metadata and its data files.", callback=local_directory),
    ],
    url: URL,
    overwrite: Overwrite = False,
    as_json: AsJSON = False,
) -> None:
    """Copy the checkpoint in DIR to S3."""
    from dataclasses import asdict

    from dcp_s3.offline import replicate

    with progress("upload") as callbacks:
        result = replicate.upload(directory, url, overwrite=overwrite, **callbacks)
    if as_json:
        print_json(asdict(result))
    note(f"{url}: {plural(result.files, 'object')}, {format_size(result.size)}")
