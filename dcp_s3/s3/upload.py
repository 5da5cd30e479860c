"""Upload of objects from a stream of buffers: multipart with parts in parallel, PutObject when small.

Nothing is copied: a part is a list of views of the caller's memory. The CRC-64 of each buffer is computed once,
in the thread that uploads it. The CRCs of parts, objects and any group of buffers (an item) are combined from these.
"""

from __future__ import annotations

import functools
import logging
import math
import threading
import time
import traceback
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from typing import Any

from dcp_s3 import errors
from dcp_s3.limit import Cancelled, Progress
from dcp_s3.memory import Piece, combine_crc64nvme, encode_crc
from dcp_s3.s3 import multipart
from dcp_s3.s3.body import GatherBody
from dcp_s3.s3.bucket import Bucket, creation_arguments, request_with_checksum
from dcp_s3.s3.listing import delete
from dcp_s3.s3.pressure import MANY, Tuning
from dcp_s3.store import Batch, CopyRange, DeleteTarget, StreamedObject
from dcp_s3.workers import Workers

logger = logging.getLogger(__name__)

# Parts that are ready when a thread becomes free.
WAITING_PARTS = 2


@dataclass(eq=False)
class _Upload:
    """One object that is being written."""

    key: str
    store: Bucket
    cancel: threading.Event
    error: BaseException | None = None
    """The failure of one of its parts, if any."""
    upload_id: str = ""
    """Id of its multipart upload, which begins with the second part: an object of one part is one PutObject."""
    parts: list[Future[tuple[str, int | None, int]]] = field(default_factory=list)
    """ETag, CRC-64 and bytes of each."""
    pieces: list[Piece] = field(default_factory=list)
    """Those of the part that comes next."""


