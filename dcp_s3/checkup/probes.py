"""Results of checks, and the requests and probe objects by which they are found. The objects are removed again."""

from __future__ import annotations

import contextlib
import logging
import secrets
import string
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from botocore.exceptions import ClientError

from dcp_s3 import errors
from dcp_s3.limit import Limit
from dcp_s3.s3.bucket import creation_arguments, server_time
from dcp_s3.s3.client import get_client
from dcp_s3.s3.diagnosis import answered_code, answered_status
from dcp_s3.s3.store import store_of
from dcp_s3.settings import Settings
from dcp_s3.units import one_line
from dcp_s3.url import CheckpointURL

logger = logging.getLogger(__name__)

# A healthy store answers each of these small requests in a fraction of that.
_LIMIT = Limit(hang=5.0, attempts=3)
_LATE_SECONDS = 1.0
"""After Ctrl-C, until a request that was under way has been carried out."""
DATA = bytes(range(256))
PROBE = "__0_0-probe.distcp"
"""Name of the object that most checks write, like one of a checkpoint's."""
CONFIGURATION = {
    "GetBucketVersioning": "s3:GetBucketVersioning",
    "GetBucketLifecycleConfiguration": "s3:GetLifecycleConfiguration",
}
"""Operations by which doctor alone looks at a bucket's configuration, and the actions that allow them."""

Status = Literal["ok", "warning", "failed", "skipped"]


@dataclass(frozen=True)
class CheckResult:
    """The outcome of one check.

    >>> doctor("s3://bucket/run")["PutObject"].status
    'ok'
    """

    name: str
    """Name of the check."""
    status: Status
    """``failed``: saves or loads will not work. ``warning``: they work, with the limit that ``found`` names.
    ``skipped``: not checked."""
    found: str
    """What was found: a clause for people."""
    remedy: str = ""
    """What to do about it; empty if nothing."""
    cell: str = ""
    """What the store's row in docs/stores.md says of it, in a few words; empty: nothing."""

    def __repr__(self) -> str:
        return one_line("CheckResult", repr(self.name), self.status, " ".join(self.found.split()))


# Whoever makes a check adds its name.
ok, skip = partial(CheckResult, "", "ok"), partial(CheckResult, "", "skipped")
warn, fail = partial(CheckResult, "", "warning"), partial(CheckResult, "", "failed")


def from_error(error: Exception, *, status: Status = "failed", consequence: str = "") -> CheckResult:
    """The result for an error, whose message ends with the remedy; ``consequence`` is what it means."""
    found, _, remedy = str(error).partition(". Remedy: ")
    return CheckResult("", status, f"{found}: {consequence}" if consequence else found, remedy)


