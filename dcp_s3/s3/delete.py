"""Many objects deleted: in batches, only while they are what they were, with all their versions on request."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from botocore.exceptions import ClientError

from dcp_s3 import errors
from dcp_s3.s3 import retry
from dcp_s3.s3.bucket import DELETE_BATCH, Bucket

logger = logging.getLogger(__name__)

# What S3 says of a key that was not deleted because it has another ETag, or of one that is not there.
_CHANGED = frozenset({"PreconditionFailed", "ConditionalRequestConflict"})
_GONE = frozenset({"NoSuchKey", "NoSuchVersion", "NotFound"})

# Answers to a DeleteObjects of stores that have none, or want it with headers of other times (Content-MD5).
_NO_BATCHES = frozenset({400, 405, 411, 501})


@dataclass(frozen=True)
class Target:
    """An object to delete.

    Attributes:
        key: its key.
        etag: delete it only while it has this ETag; empty: in any case.
        version_id: of one version that is to go for good; empty: the current one, by a delete marker where there are
            versions.
    """

    key: str
    etag: str = ""
    version_id: str = ""

    def to_request(self) -> dict[str, str]:
        """As DeleteObjects wants it."""
        fields = {"Key": self.key, "ETag": self.etag, "VersionId": self.version_id}
        return {name: value for name, value in fields.items() if value}


def batches(targets: Sequence[Target]) -> list[Sequence[Target]]:
    """Runs of as many as one request takes."""
    return [targets[start : start + DELETE_BATCH] for start in range(0, len(targets), DELETE_BATCH)]


def delete_batch(bucket: Bucket, targets: Sequence[Target]) -> list[str]:
    """Delete up to 1000 objects with one request, or with one for each where the store has no DeleteObjects.

    Those that do not exist count as deleted. Single keys that S3 throttles or that fail in passing are tried again.

    Returns:
        Keys that were left alone because they have another ETag. Stores that know no conditional deletes ignore it.

    Raises:
        StorageError: some could not be deleted.
    """
    if len(targets) == 1 or _without_batches(bucket) in _known_without_batches:
        return [target.key for target in targets if not delete_one(bucket, target)]
    pending, changed = list(targets), list[Target]()
    while pending:
        before = len(pending)
        try:
            bucket.call("DeleteObjects", pending[0].key, lambda: _attempt(bucket, pending, changed), data=True)
        except errors.TransferError:
            if len(pending) == before:
                raise  # nothing of it went through
        except errors.StorageError as error:
            status = retry.status_code(error.__cause__) if isinstance(error.__cause__, ClientError) else 0
            if status not in _NO_BATCHES:
                raise
            _remember_without_batches(bucket, status, error)
            return [target.key for target in (*changed, *pending) if not delete_one(bucket, target)]
    return [target.key for target in changed if not delete_one(bucket, target, refused=True)]


def _attempt(bucket: Bucket, pending: list[Target], changed: list[Target]) -> None:
    """One DeleteObjects; what is to be tried again stays in ``pending``."""
    listed = {"Objects": [target.to_request() for target in pending], "Quiet": True}
    answer: Mapping[str, Any] = bucket.client.delete_objects(**bucket.common, Delete=listed)
    failed = {}
    for entry in answer.get("Errors", ()):
        code = str(entry.get("Code"))
        failed[str(entry.get("Key")), str(entry.get("VersionId") or "")] = code, str(entry.get("Message"))
    left = []
    worst: ClientError | None = None
    for target in pending:
        code, message = failed.pop((target.key, target.version_id), ("", ""))
        if code in _CHANGED and target.etag:
            changed.append(target)
        elif code and code not in _GONE:
            left.append(target)
            error = _error(target.key, code, message)
            if worst is None or not retry.is_retryable(error):
                worst = error  # one that never will be deleted, if there is one
    if failed:
        (key, _), (code, message) = failed.popitem()  # a key that nobody asked for: believe nothing
        worst = _error(key, code, message)
        left = list(pending)
    pending[:] = left
    if worst is not None:
        raise worst


def _error(key: str, code: str, message: str) -> ClientError:
    return ClientError({"Error": {"Code": code, "Message": f"{key!r} was not deleted: {message}"}}, "DeleteObjects")


def delete_one(bucket: Bucket, target: Target, *, refused: bool = False) -> bool:
    """Delete one object; one that does not exist counts as deleted.

    A refusal is believed only after a look: some stores refuse a condition that holds, and are then asked without.

    Args:
        bucket: of the key.
        target: what to delete.
        refused: whether the store has refused it already.

    Returns:
        Whether it is gone; False if it has another ETag.

    Raises:
        StorageError: it could not be deleted.
    """
    arguments = {"Key": target.key} | ({"VersionId": target.version_id} if target.version_id else {})

    def delete(**condition: str) -> None:
        bucket.call(
            "DeleteObject",
            target.key,
            lambda: bucket.client.delete_object(**bucket.common, **arguments, **condition),
            data=True,
        )

    try:
        if not refused:
            delete(**({"IfMatch": target.etag} if target.etag else {}))
            return True
    except errors.ObjectNotFoundError:
        return True
    except errors.StorageError as error:
        conditional = isinstance(error.__cause__, ClientError) and (
            retry.status_code(error.__cause__) == 501 or retry.error_code(error.__cause__) in _CHANGED
        )
        if not target.etag or not (conditional or isinstance(error, errors.PreconditionFailedError)):
            raise
    try:
        if bucket.head(target.key).get("ETag", "").strip('"') != target.etag.strip('"'):
            return False
        delete()
    except errors.ObjectNotFoundError:
        pass
    return True


_known_without_batches: set[tuple[str | None, str]] = set()


def _without_batches(bucket: Bucket) -> tuple[str | None, str]:
    return bucket.settings.endpoint_url, bucket.name


def _remember_without_batches(bucket: Bucket, status: int, error: Exception) -> None:
    logger.warning("objects are deleted one by one: %s", error)
    if status in (405, 501):  # not one refusal of a strange key
        _known_without_batches.add(_without_batches(bucket))


@dataclass(frozen=True)
class StoredVersion:
    """One version of an object.

    Attributes:
        key: its key.
        version_id: S3's id of it; ``null`` if it was written while there were no versions.
        is_current: whether it is what a GET without a version finds.
        is_marker: whether it is a delete marker.
    """

    key: str
    version_id: str
    is_current: bool
    is_marker: bool


def list_versions(bucket: Bucket, prefix: str) -> list[StoredVersion]:
    """Every version of every object whose key starts with ``prefix``.

    Raises:
        StorageError: the store has no ListObjectVersions, the permission is missing, ...
    """
    found = []
    token: dict[str, str] = {}
    while True:
        page: Mapping[str, Any] = bucket.call(
            "ListObjectVersions",
            prefix,
            lambda token=token: bucket.client.list_object_versions(**bucket.common, Prefix=prefix, **token),  # type: ignore[misc]
        )
        for name in ("Versions", "DeleteMarkers"):
            found += [
                StoredVersion(entry["Key"], entry["VersionId"], bool(entry["IsLatest"]), name == "DeleteMarkers")
                for entry in page.get(name, ())
            ]
        if not page.get("IsTruncated"):
            return found
        token = {"KeyMarker": page["NextKeyMarker"]}
        if page.get("NextVersionIdMarker"):
            token["VersionIdMarker"] = page["NextVersionIdMarker"]


def check_versions(bucket: Bucket, prefix: str) -> None:
    """Ask for a version, to see whether the store answers.

    Raises:
        StorageError: the store has no ListObjectVersions, the permission is missing, ...
    """
    bucket.call(
        "ListObjectVersions",
        prefix,
        lambda: bucket.client.list_object_versions(**bucket.common, Prefix=prefix, MaxKeys=1),
    )


def old_versions(
    versions: Sequence[StoredVersion], first: Collection[str], keys: Collection[str]
) -> list[list[Target]]:
    """What is to go for good of ``first`` and ``keys``, in steps of which each has to be done before the next. Pure.

    Delete markers go last: without its marker an object that is still there would be back. What is current and no
    marker was written since, and stays.
    """
    old = [each for each in versions if not each.is_current and not each.is_marker]
    steps = [
        [each for each in old if each.key in first],
        [each for each in old if each.key in keys and each.key not in first],
        [each for each in versions if each.is_marker and (each.key in keys or each.key in first)],
    ]
    return [[Target(each.key, version_id=each.version_id) for each in step] for step in steps if step]
