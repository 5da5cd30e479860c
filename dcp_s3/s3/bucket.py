"""Requests for whole, small objects of one bucket, each with retries and the settings' common arguments."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from botocore.exceptions import ClientError

from dcp_s3 import errors
from dcp_s3.checksum import ChecksumAlgorithm, crc32c, crc64nvme, encode_crc
from dcp_s3.s3 import retry
from dcp_s3.s3.checksum_support import with_or_without
from dcp_s3.s3.client import forget_client, get_client
from dcp_s3.s3.deadline import Deadline
from dcp_s3.s3.flight import hang_at_most
from dcp_s3.s3.throttle import Gate, gate_of
from dcp_s3.settings import Settings

logger = logging.getLogger(__name__)

T = TypeVar("T")

# https://docs.aws.amazon.com/AmazonS3/latest/API/API_DeleteObjects.html
DELETE_BATCH = 1000

# After a deadline: to abort uploads and delete objects, in all.
_CLEANUP_SECONDS = 10.0


@dataclass(frozen=True)
class StoredObject:
    """A small object as it was read.

    Attributes:
        data: its bytes.
        metadata: user metadata, names in lower case.
        etag: as S3 gave it, with quotes.
    """

    data: bytes
    metadata: Mapping[str, str]
    etag: str


@dataclass(frozen=True)
class Bucket:
    """A bucket as these settings reach it. Holds no connection: cheap, picklable, fork-safe.

    Attributes:
        name: bucket name.
        settings: of the writer or reader.
        patience: seconds after which a request that fails is not tried again; None to go by the attempts alone.
        deadline: after which its requests fail with DeadlineExceededError.
    """

    name: str
    settings: Settings
    patience: float | None = None
    deadline: Deadline | None = None

    @property
    def client(self) -> Any:
        """This process's boto3 client."""
        return get_client(self.settings)

    def for_cleanup(self) -> Bucket:
        """The bucket for removing what a failure left: a deadline is put off a little, for all of that together."""
        if self.deadline is None:
            return self
        deadline = replace(self.deadline, at=max(self.deadline.at, time.monotonic() + _CLEANUP_SECONDS))
        return replace(self, settings=limit_timeouts(self.settings, _CLEANUP_SECONDS), deadline=deadline)

    @property
    def gate(self) -> Gate:
        """This process's gate for its data requests."""
        return gate_of(self.settings.endpoint_url, self.name, self.settings.concurrency)

    @property
    def wire_checksum(self) -> ChecksumAlgorithm:
        """Algorithm of the checksum sent with every part and object."""
        return "crc64nvme" if self.settings.checksum == "auto" else self.settings.checksum

    @property
    def common(self) -> dict[str, Any]:
        """Arguments of every request."""
        owner = self.settings.expected_bucket_owner
        return {"Bucket": self.name} | ({"ExpectedBucketOwner": owner} if owner else {})

    def creation_arguments(self, *, data: bool) -> dict[str, Any]:
        """Arguments of requests that create an object: encryption, and for data objects the storage class."""
        arguments: dict[str, Any] = {}
        if self.settings.sse:
            arguments["ServerSideEncryption"] = self.settings.sse
        if self.settings.sse_kms_key_id:
            arguments["SSEKMSKeyId"] = self.settings.sse_kms_key_id
        if data and self.settings.storage_class:
            arguments["StorageClass"] = self.settings.storage_class
        return arguments

    def call(
        self,
        operation: str,
        key: str,
        request: Callable[[], T],
        *,
        cancel: threading.Event | None = None,
        recover: Callable[[Exception], T | None] | None = None,
        data: bool = False,
        attempts: int | None = None,
    ) -> T:
        """`retry.call` for this bucket. A request with ``data`` waits for its turn while S3 throttles.

        ``attempts``: other than the settings say.
        """

        def attempt() -> T:
            with hang_at_most(self.settings.connect_timeout, self.settings.read_timeout):
                return request()

        def call() -> T:
            return retry.call(
                attempt,
                operation=operation,
                bucket=self.name,
                key=key,
                attempts=self.settings.retry_attempts if attempts is None else attempts,
                patience=self.patience,
                deadline=self.deadline,
                cancel=cancel,
                recover=recover,
                gate=self.gate,
                data=data,
            )

        try:
            if self.settings.checksum != "auto":
                return call()
            return with_or_without(call, operation=operation, endpoint_url=self.settings.endpoint_url)
        except errors.CredentialsError:
            forget_client(self.settings)  # the next save or load looks for credentials anew
            raise

    def exists(self, key: str) -> bool:
        """Whether the object exists.

        A GET of its first byte rather than a HEAD: the answer to a HEAD has no body, so that a missing bucket
        would look like a missing object.

        Raises:
            BucketNotFoundError, CredentialsError, AccessDeniedError, TransferError: cannot tell.
        """
        try:
            self.call("GetObject", key, lambda: self._get(key, Range="bytes=0-0")["Body"].close())
        except errors.ObjectNotFoundError:
            return False
        except errors.StorageError as error:
            if isinstance(error.__cause__, Exception) and retry.status_code(error.__cause__) == 416:
                return True  # an empty object
            raise
        return True

    def _get(self, key: str, **arguments: Any) -> Any:
        return self.client.get_object(**self.common, Key=key, **arguments)

    def read(self, key: str) -> bytes:
        """All bytes of a small object.

        Raises:
            ObjectNotFoundError: there is none; other StorageErrors.
        """
        return self.get(key).data

    def get(self, key: str) -> StoredObject:
        """A small object, whole.

        Raises:
            ObjectNotFoundError: there is none; other StorageErrors.
        """

        def attempt() -> StoredObject:
            answer = self._get(key)
            return StoredObject(bytes(answer["Body"].read()), _user_metadata(answer), answer.get("ETag", ""))

        return self.call("GetObject", key, attempt)

    def head(self, key: str, **arguments: Any) -> Mapping[str, Any]:
        """S3's HeadObject answer, with the names of user metadata in lower case.

        Args:
            key: object key.
            arguments: further ones of the request.

        Raises:
            ObjectNotFoundError: there is none (or no such bucket); other StorageErrors.
        """
        answer: Mapping[str, Any] = self.call(
            "HeadObject", key, lambda: self.client.head_object(**self.common, Key=key, **arguments)
        )
        return {**answer, "Metadata": _user_metadata(answer)}

    def write(
        self,
        key: str,
        data: bytes,
        *,
        if_absent: bool = False,
        if_match: str | None = None,
        content_type: str = "application/octet-stream",
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        """Put a small object.

        Args:
            key: object key.
            data: its bytes.
            if_absent: ask S3 to refuse if the object exists (If-None-Match: *).
            if_match: ask S3 to refuse unless the object has this ETag (If-Match).
            content_type: MIME type.
            metadata: user metadata.

        A refusal is believed only after a look: if the object is the one that was to be written, an earlier attempt
        did it and its answer was lost. Stores that do not know a condition (they answer 501, or refuse one that holds)
        get a plain write, after a warning.

        Raises:
            PreconditionFailedError: the condition does not hold: somebody else wrote the object.
            TransferError: a refusal was false, as often as it was tried; other StorageErrors.
        """
        arguments: dict[str, Any] = {
            **self.common,
            **self.creation_arguments(data=False),
            **self.checksum_arguments(data),
            "Key": key,
            "ContentType": content_type,
            "Metadata": dict(metadata or {}),
        }

        def attempt() -> bool:
            self.client.put_object(**arguments, Body=data)
            return True

        def look(error: Exception) -> bool | None:
            status = retry.status_code(error)
            if status == 501 and (if_absent or if_match):
                return without_condition()
            if status != 412:
                return None
            try:
                found = self.get(key)
            except errors.ObjectNotFoundError:
                return once_more() if if_absent else None
            except errors.PreconditionFailedError:
                return once_more()  # to a GET without a condition
            if found.data == data:
                return True
            return without_condition() if if_match and found.etag == if_match else None

        refusals = itertools.count(1)

        def once_more() -> bool:
            """The refusal has no ground: the object was deleted since, or it was not S3 that refused."""
            if (times := next(refusals)) >= self.settings.retry_attempts:
                raise errors.TransferError(
                    f"PutObject on s3://{self.name}/{key} was refused {times} times with 412, and a GET does not show "
                    "why. Remedy: check what is between this host and the endpoint (a proxy?)",
                    bucket=self.name, key=key, operation="PutObject", attempts=times,
                )  # fmt: skip
            return self.call("PutObject", key, attempt, recover=look)

        def without_condition() -> bool:
            _warn_once_no_conditional_writes(self.settings.endpoint_url)
            arguments.pop("IfNoneMatch", None)
            arguments.pop("IfMatch", None)
            return self.call("PutObject", key, attempt)

        if if_absent:
            arguments["IfNoneMatch"] = "*"
        elif if_match:
            arguments["IfMatch"] = if_match
        self.call("PutObject", key, attempt, recover=look)

    def checksum_arguments(self, data: bytes) -> dict[str, str]:
        """The checksum header of a whole body, empty if checksums are off."""
        algorithm = self.wire_checksum
        if algorithm == "crc64nvme":
            return {"ChecksumCRC64NVME": encode_crc(crc64nvme(data), algorithm)}
        if algorithm == "crc32c":
            return {"ChecksumCRC32C": encode_crc(crc32c(data), algorithm)}
        return {}

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects; those that do not exist count as deleted.

        Raises:
            StorageError: some could not be deleted.
        """
        pending = list(keys)
        for start in range(0, len(pending), DELETE_BATCH):
            batch = pending[start : start + DELETE_BATCH]
            self.call("DeleteObjects", batch[0], lambda batch=batch: self._delete_batch(batch))  # type: ignore[misc]

    def _delete_batch(self, batch: list[str]) -> None:
        """One DeleteObjects. What failed and may pass stays in ``batch`` for the next attempt."""
        listed = {"Objects": [{"Key": key} for key in batch], "Quiet": True}
        answer: Mapping[str, Any] = self.client.delete_objects(**self.common, Delete=listed)
        if failed := [_Failed.of(entry) for entry in answer.get("Errors", ())]:
            batch[:] = [each.key for each in failed]
            # One that never will be deleted, if there is one.
            worst = min(failed, key=lambda each: retry.is_retryable(each.error(len(failed))))
            raise worst.error(len(failed))

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        """(key, bytes) of every object whose key starts with ``prefix``, in key order."""
        token: dict[str, str] = {}
        while True:
            page: Mapping[str, Any] = self.call(
                "ListObjectsV2",
                prefix,
                lambda token=token: self.client.list_objects_v2(**self.common, Prefix=prefix, **token),  # type: ignore[misc]
            )
            for entry in page.get("Contents", ()):
                yield entry["Key"], int(entry["Size"])
            if not page.get("IsTruncated"):
                return
            token = {"ContinuationToken": page["NextContinuationToken"]}


def limit_timeouts(settings: Settings, seconds: float) -> Settings:
    """Settings whose requests hang for ``seconds`` at most."""
    if max(settings.connect_timeout, settings.read_timeout) <= seconds:
        return settings
    limits = {"connect_timeout": min(settings.connect_timeout, seconds)}
    return settings.model_copy(update=limits | {"read_timeout": min(settings.read_timeout, seconds)})


@dataclass(frozen=True)
class _Failed:
    """A key that DeleteObjects did not delete."""

    key: str
    code: str
    message: str

    @classmethod
    def of(cls, entry: Mapping[str, Any]) -> _Failed:
        return cls(str(entry.get("Key")), str(entry.get("Code")), str(entry.get("Message")))

    def error(self, count: int) -> ClientError:
        """As if the whole request had failed."""
        message = f"{count} objects were not deleted, among them {self.key!r}: {self.message}"
        return ClientError({"Error": {"Code": self.code, "Message": message}}, "DeleteObjects")


def _user_metadata(answer: Mapping[str, Any]) -> dict[str, str]:
    # rclone capitalises the names.
    return {name.lower(): value for name, value in (answer.get("Metadata") or {}).items()}


_warned: set[str | None] = set()


def _warn_once_no_conditional_writes(endpoint: str | None) -> None:
    if endpoint not in _warned:
        _warned.add(endpoint)
        logger.warning(
            "%s does not know conditional writes (If-None-Match, If-Match): two jobs that save to one URL at one time "
            "will not be told apart", endpoint or "the S3 endpoint",
        )  # fmt: skip
