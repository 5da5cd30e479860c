"""The commands of ``dcp-s3``, in the order in which ``--help`` shows them."""

from __future__ import annotations

from dcp_s3.cli import bench, checkpoints, demo, export, retention
from dcp_s3.cli.app import app

__all__ = ["app", "bench", "checkpoints", "demo", "export", "retention"]

app.command()(bench.bench)  # not where it is defined: imported first, it would be shown first

if __name__ == "__main__":
    app()
