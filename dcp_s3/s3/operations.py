"""Operations on single objects, written once and without I/O.

An operation is a generator. It yields `Request`s, and returns its result. For each request it is sent S3's answer, or
thrown the `StorageError` that its attempts ended in. `store.S3Store` carries them out. Listings and deletions are in
`listing`, multipart uploads and copies in `multipart`.
"""

from __future__ import annotations

import base64
import datetime
import email.utils
import enum
import logging
import threading
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import botocore.utils

from dcp_s3 import errors
from dcp_s3.checksum import ChecksumAlgorithm, crc32c, crc64nvme, encode_crc
from dcp_s3.limit import Limit
from dcp_s3.process import reset_in_child
from dcp_s3.s3.body import GatherBody
from dcp_s3.s3.diagnosis import answered_code, answered_status
from dcp_s3.s3.throttle import Gate
from dcp_s3.settings import Settings
from dcp_s3.store import Expect, ObjectHead, ObjectStart, StoredObject, Upload

logger = logging.getLogger(__name__)

T = TypeVar("T")
U = TypeVar("U")

Arguments = Mapping[str, Any]


class Place(Protocol):
    """A bucket as some settings reach it."""

    @property
    def name(self) -> str: ...

    @property
    def settings(self) -> Settings: ...


class Bucket(Place, Protocol):
    """A bucket that carries out operations in the caller's thread: see `store.S3Store`."""

    @property
    def limit(self) -> Limit: ...

    @property
    def gate(self) -> Gate: ...

    def within(self, limit: Limit) -> Bucket: ...

    def run(self, operation: Operation[T]) -> T: ...

    def send(self, request: Request) -> Any: ...

    def call(
        self,
        operation: str,
        key: str,
        request: Callable[[], T],
        *,
        cancel: threading.Event | None = None,
        data: bool = False,
        attempts: int | None = None,
    ) -> T: ...

    def map(self, function: Callable[[Any, T], U], items: Iterable[T]) -> Sequence[U]: ...

    def abort_quietly(self, upload: Upload) -> bool: ...


@dataclass(frozen=True)
class Request:
    """One request, which a driver tries until it succeeds or fails permanently."""

    operation: str
    """S3's name of the operation."""
    key: str
    """Object key, or prefix, for messages."""
    arguments: Arguments | Callable[[], Arguments]
    """Arguments as boto3 takes them, without the common ones; a function is called for them before each attempt."""
    parse: Callable[[Mapping[str, Any]], Any] | None = None
    """Makes the result from S3's answer; a ClientError that it raises counts as the attempt's."""
    reads_body: bool = False
    """Whether to read the answer's ``Body``; it is dropped otherwise."""
    data: bool = False
    """Whether each attempt waits for its turn while S3 throttles."""
    on_failure: Callable[[Exception], None] | None = None
    """Called with what botocore raised in an attempt."""


Operation = Generator[Request, Any, T]
"""An operation whose result is a ``T``."""


def request_arguments(request: Request) -> Arguments:
    return request.arguments() if callable(request.arguments) else request.arguments


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
    NO_BATCH_DELETES = "%s has no DeleteObjects: objects are deleted one by one%s"
    NO_UPLOAD_LISTS = "%s does not list multipart uploads: those that were left open may cost storage%s"


_known: dict[tuple[Quirk, str | None, str], bool] = {}
reset_in_child(_known.clear)


def knows(quirk: Quirk, place: Place) -> bool:
    """Whether the store of this bucket has shown the quirk."""
    return (quirk, place.settings.endpoint_url, place.name) in _known


def learn(quirk: Quirk, place: Place, why: Exception | None = None) -> None:
    """Note that the store of this bucket has the quirk; ``why`` is its answer, for the log."""
    key = (quirk, place.settings.endpoint_url, place.name)
    if key in _known:
        return
    _known[key] = True
    logger.warning(quirk.value, place.settings.endpoint_url or "the S3 endpoint", "" if why is None else f": {why}")


def forget() -> None:
    _known.clear()


# --- times ----------------------------------------------------------------------------------------


def timestamp(value: datetime.datetime | str) -> float:
    """A time from S3's answer, parsed or not, in seconds since the epoch; without a zone it is in UTC."""
    time = _parse(value) if isinstance(value, str) else value
    if time.tzinfo is None:
        time = time.replace(tzinfo=datetime.timezone.utc)
    return time.timestamp()


def _parse(value: str) -> datetime.datetime:
    try:
        return datetime.datetime.fromisoformat(value.replace("Z", "+00:00"))  # as S3 writes it
    except ValueError:
        parsed: datetime.datetime = botocore.utils.parse_timestamp(value)
        return parsed


def server_time(answer: Mapping[str, Any]) -> float | None:
    """When S3 answered by its own clock, in seconds since the epoch; None if it does not tell."""
    headers = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    try:
        return timestamp(email.utils.parsedate_to_datetime(headers["date"]))
    except (KeyError, ValueError, TypeError):
        return None


