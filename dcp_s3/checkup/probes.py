"""Results of checks, and the requests and probe objects by which they are found."""

from __future__ import annotations

import secrets
import string
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from dcp_s3 import errors
from dcp_s3.limit import Limit
from dcp_s3.s3.bucket import creation_arguments
from dcp_s3.s3.diagnosis import answered_code, answered_status
from dcp_s3.s3.store import store_of
from dcp_s3.settings import Settings
from dcp_s3.url import CheckpointURL

# A healthy store answers each of these small requests in a fraction of that.
_LIMIT = Limit(hang=5.0, attempts=3)
DATA = bytes(range(256))
PROBE = "__0_0-probe.distcp"
"""Name of the object that most checks write, like one of a checkpoint's."""
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

    def ask(
        self, operation: str, name: str | None = None, *, attempts: int | None = None, **arguments: Any
    ) -> dict[str, Any]:
        """Send a request to the bucket, or to the probe object of a name. Arguments are boto3's, without bucket and
        key."""
        if name is not None:
            arguments["Key"] = self.key(name)
        limit = replace(_LIMIT, attempts=attempts or _LIMIT.attempts)
        return store_of(self.url, self.settings, limit).request(operation, arguments.get("Key", ""), arguments)

    def attempt(
        self, refusals: Collection[int], operation: str, name: str | None = None, **arguments: Any
    ) -> tuple[dict[str, Any], str]:
        """The answer to a request, and an empty text; or nothing, and the code of a refusal with one of these
        statuses."""
        try:
            return self.ask(operation, name, **arguments), ""
        except errors.StorageError as error:
            if answered_status(error) not in refusals:
                raise
            return {}, answered_code(error)

    def put(self, name: str, data: bytes) -> None:
        written = set(self.keys)
        self.keys.add(self.key(name))
        try:
            self.ask("PutObject", name, Body=data, **creation_arguments(self.settings, data=True))
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

    def remove(self) -> list[str]:
        """Remove all that was written (open uploads, objects, their versions), and say what is left, and why."""
        left: list[str] = []

        def remove(operation: str, key: str, **arguments: Any) -> None:
            try:
                self.ask(operation, Key=key, **arguments)
            except errors.StorageError as error:
                if answered_status(error) != 404:
                    left.append(f"s3://{self.url.bucket}/{key}: {error}")

        for key, upload in self.uploads | self._list("ListMultipartUploads", "UploadId", "Uploads"):
            remove("AbortMultipartUpload", key, UploadId=upload)
        for key in self.keys | {key for key, _ in self._list("ListObjectsV2", "Key", "Contents")}:
            remove("DeleteObject", key)
        for key, version in self._list("ListObjectVersions", "VersionId", "Versions", "DeleteMarkers"):
            remove("DeleteObject", key, VersionId=version)
        return left

    def _list(self, operation: str, identity: str, *entries: str) -> set[tuple[str, str]]:
        """Key and id of what is below the probes' prefix, less than a page; nothing where it cannot be listed."""
        try:
            answer = self.ask(operation, Prefix=self.probes.key(""))
        except errors.StorageError:
            return set()
        return {(each["Key"], str(each[identity])) for name in entries for each in answer.get(name, ())}
