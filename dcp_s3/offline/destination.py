"""Where an export goes: a directory or an S3 prefix. Its files are written front to back, and appear complete.

If an exception leaves the context of a destination, files that were committed in it are removed: there is nothing then
that looks like an export.
"""

from __future__ import annotations

import contextlib
import os
import threading
import uuid
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from dcp_s3 import checksum, errors
from dcp_s3.limit import Cancelled
from dcp_s3.memory import Piece
from dcp_s3.s3.parts import MAX_PARTS
from dcp_s3.s3.store import store_of
from dcp_s3.s3.upload import ObjectUpload, Uploader
from dcp_s3.settings import Settings
from dcp_s3.units import format_size
from dcp_s3.url import is_s3_url, parse_url

PART_MEMORY = 64 * 2**20
"""Bytes of the parts of files that are on their way to S3."""

_PART, _MAX_PART = 8 * 2**20, 16 * 2**20
_TEMPORARY = ".dcp_s3-export-"
# Bytes after which a file goes to the disk while more is written, so that the last flush is short.
_FLUSHED = 256 * 2**20


Found = Literal["nothing", "same", "other"]
"""What is at a file's name: the file with the same bytes, or something else."""


def is_temporary(name: str) -> bool:
    """Whether a file is one that an export began and a crash left."""
    return name.startswith(_TEMPORARY)


def open_destination(where: str | os.PathLike[str], settings: Settings) -> Destination:
    return _S3Prefix(where, settings) if is_s3_url(where) else _LocalDirectory(where)


def _compare_bytes(data: bytes, crc64nvme: str | None) -> Found:
    return "same" if checksum.crc_hex(checksum.crc64nvme(data)) == crc64nvme else "other"


# --- a directory -----------------------------------------------------------------------------------


class _LocalDirectory:
    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self.name = str(self._path)
        """The directory or URL, for messages."""
        self._committed: list[str] = []

    def __enter__(self) -> _LocalDirectory:
        self._committed.clear()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.remove(self._committed)

    def files(self) -> list[str]:
        """Names of the files and directories that are there."""
        try:
            return sorted(os.listdir(self._path))
        except FileNotFoundError:
            return []

    def compare(self, name: str, size: int, crc64nvme: str | None) -> Found:
        """Compare what is at ``name`` with a file of ``size`` bytes and this CRC (see `crc_hex`)."""
        path = self._path / name
        try:
            path.lstat()
        except FileNotFoundError:
            return "nothing"
        except NotADirectoryError:  # a file is where its directory would be
            return "other"
        if not path.is_file() or path.stat().st_size != size:
            return "other"
        return _compare_bytes(path.read_bytes(), crc64nvme)

    def check_size(self, size: int) -> None:
        """Refuse a file that is too large (WeightsError): not here."""

    @contextlib.contextmanager
    def open(self, name: str, size: int) -> Iterator[_LocalFile]:
        """Begin a file of ``size`` bytes; if it is not committed in the context, it never appears."""
        self._path.mkdir(parents=True, exist_ok=True)
        temporary = self._path / f"{_TEMPORARY}{uuid.uuid4().hex}"
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        file = _LocalFile(fd, temporary, self._path / name)
        try:
            yield file
        finally:
            os.close(fd)
            if file.committed:  # even if `commit` then raised
                self._committed.append(name)
            else:
                temporary.unlink(missing_ok=True)

    def remove(self, names: list[str]) -> None:
        """Remove files; those that are not there count as removed."""
        for name in names:
            (self._path / name).unlink(missing_ok=True)


