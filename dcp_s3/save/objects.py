"""Writes one rank's plan: buckets become objects, in parallel."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.storage import WriteResult

from dcp_s3.checksum import crc_hex
from dcp_s3.errors import DeadlineExceededError, SpillError, TransferError
from dcp_s3.format.control_files import ObjectEntry
from dcp_s3.format.layout import data_object
from dcp_s3.limit import Cancelled
from dcp_s3.s3.connections import connections_of, likely_connections
from dcp_s3.s3.parts import PUTS_PER_SECOND, Piece, choose_part_size, plan_part_size
from dcp_s3.s3.store import S3Store
from dcp_s3.s3.upload import WAITING_PARTS, ObjectUpload, UploadedObject, Uploader
from dcp_s3.save.items import ItemWriter, WrittenItem
from dcp_s3.save.plan import OBJECTS_PER_RANK, WriteBucket
from dcp_s3.spill.session import SpillSession
from dcp_s3.torch_private import WriterTransforms
from dcp_s3.tracebacks import without_tracebacks
from dcp_s3.units import format_size
from dcp_s3.url import CheckpointURL
from dcp_s3.workers import Workers

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ItemWriteResult(WriteResult):
    """torch's WriteResult. The first item of each object also carries the object's entry to the coordinator.

    An attachment is one, too, without storage data.
    """

    object_entry: ObjectEntry | None = None
    """The object's entry, in the result of its first item; None in the others."""
    spilled: bool = False
    """Whether the object is on a local disk, not on S3."""


@dataclass(frozen=True)
class ObjectNames:
    """The names of one rank's data objects in one save."""

    url: CheckpointURL
    rank: int
    nonce: str

    def relative_path(self, number: int) -> str:
        """Path of object ``number``, relative to the checkpoint."""
        return data_object(self.rank, number, self.nonce)

    def key(self, number: int) -> str:
        """Key of object ``number``."""
        return self.url.key(self.relative_path(number))


def write_buckets(
    store: S3Store,
    buckets: Sequence[WriteBucket],
    planner: SavePlanner,
    transforms: WriterTransforms,
    names: ObjectNames,
    session: SpillSession | None = None,
    *,
    ranks: int = 1,
) -> list[WriteResult]:
    """Write every bucket as one object. A thread per bucket resolves its items; a shared pool sends the parts.

    All or nothing: on any failure, at the deadline and on KeyboardInterrupt, everything is cancelled, multipart uploads
    are aborted and objects that this call had completed are deleted before the error is raised.

    Args:
        store: the S3 store.
        buckets: buckets of the plan.
        planner: resolves the items.
        transforms: torch's stream extensions.
        names: names of the objects.
        session: takes the objects that S3 refuses, or all objects with local durability. None: no spilling.
        ranks: number of ranks that write at the same time.

    Returns:
        One result per item, and one per attachment, without storage data.

    Raises:
        DeadlineExceededError: the deadline of ``store`` has passed.
        StorageError, SaveProtocolError
    """
    if not buckets:
        return []
    started = time.monotonic()
    device: int | None = None
    if torch.accelerator.is_available() and _is_initialized():
        torch.accelerator.synchronize()  # the threads below do not wait for work on the caller's stream
        device = torch.accelerator.current_device_index()
    settings, connections = store.settings, connections_of(store, "upload")
    part_size = settings.part_size
    if part_size == "auto":
        total = sum(planned.size for planned in buckets)
        part_size = plan_part_size(
            total, connections=likely_connections(store, "upload"), ranks=ranks, most=settings.max_part_size,
            requests_per_second=PUTS_PER_SECOND,
        )  # fmt: skip
    chunk_size = min(part_size, settings.max_part_size)
    item_writer = ItemWriter(
        planner,
        transforms,
        chunk_size=chunk_size,
        # Each connection sends a part, a few parts wait, and each bucket fills one.
        device_memory=(connections + WAITING_PARTS + OBJECTS_PER_RANK) * chunk_size,
    )
    uploader = Uploader(store, part_size=part_size, isolated=session is not None)
    try:
        with uploader:
            targets = _Targets(item_writer, names, uploader, session)
            written = _write(buckets, targets, device)
            if session is not None:
                session.unclean.update(uploader.unclean)
                if session.spilled:
                    try:
                        session.seal()
                    except SpillError as error:
                        written = targets.withdraw(error, session, buckets, written)
    except DeadlineExceededError as error:
        if store.limit.deadline is None:
            raise
        total = sum(planned.size for planned in buckets)
        on_disk = f", {format_size(session.size)} on its disk" if session is not None else ""
        raise store.limit.deadline.error(
            f"the save to {names.url}",
            f"of about {format_size(total)} of rank {names.rank}, {format_size(uploader.sent)} were on S3{on_disk}",
        ) from error
    finally:
        if session is not None:
            session.unclean.update(uploader.unclean)
    results: list[WriteResult] = [result for bucket in written for result in bucket]
    seconds = time.monotonic() - started
    logger.debug("wrote %d items in %d objects in %.3f s", len(results), len(buckets), seconds)
    return results


