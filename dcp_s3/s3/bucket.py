"""Requests to one bucket, each tried until it succeeds or fails for good; many small ones at once, in threads."""

from __future__ import annotations

import base64
import datetime
import email.utils
import functools
import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import botocore.utils
from botocore import xform_name

from dcp_s3 import errors
from dcp_s3.limit import UNLIMITED, Cancelled, Limit, LinkedEvent
from dcp_s3.s3.client import forget_client, get_client
from dcp_s3.s3.diagnosis import REQUEST_ERRORS, to_storage_error
from dcp_s3.s3.pressure import Gate, gate_of, pace_of
from dcp_s3.s3.retry import Attempts, this_thread
from dcp_s3.settings import Settings
from dcp_s3.store import ObjectHead, StoredObject
from dcp_s3.workers import Workers

Send = Callable[..., dict[str, Any]]
"""Sends a request once, with arguments as boto3 takes them. Returns its answer, of which no ``Body`` has been read."""

T = TypeVar("T")
U = TypeVar("U")
SelfBucket = TypeVar("SelfBucket", bound="Bucket")

# Besides those on buckets: what only the owner of a bucket asks for, at its own costs.
_OF_THE_OWNER = frozenset({"GetObjectLockConfiguration"})

# Larger bodies are read in blocks, so that they are seen to move.
_BLOCK = 4 * 2**20


@dataclass(frozen=True)
class Bucket:
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
        return gate_of(self.settings, self.name)

    def within(self: SelfBucket, limit: Limit) -> SelfBucket:
        return replace(self, limit=limit)

    # --- carrying out -----------------------------------------------------------------------------------

    def request(
        self, operation: str, key: str, arguments: Mapping[str, Any], *, data: bool = False, attempts: int | None = None
    ) -> dict[str, Any]:
        """Send a request until it succeeds. With ``data`` each attempt waits for its turn while S3 throttles.

        Args:
            operation: S3's name of the operation.
            key: object key, or prefix, for messages.
            arguments: as boto3 takes them, without those that all requests have.
            attempts: most attempts, instead of those of settings and limit.

        Returns:
            boto3's answer; its ``Body``, if there is one, has been read.
        """

        def attempt(send: Send) -> dict[str, Any]:
            answer = send(**arguments)
            body, size = answer.get("Body"), answer.get("ContentLength") or 0
            if body is None:
                return answer
            if size <= _BLOCK:
                return {**answer, "Body": body.read()}
            found = bytearray()
            while block := body.read(_BLOCK):
                found += block
                this_thread.attempts.moved(len(block))
                this_thread.attempts.check()
            return {**answer, "Body": found}

        return self.call(operation, key, attempt, data=data, attempts=attempts)

    def call(
        self,
        operation: str,
        key: str,
        attempt: Callable[[Send], T],
        *,
        cancel: threading.Event | None = None,
        data: bool = False,
        attempts: int | None = None,
    ) -> T:
        """Result of ``attempt``, which sends a request once, by what it is called with: it is tried until it succeeds.
        Others: see `request`.
        """
        settings, limit, common = self.settings, self.limit, {"Bucket": self.name}
        try:
            client = get_client(settings)
        except REQUEST_ERRORS as error:  # no such profile
            raise to_storage_error(error, operation, self.name, key, attempts=1) from error
        if settings.expected_bucket_owner:
            common["ExpectedBucketOwner"] = settings.expected_bucket_owner
        if settings.requester_pays and "Bucket" not in operation and operation not in _OF_THE_OWNER:
            common["RequestPayer"] = "requester"
        send = functools.partial(getattr(client, xform_name(operation)), **common)
        tries = Attempts(
            operation, self.name, key, limit=limit if cancel is None else replace(limit, cancel=cancel),
            stall=settings.stall_timeout,
            most=attempts or min(settings.retry_attempts, limit.attempts or settings.retry_attempts),
            hang=min(settings.read_timeout, math.inf if limit.hang is None else limit.hang),
            pace=None if settings.max_bandwidth is None else pace_of(settings.max_bandwidth),
        )  # fmt: skip
        try:
            return tries.run(functools.partial(attempt, send), gate_of(settings, self.name), data=data)
        except errors.CredentialsError:
            forget_client(client)  # the next save or load looks for credentials again
            raise

    # --- reading one object -----------------------------------------------------------------------------

    def get(self, key: str) -> StoredObject:
        answer = self.request("GetObject", key, {"Key": key})
        return StoredObject(bytes(answer["Body"]), _user_metadata(answer), answer.get("ETag", ""))

    def head(self, key: str, *, checksum: bool = False) -> ObjectHead:
        answer = self.request("HeadObject", key, {"Key": key} | ({"ChecksumMode": "ENABLED"} if checksum else {}))
        crc = answer.get("ChecksumCRC64NVME")
        return ObjectHead(
            key=key,
            size=int(answer["ContentLength"]),
            modified_at=timestamp(answer["LastModified"]),
            etag=answer.get("ETag", ""),
            metadata=_user_metadata(answer),
            crc64nvme=None if crc is None else base64.b64decode(crc).hex(),
            server_time=server_time(answer),
        )

    def exists(self, key: str) -> bool:
        """Whether the object exists. A GET of its first byte rather than a HEAD: the answer to a HEAD has no body, so
        that a missing bucket would look like a missing object."""
        try:
            self.request("GetObject", key, {"Key": key, "Range": "bytes=0-0"})
        except errors.ObjectNotFoundError:
            return False
        except errors.OutOfRangeError:
            pass  # an empty object
        return True


