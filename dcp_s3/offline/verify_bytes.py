"""Full verification: reads every byte of the data objects once, in parallel, through one block per connection."""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import pickle
import pickletools
import queue
import threading
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch

from dcp_s3 import errors
from dcp_s3.load.prepare import ArchiveHeads, ItemKind
from dcp_s3.memory import ReadTarget
from dcp_s3.offline.place import OnProgress, ahead
from dcp_s3.offline.verify_plan import Problem, StoredData, StoredItem, cut_range, find_mismatches, group_items
from dcp_s3.s3.store import S3Store
from dcp_s3.torch_private import ReaderTransforms, narrow_tensor_by_index
from dcp_s3.url import CheckpointURL

BLOCK = 2**20
"""Bytes that a connection receives into, again and again; added to a checksum while still in the CPU's cache."""

_GROUP = 8 * 2**20  # most bytes of neighbouring items to decode that one request fetches
_ZIP = b"PK\x03\x04"
_PROTO = b"\x80"  # the first byte of every pickle since protocol 2


@dataclass
class _Reading:
    """One reading of an object, and what it has found."""

    data: StoredData
    segments: list[tuple[int, int, int]] = field(default_factory=list)
    """Start, length and CRC-64/NVME of what has arrived."""
    problems: dict[StoredItem | None, str] = field(default_factory=dict)
    """What is wrong with items; at None, with the object."""
    undecoded: int = 0
    changed: bool = False
    """Whether it was deleted or written over meanwhile."""

    @property
    def suspect(self) -> StoredData:
        """What to read once more: all of the object, or only the items that could not be decoded."""
        items = [item for item in self.problems if item is not None]
        only_decoded = None not in self.problems and set(items) <= set(self.data.decoded)
        return replace(self.data, items=tuple(items)) if only_decoded else self.data

    def confirmed_by(self, again: _Reading) -> Iterator[Problem]:
        """What both readings have found; the object as a whole only where no item of it is wrong."""
        if self.changed or again.changed:
            what = (again if again.changed else self).problems[None]
            yield Problem(self.data.path, None, what)
            return
        found = {item: what for item, what in again.problems.items() if item in self.problems}
        for item, what in found.items():
            if item is not None or len(found) == 1:
                yield Problem(self.data.path, item.fqn if item else None, what)


class ByteCheck:
    """Reads data objects and compares their bytes. What does not match is read once more."""

    def __init__(self, store: S3Store, url: CheckpointURL) -> None:
        self._cancel = threading.Event()
        self._store = store.within(replace(store.limit, cancel=self._cancel))
        self._url = url
        self._step = store.settings.max_part_size
        self._width = store.read_width()
        self._blocks: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._heads = ArchiveHeads()
        self.bytes_read = 0
        self.items_not_decoded = 0

    def run(self, objects: Sequence[StoredData], on_progress: OnProgress | None) -> list[Problem]:
        """Progress does not count bytes that are read again."""
        for _ in range(self._width):
            self._blocks.put(memoryview(bytearray(BLOCK)))
        first = self._read_all(objects, on_progress)
        self.items_not_decoded = sum(reading.undecoded for reading in first)
        bad = [reading for reading in first if reading.problems]
        again = self._read_all([reading.suspect for reading in bad if not reading.changed], None)
        by_path = {reading.data.path: reading for reading in again}
        return [problem for each in bad for problem in each.confirmed_by(by_path.get(each.data.path, each))]

    def _read_all(self, objects: Sequence[StoredData], on_progress: OnProgress | None) -> list[_Reading]:
        readings = [_Reading(data) for data in objects]
        requests = itertools.chain.from_iterable(map(self._requests, readings))
        if not bytes_to_read(*objects):
            return readings
        run = ahead(lambda request: request(), requests, self._width, waiting=self._width, cancel=self._cancel)
        with run as done:
            for count in done:
                if on_progress is not None:
                    on_progress(count)
        for reading in readings:
            if reading.data.streamed and not reading.changed:
                reading.problems |= find_mismatches(reading.data, reading.segments)
        return readings

    def _requests(self, reading: _Reading) -> Iterator[Callable[[], int]]:
        data = reading.data
        if data.streamed:
            for start in range(0, data.size, self._step):
                length = min(self._step, data.size - start)
                yield functools.partial(self._request, reading, self._scan, start, length)
        for group in group_items(data.decoded, _GROUP):
            length = group[-1].stop - group[0].start
            yield functools.partial(self._request, reading, self._decode, group[0].start, length, group)
        for item in data.headed:
            length = item.checked_start - item.start
            if length:
                yield functools.partial(self._request, reading, self._check_head, item.start, length, item)

    def _request(self, reading: _Reading, read: Callable[..., None], start: int, length: int, *what: Any) -> int:
        changes = {
            errors.ObjectNotFoundError: "was deleted while it was read",
            errors.PreconditionFailedError: "was replaced while it was read",
            errors.OutOfRangeError: "became shorter while it was read",
        }
        if not reading.changed:
            try:
                read(reading, start, length, *what)
            except tuple(changes) as error:
                reading.problems[None] = next(text for kind, text in changes.items() if isinstance(error, kind))
                reading.changed = True
            else:
                with self._lock:
                    self.bytes_read += length
        return length

    def _scan(self, reading: _Reading, start: int, length: int) -> None:
        block = self._blocks.get()
        try:
            segments = cut_range(reading.data, start, length, BLOCK)
            targets = [ReadTarget(block[:size], checksum=True) for size in segments]
            self._store.read(self._url.key(reading.data.path), start, targets)
        finally:
            self._blocks.put(block)
        for target in targets:
            reading.segments.append((start, target.view.nbytes, target.crc or 0))
            start += target.view.nbytes

    def _decode(self, reading: _Reading, start: int, length: int, items: Sequence[StoredItem]) -> None:
        streams = [io.BytesIO(bytes(item.length)) for item in items]
        with contextlib.ExitStack() as views:
            targets = [ReadTarget(views.enter_context(stream.getbuffer())) for stream in streams]
            self._store.read(self._url.key(reading.data.path), start, targets)
        for item, stream in zip(items, streams, strict=True):
            try:
                damage = find_damage(stream, item)
            except UnknownExtensionError:
                reading.undecoded += 1
            else:
                if damage is not None:
                    reading.problems[item] = damage

    def _check_head(self, reading: _Reading, start: int, length: int, item: StoredItem) -> None:
        data = bytearray(length)
        self._store.read(self._url.key(reading.data.path), start, memoryview(data))
        if item.dtype is not None and item.shape is not None:
            kind = ItemKind(item.dtype, item.shape, item.length)
            fault = self._heads.find_fault(kind, length, bytes(data))
            if fault is not None:
                reading.problems[item] = f"is not what the metadata says: {fault}"


