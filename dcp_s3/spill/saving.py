"""Saves that spill: the store that decides where objects go, and the commit that follows them."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from dcp_s3.checkpoint.commit import Commit, Committer
from dcp_s3.checkpoint.commit_state import (
    Beginning,
    Previous,
    SaveIdentity,
    check_newest,
    find_previous,
    is_committed,
)
from dcp_s3.checksum import crc64nvme, crc_hex
from dcp_s3.errors import CheckpointExistsError, SpillError, TransferError
from dcp_s3.events import Listener
from dcp_s3.failures import without_tracebacks
from dcp_s3.limit import Limit
from dcp_s3.s3.store import S3Store
from dcp_s3.s3.upload import Uploader
from dcp_s3.settings import Settings
from dcp_s3.spill.background import drain_in_background, wait_until_drained
from dcp_s3.spill.batch import SpillingBatch, refused_by_both
from dcp_s3.spill.drain import commit_if_complete
from dcp_s3.spill.journal import MANIFEST, METADATA, Journal, SpilledCommit
from dcp_s3.spill.store import SpilledSave, SpillStore, open_store
from dcp_s3.store import Batch, Store
from dcp_s3.stores.wrapper import StoreWrapper

logger = logging.getLogger(__name__)


def open_for_save(
    s3: S3Store,
    identity: SaveIdentity,
    beginning: Beginning,
    *,
    rank: int,
    overwrite: bool,
    spills: bool,
    on_event: Listener | None,
) -> tuple[Store, Committer]:
    """The store of one rank's part in a save, and what commits it: with a spill directory in the settings they spill,
    if ``spills``."""
    disk = open_store(s3.settings) if spills else None
    if disk is None:
        return s3, Committer(identity, beginning, overwrite=overwrite)
    store = SpillingStore(s3, disk, str(identity.url), identity.save_id, rank, on_event)
    return store, SpillingCommitter(store, identity, beginning, overwrite=overwrite)


class SpillingStore(StoreWrapper):
    """S3, with this host's disk for data objects that it does not take within `spill_after`, or for all of them.

    Args:
        s3: store that counts.
        disk: spill directory of this save alone, from which a drain uploads.
        url, save_id, rank: what the save is, for the journal.
        on_event: gets the events.
    """

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
        other._bound(limit)
        return other

    def _bound(self, limit: Limit) -> None:
        # What S3 does not take goes to disk: find out soon. If the disk takes nothing, S3 may be slow.
        patience = None if self.disk.takes_nothing else self.settings.spill_after
        self.limit = replace(limit, patience=patience).within(patience)
        self.store = self._bounded = self._s3.within(self.limit)

    def give_up_disk(self) -> SpillingStore:
        """The store from now on: the disk takes nothing."""
        self.disk.takes_nothing = True
        return self.within(self.limit.without_patience())

    def drain(self) -> None:
        """Drain the disk in the background."""
        drain_in_background(self.disk, patience=self.settings.spill_after)

    def batch(self, *, total: int, ranks: int = 1, keys: Sequence[str] = ()) -> Batch:
        settings = self.settings.model_dump()
        journal = Journal(self._url, self._save_id, time.time(), settings, keys=tuple(keys))
        uploader = Uploader.planned(self._bounded, total=total, ranks=ranks, isolated=True)
        writer = self.disk.begin(journal, str(self._rank))
        return SpillingBatch(uploader, writer, self.give_up_disk, self.drain, self._on_event)


class SpillingCommitter(Committer):
    """Commits at once if all objects are on S3; otherwise the commit goes to the disk, from where the drain commits."""

    def __init__(self, store: SpillingStore, identity: SaveIdentity, beginning: Beginning, *, overwrite: bool) -> None:
        super().__init__(identity, beginning, overwrite=overwrite)
        self._disk, self._settings, self._drain = store.disk, store.settings, store.drain
        self._unseen = False

    def begin(self) -> None:
        """Drain what an earlier process left on the disk."""
        self._drain()

    def check_url(self, store: Store) -> None:
        try:
            if not self._overwrite:
                self._check_none_waits()
            super().check_url(store)
        except TransferError as error:
            logger.warning("whether %s is free is checked at its commit: %s", self._identity.url, error)
            self._unseen = True

    def _check_none_waits(self) -> None:
        """Refuse to save to a URL where the commit of an earlier save waits for S3."""
        identity = self._identity
        for save in self._disk.scan():
            commit = save.journal.commit
            if commit is not None and save.journal.url == str(identity.url) and commit.rank == identity.rank:
                raise CheckpointExistsError(
                    f"a checkpoint for {identity.url} waits in {save.path} to be committed; it is untouched. Remedy: "
                    "save to another URL, or pass overwrite=True to replace it",
                    url=str(identity.url),
                )

    def commit(self, store: Store, commit: Commit, *, spilled: bool) -> bool:
        """Commit on S3 at once if all objects are there, and return True; otherwise leave the commit to the drain."""
        if not spilled and not self._unseen:
            try:
                self._publish(store, commit, (lambda: self._look_again(store)) if self._overwrite else None)
            except TransferError as error:
                logger.warning("the commit of %s waits for S3: %s", commit.identity.url, error)
                without_tracebacks(error)
            else:
                return True
        try:
            save = spill_commit(
                self._disk, commit, self._settings, created_at=self._beginning.at, overwrite=self._overwrite
            )
        except SpillError as error:
            self._commit_without_disk(store, commit, error)
            return True
        self._drain()
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

    def _commit_without_disk(self, store: Store, commit: Commit, error: SpillError) -> None:
        """Commit when the objects that wait on local disks are on S3, from memory: the disk did not take the commit."""
        logger.warning("the commit of %s waits for S3 in memory: %s", commit.identity.url, error)
        if isinstance(store, SpillingStore):
            store = store.give_up_disk()
        self._drain()
        created_at, deadline = self._beginning.at, store.limit.deadline
        try:
            while not is_committed(store, commit.identity) and (
                reason := commit_if_complete(
                    store, self._disk, commit, created_at=created_at, overwrite=self._overwrite
                )
            ):
                if deadline is not None and deadline.passed:
                    raise deadline.error(f"the save to {commit.identity.url}", reason)
                time.sleep(1)
        except TransferError as refusal:
            raise refused_by_both(refusal, error) from refusal

    def _look_again(self, store: Store) -> Previous:
        """The checkpoint to overwrite, if it changed since this save began: an older save that had spilled."""
        previous = find_previous(store, self._identity)
        check_newest(store, self._identity, previous, self._beginning.at)
        return previous


def spill_commit(
    disk: SpillStore, commit: Commit, settings: Settings, *, created_at: float, overwrite: bool
) -> SpilledSave:
    """Put a commit on disk. The drain writes it to S3 when all objects are there."""
    identity = commit.identity
    checksums = {MANIFEST: crc_hex(crc64nvme(commit.manifest)), METADATA: crc_hex(crc64nvme(commit.metadata))}
    spilled = SpilledCommit(MANIFEST, METADATA, commit.objects, overwrite, identity.rank, checksums)
    journal = Journal(str(identity.url), identity.save_id, created_at, settings.model_dump(), commit=spilled)
    with disk.begin(journal, "commit") as writer:
        writer.write_file(MANIFEST, commit.manifest)
        writer.write_file(METADATA, commit.metadata)
        writer.seal(journal)
        return writer.save


def drain_url(settings: Settings, url: str, timeout: float | None) -> None:
    """Drain what this host's spill directory has of a checkpoint, if it has one, and wait for that.

    Raises:
        TimeoutError, CheckpointError: see `wait_until_drained`.
    """
    disk = open_store(settings)
    if disk is None:
        return
    until = None if timeout is None else time.monotonic() + timeout
    drain_in_background(disk, patience=settings.spill_after)
    for spilled in disk.scan():
        if spilled.journal.url == url:
            left = None if until is None else max(0.0, until - time.monotonic())
            wait_until_drained(disk, spilled, timeout=left)
