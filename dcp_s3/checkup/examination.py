"""One examination: its requests, what its checks learn for later ones, and the probe objects, which it removes."""

from __future__ import annotations

import contextlib
import logging
import secrets
import string
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from botocore.exceptions import ClientError

from dcp_s3 import errors
from dcp_s3.checkup.permissions import CONFIGURATION
from dcp_s3.limit import Limit
from dcp_s3.s3.client import get_client
from dcp_s3.s3.diagnosis import answered_status
from dcp_s3.s3.operations import Request, creation_arguments, server_time
from dcp_s3.s3.store import S3Store
from dcp_s3.settings import Settings
from dcp_s3.url import CheckpointURL

logger = logging.getLogger(__name__)

# A healthy store answers each of these small requests in a fraction of that.
_LIMIT = Limit(hang=5.0, attempts=3)
_LATE_SECONDS = 1.0
"""After Ctrl-C, until a request that was under way has been carried out."""
PROBE = "__0_0-probe.distcp"
"""Name of the object that most checks write, like one of a checkpoint's."""


@dataclass(frozen=True)
class Hello:
    """The answer to a HeadBucket, whatever it was."""

    status: int
    headers: Mapping[str, str]
    seconds: float
    """Seconds until it came."""
    skew: float | None
    """Seconds by which this host's clock is ahead of the server's, to within one; None if the server does not tell."""


