"""What the checks of doctor share: results, the permissions that dcp_s3 needs, and probe objects, which are removed."""

from __future__ import annotations

import contextlib
import logging
import secrets
import string
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from botocore.exceptions import ClientError

from dcp_s3 import errors
from dcp_s3.limit import Limit
from dcp_s3.reprs import one_line
from dcp_s3.s3.client import get_client
from dcp_s3.s3.diagnosis import answered_status, permission_of
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
    """``failed``: saves or loads will not work. ``warning``: they work, and something is to be known. ``skipped``: not
    checked."""
    found: str
    """What was found: a clause for people."""
    remedy: str = ""
    """What to do about it; empty if nothing."""
    seconds: float = 0.0
    """Seconds that the check took."""

    def __repr__(self) -> str:
        return one_line("CheckResult", repr(self.name), self.status, " ".join(self.found.split()))

    @property
    def passed(self) -> bool:
        """Whether checks that build on this one make sense."""
        return self.status in ("ok", "warning")


# Whoever makes a check adds its name and its seconds.


def ok(found: str) -> CheckResult:
    return CheckResult("", "ok", found)


def warn(found: str, remedy: str) -> CheckResult:
    return CheckResult("", "warning", found, remedy)


def fail(found: str, remedy: str) -> CheckResult:
    return CheckResult("", "failed", found, remedy)


def skip(found: str) -> CheckResult:
    return CheckResult("", "skipped", found)


def from_error(error: Exception, *, status: Status = "failed", consequence: str = "") -> CheckResult:
    """The result for an error, whose message ends with the remedy; ``consequence`` is what it means."""
    found, _, remedy = str(error).partition(". Remedy: ")
    if isinstance(error, errors.SettingsError) and not remedy:
        remedy = "correct it, or unset it"
    return CheckResult("", status, f"{found}: {consequence}" if consequence else found, remedy)


# --- permissions, pure; docs/security.md shows the same -------------------------------------------------


@dataclass(frozen=True)
class Permission:
    operations: tuple[str, ...]
    """S3's operations that the IAM action allows."""
    used_by: str
    without: str
    """What a training job without it has to expect."""
    on_bucket: bool = False
    """Whether it is granted on the bucket, not on its objects."""
    required: bool = True
    """Whether saves or loads do not work without it."""

    @property
    def action(self) -> str:
        return permission_of(self.operations[0])


PERMISSIONS = (
    Permission(("GetObject", "HeadObject"), "everything", "neither saves nor loads work"),
    Permission(
        ("ListObjectsV2",),
        "overwriting, `latest`, listing, copies, drain, prune",
        "a missing checkpoint reads as forbidden: saves to a new URL and `latest` do not work",
        on_bucket=True,
    ),
    Permission(
        ("PutObject", "CreateMultipartUpload", "UploadPart", "CompleteMultipartUpload"),
        "save, upload, drain; prune, for its lists",
        "no save works",
    ),
    Permission(
        ("AbortMultipartUpload",),
        "a save that fails, drain, prune",
        "saves work; one that fails leaves its multipart upload open, which costs until a lifecycle rule aborts it",
        required=False,
    ),
    Permission(
        ("ListMultipartUploads",),
        "a save after a lost answer, drain, prune",
        "saves work; after a lost answer a multipart upload may stay open; prune does not work",
        on_bucket=True,
        required=False,
    ),
    Permission(
        ("ListParts",), "drain", "saves work; a drain sends objects whose upload was begun anew", required=False
    ),
    Permission(
        ("DeleteObjects", "DeleteObject"),
        "overwriting, a save that fails, drain, prune",
        "saves and loads work, prune does not: nothing is ever deleted, nor what failed or overwritten saves leave",
        required=False,
    ),
    Permission(
        ("ListObjectVersions",),
        "prune with all versions, bench",
        "prune --all-versions does not work",
        on_bucket=True,
        required=False,
    ),
)  # fmt: skip

CONFIGURATION = {
    "GetBucketVersioning": "s3:GetBucketVersioning",
    "GetBucketLifecycleConfiguration": "s3:GetLifecycleConfiguration",
}
"""Operations by which doctor alone looks at a bucket's configuration, and the actions that allow them."""


def permission_for(operation: str) -> Permission:
    return next(each for each in PERMISSIONS if operation in each.operations)


def bucket_arn(bucket: str, region: str = "") -> str:
    if bucket.startswith("arn:"):  # of an access point
        return bucket
    partition = "aws-cn" if region.startswith("cn-") else "aws-us-gov" if region.startswith("us-gov-") else "aws"
    return f"arn:{partition}:s3:::{bucket}"


