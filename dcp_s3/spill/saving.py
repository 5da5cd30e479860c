"""Saves that spill: the store and the batch that decide where objects go, and the commit that follows them."""

from __future__ import annotations

import copy
import logging
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

from dcp_s3.checkpoint.commit import Beginning, Commit, Committer
from dcp_s3.checkpoint.commit_state import Previous, SaveIdentity, check_newest, find_previous
from dcp_s3.errors import CheckpointExistsError, SpillError, TransferError
from dcp_s3.events import Listener, Spilled, emit
from dcp_s3.failures import without_tracebacks
from dcp_s3.format.control_files import ObjectEntry
from dcp_s3.limit import Cancelled, Limit
from dcp_s3.memory import Piece, crc64nvme, crc_hex
from dcp_s3.s3.multipart import choose_part_size
from dcp_s3.s3.store import S3Store
from dcp_s3.s3.upload import Uploader
from dcp_s3.settings import Settings
from dcp_s3.spill.drain import drain_in_background, wait_until_drained
from dcp_s3.spill.journal import MANIFEST, METADATA, Journal, SpilledCommit, SpilledObject
from dcp_s3.spill.store import SpilledSave, SpillStore, open_store
from dcp_s3.store import Batch, CopyRange, Store, StreamedObject
from dcp_s3.stores.wrapper import StoreWrapper
from dcp_s3.units import format_size
from dcp_s3.url import parse_url

logger = logging.getLogger(__name__)


class SpillingStore(StoreWrapper):
    """``s3``, with ``disk`` (a spill directory of this save alone) for data objects that it does not take within
    `spill_after`, or for all of them; ``url``, ``save_id`` and ``rank`` are for the journal."""

    def __init__(
        self, s3: S3Store, disk: SpillStore, url: str, save_id: str, rank: int, on_event: Listener | None = None
    ) -> None:
        self._s3, self.disk, self._on_event = s3, disk, on_event
        self._url, self._save_id, self._rank = url, save_id, rank
        self.settings = s3.settings
        super().__init__(s3)
        self._bound(s3.limit)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_on_event": None}  # who listens is in the process that it comes from

    def within(self, limit: Limit) -> SpillingStore:
        other = copy.copy(self)
        other._on_event = self._on_event  # `__getstate__`, by which it is copied, leaves it out
        other._bound(limit)
        return other

    def _bound(self, limit: Limit) -> None:
        # What S3 does not take goes to disk: find out soon. If the disk takes nothing, S3 may be slow.
        patience = None if self.disk.takes_nothing else self.settings.spill_after
        self.limit = replace(limit, patience=patience).within(patience)
        self.store = self._bounded = self._s3.within(self.limit)

    def batch(self, *, total: int, ranks: int = 1, keys: Sequence[str] = ()) -> Batch:
        settings = self.settings.model_dump()
        journal = Journal(self._url, self._save_id, time.time(), settings, keys=tuple(keys))
        uploader = Uploader(self._bounded, total=total, ranks=ranks, isolated=True)
        return SpillingBatch(uploader, self.disk, self.disk.begin(journal, str(self._rank)), self._on_event)