@dataclass
class Examination:
    """What the checks share."""

    url: CheckpointURL
    read_only: bool
    given: Any
    """Settings as the caller gave them."""
    settings: Settings = field(default_factory=Settings.model_construct)
    """Settings in force, once they are known to be valid."""
    hello: Hello | None = None
    denied: bool = False
    """Whether a permission of `permissions.PERMISSIONS` was refused."""
    dead: str = ""
    """Why requests make no sense any more."""
    may_delete: bool = True
    """Whether a probe object can be removed again."""
    knows_if_none_match: bool = True
    upload: str = ""
    """Id of the multipart upload that several checks look at."""
    is_versioned: bool = False
    """Whether the bucket keeps old versions."""
    kms_key: str = ""
    """ARN of the bucket's KMS key."""
    lifecycle: list[Mapping[str, Any]] | None = None
    """The bucket's lifecycle rules; None if they could not be read."""
    keys: list[str] = field(default_factory=list)
    """Keys that may have been written."""
    uploads: list[tuple[str, str]] = field(default_factory=list)
    """Key and id of multipart uploads that may be open."""

    def __post_init__(self) -> None:
        # No digit: a checkpoint's name is searched for its step, and one without a step is never the latest.
        letters = "".join(secrets.choice(string.ascii_lowercase) for _ in range(12))
        self.probes = self.url.child(f"doctor-probe-{letters}")

    @property
    def store(self) -> S3Store:
        """The bucket, with little patience."""
        return S3Store(self.url.bucket, self.settings, _LIMIT)

    @property
    def client(self) -> Any:
        """This process's boto3 client."""
        return get_client(self.settings)

    # --- requests ---------------------------------------------------------------------------------------

    def ask(
        self, operation: str, name: str | None = None, *, attempts: int | None = None, **arguments: Any
    ) -> dict[str, Any]:
        """Send one request, and again if it fails temporarily. A body is read.

        Args:
            operation: S3's name of the operation.
            name: name of a probe object; None for requests to the bucket.
            attempts: most attempts, instead of those of doctor.
            arguments: as boto3 takes them, without bucket and key.

        Raises:
            StorageError: it failed.
        """
        key = "" if name is None else self.key(name)
        store = self.store
        request = Request(operation, key, arguments if name is None else {"Key": key, **arguments})

        def send() -> dict[str, Any]:
            answer = dict(store.send(request))
            if "Body" in answer:
                answer["Body"] = answer["Body"].read()
            return answer

        try:
            return store.call(operation, key, send, attempts=attempts)
        except errors.AccessDeniedError:
            self.denied = self.denied or operation not in CONFIGURATION
            raise
        except errors.TransferError as error:
            if not answered_status(error) and attempts is None:
                self.dead = f"the endpoint stopped answering at {operation}"
            raise

    def key(self, name: str) -> str:
        """The key of a probe object."""
        return self.probes.key(name)

    def put(self, name: str, data: bytes, **arguments: Any) -> dict[str, Any]:
        """Write a probe object, and remember that it is there.

        Raises:
            StorageError: it was not written, or not for certain.
        """
        is_new = self.key(name) not in self.keys
        if is_new:
            self.keys.append(self.key(name))
        try:
            return self.ask("PutObject", name, Body=data, **creation_arguments(self.settings, data=True), **arguments)
        except errors.AccessDeniedError:
            if is_new:
                self.keys.remove(self.key(name))  # it is certain that nothing was written
            raise

    def begin_upload(self, name: str, **arguments: Any) -> str:
        """Begin a multipart upload, and remember that it is open.

        Raises:
            StorageError
        """
        answer = self.ask(
            "CreateMultipartUpload", name, **creation_arguments(self.settings, data=True), **arguments
        )  # fmt: skip
        self.uploads.append((self.key(name), answer["UploadId"]))
        return str(answer["UploadId"])

    def greet(self) -> Hello:
        """Send a HeadBucket. A refusal is an answer, too.

        Raises:
            StorageError: there was none.
        """
        began, clock = time.monotonic(), time.time()
        try:
            request = Request("HeadBucket", "", {})
            answer: Mapping[str, Any] = self.store.call("HeadBucket", "", lambda: self.store.send(request), attempts=1)
        except errors.StorageError as error:
            if not isinstance(error.__cause__, ClientError):
                raise
            answer = error.__cause__.response
        seconds = time.monotonic() - began
        metadata = answer.get("ResponseMetadata", {})
        there = server_time(answer)
        # A Date is cut to the second below: half a second is added, as its middle.
        skew = None if there is None else clock + seconds / 2 - (there + 0.5)
        return Hello(int(metadata.get("HTTPStatusCode", 0)), metadata.get("HTTPHeaders", {}), seconds, skew)

    # --- removing ---------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def removing(self) -> Iterator[None]:
        """Remove the probe objects also after a failure or Ctrl-C; a second Ctrl-C gives up."""
        try:
            yield
        except BaseException:
            if self.keys or self.uploads:
                time.sleep(_LATE_SECONDS)
                for left in self.remove():
                    logger.warning("not removed: %s. Remedy: delete what is below %s", left, self.probes)
            raise

    def remove(self) -> list[str]:
        """Remove all that the examination wrote: open uploads, objects, and their versions.

        Returns:
            What is left, each with the reason.
        """
        if self.dead:
            try:
                self.greet()  # it may be back
            except errors.StorageError:
                written = {*self.keys, *(key for key, _ in self.uploads)}
                return [f"s3://{self.url.bucket}/{key}: {self.dead}" for key in sorted(written)]
        left: list[str] = []
        for key, upload_id in {*self.uploads, *(self._list("ListMultipartUploads", "UploadId", "Uploads") or ())}:
            self._close_upload(key, upload_id, left)
        for key in {*self.keys, *(key for key, _ in self._list("ListObjectsV2", "Key", "Contents") or ())}:
            self._try(left, key, "DeleteObject", Key=key)
        if left:
            return left
        versions = self._list("ListObjectVersions", "VersionId", "Versions", "DeleteMarkers")
        for key, version in versions or ():
            self._try(left, key, "DeleteObject", Key=key, VersionId=version)
        if versions is None and self.is_versioned:
            left.append(f"old versions of a few bytes below {self.probes}: s3:ListBucketVersions is not allowed")
        self.keys, self.uploads = [], []
        return left

    def _close_upload(self, key: str, upload_id: str, left: list[str]) -> None:
        where: dict[str, Any] = {"Key": key, "UploadId": upload_id}
        refused: list[str] = []
        if self._try(refused, key, "AbortMultipartUpload", **where):
            return
        # Whoever may not abort it can still make an object of it, and delete that.
        with contextlib.suppress(errors.StorageError):
            etag = self.ask("UploadPart", Body=b"probe", PartNumber=1, **where)["ETag"]
            self.ask("CompleteMultipartUpload", MultipartUpload={"Parts": [{"ETag": etag, "PartNumber": 1}]}, **where)
            self.keys.append(key)
            return
        left += refused

    def _try(self, left: list[str], key: str, operation: str, **arguments: Any) -> bool:
        try:
            self.ask(operation, **arguments)
        except errors.ObjectNotFoundError:
            return True
        except errors.StorageError as error:
            if answered_status(error) != 404:
                left.append(f"s3://{self.url.bucket}/{key}: {error}")
                return False
        return True

    def _list(self, operation: str, identity: str, *entries: str) -> list[tuple[str, str]] | None:
        """Key and id of what is below the probes' prefix, less than a page; None where it cannot be listed."""
        try:
            answer = self.ask(operation, Prefix=self.probes.key(""))
        except errors.StorageError:
            return None
        return [(each["Key"], str(each[identity])) for name in entries for each in answer.get(name, ())]
