"""The S3 side of the demo: an embedded server, and what is below the demo's URL.

It uses plain boto3, so that the demo does not rely on what dcp_s3 says.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import ClientError

from dcp_s3 import Settings
from dcp_s3.demo.environment import lead_to
from dcp_s3.url import parse_url

BUCKET = "demo"
#: A store may not list open uploads, or may not permit it. The demo then shows none.
_UPLOADS_UNKNOWN = {"AccessDenied", "MethodNotAllowed", "NoSuchUpload", "NotImplemented"}


@contextlib.contextmanager
def embedded_server() -> Iterator[str]:
    """Run moto's S3 in this process, point the environment at it, and make `BUCKET`.

    Yields:
        Its endpoint URL.

    Raises:
        ModuleNotFoundError: moto is not installed.
    """
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.CRITICAL)  # otherwise it logs a line per request
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        endpoint_url = f"http://{host}:{port}"
        lead_to(endpoint_url)
        _client().create_bucket(Bucket=BUCKET)
        yield endpoint_url
    finally:
        server.stop()


def _client() -> Any:
    settings = Settings()
    return boto3.client(
        "s3",
        endpoint_url=settings.endpoint_url,
        region_name=settings.region,
        config=Config(s3={"addressing_style": settings.addressing_style}),
    )


@dataclass
class StepDirectory:
    """What is below one step's URL."""

    name: str
    """Name, for example ``step-00000008``."""
    committed: bool = False
    """Whether it has a ``.metadata``."""
    objects: int = 0
    """Number of data objects."""
    size: int = 0
    """Bytes of all objects."""
    uploads: list[tuple[str, str]] = field(default_factory=list)
    """(key, id) of each open multipart upload."""
    modified: datetime | None = None
    """When the newest object was written."""

    @property
    def step(self) -> int:
        """The training step from the name."""
        return int(self.name.rpartition("-")[2])


class BucketView:
    """Shows everything below one URL."""

    def __init__(self, root: str) -> None:
        self.root = root
        url = parse_url(root)
        self.bucket, self._prefix = url.bucket, f"{url.prefix}/"
        self._client = _client()

    def url(self, directory: StepDirectory) -> str:
        """The checkpoint URL of a directory."""
        return f"{self.root}/{directory.name}"

    def look(self) -> list[StepDirectory]:
        """All directories, by name."""
        found: dict[str, StepDirectory] = {}
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=self._prefix)
        for entry in (entry for page in pages for entry in page.get("Contents", [])):
            name, _, path = entry["Key"].removeprefix(self._prefix).partition("/")
            directory = found.setdefault(name, StepDirectory(name))
            directory.committed |= path == ".metadata"
            directory.objects += path.endswith(".distcp")
            directory.size += entry["Size"]
            modified = entry["LastModified"]
            directory.modified = max(modified, directory.modified or modified)
        for key, upload_id in self._open_uploads():
            name = key.removeprefix(self._prefix).partition("/")[0]
            found.setdefault(name, StepDirectory(name)).uploads.append((key, upload_id))
        return [found[name] for name in sorted(found)]

    def _open_uploads(self) -> list[tuple[str, str]]:
        pages = self._client.get_paginator("list_multipart_uploads").paginate(Bucket=self.bucket, Prefix=self._prefix)
        try:
            return [(u["Key"], u["UploadId"]) for page in pages for u in page.get("Uploads", [])]
        except ClientError as error:
            if error.response["Error"]["Code"] in _UPLOADS_UNKNOWN:
                return []
            raise
