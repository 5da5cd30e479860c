"""A spill directory, and what tests do with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_s3 import S3StorageWriter
from dcp_s3.s3.operations import checksum_arguments, wire_checksum
from dcp_s3.s3.store import S3Store
from dcp_s3.settings import Settings
from dcp_s3.spill.drain import Drainer, DrainReport
from dcp_s3.spill.store import SpilledSave, SpillStore
from dcp_s3.url import parse_url

MIB = 2**20
PART = 5 * MIB


class Spill:
    """A spill directory, and what a test does with it."""

    def __init__(self, root: str, path: Path) -> None:
        self.root = root
        self.bucket_name = parse_url(root).bucket
        self.path = path
        self.store = SpillStore(path)

    @property
    def bucket(self) -> S3Store:
        return S3Store(self.bucket_name, Settings())

    def url(self, name: str) -> str:
        return f"{self.root}/{name}"

    def save(self, url: str, state: dict[str, Any], **options: Any) -> None:
        """To disk only."""
        dcp.save(state, storage_writer=S3StorageWriter(url, settings={"durability": "local"}, **options))

    def save_to_s3(self, url: str, state: dict[str, Any], **options: Any) -> None:
        """Without a spill directory."""
        dcp.save(state, storage_writer=S3StorageWriter(url, settings={"spill_dir": None}, **options))

    def drain(self, **options: Any) -> DrainReport:
        return Drainer(self.store, **options).run()

    def data(self) -> SpilledSave:
        """The one save with data that waits."""
        (save,) = [save for save in self.store.scan() if save.journal.commit is None]
        return save

    def commit(self) -> SpilledSave:
        """The one commit that waits."""
        (save,) = [save for save in self.store.scan() if save.journal.commit is not None]
        return save

    def key(self) -> str:
        """Of the one object that waits."""
        save = self.data()
        return parse_url(save.journal.url).key(save.journal.objects[0].entry.path)

    def is_visible(self, url: str) -> bool:
        return self.bucket.exists(parse_url(url).key(".metadata"))

    def list(self, url: str) -> list[str]:
        return [each.key for each in self.bucket.list(parse_url(url).key("")).objects]

    def assert_empty(self) -> None:
        assert list((self.path / "saves").iterdir()) == []
        assert not (self.path / "refused").exists()


def configure(root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Spill:
    path = tmp_path / "spill"
    for name, value in {
        "SPILL_DIR": str(path),
        "PART_SIZE": "5MiB",
        "RETRY_ATTEMPTS": "2",
        "SPILL_AFTER": "5s",
    }.items():
        monkeypatch.setenv(f"DCP_S3_{name}", value)
    monkeypatch.setattr("dcp_s3.save.writer.OBJECTS_PER_RANK", 1)
    monkeypatch.setattr("dcp_s3.spill.saving.drain_in_background", lambda *_, **__: None)  # the test drains
    return Spill(root, path)


def large_state(seed: int = 0) -> dict[str, torch.Tensor]:
    """One object of 12 MiB: three parts."""
    return {"large": torch.arange(3 * MIB, dtype=torch.float32) + seed}


def begin_multipart(bucket: S3Store, key: str, data: bytes) -> None:
    """What a process leaves that dies in the middle of an upload: whole parts, not completed."""
    algorithm = {"none": {}, "crc32c": {"ChecksumAlgorithm": "CRC32C", "ChecksumType": "FULL_OBJECT"}}.get(
        wire_checksum(bucket.settings), {"ChecksumAlgorithm": "CRC64NVME", "ChecksumType": "FULL_OBJECT"}
    )
    where = {"Bucket": bucket.name, "Key": key}
    upload_id = bucket.client.create_multipart_upload(**where, **algorithm)["UploadId"]
    for number, start in enumerate(range(0, len(data), PART), start=1):
        part = data[start : start + PART]
        bucket.client.upload_part(
            **where, UploadId=upload_id, PartNumber=number, Body=part, **checksum_arguments(bucket.settings, part)
        )


def damage(path: Path, position: int = 1000) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)
        file.seek(position)
        file.write(bytes([byte[0] ^ 1]))
