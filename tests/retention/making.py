"""Checkpoints of every kind, made with the real writers."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.storage import WriteResult

from dcp_s3 import S3StorageWriter, process
from dcp_s3.checkpoint.commit_state import SaveIdentity
from dcp_s3.format.layout import What, classify
from dcp_s3.save.save import Save
from dcp_s3.settings import Settings
from dcp_s3.url import CheckpointURL, parse_url
from tests.ranks import run_ranks


def state() -> dict[str, Any]:
    return {
        "weight": torch.arange(12, dtype=torch.float32).reshape(3, 4),
        "half": torch.ones(5, dtype=torch.bfloat16),
        "step": 7,
    }


def zeros() -> dict[str, Any]:
    return {"weight": torch.zeros(3, 4), "half": torch.zeros(5, dtype=torch.bfloat16), "step": 0}


def save(url: str, **arguments: Any) -> str:
    dcp.save(state(), storage_writer=S3StorageWriter(url, **arguments), no_dist=True)
    return url


def save_locally(directory: Path) -> Path:
    """With torch's own writer."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state(), storage_writer=dcp.FileSystemWriter(directory), no_dist=True)
    return directory


def save_foreign(s3: Any, url: str, directory: Path) -> str:
    """What torch's own writer makes, uploaded."""
    where = parse_url(url)
    for file in save_locally(directory).iterdir():
        s3.put_object(Bucket=where.bucket, Key=where.key(file.name), Body=file.read_bytes())
    return url


def _save_without_collectives(url: str, overwrite: bool) -> None:
    writer = S3StorageWriter(url, overwrite=overwrite, metrics={"loss": 0.5})
    with committing_alone():
        dcp.save(state(), storage_writer=writer, use_collectives=False, no_dist=not dist.is_initialized())


def save_on_ranks(url: str, count: int, *, overwrite: bool = False) -> str:
    """Every rank commits for itself; a single one is this process."""
    if count == 1:
        _save_without_collectives(url, overwrite)
    else:
        run_ranks(count, _save_without_collectives, url, overwrite)
    return url


def keys(s3: Any, url: str) -> dict[str, int]:
    """Relative path and bytes of every object of a checkpoint."""
    where = parse_url(url)
    found: dict[str, int] = {}
    for page in s3.get_paginator("list_objects_v2").paginate(Bucket=where.bucket, Prefix=where.key("")):
        found |= {entry["Key"][len(where.key("")) :]: entry["Size"] for entry in page.get("Contents", ())}
    return found


def is_manifest(path: str) -> bool:
    return classify(path).what is What.MANIFEST


def delete(s3: Any, url: str, path: str) -> None:
    where = parse_url(url)
    assert path in keys(s3, url)
    s3.delete_object(Bucket=where.bucket, Key=where.key(path))


def put(s3: Any, url: str, path: str, data: bytes = b"x") -> None:
    where = parse_url(url)
    s3.put_object(Bucket=where.bucket, Key=where.key(path), Body=data)


def get(s3: Any, url: str, path: str) -> bytes:
    where = parse_url(url)
    return bytes(s3.get_object(Bucket=where.bucket, Key=where.key(path))["Body"].read())


# --- as earlier versions saved without collectives: each rank commits a checkpoint for itself ----------


class _SaveAlone(Save):
    def __init__(
        self, url: CheckpointURL, save_id: str, settings: Settings, *, replicas: Any, counted: Any, step: Any,
        **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(url, save_id, settings, rank=process.rank(), **{**options, "overwrite": False})
        self._identity = SaveIdentity(url, save_id, self.rank)
        self._committer.identity = self._identity

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, [*results, *([] for _ in range(process.world_size() - 1))])


@contextlib.contextmanager
def committing_alone() -> Iterator[None]:
    """Saves without collectives in the body are those of single ranks."""
    with mock.patch("dcp_s3.save.writer.begin_joint_save", _SaveAlone):
        yield
