"""What one rank spills during one save."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import replace

from dcp_s3.checkpoint.commit import Commit
from dcp_s3.checksum import combine_crc64nvme, crc64nvme, crc_hex
from dcp_s3.events import Listener, Spilled, emit
from dcp_s3.format.control_files import ObjectEntry
from dcp_s3.memory import Piece
from dcp_s3.settings import Settings
from dcp_s3.spill.journal import MANIFEST, METADATA, Journal, SpilledCommit, SpilledObject, file_name
from dcp_s3.spill.store import SaveWriter, SpilledSave, SpillStore, as_spill_error
from dcp_s3.store import StreamedObject
from dcp_s3.units import format_size

logger = logging.getLogger(__name__)


class ObjectFile:
    """Writes one object to a file, front to back."""

    def __init__(self, writer: SaveWriter, name: str, estimated_size: int) -> None:
        self.size = 0
        self._writer = writer
        self._name = name
        self._crcs: list[tuple[int, int]] = []
        self._fd = writer.open_file(name, estimated_size)

    def write(self, piece: Piece) -> None:
        view = piece.view
        assert view is not None  # noqa: S101 - a piece has its view until it is written
        self._crcs.append((piece.checksum(), piece.size))
        with as_spill_error(self._writer.directory, f"write {format_size(piece.size)}"):
            start = 0
            while start < piece.size:
                start += os.pwrite(self._fd, view[start:], self.size + start)
        self.size += piece.size
        piece.view = None

    def finish(self) -> StreamedObject:
        with as_spill_error(self._writer.directory, "flush a file"):
            os.ftruncate(self._fd, self.size)
            os.fsync(self._fd)
        os.close(self._fd)
        return StreamedObject(self.size, combine_crc64nvme(self._crcs))

    def abort(self) -> None:
        os.close(self._fd)
        self._writer.drop_file(self._name)


class SpillSession:
    """The objects that one rank puts on disk during one save. A context manager; `seal` makes them durable.

    ``keys`` are those of all objects that the rank may begin to write to S3, so that a drain can clean up if this
    process dies.
    """

    def __init__(
        self,
        store: SpillStore,
        *,
        url: str,
        save_id: str,
        rank: int,
        settings: Settings,
        keys: Sequence[str],
        on_event: Listener | None = None,
    ) -> None:
        journal = Journal(url, save_id, time.time(), settings.model_dump(), keys=tuple(keys))
        self._writer = store.begin(journal, str(rank))
        self._url, self._on_event = url, on_event
        self._lock = threading.Lock()
        self._objects: list[SpilledObject] = []
        self.unclean: set[str] = set()
        """Keys whose multipart uploads may still be open. A drain looks for them."""
        self.sealed = False
        self._withdrawn = False
        self.local = settings.durability == "local"

    def __enter__(self) -> SpillSession:
        self._writer.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        if self.unclean and not (self.sealed or self._withdrawn):
            for spilled in self._objects:
                self._writer.drop_file(spilled.file)
            self._writer.close()  # as if this process had died: the drain cleans up
        else:
            self._writer.__exit__(*exception)

    def open(self, number: int, estimated_size: int) -> ObjectFile:
        return ObjectFile(self._writer, file_name(number), estimated_size)

    def add(self, number: int, entry: ObjectEntry, uploaded: StreamedObject, part_size: int, reason: str) -> None:
        """Record a complete, flushed file."""
        spilled = SpilledObject(entry, file_name(number), part_size, crc_hex(uploaded.crc64nvme or 0))
        with self._lock:
            self._objects.append(spilled)
        emit(Spilled(url=self._url, path=entry.path, bytes=entry.size, local=self.local, reason=reason), self._on_event)
        log = logger.info if self.local else logger.warning
        log("spilled %s (%s) to %s: %s", entry.path, format_size(entry.size), self._writer.directory, reason)

    @property
    def spilled(self) -> bool:
        """Whether a drain has anything to do."""
        return bool(self._objects or self.unclean)

    @property
    def size(self) -> int:
        with self._lock:
            return sum(spilled.entry.size for spilled in self._objects)

    def seal(self) -> None:
        """Make the spilled objects durable, and hand them to the drain."""
        self._writer.seal(replace(self._writer.save.journal, objects=tuple(self._objects)))
        self.sealed = True

    def withdraw(self) -> None:
        """Forget what was spilled: S3 has it by now. Multipart uploads that are still open are left for a prune."""
        self._objects.clear()
        self._withdrawn = True


def spill_commit(
    store: SpillStore, commit: Commit, settings: Settings, *, created_at: float, overwrite: bool
) -> SpilledSave:
    """Put a commit on disk. The drain writes it to S3 when all objects are there."""
    identity = commit.identity
    journal = Journal(
        str(identity.url),
        identity.save_id,
        created_at,
        settings.model_dump(),
        commit=SpilledCommit(
            MANIFEST,
            METADATA,
            commit.objects,
            overwrite,
            identity.rank,
            {MANIFEST: crc_hex(crc64nvme(commit.manifest)), METADATA: crc_hex(crc64nvme(commit.metadata))},
        ),
    )
    with store.begin(journal, "commit") as writer:
        writer.write_file(MANIFEST, commit.manifest)
        writer.write_file(METADATA, commit.metadata)
        writer.seal(journal)
        return writer.save
