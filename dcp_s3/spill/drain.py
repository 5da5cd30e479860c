"""The drain: uploads the spill directory to S3, and commits a checkpoint when all of it is there.

This needs neither the processes that saved nor their collectives. Whoever drains the coordinator's directory writes
``.metadata``, once S3 lists every object that it names with the right size, whoever uploaded them. In each process that
spills, one thread drains while training goes on. Only one process drains at a time.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from dcp_s3 import errors
from dcp_s3.checkpoint.commit import Beginning, Commit, Committer, publish
from dcp_s3.checkpoint.commit_state import SaveIdentity, check_newest, find_previous, is_committed
from dcp_s3.checkpoint.directory import list_directory
from dcp_s3.events import Committed, Drained, emit
from dcp_s3.failures import without_tracebacks
from dcp_s3.format.control_files import Manifest
from dcp_s3.limit import Limit
from dcp_s3.memory import Piece, crc_hex
from dcp_s3.process import reset_in_child
from dcp_s3.s3.store import store_of
from dcp_s3.settings import stored_settings
from dcp_s3.spill.journal import JournalError, SpilledCommit, SpilledObject, State
from dcp_s3.spill.store import DamagedFileError, SpilledSave, SpillStore, read_journal
from dcp_s3.store import Store
from dcp_s3.stores.directory import crc_of_file
from dcp_s3.units import format_seconds, format_size
from dcp_s3.url import CheckpointURL, parse_url

logger = logging.getLogger(__name__)

_STOPPED = "the drain was stopped"


@dataclass
class DrainReport:
    """What one pass over a spill directory did."""

    uploaded: int = 0
    """Bytes that are now on S3, and were not known to be there."""
    committed: list[str] = field(default_factory=list)
    """URLs of checkpoints that were committed."""
    discarded: list[str] = field(default_factory=list)
    """Names of saves that were given up: their process died before they were reported durable."""
    waiting: dict[str, str] = field(default_factory=dict)
    """Why saves still wait, by save name."""
    refused: dict[str, str] = field(default_factory=dict)
    """Why saves were set aside for a person in this pass, by save name."""
    busy: bool = False
    """Whether another process drains this directory, and so nothing was done."""


class Drainer:
    """Empties a spill directory, as far as S3 lets it. ``stop`` ends a pass after the current object; ``on_progress``
    gets the number of bytes just uploaded; ``patience`` is the seconds after which a failing request is not retried."""

    def __init__(
        self,
        spill_store: SpillStore,
        *,
        stop: threading.Event | None = None,
        on_progress: Callable[[int], None] = lambda _: None,
        patience: float | None = None,
    ) -> None:
        self.store, self._patience = spill_store, patience
        self._stop, self._on_progress = stop or threading.Event(), on_progress
        self._report = DrainReport()

    def run(self) -> DrainReport:
        """One pass over all saves, oldest first."""
        report = self._report = DrainReport()
        with self.store.drainer() as alone:
            if not alone:
                report.busy = True
                return report
            self.store.tidy()
            saves, unreadable = self.store.read()
            for broken in unreadable:
                if broken.is_final:
                    self.store.refuse(broken.path, broken.reason)
                (report.refused if broken.is_final else report.waiting)[broken.path.name] = broken.reason
            # Data first: commits wait for it.
            for save in sorted(saves, key=lambda save: save.journal.commit is not None):
                try:
                    reason = _STOPPED if self._stop.is_set() else self._drain(save)
                except (DamagedFileError, errors.CheckpointExistsError, errors.InvalidURLError) as error:
                    report.refused[save.name] = str(error)
                    self.store.refuse(save.path, str(error))
                except (errors.StorageError, errors.SpillError, errors.SettingsError, OSError) as error:
                    # A SettingsError here is about AWS's own chain in this process.
                    logger.debug("the spilled save %s waits: %s", save.name, error)
                    report.waiting[save.name] = str(error)
                    without_tracebacks(error)  # they keep the files mapped
                else:
                    if reason is not None:
                        report.waiting[save.name] = reason
        return report

    def _drain(self, save: SpilledSave) -> str | None:
        """Drain one save, and remove it. Returns why it waits; None if it does not."""
        url = parse_url(save.journal.url)
        if strange := [key for key in save.journal.keys if not key.startswith(url.key(""))]:
            raise DamagedFileError(f"its journal names {strange[0]!r}, which is not below {url}")
        try:
            settings = stored_settings(save.journal.settings)
        except errors.SettingsError as error:
            raise DamagedFileError(f"the settings in its journal are not allowed: {error}") from None
        store = store_of(url, settings, Limit(patience=self._patience))
        if save.journal.state is State.WRITING:
            if save.is_being_written():
                return "it is being written"
            try:  # its process may have finished since the scan: it seals or removes the save before it unlocks
                save.journal = read_journal(save.path)
            except FileNotFoundError:
                return None
        if save.journal.state is State.SEALED:
            if save.journal.commit is not None:
                return self._commit(save, save.journal.commit, url, store)
            return self._upload(save, url, store)
        # Its process died while writing: it was never reported durable.
        _abort_uploads(save, store)
        # Keep what a checkpoint needs: a journal may reappear after a power failure.
        needed = find_previous(store, SaveIdentity(url, save.journal.save_id)).keys
        store.delete(key for key in save.journal.keys if key not in needed)
        save.remove()
        self._report.discarded.append(save.name)
        logger.warning("gave up %s of %s: its process died before the save was done", save.name, save.journal.url)
        return None

    def _upload(self, save: SpilledSave, url: CheckpointURL, store: Store) -> str | None:
        started, size = time.monotonic(), save.journal.size
        for spilled in save.journal.objects:
            if self._stop.is_set():
                return _STOPPED
            path = save.path / spilled.file
            _upload_file(store, url.key(spilled.entry.path), path, spilled, self._on_progress)
            # The file is removed before the journal is updated: on a full disk that makes room for the journal. If this
            # process dies in between, the next one finds the object on S3.
            path.unlink(missing_ok=True)
            left = tuple(each for each in save.journal.objects if each.file != spilled.file)
            save.update(replace(save.journal, objects=left))
            self._report.uploaded += spilled.entry.size
        _abort_uploads(save, store)  # uploads whose ids were lost, or whose abort failed
        save.remove()
        seconds = time.monotonic() - started
        logger.info("drained %s of %s in %s", format_size(size), save.journal.url, format_seconds(seconds))
        emit(Drained(url=save.journal.url, bytes=size, seconds=seconds))
        return None

    def _commit(self, save: SpilledSave, spilled: SpilledCommit, url: CheckpointURL, store: Store) -> str | None:
        """Commit a save once S3 has all its objects. Returns what is still missing there; None if it is committed."""
        created_at = save.journal.created_at
        identity = SaveIdentity(url, save.journal.save_id, spilled.rank)
        commit = Commit(identity, *save.read_commit(spilled), spilled.objects)
        if is_committed(store, identity):
            save.remove()  # committed by a drain that died before it could remove the save
            return None
        try:
            committer = Committer(identity, Beginning(created_at, None), spilled.overwrite)
            committer.check_url(store)
            check_newest(store, identity, committer.previous, created_at)
            missing = list_directory(store, url).lacking({each.path: each.size for each in commit.objects}, exact=True)
            for refused in self.store.list_refused() if missing else ():
                with contextlib.suppress(OSError, JournalError):
                    journal = read_journal(refused.path)
                    paths = {each.entry.path for each in journal.objects if journal.url == str(url)}
                    if lost := paths.intersection(missing):
                        why = f"{min(lost)} was set aside because {refused.reason}"
                        raise DamagedFileError(f"it can never be complete: {why}")
            if missing:
                return (
                    f"{len(missing)} of {len(commit.objects)} objects are not on S3 yet, the first {missing[0]}; they "
                    "may wait in the spill directories of other hosts"
                )
            publish(store, commit, committer.previous, keep_objects=True, is_late=committer.beginning.is_late)
        except errors.CheckpointDeletedError as error:
            return str(error)
        except errors.CheckpointExistsError:
            # It may be this very commit: S3 may carry out a request long after its client gave up on it.
            if not is_committed(store, identity):
                raise
        save.remove()
        self._report.committed.append(str(url))
        committed = Manifest.from_json(commit.manifest)
        event = Committed(
            url=str(url),
            step=committed.step,
            bytes=sum(each.size for each in committed.objects),
            objects=len(committed.objects),
            ranks=committed.world_size,
            seconds=max(0.0, time.time() - created_at),
            stall_seconds=None,
            throttled=0,
            spilled_bytes=None,
        )
        logger.info("%s", event)
        emit(event)
        return None


def _upload_file(
    store: Store, key: str, path: Path, spilled: SpilledObject, on_progress: Callable[[int], None]
) -> None:
    """Put a spilled object on S3, unless it is there already. A DamagedFileError if the file is gone or has changed:
    nothing was uploaded."""
    size, part_size = spilled.entry.size, spilled.part_size
    crc: str | None = None
    is_there = False
    with contextlib.suppress(errors.ObjectNotFoundError):
        stored = store.head(key, checksum=True)
        is_there, crc = stored.size == size, stored.crc64nvme
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        if not is_there:
            raise DamagedFileError(f"{path.name} is gone") from None
        on_progress(size)  # uploaded by a drain that died before it could update the journal
        return
    with os.fdopen(fd, "rb"):
        found, length = crc_of_file(fd)
        if (length, crc_hex(found)) != (size, spilled.crc64nvme):
            raise DamagedFileError(
                f"{path.name} has {length} bytes with CRC-64 {crc_hex(found)}, expected {size} with "
                f"{spilled.crc64nvme}: the disk damaged it"
            )
        # S3 may have carried out a request of the save before it spilled, and pickling the same value twice may give
        # different bytes.
        if is_there and crc == spilled.crc64nvme:
            on_progress(size)
            return
        view = memoryview(mmap.mmap(fd, size, access=mmap.ACCESS_READ) if size else b"")

        def parts() -> Iterator[Piece]:
            for start in range(0, size, part_size):
                yield Piece.of(view[start : start + part_size])
                on_progress(min(part_size, size - start))

        store.put_stream(key, size, parts(), part_size=part_size)


def _abort_uploads(save: SpilledSave, store: Store) -> None:
    """Abort the multipart uploads of all keys of a save, if the store lists them. No other save uses these keys."""
    for key in save.journal.keys:
        try:
            found = store.uploads(key)
        except (errors.TransferError, errors.CredentialsError, errors.BucketNotFoundError):
            raise
        except errors.StorageError:
            return  # the permission to list them, or the operation, is missing: a prune collects those that S3 keeps
        for upload in found:
            if upload.key == key:
                store.abort(upload)


# --- in the background of training ----------------------------------------------------------------

_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.25, 5.0  # seconds between passes while S3 refuses
_REPORT_SECONDS = 30.0
_EXIT_SECONDS = 5.0

_running: dict[str, BackgroundDrain] = {}  # by absolute path
_lock = threading.Lock()


@reset_in_child
def _reset_after_fork() -> None:
    # A lock held by another thread at the time of the fork would stay locked forever.
    global _lock
    _lock = threading.Lock()
    _running.clear()


class BackgroundDrain(Drainer):
    """Drains one spill directory until it is empty. If the process dies, another can go on."""

    def __init__(self, store: SpillStore, *, patience: float) -> None:
        super().__init__(store, patience=patience)
        self.ended = False
        self.reasons: dict[str, str] = {}
        """Why saves wait, by save name, from the last pass."""
        self.wake = threading.Event()
        """Set when there is something new to drain."""
        self._thread = threading.Thread(target=self._work, name="dcp_s3-drain", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread, after the current object if that does not take long."""
        self._stop.set()
        self.wake.set()
        self._thread.join(_EXIT_SECONDS)

    def _work(self) -> None:
        pause = _SHORTEST_PAUSE
        while not self._stop.is_set():
            self.wake.clear()
            try:
                report = self.run()
            except Exception as error:
                unexpected = not isinstance(error, errors.SpillError)
                logger.warning("the drain of %s waits: %s", self.store.path, error, exc_info=unexpected)
                pause = _LONGEST_PAUSE
            else:
                self.reasons = report.waiting
                if not report.waiting and not report.busy:
                    with _lock:
                        self.ended = not self.wake.is_set()
                    if self.ended:
                        return
                moved = report.uploaded or report.committed or report.busy
                pause = _SHORTEST_PAUSE if moved else min(_LONGEST_PAUSE, 2 * pause)
            self.wake.wait(pause)


