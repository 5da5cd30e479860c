"""A spill directory, and what tests do with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_s3 import S3StorageWriter
from dcp_s3.memory import crc64nvme, encode_crc
from dcp_s3.s3.store import S3Store
from dcp_s3.settings import Settings
from dcp_s3.spill.drain import Drainer, DrainReport
from dcp_s3.spill.store import SpilledSave, SpillStore
from dcp_s3.url import parse_url
from tests.end_to_end.loads import assert_loads as assert_complete
from tests.end_to_end.states import every_kind
from tests.faulty import BUCKET, FaultyServer
from tests.memory_s3 import Fault

MIB = 2**20
PART = 5 * MIB


class Spill:
    """A spill directory, and what a test does with it."""

    def __init__(self, root: str, path: Path, server: FaultyServer | None = None) -> None:
        self.root = root
        self.bucket_name = parse_url(root).bucket
        self.path = path
        self.store = SpillStore(path)
        self.server: Any = server

    @property
    def bucket(self) -> S3Store:
        return S3Store(self.bucket_name, Settings())

    def url(self, name: str) -> str:
        return f"{self.root}/{name}"

    def writer(self, url: str, settings: dict[str, Any] | None = None, **options: Any) -> S3StorageWriter:
        return S3StorageWriter(url, settings=settings or {}, **options)

    def save(self, url: str, state: dict[str, Any], **options: Any) -> S3StorageWriter:
        """To disk only."""
        writer = self.writer(url, {"durability": "local"}, **options)
        dcp.save(state, storage_writer=writer)
        return writer

    def save_to_s3(self, url: str, state: dict[str, Any], **options: Any) -> None:
        """Without a spill directory."""
        dcp.save(state, storage_writer=self.writer(url, {"spill_dir": None}, **options))

    def drain(self, **options: Any) -> DrainReport:
        return Drainer(self.store, **options).run()

    def drained(self, url: str, state: dict[str, Any]) -> None:
        """Drain the one checkpoint that waits; nothing is left."""
        assert self.drain().committed == [url]
        assert_complete(url, state)
        self.assert_empty()

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

    def list_data(self, url: str) -> list[str]:
        return [key for key in self.list(url) if key.endswith(".distcp")]

    def files(self) -> list[str]:
        return list_files(self.path)

    def assert_empty(self) -> None:
        assert list((self.path / "saves").iterdir()) == []
        assert not (self.path / "refused").exists()
        if self.server is not None:
            assert self.server.s3.open_uploads(BUCKET) == []


def list_files(path: Path) -> list[str]:
    """All files, without those of locks."""
    found = (each for each in path.rglob("*") if each.is_file() and each.suffix != ".lock")
    return sorted(str(each.relative_to(path)) for each in found)


def configure(monkeypatch: pytest.MonkeyPatch, path: Path, **settings: str) -> None:
    """Nothing drains by itself."""
    values = {"SPILL_DIR": str(path), "PART_SIZE": "5MiB", "RETRY_ATTEMPTS": "2", "SPILL_AFTER": "2s", **settings}
    for name, value in values.items():
        monkeypatch.setenv(f"DCP_S3_{name}", value)
    monkeypatch.setattr("dcp_s3.save.writer.OBJECTS_PER_RANK", 1)
    monkeypatch.setattr("dcp_s3.spill.saving.drain_in_background", lambda *_, **__: None)


def small_state(seed: int = 0) -> dict[str, Any]:
    """One object of one part."""
    return {"small": torch.arange(1000, dtype=torch.float32) + seed}


def large_state(seed: int = 0) -> dict[str, Any]:
    """One object of 12 MiB: three parts."""
    return {"large": torch.arange(3 * MIB, dtype=torch.float32) + seed}


def make_state(seed: int = 0) -> dict[str, Any]:
    """Of everything, and large; the same for the same seed."""
    torch.manual_seed(seed)
    return {**every_kind(), **large_state(seed), "step": seed}


def refuse_all(_: Any) -> Fault:
    return Fault.error(503, "SlowDown")


def refuse_writes(request: Any) -> Fault | None:
    return refuse_all(request) if request.operation.startswith(("Put", "Create", "Upload", "Complete")) else None


def allow_all(_: Any) -> None:
    return None


def begin_multipart(bucket: S3Store, key: str, data: bytes) -> None:
    """What a process leaves that dies in the middle of an upload: whole parts, not completed."""
    is_checked = bucket.settings.checksum != "none"
    algorithm = {"ChecksumAlgorithm": "CRC64NVME", "ChecksumType": "FULL_OBJECT"} if is_checked else {}
    where = {"Bucket": bucket.name, "Key": key}
    upload_id = bucket.client.create_multipart_upload(**where, **algorithm)["UploadId"]
    for number, start in enumerate(range(0, len(data), PART), start=1):
        part = data[start : start + PART]
        checksum = {"ChecksumCRC64NVME": encode_crc(crc64nvme(part))} if is_checked else {}
        bucket.client.upload_part(**where, UploadId=upload_id, PartNumber=number, Body=part, **checksum)


def damage(path: Path, position: int = 1000) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)
        file.seek(position)
        file.write(bytes([byte[0] ^ 1]))
