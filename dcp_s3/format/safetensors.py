"""Safetensors files (https://huggingface.co/docs/safetensors), and how Hugging Face lays a model out in several. Pure.

A file is eight bytes (the length of the header, little-endian), the header (JSON: dtype, shape and place of each
tensor), and the tensors' bytes end to end. A model in several files has an index, which says where each tensor is.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from dcp_s3.format.layout import is_inside

INDEX = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
PREFIX = 8
"""Bytes of the length before a header."""
MAX_HEADER = 100_000_000
"""Most bytes of a header that the safetensors library reads."""

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "C64": torch.complex64,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}  # fmt: skip
"""The dtypes that safetensors and its torch reader know, by their names in a header."""
if hasattr(torch, "float8_e8m0fnu"):
    DTYPES["F8_E8M0"] = torch.float8_e8m0fnu

NAMES = {dtype: name for name, dtype in DTYPES.items()}
_METADATA = "__metadata__"
_MAX_DIMS = 64  # as many as torch's kernels take
_NUMBERED = re.compile(r"model-[0-9]{5}-of-([0-9]{5})\.safetensors")


class SafetensorsError(ValueError):
    """The bytes are no safetensors header or index, or tensors cannot be put into one. ``args[0]`` says why."""


@dataclass(frozen=True)
class TensorEntry:
    """A tensor in a file."""

    name: str
    dtype: torch.dtype
    """In the file."""
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return math.prod(self.shape) * self.dtype.itemsize


class PlacedTensor(NamedTuple):
    """A tensor in a file that was read, and the byte at which its elements begin."""

    entry: TensorEntry
    start: int


@dataclass(frozen=True)
class Shard:
    """One file of a model."""

    name: str
    tensors: tuple[TensorEntry, ...]
    """In the order of their bytes."""

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors, without the header."""
        return sum(tensor.nbytes for tensor in self.tensors)


# --- writing ---------------------------------------------------------------------------------------


def plan_shards(tensors: Sequence[TensorEntry], max_size: int) -> list[Shard]:
    """Distribute tensors over files as Hugging Face names them, at least one.

    Files are filled in the order of ``tensors``, with at most ``max_size`` bytes or one tensor. Within a file wide
    dtypes come first, as safetensors does, so that every tensor is aligned.

    Raises:
        SafetensorsError: safetensors has no name for a dtype, or a tensor has the name that the format keeps to itself.
    """
    files: list[list[TensorEntry]] = [[]]
    size = 0
    for tensor in tensors:
        if tensor.dtype not in NAMES:
            raise SafetensorsError(
                f"safetensors has no dtype for {tensor.name!r}, which is {tensor.dtype}; it knows "
                f"{', '.join(str(dtype).removeprefix('torch.') for dtype in NAMES)}"
            )
        if tensor.name == _METADATA:
            raise SafetensorsError(f"no tensor may be called {_METADATA!r}: safetensors keeps its metadata there")
        if files[-1] and size + tensor.nbytes > max_size:
            files.append([])
            size = 0
        files[-1].append(tensor)
        size += tensor.nbytes
    count = len(files)
    return [
        Shard(
            SINGLE_FILE if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors",
            tuple(sorted(inside, key=lambda tensor: -tensor.dtype.itemsize)),
        )
        for number, inside in enumerate(files, start=1)
    ]


