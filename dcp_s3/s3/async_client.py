"""aiobotocore: many small requests at once, for what looks at whole buckets rather than moves data.

An `AsyncBucket` lives inside one event loop and one ``async with``. Retries, waits and errors are those of `retry`.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import email.utils
import functools
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import aiohttp
import botocore.exceptions as boto
from aiobotocore.config import AioConfig
from aiobotocore.session import get_session

from dcp_s3 import errors
from dcp_s3.s3 import retry
from dcp_s3.s3.answers import check_answers
from dcp_s3.s3.client import client_options, config_options, look_once, share_loader
from dcp_s3.s3.throttle import gate_of
from dcp_s3.settings import Settings

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_REQUESTS = 32
"""Requests in flight. S3 answers thousands a second; what bounds a listing is one process's CPU, which 32 keep
busy over round trips of tens of milliseconds."""

# The most that S3 gives: https://docs.aws.amazon.com/AmazonS3/latest/API/API_ListObjectsV2.html
PAGE_SIZE = 1000


async def call(
    request: Callable[[], Awaitable[T]],
    *,
    operation: str,
    bucket: str,
    key: str = "",
    attempts: int,
) -> T:
    """`retry.call` for a coroutine function: run ``request`` until it succeeds, fails for good, or ``attempts``
    are used up. Cancelling the task ends it at once.

    Raises:
        StorageError: a subclass for the failure.
    """
    attempt = 0
    while True:
        attempt += 1
        try:
            return await request()
        except (boto.BotoCoreError, boto.ClientError, OSError) as error:
            failure: Exception = error
        except (aiohttp.ClientError, asyncio.TimeoutError) as error:
            # aiobotocore lets some of these through while it reads a body. Before Python 3.11 asyncio's
            # TimeoutError is no OSError.
            failure = boto.HTTPClientError(error=error)
            failure.__cause__ = error
        if attempt >= attempts or not retry.is_retryable(failure):
            raise retry.to_storage_error(failure, operation, bucket, key, attempt) from failure
        wait = retry.backoff(attempt)
        logger.debug("%s s3://%s/%s failed (%s); attempt %d of %d, next in %.2f s",
                     operation, bucket, key, failure, attempt, attempts, wait)  # fmt: skip
        await asyncio.sleep(wait)


@dataclass(frozen=True)
class ListedObject:
    """One object of a listing.

    Attributes:
        key: its key.
        size: bytes.
        modified_at: when it was written, seconds since the epoch.
        etag: as S3 gave it, with quotes; empty if it gave none.
    """

    key: str
    size: int
    modified_at: float
    etag: str = ""


@dataclass(frozen=True)
class Page:
    """One page of a listing, at most 1000 entries.

    Attributes:
        objects: in key order.
        prefixes: with a delimiter, the common prefixes, each with the delimiter at its end.
        next_token: asks for the next page; None on the last.
        server_time: seconds since the epoch on the server's clock, None if its answer does not tell.
    """

    objects: tuple[ListedObject, ...]
    prefixes: tuple[str, ...]
    next_token: str | None
    server_time: float | None = None


@dataclass(frozen=True)
class ListedUpload:
    """A multipart upload that is neither completed nor aborted.

    Attributes:
        key: of the object that it would become.
        upload_id: S3's id of it.
        initiated_at: when it was begun, seconds since the epoch.
    """

    key: str
    upload_id: str
    initiated_at: float


class AsyncBucket:
    """A bucket as these settings reach it, within one event loop. Made by `open_bucket`.

    Args:
        name: bucket name.
        settings: whose retries and common arguments apply.
        client: an open aiobotocore S3 client.
        max_requests: requests in flight at once.

    Attributes:
        requests: number of requests so far, each attempt counted.
    """

    def __init__(self, name: str, settings: Settings, client: Any, *, max_requests: int) -> None:
        self.name = name
        self.settings = settings
        self.requests = 0
        self._client = client
        self._slots = asyncio.Semaphore(max_requests)
        owner = settings.expected_bucket_owner
        self._common = {"Bucket": name} | ({"ExpectedBucketOwner": owner} if owner else {})

    async def _call(self, operation: str, key: str, request: Callable[[], Awaitable[T]]) -> T:
        async def with_slot() -> T:
            async with self._slots:  # not held while waiting for the next attempt
                began = time.monotonic()
                self.requests += 1
                try:
                    return await request()
                except boto.ClientError as error:
                    if retry.is_throttling(error):
                        gate_of(self.settings.endpoint_url, self.name, self.settings.concurrency).signal(began)
                    raise

        return await call(
            with_slot,
            operation=operation,
            bucket=self.name,
            key=key,
            attempts=self.settings.retry_attempts,
        )

    async def head(self, key: str) -> Mapping[str, Any]:
        """S3's HeadObject answer.

        Raises:
            ObjectNotFoundError: there is none (or no such bucket); other StorageErrors.
        """
        answer: Mapping[str, Any] = await self._call(
            "HeadObject", key, lambda: self._client.head_object(**self._common, Key=key)
        )
        return answer

    async def read(self, key: str) -> bytes:
        """All bytes of a small object.

        Raises:
            ObjectNotFoundError: there is none; other StorageErrors.
        """

        async def request() -> bytes:
            answer = await self._client.get_object(**self._common, Key=key)
            async with answer["Body"] as body:
                return bytes(await body.read())

        return await self._call("GetObject", key, request)

    async def page(self, prefix: str, *, delimiter: str = "", token: str | None = None) -> Page:
        """One page of a listing of the keys that start with ``prefix``.

        Args:
            prefix: of the keys.
            delimiter: keys that go on with it after the prefix count as one common prefix.
            token: of the page before, None for the first.

        Raises:
            BucketNotFoundError: no such bucket; other StorageErrors.
        """
        arguments: dict[str, Any] = {**self._common, "Prefix": prefix, "MaxKeys": PAGE_SIZE}
        if delimiter:
            arguments["Delimiter"] = delimiter
        if token is not None:
            arguments["ContinuationToken"] = token
        answer: Mapping[str, Any] = await self._call(
            "ListObjectsV2", prefix, lambda: self._client.list_objects_v2(**arguments)
        )
        return Page(
            objects=tuple(
                ListedObject(entry["Key"], int(entry["Size"]), timestamp(entry["LastModified"]), entry.get("ETag", ""))
                for entry in answer.get("Contents", ())
            ),
            prefixes=tuple(entry["Prefix"] for entry in answer.get("CommonPrefixes", ())),
            next_token=answer["NextContinuationToken"] if answer.get("IsTruncated") else None,
            server_time=_server_time(answer),
        )

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

    async def list_uploads(self, prefix: str) -> tuple[ListedUpload, ...]:
        """Every open multipart upload whose key starts with ``prefix``, by key.

        Raises:
            BucketNotFoundError: no such bucket; other StorageErrors.
        """
        found: list[ListedUpload] = []
        arguments: dict[str, Any] = {**self._common, "Prefix": prefix, "MaxUploads": PAGE_SIZE}
        while True:
            try:
                answer: Mapping[str, Any] = await self._call(
                    "ListMultipartUploads",
                    prefix,
                    functools.partial(self._client.list_multipart_uploads, **arguments),
                )
            except errors.BucketNotFoundError:
                raise
            except errors.ObjectNotFoundError:
                return tuple(found)  # rclone's answer for a bucket without uploads
            found += [
                ListedUpload(entry["Key"], entry["UploadId"], timestamp(entry["Initiated"]))
                for entry in answer.get("Uploads", ())
                if entry["Key"].startswith(prefix)
            ]
            if not answer.get("IsTruncated"):
                return tuple(found)
            arguments |= {"KeyMarker": answer["NextKeyMarker"], "UploadIdMarker": answer["NextUploadIdMarker"]}


def _server_time(answer: Mapping[str, Any]) -> float | None:
    headers = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    try:
        return timestamp(email.utils.parsedate_to_datetime(headers["date"]))
    except (KeyError, ValueError, TypeError):
        return None


def timestamp(value: datetime.datetime) -> float:
    """Seconds since the epoch of a time in an answer of S3's; one without a zone is in UTC."""
    if value.tzinfo is None:
        value = value.replace(tzinfo=datetime.timezone.utc)
    return value.timestamp()


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
            share_loader(session)
            client = session.create_client("s3", config=AioConfig(**options), **client_options(settings, session))
            return await stack.enter_async_context(client)

        client = await call(connect, operation="create_client", bucket=name, attempts=1)
        check_answers(client)
        look_once(client)
        yield AsyncBucket(name, settings, client, max_requests=max_requests)
