"""The S3 store, on boto3."""

from __future__ import annotations

import collections
import functools
import logging
import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from botocore import xform_name

from dcp_s3 import errors
from dcp_s3.limit import UNLIMITED, Cancelled, Limit, LinkedEvent, Progress
from dcp_s3.memory import Piece, ReadTarget, targets_of
from dcp_s3.s3 import listing, multipart, operations, retry
from dcp_s3.s3.client import forget_client, get_client
from dcp_s3.s3.connections import Tuning, connections_of, most_connections
from dcp_s3.s3.download import fetch_into
from dcp_s3.s3.hedge import hedges_of
from dcp_s3.s3.multipart import copy_object
from dcp_s3.s3.operations import Operation, Request, request_arguments
from dcp_s3.s3.ranged import read_whole
from dcp_s3.s3.throttle import Gate, find_gate, gate_of, pace_of
from dcp_s3.s3.upload import Uploader
from dcp_s3.settings import Settings
from dcp_s3.store import (
    Counters,
    DeleteTarget,
    Expect,
    Moved,
    ObjectHead,
    ObjectStart,
    Page,
    ReadWidth,
    SelfStore,
    Store,
    StoredObject,
    StreamedObject,
    Upload,
    target_of,
)
from dcp_s3.url import CheckpointURL

logger = logging.getLogger(__name__)

