"""Weights for the tests of export and import, and a reader of safetensors files of its own."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

import dcp_s3
from dcp_s3.format.safetensors import DTYPES, PREFIX, TensorEntry, header_length, make_header, parse_header
from tests.end_to_end.states import bits, random_tensor


def model() -> dict[str, torch.Tensor]:
    """Tensors of every dtype that safetensors knows, and of odd shapes."""
    found = {f"dtypes.{name}": random_tensor((5, 7), dtype, n) for n, (name, dtype) in enumerate(DTYPES.items())}
    large = random_tensor((300, 70), torch.float32, 1)
    return found | {
        "large": large, "transposed": large.t(), "view": large[::3, 2:9], "one": torch.ones(1),
        "scalar": torch.tensor(3.5), "empty": torch.empty(3, 0), "tied.a": large, "tied.b": large,
        "naïve/key %+": torch.arange(9),
    }  # fmt: skip


def save(state: Mapping[str, Any], url: str, **arguments: Any) -> None:
    dcp.save(dict(state), storage_writer=dcp_s3.S3StorageWriter(url, **arguments), no_dist=True)


def read(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a file."""
    data = path.read_bytes()
    length = header_length(data[:PREFIX], len(data))
    return {
        placed.entry.name: torch.frombuffer(bytearray(data[placed.start :] + b"\0"), dtype=torch.uint8)[
            : placed.entry.nbytes
        ].clone().view(placed.entry.dtype).view(placed.entry.shape)
        for placed in parse_header(data[PREFIX : PREFIX + length], len(data))
    }  # fmt: skip


def write(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """A file of these tensors."""
    entries = [TensorEntry(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
    path.write_bytes(make_header(entries) + b"".join(map(bits, tensors.values())))


def lengthen(path: Path) -> None:
    """Damage: a header that is longer than the file."""
    data = path.read_bytes()
    path.write_bytes(struct.pack("<Q", len(data)) + data[8:])
