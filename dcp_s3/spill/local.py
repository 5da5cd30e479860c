"""Objects of a checkpoint on this host's disk: those that wait for S3, and those kept for a restart."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from dcp_s3.checksum import crc_hex
from dcp_s3.memory import ReadTarget
from dcp_s3.settings import Settings
from dcp_s3.spill.journal import Journal, SpilledObject, State
from dcp_s3.spill.store import DamagedFileError, SpillStore, crc_of_file, make_private, open_store, write_durably
from dcp_s3.store import Store
from dcp_s3.stores.wrapper import Overlay
from dcp_s3.url import CheckpointURL

logger = logging.getLogger(__name__)

_CHUNK = 2**24  # bytes read at a time
_FACTS = ".json"


@dataclass(frozen=True)
class LocalObject:
    """A file with the bytes of a data object."""

    url: str
    path: str
    """Path of the object, relative to the checkpoint."""
    size: int
    crc64nvme: str


class ReadCache:
    """Files of objects that are already on S3, kept for loads on this host. The oldest are evicted first."""

    def __init__(self, store: SpillStore, limit: int) -> None:
        self._directory = store.path / "cache"
        self._limit = limit

    def keep(self, file: Path, url: str, spilled: SpilledObject) -> None:
        """Move a drained file here, or remove it if it does not fit. If the disk fails, only this copy is lost."""
        size = spilled.entry.size
        facts = LocalObject(url, spilled.entry.path, size, spilled.crc64nvme)
        name = hashlib.blake2b(f"{url}\n{spilled.entry.path}".encode(), digest_size=16).hexdigest()
        try:
            if size > self._limit:
                file.unlink(missing_ok=True)
                return
            make_private(self._directory)
            self._evict(size)
            file.rename(self._directory / name)
            write_durably(self._directory / (name + _FACTS), json.dumps(asdict(facts)).encode())
        except OSError as error:
            logger.warning("%s is not kept for loads: %s", spilled.entry.path, error)
            file.unlink(missing_ok=True)

    def _evict(self, room: int) -> None:
        entries = sorted(
            (path for path in self._directory.iterdir() if path.suffix != _FACTS), key=lambda path: path.stat().st_mtime
        )
        total = sum(path.stat().st_size for path in entries)
        while entries and total + room > self._limit:
            oldest = entries.pop(0)
            total -= oldest.stat().st_size
            oldest.with_name(oldest.name + _FACTS).unlink(missing_ok=True)
            oldest.unlink()


def find_kept(store: SpillStore) -> Iterator[tuple[Path, LocalObject]]:
    for facts in sorted((store.path / "cache").glob("*" + _FACTS)):
        with contextlib.suppress(OSError, ValueError, TypeError):
            yield facts.with_name(facts.name.removesuffix(_FACTS)), LocalObject(**json.loads(facts.read_text()))


def find_waiting(store: SpillStore) -> Iterator[tuple[Path, LocalObject]]:
    """The files of objects that wait for S3. Nothing is changed."""
    for save in store.scan():
        for spilled in save.journal.objects:
            entry = spilled.entry
            yield save.path / spilled.file, LocalObject(save.journal.url, entry.path, entry.size, spilled.crc64nvme)


class WaitingCommit(NamedTuple):
    """A commit that waits for S3."""

    journal: Journal
    manifest: bytes
    metadata: bytes


def find_commits(store: SpillStore) -> Iterator[WaitingCommit]:
    """The commits that wait. Damaged ones are skipped."""
    for save in store.scan():
        commit = save.journal.commit
        if commit is None or save.journal.state is not State.SEALED:
            continue
        try:
            files = save.read_commit(commit)
        except (OSError, DamagedFileError) as error:
            logger.warning("the commit of %s in %s is skipped: %s", save.journal.url, save.path, error)
            continue
        yield WaitingCommit(save.journal, *files)


class LocalObjects:
    """Copies of objects that a load of one checkpoint need not fetch from S3 (`Overlay`). A file is used only if its
    size and checksum are right."""

    def __init__(self, store: SpillStore, url: CheckpointURL) -> None:
        self._lock = threading.Lock()
        self._locks: dict[str, threading.Lock] = {}
        self._files: dict[str, tuple[Path, LocalObject]] = {
            url.key(facts.path): (path, facts)
            for path, facts in (*find_kept(store), *find_waiting(store))
            if facts.url == str(url)
        }
        self._open: dict[str, int | None] = {}
        self._descriptors: list[int] = []
        self.read_bytes = 0

    def read_into(self, key: str, start: int, targets: Sequence[ReadTarget]) -> bool:
        fd = self._descriptor(key)
        if fd is None:
            return False
        try:
            self._read(fd, start, targets)
        except OSError as error:
            logger.warning("%s comes from S3: its local copy cannot be read: %s", self._files[key][1].path, error)
            self.distrust(key)
            for target in targets:
                target.start_again()
            return False
        return True

    def _read(self, fd: int, start: int, targets: Sequence[ReadTarget]) -> None:
        for target in targets:
            done = 0
            while done < target.view.nbytes:
                count = os.preadv(fd, [target.view[done : done + _CHUNK]], start + done)
                if not count:
                    raise OSError(errno.EIO, "the file has become shorter")
                target.received(done, count)
                done += count
            start += done
            with self._lock:
                self.read_bytes += done

    def distrust(self, key: str) -> None:
        with self._lock:
            lock = self._locks.setdefault(key, threading.Lock())
        with lock:
            self._open[key] = None  # the file stays open: another thread may be reading from it

    def close(self) -> None:
        """Close the files. No thread may still be reading."""
        for fd in self._descriptors:
            os.close(fd)
        self._descriptors.clear()

    def _descriptor(self, key: str) -> int | None:
        with self._lock:
            lock = self._locks.setdefault(key, threading.Lock())
        with lock:  # one thread checks a file; threads that read other files go on
            if key not in self._open:
                fd = _open_checked(*self._files[key]) if key in self._files else None
                if fd is not None:
                    self._descriptors.append(fd)
                self._open[key] = fd
            return self._open[key]


@contextlib.contextmanager
def with_copies(store: Store, settings: Settings, url: CheckpointURL) -> Iterator[Store]:
    """The store for a load of one checkpoint: with what this host's spill directory has of it in front."""
    spill = open_store(settings)
    if spill is None:
        yield store
        return
    with contextlib.closing(LocalObjects(spill, url)) as local:
        yield Overlay(local, store)


def _open_checked(path: Path, facts: LocalObject) -> int | None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None  # it was drained or evicted
    try:
        crc, size = crc_of_file(fd)
    except OSError as error:
        logger.warning("%s cannot be read (%s): %s comes from S3", path, error, facts.path)
    else:
        if size == facts.size and crc_hex(crc) == facts.crc64nvme:
            return fd
        logger.warning("%s is damaged: %s comes from S3", path, facts.path)
    os.close(fd)
    return None
