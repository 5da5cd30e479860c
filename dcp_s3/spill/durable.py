"""What the spill directory asks of a disk: files that survive a power failure, locks that die with their process, and
errors that say what to do about them."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from dcp_s3.errors import SpillError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of a file, which is made if it is missing; waits for it."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        unlock(fd)


def unlock(fd: int) -> None:
    """Release a lock and close its file. Without the release, a forked child that inherited the file would keep the
    lock."""
    fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


def write_durably(path: Path, data: bytes) -> None:
    """Replace a small file. After a crash or a power failure it has the old bytes or the new ones."""
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with open(temporary, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    flush_directory(path.parent)


def make_private(directory: Path) -> None:
    """Make a directory that only its owner can read, also if it exists."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    with contextlib.suppress(PermissionError):  # another user's: whether it can be used shows below
        directory.chmod(0o700)


def flush_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def as_spill_error(directory: Path, doing: str) -> Iterator[None]:
    """Raise an OSError in the spill directory as a `SpillError`."""
    try:
        yield
    except OSError as error:
        remedy = "free space there, or set DCP_S3_SPILL_DIR to a larger disk" if error.errno in _FULL else (
            "make DCP_S3_SPILL_DIR a local directory that this process can write to"
        )  # fmt: skip
        raise SpillError(
            f"cannot {doing} in the spill directory {directory}: {error.strerror or error}. Remedy: {remedy}"
        ) from error