class SpillingBatch(Batch):
    """Puts objects on S3; what S3 refuses, or everything with local durability, goes to the disk, and what the disk
    refuses goes to S3, however long that takes.

    The journal is on disk before the first request, with the keys of all objects, so that a drain can clean up if this
    process dies. ``uploader`` is an isolated one, ``save`` the directory on ``disk``, to be entered.
    """

    def __init__(self, uploader: Uploader, disk: SpillStore, save: SpilledSave, on_event: Listener | None) -> None:
        self._uploader, self._disk, self._save, self._on_event = uploader, disk, save, on_event
        self.chunk_size, self.in_flight, self.cancel = uploader.chunk_size, uploader.in_flight, uploader.cancel
        self._settings = uploader.store.settings
        self._local = self._settings.durability == "local"
        self._journal = save.journal
        self._lock = threading.Lock()
        self._objects: dict[str, SpilledObject] = {}
        self._refusal: SpillError | None = None
        """Why the disk takes nothing."""
        self._is_sealed = False

    def __enter__(self) -> SpillingBatch:
        self._uploader.__enter__()
        try:
            self._save.__enter__()
        except SpillError as error:
            logger.warning("this save cannot spill: %s", error)
            self._refusal = error
            self._disk.takes_nothing = True
        except BaseException:
            self._uploader.__exit__(*sys.exc_info())
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if kind is None:
            try:
                self._seal()
            except BaseException:
                self.__exit__(*sys.exc_info())
                raise
        try:
            self._uploader.__exit__(kind, error, _)
        finally:
            if self._refusal is None and self._uploader.unclean and not self._is_sealed:
                for spilled in self._objects.values():
                    (self._save.path / spilled.file).unlink(missing_ok=True)
                self._save.close()  # the drain cleans up
            elif self._refusal is None:
                self._save.__exit__()
        if self._is_sealed and kind is None:
            drain_in_background(self._disk, patience=self._settings.spill_after)

    @property
    def progress(self) -> str:
        with self._lock:
            size = sum(spilled.entry.size for spilled in self._objects.values())
        return f"{self._uploader.progress}, {format_size(size)} on its disk" if size else self._uploader.progress

    @property
    def sent(self) -> int:  # type: ignore[override]
        return self._uploader.sent

    def stop(self) -> None:
        self._uploader.stop()

    def copy(self, key: str, ranges: Sequence[CopyRange], crc: int) -> bool:
        return not self._local and self._uploader.copy(key, ranges, crc)

    def put_stream(self, key: str, size: int, pieces: Iterable[Piece]) -> StreamedObject:
        refusal, reason = self._refusal, "DCP_S3_DURABILITY=local"
        if refusal is None:
            if not self._local:
                try:
                    return self._uploader.put_stream(key, size, pieces)
                except TransferError as error:
                    if self.cancel.is_set():
                        raise
                    without_tracebacks(error)  # they hold the state that is being saved
                    reason = str(error)
            try:
                return self._spill(key, size, pieces, reason)
            except SpillError as error:
                logger.warning("an object goes to S3, however long that takes: %s; %s", reason, error)
                without_tracebacks(error)
                refusal = error
        # However slow S3 is.
        try:
            return self._uploader.put_stream(key, size, pieces, last_resort=True)
        except TransferError as error:
            raise refused_by_both(error, refusal) from error

    def _spill(self, key: str, size: int, pieces: Iterable[Piece], reason: str) -> StreamedObject:
        def until_cancelled() -> Iterator[Piece]:
            for piece in pieces:
                if self.cancel.is_set():
                    raise Cancelled
                yield piece
            if self.cancel.is_set():
                raise Cancelled

        part_size = choose_part_size(size, self._uploader.part_size)
        name = f"object-{self._journal.keys.index(key)}"
        crc, size = self._save.write_object(name, size, until_cancelled())
        url, checksums = self._journal.url, self._settings.checksum != "none"
        path = key.removeprefix(parse_url(url).key(""))
        entry = ObjectEntry(path, size, crc_hex(crc) if checksums else None)
        with self._lock:
            self._objects[key] = SpilledObject(entry, name, part_size, crc_hex(crc))
        emit(Spilled(url=url, path=path, bytes=size, local=self._local, reason=reason), self._on_event)
        log = logger.info if self._local else logger.warning
        log("spilled %s (%s) to %s: %s", path, format_size(size), self._save.path, reason)
        return StreamedObject(size, crc if checksums else None, spilled=True)

    def _seal(self) -> None:
        """Make the spilled objects durable, for the drain. A SpillError if the disk has no room for the journal."""
        if self._refusal is not None or not (self._objects or self._uploader.unclean):
            return
        try:
            self._save.seal(replace(self._journal, objects=tuple(self._objects.values())))
            self._is_sealed = True
        except SpillError as error:
            if self._objects:
                raise
            # All is on S3. The journal must go: a drain would take this save for one that died, and delete it.
            logger.warning("multipart uploads that are still open are left for a prune: %s", error)
            self._uploader.unclean.clear()


def refused_by_both(refusal: TransferError, spill: SpillError) -> TransferError:
    """The error for what neither S3 nor the disk takes."""
    return TransferError(
        f"{refusal}. Nor can it be spilled: {spill}", bucket=refusal.bucket, key=refusal.key,
        operation=refusal.operation, attempts=refusal.attempts,
    )  # fmt: skip


