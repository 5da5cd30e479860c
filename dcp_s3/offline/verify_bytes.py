"""Full verification: reads every byte of the data objects once, in parallel, through one block per connection."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence

from dcp_s3 import errors
from dcp_s3.checksum import crc_hex
from dcp_s3.format.blocks import Range
from dcp_s3.load.archive_heads import ArchiveHeads, ItemKind
from dcp_s3.load.engine import Engine, Receiver, Source
from dcp_s3.load.plan import ReadRequest, Segment
from dcp_s3.load.transfer import Buffer, Reception, Transfer
from dcp_s3.offline.verify_decode import UnknownExtensionError, find_damage
from dcp_s3.offline.verify_plan import StoredData, StoredItem, group_items
from dcp_s3.offline.verify_report import Problem
from dcp_s3.offline.verify_scan import Mismatch, ObjectScan
from dcp_s3.s3.download import ReadTarget
from dcp_s3.s3.files import OnProgress
from dcp_s3.s3.store import S3Store
from dcp_s3.url import CheckpointURL

BLOCK = 2**20
"""Bytes of memory that a connection reuses to receive into. They are added to a checksum while still in the CPU's
cache."""

GROUP = 8 * 2**20
"""Maximum bytes of neighbouring items to decode that one request fetches."""


class _Checked(Transfer):
    """A transfer that is only checked: damage, or a change meanwhile, is noted and not raised.

    Attributes:
        change: what happened to the object meanwhile, None if nothing did.
    """

    __slots__ = ("change",)

    def __init__(self, path: str, start: int, length: int) -> None:
        super().__init__(path, start, [Range(0, length, None)], (0, length))
        self.change: str | None = None

    def name_of(self, part: Range) -> str:
        """See `Transfer`."""
        return self.path

    def put(self, offset: int, data: memoryview) -> None:
        """See `Transfer`. Does nothing: everything is received in place."""

    def give_up(self, error: errors.CorruptCheckpointError) -> None:
        """See `Transfer`."""
        if error.__cause__ is None:
            return  # the mismatch is noted already
        self.change = "became shorter while it was read"
        if isinstance(error.__cause__, errors.ObjectNotFoundError):
            self.change = "was deleted while it was read"
        elif isinstance(error.__cause__, errors.PreconditionFailedError):
            self.change = "was replaced while it was read"


class _StreamedObject(_Checked):
    """An object whose bytes all go into checksums.

    Args:
        data: the object to check.

    Attributes:
        data: the object to check.
        found: mismatches of each complete reading.
    """

    __slots__ = ("_scan", "data", "found")

    def __init__(self, data: StoredData) -> None:
        super().__init__(data.path, 0, data.size)
        self.data = data
        self.found: list[Mismatch] = []
        self._scan = ObjectScan(data)

    def targets(self, start: int, length: int, buffer: Buffer) -> list[ReadTarget]:
        """The blocks of a range, each in the memory of the one before."""
        buffer.reserve(BLOCK)
        return [ReadTarget(buffer.view(0, size), checksum=True) for size in self._scan.segments(start, length, BLOCK)]

    def received(self, start: int, targets: Sequence[ReadTarget]) -> bool:
        """Take a range; returns True for the last one."""
        runs = self._scan.join(start, ((target.crc or 0, target.view.nbytes) for target in targets))
        with self._lock:
            return self._scan.arrived(runs)

    def mismatches(self) -> list[tuple[Range, int]]:
        """See `Transfer`. The whole object is read again."""
        self.found.append(self._scan.mismatch())
        return [(self.ranges[0], 0)] if self.found[-1].any else []

    def forget(self, part: Range) -> None:
        """See `Transfer`."""
        self._scan = ObjectScan(self.data)

    def problems(self) -> Iterator[Problem]:
        """Problems for everything that did not match twice."""
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
    """An item that no checksum covers, to be decoded.

    Args:
        item: the item.

    Attributes:
        damage: why it cannot be decoded, None if it can.
        unknown: whether it went through a stream extension that is not registered here.
    """

    __slots__ = ("_item", "_stream", "damage", "unknown")

    def __init__(self, item: StoredItem) -> None:
        super().__init__(item.path, item.start, item.length)
        self._item = item
        self._stream: io.BytesIO | None = None
        self.damage: str | None = None
        self.unknown = False

    def name_of(self, part: Range) -> str:
        """See `Transfer`."""
        return self._item.fqn

    def memory(self, start: int, stop: int) -> memoryview:
        """See `Transfer`."""
        with self._lock:
            if self._stream is None:
                self._stream = _empty(self._item.length)
        return self._stream.getbuffer()[start:stop]

    def mismatches(self) -> list[tuple[Range, int]]:
        """See `Transfer`: decode it."""
        stream, self._stream = self._stream or io.BytesIO(), None
        try:
            self.damage = find_damage(stream, self._item)
        except UnknownExtensionError:
            self.unknown = True
        return [(self.ranges[0], 0)] if self.damage is not None else []

    def problems(self) -> Iterator[Problem]:
        """The problem of an item that cannot be decoded."""
        if self.damage is not None:
            yield Problem(self.path, self._item.fqn, self.damage)


class _HeadOfItem(_Checked):
    """The head of a raw item, which must be of the tensor that the metadata describes.

    Args:
        item: the item.
        heads: known heads.

    Attributes:
        damage: how it differs, None if it does not.
    """

    __slots__ = ("_data", "_heads", "_item", "damage")

    def __init__(self, item: StoredItem, heads: ArchiveHeads) -> None:
        super().__init__(item.path, item.start, item.checked_start - item.start)
        self._data = bytearray(self.length)
        self._heads = heads
        self._item = item
        self.damage: str | None = None

    def memory(self, start: int, stop: int) -> memoryview:
        """See `Transfer`."""
        return memoryview(self._data)[start:stop]

    def mismatches(self) -> list[tuple[Range, int]]:
        """See `Transfer`: compare it."""
        item = self._item
        if item.dtype is not None and item.shape is not None:
            kind = ItemKind(item.dtype, item.shape, item.length)
            self.damage = self._heads.find_fault(kind, len(self._data), bytes(self._data))
        return [(self.ranges[0], 0)] if self.damage is not None else []

    def problems(self) -> Iterator[Problem]:
        """The problem of an item that is another tensor."""
        if self.damage is not None:
            yield Problem(self.path, self._item.fqn, f"is not what the metadata says: {self.damage}")


class _Scan:
    """The memory of a range of a `_StreamedObject`: a block."""

    def __init__(self, request: ReadRequest, buffer: Buffer) -> None:
        self._object: _StreamedObject = request.segments[0].item
        self._start = request.start
        self.targets = self._object.targets(request.start, request.length, buffer)

    def deliver(self) -> list[Transfer]:
        """See `Receiver`."""
        return [self._object] if self._object.received(self._start, self.targets) else []


def _receiver(request: ReadRequest, buffer: Buffer) -> Receiver:
    scanned = isinstance(request.segments[0].item, _StreamedObject)
    return _Scan(request, buffer) if scanned else Reception(request, buffer)


class ByteCheck:
    """Reads data objects and compares their bytes.

    Args:
        store: store with the checkpoint.
        url: URL of the checkpoint.
        on_progress: called with the number of bytes read; not for bytes that are read again.
    """

    def __init__(self, store: S3Store, url: CheckpointURL, on_progress: OnProgress | None = None) -> None:
        self._engine = Engine(Source(store, url), "dcp_s3-verify", _receiver)
        self._settings = store.settings
        self._on_progress = on_progress
        self._changed: set[str] = set()
        self._heads = ArchiveHeads()
        self._left: dict[str, int] = {}  # bytes of each object not read yet
        self.problems: list[Problem] = []
        self.bytes_read = 0
        self.items_not_decoded = 0

    @staticmethod
    def total(objects: Sequence[StoredData]) -> int:
        """Number of bytes that `run` will read."""
        streamed = sum(data.size for data in objects if data.streamed)
        heads = sum(item.checked_start - item.start for data in objects for item in data.headed)
        return streamed + heads + sum(item.length for data in objects for item in data.decoded)

    def run(self, objects: Sequence[StoredData]) -> None:
        """Check all objects; what is wrong is then in ``problems``.

        Raises:
            StorageError: S3 failed despite retries; there is no verdict.
        """
        ranges = sum(1 + data.size // self._settings.max_part_size for data in objects if data.streamed)
        groups = sum(len(group_items(data.decoded, GROUP)) for data in objects)
        most = ranges + groups + sum(len(data.headed) for data in objects)
        if not most:
            return
        self._left = {data.path: self.total([data]) for data in objects}
        with self._engine.fetch(
            self._requests(objects), most=most, ahead=2 * self._settings.max_connections
        ) as arrivals:
            for request, finished in arrivals:
                self._take(request, finished)

    def _requests(self, objects: Sequence[StoredData]) -> Iterator[ReadRequest]:
        for data in objects:
            if data.streamed:
                yield from self._of_ranges(_StreamedObject(data))
            for group in group_items(data.decoded, GROUP):
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
        """Draw the conclusions from one request."""
        path, looked_at = (
            request.path,
            [found for found in finished if isinstance(found, _StreamedObject | _DecodedItem | _HeadOfItem)],
        )
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


def _empty(size: int) -> io.BytesIO:
    """A file in memory of ``size`` bytes."""
    data = io.BytesIO()
    if size:
        data.seek(size - 1)
        data.write(b"\0")
        data.seek(0)
    return data