def training_policy(arn: str, prefix: str, *, kms_key: str = "") -> dict[str, Any]:
    """What save, load, spill, drain and prune need below a prefix of a bucket, perhaps encrypted with a key of KMS."""
    objects = [
        "s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload", "s3:ListMultipartUploadParts",
    ]  # fmt: skip
    statements = [
        _allow("TrainingObjects", objects, _objects_arn(arn, prefix)),
        _allow("TrainingBucket", ["s3:ListBucket", "s3:ListBucketMultipartUploads"], arn),
    ]
    if kms_key:
        statements.append(_allow("TrainingKey", ["kms:GenerateDataKey", "kms:Decrypt"], kms_key))
    return {"Version": "2012-10-17", "Statement": statements}


def prune_versions_policy(arn: str, prefix: str) -> dict[str, Any]:
    """What pruning all versions needs besides."""
    statements = [
        _allow("PruningVersions", ["s3:DeleteObjectVersion"], _objects_arn(arn, prefix)),
        _allow("PruningVersionLists", ["s3:ListBucketVersions"], arn),
    ]
    return {"Version": "2012-10-17", "Statement": statements}


def _objects_arn(arn: str, prefix: str) -> str:
    objects = f"{arn}/object" if ":accesspoint" in arn else arn
    return f"{objects}/{prefix}/*" if prefix else f"{objects}/*"


def _allow(sid: str, actions: list[str], resource: str) -> dict[str, Any]:
    return {"Sid": sid, "Effect": "Allow", "Action": actions, "Resource": resource}


# --- probes --------------------------------------------------------------------------------------------


@dataclass
class Examination:
    """What the checks share: requests, what one learns for later ones, and the probe objects."""

    url: CheckpointURL
    read_only: bool
    given: Any
    """Settings as the caller gave them."""
    settings: Settings = field(default_factory=Settings.model_construct)
    """Settings in force, once they are known to be valid."""
    skew: float | None = None
    """Seconds by which this host's clock is ahead of the endpoint's, to within one; None if that is not known."""
    denied: bool = False
    """Whether a permission of `PERMISSIONS` was refused."""
    dead: str = ""
    """Why requests make no sense any more."""
    may_delete: bool = True
    knows_if_none_match: bool = True
    upload: str = ""
    """Id of the multipart upload that several checks look at."""
    is_versioned: bool = False
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
        return S3Store(self.url.bucket, self.settings, _LIMIT)

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
        key, store = arguments.get("Key", ""), self.store
        request = Request(operation, key, arguments)

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
        return self.probes.key(name)

    def put(self, name: str, data: bytes, **arguments: Any) -> dict[str, Any]:
        is_new = self.key(name) not in self.keys
        if is_new:
            self.keys.append(self.key(name))
        try:
            return self.ask("PutObject", name, Body=data, **creation_arguments(self.settings, data=True), **arguments)
        except errors.AccessDeniedError:
            if is_new:
                self.keys.remove(self.key(name))  # it is certain that nothing was written
            raise

    def begin_upload(self, name: str) -> str:
        answer = self.ask("CreateMultipartUpload", name, **creation_arguments(self.settings, data=True))
        self.uploads.append((self.key(name), answer["UploadId"]))
        return str(answer["UploadId"])

    def complete_upload(self, key: str, upload: str, data: bytes) -> None:
        """Make an object of an upload, by one part."""
        where: dict[str, Any] = {"Key": key, "UploadId": upload}
        etag = self.ask("UploadPart", Body=data, PartNumber=1, **where)["ETag"]
        self.keys.append(key)
        self.ask("CompleteMultipartUpload", MultipartUpload={"Parts": [{"ETag": etag, "PartNumber": 1}]}, **where)
        self.uploads = [each for each in self.uploads if each != (key, upload)]

    def greet(self) -> float:
        """Send a HeadBucket, and return the seconds until the answer. A refusal is an answer, too."""
        began, clock = time.monotonic(), time.time()
        try:
            request = Request("HeadBucket", "", {})
            answer: Mapping[str, Any] = self.store.call("HeadBucket", "", lambda: self.store.send(request), attempts=1)
        except errors.StorageError as error:
            if not isinstance(error.__cause__, ClientError):
                raise
            answer = error.__cause__.response
        seconds = time.monotonic() - began
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
        if self.dead:
            try:
                self.greet()  # it may be back
            except errors.StorageError:
                written = {*self.keys, *(key for key, _ in self.uploads)}
                return [f"s3://{self.url.bucket}/{key}: {self.dead}" for key in sorted(written)]
        left: list[str] = []
        for key, upload_id in {*self.uploads, *(self._list("ListMultipartUploads", "UploadId", "Uploads") or ())}:
            refused: list[str] = []
            if not self._try(refused, key, "AbortMultipartUpload", Key=key, UploadId=upload_id):
                try:  # whoever may not abort it can still make an object of it, and delete that
                    self.complete_upload(key, upload_id, b"probe")
                except errors.StorageError:
                    left += refused
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

    def _try(self, left: list[str], key: str, operation: str, **arguments: Any) -> bool:
        try:
            self.ask(operation, **arguments)
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
