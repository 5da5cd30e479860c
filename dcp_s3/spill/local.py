"""What waits for S3 on this host's disk, for loads: objects of a checkpoint, and its commit."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from dcp_s3.memory import ReadTarget, crc_hex, targets_of
from dcp_s3.settings import Settings
from dcp_s3.spill.journal import Journal, State
from dcp_s3.spill.store import DamagedFileError, SpillStore, crc_of_file, open_store
from dcp_s3.store import Into, Moved, ReadWidth, Store
from dcp_s3.stores.wrapper import StoreWrapper
from dcp_s3.url import CheckpointURL

logger = logging.getLogger(__name__)

_CHUNK = 2**24  # bytes read at a time


class LocalObject(NamedTuple):
    """A file with the bytes of a data object."""

    file: Path
    url: str
    path: str
    """Path of the object, relative to the checkpoint."""
    size: int
    crc64nvme: str


def find_waiting(store: SpillStore) -> Iterator[LocalObject]:
    """The objects that wait for S3. Nothing is changed."""
    for save in store.scan():
        for spilled in save.journal.objects:
            entry = spilled.entry
            yield LocalObject(save.path / spilled.file, save.journal.url, entry.path, entry.size, spilled.crc64nvme)


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


class LocalObjects(StoreWrapper):
    """Reads what files in the spill directory have of a checkpoint from there, unless a certain version is asked for;
    all else is ``store``'s. A file is used only if its size and checksum are right."""

    def __init__(self, store: Store, spill: SpillStore, url: CheckpointURL) -> None:
        super().__init__(store)
        self._lock = threading.Lock()  # held while a file is checked: others wait, which only costs time
        self._files = {url.key(each.path): each for each in find_waiting(spill) if each.url == str(url)}
        self._open: dict[str, int] = {}
        self._descriptors: list[int] = []
        self._sizes: list[int] = []  # of what was read from files

    @property
    def read_bytes(self) -> int:
        """Bytes that were read from files."""
        return sum(self._sizes)

    def read(self, key: str, start: int, into: Into, etag: str | None = None, *, moved: Moved | None = None) -> None:
        targets = targets_of(into)
        self.limit.check(f"read of {key}")
        if etag is not None or not self._read_file(key, start, targets):
            self.store.read(key, start, targets, etag, moved=moved)

    def adapt_reads(self, *, resize: Callable[[int], None], is_busy: Callable[[], bool], most: int) -> ReadWidth:
        # Not all bytes come from the store: their rate says nothing.
        return self.store.adapt_reads(resize=resize, is_busy=is_busy, most=min(most, self.read_width()))

    def _read_file(self, key: str, start: int, targets: Sequence[ReadTarget]) -> bool:
        with self._lock:
            fd = self._find(key)
        if fd is None:
            return False
        try:
            for target in targets:
                done = 0
                while done < target.view.nbytes:
                    count = os.preadv(fd, [target.view[done : done + _CHUNK]], start + done)
                    if not count:
                        raise OSError(errno.EIO, "the file has become shorter")
                    target.received(done, count)
                    done += count
                start += done
                self._sizes.append(done)
        except OSError as error:
            logger.warning("%s comes from S3: its local copy cannot be read: %s", key, error)
            self.distrust(key)
            for target in targets:
                target.start_again()
            return False
        return True

    def distrust(self, key: str) -> None:
        with self._lock:
            self._files.pop(key, None)
            self._open.pop(key, None)  # it is closed at the end: another thread may be reading from it

    def close(self) -> None:
        """Close the files. No thread may still be reading."""
        for fd in self._descriptors:
            os.close(fd)
        self._descriptors.clear()

    def _find(self, key: str) -> int | None:
        """A descriptor of the object's file; None if there is none that is right."""
        if key in self._open:
            return self._open[key]
        local = self._files.pop(key, None)
        if local is None:
            return None
        try:
            fd = os.open(local.file, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None  # it was drained
        self._descriptors.append(fd)
        try:
            crc, size = crc_of_file(fd)
            if size == local.size and crc_hex(crc) == local.crc64nvme:
                self._open[key] = fd
                return fd
            why = "is damaged"
        except OSError as error:
            why = f"cannot be read ({error})"
        logger.warning("%s %s: %s comes from S3", local.file, why, local.path)
        return None


@contextlib.contextmanager
def with_copies(store: Store, settings: Settings, url: CheckpointURL) -> Iterator[Store]:
    """The store for a load of one checkpoint: with what this host's spill directory has of it in front."""
    spill = open_store(settings)
    if spill is None:
        yield store
        return
    with contextlib.closing(LocalObjects(store, spill, url)) as local:
        yield local
