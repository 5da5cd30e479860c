"""Full verification: every byte of the data objects is read once, in parallel, through a block per connection."""

from __future__ import annotations

import io
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass

from dcp_s3 import errors
from dcp_s3.checksum import crc_hex
from dcp_s3.offline.verify_decode import UnknownExtensionError, find_damage
from dcp_s3.offline.verify_plan import StoredData, StoredItem, group_items
from dcp_s3.offline.verify_report import Problem
from dcp_s3.offline.verify_scan import Mismatch, ObjectScan, Run
from dcp_s3.s3 import retry
from dcp_s3.s3.download import Target, fetch_into
from dcp_s3.s3.files import OnProgress
from dcp_s3.s3.store import S3Store
from dcp_s3.url import CheckpointURL
from dcp_s3.workers import Workers

logger = logging.getLogger(__name__)

BLOCK = 2**20
"""Bytes of memory that a connection receives into, again and again; they are added to a checksum while they are in the
CPU's cache."""

GROUP = 8 * 2**20
"""Bytes of neighbouring items to decode that are asked for at once."""

_AHEAD = 2  # ranges per connection that are submitted: one that is read, one that waits


class _ChangedError(Exception):
    """An object is not what the listing said any more."""


@dataclass(frozen=True)
class _Result:
    """What one task came to.

    Attributes:
        size: bytes read, those read again included.
        runs: of a range.
        problems: of decoded items.
        unknown: number of items that can not be decoded here.
        changed: what happened to the object meanwhile.
    """

    size: int
    runs: tuple[Run, ...] = ()
    problems: tuple[Problem, ...] = ()
    unknown: int = 0
    changed: str | None = None


@dataclass(frozen=True)
class _Task:
    """Something that one connection does: a range of an object, or (without ``scan``) items to decode."""

    work: Callable[[], _Result]
    scan: ObjectScan | None
    path: str
    size: int


