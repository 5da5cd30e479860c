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
from dcp_s3.limit import Cancelled, Deadline
from dcp_s3.memory import Piece
from dcp_s3.s3.parts import choose_part_size
from dcp_s3.s3.store import S3Store
from dcp_s3.s3.upload import Uploader
from dcp_s3.save.items import ItemWriter, ObjectPieces
from dcp_s3.save.plan import OBJECTS_PER_RANK, WriteBucket
from dcp_s3.spill.session import SpillSession
from dcp_s3.store import Batch, Store, StreamedObject
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
    store: Store,
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
        store: the store.
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
    total = sum(planned.size for planned in buckets)
    batch: Batch
    if session is None:
        batch = store.batch(total=total, ranks=ranks)
    else:
        assert isinstance(store, S3Store)  # noqa: S101
        batch = Uploader.planned(store, total=total, ranks=ranks, isolated=True)
    item_writer = ItemWriter(
        planner,
        transforms,
        chunk_size=batch.chunk_size,
        # Besides what the store holds, each bucket fills a piece.
        device_memory=(batch.in_flight + OBJECTS_PER_RANK) * batch.chunk_size,
    )
    try:
        with batch:
            targets = _Targets(item_writer, names, batch, session)
            written = _write(buckets, targets, device, store.limit.deadline)
            if session is not None:
                session.unclean.update(batch.unclean)
                if session.spilled:
                    try:
                        session.seal()
                    except SpillError as error:
                        written = targets.withdraw(error, session, buckets, written)
    except DeadlineExceededError as error:
        if store.limit.deadline is None:
            raise
        on_disk = f", {format_size(session.size)} on its disk" if session is not None else ""
        raise store.limit.deadline.error(
            f"the save to {names.url}",
            f"of about {format_size(total)} of rank {names.rank}, {format_size(batch.sent)} were on S3{on_disk}",
        ) from error
    finally:
        if session is not None:
            session.unclean.update(batch.unclean)
    results: list[WriteResult] = [result for bucket in written for result in bucket]
    seconds = time.monotonic() - started
    logger.debug("wrote %d items in %d objects in %.3f s", len(results), len(buckets), seconds)
    return results


