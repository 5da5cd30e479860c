"""Requests to one bucket, each tried until it succeeds or fails for good; conditional writes; many requests at once, in
threads; what stores lack."""

from __future__ import annotations

import base64
import datetime
import email.utils
import enum
import functools
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, TypeVar

import botocore.utils
from botocore import xform_name

from dcp_s3 import errors
from dcp_s3.limit import UNLIMITED, Cancelled, Limit, LinkedEvent
from dcp_s3.memory import crc64nvme, encode_crc
from dcp_s3.s3.body import GatherBody
from dcp_s3.s3.client import forget_client, get_client
from dcp_s3.s3.diagnosis import REQUEST_ERRORS, answered_code, answered_status, to_storage_error
from dcp_s3.s3.pressure import KnownBucket, Pace, known_buckets, paces
from dcp_s3.s3.retry import Attempts, this_thread
from dcp_s3.settings import Settings
from dcp_s3.store import Expect, ObjectHead, StoredObject, UserMetadata
from dcp_s3.workers import Workers

logger = logging.getLogger(__name__)

Send = Callable[..., dict[str, Any]]
"""Sends a request once, with arguments as boto3 takes them. Returns its answer, of which no ``Body`` has been read."""

T = TypeVar("T")
U = TypeVar("U")
SelfBucket = TypeVar("SelfBucket", bound="Bucket")

# Besides those on buckets: what only the owner of a bucket asks for, at its own costs.
_OF_THE_OWNER = frozenset({"GetObjectLockConfiguration"})

# Larger bodies are read in blocks, and sent in slices, so that they are seen to move.
_BLOCK, _SMALL = 4 * 2**20, 2**20


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
    def known(self) -> KnownBucket:
        """What this process knows of it."""
        endpoint = self.settings.endpoint_url
        found = known_buckets.get((endpoint, self.name))
        return found or known_buckets.setdefault(
            (endpoint, self.name), KnownBucket(f"{endpoint or 's3:/'}/{self.name}")
        )

    def within(self: SelfBucket, limit: Limit) -> SelfBucket:
        return replace(self, limit=limit)

    def request(
        self,
        operation: str,
        key: str,
        arguments: Mapping[str, Any] = MappingProxyType({}),
        *,
        attempt: Callable[[Send], dict[str, Any]] | None = None,
        data: bool = False,
    ) -> dict[str, Any]:
        """Send a request until it succeeds. With ``data`` each attempt waits for its turn while S3 throttles.

        Args:
            operation: S3's name of the operation.
            key: object key, or prefix, for messages.
            arguments: as boto3 takes them, without those that all requests have.
            attempt: sends it once, by what it is called with, and returns the answer.

        Returns:
            boto3's answer; its ``Body``, if there is one, has been read.
        """
        settings, limit, common = self.settings, self.limit, {"Bucket": self.name, **arguments}
        try:
            client = get_client(settings)
        except REQUEST_ERRORS as error:  # no such profile
            raise to_storage_error(error, operation, self.name, key, attempts=1) from error
        if settings.expected_bucket_owner:
            common["ExpectedBucketOwner"] = settings.expected_bucket_owner
        if settings.requester_pays and "Bucket" not in operation and operation not in _OF_THE_OWNER:
            common["RequestPayer"] = "requester"
        send = functools.partial(getattr(client, xform_name(operation)), **common)
        if attempt is None and operation == "GetObject":
            attempt = _read_whole
        rate = settings.max_bandwidth
        tries = Attempts(
            operation, self.name, key, limit=limit, stall=settings.stall_timeout,
            most=min(settings.retry_attempts, limit.attempts or settings.retry_attempts),
            hang=min(settings.read_timeout, math.inf if limit.hang is None else limit.hang),
            pace=None if rate is None else paces.setdefault(rate, Pace(rate)),
        )  # fmt: skip
        try:
            return tries.run(send if attempt is None else functools.partial(attempt, send), self.known, data=data)
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

    # --- writing a small object ----------------------------------------------------------------------

    def put(
        self, key: str, data: bytes | memoryview, *, expect: Expect | None = None, metadata: UserMetadata = None
    ) -> None:
        """See `Store.put`.

        A refusal is believed only after a look: if the object is the one to be written, an earlier attempt wrote it and
        its answer was lost. Stores that do not know a condition (they answer 501, or refuse one that holds) get a plain
        write.
        """
        plain = {
            **creation_arguments(self.settings, data=False),
            **({} if self.settings.checksum == "none" else {"ChecksumCRC64NVME": encode_crc(crc64nvme(data))}),
            "Key": key,
            "ContentType": "application/json" if key.endswith(".json") else "application/octet-stream",
            "Metadata": dict(metadata or {}),
            "Body": bytes(data) if len(data) <= _SMALL else GatherBody([memoryview(data)], len(data)),
        }
        condition = {}
        if expect is not None:
            condition = {"IfMatch": expect.etag} if expect.etag else {"IfNoneMatch": "*"}
        refusals = 0
        while True:
            try:
                request_with_checksum(self, "PutObject", key, {**plain, **condition})
                return
            except errors.StorageError as error:
                status = answered_status(error)
                if status != 412 and not (status == 501 and condition):
                    raise
                if status == 412:
                    found = None
                    try:
                        found = self.get(key)
                    except errors.ObjectNotFoundError:  # it was deleted since, or is not the one that was expected
                        if "IfNoneMatch" not in condition:
                            raise error from error.__cause__
                    except errors.PreconditionFailedError:
                        pass  # of a GET without a condition: it is not S3 that refuses
                    if found is not None and found.data == data:
                        return
                    if found is not None and condition.get("IfMatch") != found.etag:
                        raise
                    refusals += found is None
                    if refusals >= self.settings.retry_attempts:
                        raise errors.TransferError(
                            f"PutObject on s3://{self.name}/{key} was refused {refusals} times with 412, and a GET "
                            "does not show why. Remedy: check what is between this host and the endpoint (a proxy?)",
                            bucket=self.name, key=key, operation="PutObject", attempts=refusals,
                        ) from error  # fmt: skip
                    if found is None:
                        continue
            if expect is not None and expect.required:
                raise errors.PreconditionFailedError(
                    f"s3://{self.name} does not know conditional writes", bucket=self.name, key=key,
                    operation="PutObject",
                )  # fmt: skip
            learn(Quirk.NO_CONDITIONAL_WRITES, self)
            condition = {}