def bytes_to_read(*objects: StoredData) -> int:
    heads = sum(item.checked_start - item.start for data in objects for item in data.headed)
    return heads + sum(data.size * data.streamed + sum(item.length for item in data.decoded) for data in objects)


# --- items without a checksum ----------------------------------------------------------------------------


class UnknownExtensionError(ValueError):
    """An item went through a stream extension that is not registered here."""


def find_damage(data: io.BytesIO, item: StoredItem) -> str | None:
    """Say what is wrong with the bytes of an item; None if it can be decoded. No pickled code is run.

    A tensor is loaded as a reader would. Other objects are loaded where that runs no code (``weights_only``), otherwise
    their pickle is read through. Items that went through stream extensions are only read to their end.
    """
    try:
        if item.transforms:
            _drain(data, item)
            return None
        if data.getbuffer()[:4] == _ZIP or zipfile.is_zipfile(data):
            _check_zip(data, item)
        if item.shape is not None:
            _check_tensor(data, item.shape, item.dtype)
        else:
            _check_object(data)
    except (UnknownExtensionError, MemoryError):
        raise
    except Exception as error:
        if "can't allocate memory" in str(error):
            raise MemoryError(str(error)) from error
        reason = str(error).partition("\n")[0]
        return f"cannot be decoded: {type(error).__name__}: {reason}"
    return None


def _drain(data: io.BytesIO, item: StoredItem) -> None:
    transforms = ReaderTransforms()
    try:
        transforms.extension_registry.from_descriptor_list(item.transforms)
    except ValueError as error:
        raise UnknownExtensionError(str(error)) from error
    stream = transforms.transform_load_stream(cast(Any, None), item.transforms, data)
    while stream.read(BLOCK):
        pass


def _check_zip(data: io.BytesIO, item: StoredItem) -> None:
    data.seek(0)
    with zipfile.ZipFile(data) as archive:
        for record in archive.infolist():
            if record.compress_type != zipfile.ZIP_STORED or record.file_size > item.length:
                raise ValueError(f"its record {record.filename} pretends to have {record.file_size} bytes")
            # Not computed under torch.serialization.set_crc32_options(False), nor for raw bytes framed by this package.
            unknown = record.CRC == 0 or (item.raw and "/data/" in record.filename)
            with archive.open(record) as stream:  # checks the record's own header
                while not unknown and stream.read(BLOCK):
                    pass


def _check_tensor(data: io.BytesIO, shape: torch.Size, dtype: torch.dtype | None) -> None:
    data.seek(0)
    tensor = torch.load(data, map_location="cpu", weights_only=True)
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"it is a {type(tensor).__name__}, not a tensor")
    if dtype is not None and tensor.dtype != dtype:
        raise ValueError(f"it is a {tensor.dtype}, recorded was {dtype}")
    if tensor.dim() != len(shape):
        raise ValueError(f"it has shape {tuple(tensor.size())}, recorded was {tuple(shape)}")
    found = narrow_tensor_by_index(tensor, [0] * len(shape), shape).size()
    if found != shape:
        raise ValueError(f"it has shape {tuple(found)}, recorded was {tuple(shape)}")


def _check_object(data: io.BytesIO) -> None:
    if not zipfile.is_zipfile(data):
        _read_through(data.getbuffer())
        return
    data.seek(0)
    try:
        torch.load(data, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:  # its classes need code, or it is damaged
        with zipfile.ZipFile(data) as archive:
            (name,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
            _read_through(archive.read(name))


def _read_through(pickled: bytes | memoryview) -> None:
    if bytes(pickled[:1]) != _PROTO:
        raise ValueError("it is neither a zip archive nor a pickle")
    for _ in pickletools.genops(io.BytesIO(pickled)):
        pass
