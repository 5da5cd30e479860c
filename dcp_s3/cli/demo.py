"""``dcp-s3 demo``: a training run that is killed in the middle of a save, and restarted on other ranks."""

from __future__ import annotations

import signal
import sys
from typing import Annotated

import typer

from dcp_s3.cli import exits
from dcp_s3.cli.app import app


@app.command()
def demo(
    url: Annotated[
        str | None,
        typer.Option(
            "--url", metavar="URL", help="s3://bucket/prefix to run below; without it, on an S3 server of the demo's."
        ),
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the training's logs and digests.")] = False,
) -> None:
    """Kill a training run in the middle of a save, restart it on another number of ranks, and check every bit."""
    from dcp_s3.cli import tables
    from dcp_s3.demo.run import run_demo

    # As with Ctrl-C, the training processes must not be left behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    if not run_demo(url, keep=keep, plan_table=tables.plan):
        raise typer.Exit(exits.FAILED)
