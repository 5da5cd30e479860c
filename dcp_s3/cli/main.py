"""The commands of ``dcp-s3``: each module registers its own, and imports what is slow to import only when it runs."""

from __future__ import annotations

import dcp_s3.cli.annotate
import dcp_s3.cli.bench
import dcp_s3.cli.config
import dcp_s3.cli.cp
import dcp_s3.cli.demo
import dcp_s3.cli.diff
import dcp_s3.cli.doctor
import dcp_s3.cli.download
import dcp_s3.cli.drain
import dcp_s3.cli.export
import dcp_s3.cli.import_
import dcp_s3.cli.inspect
import dcp_s3.cli.latest
import dcp_s3.cli.ls
import dcp_s3.cli.pin
import dcp_s3.cli.prune
import dcp_s3.cli.report
import dcp_s3.cli.rm
import dcp_s3.cli.show
import dcp_s3.cli.upload
import dcp_s3.cli.verify  # noqa: F401
from dcp_s3.cli.app import app

__all__ = ["app"]

if __name__ == "__main__":
    app()
