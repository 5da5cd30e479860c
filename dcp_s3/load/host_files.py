"""What one process of a host has fetched, left on its disk for the host's other processes.

A directory of this user's own in the one for temporary files. Only it, and only files of this user in it, are trusted.
Whatever the disk refuses, each process fetches for itself.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import stat
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from dcp_s3.checksum import crc64nvme

logger = logging.getLogger(__name__)

KEPT_FILES = 2
"""Files that stay at most: those that not all processes have read, because one died or did not load."""
KEPT_SECONDS = 3600.0
"""Seconds after which a file goes with the next one that is written."""

# Waiting for the process that fetches: a connection may hang for a while, and then the bytes come slowly. Whoever has
# waited longer fetches for itself.
_PATIENCE = 30.0
_LEAST_RATE = 2e6  # bytes per second
_LOOKS_EVERY = 0.01

_HEADER = struct.Struct("<8sQQ")  # magic, size, CRC-64/NVME; then the data, then the process ids of those who have it
_READER = struct.Struct("<I")
_MAGIC = b"dcp_s3 1"
_LOCK = "lock-"
_UNFINISHED = ".new"


def fetch_for_host(identity: str, size: int, fetch: Callable[[], bytes], *, processes: int) -> bytes:
    """What ``fetch`` returns, called in one of this host's processes; the others get it from there.

    A process that dies in ``fetch`` is replaced by the next one. The file goes when all processes have its content.

    Args:
        identity: what is fetched: whoever gives the same gets the same bytes.
        size: number of bytes.
        fetch: called at most once in this process.
        processes: number of processes of the host that will ask.

    Raises:
        Exception: raised by ``fetch``.
    """
    name = hashlib.blake2b(identity.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
    with contextlib.ExitStack() as stack:
        try:
            directory = stack.enter_context(_own_directory())
            locked = stack.enter_context(_locked(directory, _LOCK + name[0], _PATIENCE + size / _LEAST_RATE))
            file = _find(directory, name, processes) if locked else None
        except OSError as error:
            logger.info("each process of this host fetches for itself: %s", error)
            return fetch()
        if file is None:
            data = fetch()
            if locked:
                _leave(directory, name, data)
            return data
    with open(file, "rb") as opened:  # without the lock: the others read at the same time
        found = _read(opened, size)
    return fetch() if found is None else found


@contextlib.contextmanager
def _own_directory() -> Iterator[int]:
    """The descriptor of the directory, which is made if it is missing.

    Raises:
        OSError: there is none that only this user can write to.
    """
    path = Path(tempfile.gettempdir(), f"dcp_s3-{os.geteuid()}")
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(directory)
        if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
            raise PermissionError(
                f"{path} is not this user's alone. Remedy: remove it, or set TMPDIR to another directory"
            )
        yield directory
    finally:
        os.close(directory)


@contextlib.contextmanager
def _locked(directory: int, name: str, patience: float) -> Iterator[bool]:
    """Hold a lock; False: another process has held it for ``patience`` seconds. It ends with the process."""
    fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=directory)
    try:
        until, held = time.monotonic() + patience, False
        while not held:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                held = True
            except BlockingIOError:
                if time.monotonic() > until:
                    break
                time.sleep(_LOOKS_EVERY)
        yield held
        if held:
            fcntl.flock(fd, fcntl.LOCK_UN)  # a child that was forked meanwhile would keep it
    finally:
        os.close(fd)


def _find(directory: int, name: str, processes: int) -> int | None:
    """The descriptor of a file, in which this process is noted as one that has it; None if there is no such file.

    The last of ``processes`` removes the name.
    """
    try:
        fd = os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
    except FileNotFoundError:
        return None
    try:
        found, header = os.fstat(fd), os.pread(fd, _HEADER.size, 0)
        end = _HEADER.size + (_HEADER.unpack(header)[1] if len(header) == _HEADER.size else 0)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or not _HEADER.size < end <= found.st_size:
            os.close(fd)
            return None
        noted = os.pread(fd, found.st_size - end, end)
        readers = {pid for (pid,) in _READER.iter_unpack(noted[: len(noted) // _READER.size * _READER.size])}
        if os.getpid() not in readers:
            os.pwrite(fd, _READER.pack(os.getpid()), end + len(readers) * _READER.size)
        if len(readers | {os.getpid()}) >= processes:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=directory)
    except OSError:
        os.close(fd)
        raise
    return fd


def _read(file: BinaryIO, size: int) -> bytes | None:
    """The content of a file; None if it is not what was written."""
    try:
        magic, found_size, crc = _HEADER.unpack(file.read(_HEADER.size))
        content = file.read(size)
    except (OSError, struct.error):
        return None
    if (magic, found_size, len(content)) != (_MAGIC, size, size) or crc64nvme(content) != crc:
        logger.warning("what another process left on this host's disk is damaged: it is fetched again")
        return None
    return content


def _leave(directory: int, name: str, data: bytes) -> None:
    """Write a file for the other processes; if the disk refuses, they fetch for themselves."""
    unfinished = name + _UNFINISHED
    try:
        _remove_old(directory)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(unfinished, dir_fd=directory)  # of one that died
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(unfinished, flags, 0o600, dir_fd=directory), "wb") as file:
            file.write(_HEADER.pack(_MAGIC, len(data), crc64nvme(data)))
            file.write(data)
            file.write(_READER.pack(os.getpid()))
        os.rename(unfinished, name, src_dir_fd=directory, dst_dir_fd=directory)
    except OSError as error:
        logger.info("each process of this host fetches for itself: %s", error)
        with contextlib.suppress(OSError):
            os.unlink(unfinished, dir_fd=directory)


def _remove_old(directory: int) -> None:
    """Make room for one file."""
    files = []
    for name in os.listdir(directory):
        with contextlib.suppress(FileNotFoundError):
            files.append((os.stat(name, dir_fd=directory, follow_symlinks=False).st_mtime, name))
    files = sorted((each for each in files if not each[1].startswith(_LOCK)), reverse=True)
    for index, (written_at, name) in enumerate(files):
        if (index >= KEPT_FILES - 1 and not name.endswith(_UNFINISHED)) or time.time() - written_at > KEPT_SECONDS:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=directory)
