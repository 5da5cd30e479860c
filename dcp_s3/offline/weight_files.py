"""Files with weights, in a directory or on S3: which there are, and where in them each tensor lies."""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from dcp_s3.errors import ObjectNotFoundError, WeightsError
from dcp_s3.format import safetensors
from dcp_s3.format.safetensors import SafetensorsError
from dcp_s3.load.boxes import row_major_strides
from dcp_s3.offline.place import Place
from dcp_s3.settings import Settings
from dcp_s3.store import Store
from dcp_s3.torch_private import offset_in_archive, without_data

_TORCH = (".bin", ".pt", ".pth", ".ckpt")
_SUFFIXES = (".safetensors", *_TORCH)
_INDEXES = (safetensors.INDEX, "pytorch_model.bin.index.json")
_WHOLE = (safetensors.SINGLE_FILE, "pytorch_model.bin")
_READ_AT_ONCE = 64 * 2**10


@dataclass(frozen=True)
class WeightFile:
    store: Store
    key: str
    size: int
    etag: str

    @property
    def name(self) -> str:
        return f"{self.store.name}/{self.key}"

    def read(self, start: int, into: memoryview) -> None:
        """Fill memory with the bytes from ``start`` on; StorageError if it was replaced."""
        self.store.read(self.key, start, into, self.etag)

    def read_bytes(self, start: int, count: int) -> bytes:
        data = bytearray(max(0, min(count, self.size - start)))
        self.read(start, memoryview(data))
        return bytes(data)