# --- arguments that several requests have -------------------------------------------------------------

# Besides those on buckets: what only the owner of a bucket asks for, at its own costs.
_OF_THE_OWNER = frozenset({"GetObjectLockConfiguration"})


def common_arguments(place: Place, operation: str) -> dict[str, Any]:
    owner = place.settings.expected_bucket_owner
    arguments = {"Bucket": place.name} | ({"ExpectedBucketOwner": owner} if owner else {})
    if place.settings.requester_pays and "Bucket" not in operation and operation not in _OF_THE_OWNER:
        arguments["RequestPayer"] = "requester"
    return arguments


def creation_arguments(settings: Settings, *, data: bool) -> dict[str, Any]:
    """Arguments of requests that create an object: encryption, and for data objects the storage class."""
    arguments: dict[str, Any] = {}
    if settings.sse:
        arguments["ServerSideEncryption"] = settings.sse
    if settings.sse_kms_key_id:
        arguments["SSEKMSKeyId"] = settings.sse_kms_key_id
    if data and settings.storage_class:
        arguments["StorageClass"] = settings.storage_class
    return arguments


def wire_checksum(settings: Settings) -> ChecksumAlgorithm:
    """Algorithm of the checksum sent with every part and object."""
    return "crc64nvme" if settings.checksum == "auto" else settings.checksum


def checksum_arguments(settings: Settings, data: bytes | memoryview) -> dict[str, str]:
    """The checksum header of a whole body, empty if checksums are off."""
    algorithm = wire_checksum(settings)
    if algorithm == "crc64nvme":
        return {"ChecksumCRC64NVME": encode_crc(crc64nvme(data), algorithm)}
    if algorithm == "crc32c":
        return {"ChecksumCRC32C": encode_crc(crc32c(data), algorithm)}
    return {}


# What stores answer to a header that they do not know. Not BadDigest: that is damage, and is retried as it is.
_UNKNOWN_HEADER = frozenset(
    {"NotImplemented", "InvalidRequest", "InvalidArgument", "InvalidHeader", "UnsupportedHeader"}
)


def with_checksum(place: Place, request: Request) -> Operation[Any]:
    """Send a request with a checksum, and if S3 does not know the checksum, once more without.

    Stores other than AWS may not know ``x-amz-checksum-*``. Most ignore it; to those that refuse it nobody could
    save otherwise. Only ``DCP_S3_CHECKSUM=auto`` tries without. The CRCs of items and objects are recorded in any
    case, so that loads are checked. If both are refused, the first refusal is raised.
    """
    arguments = request_arguments(request)
    plain = {name: value for name, value in arguments.items() if not name.startswith("Checksum")}
    if place.settings.checksum != "auto" or len(plain) == len(arguments):
        return (yield request)
    without = replace(request, arguments=plain)
    if knows(Quirk.NO_CHECKSUMS, place):
        return (yield without)
    try:
        return (yield request)
    except errors.StorageError as error:
        status = answered_status(error)
        if status != 501 and not (status == 400 and answered_code(error) in _UNKNOWN_HEADER):
            raise
        try:
            result = yield without
        except errors.StorageError as second:
            if answered_status(second) in (404, 412):  # it got further: the first one failed because of the checksum
                learn(Quirk.NO_CHECKSUMS, place)
                raise
            raise error from error.__cause__
    learn(Quirk.NO_CHECKSUMS, place)
    return result


# --- one object ---------------------------------------------------------------------------------------


def user_metadata(answer: Mapping[str, Any]) -> dict[str, str]:
    """User metadata of a GetObject or HeadObject, names in lower case: rclone capitalises them."""
    return {name.lower(): value for name, value in (answer.get("Metadata") or {}).items()}


def _stored_object(answer: Mapping[str, Any]) -> StoredObject:
    return StoredObject(bytes(answer["Body"]), user_metadata(answer), answer.get("ETag", ""))


def get(key: str) -> Operation[StoredObject]:
    found: StoredObject = yield Request("GetObject", key, {"Key": key}, _stored_object, reads_body=True)
    return found


def get_start(key: str, most: int) -> Operation[ObjectStart]:
    """Read an object's first ``most`` bytes, and learn its size."""
    try:
        found: ObjectStart | None = yield Request(
            "GetObject", key, {"Key": key, "Range": f"bytes=0-{most - 1}"}, _object_start, reads_body=True
        )
    except errors.OutOfRangeError:
        found = None  # an empty object
    if found is None:
        whole = yield from get(key)
        found = ObjectStart(whole, len(whole.data))
    return found


def _object_start(answer: Mapping[str, Any]) -> ObjectStart | None:
    """None if the answer does not say how large the object is, as from a store without ranges."""
    size = answer.get("ContentRange", "").rpartition("/")[2]
    return ObjectStart(_stored_object(answer), int(size)) if size.isdecimal() else None


