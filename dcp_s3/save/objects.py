"""Writes one rank's plan: buckets become objects, in parallel."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.storage import WriteResult

from dcp_s3.errors import DeadlineExceededError
from dcp_s3.format.control_files import ObjectEntry
from dcp_s3.format.layout import data_object
from dcp_s3.limit import Cancelled, Deadline
from dcp_s3.memory import crc_hex
from dcp_s3.save.items import ItemSource, ObjectPieces
from dcp_s3.save.plan import OBJECTS_PER_RANK, WriteBucket
from dcp_s3.save.split import Rows
from dcp_s3.store import Batch, Store
from dcp_s3.torch_private import WriterTransforms
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
    rows: ChunkStorageMetadata | None = None
    """Place of the item in the tensor, if it is a part of a planned chunk."""


class ObjectNames(NamedTuple):
    """What the data objects of one rank in one save are named by."""

    url: CheckpointURL
    rank: int
    nonce: str


def write_buckets(
    store: Store,
    buckets: Sequence[WriteBucket],
    planner: SavePlanner,
    transforms: WriterTransforms,
    names: ObjectNames,
    *,
    ranks: int = 1,
    watch: Callable[[Batch], object] = lambda _: None,
) -> list[WriteResult]:
    """Write every bucket as one object. A thread per bucket resolves its items; the store sends them.

    All or nothing: on any failure, at the deadline and on KeyboardInterrupt, everything is cancelled, multipart uploads
    are aborted and objects that this call had completed are deleted before the error is raised.

    ``ranks`` is how many write at the same time; ``watch`` is called with what knows how many bytes were sent. Returns
    one result per item, and one per attachment, without storage data.
    """
    if not buckets:
        return []
    started, total, deadline = time.monotonic(), sum(planned.size for planned in buckets), store.limit.deadline
    device: int | None = None
    if torch.accelerator.is_available() and _is_initialized():
        torch.accelerator.synchronize()  # the threads below do not wait for work on the caller's stream
        device = torch.accelerator.current_device_index()
    paths = [data_object(names.rank, number, names.nonce) for number in range(len(buckets))]
    keys = [names.url.key(path) for path in paths]
    batch = store.batch(total=total, ranks=ranks, keys=keys)
    watch(batch)
    # Besides what the store holds, each bucket fills a piece.
    device_memory = (batch.in_flight + OBJECTS_PER_RANK) * batch.chunk_size
    source = ItemSource(planner, transforms, batch.chunk_size, device_memory)

    def write(number: int) -> list[WriteResult]:
        if device is not None:
            torch.accelerator.set_device_index(device)  # a new thread would make a context on device 0
        bucket, path = buckets[number], paths[number]
        pieces = ObjectPieces(source, bucket)
        stored = batch.put_stream(keys[number], bucket.size, pieces)
        if bucket.attachment is not None:
            entry: ObjectEntry = bucket.attachment.entry(path)
            return [ItemWriteResult(MetadataIndex(bucket.attachment.name), entry.size, None, entry, stored.spilled)]
        crc = stored.crc64nvme
        entry = ObjectEntry(path, stored.size, None if crc is None else crc_hex(crc))
        return [
            ItemWriteResult(
                each.item.stored_index if isinstance(each.item, Rows) else each.item.index,
                each.length,
                each.storage_info(path, checksum=crc is not None),
                None if position else entry,
                stored.spilled,
                each.item.chunk if isinstance(each.item, Rows) else None,
            )
            for position, each in enumerate(pieces.written)
        ]

    try:
        with batch:
            written = _write_all(batch, deadline, range(len(buckets)), write)
            batch.settle()
    except DeadlineExceededError as error:
        if deadline is None or error.setting != deadline.setting:
            raise
        raise deadline.error(
            f"the save to {names.url}", f"of about {format_size(total)} of rank {names.rank}, {batch.progress}"
        ) from error
    seconds = time.monotonic() - started
    logger.debug("wrote about %d bytes in %d objects in %.3f s", total, len(buckets), seconds)
    return [result for results in written for result in results]


def _write_all(
    batch: Batch,
    deadline: Deadline | None,
    numbers: Sequence[int],
    write: Callable[[int], list[WriteResult]],
) -> list[list[WriteResult]]:
    """Write these buckets, each in its own thread."""
    producers = Workers(len(numbers), "dcp_s3-bucket")
    try:
        futures: list[Future[list[WriteResult]]] = [producers.submit(write, number) for number in numbers]
        done, pending = wait(futures, None if deadline is None else deadline.left, FIRST_EXCEPTION)
        if any(future.exception() for future in done):
            batch.stop()
        elif pending and deadline is not None:
            raise deadline.error("the upload")
        return [future.result() for future in futures]
    except Cancelled as cancelled:  # raise what has cancelled the others
        errors = [batch.error, *(future.exception() for future in futures)]
        raise next((e for e in errors if e is not None and not isinstance(e, Cancelled)), cancelled) from None
    except BaseException:
        batch.stop()
        raise
    finally:
        producers.close()


def _is_initialized() -> bool:
    """Whether this process has used the accelerator. A process only for checkpoints should not initialize it."""
    accelerator = torch.accelerator.current_accelerator()
    module = None if accelerator is None else torch.get_device_module(accelerator)
    return bool(getattr(module, "is_initialized", lambda: True)())
