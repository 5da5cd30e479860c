"""moto's server, the AWS mock, in its own process: client and server do not share a GIL.

Found with moto 5.2: no checksum of a body is verified; UploadPart to an aborted upload is answered with 500;
ListMultipartUploads says of every upload that it was initiated in 2010, and ignores MaxUploads.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from .process import listening
from .server import S3Server, ServerUnavailable

START_TIMEOUT = 60.0


@contextlib.contextmanager
def moto() -> Iterator[S3Server]:
    for module in ("moto", "flask"):
        if importlib.util.find_spec(module) is None:
            raise ServerUnavailable(f"{module} is not installed (pip install 'moto[server]')")
    with tempfile.TemporaryDirectory(prefix="dcp-s3-moto-") as directory:

        def command(port: int) -> list[str]:
            return [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]

        with listening("moto", command, Path(directory) / "log", START_TIMEOUT) as url:
            yield S3Server(
                name="moto",
                endpoint_url=url,
                access_key="test-access-key",
                secret_key="test-secret-key",
                conditional_writes=True,
            )
