"""Reads what was stored with a checkpoint besides its state: attachments, ``extra``. Also while its commit still waits
on this host's disk."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from typing import Any

from dcp_s3 import errors
from dcp_s3.checkpoint.attachments import check_bytes, find_attachments, missing_error, read_attachment, read_extra
from dcp_s3.checkpoint.commit_state import CommitState, SaveIdentity, find_state
from dcp_s3.format.control_files import Manifest
from dcp_s3.settings import Settings
from dcp_s3.spill.local import WaitingCommit, find_commits, with_copies
from dcp_s3.spill.store import open_store
from dcp_s3.store import Store
from dcp_s3.url import CheckpointURL

logger = logging.getLogger(__name__)


class AttachmentReader(ABC):
    """The part of `S3StorageReader` that reads what was stored with a checkpoint besides its state."""

    settings: Settings
    include_uncommitted: bool

    def attachment(self, name: str) -> bytes:
        """The bytes of a small file that was attached to the checkpoint (`S3StorageWriter.attach`).

        Of a checkpoint that another library wrote: those of the object ``{checkpoint}/{name}``. Every call asks S3;
        no rank needs another one for it.

        >>> writer = S3StorageWriter("s3://bucket/run/step-3000")
        >>> writer.attach("config.json", b'{"layers": 32}')
        >>> saved = dcp.save(state, storage_writer=writer)
        >>> S3StorageReader("s3://bucket/run/step-3000").attachment("config.json")
        b'{"layers": 32}'

        Raises:
            EntryNotFoundError: there is none of that name.
            CheckpointNotFoundError: no committed checkpoint is there.
            CorruptCheckpointError: its bytes are not those that were attached.
            StorageError
        """
        url, waiting = self._where()
        if waiting is not None:
            return read_waiting(self._store(), self.settings, url, waiting.manifest, name)
        return read_attachment(self._store(), url, name)

    def attachments(self) -> list[str]:
        """Names of the files that are attached to the checkpoint. Those of another library are not known.

        >>> S3StorageReader("s3://bucket/run/step-00002000").attachments()
        []

        Raises:
            CheckpointNotFoundError: no committed checkpoint is there.
            CorruptCheckpointError, StorageError
        """
        url, waiting = self._where()
        if waiting is not None:
            return sorted(Manifest.from_json(waiting.manifest).attachments)
        return sorted(find_attachments(self._store(), url) or ())

    def extra(self) -> dict[str, Any]:
        """What was stored with the checkpoint as ``extra``, of `S3StorageWriter` or `CheckpointManager.save`. Empty if
        nothing was, or if another library wrote the checkpoint.

        >>> writer = S3StorageWriter("s3://bucket/run/step-3000", extra={"commit": "a1b2c3"})
        >>> saved = dcp.save(state, storage_writer=writer)
        >>> S3StorageReader("s3://bucket/run/step-3000").extra()
        {'commit': 'a1b2c3'}

        Raises:
            CheckpointNotFoundError: no committed checkpoint is there.
            CorruptCheckpointError, StorageError
        """
        url, waiting = self._where()
        if waiting is not None:
            return Manifest.from_json(waiting.manifest).extra
        return read_extra(self._store(), url)

    def _where(self) -> tuple[CheckpointURL, WaitingCommit | None]:
        """URL of the checkpoint, and its commit if that waits on this host's disk."""
        url = self._require_url()
        return url, find_uncommitted(self._store(), self.settings, url) if self.include_uncommitted else None

    @abstractmethod
    def _require_url(self) -> CheckpointURL: ...

    @abstractmethod
    def _store(self) -> Store: ...


def read_waiting(store: Store, settings: Settings, url: CheckpointURL, manifest: bytes, name: str) -> bytes:
    """The bytes of one attachment, from this host's disk if it is there, else from S3.

    Raises:
        EntryNotFoundError: there is none.
        CorruptCheckpointError: it is damaged.
        StorageError
    """
    known = Manifest.from_json(manifest).attachments
    if name not in known:
        raise missing_error(url, name, known)
    entry = known[name]
    data = bytearray(entry.size)
    with with_copies(store, settings, url) as copies:
        copies.read(url.key(entry.path), 0, memoryview(data))
    return check_bytes(bytes(data), url, entry)


def find_uncommitted(
    store: Store, settings: Settings, url: CheckpointURL, rank: int | None = None
) -> WaitingCommit | None:
    """The newest commit at ``url`` that is spilled on this host; None if S3 has a newer one.

    Raises:
        StorageError: missing bucket, credentials.
    """
    spill = open_store(settings)
    found = None
    for waiting in find_commits(spill) if spill else ():
        journal = waiting.journal
        if journal.url == str(url) and journal.commit is not None and journal.commit.rank == rank:
            found = waiting
    if found is None:
        return None
    journal = found.journal
    try:
        state = find_state(store, SaveIdentity(url, journal.save_id, rank), path=None, started_at=journal.created_at)
    except errors.TransferError as error:
        logger.warning("S3 does not say whether it has a newer checkpoint than this host: %s", error)
        return found
    return found if state is CommitState.WAITING else None
