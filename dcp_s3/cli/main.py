"""The commands of ``dcp-s3``, in the order in which ``--help`` shows them.

Exit status: 0 done, 1 failed, 2 wrong usage, 3 nothing is there. Of ``verify``: 0 good, 1 damaged, 2 it can not be
told.
"""

from __future__ import annotations

from dcp_s3.cli import checkpoints, retention
from dcp_s3.cli.common import app

__all__ = ["app", "checkpoints", "retention"]

if __name__ == "__main__":
    app()
