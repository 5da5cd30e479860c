"""The read of one rank's plan: ranged GETs in parallel, straight into the destination tensors."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from concurrent.futures import as_completed

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner

from dcp_s3 import errors
from dcp_s3.checksum import crc_hex
from dcp_s3.collector import collect_young, collector_paused
from dcp_s3.format.safe_items import check_item
from dcp_s3.load.aliases import read_in_turn
from dcp_s3.load.archive_heads import look, plan_probes
from dcp_s3.load.dtypes import warn_of_narrowing
from dcp_s3.load.item_transfer import ItemTransfer
from dcp_s3.load.order import Turns, in_batches
from dcp_s3.load.placement import Buffer, Reception
from dcp_s3.load.plan import Extent, ReadRequest, plan_requests
from dcp_s3.load.prepare import TransferFactory
from dcp_s3.s3 import retry
from dcp_s3.s3.download import Target, fetch_into
from dcp_s3.s3.store import S3Store
from dcp_s3.spill.local import LocalObjects
from dcp_s3.tensor_memory import counted_as_change, synchronize_accelerator
from dcp_s3.torch_private import ReaderTransforms
from dcp_s3.units import format_size
from dcp_s3.url import CheckpointURL
from dcp_s3.workers import Workers

logger = logging.getLogger(__name__)

# A load that has fewer requests of `part_size` than twice the connections makes smaller ones, down to this many bytes.
_SMALL_REQUEST = 8 * 2**20
# Through a buffer, a request is not smaller than this.
_SMALL_BUFFER = 2**20
# Requests after which what botocore leaves behind in cycles is collected.
_COLLECT_EVERY = 100

_TOO_LATE = (FutureTimeoutError, errors.DeadlineExceededError)


class LoadExecutor:
    """Carries out one rank's load plan.

    Args:
        bucket: where the checkpoint lies.
        url: of the checkpoint.
        metadata: of the checkpoint.
        transforms: torch's stream extensions.
        local: objects that are on this host's disk.
        weights_only: refuse items that torch's weights-only unpickler refuses.
    """

    def __init__(
        self,
        bucket: S3Store,
        url: CheckpointURL,
        metadata: Metadata,
        transforms: ReaderTransforms,
        local: LocalObjects | None = None,
        *,
        weights_only: bool = True,
    ) -> None:
        self._local = local
        self._weights_only = weights_only
        self._bucket = bucket
        self._url = url
        self._factory = TransferFactory(
            url,
            metadata,
            transforms,
            allow_dtype_cast=bucket.settings.allow_dtype_cast,
            max_gap=bucket.settings.read_gap,
        )
        self._cancel = threading.Event()
        self._buffers = threading.local()
        self._pin = False
        self._turns = Turns([])

    def run(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        """Fetch every item of ``plan`` and hand it to ``planner``.

        The planner is called from this thread only.

        Raises:
            DtypeMismatchError: before anything is fetched or changed; only without ``allow_dtype_cast``.
            UnsafeItemError: before the planner sees the item.
            CorruptCheckpointError: stored bytes are missing, cut short or not what was written.
            DeadlineExceededError: the bucket's deadline has passed.
            StorageError: S3 failed for good.
        """
        with collector_paused():
            transfers = self.prepare(plan, planner)
            with counted_as_change(find_changing(transfers, planner)):
                for numbers in read_in_turn(transfers):
                    for batch in self.in_batches([transfers[number] for number in numbers]):
                        self.read(transfers, batch, planner)
        synchronize_accelerator(transfer.target for transfer in transfers)

    def prepare(self, plan: LoadPlan, planner: LoadPlanner, whole: Collection[int] = ()) -> list[ItemTransfer]:
        """What is to be done for each item. Nothing is changed, and at most heads of items are fetched.

        Args:
            plan: of this rank.
            planner: called from this thread only.
            whole: numbers of items that, unless their raw bytes' place is recorded, come as a whole.
        """
        known = len(self._factory.narrowed)  # of an earlier round of the same load
        transfers = [
            self._factory.prepare(number, item, planner, whole=number in whole)
            for number, item in enumerate(plan.items)
        ]
        self._look(transfers)
        if len(self._factory.narrowed) > known:
            warn_of_narrowing(self._factory.narrowed, str(self._url))
        by_device = {transfer.target.device: transfer.target for transfer in transfers if transfer.target is not None}
        synchronize_accelerator(by_device.values())
        self._pin = any(device.type == "cuda" for device in by_device)
        self._turns = Turns(transfers)
        return transfers

    def in_batches(self, transfers: Sequence[ItemTransfer]) -> list[list[ItemTransfer]]:
        """What to `read` one after the other, so that what is held back for its turn takes bounded memory."""
        return in_batches(transfers, self._bucket.settings.load_buffers)

    def cancel(self) -> None:
        """Let `read` and `receive` fail soon. From any thread."""
        self._cancel.set()

    def read(
        self,
        transfers: Sequence[ItemTransfer],
        chosen: Sequence[ItemTransfer],
        planner: LoadPlanner,
        *,
        threads: int | None = None,
        on_error: Callable[[BaseException], None] = lambda _: None,
    ) -> None:
        """Fetch items and hand them to the planner.

        Args:
            transfers: of all items.
            chosen: those to fetch.
            planner: called from this thread only.
            threads: requests at once; as many as the settings allow if None.
            on_error: called with what will be raised, before what is under way is cancelled because of it.
        """
        requests = self._plan(chosen)
        for transfer in chosen:
            if not transfer.extents:
                transfer.finish()
                self.commit(transfer, planner)
        if not requests:
            return
        threads = min(threads or self._bucket.settings.concurrency, len(requests))
        deadline, received = self._bucket.limit.deadline, 0
        pool = Workers(threads, "dcp_s3-download")
        try:
            inference = torch.is_inference_mode_enabled()  # a property of the thread
            futures = {pool.submit(self._fetch, request, transfers, inference): request for request in requests}
            for number, future in enumerate(as_completed(futures, None if deadline is None else deadline.left), 1):
                if number % _COLLECT_EVERY == 0:
                    collect_young()
                completed = future.result()
                received += futures[future].length
                for transfer in completed:
                    self.commit(transfer, planner)
        except BaseException as error:  # noqa: BLE001 - raised again below
            failure = error
            if deadline is not None and deadline.passed and isinstance(error, _TOO_LATE):
                total = format_size(sum(request.length for request in requests))
                failure = deadline.error(
                    f"the load of {self._url}", f"{format_size(received)} of the {total} of this rank had arrived"
                )
            try:
                on_error(failure)
                self._cancel.set()
                if failure is not error:
                    raise failure from error
                raise
            finally:
                del failure  # its traceback has this frame
        finally:
            pool.close()

    def _look(self, transfers: list[ItemTransfer]) -> None:
        """Look at items of other writers, one of each kind that is not known, and prepare these kinds anew."""
        unknown, heads = self._factory.unknown, self._factory.heads
        probes = plan_probes(heads, [item.probe for item in unknown])
        if not probes:
            return
        deadline = self._bucket.limit.deadline
        pool = Workers(min(self._bucket.settings.concurrency, len(probes)), "dcp_s3-look")
        try:
            for future in [pool.submit(look, heads, probe, self.receive) for probe in probes]:
                future.result(None if deadline is None else deadline.left)
        except BaseException as error:
            self._cancel.set()
            if deadline is not None and deadline.passed and isinstance(error, _TOO_LATE):
                raise deadline.error(f"the load of {self._url}", "nothing of this rank had arrived") from error
            raise
        finally:
            pool.close()
        for item in unknown:
            transfers[item.number] = item.prepare()

    def _plan(self, transfers: Sequence[ItemTransfer]) -> list[ReadRequest]:
        settings = self._bucket.settings
        extents = [extent for transfer in transfers for extent in transfer.extents]
        total = sum([extent.length for extent in extents])
        largest = min(settings.part_size, max(_SMALL_REQUEST, total // (2 * settings.concurrency)))
        buffered = min(largest, max(_SMALL_BUFFER, settings.load_buffers // settings.concurrency))
        if any(transfer.owned is None for transfer in transfers if transfer.extents):
            largest = buffered
        return plan_requests(
            extents,
            max_request=largest,
            max_gap=settings.read_gap,
            max_waste=settings.read_waste,
            max_shared=buffered,
        )

    def commit(self, transfer: ItemTransfer, planner: LoadPlanner) -> None:
        """Hand a tensor that is in its place to the planner; of what is no tensor, all of which it is the turn."""
        if transfer.target is not None:
            planner.commit_tensor(transfer.item, transfer.target)
            return
        for due in self._turns.take():
            self._load_bytes(due, planner)

    def _load_bytes(self, transfer: ItemTransfer, planner: LoadPlanner) -> None:
        loaded, transfer.loaded = transfer.loaded, None
        if loaded is None:
            return
        fqn, url = transfer.item.storage_index.fqn, str(self._url)
        if self._weights_only:
            check_item(loaded, fqn=fqn, url=url, verified=transfer.checked)
        try:
            planner.load_bytes(transfer.item, loaded)
        except Exception as error:
            if transfer.checked:
                raise  # the bytes are what was saved: it is for the caller to know what cannot be unpickled
            raise errors.CorruptCheckpointError(
                f"{fqn!r} in {url} cannot be unpickled: {type(error).__name__}: {error}. It was saved without a "
                "checksum: either it is damaged, or a class is missing here",
                url=url,
            ) from error

    # --- on the pool --------------------------------------------------------------------------------

    def _fetch(self, request: ReadRequest, transfers: Sequence[ItemTransfer], inference: bool) -> list[ItemTransfer]:
        """Carry out one request; returns the items that it completed."""
        with torch.inference_mode(inference):
            complete = self._transfer(request, transfers)
            for transfer in complete:
                self._verify(transfer)
                instead = transfer.finish()
                while instead is not None:
                    self._fetch_alone(instead, instead.extents)
                    self._verify(instead)
                    instead = instead.finish()
        return complete

    def _fetch_alone(self, transfer: ItemTransfer, extents: Sequence[Extent]) -> None:
        settings = self._bucket.settings
        for request in plan_requests(
            [extent._replace(item=0) for extent in extents],
            max_request=max(_SMALL_BUFFER, min(settings.part_size, settings.load_buffers // settings.concurrency)),
            max_gap=settings.read_gap,
        ):
            self._transfer(request, [transfer])

    def _transfer(self, request: ReadRequest, transfers: Sequence[ItemTransfer]) -> list[ItemTransfer]:
        buffer = getattr(self._buffers, "buffer", None)
        if buffer is None:
            buffer = self._buffers.buffer = Buffer(pin=self._pin)
        reception = Reception(request, transfers, buffer)
        self.receive(request.path, request.start, reception.targets)
        return reception.deliver()

    def _verify(self, transfer: ItemTransfer) -> None:
        """Compare the checksums; damage on the way is given one more chance, damage at rest is an error."""
        wrong = transfer.mismatches()
        if not wrong:
            return
        logger.warning(
            "checksum of %r in %s does not match; fetching it again",
            transfer.item.storage_index.fqn,
            self._url,
        )
        for part, _ in wrong:
            extent = transfer.forget(part)
            self.distrust(extent.path)
            self._fetch_alone(transfer, [extent])
        for part, found in transfer.mismatches():
            extent = transfer.extent_of(part)
            raise errors.CorruptCheckpointError(
                f"{transfer.item.storage_index.fqn!r} in {self._url}: bytes {extent.start} "
                f"to {extent.start + extent.length - 1} of {extent.path} have CRC-64/NVME "
                f"{crc_hex(found)}, recorded was {crc_hex(part.crc or 0)}, twice. The stored data is "
                "damaged: load an earlier checkpoint",
                url=str(self._url),
            )

    def distrust(self, path: str) -> None:
        """Take this object from S3 from now on, not from this host's disk."""
        if self._local is not None:
            self._local.distrust(path)

    def receive(self, path: str, start: int, targets: list[Target]) -> None:
        """Fetch the bytes of object ``path`` from ``start`` on. On any thread."""
        if self._local is not None and self._local.read_into(path, start, targets):
            return
        try:
            fetch_into(self._bucket, self._url.key(path), start, targets, cancel=self._cancel)
        except errors.ObjectNotFoundError as error:
            raise errors.CorruptCheckpointError(
                f"{self._url} is incomplete: its object {path} does not exist. It was deleted after the save: load "
                "an earlier checkpoint",
                url=str(self._url),
            ) from error
        except errors.StorageError as error:
            cause = error.__cause__
            if isinstance(cause, Exception) and retry.status_code(cause) == 416:
                raise errors.CorruptCheckpointError(
                    f"{self._url} is damaged: {path} ends before byte "
                    f"{start + sum(t.view.nbytes for t in targets)}. Load an earlier checkpoint",
                    url=str(self._url),
                ) from error
            raise


def find_changing(transfers: Sequence[ItemTransfer], planner: LoadPlanner) -> list[torch.Tensor]:
    """The tensors that a load changes: targets, and the DTensors and other wrappers of the state that they lie in.

    A wrapper has a version of its own, which is that of the parameter; what `resolve_tensor` gives of it often has one
    that nobody else knows. Torch's planners have the wrappers in ``state_dict``; of others only the targets are known.
    """
    found = [transfer.target for transfer in transfers if transfer.target is not None]
    state = getattr(planner, "state_dict", None)
    if isinstance(state, Mapping):
        names = dict.fromkeys(transfer.item.dest_index.fqn for transfer in transfers)
        found += [entry for entry in map(state.get, names) if isinstance(entry, torch.Tensor)]
    return found