def _user_metadata(answer: Mapping[str, Any]) -> dict[str, str]:
    """User metadata of a GetObject or HeadObject, names in lower case: rclone capitalises them."""
    return {name.lower(): value for name, value in (answer.get("Metadata") or {}).items()}


# --- times ----------------------------------------------------------------------------------------------


def timestamp(value: str) -> float:
    """A time from S3's answer in seconds since the epoch; without a zone it is in UTC."""
    try:  # as S3 writes it
        time = datetime.datetime.fromisoformat(value.replace("Z", "+00:00"))
    except ValueError:
        time = botocore.utils.parse_timestamp(value)
    if time.tzinfo is None:
        time = time.replace(tzinfo=datetime.timezone.utc)
    return time.timestamp()


def server_time(answer: Mapping[str, Any]) -> float | None:
    """When S3 answered by its own clock, in seconds since the epoch; None if it does not tell."""
    date = email.utils.parsedate_tz(answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date", ""))
    try:
        return None if date is None else float(email.utils.mktime_tz(date))
    except (ValueError, OverflowError):
        return None


# --- many small requests at once: a function of one item each, in threads --------------------------------

AT_ONCE = 32
"""Most items under way. S3 answers thousands of requests a second; a listing is bound by one process's CPU, which 32
keep busy over round trips of tens of milliseconds."""


class _Failed(LinkedEvent):
    """Set by the first failure of a map, or with the event that cancels its caller's own requests."""

    share = 1
    """Items that a map inside of this one may have under way: in all not more than `AT_ONCE`."""


def map_in_threads(store: SelfBucket, function: Callable[[SelfBucket, T], U], items: Iterable[T]) -> Sequence[U]:
    """See `Store.map`."""
    items, caller, failures = list(items), store.limit.cancel, list[BaseException]()
    room = caller.share if isinstance(caller, _Failed) else AT_ONCE
    failed, most = _Failed(caller), min(room, len(items))
    failed.share = room // max(1, len(items))
    bounded = store.within(replace(store.limit, cancel=failed))

    def work(item: T) -> Any:
        try:
            if failed.is_set():
                raise Cancelled
            return function(bounded, item)
        except BaseException as error:  # noqa: BLE001 - the first one is raised in the caller's thread
            failures.append(error)
            failed.set()

    if most <= 1:
        results = [work(item) for item in items]
    else:
        workers = Workers(most, "dcp_s3-requests")
        try:
            results = [result.result() for result in [workers.submit(work, item) for item in items]]
        except BaseException:  # an interrupt of the caller
            failed.set()
            raise
        finally:
            workers.close()
    try:
        if failures:
            raise failures[0]
    finally:
        failures.clear()  # its traceback has this frame
    return results
