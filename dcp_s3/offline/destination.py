"""Where an export goes: a directory or an S3 prefix. Its files are written front to back, and appear complete."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal

from dcp_s3 import checksum, errors
from dcp_s3.memory import Piece
from dcp_s3.s3.parts import MAX_PARTS
from dcp_s3.s3.store import store_of
from dcp_s3.settings import Settings
from dcp_s3.store import Store
from dcp_s3.stores.directory import HIDDEN, DirectoryStore
from dcp_s3.units import format_size
from dcp_s3.url import is_s3_url, parse_url

# Bytes of a part of a file on its way to S3, and how many connections send them: that bounds the memory.
_PART, _MAX_PART = 8 * 2**20, 16 * 2**20
_CONNECTIONS = 32

Found = Literal["nothing", "same", "other"]
"""What is at a file's name: the file with the same bytes, or something else."""


def is_temporary(name: str) -> bool:
    """Whether a file is one that an export began and a crash left."""
    return name.startswith(HIDDEN)


class Destination:
    """Use as a context manager: if an exception leaves it, the files that were written in it are removed."""

    def __init__(self, where: str | os.PathLike[str], settings: Settings) -> None:
        self._directory: Path | None = None
        self._store: Store
        if is_s3_url(where):
            url = parse_url(where)
            few = settings.model_copy(update={"concurrency": min(settings.max_connections, _CONNECTIONS)})
            self.name, self._below, self._store = str(url), url.key(""), store_of(url, few)
        else:
            self._directory = Path(where)
            self.name, self._below, self._store = str(self._directory), "", DirectoryStore(self._directory)
        self._written: list[str] = []

    def __enter__(self) -> Destination:
        self._written.clear()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            with contextlib.suppress(errors.StorageError):  # another error is on its way to the user
                self.remove(self._written)

    def files(self) -> list[str]:
        """Names of the files and directories that are there."""
        if self._directory is not None:
            return sorted(os.listdir(self._directory)) if self._directory.exists() else []
        found = self._store.list(self._below, "/")
        keys = [*(each.key for each in found.objects if each.key != self._below), *found.prefixes]
        return [key.removeprefix(self._below).rstrip("/") for key in keys]

    def compare(self, name: str, size: int, crc64nvme: str | None) -> Found:
        """Compare what is at ``name`` with a file of ``size`` bytes and this CRC (see `crc_hex`)."""
        key = self._below + name
        try:
            if self._store.head(key).size != size:
                return "other"
            data = self._store.get(key).data
        except errors.ObjectNotFoundError:
            return "other" if self._is_in_the_way(name) else "nothing"
        return "same" if checksum.crc_hex(checksum.crc64nvme(data)) == crc64nvme else "other"

    def _is_in_the_way(self, name: str) -> bool:
        """Whether there is a directory or a dead link instead of a file, or a file instead of its directory."""
        if self._directory is None:
            return False
        path = self._directory / name
        return os.path.lexists(path) or any(parent.is_file() for parent in path.parents)

    def check_size(self, size: int) -> None:
        """Refuse a file that is too large (WeightsError)."""
        if self._directory is None and size > _MAX_PART * MAX_PARTS:
            raise errors.WeightsError(
                f"a file of {format_size(size)} cannot be uploaded to {self.name}: S3 takes {MAX_PARTS} parts, and in "
                f"bounded memory they have at most {format_size(_MAX_PART)}. Remedy: a smaller max_shard_size, or "
                "export to a directory"
            )

    def write(self, name: str, size: int, data: Iterable[bytes | memoryview]) -> None:
        """Write a file of ``size`` bytes. The memory of each run of bytes may be used again for the next one."""
        part = max(_PART, -(-size // MAX_PARTS))
        pieces = map(Piece.of, data) if self._directory is not None else _copies(data, part)
        self._written.append(name)
        self._store.put_stream(self._below + name, size, pieces, part_size=part)

    def remove(self, names: Sequence[str]) -> None:
        """Remove files; those that are not there count as removed."""
        if self._directory is not None:
            for name in names:
                (self._directory / name).unlink(missing_ok=True)
        else:
            self._store.delete([self._below + name for name in names])


def _copies(data: Iterable[bytes | memoryview], size: int) -> Iterator[Piece]:
    """The bytes in new memory, ``size`` at a time: they are sent later."""
    block, filled = bytearray(size), 0
    for run in data:
        left = memoryview(run)
        while left:
            count = min(left.nbytes, size - filled)
            block[filled : filled + count] = left[:count]
            filled, left = filled + count, left[count:]
            if filled == size:
                yield Piece.of(block)
                block, filled = bytearray(size), 0
    if filled:
        yield Piece.of(memoryview(block)[:filled])
