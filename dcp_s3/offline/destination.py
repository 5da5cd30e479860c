"""Where an export goes: a directory or an S3 prefix. Its files are written front to back, and appear complete.

If an exception leaves the context of a destination, files that were written in it are removed: there is nothing then
that looks like an export.
"""

from __future__ import annotations

import os
import threading
import uuid
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

from dcp_s3 import checksum, errors
from dcp_s3.limit import Cancelled
from dcp_s3.memory import Piece
from dcp_s3.s3.parts import MAX_PARTS
from dcp_s3.s3.store import store_of
from dcp_s3.s3.upload import Uploader
from dcp_s3.settings import Settings
from dcp_s3.stores.directory import flush_directory
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
        self._written: list[str] = []

    def __enter__(self) -> _LocalDirectory:
        self._written.clear()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.remove(self._written)

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

    def put(self, name: str, size: int, chunks: Iterable[bytes | memoryview]) -> None:
        """Write a file of ``size`` bytes, durable when this returns; if it fails, the file never appears. The memory of
        a chunk may be used again when the next one is asked for."""
        path, temporary = self._path / name, self._path / f"{_TEMPORARY}{uuid.uuid4().hex}"
        self._path.mkdir(parents=True, exist_ok=True)
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            unflushed = 0
            for chunk in chunks:
                left = memoryview(chunk)
                unflushed += left.nbytes
                while left:
                    left = left[os.write(fd, left) :]
                if unflushed >= _FLUSHED:
                    os.fdatasync(fd)
                    unflushed = 0
            os.fsync(fd)
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.rename(path)
            self._written.append(name)
            flush_directory(path.parent)
        finally:
            os.close(fd)
            temporary.unlink(missing_ok=True)

    def remove(self, names: list[str]) -> None:
        """Remove files; those that are not there count as removed."""
        for name in names:
            (self._path / name).unlink(missing_ok=True)


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

    def put(self, name: str, size: int, chunks: Iterable[bytes | memoryview]) -> None:
        if self._uploader is None:
            raise RuntimeError("the destination was not entered")
        part = max(_PART, -(-size // MAX_PARTS))
        if self._blocks.size != part:
            self._blocks = _Blocks(PART_MEMORY // part, part)
        copies = _copied(chunks, self._blocks, self._uploader.cancel)
        self._uploader.put_stream(self._url.key(name), size, copies, part_size=part)

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


def _copied(chunks: Iterable[bytes | memoryview], blocks: _Blocks, cancel: threading.Event) -> Iterator[Piece]:
    """The chunks, copied into blocks: they are sent later."""
    block, filled = None, 0
    for chunk in chunks:
        left = memoryview(chunk)
        while left:
            if block is None:
                block, filled = blocks.take(cancel), 0
            count = min(left.nbytes, blocks.size - filled)
            block[filled : filled + count] = left[:count]
            filled, left = filled + count, left[count:]
            if filled == blocks.size:
                piece, block = Piece.of(block), None
                yield piece
    if block is not None:
        piece, block = Piece.of(block[:filled]), None
        yield piece


Destination = _LocalDirectory | _S3Prefix
"""Use as a context manager."""