@dataclass(frozen=True)
class FoundTensor:
    file: WeightFile
    start: int
    """Byte of the file at which its first element lies."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """Strides in elements."""


@dataclass(frozen=True)
class FoundWeights:
    tensors: Mapping[str, FoundTensor]
    objects: Mapping[str, Any]
    """Other values of torch files."""
    paths: Mapping[str, tuple[Any, ...]]
    """Keys of the nested dicts and lists in which an entry was, the outermost first, by name."""


def find_weights(source: str | os.PathLike[str], settings: Settings) -> FoundWeights:
    """Look at what is at ``source``: a directory, an S3 prefix, or one file.

    Of a directory: a model with an index, or ``model.safetensors``, ``pytorch_model.bin``, or all ``*.safetensors``, or
    the only other torch file.
    """
    place, names, places = _locate(source, settings)
    found = FoundWeights({}, {}, {})
    for name in names:
        inside = _open(place, name)
        for fqn in inside.paths:
            if places is not None and places.get(fqn) != name:
                raise WeightsError(f"{fqn!r} is in {place.key(name)}, but the index says {places.get(fqn)!r}")
            if fqn in found.paths:
                raise WeightsError(f"{fqn!r} is in two of the files of {source}")
        found = FoundWeights(
            {**found.tensors, **inside.tensors}, {**found.objects, **inside.objects}, {**found.paths, **inside.paths}
        )
    missing = [fqn for fqn in places or () if fqn not in found.paths]
    if missing:
        raise WeightsError(f"{missing[0]!r} is in no file of {source}, but in its index ({len(missing)} in all)")
    return found


def _locate(source: str | os.PathLike[str], settings: Settings) -> tuple[Place, list[str], Mapping[str, str] | None]:
    """Where the files are, their names, and which an index names for each tensor."""
    place = Place.of(source, settings)
    if place.url is not None:
        name = place.url.name
        if name.endswith(_SUFFIXES) and place.store.exists(place.url.prefix):
            return replace(place, prefix=place.url.prefix.removesuffix(name)), [name], None
    elif not Path(source).is_dir():
        path = Path(source)
        if not path.is_file():
            raise WeightsError(f"there is no file or directory {str(path)!r}")
        return Place.of(path.parent, settings), [path.name], None
    for index in _INDEXES:
        try:
            data = place.store.get(place.key(index)).data
        except ObjectNotFoundError:
            continue
        try:
            places = safetensors.parse_index(data)
        except SafetensorsError as error:
            raise WeightsError(f"{index} of {source} cannot be used: {error}") from None
        return place, list(dict.fromkeys(places.values())), places
    return place, _choose(place), None


def _choose(place: Place) -> list[str]:
    for name in _WHOLE:
        if place.store.exists(place.key(name)):
            return [name]
    there = place.names()
    chosen = [name for name in there if name.endswith(".safetensors")]
    if not chosen:
        chosen = [name for name in there if name.endswith(_TORCH)]
        if len(chosen) > 1:
            raise WeightsError(f"{place.name} has several torch files ({', '.join(chosen[:3])}). Remedy: name one")
    if not chosen:
        raise WeightsError(
            f"{place.name} has no weights: neither *.safetensors nor *.bin, *.pt, *.pth or *.ckpt. Remedy: check the "
            "path"
        )
    return chosen


def _open(place: Place, name: str) -> FoundWeights:
    try:
        head = place.store.head(place.key(name))
    except ObjectNotFoundError:
        raise WeightsError(f"{place.name} has no file {place.key(name)}, which its index names") from None
    file = WeightFile(place.store, place.key(name), head.size, head.etag)
    return _parse_safetensors(file) if name.endswith(".safetensors") else _parse_torch(file)


def _parse_safetensors(file: WeightFile) -> FoundWeights:
    try:
        length = safetensors.header_length(file.read_bytes(0, safetensors.PREFIX), file.size)
        placed = safetensors.parse_header(file.read_bytes(safetensors.PREFIX, length), file.size)
    except SafetensorsError as error:
        raise WeightsError(f"{file.name} cannot be imported: {error}") from None
    tensors = {
        each.entry.name: FoundTensor(
            file, each.start, each.entry.dtype, each.entry.shape, row_major_strides(each.entry.shape)
        )
        for each in placed
    }
    return FoundWeights(tensors, {}, {name: (name,) for name in tensors})


def _parse_torch(file: WeightFile) -> FoundWeights:
    """Only the pickle and the archive's directory are read: tensors are made on the meta device."""
    stream = io.BufferedReader(_Stream(file), _READ_AT_ONCE)
    try:
        if stream.peek(4)[:4] != b"PK\x03\x04":
            raise WeightsError(
                f"{file.name} cannot be imported: it is in torch's format before 1.6, or no torch file. Remedy: load "
                "it with torch.load and save it again with torch.save"
            )
        with without_data():
            value = torch.load(stream, map_location="meta", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise WeightsError(
            f"{file.name} cannot be imported: {reason}. It is damaged, or needs what torch's weights-only load refuses"
        ) from error
    if not isinstance(value, Mapping):
        raise WeightsError(f"{file.name} cannot be imported: it holds a {type(value).__name__}, not a dict")
    try:
        planner = DefaultSavePlanner()
        planner.set_up_planner(dict(value), is_coordinator=True)  # which gives nested values the names of DCP
    except ValueError as error:
        raise WeightsError(f"{file.name} cannot be imported: {error}") from None
    tensors = {
        name: _find(file, name, each) for name, each in planner.state_dict.items() if isinstance(each, torch.Tensor)
    }
    objects = {name: each for name, each in planner.state_dict.items() if name not in tensors}
    return FoundWeights(tensors, objects, dict(planner.mappings))


def _find(file: WeightFile, name: str, tensor: torch.Tensor) -> FoundTensor:
    lazy = tensor.is_conj() or tensor.is_neg()
    start = None if lazy or tensor.is_quantized or tensor.layout != torch.strided else offset_in_archive(tensor)
    if start is None:
        raise WeightsError(f"{name!r} in {file.name} cannot be imported: it is no ordinary tensor ({tensor.layout})")
    place = start + int(tensor.storage_offset()) * tensor.element_size()
    return FoundTensor(file, place, tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()))


class _Stream(io.RawIOBase):
    """A file, for torch.load."""

    def __init__(self, file: WeightFile) -> None:
        self._file, self._position = file, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._file.size}[whence]
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        into = memoryview(buffer).cast("B")
        count = max(0, min(into.nbytes, self._file.size - self._position))
        self._file.read(self._position, into[:count])
        self._position += count
        return count
