"""Full verification: reads every byte of the data objects once, in parallel, through one block per connection."""

from __future__ import annotations

import io
import pickle
import pickletools
import zipfile
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch

from dcp_s3 import errors
from dcp_s3.checksum import crc_hex
from dcp_s3.format.blocks import Range
from dcp_s3.load.archives import ArchiveHeads, ItemKind
from dcp_s3.load.fetch import Fetcher, Receiver
from dcp_s3.load.plan import ReadRequest, Segment
from dcp_s3.load.transfer import Buffer, Reception, Transfer
from dcp_s3.memory import ReadTarget
from dcp_s3.offline.files import OnProgress
from dcp_s3.offline.verify_plan import Mismatch, ObjectScan, Problem, StoredData, StoredItem, group_items
from dcp_s3.s3.store import S3Store
from dcp_s3.torch_private import ReaderTransforms, narrow_tensor_by_index
from dcp_s3.url import CheckpointURL

BLOCK = 2**20
"""Bytes that a connection receives into, again and again; added to a checksum while still in the CPU's cache."""

_GROUP = 8 * 2**20  # most bytes of neighbouring items to decode that one request fetches
_ZIP = b"PK\x03\x04"
_PROTO = b"\x80"  # the first byte of every pickle since protocol 2


class _Checked(Transfer):
    """Damage, or a change of the object meanwhile, is noted and not raised."""

    __slots__ = ("change",)

    def __init__(self, path: str, start: int, length: int) -> None:
        super().__init__(path, start, [Range(0, length, None)], (0, length))
        self.change: str | None = None

    def name_of(self, part: Range) -> str:
        return self.path

    def give_up(self, error: errors.CorruptCheckpointError) -> None:
        if error.__cause__ is None:
            return  # the mismatch is noted already
        self.change = "became shorter while it was read"
        if isinstance(error.__cause__, errors.ObjectNotFoundError):
            self.change = "was deleted while it was read"
        elif isinstance(error.__cause__, errors.PreconditionFailedError):
            self.change = "was replaced while it was read"


class _StreamedObject(_Checked):
    """An object whose bytes all go into checksums; ``found`` has the mismatches of each complete reading."""

    __slots__ = ("_scan", "data", "found")

    def __init__(self, data: StoredData) -> None:
        super().__init__(data.path, 0, data.size)
        self.data = data
        self.found: list[Mismatch] = []
        self._scan = ObjectScan(data)

    def targets(self, start: int, length: int, buffer: Buffer) -> list[ReadTarget]:
        block = buffer.reserve(BLOCK)
        return [ReadTarget(block[:size], checksum=True) for size in self._scan.segments(start, length, BLOCK)]

    def received(self, start: int, targets: Sequence[ReadTarget]) -> bool:
        runs = self._scan.join(start, ((target.crc or 0, target.view.nbytes) for target in targets))
        with self._lock:
            return self._scan.arrived(runs)

    def mismatches(self) -> list[tuple[Range, int]]:
        self.found.append(self._scan.mismatch())
        return [(self.ranges[0], 0)] if self.found[-1].any else []

    def forget(self, part: Range) -> None:
        self._scan = ObjectScan(self.data)

    def problems(self) -> Iterator[Problem]:
        first, *again = self.found
        if not again:
            return
        data, found = self.data, first.confirmed_by(again[0])
        for number, crc in sorted(found.items.items()):
            item = data.checked[number]
            what = f"has CRC-64/NVME {crc_hex(crc)}, recorded was {crc_hex(item.crc or 0)}"
            if item.checked_length:
                what += f" (bytes {item.checked_start} to {item.checked_start + item.checked_length - 1})"
            if data.crc is not None and found.whole is None:
                what += "; the object as a whole is as recorded, so that the metadata is wrong"
            yield Problem(data.path, item.fqn, what)
        if found.whole is not None and not found.items:
            what = (
                f"has CRC-64/NVME {found.whole}, recorded was {data.crc}; its items match, what is around them does not"
            )
            yield Problem(data.path, None, what)


class _DecodedItem(_Checked):
    """An item that no checksum covers; ``unknown`` if it went through a stream extension that is not registered."""

    __slots__ = ("_item", "_stream", "damage", "unknown")

    def __init__(self, item: StoredItem) -> None:
        super().__init__(item.path, item.start, item.length)
        self._item = item
        self._stream: io.BytesIO | None = None
        self.damage: str | None = None
        self.unknown = False

    def name_of(self, part: Range) -> str:
        return self._item.fqn

    def memory(self, start: int, stop: int) -> memoryview:
        with self._lock:
            if self._stream is None:
                self._stream = io.BytesIO()
                self._stream.seek(max(0, self._item.length - 1))
                self._stream.write(b"\0"[: self._item.length])  # its memory, once
                self._stream.seek(0)
        return self._stream.getbuffer()[start:stop]

    def mismatches(self) -> list[tuple[Range, int]]:
        stream, self._stream = self._stream or io.BytesIO(), None
        try:
            self.damage = find_damage(stream, self._item)
        except UnknownExtensionError:
            self.unknown = True
        return [(self.ranges[0], 0)] if self.damage is not None else []

    def problems(self) -> Iterator[Problem]:
        if self.damage is not None:
            yield Problem(self.path, self._item.fqn, self.damage)