class ByteCheck:
    """Reads data objects and compares their bytes.

    Args:
        bucket: where the checkpoint lies.
        url: of the checkpoint.
        on_progress: called with bytes as they were read; not with those that are read again.
    """

    def __init__(self, bucket: S3Store, url: CheckpointURL, on_progress: OnProgress | None = None) -> None:
        self._bucket = bucket
        self._url = url
        self._on_progress = on_progress
        self._cancel = threading.Event()
        self._blocks: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
        self._first: dict[str, Mismatch] = {}
        self._changed: set[str] = set()
        self.problems: list[Problem] = []
        self.bytes_read = 0
        self.items_not_decoded = 0

    @staticmethod
    def total(objects: Sequence[StoredData]) -> int:
        """Bytes that `run` will read."""
        streamed = sum(data.size for data in objects if data.streamed)
        return streamed + sum(item.length for data in objects for item in data.decoded)

    def run(self, objects: Sequence[StoredData]) -> None:
        """Check all; what is wrong is in ``problems`` then.

        Raises:
            StorageError: S3 failed for good; nothing can be said.
        """
        tasks = deque([self._tasks(objects)])
        ranges = sum(1 + data.size // self._bucket.settings.part_size for data in objects if data.streamed)
        count = min(
            self._bucket.settings.concurrency, ranges + sum(len(group_items(data.decoded, GROUP)) for data in objects)
        )
        if not count:
            return
        for _ in range(count):
            self._blocks.put(memoryview(bytearray(BLOCK)))
        pool = Workers(count, "dcp_s3-verify")
        pending: dict[Future[_Result], _Task] = {}
        try:
            while True:
                while len(pending) < _AHEAD * count and (task := _next(tasks)) is not None:
                    if task.path not in self._changed:
                        pending[pool.submit(task.work)] = task
                if not pending:
                    return
                for future in wait(pending, return_when=FIRST_COMPLETED).done:
                    again = self._take(pending.pop(future), future.result())
                    if again is not None:
                        tasks.appendleft(self._ranges(again))
        except BaseException:
            self._cancel.set()
            raise
        finally:
            pool.close()

    def _tasks(self, objects: Sequence[StoredData]) -> Iterator[_Task]:
        for data in objects:
            if data.streamed:
                yield from self._ranges(ObjectScan(data))
            for group in group_items(data.decoded, GROUP):
                size = sum(item.length for item in group)
                yield _Task(lambda group=group: self._decode(group), None, data.path, size)  # type: ignore[misc]

    def _ranges(self, scan: ObjectScan) -> Iterator[_Task]:
        path = scan.data.path
        for start, length in scan.ranges(self._bucket.settings.part_size):
            yield _Task(
                lambda start=start, length=length: self._read(scan, start, length),  # type: ignore[misc]
                scan, path, length,
            )  # fmt: skip

    def _take(self, task: _Task, result: _Result) -> ObjectScan | None:
        """Draw the conclusion from one task; an object that is to be read again."""
        self.bytes_read += result.size
        if self._on_progress is not None and task.path not in self._first:
            self._on_progress(task.size)
        if result.changed is not None:
            if task.path not in self._changed:
                self.problems.append(Problem(task.path, None, result.changed))
            self._changed.add(task.path)
            return None
        self.problems += result.problems
        self.items_not_decoded += result.unknown
        if task.scan is not None and task.scan.arrived(result.runs):
            return self._conclude(task.scan)
        return None

    def _conclude(self, scan: ObjectScan) -> ObjectScan | None:
        data, found = scan.data, scan.mismatch()
        first = self._first.get(data.path)
        if first is None:
            if not found.any:
                return None
            logger.warning("checksums of %s in %s do not match; reading it again", data.path, self._url)
            self._first[data.path] = found
            return ObjectScan(data)
        found = first.confirmed_by(found)
        for number, crc in sorted(found.items.items()):
            item = data.checked[number]
            what = f"has CRC-64/NVME {crc_hex(crc)}, recorded was {crc_hex(item.crc or 0)}"
            if item.checked_length:
                what += f" (bytes {item.checked_start} to {item.checked_start + item.checked_length - 1})"
            if data.crc is not None and found.whole is None:
                what += "; the object as a whole is as recorded, so that the metadata is wrong"
            self.problems.append(Problem(data.path, item.fqn, what))
        if found.whole is not None and not found.items:
            what = (
                f"has CRC-64/NVME {found.whole}, recorded was {data.crc}; its items match, what is around them does not"
            )
            self.problems.append(Problem(data.path, None, what))
        return None

    # --- on the pool --------------------------------------------------------------------------------

    def _read(self, scan: ObjectScan, start: int, length: int) -> _Result:
        block = self._blocks.get()
        try:
            targets = [Target(block[:size], checksum=True) for size in scan.segments(start, length, len(block))]
            self._fetch(scan.data.path, start, targets)
        except _ChangedError as error:
            return _Result(0, changed=str(error))
        finally:
            self._blocks.put(block)
        runs = scan.join(start, ((target.crc or 0, target.view.nbytes) for target in targets))
        return _Result(length, runs=tuple(runs))

    def _decode(self, items: Sequence[StoredItem]) -> _Result:
        problems, unknown = [], 0
        size = sum(item.length for item in items)
        try:
            for item, data in zip(items, self._fetch_items(items), strict=True):
                try:
                    damage = find_damage(data, item)
                    if damage is not None:
                        size += item.length
                        (again,) = self._fetch_items([item])
                        damage = find_damage(again, item)
                except UnknownExtensionError:
                    unknown += 1
                    continue
                if damage is not None:
                    problems.append(Problem(item.path, item.fqn, damage))
        except _ChangedError as error:
            return _Result(0, changed=str(error))
        return _Result(size, problems=tuple(problems), unknown=unknown)

    def _fetch_items(self, items: Sequence[StoredItem]) -> list[io.BytesIO]:
        """The bytes of items that lie end to end, in one request."""
        buffers = [_empty(item.length) for item in items]
        views = [buffer.getbuffer() for buffer in buffers]
        try:
            self._fetch(items[0].path, items[0].start, [Target(view) for view in views])
        finally:
            for view in views:
                view.release()
        return buffers

    def _fetch(self, path: str, start: int, targets: list[Target]) -> None:
        try:
            fetch_into(self._bucket, self._url.key(path), start, targets, cancel=self._cancel)
        except errors.ObjectNotFoundError:
            raise _ChangedError("was deleted while it was read") from None
        except errors.PreconditionFailedError:
            raise _ChangedError("was replaced while it was read") from None
        except errors.StorageError as error:
            cause = error.__cause__
            if isinstance(cause, Exception) and retry.status_code(cause) == 416:
                raise _ChangedError("became shorter while it was read") from error
            raise


def _empty(size: int) -> io.BytesIO:
    """A file in memory of ``size`` bytes."""
    data = io.BytesIO()
    if size:
        data.seek(size - 1)
        data.write(b"\0")
        data.seek(0)
    return data


def _next(tasks: deque[Iterator[_Task]]) -> _Task | None:
    while tasks:
        task = next(tasks[0], None)
        if task is not None:
            return task
        tasks.popleft()
    return None
