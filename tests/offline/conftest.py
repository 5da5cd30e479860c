"""Checkpoints to be damaged behind dcp_s3's back, and weights, with a reader and writer of safetensors of its own."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import dcp_s3
from dcp_s3 import S3StorageWriter, VerifyReport, verify
from dcp_s3.format.layout import METADATA_CRC_KEY, SAVE_ID_KEY
from dcp_s3.format.safetensors import DTYPES, PREFIX, TensorEntry, header_length, make_header, parse_header
from dcp_s3.memory import crc64nvme, crc_hex
from dcp_s3.url import parse_url
from tests.end_to_end.states import bits, random_tensor
from tests.objects import separate_objects
from tests.retention.making import delete, get, keys

SETTINGS = {"part_size": "5MiB", "retry_attempts": 2}


def small_state() -> dict[str, Any]:
    return {
        "weight": random_tensor((30, 10), torch.float32, 1),
        "twin": random_tensor((30, 10), torch.float32, 2),
        "half": random_tensor((7,), torch.bfloat16, 3),
        "step": 17,
    }


class Saved:
    """A checkpoint whose stored objects can be changed behind dcp_s3's back."""

    def __init__(self, s3: Any, url: str) -> None:
        self._s3, self.url = s3, url
        self.parsed = parse_url(url)

    def save(self, state: Any, *, writer: dict[str, Any] | None = None, **settings: Any) -> Saved:
        storage_writer = S3StorageWriter(self.url, settings={**SETTINGS, **settings}, **(writer or {}))
        dcp.save(state, storage_writer=storage_writer, no_dist=True)
        return self

    def put(self, path: str, data: bytes, fields: dict[str, str] | None = None) -> None:
        """Replace an object; its user metadata stays if no other is given."""
        key = self.parsed.key(path)
        if fields is None:
            fields = self._s3.head_object(Bucket=self.parsed.bucket, Key=key)["Metadata"]
        self._s3.put_object(Bucket=self.parsed.bucket, Key=key, Body=data, Metadata=fields)

    def get(self, path: str) -> bytes:
        return get(self._s3, self.url, path)

    def delete(self, path: str) -> None:
        delete(self._s3, self.url, path)

    def flip(self, path: str, position: int) -> None:
        data = bytearray(self.get(path))
        data[position] ^= 0x10
        self.put(path, bytes(data))

    @property
    def sizes(self) -> dict[str, int]:
        return keys(self._s3, self.url)

    @property
    def data(self) -> list[str]:
        return [path for path in self.sizes if path.endswith(".distcp")]

    @property
    def manifest(self) -> str:
        (path,) = (path for path in self.sizes if "manifest" in path)
        return path

    @property
    def metadata(self) -> Metadata:
        found = pickle.loads(self.get(".metadata"))
        assert isinstance(found, Metadata)
        return found

    def info(self, fqn: str) -> Any:
        (found,) = (info for index, info in self.metadata.storage_data.items() if index.fqn == fqn)
        return found

    def change_metadata(self, change: Callable[[Metadata], None]) -> None:
        """As somebody would who knows how: the user metadata says what it should."""
        metadata = self.metadata
        change(metadata)
        data = pickle.dumps(metadata)
        save_id = metadata.storage_meta.save_id if metadata.storage_meta else ""
        self.put(".metadata", data, {SAVE_ID_KEY: str(save_id), METADATA_CRC_KEY: crc_hex(crc64nvme(data))})

    def change_manifest(self, change: Callable[[dict[str, Any]], None]) -> None:
        fields = json.loads(self.get(self.manifest))
        change(fields)
        self.put(self.manifest, json.dumps(fields).encode(), {})

    def verify(self, *, full: bool = True, **settings: Any) -> VerifyReport:
        return verify(self.url, full=full, settings={**SETTINGS, **settings})

    def only_problem(self, *, full: bool = True) -> dcp_s3.Problem:
        (problem,) = self.verify(full=full).problems
        return problem


@pytest.fixture
def saved(memory_server: Any, s3: Any, root: str) -> Saved:
    with separate_objects("weight"):
        return Saved(s3, root).save(small_state())


# --- weights -------------------------------------------------------------------------------------------


def model() -> dict[str, torch.Tensor]:
    found = {f"dtypes.{name}": random_tensor((5, 7), dtype, n) for n, (name, dtype) in enumerate(DTYPES.items())}
    large = random_tensor((300, 70), torch.float32, 1)
    return found | {
        "large": large, "transposed": large.t(), "view": large[::3, 2:9], "one": torch.ones(1),
        "scalar": torch.tensor(3.5), "empty": torch.empty(3, 0), "tied.a": large, "tied.b": large,
        "naïve/key %+": torch.arange(9),
    }  # fmt: skip


def save(state: Mapping[str, Any], url: str, attachments: Mapping[str, bytes] | None = None, **options: Any) -> None:
    writer = S3StorageWriter(url, **options)
    for name, data in (attachments or {}).items():
        writer.attach(name, data)
    dcp.save(dict(state), storage_writer=writer, no_dist=True)


def save_sharded(url: str, rows: int) -> None:
    """On four ranks: one tensor, placed in several ways."""
    line, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    placements = {
        "rows": (line, [Shard(0)]), "columns": (line, [Shard(1)]), "replicated": (line, [Replicate()]),
        "grid": (square, [Shard(0), Shard(1)]), "hybrid": (square, [Replicate(), Shard(0)]),
    }  # fmt: skip
    full = torch.arange(rows * 22 * 3).view(rows, 22, 3)
    state = {name: distribute_tensor(full, *how, src_data_rank=None) for name, how in placements.items()}
    dcp.save(state, storage_writer=dcp_s3.S3StorageWriter(url))


def read(data: bytes) -> dict[str, torch.Tensor]:
    length = header_length(data[:PREFIX], len(data))
    return {
        placed.entry.name: torch.frombuffer(bytearray(data[placed.start :] + b"\0"), dtype=torch.uint8)[
            : placed.entry.nbytes
        ].clone().view(placed.entry.dtype).view(placed.entry.shape)
        for placed in parse_header(data[PREFIX : PREFIX + length], len(data))
    }  # fmt: skip


def as_file(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """A safetensors file."""
    entries = [TensorEntry(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
    return make_header(entries) + b"".join(map(bits, tensors.values()))
