"""Directory buckets (S3 Express One Zone): what AWS refuses there, and lists in no order.

Any bucket whose name ends in ``--x-s3`` is one. From
https://docs.aws.amazon.com/AmazonS3/latest/userguide/s3-express-differences.html and the pages of the operations.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

from . import answers
from .http import Response
from .store import S3Error, Store

if TYPE_CHECKING:
    from .operations import Call

LISTS = frozenset({"ListObjectsV2", "ListMultipartUploads"})

_SUPPORTED = LISTS | {
    "CreateSession", "HeadBucket", "CreateBucket", "DeleteBucket",
    "PutObject", "GetObject", "HeadObject", "DeleteObject", "DeleteObjects", "CopyObject", "AbortMultipartUpload",
    "CreateMultipartUpload", "UploadPart", "UploadPartCopy", "ListParts", "CompleteMultipartUpload",
}  # fmt: skip
_NO_HEADERS = ("x-amz-tagging", "x-amz-acl", "x-amz-object-lock-mode", "x-amz-website-redirect-location", "content-md5")


def is_one(bucket: str) -> bool:
    return bucket.endswith("--x-s3")


def check(operation: str, call: Call) -> None:
    """Raise what AWS answers to a request that a directory bucket does not take."""
    query, headers = call.query, call.headers
    if operation not in _SUPPORTED:
        raise S3Error(501, "NotImplemented", f"{operation} is not supported by directory buckets")
    if any(name in headers for name in _NO_HEADERS):
        raise S3Error(501, "NotImplemented", "this header is not supported by directory buckets")
    if headers.get("x-amz-storage-class", "EXPRESS_ONEZONE") != "EXPRESS_ONEZONE":
        raise S3Error(400, "InvalidStorageClass", "objects of directory buckets have the class EXPRESS_ONEZONE")
    if operation in LISTS:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "/")
        if prefix and not prefix.endswith("/"):
            raise S3Error(400, "InvalidRequest", f"the prefix {prefix!r} does not end in the delimiter /")
        if delimiter != "/" or "start-after" in query or "upload-id-marker" in query:
            raise S3Error(400, "InvalidArgument", "this parameter is not supported by directory buckets")
    if operation == "CompleteMultipartUpload":
        numbers = [number for number, _ in answers.parse_complete(call.body)]
        if numbers != list(range(1, len(numbers) + 1)):
            raise S3Error(400, "InvalidPart", "part numbers must be consecutive and start with 1")


def create_session(store: Store, call: Call) -> Response:
    fields = answers.fields(SessionToken="memory", SecretAccessKey="memory", AccessKeyId="memory")
    credentials = [*fields, ("Expiration", "2099-01-01T00:00:00Z")]
    return answers.xml("CreateSessionResult", ("Credentials", credentials))


def list_objects(store: Store, call: Call) -> Response:
    """ListObjectsV2: in no order, and with the common prefixes of open uploads."""
    prefix, delimiter = call.query.get("prefix", ""), call.query.get("delimiter", "")
    page, objects = store.page(call.bucket, prefix=prefix, delimiter=delimiter, after="", max_keys=1_000_000)
    prefixes = set(page.prefixes)
    if delimiter:
        keys = [each.key for each in store.uploads(call.bucket) if each.key.startswith(prefix)]
        prefixes |= {key[: key.index("/", len(prefix)) + 1] for key in keys if "/" in key[len(prefix) :]}
    entries: dict[str, answers.Element] = {
        name: ("CommonPrefixes", answers.fields(Prefix=call.encode(name))) for name in prefixes
    }
    entries |= {key: answers.contents(call.encode(key), each, "EXPRESS_ONEZONE") for key, each in objects.items()}
    shown, more = _page(entries, call.query.get("continuation-token", "0"), call.query.get("max-keys", "1000"))
    return answers.xml("ListBucketResult", *_head(call, more), *shown, NextContinuationToken=more or None)


def list_uploads(store: Store, call: Call) -> Response:
    found = [each for each in store.uploads(call.bucket) if each.key.startswith(call.query.get("prefix", ""))]
    entries = {each.key + each.id: answers.open_upload(call.encode(each.key), each) for each in found}
    shown, more = _page(entries, call.query.get("key-marker") or "0", call.query.get("max-uploads", "1000"))
    return answers.xml("ListMultipartUploadsResult", *_head(call, more), *shown, NextKeyMarker=more or None)


def _page(entries: dict[str, answers.Element], marker: str, most: str) -> tuple[list[answers.Element], str]:
    names = sorted(entries, key=lambda name: zlib.crc32(name.encode()))
    start = int(marker)
    stop = start + min(int(most), 1000)
    return [entries[name] for name in names[start:stop]], str(stop) if stop < len(names) else ""


def _head(call: Call, more: str) -> list[answers.Element]:
    return answers.fields(IsTruncated=bool(more), EncodingType=call.query.get("encoding-type") or None)