class Uploader(Batch):
    """The threads and the limit on parts in flight that all uploads of one save share.

    As many parts are being sent as connections fill the link, and a few more wait; `put_stream` blocks beyond that,
    which bounds the memory of buffers that were made for the upload. The first part that fails permanently cancels
    everything else.

    Args:
        total, ranks: bytes that the parts are to suit, while so many ranks upload as much; None: the largest parts.
        part_size: bytes of a part, or more where S3's limit on parts requires it.
        isolated: whether an object that fails leaves the others alone: there is another place for it.

    Use as a context manager. An exception that leaves it cancels what is under way, aborts every open multipart upload
    and deletes the objects already completed. In any case all threads have ended afterwards.
    """

    def __init__(
        self, store: Bucket, *, total: int | None = None, ranks: int = 1, part_size: int | None = None,
        isolated: bool = False,
    ) -> None:  # fmt: skip
        settings = store.settings
        self.store = store.within(store.limit.shared(settings.stall_timeout))
        if total is not None and settings.part_size == "auto":
            width = store.known.width("upload")
            likely = width.connections  # or more, where cores are not busy before
            if width.known_until == -math.inf:
                likely = max(likely, min(MANY, 2 * likely))
            part_size = multipart.plan_part_size(
                total, connections=min(likely, settings.max_connections), ranks=ranks, most=settings.max_part_size,
                requests_per_second=multipart.PUTS_PER_SECOND,
            )  # fmt: skip
        self.part_size = part_size or settings.max_part_size
        self.chunk_size = min(self.part_size, settings.max_part_size)
        self.isolated = isolated
        self.cancel = threading.Event()
        self.tuning = Tuning(
            store.known, "upload", resize=lambda count: self._workers.resize(count),
            is_busy=lambda: self._workers.is_full and not self.cancel.is_set(), most=settings.max_connections,
        )  # fmt: skip
        self.in_flight = self.tuning.connections + WAITING_PARTS
        self._workers = Workers(self.tuning.connections, "dcp_s3-upload", waiting=WAITING_PARTS)
        self._lock = threading.Lock()
        self._open: set[_Upload] = set()
        self._all: list[_Upload] = []
        self._completed: list[str] = []
        self._copying = threading.Semaphore(multipart.COPIES_AT_ONCE)
        self.unclean: set[str] = set()
        """Keys with multipart uploads that may have stayed open."""

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.stop()
        self._workers.close()
        if kind is not None:
            store = self.store.within(self.store.limit.for_cleanup())
            for upload in list(self._open):
                self._abort(upload, store)
            try:
                delete(store, map(DeleteTarget, self._completed))
            except errors.StorageError as failure:
                logger.warning("objects of a failed save are left for pruning: %s", failure)
        for upload in self._all:  # errors have tracebacks, which hold memory
            upload.error, upload.pieces = None, []
            upload.parts.clear()
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
        part_size = part_size or multipart.choose_part_size(size, self.part_size)
        limit = replace(self.store.limit, cancel=threading.Event() if self.isolated else self.cancel)
        if self.isolated:  # its stall ends this try, not the others
            limit = replace(limit, progress=Progress(self.store.settings.stall_timeout))
        if last_resort:  # only the deadline bounds it
            limit = replace(limit, patience=None, hang=None if limit.deadline is None else limit.deadline.seconds)
            with self._lock:
                failed = [each for each in self._open if each.key == key]
            for each in failed:
                wait(each.parts)
                self._abort(each, self.store)
        upload = _Upload(key, self.store.within(limit), limit.cancel or self.cancel)
        with self._lock:
            self._open.add(upload)
            self._all.append(upload)
            if self.cancel.is_set():
                upload.cancel.set()
        try:
            return self._put(upload, pieces, part_size)
        except (errors.TransferError, Cancelled) as error:
            if not self.isolated:
                raise
            upload.cancel.set()
            refusal = upload.error or error
            # They have pieces that were not sent, and a future that has the error: a cycle.
            traceback.clear_frames(error.__traceback__)
        # Nor must these live on in the error's traceback or its context.
        upload.pieces = []
        del pieces
        try:
            raise refusal
        finally:
            del refusal  # its traceback has this frame: no cycle

    def _put(self, upload: _Upload, pieces: Iterable[Piece], part_size: int) -> StreamedObject:
        """Send the pieces, split where parts end; they have their CRCs afterwards."""
        submit, filled = functools.partial(self._workers.submit, self._send, upload, cancel=upload.cancel), 0
        for piece in pieces:
            room = part_size - filled
            for part in piece.split(room, part_size) if piece.size > room else (piece,):
                if part.size and filled == part_size:
                    if not upload.parts:
                        upload.upload_id = multipart.create(upload.store, upload.key)
                        self.tuning.begin()  # with as many connections as the first answer suggests
                    upload.parts.append(submit(upload.pieces, len(upload.parts) + 1))
                    upload.pieces, filled = [], 0
                upload.pieces.append(part)
                filled += part.size
        if upload.pieces or not upload.parts:
            upload.parts.append(submit(upload.pieces, len(upload.parts) + 1))
            upload.pieces = []
        sent = [part.result() for part in upload.parts]
        size = sum(size for _, _, size in sent)
        crc = None if sent[0][1] is None else combine_crc64nvme((crc, size) for _, crc, size in sent if crc is not None)
        if upload.upload_id:
            etags = [etag for etag, _, _ in sent]
            multipart.complete(upload.store, upload.key, upload.upload_id, etags, size=size, crc=crc)
            upload.upload_id = ""
        with self._lock:
            self._open.discard(upload)
            self._completed.append(upload.key)
        return StreamedObject(size, crc)

    def _send(self, upload: _Upload, pieces: list[Piece], number: int) -> tuple[str, int | None, int]:
        """Send a part, or the whole object if there is no multipart upload. The memory of the pieces is released."""
        store, key, size = upload.store, upload.key, sum(piece.size for piece in pieces)
        settings, patience, started = store.settings, store.limit.patience if self.isolated else None, time.monotonic()
        body = GatherBody(  # the views in no variable: an error's traceback would keep their memory
            [piece.view for piece in pieces if piece.view is not None], size, patience, self.tuning.moved
        )
        try:
            if upload.cancel.is_set():
                raise Cancelled
            if number > multipart.MAX_PARTS:
                raise errors.StorageError(
                    f"s3://{store.name}/{key} became larger than planned: it needs more than {multipart.MAX_PARTS} "
                    f"parts of {size} bytes. Remedy: raise DCP_S3_PART_SIZE",
                    bucket=store.name, key=key, operation="UploadPart",
                )  # fmt: skip
            arguments: dict[str, Any] = {"Key": key, "Body": body}
            etag, crc = "", None
            if settings.checksum != "none":
                crc = combine_crc64nvme((piece.checksum(), piece.size) for piece in pieces)
                arguments["ChecksumCRC64NVME"] = encode_crc(crc)
            if upload.upload_id:
                arguments |= {"UploadId": upload.upload_id, "PartNumber": number}
                answer = request_with_checksum(store, "UploadPart", key, arguments, data=True)
                etag = multipart.expect_text(store, "UploadPart", key, answer.get("ETag"))
            else:
                arguments |= creation_arguments(settings, data=True)
                request_with_checksum(store, "PutObject", key, arguments, data=True)
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
            body.views = ()
            for piece in pieces:
                piece.view = None
        with self._lock:
            self.sent += size
        seconds = time.monotonic() - started - body.waited
        if upload.upload_id and patience is not None and seconds > patience:
            upload.error = errors.TransferError(
                f"S3 is slow: a part of {size} bytes took {seconds:.1f} s, more than {patience:g} s",
                bucket=store.name, key=key, operation="UploadPart",
            )  # fmt: skip
            upload.cancel.set()
        return etag, crc, size

    def copy(self, key: str, ranges: Sequence[CopyRange], crc: int) -> bool:
        """See `Batch.copy`. S3 copies beside what is sent."""
        with self._lock:
            self._completed.append(key)  # before: S3's answer may be lost
        store = self.store.within(replace(self.store.limit, cancel=self.cancel))
        return multipart.copy_ranges(
            store, key, ranges, crc, slots=self._copying, moved=self._copied, stays_open=self.unclean.add
        )

    def _copied(self, size: int) -> None:
        with self._lock:
            self.sent += size

    def stop(self) -> None:
        self.cancel.set()
        with self._lock:
            for upload in self._open:
                upload.cancel.set()

    def _abort(self, upload: _Upload, store: Bucket) -> None:
        """Abort its multipart upload, if one was created, through ``store``. No part may still be under way.

        Errors are logged: another one is on its way to the user, and `prune` collects what is left.
        """
        with self._lock:
            self._open.discard(upload)
        upload_id, upload.upload_id = upload.upload_id, ""
        if upload_id and not multipart.abort_quietly(store, upload.key, upload_id):
            self.unclean.add(upload.key)
