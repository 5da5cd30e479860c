"""What the demo needs around it: an S3 server, a view of the bucket by plain boto3, training processes to kill."""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import ClientError

from dcp_s3.settings import Settings, child_environment
from dcp_s3.url import parse_url

_PROXIES = ("http_proxy", "https_proxy", "all_proxy")
_UPLOADS_UNKNOWN = {"AccessDenied", "MethodNotAllowed", "NoSuchUpload", "NotImplemented"}
"""A store may not list open uploads, or may not permit it. The demo then shows none."""


class DemoError(Exception):
    """The demo cannot go on."""


@contextlib.contextmanager
def embedded_server(bucket: str) -> Iterator[str]:
    """Run moto's S3 in this process, make a bucket, and yield the endpoint's URL.

    Replaces everything in the environment that leads to a real S3: the demo must not go there unasked.
    """
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.CRITICAL)  # otherwise it logs a line per request
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        for name in list(os.environ):
            if name.startswith(("AWS_", "DCP_S3_")) or name.lower() in _PROXIES:
                del os.environ[name]
        os.environ |= {
            "DCP_S3_ENDPOINT_URL": f"http://{host}:{port}",
            "AWS_ACCESS_KEY_ID": "demo",
            "AWS_SECRET_ACCESS_KEY": "demo",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        _client().create_bucket(Bucket=bucket)
        yield f"http://{host}:{port}"
    finally:
        server.stop()


def _client() -> Any:
    settings = Settings()
    config = Config(s3={"addressing_style": settings.addressing_style})
    return boto3.client("s3", endpoint_url=settings.endpoint_url, region_name=settings.region, config=config)


@dataclass
class StepDirectory:
    """What is below one step's URL."""

    name: str
    committed: bool = False
    """Whether it has a ``.metadata``."""
    objects: int = 0
    """Number of data objects."""
    size: int = 0
    """Bytes of all objects."""
    modified: datetime | None = None
    """When the newest object was written."""
    uploads: list[tuple[str, str]] = field(default_factory=list)
    """Key and id of each open multipart upload."""

    @property
    def age(self) -> str:
        """Since the newest object was written; S3's clock may be ahead of this one."""
        if self.modified is None:
            return "-"
        return f"{max(0.0, (datetime.now(timezone.utc) - self.modified).total_seconds()):.0f} s"


class BucketView:
    """What lies below one URL, by plain boto3: the demo does not rely on what dcp_s3 says."""

    def __init__(self, root: str) -> None:
        self.root = root
        url = parse_url(root)
        self._where = {"Bucket": url.bucket, "Prefix": f"{url.prefix}/"}
        self._client = _client()

    def look(self) -> list[StepDirectory]:
        """All directories, by name."""
        found: dict[str, StepDirectory] = {}
        for name, path, entry in self._entries("list_objects_v2", "Contents"):
            directory = found.setdefault(name, StepDirectory(name))
            directory.committed |= path == ".metadata"
            directory.objects += path.endswith(".distcp")
            directory.size += entry["Size"]
            directory.modified = max(entry["LastModified"], directory.modified or entry["LastModified"])
        try:
            for name, _, upload in self._entries("list_multipart_uploads", "Uploads"):
                found.setdefault(name, StepDirectory(name)).uploads.append((upload["Key"], upload["UploadId"]))
        except ClientError as error:
            if error.response["Error"]["Code"] not in _UPLOADS_UNKNOWN:
                raise
        return [found[name] for name in sorted(found)]

    def _entries(self, operation: str, kind: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
        """Name of the directory, path in it, and what S3 lists."""
        for page in self._client.get_paginator(operation).paginate(**self._where):
            for entry in page.get(kind, []):
                name, _, path = entry["Key"].removeprefix(self._where["Prefix"]).partition("/")
                yield name, path, entry

    def removal(self) -> list[str]:
        """Commands that remove everything there: first what no checkpoint needs, open uploads too."""
        endpoint, url = Settings().endpoint_url, shlex.quote(f"{self.root}/")
        aws = f"aws --endpoint-url {shlex.quote(endpoint)}" if endpoint else "aws"
        return [f"dcp-s3 prune {url} --grace 0 --force --yes", f"{aws} s3 rm --recursive {url}"]


class TrainingProcesses:
    """One `dcp_s3.demo.train` process per rank, as torchrun would start them.

    They are not started by torchrun, so that one SIGKILL each takes all of them down at the same instant, with nobody
    left to clean up. Leaving the context kills what still runs.
    """

    def __init__(self, ranks: int, arguments: Sequence[str], *, logs: Path) -> None:
        self.ranks = ranks
        logs.mkdir(parents=True)
        self._logs = [logs / f"rank{rank}" for rank in range(ranks)]
        self._read = 0
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        # OMP_NUM_THREADS: the ranks share few cores.
        environment = child_environment(
            WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1"
        )
        # Otherwise gloo looks up the host's name, which does not work on every laptop.
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank, log in enumerate(self._logs):
                with log.with_suffix(".out").open("wb") as out, log.with_suffix(".err").open("wb") as err:
                    process = subprocess.Popen(
                        [sys.executable, "-m", "dcp_s3.demo.train", *arguments],
                        cwd=logs,  # Python finds modules there, too: a directory with nothing else in it
                        env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                        stdin=subprocess.DEVNULL,
                        stdout=out,
                        stderr=err,
                        start_new_session=True,  # Ctrl-C reaches only the demo, which then kills them
                    )
                self._processes.append(process)
        except BaseException:
            self.kill()
            raise

    def __enter__(self) -> TrainingProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        """Send SIGKILL to all, then wait until they are gone."""
        for process in self._processes:
            process.kill()  # does nothing if it has ended
        for process in self._processes:
            process.wait()

    def running(self) -> bool:
        """Whether any process still runs. DemoError, with the end of its log, if one has failed."""
        codes = [process.poll() for process in self._processes]
        for rank, code in enumerate(codes):
            if code:
                log = self._logs[rank].with_suffix(".err").read_text(errors="replace")[-3000:].strip()
                raise DemoError(f"rank {rank} ended with exit status {code}:\n{log or '(it printed nothing)'}")
        return None in codes

    def new_lines(self) -> list[str]:
        """The complete lines that rank 0 printed since the last call."""
        with self._logs[0].with_suffix(".out").open("rb") as file:
            file.seek(self._read)
            data = file.read()
        complete = data[: data.rfind(b"\n") + 1]
        self._read += len(complete)
        return complete.decode(errors="replace").splitlines()
