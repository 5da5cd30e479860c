"""``dcp-s3 pin`` and ``unpin``: protect a checkpoint from every policy."""

from __future__ import annotations

from typing import Annotated

import typer

from dcp_s3.cli import exits
from dcp_s3.cli.app import URL, app, note


@app.command()
def pin(
    url: URL,
    reason: Annotated[str | None, typer.Option(help="Why it is pinned; shown later.")] = None,
) -> None:
    """Protect a checkpoint from every policy, until `unpin`."""
    from dcp_s3.retention import marks

    marks.pin(url, reason)
    note(f"{url} is pinned")


@app.command()
def unpin(url: URL) -> None:
    """Remove the pin of a checkpoint."""
    from dcp_s3.retention import marks

    if not marks.unpin(url):
        note(f"{url} is not pinned")
        raise typer.Exit(exits.NOTHING_THERE)
    note(f"{url} is no longer pinned")