def get_range(key: str, byte_range: str, etag: str | None = None) -> Request:
    """Request for a range of an object's bytes (``bytes=0-9``), of one version; the driver's caller gets the body."""
    condition = {"IfMatch": etag} if etag else {}
    return Request("GetObject", key, {"Key": key, "Range": byte_range, **condition}, data=True)


def head(key: str, *, checksum: bool = False) -> Operation[ObjectHead]:
    """The properties of an object; its checksum, too, if that is asked for."""
    mode = {"ChecksumMode": "ENABLED"} if checksum else {}
    found: ObjectHead = yield Request("HeadObject", key, {"Key": key, **mode}, lambda answer: _head(key, answer))
    return found


def _head(key: str, answer: Mapping[str, Any]) -> ObjectHead:
    crc = answer.get("ChecksumCRC64NVME")
    return ObjectHead(
        key=key,
        size=int(answer["ContentLength"]),
        modified_at=timestamp(answer["LastModified"]),
        etag=answer.get("ETag", ""),
        metadata=user_metadata(answer),
        crc64nvme=None if crc is None else base64.b64decode(crc).hex(),
        server_time=server_time(answer),
    )


def exists(key: str) -> Operation[bool]:
    """Whether an object exists.

    A GET of its first byte rather than a HEAD: the answer to a HEAD has no body, so that a missing bucket would look
    like a missing object.
    """
    try:
        yield Request("GetObject", key, {"Key": key, "Range": "bytes=0-0"})
    except errors.ObjectNotFoundError:
        return False
    except errors.OutOfRangeError:
        pass  # an empty object
    return True


# Larger bodies are sent in slices, so that a slow link is seen to move.
_SMALL = 2**20


def put(
    place: Place,
    key: str,
    data: bytes | memoryview,
    *,
    expect: Expect | None = None,
    content_type: str = "application/octet-stream",
    metadata: Mapping[str, str] | None = None,
) -> Operation[None]:
    """Write a small object, on the condition ``expect``.

    A refusal is believed only after a look: if the object is the one to be written, an earlier attempt wrote it and
    its answer was lost. Stores that do not know a condition (they answer 501, or refuse one that holds) get a plain
    write.
    """
    plain = {
        **creation_arguments(place.settings, data=False),
        **checksum_arguments(place.settings, data),
        "Key": key,
        "ContentType": content_type,
        "Metadata": dict(metadata or {}),
        "Body": bytes(data) if len(data) <= _SMALL else GatherBody([memoryview(data)]),
    }
    condition = {}
    if expect is not None:
        condition = {"IfMatch": expect.etag} if expect.etag else {"IfNoneMatch": "*"}
    refusals = 0
    while True:
        try:
            yield from with_checksum(place, Request("PutObject", key, {**plain, **condition}))
            return
        except errors.StorageError as error:
            status = answered_status(error)
            if status == 501 and condition:
                meaning = _WriteRefusal.CONDITION_IS_UNKNOWN
            elif status == 412:
                meaning = yield from _look(key, data, condition)
            else:
                raise
            if meaning is _WriteRefusal.HOLDS:
                raise
        if meaning is _WriteRefusal.IS_DONE:
            return
        if meaning is _WriteRefusal.CONDITION_IS_UNKNOWN:
            if expect is not None and expect.required:
                raise errors.PreconditionFailedError(
                    f"s3://{place.name} does not know conditional writes", bucket=place.name, key=key,
                    operation="PutObject",
                )  # fmt: skip
            learn(Quirk.NO_CONDITIONAL_WRITES, place)
            condition = {}
            continue
        refusals += 1
        if refusals >= place.settings.retry_attempts:
            raise errors.TransferError(
                f"PutObject on s3://{place.name}/{key} was refused {refusals} times with 412, and a GET does not show "
                "why. Remedy: check what is between this host and the endpoint (a proxy?)",
                bucket=place.name, key=key, operation="PutObject", attempts=refusals,
            )  # fmt: skip


class _WriteRefusal(enum.Enum):
    """The meaning of a refused write."""

    HOLDS = enum.auto()  # somebody else wrote the object
    IS_DONE = enum.auto()  # it is the object that was to be written
    HAS_NO_GROUND = enum.auto()  # the object was deleted since, or it was not S3 that refused
    CONDITION_IS_UNKNOWN = enum.auto()


def _look(key: str, data: bytes | memoryview, condition: Mapping[str, str]) -> Operation[_WriteRefusal]:
    try:
        found = yield from get(key)
    except errors.ObjectNotFoundError:
        return _WriteRefusal.HAS_NO_GROUND if "IfNoneMatch" in condition else _WriteRefusal.HOLDS
    except errors.PreconditionFailedError:
        return _WriteRefusal.HAS_NO_GROUND  # to a GET without a condition
    if found.data == data:
        return _WriteRefusal.IS_DONE
    return _WriteRefusal.CONDITION_IS_UNKNOWN if condition.get("IfMatch") == found.etag else _WriteRefusal.HOLDS
