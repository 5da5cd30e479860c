"""Listings and deletions: objects, open multipart uploads.

Deletions go in batches, and only while the objects have the expected ETag.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from botocore.exceptions import ClientError

from dcp_s3 import errors
from dcp_s3.s3.bucket import Bucket, Quirk, Send, learn, server_time, timestamp
from dcp_s3.s3.diagnosis import answered_code, answered_status, classify
from dcp_s3.store import BATCH, DeleteTarget, ListedObject, Page, Upload, same_etag

# Error codes for a key that was not deleted because it has another ETag, and for one that is not there.
_CHANGED = frozenset({"PreconditionFailed", "ConditionalRequestConflict"})
_GONE = frozenset({"NoSuchKey", "NoSuchVersion", "NotFound"})

# Statuses from stores that have no DeleteObjects, or want it with headers of former times (Content-MD5).
_NO_BATCHES = frozenset({400, 405, 411, 501})

DIRECTORY_BUCKET = "--x-s3"
"""End of the name of a bucket of S3 Express One Zone, which lists only prefixes that end with a slash:
https://docs.aws.amazon.com/AmazonS3/latest/userguide/s3-express-differences.html."""

# Most entries that S3 gives: https://docs.aws.amazon.com/AmazonS3/latest/API/API_ListObjectsV2.html
PAGE_SIZE = 1000


def page(bucket: Bucket, prefix: str, delimiter: str = "", *, token: str | None = None) -> Page:
    """One page of the keys that start with ``prefix``, after the page whose ``next_token`` is ``token``, in key order.

    Keys with the same text up to a ``delimiter`` after the prefix count as one common prefix. Of a directory bucket
    all keys are one page: it lists in no order, and only what is below a slash.
    """
    is_unordered = bucket.name.endswith(DIRECTORY_BUCKET)
    listed = prefix[: prefix.rfind("/") + 1] if is_unordered else prefix
    arguments: dict[str, Any] = {"Prefix": listed, "MaxKeys": PAGE_SIZE}
    if delimiter:
        arguments["Delimiter"] = delimiter
    objects, prefixes, asked_at = list[ListedObject](), list[str](), None
    while True:
        if token:
            arguments["ContinuationToken"] = token
        answer = bucket.request("ListObjectsV2", prefix, arguments)
        asked_at = asked_at or server_time(answer)
        objects += [
            ListedObject(entry["Key"], int(entry["Size"]), timestamp(entry["LastModified"]), entry.get("ETag", ""))
            for entry in answer.get("Contents", ())
        ]
        prefixes += [entry["Prefix"] for entry in answer.get("CommonPrefixes", ())]
        token = answer["NextContinuationToken"] if answer.get("IsTruncated") else None
        if token is None or not is_unordered:
            break
    if is_unordered:
        objects = sorted((each for each in objects if each.key.startswith(prefix)), key=lambda each: each.key)
        prefixes = sorted({each for each in prefixes if each.startswith(prefix)})
    return Page(tuple(objects), tuple(prefixes), token, asked_at)


def uploads(bucket: Bucket, prefix: str) -> tuple[Upload, ...]:
    """Every open multipart upload whose key starts with ``prefix``, by key."""
    arguments: dict[str, Any] = {"Prefix": prefix, "MaxUploads": PAGE_SIZE}
    markers = {"KeyMarker": "NextKeyMarker", "UploadIdMarker": "NextUploadIdMarker"}
    if bucket.name.endswith(DIRECTORY_BUCKET):
        arguments["Prefix"] = prefix[: prefix.rfind("/") + 1]
        del markers["UploadIdMarker"]
    found: list[Upload] = []
    while True:
        try:
            answer = bucket.request("ListMultipartUploads", prefix, arguments)
        except errors.ObjectNotFoundError:
            return ()  # rclone's answer for a bucket without uploads
        entries = [each for each in answer.get("Uploads", ()) if each["Key"].startswith(prefix)]
        found += [Upload(each["Key"], each["UploadId"], timestamp(each["Initiated"])) for each in entries]
        if not answer.get("IsTruncated"):
            return tuple(sorted(found, key=lambda each: each.key))
        following = {name: answer[field] for name, field in markers.items() if answer.get(field)}
        if not following or following.items() <= arguments.items():
            raise errors.TransferError(
                f"ListMultipartUploads on {prefix!r} was cut off, and the answer does not say where to go on. Remedy: "
                "check what is between this host and the endpoint (a proxy?)", key=prefix,
                operation="ListMultipartUploads",
            )  # fmt: skip
        arguments = {name: value for name, value in arguments.items() if name not in markers} | following


