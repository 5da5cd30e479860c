"""The S3 store on aiobotocore: many small requests at once, for looking at a bucket rather than moving data.

An `AsyncS3Store` lives inside one event loop and one ``async with``.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import aiohttp
import botocore.exceptions as boto
from aiobotocore.config import AioConfig
from aiobotocore.session import AioSession
from botocore import xform_name

from dcp_s3 import errors
from dcp_s3.coroutines import run
from dcp_s3.limit import UNLIMITED, Limit
from dcp_s3.s3 import listing, multipart, operations, retry
from dcp_s3.s3.answers import check_answers
from dcp_s3.s3.botocore_private import look_once
from dcp_s3.s3.client import client_options, config_options, prepare_session
from dcp_s3.s3.connections import most_connections
from dcp_s3.s3.diagnosis import REQUEST_ERRORS
from dcp_s3.s3.listing import StoredVersion, delete
from dcp_s3.s3.operations import Operation, Request, request_arguments
from dcp_s3.s3.throttle import Gate, gate_of
from dcp_s3.settings import Settings
from dcp_s3.store import DeleteTarget, Expect, ObjectHead, Page, StoredObject, Upload, join, target_of

T = TypeVar("T")

MAX_REQUESTS = 32
"""Most requests in flight. S3 answers thousands a second; a listing is bound by one process's CPU, which 32 keep
busy over round trips of tens of milliseconds."""


class AsyncS3Store:
    """A bucket as these settings reach it, within one event loop. Made by `open_async_store`."""

    def __init__(self, name: str, settings: Settings, client: Any, *, max_requests: int) -> None:
        self.name = name
        self.settings = settings
        self.limit = UNLIMITED
        self._client = client
        self._slots = asyncio.Semaphore(max_requests)
        self._sent = [0]

    @property
    def requests(self) -> int:
        """Number of requests so far, counting each attempt."""
        return self._sent[0]

    def within(self, limit: Limit) -> AsyncS3Store:
        """The same store with its requests bounded by ``limit`` only.

        Its ``cancel`` does not end a wait: cancel the task instead.
        """
        other = copy.copy(self)
        other.limit = limit
        return other

    # --- carrying out -----------------------------------------------------------------------------------

    async def run(self, operation: Operation[T]) -> T:
        try:
            request = next(operation)
            while True:
                try:
                    answer = await self._try(request)
                except errors.StorageError as error:
                    request = operation.throw(error)
                else:
                    request = operation.send(answer)
        except StopIteration as done:
            result: T = done.value
            return result
        finally:
            operation.close()

    async def _try(self, request: Request) -> Any:
        settings, limit = self.settings, self.limit
        most = settings.retry_attempts if limit.attempts is None else min(settings.retry_attempts, limit.attempts)
        tries = retry.Tries(request.operation, self.name, request.key, most, limit)

        async def attempt() -> Any:
            async with self._slots:  # not held while waiting for the next attempt
                tries.check()  # the wait for a slot may have been long
                self._sent[0] += 1
                return await asyncio.wait_for(self._attempt(request), limit.hang)

        gate = gate_of(settings.endpoint_url, self.name, most_connections(self))
        return await call(attempt, tries, gate=gate, data=request.data)

    async def _attempt(self, request: Request) -> Any:
        try:
            method = getattr(self._client, xform_name(request.operation))
            answer = await method(**operations.common_arguments(self), **request_arguments(request))
            if "Body" in answer:
                async with answer["Body"] as body:
                    answer = {**answer, "Body": await body.read() if request.reads_body else b""}
        except Exception as error:
            if request.on_failure is not None:
                request.on_failure(error)
            raise
        return answer if request.parse is None else request.parse(answer)

    # --- what a store does, as `Store` says --------------------------------------------------------------

    async def get(self, key: str) -> StoredObject:
        return await self.run(operations.get(key))

    async def put(
        self,
        key: str,
        data: bytes | memoryview,
        *,
        expect: Expect | None = None,
        content_type: str = "application/octet-stream",
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        await self.run(operations.put(self, key, data, expect=expect, content_type=content_type, metadata=metadata))

    async def head(self, key: str, *, checksum: bool = False) -> ObjectHead:
        return await self.run(operations.head(key, checksum=checksum))

    async def page(self, prefix: str, delimiter: str = "", *, token: str | None = None) -> Page:
        return await self.run(listing.page(prefix, delimiter, token=token))

    async def list(self, prefix: str, delimiter: str = "") -> Page:
        pages = [await self.page(prefix, delimiter)]
        while pages[-1].next_token is not None:
            pages.append(await self.page(prefix, delimiter, token=pages[-1].next_token))
        return join(pages)

    async def delete(self, targets: Iterable[str | DeleteTarget]) -> Sequence[str]:
        """See `Store.delete`. Each request waits for its turn while S3 throttles."""
        return await self.run(delete(self, map(target_of, targets), data=True))

    async def uploads(self, prefix: str) -> Sequence[Upload]:
        return await self.run(listing.uploads(prefix))

    async def abort(self, upload: Upload) -> None:
        await self.run(multipart.abort(upload.key, upload.upload_id))

    async def list_versions(self, prefix: str) -> Sequence[StoredVersion]:
        """Every version of every object whose key starts with ``prefix``."""
        return await self.run(listing.versions(prefix))

    async def check_versions(self, prefix: str) -> None:
        """Check by one request that `list_versions` would be answered."""
        await self.run(listing.check_versions(prefix))


async def call(
    request: Callable[[], Awaitable[T]], tries: retry.Tries, *, gate: Gate | None = None, data: bool = False
) -> T:
    """`retry.call` for a coroutine function. Cancelling the task ends it at once."""
    while True:
        tries.check()
        if gate is not None and data and not await gate.enter_async(timeout=tries.seconds_at_gate()):
            tries.check()
            raise tries.never_admitted()
        tries.made += 1
        try:
            if gate is None:
                return await request()
            with gate.watching(admitted=data):
                return await request()
        except REQUEST_ERRORS as error:
            failure: Exception = error
        except (aiohttp.ClientError, asyncio.TimeoutError) as error:
            # aiobotocore lets some of these through while it reads a body. Before Python 3.11 asyncio's
            # TimeoutError is not an OSError.
            failure = boto.HTTPClientError(error=error)
            failure.__cause__ = error
        await asyncio.sleep(tries.wait_after(failure))


@contextlib.asynccontextmanager
async def open_async_store(
    name: str, settings: Settings, *, max_requests: int = MAX_REQUESTS
) -> AsyncIterator[AsyncS3Store]:
    """Open an `AsyncS3Store` with its own client, which is closed on leaving."""
    options = config_options(settings) | {"max_pool_connections": max_requests}
    async with contextlib.AsyncExitStack() as stack:

        async def connect() -> Any:
            session = AioSession(profile=settings.profile)
            prepare_session(session)
            client = session.create_client("s3", config=AioConfig(**options), **client_options(settings, session))
            return await stack.enter_async_context(client)

        client = await call(connect, retry.Tries("create_client", name, "", 1, UNLIMITED))
        check_answers(client)
        look_once(client)
        yield AsyncS3Store(name, settings, client, max_requests=max_requests)


def run_on_store(name: str, settings: Settings, work: Callable[[AsyncS3Store], Awaitable[T]]) -> T:
    """Run a coroutine function on an `open_async_store` of its own, from synchronous code."""

    async def inside() -> T:
        async with open_async_store(name, settings) as store:
            return await work(store)

    return run(inside())
