"""What waits for S3 on this host's disk, for loads: objects of a checkpoint, and its commit."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from typing import NamedTuple

from dcp_s3.errors import ObjectNotFoundError, StorageError
from dcp_s3.memory import targets_of
from dcp_s3.settings import Settings
from dcp_s3.spill.journal import Journal, State
from dcp_s3.spill.store import DamagedFileError, SpillStore, open_store
from dcp_s3.store import Into, Moved, ReadWidth, Store
from dcp_s3.stores.directory import DirectoryStore
from dcp_s3.stores.wrapper import StoreWrapper
from dcp_s3.url import CheckpointURL

logger = logging.getLogger(__name__)


class WaitingCommit(NamedTuple):
    """A commit that waits for S3."""

    journal: Journal
    manifest: bytes
    metadata: bytes


def find_commits(store: SpillStore, url: str | None = None) -> Iterator[WaitingCommit]:
    """The commits that wait, at ``url`` only if it is given. Damaged ones are skipped."""
    for save in store.scan():
        commit = save.journal.commit
        if commit is None or save.journal.state is not State.SEALED or url not in (None, save.journal.url):
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

    def __init__(self, store: Store, settings: Settings, url: CheckpointURL) -> None:
        super().__init__(store)
        spill = open_store(settings)
        self._lock = threading.Lock()  # held while a file is checked: others wait, which only costs time
        self._files = {
            url.key(spilled.entry.path): (save.path, spilled)
            for save in (spill.scan() if spill else ())
            if save.journal.url == str(url)
            for spilled in save.journal.objects
        }
        self._right: set[str] = set()  # keys whose files were checked
        self.sizes: list[int] = []
        """Bytes of each read from a file."""

    def read(self, key: str, start: int, into: Into, etag: str | None = None, *, moved: Moved | None = None) -> None:
        targets = targets_of(into)
        self.limit.check(f"read of {key}")
        local = self._files.get(key) if etag is None else None
        if local is not None:
            path, spilled = local
            directory = DirectoryStore(path).within(self.limit)
            try:
                with self._lock:
                    if key not in self._right:
                        found = directory.head(spilled.file, checksum=True)
                        if (found.size, found.crc64nvme) != (spilled.entry.size, spilled.crc64nvme):
                            raise DamagedFileError("it is damaged")
                        self._right.add(key)
                directory.read(spilled.file, start, targets)
            except (StorageError, DamagedFileError) as error:
                if not isinstance(error, ObjectNotFoundError):  # it was not drained
                    logger.warning("%s comes from S3, not from %s: %s", key, path / spilled.file, error)
                self.distrust(key)
                for target in targets:
                    target.crc = None if target.crc is None else 0  # nothing received so far counts
            else:
                self.sizes.append(sum(target.view.nbytes for target in targets))
                return
        self.store.read(key, start, targets, etag, moved=moved)

    def adapt_reads(self, *, resize: Callable[[int], None], is_busy: Callable[[], bool], most: int) -> ReadWidth:
        # Not all bytes come from the store: their rate says nothing.
        return self.store.adapt_reads(resize=resize, is_busy=is_busy, most=min(most, self.read_width()))

    def distrust(self, key: str) -> None:
        self._files.pop(key, None)