class _LocalFile:
    def __init__(self, fd: int, temporary: Path, path: Path) -> None:
        self._fd, self._temporary, self._path = fd, temporary, path
        self._unflushed = 0
        self.committed = False

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes. Their memory may be used again when this returns."""
        left = memoryview(data)
        self._unflushed += left.nbytes
        while left:
            left = left[os.write(self._fd, left) :]
        if self._unflushed >= _FLUSHED:
            os.fdatasync(self._fd)
            self._unflushed = 0

    def commit(self) -> None:
        """Make the file appear. Durable when this returns."""
        os.fsync(self._fd)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._temporary.rename(self._path)
        self.committed = True
        directory = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


# --- S3 --------------------------------------------------------------------------------------------


class _S3Prefix:
    def __init__(self, where: str | os.PathLike[str], settings: Settings) -> None:
        self._url = parse_url(where)
        self.name = str(self._url)
        self._store = store_of(self._url, settings)
        self._uploader: Uploader | None = None
        self._blocks = _Blocks(0, 0)

    def __enter__(self) -> _S3Prefix:
        self._uploader = Uploader(self._store)
        self._uploader.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if self._uploader is not None:
            uploader, self._uploader = self._uploader, None
            uploader.__exit__(kind, *rest)  # if there was an error, it deletes what it had completed

    def files(self) -> list[str]:
        below = self._url.key("")
        found = self._store.list(below, "/")
        keys = [*(each.key for each in found.objects if each.key != below), *found.prefixes]
        return [key.removeprefix(below).rstrip("/") for key in keys]

    def compare(self, name: str, size: int, crc64nvme: str | None) -> Found:
        key = self._url.key(name)
        try:
            if self._store.head(key).size != size:
                return "other"
            return _compare_bytes(self._store.get(key).data, crc64nvme)
        except errors.ObjectNotFoundError:
            return "nothing"

    def check_size(self, size: int) -> None:
        if size > _MAX_PART * MAX_PARTS:
            raise errors.WeightsError(
                f"a file of {format_size(size)} cannot be uploaded to {self.name}: S3 takes {MAX_PARTS} parts, and in "
                f"bounded memory they have at most {format_size(_MAX_PART)}. Remedy: a smaller max_shard_size, or "
                "export to a directory"
            )

    @contextlib.contextmanager
    def open(self, name: str, size: int) -> Iterator[_S3File]:
        if self._uploader is None:
            raise RuntimeError("the destination was not entered")
        part = max(_PART, -(-size // MAX_PARTS))
        upload = self._uploader.start(self._url.key(name), size, part_size=part)
        if self._blocks.size != part:
            self._blocks = _Blocks(PART_MEMORY // part, part)
        yield _S3File(self._uploader, upload, self._blocks)

    def remove(self, names: list[str]) -> None:
        self._store.delete([self._url.key(name) for name in names])


class _Blocks:
    """Blocks of memory of one size, each used again when nobody holds a view of it."""

    def __init__(self, count: int, size: int) -> None:
        self.size = size
        self._free: list[bytearray] = []
        self._unmade = count
        self._changed = threading.Condition(threading.RLock())  # a finalizer may run in a thread that holds it

    def take(self, cancel: threading.Event) -> memoryview:
        """A block, when one is free; Cancelled if ``cancel`` is set before."""
        with self._changed:
            while not self._free and not self._unmade:
                if cancel.is_set():
                    raise Cancelled
                self._changed.wait(0.5)
            if self._free:
                memory = self._free.pop()
            else:
                memory = bytearray(self.size)
                self._unmade -= 1
        import numpy as np  # not on the way of `dcp-s3 cp`

        block = np.frombuffer(memory, dtype=np.uint8)
        weakref.finalize(block, self._give_back, memory)
        return memoryview(block)

    def _give_back(self, memory: bytearray) -> None:
        with self._changed:
            self._free.append(memory)
            self._changed.notify()


class _S3File:
    """Copies what is written into parts: the uploader sends them later."""

    def __init__(self, uploader: Uploader, upload: ObjectUpload, blocks: _Blocks) -> None:
        self._uploader, self._upload, self._blocks = uploader, upload, blocks
        self._block: memoryview | None = None
        self._filled = 0

    def write(self, data: bytes | memoryview) -> None:
        left = memoryview(data)
        while left:
            if self._block is None:
                self._block, self._filled = self._blocks.take(self._uploader.cancel), 0
            count = min(left.nbytes, self._blocks.size - self._filled)
            self._block[self._filled : self._filled + count] = left[:count]
            self._filled += count
            left = left[count:]
            if self._filled == self._blocks.size:
                self._send()

    def _send(self) -> None:
        if self._block is not None:
            block, self._block = self._block, None
            self._upload.write(Piece.of(block[: self._filled]))

    def commit(self) -> None:
        self._send()
        self._upload.finish()


Destination = _LocalDirectory | _S3Prefix
"""Use as a context manager."""