def _read_whole(send: Send) -> dict[str, Any]:
    """Send a request once, and read the body of its answer."""
    answer = send()
    body = answer["Body"]
    if (answer.get("ContentLength") or 0) <= _BLOCK:
        return {**answer, "Body": body.read()}
    found = bytearray()
    while block := body.read(_BLOCK):
        found += block
        this_thread.attempts.progress.moved(len(block))
    return {**answer, "Body": found}


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
    if min(room, len(items)) <= 1:  # in this thread
        results = []
        for item in items:
            if caller is not None and caller.is_set():
                raise Cancelled
            results.append(function(store, item))
        return results
    failed = _Failed()
    failed.other, failed.share = caller, room // len(items)
    bounded = store.within(replace(store.limit, cancel=failed))

    def work(item: T) -> Any:
        try:
            if failed.is_set():
                raise Cancelled
            return function(bounded, item)
        except BaseException as error:  # noqa: BLE001 - the first one is raised in the caller's thread
            failures.append(error)
            failed.set()

    workers = Workers(min(room, len(items)), "dcp_s3-requests")
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


# --- what a store lacks -----------------------------------------------------------------------------


class Quirk(enum.Enum):
    """Features that a store may lack, with the message that is logged once for each bucket.

    The message has the store's endpoint and answer.
    """

    NO_CONDITIONAL_WRITES = (
        "%s does not know conditional writes (If-None-Match, If-Match): two jobs that save to one URL at one time will "
        "not be told apart%s"
    )
    NO_CHECKSUMS = (
        "%s refuses checksums (x-amz-checksum-*): parts are sent without, so that it cannot notice damage on the way. "
        "Loads check what they get, as always%s"
    )
    NO_CHECKSUMS_OF_COPIES = "%s refuses checksums of copies (x-amz-checksum-algorithm): copies are made without%s"
    NO_COPIES = "%s does not copy objects: incremental saves send all bytes%s"
    NO_BATCH_DELETES = "%s has no DeleteObjects: objects are deleted one by one%s"


def learn(quirk: Quirk, bucket: Bucket, why: object = "") -> None:
    """Note that the store of this bucket has the quirk; ``why`` is its answer, for the log."""
    if quirk not in bucket.known.quirks:
        bucket.known.quirks.add(quirk)
        logger.warning(quirk.value, bucket.settings.endpoint_url or "the S3 endpoint", f": {why}" if why else "")


# --- arguments that several requests have -------------------------------------------------------------


def creation_arguments(settings: Settings, *, data: bool) -> dict[str, Any]:
    """Arguments of requests that create an object: encryption, and for data objects the storage class."""
    arguments = {
        "ServerSideEncryption": settings.sse,
        "SSEKMSKeyId": settings.sse_kms_key_id,
        "StorageClass": settings.storage_class if data else None,
    }
    return {name: value for name, value in arguments.items() if value}


# What stores answer to a header that they do not know. Not BadDigest: that is damage, and is retried as it is.
_UNKNOWN_HEADER = frozenset(
    {"NotImplemented", "InvalidRequest", "InvalidArgument", "InvalidHeader", "UnsupportedHeader"}
)


def request_with_checksum(
    bucket: Bucket, operation: str, key: str, arguments: Mapping[str, Any], *, data: bool = False,
    quirk: Quirk = Quirk.NO_CHECKSUMS,
) -> dict[str, Any]:  # fmt: skip
    """Send a request with a checksum, and from when S3 refuses one that it does not know, without.

    Stores other than AWS may not know ``x-amz-checksum-*``. Most ignore it; to those that refuse it nobody could
    save otherwise. Only ``DCP_S3_CHECKSUM=auto`` tries without. The CRCs of items and objects are recorded in any
    case, so that loads are checked. ``quirk`` is what a refusal shows.
    """
    if bucket.settings.checksum != "auto":
        return bucket.request(operation, key, arguments, data=data)
    plain = {name: value for name, value in arguments.items() if not name.startswith("Checksum")}
    refused = ""
    if len(plain) < len(arguments) and not bucket.known.quirks & {Quirk.NO_CHECKSUMS, quirk}:
        try:
            return bucket.request(operation, key, arguments, data=data)
        except errors.StorageError as error:
            status = answered_status(error)
            if status != 501 and not (status == 400 and answered_code(error) in _UNKNOWN_HEADER):
                raise
            refused = str(error)
    answer = bucket.request(operation, key, plain, data=data)  # fails, too, if it was refused for another reason
    if refused:
        learn(quirk, bucket, refused)
    return answer
