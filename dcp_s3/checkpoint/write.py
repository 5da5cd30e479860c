"""The write of one rank's plan: buckets to objects, in parallel."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.storage import WriteResult

from dcp_s3.checkpoint._torch import WriterTransforms
from dcp_s3.checkpoint.items import ItemWriter
from dcp_s3.checkpoint.planning import WriteBucket
from dcp_s3.format.layout import data_object
from dcp_s3.format.manifest import ObjectEntry
from dcp_s3.transport.bucket import Bucket
from dcp_s3.transport.checksum import crc_hex
from dcp_s3.transport.retry import Cancelled
from dcp_s3.transport.upload import WAITING_PARTS, Uploader
from dcp_s3.transport.workers import Workers
from dcp_s3.url import CheckpointURL

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ItemWriteResult(WriteResult):
    """torch's WriteResult; the first item of each object also tells the coordinator about the object."""

    object_entry: ObjectEntry | None = None


@dataclass(frozen=True)
class ObjectNames:
    """How the data objects of one rank in one save are named."""

    url: CheckpointURL
    rank: int
    nonce: str
    prefix_spread: int

    def relative_path(self, number: int) -> str:
        """Of object ``number``, relative to the checkpoint."""
        return data_object(self.rank, number, self.nonce, prefix_spread=self.prefix_spread)


def write_buckets(
    bucket: Bucket,
    buckets: Sequence[WriteBucket],
    planner: SavePlanner,
    transforms: WriterTransforms,
    names: ObjectNames,
) -> list[WriteResult]:
    """Upload every bucket as one object; a thread per bucket resolves its items, a shared pool sends the parts.

    All or nothing: on any failure, and on KeyboardInterrupt, everything is cancelled, multipart uploads are
    aborted and objects of this call that were complete are deleted before the error goes on.

    Returns:
        One result per item.
    """
    if not buckets:
        return []
    started = time.monotonic()
    device: int | None = None
    if torch.accelerator.is_available() and _is_initialized():
        torch.accelerator.synchronize()  # the threads below do not see what the caller's stream has still to do
        device = torch.accelerator.current_device_index()
    settings = bucket.settings
    item_writer = ItemWriter(
        planner,
        transforms,
        chunk_size=settings.part_size,
        # Every connection sends a part, a few wait, and every bucket fills one.
        device_memory=(settings.concurrency + WAITING_PARTS + settings.buckets_per_rank) * settings.part_size,
    )

    def write_bucket(number: int, planned: WriteBucket, uploader: Uploader) -> list[WriteResult]:
        if device is not None:
            torch.accelerator.set_device_index(device)  # a new thread would make a context on device 0
        path = names.relative_path(number)
        upload = uploader.start(names.url.key(path), planned.size)
        written = [item_writer.write(item, upload) for item in planned.items]
        uploaded = upload.finish()
        entry = ObjectEntry(path, uploaded.size, None if uploaded.crc64nvme is None else crc_hex(uploaded.crc64nvme))
        return [
            ItemWriteResult(w.item.index, w.length, w.storage_info(path), entry if position == 0 else None)
            for position, w in enumerate(written)
        ]

    with Uploader(bucket) as uploader:
        producers = Workers(len(buckets), "dcp_s3-bucket")
        try:
            futures = [producers.submit(write_bucket, n, planned, uploader) for n, planned in enumerate(buckets)]
            wait(futures, return_when=FIRST_EXCEPTION)
            if any(future.done() and future.exception() for future in futures):
                uploader.cancel.set()
            results = [result for future in futures for result in future.result()]
        except Cancelled:
            raise _cause(uploader, futures) from None
        except BaseException:
            uploader.cancel.set()
            raise
        finally:
            producers.close()
    seconds = time.monotonic() - started
    logger.debug("wrote %d items in %d objects in %.3f s", len(results), len(buckets), seconds)
    return results


def _cause(uploader: Uploader, futures: Sequence[Future[list[WriteResult]]]) -> BaseException:
    """The failure behind a cancellation."""
    errors = [uploader.error, *(future.exception() for future in futures)]
    return next((e for e in errors if e is not None and not isinstance(e, Cancelled)), Cancelled())


def _is_initialized() -> bool:
    """Whether this process has used the accelerator; a process for checkpoints only should not begin to."""
    accelerator = torch.accelerator.current_accelerator()
    module = None if accelerator is None else torch.get_device_module(accelerator)
    return bool(getattr(module, "is_initialized", lambda: True)())
