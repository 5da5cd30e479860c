"""The storage backends that are compared. A new one is a class here and an entry in CASES."""

from __future__ import annotations

import importlib.util
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

_MEMORY_DIRECTORY = Path("/dev/shm")


@dataclass(frozen=True)
class Target:
    """Where a case saves to and how it may go about it."""

    bucket: str
    prefix: str
    endpoint_url: str
    region: str
    threads: int
    """Uploads at a time, for backends that let one choose."""

    @property
    def url(self) -> str:
        """The checkpoint's URL without its name."""
        return f"s3://{self.bucket}/{self.prefix}"


class Case(Protocol):
    """One backend. ``name`` is the checkpoint's: each is saved once and loaded once."""

    def __init__(self, target: Target) -> None:
        """Keep the target."""

    def writer(self, name: str) -> StorageWriter:
        """What ``dcp.save`` is given."""

    def reader(self, name: str) -> StorageReader:
        """What ``dcp.load`` is given."""

    def clean_up(self) -> None:
        """Remove what is not on the S3 server."""


class _OnS3:
    def __init__(self, target: Target) -> None:
        self.target = target

    def url(self, name: str) -> str:
        return f"{self.target.url}/{name}"

    def clean_up(self) -> None:
        """Nothing to do: the benchmark empties the bucket's prefix itself."""


class DcpS3(_OnS3):
    """This project, with its default settings (it chooses its own concurrency)."""

    def writer(self, name: str) -> StorageWriter:
        from dcp_s3 import S3StorageWriter

        return S3StorageWriter(self.url(name), settings=self._settings())

    def reader(self, name: str) -> StorageReader:
        from dcp_s3 import S3StorageReader

        return S3StorageReader(self.url(name), settings=self._settings())

    def _settings(self) -> dict[str, str]:
        return {"endpoint_url": self.target.endpoint_url}


class S3TorchConnector(_OnS3):
    """AWS's connector, on the Common Runtime's S3 client."""

    def writer(self, name: str) -> StorageWriter:
        from s3torchconnector import S3ClientConfig
        from s3torchconnector.dcp import S3StorageWriter

        return S3StorageWriter(
            self.target.region,
            self.url(name),
            s3client_config=S3ClientConfig(force_path_style=True),
            thread_count=self.target.threads,
        )

    def reader(self, name: str) -> StorageReader:
        from s3torchconnector import S3ClientConfig
        from s3torchconnector.dcp import S3StorageReader

        return S3StorageReader(
            self.target.region,
            self.url(name),
            s3client_config=S3ClientConfig(force_path_style=True),
        )


class Fsspec(_OnS3):
    """PyTorch's own fsspec backend on s3fs."""

    def writer(self, name: str) -> StorageWriter:
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

        return FsspecWriter(
            self.url(name),
            sync_files=False,
            thread_count=self.target.threads,
            endpoint_url=self.target.endpoint_url,
        )

    def reader(self, name: str) -> StorageReader:
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

        return FsspecReader(self.url(name), endpoint_url=self.target.endpoint_url)


class FileSystem:
    """PyTorch's file backend on a directory in memory: no network at all."""

    def __init__(self, target: Target) -> None:
        self._threads = target.threads
        self._directory = _MEMORY_DIRECTORY / target.prefix.replace("/", "-")  # the same on all ranks

    def writer(self, name: str) -> StorageWriter:
        from torch.distributed.checkpoint.filesystem import FileSystemWriter

        return FileSystemWriter(self._directory / name, thread_count=self._threads, sync_files=False)

    def reader(self, name: str) -> StorageReader:
        from torch.distributed.checkpoint.filesystem import FileSystemReader

        return FileSystemReader(self._directory / name)

    def clean_up(self) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)


CASES: dict[str, type[Case]] = {
    "dcp_s3": DcpS3,
    "s3torchconnector": S3TorchConnector,
    "fsspec": Fsspec,
    "filesystem": FileSystem,
}

#: Packages without which a case cannot run.
_REQUIRED = {
    "dcp_s3": ("dcp_s3",),
    "s3torchconnector": ("s3torchconnector", "tenacity"),
    "fsspec": ("fsspec", "s3fs"),
    "filesystem": (),
}


def reason_to_skip(name: str) -> str | None:
    """Why a case cannot run here, or None if it can."""
    missing = [m for m in _REQUIRED[name] if importlib.util.find_spec(m) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    if name == "filesystem" and not os.access(_MEMORY_DIRECTORY, os.W_OK):
        return f"{_MEMORY_DIRECTORY} is absent or not writable"
    return None
