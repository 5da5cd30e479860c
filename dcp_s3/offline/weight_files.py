"""Safetensors files, in a directory or on S3: which there are, and where in them each tensor lies."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from dcp_s3.errors import ObjectNotFoundError, WeightsError
from dcp_s3.format import safetensors
from dcp_s3.format.safetensors import SafetensorsError
from dcp_s3.offline.place import Place
from dcp_s3.settings import Settings
from dcp_s3.store import Store

_SUFFIX = ".safetensors"


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
    """A tensor, row-major, in a file."""

    file: WeightFile
    start: int
    """Byte of the file at which its elements begin."""
    dtype: torch.dtype
    shape: tuple[int, ...]


def find_weights(source: str | os.PathLike[str], settings: Settings) -> dict[str, FoundTensor]:
    """Look at what is at ``source``, and read the headers: a directory, an S3 prefix, or one file.

    Of a directory: a model with an index, or ``model.safetensors``, or all ``*.safetensors``.
    """
    place, names, places = _locate(source, settings)
    found: dict[str, FoundTensor] = {}
    for name in names:
        for fqn, tensor in _open(place, name).items():
            if places is not None and places.get(fqn) != name:
                raise WeightsError(f"{fqn!r} is in {place.key(name)}, but the index says {places.get(fqn)!r}")
            if fqn in found:
                raise WeightsError(f"{fqn!r} is in two of the files of {source}")
            found[fqn] = tensor
    missing = [fqn for fqn in places or () if fqn not in found]
    if missing:
        raise WeightsError(f"{missing[0]!r} is in no file of {source}, but in its index ({len(missing)} in all)")
    return found


def _locate(source: str | os.PathLike[str], settings: Settings) -> tuple[Place, list[str], Mapping[str, str] | None]:
    """Where the files are, their names, and which an index names for each tensor."""
    place = Place.of(source, settings)
    if place.url is not None:
        name = place.url.name
        if name.endswith(_SUFFIX) and place.store.exists(place.url.prefix):
            return replace(place, prefix=place.url.prefix.removesuffix(name)), [name], None
    elif Path(source).is_file():
        return Place.of(Path(source).parent, settings), [Path(source).name], None
    try:
        places = safetensors.parse_index(place.store.get(place.key(safetensors.INDEX)).data)
        return place, list(dict.fromkeys(places.values())), places
    except ObjectNotFoundError:
        pass
    except SafetensorsError as error:
        raise WeightsError(f"{safetensors.INDEX} of {source} cannot be used: {error}") from None
    names = [name for name in place.names() if name.endswith(_SUFFIX)]
    if not names:
        raise WeightsError(
            f"{place.name} has no weights: no *{_SUFFIX}. Remedy: check the path; what a torch file holds is saved "
            "with dcp.save(torch.load(file), ...)"
        )
    return place, [safetensors.SINGLE_FILE] if safetensors.SINGLE_FILE in names else names, None


def _open(place: Place, name: str) -> dict[str, FoundTensor]:
    try:
        head = place.store.head(place.key(name))
    except ObjectNotFoundError:
        raise WeightsError(f"{place.name} has no file {place.key(name)}, which its index names") from None
    file = WeightFile(place.store, place.key(name), head.size, head.etag)
    try:
        length = safetensors.header_length(file.read_bytes(0, safetensors.PREFIX), file.size)
        placed = safetensors.parse_header(file.read_bytes(safetensors.PREFIX, length), file.size)
    except SafetensorsError as error:
        raise WeightsError(f"{file.name} cannot be imported: {error}") from None
    return {each.entry.name: FoundTensor(file, each.start, each.entry.dtype, each.entry.shape) for each in placed}