T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True)
class S3Store(Store):
    """A bucket as these settings reach it. Holds no connection: cheap, picklable, fork-safe."""

    name: str
    settings: Settings
    limit: Limit = UNLIMITED
    """Limit on its requests."""

    @property
    def client(self) -> Any:
        return get_client(self.settings)

    @property
    def gate(self) -> Gate:
        found = find_gate(self.settings.endpoint_url, self.name)
        return found or gate_of(self.settings.endpoint_url, self.name, most_connections(self))

    def within(self, limit: Limit) -> S3Store:
        return replace(self, limit=limit)

    # --- carrying out -----------------------------------------------------------------------------------

    def run(self, operation: Operation[T]) -> T:
        try:
            request = next(operation)
            while True:
                try:
                    answer = self.call(
                        request.operation, request.key, functools.partial(self._attempt, request), data=request.data
                    )
                except errors.StorageError as error:
                    request = operation.throw(error)
                else:
                    request = operation.send(answer)
        except StopIteration as done:
            result: T = done.value
            return result
        finally:
            operation.close()

    def _attempt(self, request: Request) -> Any:
        try:
            answer = self.send(request)
        except Exception as error:
            if request.on_failure is not None:
                request.on_failure(error)
            raise
        if "Body" in answer:
            body = answer["Body"]
            answer = {**answer, "Body": read_whole(answer) if request.reads_body else body.close()}
        return answer if request.parse is None else request.parse(answer)

    def send(self, request: Request) -> Any:
        """Send a request once.

        Returns:
            boto3's answer; its ``Body``, if there is one, has not been read.
        """
        method = getattr(self.client, xform_name(request.operation))
        return method(**operations.common_arguments(self, request.operation), **request_arguments(request))

    def call(
        self,
        operation: str,
        key: str,
        request: Callable[[], T],
        *,
        cancel: threading.Event | None = None,
        data: bool = False,
        attempts: int | None = None,
    ) -> T:
        """`retry.call` for this bucket. A request with ``data`` waits for its turn while S3 throttles.

        ``attempts`` overrides the most attempts of settings and limit.
        """
        settings, limit = self.settings, self.limit
        progress = limit.progress or Progress(settings.stall_timeout)
        limit = replace(limit, progress=progress, cancel=cancel or limit.cancel)
        most = settings.retry_attempts if limit.attempts is None else min(settings.retry_attempts, limit.attempts)
        tries = retry.Tries(operation, self.name, key, most if attempts is None else attempts, limit)
        hang = math.inf if limit.hang is None else limit.hang
        attempt = retry.Attempt(
            tries.what,
            connect=min(settings.connect_timeout, hang),
            read=min(settings.read_timeout, hang),
            progress=progress,
            cancel=limit.cancel,
            pace=pace_of(settings.max_bandwidth),
            operation=operation,
        )
        try:
            with progress, attempt:
                return retry.call(request, tries, gate=self.gate, data=data)
        except errors.CredentialsError:
            forget_client(settings)  # the next save or load looks for credentials again
            raise

    # --- what a store does ------------------------------------------------------------------------------

    def read(
        self,
        key: str,
        start: int,
        into: memoryview | Sequence[ReadTarget],
        etag: str | None = None,
        *,
        moved: Moved | None = None,
    ) -> None:
        fetch_into(self, key, start, targets_of(into), etag=etag, moved=moved)

    def read_width(self) -> int:
        return connections_of(self, "download")

    def adapt_reads(self, *, resize: Callable[[int], None], is_busy: Callable[[], bool], most: int) -> ReadWidth:
        return Tuning(self, "download", resize=resize, is_busy=is_busy, most=most)

    def counters(self) -> Counters:
        return Counters(self.gate.state.throttled, hedges_of(self).state.started)

    def get(self, key: str) -> StoredObject:
        return self.run(operations.get(key))

    def get_start(self, key: str, most: int) -> ObjectStart:
        return self.run(operations.get_start(key, most))

    def put(
        self,
        key: str,
        data: bytes | memoryview,
        *,
        expect: Expect | None = None,
        content_type: str = "application/octet-stream",
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        self.run(operations.put(self, key, data, expect=expect, content_type=content_type, metadata=metadata))

    def put_stream(
        self, key: str, size: int, pieces: Iterable[Piece], *, part_size: int | None = None, resume: bool = False
    ) -> StreamedObject:
        with Uploader(self) as uploader:
            return uploader.put_stream(key, size, pieces, part_size=part_size, resume=resume)

    def batch(self, *, total: int, ranks: int = 1, keys: Sequence[str] = ()) -> Uploader:
        return Uploader.planned(self, total=total, ranks=ranks)

    def copy(self, source: Store, source_key: str, key: str) -> None:
        if isinstance(source, S3Store):
            copy_object(self, source, source_key, key)
        else:
            super().copy(source, source_key, key)

    def head(self, key: str, *, checksum: bool = False) -> ObjectHead:
        return self.run(operations.head(key, checksum=checksum))

    def exists(self, key: str) -> bool:
        return self.run(operations.exists(key))

    def page(self, prefix: str, delimiter: str = "", *, token: str | None = None) -> Page:
        return self.run(listing.page(self, prefix, delimiter, token=token))

    def delete(self, targets: Iterable[str | DeleteTarget]) -> Sequence[str]:
        """See `Store.delete`. A request that deletes many waits for its turn while S3 throttles."""
        return self.run(listing.delete(self, map(target_of, targets)))

    def uploads(self, prefix: str) -> Sequence[Upload]:
        return self.run(listing.uploads(self, prefix))

    def abort(self, upload: Upload) -> None:
        self.run(multipart.abort(upload.key, upload.upload_id))

    def map(self, function: Callable[[S3Store, T], U], items: Iterable[T]) -> Sequence[U]:
        return map_in_threads(self, function, items)

    def abort_quietly(self, upload: Upload) -> bool:
        """`abort`, and return whether that worked. A failure is logged: another error is on its way to the user."""
        try:
            self.abort(upload)
        except errors.StorageError as error:
            logger.warning("the multipart upload %s of a failed save stays open: %s", upload.upload_id, error)
            return False
        return True


def store_of(url: CheckpointURL, settings: Settings, limit: Limit = UNLIMITED) -> S3Store:
    """The store of a URL's bucket."""
    return S3Store(url.bucket, settings, limit)


# --- many small requests at once: a function of one item each, in threads --------------------------------

AT_ONCE = 32
"""Most items under way. S3 answers thousands of requests a second; a listing is bound by one process's CPU, which 32
keep busy over round trips of tens of milliseconds."""


class _Failed(LinkedEvent):
    """Set by the first failure of a map, or with the event that cancels its caller's own requests."""

    def __init__(self, caller: threading.Event | None) -> None:
        super().__init__(caller)
        self.free: threading.Semaphore = (
            caller.free if isinstance(caller, _Failed) else threading.Semaphore(AT_ONCE - 1)
        )
        """The threads that may still be started. A map inside another one shares them, and each works in its caller's
        thread, too: none waits for a thread."""


def map_in_threads(store: SelfStore, function: Callable[[SelfStore, T], U], items: Iterable[T]) -> list[U]:
    """`Store.map` for a store whose requests take time."""
    failed = _Failed(store.limit.cancel)
    bounded = store.within(replace(store.limit, cancel=failed))
    pending = collections.deque(enumerate(items))
    results: dict[int, U] = {}
    failures: list[BaseException] = []

    def work() -> None:
        while True:
            try:
                number, item = pending.popleft()
            except IndexError:
                return
            try:
                if failed.is_set():
                    raise Cancelled
                results[number] = function(bounded, item)
            except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
                failures.append(error)
                failed.set()
                return

    count = len(pending)
    threads: list[threading.Thread] = []
    try:
        for _ in range(count - 1):
            if not pending or not _start(work, failed.free, threads):
                break
        work()
        for thread in threads:
            thread.join()
    except BaseException:  # an interrupt of the caller
        failed.set()
        for thread in threads:
            thread.join()
        raise
    try:
        if failures:
            raise failures[0]
    finally:
        failures.clear()  # its traceback has this frame
    return [results[number] for number in range(count)]


def _start(work: Callable[[], None], free: threading.Semaphore, threads: list[threading.Thread]) -> bool:
    """Work in one more thread; return whether there may be one."""
    if not free.acquire(blocking=False):
        return False

    def target() -> None:
        try:
            work()
        finally:
            free.release()

    thread = threading.Thread(target=target, name="dcp_s3-requests", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # the system has no more of them
        free.release()
        return False
    threads.append(thread)
    return True
