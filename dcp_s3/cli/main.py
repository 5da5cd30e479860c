"""The commands of ``dcp-s3``, in the order in which ``--help`` shows them."""

from __future__ import annotations

from dcp_s3.cli import checkpoints, retention
from dcp_s3.cli.app import app

__all__ = ["app", "checkpoints", "retention"]

if __name__ == "__main__":
    app()
