"""What stores lack, the arguments that several requests have, and conditional writes."""

from __future__ import annotations

import enum
import logging
from collections.abc import Mapping
from typing import Any

from dcp_s3 import errors
from dcp_s3.memory import crc64nvme, encode_crc
from dcp_s3.process import reset_in_child
from dcp_s3.s3.body import GatherBody
from dcp_s3.s3.bucket import Bucket
from dcp_s3.s3.diagnosis import answered_code, answered_status
from dcp_s3.settings import Settings
from dcp_s3.store import Expect, StoredObject, UserMetadata

logger = logging.getLogger(__name__)

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


_known: set[tuple[Quirk, str | None, str]] = set()
reset_in_child(_known.clear)


def knows(quirk: Quirk, bucket: Bucket) -> bool:
    """Whether the store of this bucket has shown the quirk."""
    return (quirk, bucket.settings.endpoint_url, bucket.name) in _known


def learn(quirk: Quirk, bucket: Bucket, why: object = "") -> None:
    """Note that the store of this bucket has the quirk; ``why`` is its answer, for the log."""
    if not knows(quirk, bucket):
        endpoint = bucket.settings.endpoint_url
        _known.add((quirk, endpoint, bucket.name))
        logger.warning(quirk.value, endpoint or "the S3 endpoint", f": {why}" if why else "")


def forget() -> None:
    _known.clear()


# --- arguments that several requests have -------------------------------------------------------------


def creation_arguments(settings: Settings, *, data: bool) -> dict[str, Any]:
    """Arguments of requests that create an object: encryption, and for data objects the storage class."""
    arguments = {
        "ServerSideEncryption": settings.sse,
        "SSEKMSKeyId": settings.sse_kms_key_id,
        "StorageClass": settings.storage_class if data else None,
    }
    return {name: value for name, value in arguments.items() if value}


def checksum_arguments(settings: Settings, crc: int) -> dict[str, str]:
    """The checksum header of a body with this CRC-64, empty if checksums are off."""
    return {} if settings.checksum == "none" else {"ChecksumCRC64NVME": encode_crc(crc)}


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
    plain = {name: value for name, value in arguments.items() if not name.startswith("Checksum")}
    is_known = knows(Quirk.NO_CHECKSUMS, bucket) or knows(quirk, bucket)
    if bucket.settings.checksum == "auto" and len(plain) < len(arguments) and not is_known:
        try:
            return bucket.request(operation, key, arguments, data=data)
        except errors.StorageError as error:
            status = answered_status(error)
            if status != 501 and not (status == 400 and answered_code(error) in _UNKNOWN_HEADER):
                raise
            refused = str(error)
        answer = bucket.request(operation, key, plain, data=data)  # fails, too, if it was refused for another reason
        learn(quirk, bucket, refused)
        return answer
    return bucket.request(operation, key, plain if bucket.settings.checksum == "auto" else arguments, data=data)


# --- small objects --------------------------------------------------------------------------------------

# Larger bodies are sent in slices, so that a slow link is seen to move.
_SMALL = 2**20


def put(
    bucket: Bucket, key: str, data: bytes | memoryview, *, expect: Expect | None = None, metadata: UserMetadata = None
) -> None:
    """See `Store.put`.

    A refusal is believed only after a look: if the object is the one to be written, an earlier attempt wrote it and
    its answer was lost. Stores that do not know a condition (they answer 501, or refuse one that holds) get a plain
    write.
    """
    plain = {
        **creation_arguments(bucket.settings, data=False),
        **checksum_arguments(bucket.settings, crc64nvme(data)),
        "Key": key,
        "ContentType": "application/json" if key.endswith(".json") else "application/octet-stream",
        "Metadata": dict(metadata or {}),
        "Body": bytes(data) if len(data) <= _SMALL else GatherBody([memoryview(data)]),
    }
    condition = {}
    if expect is not None:
        condition = {"IfMatch": expect.etag} if expect.etag else {"IfNoneMatch": "*"}
    refusals = 0
    while True:
        try:
            request_with_checksum(bucket, "PutObject", key, {**plain, **condition})
            return
        except errors.StorageError as error:
            status = answered_status(error)
            if status != 412 and not (status == 501 and condition):
                raise
            if status == 412:
                found = _look(bucket, key, error if "IfNoneMatch" not in condition else None)
                if found is not None and found.data == data:
                    return
                if found is not None and condition.get("IfMatch") != found.etag:
                    raise
                refusals += found is None
                if refusals >= bucket.settings.retry_attempts:
                    raise errors.TransferError(
                        f"PutObject on s3://{bucket.name}/{key} was refused {refusals} times with 412, and a GET does "
                        "not show why. Remedy: check what is between this host and the endpoint (a proxy?)",
                        bucket=bucket.name, key=key, operation="PutObject", attempts=refusals,
                    ) from error  # fmt: skip
                if found is None:
                    continue
        if expect is not None and expect.required:
            raise errors.PreconditionFailedError(
                f"s3://{bucket.name} does not know conditional writes", bucket=bucket.name, key=key,
                operation="PutObject",
            )  # fmt: skip
        learn(Quirk.NO_CONDITIONAL_WRITES, bucket)
        condition = {}


def _look(bucket: Bucket, key: str, refusal: errors.StorageError | None) -> StoredObject | None:
    """The object that is in the way of a refused write. None if the write may be tried again: the object was deleted
    since, or it was not S3 that refused (a GET without a condition is refused, too).

    Raises:
        StorageError: ``refusal``, if there is no object that could have been the expected one.
    """
    try:
        return bucket.get(key)
    except errors.ObjectNotFoundError:
        if refusal is not None:
            raise refusal from refusal.__cause__
    except errors.PreconditionFailedError:
        pass
    return None