def _write(buckets: Sequence[WriteBucket], targets: _Targets, device: int | None) -> list[list[ItemWriteResult]]:
    """Write all buckets, each in its own thread."""
    producers = Workers(len(buckets), "dcp_s3-bucket")
    uploader = targets.uploader

    def write(number: int, planned: WriteBucket) -> list[ItemWriteResult]:
        if device is not None:
            torch.accelerator.set_device_index(device)  # a new thread would make a context on device 0
        return targets.write(number, planned)

    try:
        futures = [producers.submit(write, n, planned) for n, planned in enumerate(buckets)]
        deadline = uploader.store.limit.deadline
        done, pending = wait(futures, None if deadline is None else deadline.left, FIRST_EXCEPTION)
        if any(future.exception() for future in done):
            uploader.stop()
        elif pending and deadline is not None:
            raise deadline.error("the upload")
        return [future.result() for future in futures]
    except Cancelled:
        raise _cause(uploader, futures) from None
    except BaseException:
        uploader.stop()
        raise
    finally:
        producers.close()


def refused_by_both(refusal: TransferError, spill: SpillError) -> TransferError:
    """The error for an object that neither S3 nor the disk takes."""
    return TransferError(
        f"{refusal}. Nor can it be spilled: {spill}",
        bucket=refusal.bucket,
        key=refusal.key,
        operation=refusal.operation,
        attempts=refusal.attempts,
    )


