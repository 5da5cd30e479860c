"""The program ``dcp-s3``: each module of commands registers its own, and imports what is slow only when it runs."""

from __future__ import annotations

import dcp_s3.cli.look  # isort: skip - the order of the commands in --help
import dcp_s3.cli.change  # noqa: F401
from dcp_s3.cli.app import app

__all__ = ["app"]

if __name__ == "__main__":
    app()
