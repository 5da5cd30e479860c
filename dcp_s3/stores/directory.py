"""A store in a directory: an object is a file at its key's path, there whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from dcp_s3 import errors
from dcp_s3.limit import UNLIMITED, Limit
from dcp_s3.memory import Piece, combine_crc64nvme, crc64nvme, crc_hex, targets_of
from dcp_s3.store import (
    DeleteTarget,
    Expect,
    Into,
    ListedObject,
    Moved,
    ObjectHead,
    Page,
    Store,
    StoredObject,
    StreamedObject,
    UserMetadata,
    same_etag,
)

# Prefix of files that are being written.
HIDDEN = ".dcp_s3-store-"
_BLOCK = 4 * 2**20


class DirectoryStore(Store):
    """Files that are copied from and to S3, by paths. A reader sees only whole ones: each is written under another
    name, flushed, and renamed; if two processes write one file, one of them wins. Its ETag is made of inode, time and
    size, so that a file that was written again has another one.

    There are no conditions and no user metadata. Keys that no path can express (empty, ``.`` or ``..``
    between slashes, a NUL) are refused. So is a key that extends another object's key by a slash and more.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._root = Path(path)
        self.name = str(self._root)
        self.limit = UNLIMITED

    def within(self, limit: Limit) -> DirectoryStore:
        other = DirectoryStore(self._root)
        other.limit = limit
        return other

    # --- reading ----------------------------------------------------------------------------------------

    def read(self, key: str, start: int, into: Into, etag: str | None = None, *, moved: Moved | None = None) -> None:
        targets = [target for target in targets_of(into) if target.view.nbytes]
        if not targets:
            return
        with self._open("read", key) as fd:
            stat = os.fstat(fd)
            if etag is not None and not same_etag(_etag(stat), etag):
                raise errors.PreconditionFailedError(
                    f"{key} in {self.name} has another ETag", bucket=self.name, key=key
                )
            at = start
            for target in targets:
                done = 0
                while done < target.view.nbytes:
                    self.limit.check(f"read of {key}")
                    count = os.preadv(fd, [target.view[done : done + _BLOCK]], at)
                    if not count:
                        raise errors.OutOfRangeError(
                            f"{key} in {self.name} has {stat.st_size} bytes: not all that were asked for from byte "
                            f"{start} on", bucket=self.name, key=key,
                        )  # fmt: skip
                    target.received(done, count)
                    at, done = at + count, done + count
                    if moved is not None:
                        moved(count)

    def get(self, key: str) -> StoredObject:
        with self._open("get", key) as fd, open(fd, "rb", closefd=False) as file:
            return StoredObject(file.read(), {}, _etag(os.fstat(fd)))

    def head(self, key: str, *, checksum: bool = False) -> ObjectHead:
        with self._open("head", key) as fd:
            stat, crc = os.fstat(fd), crc_hex(crc_of_file(fd)[0]) if checksum else None
        return ObjectHead(key, stat.st_size, stat.st_mtime, _etag(stat), {}, crc, time.time())

    @contextlib.contextmanager
    def _open(self, operation: str, key: str) -> Iterator[int]:
        """Open the file of a key; an OSError in the context becomes a StorageError."""
        self.limit.check(f"{operation} of {key}")
        with self._clear_errors(operation, key):
            fd = os.open(self._path(key), os.O_RDONLY | os.O_CLOEXEC)
            try:
                if os.path.isdir(fd):
                    raise IsADirectoryError
                yield fd
            finally:
                os.close(fd)

    def page(self, prefix: str, delimiter: str = "", *, token: str | None = None) -> Page:
        """All of them: one page."""
        self.limit.check(f"list of {prefix}")
        found, objects, prefixes = list[ListedObject](), list[ListedObject](), dict[str, None]()
        below = prefix.rpartition("/")[0]
        try:
            start = self._path(below) if below else self._root
        except errors.StorageError:  # no key of this store begins like this
            return Page((), (), None, time.time())
        with self._clear_errors("list", prefix):
            for directory, _, names in os.walk(start, onerror=_raise_unless_gone):
                parent = os.path.relpath(directory, self._root)
                for name in names:
                    key = name if parent == "." else f"{parent}/{name}"
                    if name.startswith(HIDDEN) or not key.startswith(prefix):
                        continue
                    with contextlib.suppress(FileNotFoundError):  # just deleted
                        stat = os.stat(os.path.join(directory, name))
                        found.append(ListedObject(key, stat.st_size, stat.st_mtime, _etag(stat)))
        for each in sorted(found, key=lambda each: each.key.encode("utf-8", "surrogatepass")):
            end = each.key.find(delimiter, len(prefix)) if delimiter else -1
            if end < 0:
                objects.append(each)
            else:
                prefixes[each.key[: end + len(delimiter)]] = None
        return Page(tuple(objects), tuple(prefixes), None, time.time())

    # --- writing ----------------------------------------------------------------------------------------

    def put(
        self, key: str, data: bytes | memoryview, *, expect: Expect | None = None, metadata: UserMetadata = None
    ) -> None:
        if expect is not None and expect.required:
            raise errors.PreconditionFailedError(f"{self.name} does not know conditional writes", key=key)
        self.put_stream(key, len(data), [Piece.of(data)])

    def put_stream(
        self, key: str, size: int, pieces: Iterable[Piece], *, part_size: int | None = None
    ) -> StreamedObject:
        path, sent = self._path(key), []
        temporary = path.with_name(f"{HIDDEN}{uuid.uuid4().hex}")
        self.limit.check(f"put of {key}")
        with self._clear_errors("put", key):
            try:
                while True:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    with contextlib.suppress(FileNotFoundError):  # somebody deleted the directory's last object
                        file = temporary.open("xb")
                        break
                with file:
                    for piece in pieces:
                        self.limit.check(f"put of {key}")
                        sent.append((piece.checksum(), piece.size))
                        if piece.view is not None:
                            file.write(piece.view)
                        piece.view = None
                    file.flush()
                    os.fsync(file.fileno())
                temporary.rename(path)
            finally:
                temporary.unlink(missing_ok=True)
            flush_directory(path.parent)
        return StreamedObject(sum(size for _, size in sent), combine_crc64nvme(sent))

    def delete(self, targets: Iterable[str | DeleteTarget]) -> Sequence[str]:
        for key in (each if isinstance(each, str) else each.key for each in targets):
            self.limit.check(f"delete of {key}")
            path = self._path(key)
            with contextlib.suppress(errors.ObjectNotFoundError), self._clear_errors("delete", key):
                path.unlink()
            with contextlib.suppress(OSError):  # not empty, or somebody else has removed it
                while (path := path.parent) != self._root:
                    path.rmdir()
        return ()

    # --- files ------------------------------------------------------------------------------------------

    def _path(self, key: str) -> Path:
        names = key.split("/")
        if "\0" in key or any(name in ("", ".", "..") or name.startswith(HIDDEN) for name in names):
            raise errors.StorageError(f"{key!r} cannot be the name of a file in {self.name}", bucket=self.name, key=key)
        return self._root.joinpath(*names)

    @contextlib.contextmanager
    def _clear_errors(self, operation: str, key: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR) or isinstance(error, IsADirectoryError):
                raise errors.ObjectNotFoundError(
                    f"there is no {key} in {self.name}", bucket=self.name, key=key, operation=operation
                ) from None
            raise errors.StorageError(
                f"{operation} of {key} in {self.name} failed: {error}. Remedy: check the directory's disk and its "
                "permissions", bucket=self.name, key=key, operation=operation,
            ) from error  # fmt: skip


def _etag(stat: os.stat_result) -> str:
    return f'"{stat.st_ino:x}-{stat.st_mtime_ns:x}-{stat.st_size:x}"'


def crc_of_file(fd: int) -> tuple[int, int]:
    """(CRC-64/NVME, bytes) of a file."""
    crc = size = 0
    while block := os.pread(fd, _BLOCK, size):
        crc = crc64nvme(block, crc)
        size += len(block)
    return crc, size


def flush_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _raise_unless_gone(error: OSError) -> None:
    if not isinstance(error, (FileNotFoundError, NotADirectoryError)):
        raise error
