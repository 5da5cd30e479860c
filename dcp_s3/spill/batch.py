"""The objects that one rank writes in one save, on S3 or on this host's disk."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import replace
from types import TracebackType

from dcp_s3.checksum import crc_hex
from dcp_s3.errors import SpillError, TransferError
from dcp_s3.events import Listener, Spilled, emit
from dcp_s3.failures import without_tracebacks
from dcp_s3.format.control_files import ObjectEntry
from dcp_s3.limit import Cancelled
from dcp_s3.memory import Piece
from dcp_s3.s3.parts import choose_part_size
from dcp_s3.s3.upload import Uploader
from dcp_s3.spill.journal import SpilledObject, file_name
from dcp_s3.spill.store import SaveWriter
from dcp_s3.store import Batch, StreamedObject
from dcp_s3.units import format_size
from dcp_s3.url import parse_url

logger = logging.getLogger(__name__)


def refused_by_both(refusal: TransferError, spill: SpillError) -> TransferError:
    """The error for an object that neither S3 nor the disk takes."""
    return TransferError(
        f"{refusal}. Nor can it be spilled: {spill}",
        bucket=refusal.bucket,
        key=refusal.key,
        operation=refusal.operation,
        attempts=refusal.attempts,
    )


class SpillingBatch(Batch):
    """Puts objects on S3; what S3 refuses, or everything with local durability, goes to the disk, and what the disk
    refuses goes to S3, however long that takes.

    The journal is on disk before the first request, with the keys of all objects, so that a drain can clean up if this
    process dies.

    Args:
        uploader: an isolated one.
        writer: writes the save's directory.
        give_up: called if the disk takes nothing.
        drain: called when there is something to drain.
        on_event: gets the events.
    """

    def __init__(
        self,
        uploader: Uploader,
        writer: SaveWriter,
        give_up: Callable[[], object],
        drain: Callable[[], object],
        on_event: Listener | None,
    ) -> None:
        self._give_up, self._drain = give_up, drain
        self._uploader, self._writer, self._on_event = uploader, writer, on_event
        self.chunk_size, self.in_flight, self.cancel = uploader.chunk_size, uploader.in_flight, uploader.cancel
        self._settings = uploader.store.settings
        self._local = self._settings.durability == "local"
        self._journal = writer.save.journal
        self._lock = threading.Lock()
        self._objects: dict[str, SpilledObject] = {}
        self._refusal: SpillError | None = None
        """Why the disk takes nothing: objects go to S3."""
        self._is_open = self._is_sealed = self._is_withdrawn = False

    def __enter__(self) -> SpillingBatch:
        self._uploader.__enter__()
        try:
            self._writer.__enter__()
            self._is_open = True
        except SpillError as error:
            logger.warning("this save cannot spill: %s", error)
            self._refusal = error
            self._give_up()
        except BaseException:
            self._uploader.__exit__(*sys.exc_info())
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            self._uploader.__exit__(kind, error, _)
        finally:
            if self._is_open:
                self._close_disk()
        if self._is_sealed and kind is None:
            self._drain()

    def _close_disk(self) -> None:
        if self._uploader.unclean and not (self._is_sealed or self._is_withdrawn):
            for spilled in self._objects.values():
                (self._writer.save.path / spilled.file).unlink(missing_ok=True)
            self._writer.close()  # as if this process had died: the drain cleans up
        else:
            self._writer.__exit__()

    @property
    def progress(self) -> str:
        with self._lock:
            size = sum(spilled.entry.size for spilled in self._objects.values())
        return (
            f"{self._uploader.progress}, {format_size(size)} on its disk" if self._is_open else self._uploader.progress
        )

    @property
    def sent(self) -> int:  # type: ignore[override]
        return self._uploader.sent

    def stop(self) -> None:
        self._uploader.stop()

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
        part_size = choose_part_size(size, self._uploader.part_size)
        name = file_name(self._journal.keys.index(key))
        crc, size = self._writer.write_object(name, size, self._until_cancelled(pieces))
        url, checksums = self._journal.url, self._settings.checksum != "none"
        path = key.removeprefix(parse_url(url).key(""))
        entry = ObjectEntry(path, size, crc_hex(crc) if checksums else None)
        with self._lock:
            self._objects[key] = SpilledObject(entry, name, part_size, crc_hex(crc))
        emit(Spilled(url=url, path=path, bytes=size, local=self._local, reason=reason), self._on_event)
        log = logger.info if self._local else logger.warning
        log("spilled %s (%s) to %s: %s", path, format_size(size), self._writer.save.path, reason)
        return StreamedObject(size, crc if checksums else None, spilled=True)

    def _until_cancelled(self, pieces: Iterable[Piece]) -> Iterator[Piece]:
        for piece in pieces:
            if self.cancel.is_set():
                raise Cancelled
            yield piece
        if self.cancel.is_set():
            raise Cancelled

    def settle(self) -> Set[str]:
        """Make the spilled objects durable, for the drain. If the disk has no room for the journal, they go to S3."""
        if not self._is_open or not (self._objects or self._uploader.unclean):
            return frozenset()
        again = frozenset[str]()
        if self._refusal is None:
            try:
                self._writer.seal(replace(self._journal, objects=tuple(self._objects.values())))
            except SpillError as error:
                logger.warning("what was spilled goes to S3: %s", error)
                self._refusal, again = error, frozenset(self._objects)
            else:
                self._is_sealed = True
        if self._refusal is not None and not again:
            # All of it is on S3 by now. Multipart uploads that are still open are left for a prune.
            self._objects.clear()
            self._is_withdrawn = True
        return again