# --- deletion --------------------------------------------------------------------------------------


def delete(bucket: Bucket, targets: Iterable[str | DeleteTarget]) -> list[str]:
    """Delete objects, a thousand per request, or one per request if the store has no DeleteObjects.

    Those that do not exist count as deleted. Single keys that S3 throttles or that fail temporarily are retried. A
    request that deletes many waits for its turn while S3 throttles.

    Returns:
        Keys left alone because their objects have another ETag. Stores without conditional deletes ignore ETags.
    """
    left, wanted = list[str](), [DeleteTarget(each) if isinstance(each, str) else each for each in targets]
    for start in range(0, len(wanted), BATCH):
        pending, refused = wanted[start : start + BATCH], list[DeleteTarget]()
        is_many = len(pending) > 1
        while pending and is_many and Quirk.NO_BATCH_DELETES not in bucket.known.quirks:
            before = len(pending)
            attempt = functools.partial(_delete_many, pending, refused)
            try:
                bucket.request("DeleteObjects", pending[0].key, attempt=attempt, data=True)
            except errors.TransferError:
                if len(pending) == before:
                    raise  # nothing of it went through
            except errors.StorageError as error:
                if answered_status(error) not in _NO_BATCHES or isinstance(error, errors.CredentialsError):
                    raise
                learn(Quirk.NO_BATCH_DELETES, bucket, error)
        left += [each.key for each in refused if not _delete_one(bucket, each, refused=True, data=is_many)]
        left += [each.key for each in pending if not _delete_one(bucket, each, data=is_many)]
    return left


def _delete_many(pending: list[DeleteTarget], refused: list[DeleteTarget], send: Send) -> dict[str, Any]:
    """Delete objects by one request. Those that are gone leave ``pending``; those that S3 left alone, as they have
    another ETag, go to ``refused``. A failure that S3 reports of a key is raised as if it were of the request."""
    objects = [{"Key": each.key} | ({"ETag": each.etag} if each.etag else {}) for each in pending]
    answer = send(Delete={"Objects": objects, "Quiet": True})
    failed = {
        str(entry.get("Key")): (str(entry.get("Code")), str(entry.get("Message"))) for entry in answer.get("Errors", ())
    }
    asked, unasked = pending.copy(), failed.keys() - {each.key for each in pending}
    if not unasked:  # otherwise believe nothing
        pending.clear()
        for target in asked:
            code, _ = failed.get(target.key, ("", ""))
            if code in _CHANGED and target.etag:
                refused.append(target)
            elif code and code not in _GONE:
                pending.append(target)
    worst: ClientError | None = None
    for key in unasked or [each.key for each in pending]:
        code, message = failed[key]
        text = f"{key!r} was not deleted: {message}"
        error = ClientError({"Error": {"Code": code, "Message": text}}, "DeleteObjects")
        if worst is None or not classify(error).passes:
            worst = error  # a permanent failure, if there is one
    if worst is not None:
        raise worst
    return answer


def _delete_one(bucket: Bucket, target: DeleteTarget, *, refused: bool = False, data: bool) -> bool:
    """Delete one object; return whether it is gone. A missing one is; one that has another ETag is not.

    A refusal is believed only after a look: some stores refuse a condition that holds, and are then asked without.
    ``refused``: whether the store has refused it already.
    """
    condition = {"IfMatch": target.etag} if target.etag else {}
    try:
        if not refused:
            bucket.request("DeleteObject", target.key, {"Key": target.key, **condition}, data=data)
            return True
    except errors.ObjectNotFoundError:
        return True
    except errors.StorageError as error:
        is_refusal = answered_status(error) in (412, 501) or answered_code(error) in _CHANGED
        if not condition or not is_refusal:
            raise
    try:
        if not same_etag(bucket.head(target.key).etag, target.etag):
            return False
        bucket.request("DeleteObject", target.key, {"Key": target.key}, data=data)
    except errors.ObjectNotFoundError:
        pass
    return True
