"""The IAM actions that dcp_s3 needs, each with what needs it, and the policies made of them. Pure.

docs/security.md shows the same tables and policies; a test compares them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dcp_s3.s3.diagnosis import permission_of


@dataclass(frozen=True)
class Permission:
    """An IAM action."""

    operations: tuple[str, ...]
    """S3's operations that it allows."""
    used_by: str
    """What calls them."""
    without: str
    """What a training job without it has to expect."""
    on_bucket: bool = False
    """Whether it is granted on the bucket, not on its objects."""

    @property
    def action(self) -> str:
        """For example ``s3:PutObject``."""
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
    ),
    Permission(
        ("ListMultipartUploads",),
        "a save after a lost answer, drain, prune",
        "saves work; after a lost answer a multipart upload may stay open; prune does not work",
        on_bucket=True,
    ),
    Permission(
        ("ListParts",), "drain", "saves work; a drain sends objects whose upload was begun anew"
    ),
    Permission(
        ("DeleteObjects", "DeleteObject"),
        "overwriting, a save that fails, drain, prune",
        "saves and loads work, prune does not: nothing is ever deleted, nor what failed or overwritten saves leave",
    ),
    Permission(
        ("ListObjectVersions",),
        "prune with all versions, bench",
        "prune --all-versions does not work",
        on_bucket=True,
    ),
)  # fmt: skip

CONFIGURATION = {
    "GetBucketVersioning": "s3:GetBucketVersioning",
    "GetObjectLockConfiguration": "s3:GetBucketObjectLockConfiguration",
    "GetBucketLifecycleConfiguration": "s3:GetLifecycleConfiguration",
    "GetBucketEncryption": "s3:GetEncryptionConfiguration",
}
"""Operations by which doctor alone looks at a bucket's configuration, and the actions that allow them."""

_TRAINING_OBJECTS = [
    "s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload", "s3:ListMultipartUploadParts",
]  # fmt: skip
_TRAINING_BUCKET = ["s3:ListBucket", "s3:ListBucketMultipartUploads"]


def permission_for(operation: str) -> Permission:
    """The permission that allows an operation."""
    return next(each for each in PERMISSIONS if operation in each.operations)


def bucket_arn(bucket: str, region: str = "") -> str:
    """The ARN of a bucket, or of an access point (whose name is one)."""
    if bucket.startswith("arn:"):
        return bucket
    partition = "aws-cn" if region.startswith("cn-") else "aws-us-gov" if region.startswith("us-gov-") else "aws"
    return f"arn:{partition}:s3:::{bucket}"


def objects_arn(arn: str, prefix: str) -> str:
    """The ARN of the objects below a prefix."""
    objects = f"{arn}/object" if ":accesspoint" in arn else arn
    return f"{objects}/{prefix}/*" if prefix else f"{objects}/*"


def training_policy(arn: str, prefix: str, *, kms_key: str = "") -> dict[str, Any]:
    """What save, load, spill, drain and prune need.

    Args:
        arn: the bucket's, as from `bucket_arn`.
        prefix: key prefix below which the checkpoints lie.
        kms_key: ARN of the KMS key that encrypts them, if there is one.
    """
    statements = [
        _allow("TrainingObjects", _TRAINING_OBJECTS, objects_arn(arn, prefix)),
        _allow("TrainingBucket", _TRAINING_BUCKET, arn),
    ]
    if kms_key:
        statements.append(_allow("TrainingKey", ["kms:GenerateDataKey", "kms:Decrypt"], kms_key))
    return _policy(statements)


def prune_versions_policy(arn: str, prefix: str) -> dict[str, Any]:
    """What pruning all versions needs, besides what training does."""
    return _policy(
        [
            _allow("PruningVersions", ["s3:DeleteObjectVersion"], objects_arn(arn, prefix)),
            _allow("PruningVersionLists", ["s3:ListBucketVersions"], arn),
        ]
    )


def _policy(statements: list[dict[str, Any]]) -> dict[str, Any]:
    return {"Version": "2012-10-17", "Statement": statements}


def _allow(sid: str, actions: list[str], resource: str) -> dict[str, Any]:
    return {"Sid": sid, "Effect": "Allow", "Action": actions, "Resource": resource}
