"""What waits for S3 on this host's disk, for loads: objects of a checkpoint, and its commit."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from dcp_s3.memory import ReadTarget, crc_hex
from dcp_s3.settings import Settings
from dcp_s3.spill.journal import Journal, State
from dcp_s3.spill.store import DamagedFileError, SpillStore, crc_of_file, open_store
from dcp_s3.store import Store
from dcp_s3.stores.wrapper import Overlay
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


class LocalObjects:
    """Files of objects that a load of one checkpoint need not fetch from S3 (`Overlay`). Each is used only if its size
    and checksum are right."""

    def __init__(self, store: SpillStore, url: CheckpointURL) -> None:
        self._lock = threading.Lock()  # held while a file is checked: others wait, which only costs time
        self._files = {url.key(each.path): each for each in find_waiting(store) if each.url == str(url)}
        self._open: dict[str, int] = {}
        self._descriptors: list[int] = []
        self.read_bytes = 0

    def read_into(self, key: str, start: int, targets: Sequence[ReadTarget]) -> bool:
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
                with self._lock:
                    self.read_bytes += done
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
        if key not in self._open:
            local = self._files.pop(key, None)
            fd = None if local is None else _open_checked(local)
            if fd is None:
                return None
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


def _open_checked(local: LocalObject) -> int | None:
    try:
        fd = os.open(local.file, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None  # it was drained
    try:
        crc, size = crc_of_file(fd)
        if size == local.size and crc_hex(crc) == local.crc64nvme:
            return fd
        why = "is damaged"
    except OSError as error:
        why = f"cannot be read ({error})"
    logger.warning("%s %s: %s comes from S3", local.file, why, local.path)
    os.close(fd)
    return None