def drain_in_background(store: SpillStore, *, patience: float) -> None:
    """Drain a spill directory now, in this process's thread for it. The thread is started if needed."""
    key = os.path.abspath(store.path)
    with _lock:
        running = _running.get(key)
        if running is None or running.ended:
            _running[key] = BackgroundDrain(store, patience=patience)
        else:
            running.wake.set()


@atexit.register
def stop_draining() -> None:
    """End this process's drain threads. `dcp-s3 drain` or the next process uploads what is left."""
    with _lock:
        ending = list(_running.values())
        _running.clear()
    for running in ending:
        running.stop()
        if left := len(running.store.scan()):
            what = "%d spilled saves are left in %s: `dcp-s3 drain` or the next training process uploads them"
            logger.warning(what, left, running.store.path)


def wait_until_drained(store: SpillStore, save: SpilledSave, *, timeout: float | None = None) -> None:
    """Wait until a spilled save is on S3, or its commit is done. A CheckpointError if it cannot be drained and was set
    aside; a TimeoutError after ``timeout`` seconds: the drain goes on."""
    url = save.journal.url
    started = reported = time.monotonic()
    while save.path.exists():
        now = time.monotonic()
        is_over = timeout is not None and now - started > timeout
        if is_over or now - reported > _REPORT_SECONDS:
            reported = now
            running = _running.get(os.path.abspath(store.path))
            reason = running.reasons.get(save.name) if running is not None else None
            why = f"It waits: {reason}" if reason else "Another process may drain it: see `dcp-s3 drain --status`"
            if is_over:
                raise TimeoutError(f"{url} is not on S3 after {timeout:g} s; the drain goes on. {why}")
            logger.warning("%s has waited for S3 for %.0f s. %s", url, now - started, why)
        time.sleep(0.05)
    for refused in store.list_refused():
        if refused.path.name == save.name:
            raise errors.CheckpointError(f"{url} was not committed: {refused.reason}", url=url)