class _Targets:
    """Writes objects to S3 or to disk."""

    def __init__(
        self, item_writer: ItemWriter, names: ObjectNames, uploader: Uploader, session: SpillSession | None
    ) -> None:
        self._item_writer = item_writer
        self._names = names
        self.uploader = uploader
        self._session = session

    def write(self, number: int, planned: WriteBucket) -> list[ItemWriteResult]:
        """Write one bucket."""
        session = self._session
        if session is None:
            return self._upload(self._start(number, planned), number, planned)
        if session.local:
            try:
                return self._spill(session, number, planned, "DCP_S3_DURABILITY=local")
            except SpillError as error:
                logger.warning("an object goes straight to S3: %s", error)
                return self._upload_after(error, number, planned)
        upload = self._start(number, planned)
        outcome = self._try_upload(upload, number, planned)
        if not isinstance(outcome, TransferError):
            return outcome
        upload.leave(abort_on_failure=True)  # the drain continues with the parts that S3 has
        try:
            return self._spill(session, number, planned, str(outcome))
        except SpillError as error:
            logger.warning("an object goes to S3, however long that takes: %s; %s", outcome, error)
            return self._upload_after(error, number, planned, upload)

    def withdraw(
        self,
        error: SpillError,
        session: SpillSession,
        buckets: Sequence[WriteBucket],
        written: Sequence[list[ItemWriteResult]],
    ) -> list[list[ItemWriteResult]]:
        """Upload the buckets that were spilled, after the disk had no room for the journal."""
        logger.warning("what was spilled goes to S3: %s", error)
        results = [
            self._upload_after(error, number, planned) if any(each.spilled for each in of_bucket) else of_bucket
            for number, (planned, of_bucket) in enumerate(zip(buckets, written, strict=True))
        ]
        session.withdraw()
        return results

    def _try_upload(
        self, upload: ObjectUpload, number: int, planned: WriteBucket
    ) -> list[ItemWriteResult] | TransferError:
        """Upload, or return why S3 refused. The error has no traceback, which would hold the state being saved."""
        try:
            return self._upload(upload, number, planned)
        except (TransferError, Cancelled) as error:
            refusal = upload.error or error
            if self.uploader.cancel.is_set() or not isinstance(refusal, TransferError):
                raise refusal from None
            without_tracebacks(refusal)
            without_tracebacks(error)
            return refusal

    def _start(self, number: int, planned: WriteBucket, *, last_resort: bool = False) -> ObjectUpload:
        return self.uploader.start(self._names.key(number), planned.size, last_resort=last_resort)

    def _upload(self, upload: ObjectUpload, number: int, planned: WriteBucket) -> list[ItemWriteResult]:
        if planned.attachment is not None:
            upload.write(Piece.of(memoryview(planned.attachment.data)))
        written = [self._item_writer.write(item, upload) for item in planned.items]
        uploaded = upload.finish()
        return self._results(number, planned, written, self._entry(number, planned, uploaded), spilled=False)

    def _upload_after(
        self, spill: SpillError, number: int, planned: WriteBucket, failed: ObjectUpload | None = None
    ) -> list[ItemWriteResult]:
        """Upload an object that could not be spilled, however slow S3 is; go on with an upload that failed."""
        upload = self._start(number, planned, last_resort=True)
        if failed is not None:
            upload.resume_failed(failed)
        try:
            return self._upload(upload, number, planned)
        except (TransferError, Cancelled) as error:
            refusal = upload.error or error
            if isinstance(refusal, TransferError):
                raise refused_by_both(refusal, spill) from refusal
            raise refusal from None

    def _spill(self, session: SpillSession, number: int, planned: WriteBucket, reason: str) -> list[ItemWriteResult]:
        part_size = choose_part_size(planned.size, self.uploader.part_size)
        file = session.open(number, self._names.key(number), planned.size)
        try:
            written = []
            if planned.attachment is not None:
                file.write(Piece.of(memoryview(planned.attachment.data)))
            for planned_item in planned.items:
                self._check_cancelled()
                written.append(self._item_writer.write(planned_item, file))
            self._check_cancelled()
            uploaded = file.finish()
        except BaseException:
            file.abort()
            raise
        if self.uploader.store.settings.checksum == "none":
            for item in written:
                item.forget_checksum()
        entry = self._entry(number, planned, uploaded)
        session.add(number, entry, uploaded, part_size, reason)
        return self._results(number, planned, written, entry, spilled=True)

    def _check_cancelled(self) -> None:
        if self.uploader.cancel.is_set():
            raise Cancelled

    def _entry(self, number: int, planned: WriteBucket, uploaded: UploadedObject) -> ObjectEntry:
        if planned.attachment is not None:
            return planned.attachment.entry(self._names.relative_path(number))
        crc = uploaded.crc64nvme
        if crc is None or self.uploader.store.settings.checksum == "none":
            return ObjectEntry(self._names.relative_path(number), uploaded.size)
        return ObjectEntry(self._names.relative_path(number), uploaded.size, crc_hex(crc))

    def _results(
        self, number: int, planned: WriteBucket, written: Sequence[WrittenItem], entry: ObjectEntry, *, spilled: bool
    ) -> list[ItemWriteResult]:
        path = self._names.relative_path(number)
        if planned.attachment is not None:
            return [ItemWriteResult(MetadataIndex(planned.attachment.name), entry.size, None, entry, spilled)]
        return [
            ItemWriteResult(w.item.index, w.length, w.storage_info(path), None if position else entry, spilled)
            for position, w in enumerate(written)
        ]


def _cause(uploader: Uploader, futures: Sequence[Future[list[ItemWriteResult]]]) -> BaseException:
    """The failure behind a cancellation."""
    errors = [uploader.error, *(future.exception() for future in futures)]
    return next((e for e in errors if e is not None and not isinstance(e, Cancelled)), Cancelled())


def _is_initialized() -> bool:
    """Whether this process has used the accelerator. A process only for checkpoints should not initialize it."""
    accelerator = torch.accelerator.current_accelerator()
    module = None if accelerator is None else torch.get_device_module(accelerator)
    return bool(getattr(module, "is_initialized", lambda: True)())
