"""Checkpoint URLs: ``s3://bucket/prefix``. Pure."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from dcp_s3.errors import InvalidURLError

URLLike = str | os.PathLike[str]
"""A URL in the forms that users may pass."""

_SCHEME = "s3://"
_FOLDED = "s3:/"  # what pathlib makes of it: several slashes become one
# https://docs.aws.amazon.com/AmazonS3/latest/userguide/bucketnamingrules.html, relaxed to what other stores
# and old buckets allow. Access-point ARNs are passed on unchanged.
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}|arn:[A-Za-z0-9:/_.-]+?:accesspoint[:/][A-Za-z0-9_.-]+")
_MAX_KEY_BYTES = 1024
# Room below the prefix for the longest name that is written.
_RESERVED_KEY_BYTES = 100


@dataclass(frozen=True)
class CheckpointURL:
    """The location of a checkpoint. All of its objects have keys ``{prefix}/...`` in ``bucket``."""

    bucket: str
    """Bucket name or access-point ARN."""
    prefix: str
    """Key prefix without a slash at either end. Empty: the whole bucket."""

    def key(self, relative_path: str) -> str:
        """The object key of ``relative_path``, a path below the checkpoint."""
        return f"{self.prefix}/{relative_path}" if self.prefix else relative_path

    def child(self, name: str) -> CheckpointURL:
        """The URL one level down."""
        return CheckpointURL(self.bucket, self.key(name))

    @property
    def parent(self) -> CheckpointURL:
        """The URL one level up."""
        return CheckpointURL(self.bucket, self.prefix.rpartition("/")[0])

    @property
    def name(self) -> str:
        """The last part of the prefix, for example ``step-1000``."""
        return self.prefix.rpartition("/")[2]

    def __str__(self) -> str:
        return f"{_SCHEME}{self.bucket}/{self.prefix}" if self.prefix else f"{_SCHEME}{self.bucket}"


def is_s3_url(value: object) -> bool:
    """Whether ``value`` is text or a path that starts with ``s3:/`` (any case). The rest is not checked."""
    return isinstance(value, (str, os.PathLike)) and os.fspath(value)[: len(_FOLDED)].lower() == _FOLDED


def parse_url(value: URLLike) -> CheckpointURL:
    """Split ``s3://bucket/prefix``.

    Keys are taken literally: nothing is unquoted, so ``%``, ``+``, spaces and Unicode are safe. Trailing slashes are
    dropped. ``s3:/bucket/prefix``, which pathlib makes of it, is the same URL.

    Raises:
        InvalidURLError: another scheme; a missing or bad bucket name; an empty, ``.`` or ``..`` path segment; or a
            prefix too long for the names below it (S3 keys have at most 1024 bytes).
    """
    if not isinstance(value, (str, os.PathLike)):
        raise InvalidURLError(
            f"the URL is a {type(value).__name__}, expected s3://bucket/prefix as text. The state goes to dcp.save or "
            "dcp.load. Remedy: S3StorageWriter('s3://bucket/prefix')"
        )
    text = os.fspath(value)
    if text[: len(_FOLDED)].lower() != _FOLDED:
        raise InvalidURLError(f"{value!r} is not an S3 URL: expected s3://bucket/prefix")
    rest = text[len(_FOLDED) :].removeprefix("/")
    arn = re.match(r"arn:[A-Za-z0-9:_.-]*?:accesspoint[:/][A-Za-z0-9_.-]+", rest)
    bucket, _, prefix = (arn[0], "", rest[arn.end() + 1 :]) if arn else rest.partition("/")
    if not _BUCKET.fullmatch(bucket):
        raise InvalidURLError(
            f"{text!r} has no valid bucket name (found {bucket!r}): expected s3://bucket/prefix with a bucket of "
            "letters, digits, dots and hyphens"
        )
    prefix = prefix.rstrip("/")
    if prefix and any(segment in ("", ".", "..") for segment in prefix.split("/")):
        raise InvalidURLError(f"{text!r} has an empty, '.' or '..' path segment: write the key prefix plainly")
    if len(prefix.encode()) > _MAX_KEY_BYTES - _RESERVED_KEY_BYTES:
        raise InvalidURLError(
            f"the prefix of {text[:60]!r}... has {len(prefix.encode())} bytes: S3 keys have at most "
            f"{_MAX_KEY_BYTES}, and {_RESERVED_KEY_BYTES} are needed for the names below it"
        )
    return CheckpointURL(bucket, prefix)