def _write(
    buckets: Sequence[WriteBucket], targets: _Targets, device: int | None, deadline: Deadline | None
) -> list[list[ItemWriteResult]]:
    """Write all buckets, each in its own thread."""
    producers = Workers(len(buckets), "dcp_s3-bucket")
    batch = targets.batch

    def write(number: int, planned: WriteBucket) -> list[ItemWriteResult]:
        if device is not None:
            torch.accelerator.set_device_index(device)  # a new thread would make a context on device 0
        return targets.write(number, planned)

    try:
        futures = [producers.submit(write, n, planned) for n, planned in enumerate(buckets)]
        done, pending = wait(futures, None if deadline is None else deadline.left, FIRST_EXCEPTION)
        if any(future.exception() for future in done):
            batch.stop()
        elif pending and deadline is not None:
            raise deadline.error("the upload")
        return [future.result() for future in futures]
    except Cancelled:
        raise _cause(batch, futures) from None
    except BaseException:
        batch.stop()
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

    def __init__(self, item_writer: ItemWriter, names: ObjectNames, batch: Batch, session: SpillSession | None) -> None:
        self._item_writer = item_writer
        self._names = names
        self.batch = batch
        self._session = session

    def write(self, number: int, planned: WriteBucket) -> list[ItemWriteResult]:
        """Write one bucket."""
        session = self._session
        if session is None:
            return self._put(number, planned)
        if session.local:
            try:
                return self._spill(session, number, planned, "DCP_S3_DURABILITY=local")
            except SpillError as error:
                logger.warning("an object goes straight to S3: %s", error)
                return self._upload_after(error, number, planned)
        outcome = self._try_upload(number, planned)
        if not isinstance(outcome, TransferError):
            return outcome
        try:
            return self._spill(session, number, planned, str(outcome))
        except SpillError as error:
            logger.warning("an object goes to S3, however long that takes: %s; %s", outcome, error)
            return self._upload_after(error, number, planned)

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

    def _try_upload(self, number: int, planned: WriteBucket) -> list[ItemWriteResult] | TransferError:
        """Upload, or return why S3 refused. The error has no traceback, which would hold the state being saved."""
        try:
            return self._put(number, planned)
        except TransferError as error:
            if self.batch.cancel.is_set():
                raise
            without_tracebacks(error)
            return error

    def _pieces(self, planned: WriteBucket) -> ObjectPieces | list[Piece]:
        if planned.attachment is not None:
            return [Piece.of(memoryview(planned.attachment.data))]
        return ObjectPieces(self._item_writer, planned.items)

    def _put(self, number: int, planned: WriteBucket, *, last_resort: bool = False) -> list[ItemWriteResult]:
        pieces, key = self._pieces(planned), self._names.key(number)
        if last_resort:
            assert isinstance(self.batch, Uploader)  # noqa: S101
            stored = self.batch.put_stream(key, planned.size, pieces, last_resort=True)
        else:
            stored = self.batch.put_stream(key, planned.size, pieces)
        return self._results(planned, pieces, self._entry(number, planned, stored), spilled=False)

    def _upload_after(self, spill: SpillError, number: int, planned: WriteBucket) -> list[ItemWriteResult]:
        """Upload an object that could not be spilled, however slow S3 is; go on with an upload that failed."""
        try:
            return self._put(number, planned, last_resort=True)
        except TransferError as refusal:
            raise refused_by_both(refusal, spill) from refusal

    def _spill(self, session: SpillSession, number: int, planned: WriteBucket, reason: str) -> list[ItemWriteResult]:
        assert isinstance(self.batch, Uploader)  # noqa: S101
        part_size = choose_part_size(planned.size, self.batch.part_size)
        file = session.open(number, planned.size)
        pieces = self._pieces(planned)
        try:
            for piece in pieces:
                self._check_cancelled()
                file.write(piece)
            self._check_cancelled()
            stored = file.finish()
        except BaseException:
            file.abort()
            raise
        entry = self._entry(number, planned, stored, checksum=self.batch.store.settings.checksum != "none")
        session.add(number, entry, stored, part_size, reason)
        return self._results(planned, pieces, entry, spilled=True)

    def _check_cancelled(self) -> None:
        if self.batch.cancel.is_set():
            raise Cancelled

    def _entry(
        self, number: int, planned: WriteBucket, stored: StreamedObject, *, checksum: bool = True
    ) -> ObjectEntry:
        path, crc = self._names.relative_path(number), stored.crc64nvme
        if planned.attachment is not None:
            return planned.attachment.entry(path)
        return ObjectEntry(path, stored.size, None if crc is None or not checksum else crc_hex(crc))

    def _results(
        self, planned: WriteBucket, pieces: ObjectPieces | list[Piece], entry: ObjectEntry, *, spilled: bool
    ) -> list[ItemWriteResult]:
        if planned.attachment is not None:
            return [ItemWriteResult(MetadataIndex(planned.attachment.name), entry.size, None, entry, spilled)]
        checksum = entry.crc64nvme is not None
        return [
            ItemWriteResult(
                w.item.index, w.length, w.storage_info(entry.path, checksum=checksum), None if n else entry, spilled
            )
            for n, w in enumerate(pieces.written if isinstance(pieces, ObjectPieces) else ())
        ]


def _cause(batch: Batch, futures: Sequence[Future[list[ItemWriteResult]]]) -> BaseException:
    """The failure behind a cancellation."""
    errors = [batch.error, *(future.exception() for future in futures)]
    return next((e for e in errors if e is not None and not isinstance(e, Cancelled)), Cancelled())


def _is_initialized() -> bool:
    """Whether this process has used the accelerator. A process only for checkpoints should not initialize it."""
    accelerator = torch.accelerator.current_accelerator()
    module = None if accelerator is None else torch.get_device_module(accelerator)
    return bool(getattr(module, "is_initialized", lambda: True)())
