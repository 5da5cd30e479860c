"""A bucket through aiobotocore: many small requests at once, for what looks at whole buckets rather than moves data.

An `AsyncBucket` lives inside one event loop and one ``async with``.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from aiobotocore.config import AioConfig
from aiobotocore.session import get_session
from botocore import xform_name

from dcp_s3 import errors
from dcp_s3.limit import UNLIMITED, Limit
from dcp_s3.s3 import listing, multipart, operations, retry
from dcp_s3.s3.answers import check_answers
from dcp_s3.s3.client import client_options, config_options, look_once, prepare_session
from dcp_s3.s3.delete import delete
from dcp_s3.s3.operations import Operation, Request, request_arguments
from dcp_s3.s3.throttle import gate_of
from dcp_s3.settings import Settings
from dcp_s3.store import ListedObject as ListedObject
from dcp_s3.store import Page, Target
from dcp_s3.store import Upload as ListedUpload

T = TypeVar("T")

MAX_REQUESTS = 32
"""Requests in flight. S3 answers thousands a second; what bounds a listing is one process's CPU, which 32 keep
busy over round trips of tens of milliseconds."""


class AsyncBucket:
    """A bucket as these settings reach it, within one event loop. Made by `open_bucket`.

    Args:
        name: bucket name.
        settings: whose retries and common arguments apply.
        client: an open aiobotocore S3 client.
        max_requests: requests in flight at once.
    """

    def __init__(self, name: str, settings: Settings, client: Any, *, max_requests: int) -> None:
        self.name = name
        self.settings = settings
        self.requests = 0
        """Number of requests so far, each attempt counted."""
        self._client = client
        self._slots = asyncio.Semaphore(max_requests)

    # --- carrying out -----------------------------------------------------------------------------------

    async def run(self, operation: Operation[T], *, limit: Limit = UNLIMITED) -> T:
        """Carry out an operation within ``limit``.

        Raises:
            StorageError: what the operation raises.
        """
        try:
            request = next(operation)
            while True:
                try:
                    answer = await self._try(request, limit)
                except errors.StorageError as error:
                    request = operation.throw(error)
                else:
                    request = operation.send(answer)
        except StopIteration as done:
            result: T = done.value
            return result
        finally:
            operation.close()

    async def _try(self, request: Request, limit: Limit) -> Any:
        settings = self.settings
        most = settings.retry_attempts if limit.attempts is None else min(settings.retry_attempts, limit.attempts)
        tries = retry.Tries(request.operation, self.name, request.key, most, limit)

        async def attempt() -> Any:
            async with self._slots:  # not held while waiting for the next attempt
                self.requests += 1
                return await asyncio.wait_for(self._attempt(request), limit.hang)

        gate = gate_of(settings.endpoint_url, self.name, settings.concurrency)
        return await retry.call_async(attempt, tries, gate=gate, data=request.data)

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

    # --- objects ----------------------------------------------------------------------------------------

    async def head(self, key: str) -> Mapping[str, Any]:
        """S3's HeadObject answer, with the names of user metadata in lower case.

        Raises:
            ObjectNotFoundError: there is none (or no such bucket); other StorageErrors.
        """
        return await self.run(operations.head(key))

    async def read(self, key: str) -> bytes:
        """All bytes of a small object.

        Raises:
            ObjectNotFoundError: there is none; other StorageErrors.
        """
        return (await self.run(operations.get(key))).data

    async def write(self, key: str, data: bytes, *, content_type: str = "application/octet-stream") -> None:
        """Put a small object.

        Raises:
            StorageError: it may not be there.
        """
        await self.run(operations.put(self, key, data, content_type=content_type))

    async def delete(self, targets: Iterable[Target], *, limit: Limit = UNLIMITED) -> list[str]:
        """Delete objects; those that do not exist count as deleted. Each request waits for its turn while S3 throttles.

        Returns:
            Keys that were left alone because they have another ETag. Stores that know no conditional deletes ignore it.

        Raises:
            StorageError: some could not be deleted.
        """
        return await self.run(delete(self, targets, data=True), limit=limit)

    # --- listings ---------------------------------------------------------------------------------------

    async def page(self, prefix: str, *, delimiter: str = "", token: str | None = None) -> Page:
        """One page of a listing of the keys that start with ``prefix``.

        Args:
            prefix: of the keys.
            delimiter: keys that go on with it after the prefix count as one common prefix.
            token: of the page before, None for the first.

        Raises:
            BucketNotFoundError: no such bucket; other StorageErrors.
        """
        return await self.run(listing.page(prefix, delimiter=delimiter, token=token))

    async def pages(self, prefix: str, *, delimiter: str = "") -> list[Page]:
        """All pages of a listing.

        Raises:
            BucketNotFoundError: no such bucket; other StorageErrors.
        """
        pages = [await self.page(prefix, delimiter=delimiter)]
        while pages[-1].next_token is not None:
            pages.append(await self.page(prefix, delimiter=delimiter, token=pages[-1].next_token))
        return pages

    async def list(self, prefix: str) -> list[ListedObject]:
        """Every object whose key starts with ``prefix``, in key order."""
        return [found for page in await self.pages(prefix) for found in page.objects]

    async def list_uploads(self, prefix: str) -> Sequence[ListedUpload]:
        """Every open multipart upload whose key starts with ``prefix``, by key.

        Raises:
            BucketNotFoundError: no such bucket; other StorageErrors.
        """
        return await self.run(listing.uploads(prefix))

    async def abort(self, upload: ListedUpload) -> None:
        """Abort a multipart upload; one that is gone counts as aborted.

        Raises:
            StorageError: it may stay open.
        """
        await self.run(multipart.abort(upload.key, upload.upload_id))

    async def list_versions(self, prefix: str) -> Sequence[listing.StoredVersion]:
        """Every version of every object whose key starts with ``prefix``.

        Raises:
            StorageError: the store has no ListObjectVersions, the permission is missing, ...
        """
        return await self.run(listing.versions(prefix))

    async def check_versions(self, prefix: str) -> None:
        """Whether `list_versions` would be answered: one request.

        Raises:
            StorageError: as `list_versions`.
        """
        await self.run(listing.check_versions(prefix))


@contextlib.asynccontextmanager
async def open_bucket(name: str, settings: Settings, *, max_requests: int = MAX_REQUESTS) -> AsyncIterator[AsyncBucket]:
    """An `AsyncBucket` with a client of its own, closed on leaving.

    Raises:
        SettingsError: the endpoint that AWS's own chain names is none.
        StorageError: no client can be made of the settings and AWS's own chain.
    """
    options = config_options(settings) | {"max_pool_connections": max_requests}
    async with contextlib.AsyncExitStack() as stack:

        async def connect() -> Any:
            session = get_session()
            prepare_session(session)
            client = session.create_client("s3", config=AioConfig(**options), **client_options(settings, session))
            return await stack.enter_async_context(client)

        client = await retry.call_async(connect, retry.Tries("create_client", name, "", 1, UNLIMITED))
        check_answers(client)
        look_once(client)
        yield AsyncBucket(name, settings, client, max_requests=max_requests)