class _HeadOfItem(_Checked):
    """The head of a raw item, which must be of the tensor that the metadata describes."""

    __slots__ = ("_data", "_heads", "_item", "damage")

    def __init__(self, item: StoredItem, heads: ArchiveHeads) -> None:
        super().__init__(item.path, item.start, item.checked_start - item.start)
        self._data = bytearray(self.length)
        self._heads = heads
        self._item = item
        self.damage: str | None = None

    def memory(self, start: int, stop: int) -> memoryview:
        return memoryview(self._data)[start:stop]

    def mismatches(self) -> list[tuple[Range, int]]:
        item = self._item
        if item.dtype is not None and item.shape is not None:
            kind = ItemKind(item.dtype, item.shape, item.length)
            self.damage = self._heads.find_fault(kind, len(self._data), bytes(self._data))
        return [(self.ranges[0], 0)] if self.damage is not None else []

    def problems(self) -> Iterator[Problem]:
        if self.damage is not None:
            yield Problem(self.path, self._item.fqn, f"is not what the metadata says: {self.damage}")


class _Scan:
    """The memory of a range of a `_StreamedObject`: a block."""

    def __init__(self, request: ReadRequest, buffer: Buffer) -> None:
        self._object: _StreamedObject = request.segments[0].item
        self._start = request.start
        self.targets = self._object.targets(request.start, request.length, buffer)

    def deliver(self) -> list[Transfer]:
        return [self._object] if self._object.received(self._start, self.targets) else []


def _receiver(request: ReadRequest, buffer: Buffer) -> Receiver:
    scanned = isinstance(request.segments[0].item, _StreamedObject)
    return _Scan(request, buffer) if scanned else Reception(request, buffer)


class ByteCheck:
    """Reads data objects and compares their bytes. Progress does not count bytes that are read again."""

    def __init__(self, store: S3Store, url: CheckpointURL, on_progress: OnProgress | None) -> None:
        self._fetcher = Fetcher(store, url, store.settings, "dcp_s3-verify", receiver=_receiver)
        self._settings = store.settings
        self._on_progress = on_progress
        self._changed: set[str] = set()
        self._heads = ArchiveHeads()
        self._left: dict[str, int] = {}  # bytes of each object not read yet
        self.problems: list[Problem] = []
        self.bytes_read = 0
        self.items_not_decoded = 0

    def run(self, objects: Sequence[StoredData]) -> None:
        ranges = sum(1 + data.size // self._settings.max_part_size for data in objects if data.streamed)
        groups = sum(len(group_items(data.decoded, _GROUP)) for data in objects)
        most = ranges + groups + sum(len(data.headed) for data in objects)
        if not most:
            return
        self._left = {data.path: bytes_to_read(data) for data in objects}
        with self._fetcher.fetch(self._requests(objects), most=most) as arrivals:
            for request, finished in arrivals:
                self._take(request, finished)

    def _requests(self, objects: Sequence[StoredData]) -> Iterator[ReadRequest]:
        for data in objects:
            if data.streamed:
                yield from self._of_ranges(_StreamedObject(data))
            for group in group_items(data.decoded, _GROUP):
                if data.path not in self._changed:
                    start, stop = group[0].start, group[-1].stop
                    segments = tuple([Segment(item.start, item.stop, _DecodedItem(item)) for item in group])
                    yield ReadRequest(data.path, start, stop - start, segments)
            for item in data.headed:
                if data.path not in self._changed and item.checked_start > item.start:
                    segment = Segment(item.start, item.checked_start, _HeadOfItem(item, self._heads))
                    yield ReadRequest(data.path, item.start, item.checked_start - item.start, (segment,))

    def _of_ranges(self, scanned: _StreamedObject) -> Iterator[ReadRequest]:
        size, step = scanned.data.size, self._settings.max_part_size
        for start in range(0, max(1, size), step):  # one request even for an empty object
            stop = min(start + step, size)
            if scanned.path not in self._changed:
                yield ReadRequest(scanned.path, start, stop - start, (Segment(start, stop, scanned),))

    def _take(self, request: ReadRequest, finished: Sequence[Transfer]) -> None:
        path = request.path
        looked_at = [each for each in finished if isinstance(each, _StreamedObject | _DecodedItem | _HeadOfItem)]
        if self._on_progress is not None:
            new = min(request.length, self._left[path])
            self._left[path] -= new
            self._on_progress(new)
        changes = [found.change for found in looked_at if found.change is not None]
        if changes:
            if path not in self._changed:
                self.problems.append(Problem(path, None, changes[0]))
            self._changed.add(path)
            return
        self.bytes_read += request.length
        for found in looked_at:
            self.problems += found.problems()
            self.items_not_decoded += isinstance(found, _DecodedItem) and found.unknown


def bytes_to_read(data: StoredData) -> int:
    heads = sum(item.checked_start - item.start for item in data.headed)
    return data.size * data.streamed + heads + sum(item.length for item in data.decoded)


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