def make_header(tensors: Iterable[TensorEntry]) -> bytes:
    """The bytes of a file before those of its tensors; their length is a multiple of 8.

    Raises:
        SafetensorsError: it is longer than the library reads: there are too many tensors.
    """
    header: dict[str, Any] = {_METADATA: {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        places = [offset, offset := offset + tensor.nbytes]
        header[tensor.name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": places}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER:
        raise SafetensorsError(
            f"the header of {len(header) - 1} tensors would have {len(text)} bytes, safetensors reads {MAX_HEADER}: "
            "a smaller size of the files puts fewer tensors into each"
        )
    return struct.pack("<Q", len(text)) + text


def make_index(shards: Sequence[Shard]) -> bytes:
    """The index of a model in several files."""
    places = {tensor.name: shard.name for shard in shards for tensor in shard.tensors}
    index = {"metadata": {"total_size": sum(shard.nbytes for shard in shards)}, "weight_map": places}
    return (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()


# --- reading ---------------------------------------------------------------------------------------


def header_length(prefix: bytes, file_size: int) -> int:
    """Bytes of the header, from the first `PREFIX` bytes of a file.

    Raises:
        SafetensorsError: no header of this length can be there.
    """
    if len(prefix) < PREFIX:
        raise SafetensorsError(f"it has {len(prefix)} bytes: it is no safetensors file")
    (length,) = struct.unpack("<Q", prefix[:PREFIX])
    if length > min(MAX_HEADER, file_size - PREFIX):
        raise SafetensorsError(f"its header would have {length} bytes: it is damaged, or no safetensors file")
    return int(length)


def parse_header(header: bytes, file_size: int) -> list[PlacedTensor]:
    """The tensors of a file, in the order of their bytes, from its header without the length before it.

    Raises:
        SafetensorsError: the header is damaged, names a dtype that torch does not have, or the tensors do not fill the
            rest of the file exactly.
    """
    try:
        found = json.loads(header, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise SafetensorsError(f"its header is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise SafetensorsError("its header is no JSON object")
    found.pop(_METADATA, None)
    places: list[tuple[int, int, TensorEntry]] = []
    for name, described in found.items():
        try:
            dtype, shape, (start, stop) = described["dtype"], described["shape"], described["data_offsets"]
        except (KeyError, TypeError, ValueError):
            raise SafetensorsError(f"its header does not describe {name!r}") from None
        numbers = [start, stop, *shape] if isinstance(shape, list) and len(shape) <= _MAX_DIMS else [None]
        if not all(type(number) is int and 0 <= number < 2**63 for number in numbers):
            raise SafetensorsError(f"its header gives {name!r} no proper shape or place")
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise SafetensorsError(f"{name!r} has the dtype {dtype!r}, which torch does not have")
        places.append((start, stop, TensorEntry(name, DTYPES[dtype], tuple(shape))))
    begin, end, tensors = PREFIX + len(header), 0, []
    for start, stop, entry in sorted(places, key=lambda place: place[:2]):
        if start != end or stop - start != entry.nbytes:
            raise SafetensorsError(
                f"{entry.name!r} of {entry.nbytes} bytes lies at {start} to {stop}, expected from {end}"
            )
        tensors.append(PlacedTensor(entry, begin + start))
        end = stop
    if begin + end != file_size:
        raise SafetensorsError(
            f"it has {file_size} bytes, its header describes {begin + end}: it is cut short or damaged"
        )
    return tensors


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name is there twice")
    return found


def parse_index(data: bytes) -> Mapping[str, str]:
    """The file of each tensor, from the index of a model.

    Raises:
        SafetensorsError: it is no index, or names a file outside of its directory.
    """
    try:
        places = json.loads(data, object_pairs_hook=_unique)["weight_map"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise SafetensorsError("it is no index: it has no weight_map") from None
    if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
        raise SafetensorsError("its weight_map does not name a file for each tensor")
    for file in places.values():
        if "/" in file or file == "." or not is_inside(file):
            raise SafetensorsError(f"it names {file!r}, which is no file beside it")
    return places


def missing_files(names: Iterable[str]) -> list[str]:
    """Names of the files that are missing of a model in several, by the names of those that are there."""
    there = set(names)
    counts = {match[1] for name in there if (match := _NUMBERED.fullmatch(name))}
    expected = (f"model-{number:05d}-of-{count}.safetensors" for count in counts for number in range(1, int(count) + 1))
    return sorted(set(expected) - there)
