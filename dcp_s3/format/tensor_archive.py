"""The archive that torch.save writes for a dict of tensors, made without the tensors' bytes. Pure.

Under ``torch.serialization.skip_data`` torch.save leaves a hole for each storage. With tensors that have no memory
(fake ones) that gives the archive of a model of any size; the bytes are put into the holes while it is written. As in
`framing`, the zip CRC-32 of the records is not that of the data; torch.load does not check it.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dcp_s3.format.framing import FramingError
from dcp_s3.format.safetensors import TensorEntry
from dcp_s3.tensor_memory import copy_to_host, is_plain
from dcp_s3.torch_private import FakeTensorMode


@dataclass(frozen=True)
class TensorArchive:
    """An archive: runs of bytes, and tensors between them."""

    parts: tuple[bytes | TensorEntry, ...]
    """Bytes as they are, and tensors whose bytes belong there, in row-major order."""

    @property
    def nbytes(self) -> int:
        """Bytes of the whole archive."""
        return sum(len(part) if isinstance(part, bytes) else part.nbytes for part in self.parts)


class _Recorder:
    """File object for torch.save that records what is written, and the holes between."""

    def __init__(self) -> None:
        self.parts: list[bytes | int] = []
        self._position = 0

    def write(self, data: bytes) -> int:
        if self.parts and isinstance(self.parts[-1], bytes) and len(self.parts[-1]) < 2**16:
            self.parts[-1] += bytes(data)
        else:
            self.parts.append(bytes(data))
        self._position += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        target = offset if whence == io.SEEK_SET else self._position + offset
        if target < self._position:
            raise FramingError("torch.save seeked in an unexpected way under skip_data")
        if target > self._position:
            self.parts.append(target - self._position)
            self._position = target
        return target

    def tell(self) -> int:
        return self._position

    def flush(self) -> None:
        pass


def make_archive(names: Mapping[str, TensorEntry | Any]) -> TensorArchive:
    """The archive of a dict.

    Args:
        names: keys of the dict. A `TensorEntry` stands for a tensor, whose bytes come later; any other value is stored
            itself, with the bytes of the tensors in its dicts, lists and tuples.

    Raises:
        FramingError: torch's archive layout has changed, or tensors of a value are not found.
    """
    tensors = {name: value for name, value in names.items() if isinstance(value, TensorEntry)}
    inner: list[torch.Tensor] = []
    with FakeTensorMode():
        state: dict[str, Any] = {
            name: torch.empty(entry.shape, dtype=entry.dtype, device="cpu") for name, entry in tensors.items()
        }
    for name, value in names.items():
        if name not in tensors:
            state[name] = value
            _collect(value, inner)
    recorder = _Recorder()
    with torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save(state, recorder)  # type: ignore[arg-type]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in inner}
    fillings: list[TensorEntry | bytes] = [entry for entry in tensors.values() if entry.nbytes]
    fillings += [_bytes_of(storage) for storage in storages.values() if storage.nbytes()]
    parts: list[bytes | TensorEntry] = []
    left = iter(fillings)
    for part in recorder.parts:
        if isinstance(part, bytes):
            parts.append(part)
            continue
        filling = next(left, b"")
        if part != (len(filling) if isinstance(filling, bytes) else filling.nbytes):
            raise FramingError(f"torch.save left a hole of {part} bytes that belongs to no tensor")
        parts.append(filling)
    if next(left, None) is not None:
        raise FramingError("torch.save left no hole for a tensor")
    return TensorArchive(tuple(parts))


def _collect(value: Any, into: list[torch.Tensor]) -> None:
    """The tensors in a value, in the order in which they are pickled."""
    if isinstance(value, torch.Tensor):
        if not is_plain(value):
            raise FramingError(f"a {type(value).__name__} ({value.layout}) inside of an entry cannot be written")
        into.append(value)
    elif isinstance(value, Mapping):
        for key, each in value.items():
            _collect(key, into)
            _collect(each, into)
    elif isinstance(value, (list, tuple)):
        for each in value:
            _collect(each, into)


def _bytes_of(storage: torch.UntypedStorage) -> bytes:
    return bytes(copy_to_host(torch.empty(0, dtype=torch.uint8).set_(storage)))
