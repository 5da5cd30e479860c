"""A pytest plugin for torch-checkpointing's own tests: S3Storage in place of its local storage.

The tests write and look at local files. They are copied to S3 before each look, and back after each write.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import boto3
import pytest
from torch_checkpointing.storage import filesystem

from dcp_s3.format.control_files import ObjectEntry
from dcp_s3.format.layout import CONTROL_PREFIX
from dcp_s3.integrations.file_streams import WriteStream
from dcp_s3.integrations.torch_checkpointing import S3Storage, S3StorageConfig
from dcp_s3.url import CheckpointURL
from tests.memory_s3 import MemoryS3

_server = MemoryS3()


class Mirror(S3Storage):
    def _split(self, path: Path) -> tuple[str, str]:
        top, rest = path.parts[:3], path.parts[3:]  # such as /tmp/a1b2, and what is in it
        self._root = CheckpointURL("own", "/".join(top[1:]))
        return super()._split(Path(*rest))

    def _entries(self, name: str) -> Mapping[str, ObjectEntry] | None:
        if name not in self._writing:
            url = self._root.child(name)
            local = Path("/", url.prefix)
            keys = [each.key for each in self._store.list(url.key("")).objects if CONTROL_PREFIX not in each.key]
            self._store.delete([key for key in keys if not Path("/", key).exists()])
            for each in local.rglob("*"):
                if each.is_file():
                    self._store.put(url.key(str(each.relative_to(local))), each.read_bytes())
        return super()._entries(name)

    def mkdir(self, path: Path, recursive: bool = True) -> None:
        super().mkdir(path, recursive)
        os.makedirs(path, exist_ok=True)

    def get_write_stream(self, path: Path, data: object) -> WriteStream:
        stream: Any = super().get_write_stream(path, data)
        close, key = stream.close, self._key(path)

        def close_and_copy() -> None:
            if not stream.closed:
                close()
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(self._store.get(key).data)

        stream.close = close_and_copy
        return stream  # type: ignore[no-any-return]


def pytest_configure(config: pytest.Config) -> None:
    _server.__enter__()
    os.environ.update(
        AWS_ENDPOINT_URL_S3=_server.endpoint_url,
        AWS_ACCESS_KEY_ID="a",
        AWS_SECRET_ACCESS_KEY="b",
        AWS_REGION="us-east-1",
    )
    boto3.client("s3").create_bucket(Bucket="own")
    made = S3StorageConfig("s3://own/any", rank=0, world_size=1)
    filesystem.LocalFileSystemStorageConfig.create_storage = lambda _: Mirror(made)


def pytest_unconfigure(config: pytest.Config) -> None:
    _server.__exit__(None, None, None)
