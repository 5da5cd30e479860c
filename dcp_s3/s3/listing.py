"""Listings without I/O: objects, their versions, open multipart uploads. See `operations`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dcp_s3 import errors
from dcp_s3.s3 import times
from dcp_s3.s3.operations import Operation, Request
from dcp_s3.store import ListedObject, Page, Upload

# Most entries that S3 gives: https://docs.aws.amazon.com/AmazonS3/latest/API/API_ListObjectsV2.html
PAGE_SIZE = 1000


@dataclass(frozen=True)
class StoredVersion:
    """One version of an object."""

    key: str
    version_id: str
    """ID of the version; ``null`` if it was written while there were no versions."""
    is_current: bool
    """Whether a GET without a version finds it."""
    is_marker: bool
    """Whether it is a delete marker."""


def page(prefix: str, delimiter: str = "", *, token: str | None = None) -> Operation[Page]:
    """One page of the keys that start with ``prefix``, after the page whose ``next_token`` is ``token``.

    Keys with the same text up to a ``delimiter`` after the prefix count as one common prefix.
    """
    arguments: dict[str, Any] = {"Prefix": prefix, "MaxKeys": PAGE_SIZE}
    if delimiter:
        arguments["Delimiter"] = delimiter
    if token is not None:
        arguments["ContinuationToken"] = token
    found: Page = yield Request("ListObjectsV2", prefix, arguments, _page)
    return found


def _page(answer: Mapping[str, Any]) -> Page:
    return Page(
        objects=tuple(
            ListedObject(
                entry["Key"], int(entry["Size"]), times.timestamp(entry["LastModified"]), entry.get("ETag", "")
            )
            for entry in answer.get("Contents", ())
        ),
        prefixes=tuple(entry["Prefix"] for entry in answer.get("CommonPrefixes", ())),
        next_token=answer["NextContinuationToken"] if answer.get("IsTruncated") else None,
        server_time=times.server_time(answer),
    )


def all_pages(
    operation: str, prefix: str, arguments: dict[str, Any], markers: Mapping[str, str]
) -> Operation[list[Any]]:
    """S3's answers to all requests of a listing.

    Args:
        operation: S3's name of the operation.
        prefix: prefix or key, for messages.
        arguments: arguments of the first request.
        markers: arguments of the request for the next page, each with the field of the answer that has it.
    """
    answers = []
    while True:
        answer: Mapping[str, Any] = yield Request(operation, prefix, arguments)
        answers.append(answer)
        if not answer.get("IsTruncated"):
            return answers
        found = {name: answer[field] for name, field in markers.items() if answer.get(field)}
        if not found or found.items() <= arguments.items():
            raise errors.TransferError(
                f"{operation} on {prefix!r} was cut off, and the answer does not say where to go on. Remedy: check "
                "what is between this host and the endpoint (a proxy?)",
                key=prefix,
                operation=operation,
            )
        arguments = {name: value for name, value in arguments.items() if name not in markers} | found


def uploads(prefix: str) -> Operation[tuple[Upload, ...]]:
    """Every open multipart upload whose key starts with ``prefix``, by key."""
    arguments = {"Prefix": prefix, "MaxUploads": PAGE_SIZE}
    markers = {"KeyMarker": "NextKeyMarker", "UploadIdMarker": "NextUploadIdMarker"}
    try:
        answers = yield from all_pages("ListMultipartUploads", prefix, arguments, markers)
    except errors.BucketNotFoundError:
        raise
    except errors.ObjectNotFoundError:
        return ()  # rclone's answer for a bucket without uploads
    return tuple(
        Upload(entry["Key"], entry["UploadId"], times.timestamp(entry["Initiated"]))
        for answer in answers
        for entry in answer.get("Uploads", ())
        if entry["Key"].startswith(prefix)
    )


def versions(prefix: str) -> Operation[list[StoredVersion]]:
    """Every version of every object whose key starts with ``prefix``."""
    markers = {"KeyMarker": "NextKeyMarker", "VersionIdMarker": "NextVersionIdMarker"}
    answers = yield from all_pages("ListObjectVersions", prefix, {"Prefix": prefix}, markers)
    return [
        StoredVersion(entry["Key"], entry["VersionId"], bool(entry["IsLatest"]), name == "DeleteMarkers")
        for answer in answers
        for name in ("Versions", "DeleteMarkers")
        for entry in answer.get(name, ())
    ]


def check_versions(prefix: str) -> Operation[None]:
    """Ask for one version, to see whether the store answers."""
    yield Request("ListObjectVersions", prefix, {"Prefix": prefix, "MaxKeys": 1})
