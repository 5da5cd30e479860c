"""The spill directory: one directory for each spilled save, with its data files and its journal::

    {spill_dir}/
        saves/{time}-{save_id}-{rank or commit}-{random}/    journal, object files
        new/...                                 the same, before it has its first journal
        refused/...                             cannot be drained: kept for a person, with the reason in a file
        drainer.lock                            held by the process that drains

A process that writes a save holds a lock in its directory. The kernel drops it when the process dies.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import secrets
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from dcp_s3.errors import SpillError
from dcp_s3.memory import Piece, combine_crc64nvme, crc64nvme, crc_hex
from dcp_s3.settings import Settings
from dcp_s3.spill.journal import Journal, JournalError, SpilledCommit, State
from dcp_s3.stores.directory import flush_directory
from dcp_s3.units import format_size

logger = logging.getLogger(__name__)

_JOURNAL = "journal"
_WRITER_LOCK = "writer.lock"
_REASON = "reason.txt"
_OLD = 3600  # seconds after which whoever made an entry of new/ has died
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class DamagedFileError(SpillError):
    """A file of a spilled save is missing or has changed."""


@dataclass(eq=False)
class SpilledSave:
    """One save's directory. A context manager for the process that writes it: leaving it releases the lock. A save that
    was not sealed by then is discarded."""

    store: SpillStore
    path: Path
    journal: Journal
    _lock: contextlib.ExitStack = field(default_factory=contextlib.ExitStack, repr=False)

    @property
    def name(self) -> str:
        return self.path.name

    # --- for the drain ----------------------------------------------------------------------------------

    def update(self, journal: Journal) -> None:
        write_durably(self.path / _JOURNAL, journal.to_bytes())
        self.journal = journal

    def read_commit(self, commit: SpilledCommit) -> tuple[bytes, bytes]:
        """The manifest and ``.metadata`` that wait here."""
        found = []
        for name in (commit.manifest, commit.metadata):
            try:
                found.append((self.path / name).read_bytes())
            except FileNotFoundError:
                raise DamagedFileError(f"the file {name} of its commit is gone") from None
            if crc_hex(crc64nvme(found[-1])) != commit.checksums.get(name):
                raise DamagedFileError(f"the file {name} of its commit is damaged")
        return found[0], found[1]

    def is_being_written(self) -> bool:
        """Whether the process that writes the save is alive and not done."""
        try:
            with _locked(self.path / _WRITER_LOCK, os.O_RDWR, wait=False) as is_free:
                return not is_free
        except FileNotFoundError:
            return False

    def remove(self) -> None:
        """Remove the directory. Its journal goes first, so that half a save is never taken for a whole one."""
        (self.path / _JOURNAL).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            flush_directory(self.path)  # if the journal reappeared after a power failure, the drain would act on it
        shutil.rmtree(self.path, ignore_errors=True)

    # --- for the process that writes it ---------------------------------------------------------------

    def __enter__(self) -> SpilledSave:
        # Made elsewhere and moved: every directory in saves/ has a journal, and a lock while it is being written.
        root, new = self.store.path, self.store.path / "new" / self.name
        with as_spill_error(root, "create a directory"):
            root.mkdir(mode=0o700, parents=True, exist_ok=True)  # one that is there stays as it is
            is_new = not self.store.saves.exists()
            _make_private(self.store.saves)
            if is_new:
                flush_directory(root)
                flush_directory(root.parent)
            _make_private(new.parent)
            new.mkdir(mode=0o700)
            try:
                self._lock.enter_context(_locked(new / _WRITER_LOCK))
                write_durably(new / _JOURNAL, self.journal.to_bytes())
                new.rename(self.path)
                flush_directory(self.store.saves)
            except BaseException:
                self.close()
                shutil.rmtree(new, ignore_errors=True)
                if self.path.exists():
                    self.remove()
                raise
        return self

    def __exit__(self, *_: object) -> None:
        if self.journal.state is State.WRITING:
            self.remove()
        with contextlib.suppress(OSError):
            (self.path / _WRITER_LOCK).unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        """Release the lock, as if this process had died."""
        self._lock.close()

    def write_object(self, name: str, size: int, pieces: Iterable[Piece]) -> tuple[int, int]:
        """Write an object's pieces to a file, and flush it. ``size`` is an estimate. Returns CRC-64 and bytes. The file
        is removed if anything fails, the pieces included."""
        path, where, offset = self.path / name, self.store.path, 0
        crcs: list[tuple[int, int]] = []
        fd = -1
        try:
            with as_spill_error(where, f"reserve {format_size(size)}"), self.store.reservation(size):
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
                os.posix_fallocate(fd, 0, max(size, 1))
            for piece in pieces:
                crcs.append((piece.checksum(), piece.size))
                with as_spill_error(where, f"write {format_size(piece.size)}"):
                    start, view = 0, piece.view
                    while view is not None and start < view.nbytes:
                        start += os.pwrite(fd, view[start:], offset + start)
                    offset += start
                piece.view = None
            with as_spill_error(where, "flush a file"):
                os.ftruncate(fd, offset)
                os.fsync(fd)
        except BaseException:
            if fd >= 0:
                path.unlink(missing_ok=True)
            raise
        finally:
            if fd >= 0:
                os.close(fd)
        return combine_crc64nvme(crcs), offset

    def seal(self, journal: Journal, files: Mapping[str, bytes] | None = None) -> None:
        """Make the save durable, with small files that belong to it. Every object was flushed before; from here on the
        drain takes over."""
        for name, data in (files or {}).items():
            with as_spill_error(self.store.path, f"write {format_size(len(data))}"):
                write_durably(self.path / name, data)
        with as_spill_error(self.store.path, "write the journal"):
            flush_directory(self.path)
            self.update(replace(journal, state=State.SEALED))


@dataclass(frozen=True)
class RefusedSave:
    """A save that cannot be drained."""

    path: Path
    reason: str
    is_final: bool = True
    """False: it may be drained later. There were too many open files, a disk error, no permission."""


class SpillStore:
    """A spill directory, made when first needed. Any number of processes of one host may use it."""

    def __init__(self, path: str | os.PathLike[str], *, limit: int | None = None) -> None:
        self.path = Path(path)
        self.limit = limit
        self.saves = self.path / "saves"
        self.refused = self.path / "refused"
        self.takes_nothing = False
        """Set by a save that could not write there, for itself."""

    def begin(self, journal: Journal, role: str) -> SpilledSave:
        """One rank's objects of a save, or its commit, to be entered: ``role`` is the rank or ``commit``."""
        name = f"{int(journal.created_at * 1000):014d}-{journal.save_id}-{role}-{secrets.token_hex(3)}"
        return SpilledSave(self, self.saves / name, journal)

    def scan(self) -> list[SpilledSave]:
        """The saves, oldest first, without damaged and unreadable ones."""
        return self.read()[0]

    def read(self) -> tuple[list[SpilledSave], list[RefusedSave]]:
        """The saves, oldest first, and those whose journals are damaged, or cannot be read now."""
        saves, broken = list[SpilledSave](), list[RefusedSave]()
        for path in _directories(self.saves):
            try:
                saves.append(SpilledSave(self, path, read_journal(path)))
            except FileNotFoundError:
                continue
            except JournalError as error:
                broken.append(RefusedSave(path, f"the journal is damaged: {error}"))
            except OSError as error:
                broken.append(RefusedSave(path, f"the journal cannot be read: {error}", is_final=False))
        return saves, broken

    def tidy(self) -> None:
        """Remove remains of saves whose process died while making or removing them. For the drain."""
        for path in _directories(self.path / "new"):
            with contextlib.suppress(OSError):
                if path.stat().st_mtime < time.time() - _OLD:
                    shutil.rmtree(path, ignore_errors=True)
        for path in _directories(self.saves):
            if not (path / _JOURNAL).exists():
                shutil.rmtree(path, ignore_errors=True)

    def refuse(self, path: Path, reason: str) -> None:
        """Set a save aside for a person."""
        target = self.refused / path.name
        try:
            _make_private(self.refused)
            with contextlib.suppress(OSError):  # a full disk has no room for it
                write_durably(path / _REASON, f"{reason}\n".encode())
            path.rename(target)
            flush_directory(self.refused)
        except OSError as error:
            logger.error("the spilled save %s cannot be drained (%s) or set aside: %s", path, reason, error)  # noqa: TRY400
            return
        logger.error("the spilled save %s cannot be drained and was set aside in %s: %s", path.name, target, reason)

    def list_refused(self) -> list[RefusedSave]:
        """The saves that were set aside."""
        found = []
        for path in _directories(self.refused):
            reason = path / _REASON
            found.append(RefusedSave(path, reason.read_text().strip() if reason.exists() else "unknown"))
        return found

    def size(self) -> int:
        """Bytes of all files of saves."""
        total = 0
        for directory in _directories(self.saves):
            with contextlib.suppress(OSError), os.scandir(directory) as entries:
                for entry in entries:
                    with contextlib.suppress(OSError):  # a journal, which was just moved over the old one
                        total += entry.stat().st_size
        return total

    @contextlib.contextmanager
    def reservation(self, size: int) -> Iterator[None]:
        """Keep other processes from adding files while a file of ``size`` bytes is made, if the limit allows it."""
        if self.limit is None:
            yield
            return
        with _locked(self.path / "limit.lock"):
            used = self.size()
            if used + size > self.limit:
                raise SpillError(
                    f"{format_size(size)} more in {self.path} would exceed DCP_S3_SPILL_LIMIT: {format_size(used)} of "
                    f"{format_size(self.limit)} are in use. Remedy: raise the limit, or let `dcp-s3 drain` upload what "
                    "is there"
                )
            yield

    @contextlib.contextmanager
    def drainer(self) -> Iterator[bool]:
        """Try to become the only drainer of this directory; yields whether that worked. The lock dies with the
        process."""
        with contextlib.ExitStack() as stack:
            with as_spill_error(self.path, "lock a file"):
                self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
                alone = stack.enter_context(_locked(self.path / "drainer.lock", wait=False))
            yield alone


def open_store(settings: Settings) -> SpillStore | None:
    """The spill directory of these settings; None if it is not set."""
    return None if settings.spill_dir is None else SpillStore(settings.spill_dir, limit=settings.spill_limit)


def read_journal(directory: Path) -> Journal:
    """The journal of a save. FileNotFoundError if it was drained: its journal is removed first."""
    return Journal.from_bytes((directory / _JOURNAL).read_bytes())


def _directories(path: Path) -> list[Path]:
    try:
        return sorted(each for each in path.iterdir() if each.is_dir())
    except (FileNotFoundError, NotADirectoryError):
        return []


@contextlib.contextmanager
def _locked(path: Path, flags: int = os.O_RDWR | os.O_CREAT, *, wait: bool = True) -> Iterator[bool]:
    """Hold the lock of a file. Yields False if another process holds it, unless it waits for that."""
    fd = os.open(path, flags | os.O_CLOEXEC, 0o600)
    try:
        held = False
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            held = True
        yield held
    finally:
        # Without the release, a forked child that inherited the file would keep the lock.
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


def _make_private(directory: Path) -> None:
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    with contextlib.suppress(PermissionError):  # another user's: whether it can be used shows below
        directory.chmod(0o700)


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