class SpillingCommitter(Committer):
    """Commits at once if all objects are on S3; otherwise the commit goes to the disk, from where the drain commits."""

    def __init__(self, store: SpillingStore, identity: SaveIdentity, beginning: Beginning, *, overwrite: bool) -> None:
        super().__init__(identity, beginning, overwrite)
        self._disk, self._settings = store.disk, store.settings
        self._unseen = False
        drain_in_background(self._disk, patience=self._settings.spill_after)  # what an earlier process left

    def check_url(self, store: Store) -> None:
        """Refuse to save also where the commit of an earlier save waits for S3."""
        url, rank = str(self.identity.url), self.identity.rank
        for save in () if self.overwrite else self._disk.scan():
            commit = save.journal.commit
            if commit is not None and (save.journal.url, commit.rank) == (url, rank):
                raise CheckpointExistsError(
                    f"a checkpoint for {url} waits in {save.path} to be committed; it is untouched. Remedy: save to "
                    "another URL, or pass overwrite=True to replace it",
                    url=url,
                )
        try:
            super().check_url(store)
        except TransferError as error:
            logger.warning("whether %s is free is checked at its commit: %s", url, error)
            self._unseen = True

    def look_again(self, store: Store) -> Previous:
        """The checkpoint to overwrite, if it changed since this save began: an older save that spilled."""
        if not self.overwrite:
            return super().look_again(store)
        previous = find_previous(store, self.identity)
        check_newest(store, self.identity, previous, self.beginning.at)
        return previous

    def commit(self, store: Store, commit: Commit, *, spilled: bool) -> bool:
        """Commit on S3 at once if all objects are there, and return True; otherwise leave the commit to the drain."""
        refusal: TransferError | None = None
        if not spilled:
            try:
                if self._unseen:
                    super().check_url(store)
                    check_newest(store, self.identity, self.previous, self.beginning.at)
                super().commit(store, commit, spilled=False)
            except TransferError as error:
                logger.warning("the commit of %s waits for S3: %s", commit.identity.url, error)
                without_tracebacks(error)
                refusal = error
            else:
                return True
        try:
            save = spill_commit(
                self._disk, commit, self._settings, created_at=self.beginning.at, overwrite=self.overwrite
            )
        except SpillError as error:
            raise (error if refusal is None else refused_by_both(refusal, error)) from refusal
        drain_in_background(self._disk, patience=self._settings.spill_after)
        if self._settings.durability == "s3":
            deadline = store.limit.deadline
            try:
                wait_until_drained(self._disk, save, timeout=None if deadline is None else deadline.left)
            except TimeoutError as error:
                if deadline is None:
                    raise
                raise deadline.error(
                    f"the save to {commit.identity.url}",
                    f"it is complete on local disks ({self._settings.spill_dir}), from where it still goes to S3",
                ) from error
        return False


def spill_commit(
    disk: SpillStore, commit: Commit, settings: Settings, *, created_at: float, overwrite: bool
) -> SpilledSave:
    """Put a commit on disk. The drain writes it to S3 when all objects are there."""
    identity = commit.identity
    checksums = {MANIFEST: crc_hex(crc64nvme(commit.manifest)), METADATA: crc_hex(crc64nvme(commit.metadata))}
    spilled = SpilledCommit(commit.objects, overwrite, identity.rank, checksums)
    journal = Journal(str(identity.url), identity.save_id, created_at, settings.model_dump(), commit=spilled)
    with disk.begin(journal, "commit") as save:
        save.seal(journal, {MANIFEST: commit.manifest, METADATA: commit.metadata})
    return save


def drain_url(settings: Settings, url: str, timeout: float | None) -> None:
    """Drain what this host's spill directory has of a checkpoint, if it has one, and `wait_until_drained`."""
    disk = open_store(settings)
    if disk is None:
        return
    until = None if timeout is None else time.monotonic() + timeout
    drain_in_background(disk, patience=settings.spill_after)
    for spilled in disk.scan():
        if spilled.journal.url == url:
            left = None if until is None else max(0.0, until - time.monotonic())
            wait_until_drained(disk, spilled, timeout=left)
