"""Upload of objects from a stream of buffers: multipart with parts in parallel, PutObject when small.

Nothing is copied: a part is a list of views of the caller's memory. The CRC-64 of each buffer is computed once,
in the thread that uploads it. The CRCs of parts, objects and any group of buffers (an item) are combined from these.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from typing import Any

from dcp_s3 import errors
from dcp_s3.limit import Cancelled, Progress
from dcp_s3.memory import Piece, combine_crc64nvme, crc_of
from dcp_s3.s3 import multipart
from dcp_s3.s3.body import GatherBody
from dcp_s3.s3.bucket import Bucket, checksum_arguments, creation_arguments, request_with_checksum
from dcp_s3.s3.listing import delete
from dcp_s3.s3.multipart import (
    COPIES_AT_ONCE,
    MAX_PARTS,
    PUTS_PER_SECOND,
    abort_quietly,
    choose_part_size,
    copy_ranges,
    plan_part_size,
)
from dcp_s3.s3.pressure import Tuning, width_of
from dcp_s3.store import Batch, CopyRange, DeleteTarget, StreamedObject
from dcp_s3.workers import Slots, Workers

logger = logging.getLogger(__name__)

# Parts that are ready when a thread becomes free.
WAITING_PARTS = 2


class Uploader(Batch):
    """The threads and the limit on parts in flight that all uploads of one save share.

    As many parts are being sent as connections fill the link, and a few more wait; `ObjectUpload.write` blocks beyond
    that, which bounds the memory of buffers that were made for the upload. The first part that fails permanently
    cancels everything else.

    Args:
        part_size: bytes of a part, or more where S3's limit on parts requires it; None: the most of the settings.
        isolated: whether an object that fails leaves the others alone: there is another place for it.

    Use as a context manager. An exception that leaves it cancels what is under way, aborts every open multipart upload
    and deletes the objects already completed. In any case all threads have ended afterwards.
    """

    def __init__(self, store: Bucket, *, part_size: int | None = None, isolated: bool = False) -> None:
        self.store = store.within(store.limit.shared(store.settings.stall_timeout))
        self.part_size = part_size or store.settings.max_part_size
        self.chunk_size = min(self.part_size, store.settings.max_part_size)
        self.isolated = isolated
        self.cancel = threading.Event()
        self.tuning = Tuning(
            width_of(store.settings, store.name, "upload"), store.gate, f"uploads to s3://{store.name}",
            resize=self._resize, is_busy=lambda: self._slots.all_taken, most=store.settings.max_connections,
        )  # fmt: skip
        self.in_flight = self.tuning.connections + WAITING_PARTS
        self._pool = Workers(self.tuning.connections, "dcp_s3-upload")
        self._slots = Slots(self.in_flight)
        self._lock = threading.Lock()
        self._open: set[ObjectUpload] = set()
        self._all: list[ObjectUpload] = []
        self._completed: list[str] = []
        self._copying = threading.Semaphore(COPIES_AT_ONCE)
        self.unclean: set[str] = set()
        """Keys with multipart uploads that may have stayed open."""

    @classmethod
    def planned(cls, store: Bucket, *, total: int, ranks: int, isolated: bool = False) -> Uploader:
        """An uploader whose parts suit ``total`` bytes, while ``ranks`` ranks upload as much."""
        settings, part_size = store.settings, store.settings.part_size
        if part_size == "auto":
            likely = min(width_of(settings, store.name, "upload").likely, settings.max_connections)
            part_size = plan_part_size(
                total, connections=likely, ranks=ranks, most=settings.max_part_size, requests_per_second=PUTS_PER_SECOND
            )
        return cls(store, part_size=part_size, isolated=isolated)

    def __enter__(self) -> Uploader:
        self.tuning.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.stop()
        self.tuning.__exit__()
        self._pool.close()
        if kind is not None:
            self._clean_up()
        for upload in self._all:
            upload.forget()
        error, self.error = self.error, None
        try:
            if kind is Cancelled and error is not None:
                raise error
        finally:
            del error, _  # its traceback has this frame: no cycle

    def put_stream(
        self,
        key: str,
        size: int,
        pieces: Iterable[Piece],
        *,
        part_size: int | None = None,
        last_resort: bool = False,
    ) -> StreamedObject:
        """See `Store.put_stream`. An isolated object that S3 did not take may be put again, from the first piece on.

        Args:
            last_resort: whether S3 may be slower than the store's patience.

        Raises:
            TransferError: S3 does not take the object.
            Cancelled: another object of the batch has failed.
            StorageError
        """
        if part_size is None:
            part_size = choose_part_size(size, self.part_size)
        if last_resort:
            with self._lock:
                failed = [each for each in self._open if each.key == key]
            for each in failed:
                wait(each._parts)
                each.abort(self.store)
        upload = ObjectUpload(self, key, part_size, last_resort=last_resort)
        with self._lock:
            self._open.add(upload)
            self._all.append(upload)
            if self.cancel.is_set():
                upload.cancel.set()
        try:
            for piece in pieces:
                upload.write(piece)
            return upload.finish()
        except (errors.TransferError, Cancelled) as error:
            if not self.isolated:
                raise
            upload.cancel.set()
            refusal = upload.error or error
            try:
                raise refusal from None
            finally:
                del refusal  # its traceback has this frame: no cycle

    def _resize(self, connections: int) -> None:
        self._pool.resize(connections)
        self._slots.resize(connections + WAITING_PARTS)

    def stop(self) -> None:
        self.cancel.set()
        with self._lock:
            for upload in self._open:
                upload.cancel.set()

    def _clean_up(self) -> None:
        store = self.store.within(self.store.limit.for_cleanup())
        for upload in list(self._open):
            upload.abort(store)
        try:
            delete(store, map(DeleteTarget, self._completed))
        except errors.StorageError as error:
            logger.warning("objects of a failed save are left for pruning: %s", error)

    def copy(self, key: str, ranges: Sequence[CopyRange], crc: int) -> bool:
        """See `Batch.copy`. S3 copies beside what is sent."""
        with self._lock:
            self._completed.append(key)  # before: S3's answer may be lost
        store = self.store.within(replace(self.store.limit, cancel=self.cancel))
        return copy_ranges(store, key, ranges, crc, slots=self._copying, moved=self.took, stays_open=self.unclean.add)

    def submit(self, upload: ObjectUpload, function: Any, pieces: list[Piece], *arguments: Any) -> Future[Any]:
        """Run ``function(pieces, ...)`` for ``upload`` on the pool once there is a slot.

        It is called once: the memory of the pieces is released then, whatever happens.
        """
        while not (taken := self._slots.acquire(timeout=0.5)) and not upload.cancel.is_set():
            pass
        if upload.cancel.is_set():
            if taken:
                self._slots.release()
            raise Cancelled
        future = self._pool.submit(self._run, upload, function, pieces, *arguments)
        future.add_done_callback(lambda _: self._slots.release())
        return future

    def _run(self, upload: ObjectUpload, function: Any, pieces: list[Piece], *arguments: Any) -> Any:
        try:
            if upload.cancel.is_set():
                raise Cancelled
            return function(pieces, *arguments)
        except Cancelled:
            raise
        except BaseException as error:
            with self._lock:
                upload.error = upload.error or error
                if not self.isolated:
                    self.error = self.error or error
            upload.cancel.set()
            raise
        finally:
            for piece in pieces:
                piece.view = None

    def took(self, size: int) -> None:
        """Count ``size`` more bytes that S3 has."""
        with self._lock:
            self.sent += size

    def finished(self, upload: ObjectUpload, *, completed: bool) -> None:
        with self._lock:
            self._open.discard(upload)
            if completed:
                self._completed.append(upload.key)


class ObjectUpload:
    """One object being written front to back, by one thread.

    A multipart upload is created when the second part begins, so that an object of one part is one PutObject.
    """

    def __init__(self, uploader: Uploader, key: str, part_size: int, *, last_resort: bool = False) -> None:
        self.key = key
        self.size = 0
        self.cancel = threading.Event() if uploader.isolated else uploader.cancel
        self.error: BaseException | None = None
        """The failure of one of its parts, if any."""
        self._uploader = uploader
        limit = uploader.store.limit
        if last_resort:
            limit = limit.without_patience()
        if uploader.isolated:  # its stall ends this try, not the others
            limit = replace(limit, progress=Progress(uploader.store.settings.stall_timeout))
        self._store = uploader.store.within(replace(limit, cancel=self.cancel))
        self._part_size = part_size
        self._pieces: list[Piece] = []
        self._pieces_size = 0
        self._upload_id: str | None = None
        self._parts: list[Future[tuple[str, int | None, int]]] = []

    def write(self, piece: Piece) -> None:
        """Append a buffer, split where parts end. It has its CRC after `finish`."""
        room = self._part_size - self._pieces_size
        for part in piece.split(room, self._part_size) if piece.size > room else (piece,):
            if part.size and self._pieces_size == self._part_size:
                self._flush()
            self._pieces.append(part)
            self._pieces_size += part.size
            self.size += part.size

    def _flush(self) -> None:
        """Send the current part of a multipart upload."""
        if self._upload_id is None:
            self._upload_id = multipart.create(self._store, self.key)
            self._uploader.tuning.begin()  # with as many connections as the first answer suggests
        number = len(self._parts) + 1
        if number > MAX_PARTS:
            raise errors.StorageError(
                f"s3://{self._store.name}/{self.key} needs more than {MAX_PARTS} parts of {self._part_size} bytes: "
                "it became larger than planned. Remedy: raise DCP_S3_PART_SIZE",
                bucket=self._store.name, key=self.key, operation="UploadPart",
            )  # fmt: skip
        pieces, self._pieces, self._pieces_size = self._pieces, [], 0
        self._parts.append(self._uploader.submit(self, self._send, pieces, self._upload_id, number))

    def finish(self) -> StreamedObject:
        """Send the rest, wait for all parts, and complete the object."""
        if self._upload_id is None and not self._parts:
            _, crc, _ = self._uploader.submit(self, self._send, self._pieces).result()
            self._pieces = []
        else:
            if self._pieces:
                self._flush()
            sent = [part.result() for part in self._parts]
            crc = None if sent[0][1] is None else combine_crc64nvme((c, size) for _, c, size in sent if c is not None)
            etags, upload_id = [etag for etag, _, _ in sent], self._upload_id or ""
            multipart.complete(self._store, self.key, upload_id, etags, size=self.size, crc=crc)
            self._upload_id = None
        self._uploader.finished(self, completed=True)
        return StreamedObject(self.size, crc)

    def forget(self) -> None:
        """Release memory, and errors whose tracebacks hold what this object holds."""
        self.error = None
        self._parts.clear()
        self._pieces = []

    def abort(self, store: Bucket) -> None:
        """Abort the multipart upload, if one was created, through ``store``. No part may still be under way.

        Errors are logged: another one is on its way to the user, and `prune` collects what is left.
        """
        self._uploader.finished(self, completed=False)
        upload_id, self._upload_id = self._upload_id, None
        if upload_id is not None and not abort_quietly(store, self.key, upload_id):
            self._uploader.unclean.add(self.key)

    def _send(self, pieces: list[Piece], upload_id: str = "", number: int = 0) -> tuple[str, int | None, int]:
        """Send a part, or the whole object if there is no upload. Returns ETag, CRC-64 and bytes; the pieces have their
        CRCs afterwards."""
        settings, patience, started = self._store.settings, self._store.limit.patience, time.monotonic()
        is_isolated, size = self._uploader.isolated, sum(piece.size for piece in pieces)
        crc = None if settings.checksum == "none" else crc_of(pieces)
        checksum = {} if crc is None else checksum_arguments(settings, crc)
        views = [piece.view for piece in pieces if piece.view is not None]
        body = GatherBody(views, patience=patience if is_isolated else None, moved=self._uploader.tuning.moved)
        try:
            if not upload_id:
                arguments = {**creation_arguments(settings, data=True), "Key": self.key, "Body": body, **checksum}
                request_with_checksum(self._store, "PutObject", self.key, arguments, data=True)
                etag = ""
            else:
                etag = multipart.send_part(self._store, self.key, upload_id, number, body, checksum)
        finally:
            body.release()
        self._uploader.took(size)
        seconds = time.monotonic() - started - body.waited
        if upload_id and is_isolated and patience is not None and seconds > patience:
            self.error = errors.TransferError(
                f"S3 is slow: a part of {size} bytes took {seconds:.1f} s, more than {patience:g} s",
                bucket=self._store.name, key=self.key, operation="UploadPart",
            )  # fmt: skip
            self.cancel.set()
        return etag, crc, size
