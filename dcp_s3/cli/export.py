"""``dcp-s3 export``: tensors as safetensors or torch files."""

from __future__ import annotations

from typing import Annotated

import typer

from dcp_s3.cli.app import URL, Overwrite, Rename, app, note, progress, wrong_usage
from dcp_s3.units import format_size, plural


@app.command()
def export(
    url: URL,
    destination: Annotated[str, typer.Argument(metavar="DEST", help="Directory or s3://bucket/prefix; must be empty.")],
    include: Annotated[
        list[str] | None,
        typer.Option("--include", metavar="PATTERN", help="Only these entries, as model.*; may be repeated."),
    ] = None,
    rename: Rename = None,
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="Convert floating-point tensors: bf16, fp16, fp32, ...")
    ] = None,
    max_shard_size: Annotated[
        str, typer.Option("--max-shard-size", metavar="SIZE", help="Bytes of a safetensors file, as 5GB or 2GiB.")
    ] = "5GB",
    format: Annotated[
        str, typer.Option("--format", metavar="safetensors|torch", help="torch: one file, with all entries.")
    ] = "safetensors",
    overwrite: Overwrite = False,
) -> None:
    """Write the tensors of a checkpoint as safetensors (or torch) files, as Hugging Face lays them out."""
    from dcp_s3.offline import export as exporting
    from dcp_s3.offline.names import parse_rules

    with wrong_usage(ValueError, hint="--rename"):
        rules = parse_rules(rename or [])
    with wrong_usage(ValueError, hint="--max-shard-size"):
        most = exporting.parse_shard_size(max_shard_size)
    with wrong_usage(ValueError, hint="--dtype"):
        wanted = exporting.parse_dtype(dtype)
    with wrong_usage(ValueError, hint="--format"):
        kind = exporting.parse_format(format)
    with progress("export") as callbacks:
        result = exporting.export(
            url,
            destination,
            include=include,
            rename=rules,
            dtype=wanted,
            max_shard_size=most,
            format=kind,
            overwrite=overwrite,
            **callbacks,
        )
    note(
        f"{destination}: {plural(result.tensors, 'tensor')}, {plural(len(result.files), 'file')}, "
        f"{format_size(result.size)}"
    )
    if result.skipped:
        note(f"left out: {plural(result.skipped, 'entry')} without a tensor (--format torch keeps them)")