@dataclass
class Examination:
    """What the checks share: requests, what one learns for later ones, and the probe objects."""

    url: CheckpointURL
    given: Any
    """Settings as the caller gave them."""
    settings: Settings = field(default_factory=Settings.model_construct)
    """Settings in force, once they are known to be valid."""
    server: str = ""
    """What the endpoint calls itself; empty if it does not say."""
    skew: float | None = None
    """Seconds by which this host's clock is ahead of the endpoint's, to within one; None if that is not known."""
    keys: set[str] = field(default_factory=set)
    """Keys that may have been written."""
    uploads: set[tuple[str, str]] = field(default_factory=set)
    """Key and id of multipart uploads that may be open."""

    def __post_init__(self) -> None:
        # No digit: a checkpoint's name is searched for its step, and one without a step is never the latest.
        letters = "".join(secrets.choice(string.ascii_lowercase) for _ in range(12))
        self.probes = self.url.child(f"doctor-probe-{letters}")
        self.key = self.probes.key

    @property
    def client(self) -> Any:
        return get_client(self.settings)

    def ask(
        self, operation: str, name: str | None = None, *, attempts: int | None = None, **arguments: Any
    ) -> dict[str, Any]:
        """Send a request to the bucket, or to the probe object of a name, and again if it fails temporarily. Arguments
        are boto3's, without bucket and key."""
        if name is not None:
            arguments["Key"] = self.key(name)
        key, store = arguments.get("Key", ""), store_of(self.url, self.settings, _LIMIT)
        return store.request(operation, key, arguments, attempts=attempts)

    def attempt(
        self, refusals: Collection[int], operation: str, name: str | None = None, **arguments: Any
    ) -> tuple[dict[str, Any], str]:
        """The answer to a request, and an empty text; or nothing, and the code of a refusal with one of these statuses.
        Another error is raised."""
        try:
            return self.ask(operation, name, **arguments), ""
        except errors.StorageError as error:
            if answered_status(error) not in refusals:
                raise
            return {}, answered_code(error)

    def put(self, name: str, data: bytes, **arguments: Any) -> None:
        written = set(self.keys)
        self.keys.add(self.key(name))
        try:
            self.ask("PutObject", name, Body=data, **creation_arguments(self.settings, data=True), **arguments)
        except errors.AccessDeniedError:
            self.keys = written  # it is certain that nothing was written
            raise

    def begin_upload(self, **arguments: Any) -> str:
        arguments |= creation_arguments(self.settings, data=True)
        upload = str(self.ask("CreateMultipartUpload", PROBE, **arguments)["UploadId"])
        self.uploads.add((self.key(PROBE), upload))
        return upload

    def complete_upload(self, upload: str, **arguments: Any) -> None:
        """Make the probe object of an upload, by one part; ``arguments`` are of the completion."""
        part = self.ask("UploadPart", PROBE, UploadId=upload, Body=DATA, PartNumber=1)
        parts = {"Parts": [{"ETag": part["ETag"], "PartNumber": 1}]}
        self.keys.add(self.key(PROBE))
        self.ask("CompleteMultipartUpload", PROBE, UploadId=upload, MultipartUpload=parts, **arguments)
        self.uploads.discard((self.key(PROBE), upload))

    def greet(self) -> float:
        """Send a HeadBucket, and return the seconds until the answer. A refusal is an answer, too."""
        began, clock = time.monotonic(), time.time()
        try:
            answer: Mapping[str, Any] = self.ask("HeadBucket", attempts=1)
        except errors.StorageError as error:
            if not isinstance(error.__cause__, ClientError):
                raise
            answer = error.__cause__.response
        seconds = time.monotonic() - began
        self.server = str(answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("server", ""))
        there = server_time(answer)
        if there is not None:
            self.skew = clock + seconds / 2 - (there + 0.5)  # a Date is cut to the second below
        return seconds

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
        """Remove all that was written (open uploads, objects, their versions), and say what is left, and why."""
        left: list[str] = []
        for key, upload in self.uploads | self._list("ListMultipartUploads", "UploadId", "Uploads"):
            left += self._refused("AbortMultipartUpload", key, UploadId=upload)
        for key in self.keys | {key for key, _ in self._list("ListObjectsV2", "Key", "Contents")}:
            left += self._refused("DeleteObject", key)
        for key, version in self._list("ListObjectVersions", "VersionId", "Versions", "DeleteMarkers"):
            left += self._refused("DeleteObject", key, VersionId=version)
        return left

    def _refused(self, operation: str, key: str, **arguments: Any) -> list[str]:
        """Why it was not removed; nothing if it was, or is gone."""
        try:
            self.ask(operation, Key=key, **arguments)
        except errors.StorageError as error:
            if answered_status(error) != 404:
                return [f"s3://{self.url.bucket}/{key}: {error}"]
        return []

    def _list(self, operation: str, identity: str, *entries: str) -> set[tuple[str, str]]:
        """Key and id of what is below the probes' prefix, less than a page; nothing where it cannot be listed."""
        try:
            answer = self.ask(operation, Prefix=self.probes.key(""))
        except errors.StorageError:
            return set()
        return {(each["Key"], str(each[identity])) for name in entries for each in answer.get(name, ())}
