"""What each S3 operation does and answers. A new operation is a function and a line of `_OPERATIONS`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from email.utils import formatdate
from typing import Any
from urllib.parse import quote, unquote

from . import directory_bucket
from .answers import Element, contents, fields, iso_time, open_upload, parse_complete, parse_delete, xml
from .http import Response
from .memory import Body
from .store import CHECKSUM, S3Error, Store, StoredObject, check_if_match, crc_of


@dataclass(frozen=True)
class Call:
    """A request that has been received whole."""

    bucket: str
    key: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: Body
    not_deleted: str = ""
    """The error code for the first key of a DeleteObjects, which stays."""

    def number(self, name: str, default: int) -> int:
        text = self.query.get(name) or str(default)
        if not text.isdigit():
            raise S3Error(400, "InvalidArgument", f"{name} is {text!r}, expected a number")
        return int(text)

    def encode(self, name: str) -> str:
        """A key or prefix, percent-encoded if the client asked for it."""
        return quote(name, safe="/") if self.query.get("encoding-type") == "url" else name

    @property
    def upload(self) -> tuple[str, str, str]:
        return self.bucket, self.key, self.query["uploadId"]

    @property
    def part_number(self) -> int:
        number = self.number("partNumber", 0)
        if not 1 <= number <= 10_000:
            raise S3Error(400, "InvalidArgument", "Part number must be an integer between 1 and 10000, inclusive")
        return number

    @property
    def conditions(self) -> dict[str, Any]:
        return {"if_none_match": self.headers.get("if-none-match"), "if_match": self.headers.get("if-match")}

    def object_headers(self) -> dict[str, str]:
        kept = {name: value for name, value in self.headers.items() if name.startswith("x-amz-meta-")}
        return {"Content-Type": self.headers.get("content-type", "binary/octet-stream"), **kept}

    def checksums(self) -> dict[str, str]:
        """Those that were given, of whatever kind: they are kept, and given back."""
        others = ("algorithm", "mode", "type")
        kept = (each for each in self.headers.items() if each[0].startswith("x-amz-checksum-"))
        return {name: value for name, value in kept if not name.endswith(others)}

    def checked(self) -> dict[str, str]:
        """The checksums given with a body, after the CRC-64/NVME was compared to what arrived."""
        given = self.checksums()
        if CHECKSUM in given and given[CHECKSUM] != (computed := crc_of(self.body)):
            text = f"The CRC64NVME you specified, {given[CHECKSUM]}, is not that of what arrived, {computed}"
            raise S3Error(400, "BadDigest", text)
        return given


# --- buckets -----------------------------------------------------------------------------------------------


def _create_bucket(store: Store, call: Call) -> Response:
    store.create_bucket(call.bucket)
    return Response(headers={"Location": f"/{call.bucket}"})


def _head_bucket(store: Store, call: Call) -> Response:
    store.bucket(call.bucket)
    return Response(headers={"x-amz-bucket-region": "us-east-1"})


def _delete_bucket(store: Store, call: Call) -> Response:
    store.delete_bucket(call.bucket)
    return Response(204)


def _get_bucket_versioning(store: Store, call: Call) -> Response:
    store.bucket(call.bucket)
    return xml("VersioningConfiguration")


def _list_objects_v2(store: Store, call: Call) -> Response:
    query, max_keys = call.query, min(call.number("max-keys", 1000), 1000)
    prefix, delimiter, token = query.get("prefix", ""), query.get("delimiter", ""), query.get("continuation-token", "")
    page, objects = store.page(call.bucket, prefix=prefix, delimiter=delimiter, after=unquote(token), max_keys=max_keys)
    shown = [contents(call.encode(key), stored) for key, stored in objects.items()]
    prefixes: list[Element] = [("CommonPrefixes", fields(Prefix=call.encode(name))) for name in page.prefixes]
    return xml(
        "ListBucketResult", *shown, *prefixes, Name=call.bucket, Prefix=call.encode(prefix), MaxKeys=max_keys,
        IsTruncated=page.next_after is not None, Delimiter=delimiter or None,
        EncodingType=query.get("encoding-type") or None, KeyCount=len(shown) + len(prefixes),
        ContinuationToken=token or None,
        NextContinuationToken=None if page.next_after is None else quote(page.next_after),
    )  # fmt: skip


def _delete_objects(store: Store, call: Call) -> Response:
    etags, quiet = parse_delete(call.body)
    keys = list(etags)
    if len(keys) > 1000:
        raise S3Error(400, "MalformedXML", f"{len(keys)} keys to delete, the limit is 1000")
    errors = dict.fromkeys(keys[:1], call.not_deleted) if call.not_deleted else {}
    refused = store.delete(call.bucket, keys[len(errors) :], etags)
    errors |= dict.fromkeys(refused, "PreconditionFailed")
    answer: list[Element] = [
        ("Error", fields(Key=key, Code=code, Message="It was not deleted.")) for key, code in errors.items()
    ]
    if not quiet:
        answer += [("Deleted", fields(Key=key)) for key in keys if key not in errors]
    return xml("DeleteResult", *answer)


# --- objects -----------------------------------------------------------------------------------------------


def _put_object(store: Store, call: Call) -> Response:
    stored = store.put(call.bucket, call.key, call.body, call.object_headers(), call.checked(), **call.conditions)
    return Response(headers={"ETag": stored.etag, **stored.checksums})


def _get_object(store: Store, call: Call) -> Response:
    stored = store.get(call.bucket, call.key)
    check_if_match(stored, call.headers.get("if-match"))
    headers = {
        "ETag": stored.etag, "Last-Modified": formatdate(stored.modified, usegmt=True), "Accept-Ranges": "bytes",
        **stored.headers,
    }  # fmt: skip
    span = parse_range(call.headers.get("range"), stored.size)
    if span is None:
        if call.headers.get("x-amz-checksum-mode", "").upper() == "ENABLED":
            headers.update(stored.checksums)
        return Response(200, stored.body, headers)
    headers["Content-Range"] = f"bytes {span[0]}-{span[1] - 1}/{stored.size}"
    return Response(206, stored.body.slice(*span), headers)


def _delete_object(store: Store, call: Call) -> Response:
    if store.delete(call.bucket, [call.key], {call.key: call.headers.get("if-match", "*")}):
        raise S3Error(412, "PreconditionFailed", "It has another ETag.")
    return Response(204)


def _copy_source(store: Store, call: Call) -> StoredObject:
    bucket, _, key = unquote(call.headers["x-amz-copy-source"]).lstrip("/").partition("/")
    source = store.get(bucket, key)
    check_if_match(source, call.headers.get("x-amz-copy-source-if-match"))
    return source


def _copy_object(store: Store, call: Call) -> Response:
    """The checksum is the source's, or one of the algorithm that was asked for."""
    source = _copy_source(store, call)
    checksums = dict(source.checksums)
    if call.headers.get("x-amz-checksum-algorithm") == "CRC64NVME" and CHECKSUM not in checksums:
        checksums = {CHECKSUM: crc_of(source.body)}
    stored = store.put(call.bucket, call.key, source.body, source.headers, checksums, **call.conditions)
    return _copied("CopyObjectResult", stored)


def _copied(root: str, made: StoredObject) -> Response:
    return xml(root, LastModified=iso_time(made.modified), ETag=made.etag, **_checksum_fields(made.checksums))


def _checksum_fields(given: Mapping[str, str]) -> dict[str, str]:
    return {f"Checksum{name.removeprefix('x-amz-checksum-').upper()}": value for name, value in given.items()}


# --- multipart uploads -------------------------------------------------------------------------------------


def _create_multipart_upload(store: Store, call: Call) -> Response:
    algorithm = call.headers.get("x-amz-checksum-algorithm", "")
    upload = store.create_upload(call.bucket, call.key, call.object_headers(), algorithm)
    answer = xml("InitiateMultipartUploadResult", Bucket=call.bucket, Key=call.key, UploadId=upload.id)
    names = ("x-amz-checksum-algorithm", "x-amz-checksum-type")
    echoed = {name: call.headers[name] for name in names if name in call.headers}
    return Response(200, answer.body, {**answer.headers, **echoed})


def _upload_part(store: Store, call: Call) -> Response:
    part = store.put_part(*call.upload, call.part_number, call.body, call.checked())
    return Response(headers={"ETag": part.etag, **part.checksums})


def _upload_part_copy(store: Store, call: Call) -> Response:
    source = _copy_source(store, call)
    span = parse_range(call.headers.get("x-amz-copy-source-range"), source.size)
    body, checksums = source.body if span is None else source.body.slice(*span), {}
    if store.upload(*call.upload).algorithm == "CRC64NVME":
        body = body.known()
        checksums = {CHECKSUM: crc_of(body)}
    return _copied("CopyPartResult", store.put_part(*call.upload, call.part_number, body, checksums))


def _list_multipart_uploads(store: Store, call: Call) -> Response:
    query, limit = call.query, min(call.number("max-uploads", 1000), 1000)
    prefix, marker = query.get("prefix", ""), (query.get("key-marker", ""), query.get("upload-id-marker", ""))
    found = [each for each in store.uploads(call.bucket) if each.key.startswith(prefix)]
    places = [(each.key, each.id) for each in found]
    if marker in places:
        found = found[places.index(marker) + 1 :]
    elif marker[0]:
        found = [each for each in found if each.key > marker[0]]
    shown, more = found[:limit], len(found) > limit
    entries = [open_upload(call.encode(each.key), each) for each in shown]
    return xml(
        "ListMultipartUploadsResult", *entries, Bucket=call.bucket, Prefix=call.encode(prefix),
        KeyMarker=call.encode(marker[0]), UploadIdMarker=marker[1], MaxUploads=limit, IsTruncated=more,
        EncodingType=query.get("encoding-type") or None,
        NextKeyMarker=call.encode(shown[-1].key) if more and shown else None,
        NextUploadIdMarker=shown[-1].id if more and shown else None,
    )  # fmt: skip


def _complete_multipart_upload(store: Store, call: Call) -> Response:
    stored = store.complete_upload(*call.upload, parse_complete(call.body), call.checksums())
    return xml(
        "CompleteMultipartUploadResult", Location=f"/{call.bucket}/{call.key}", Bucket=call.bucket, Key=call.key,
        ETag=stored.etag, **_checksum_fields(stored.checksums),
    )  # fmt: skip


def _abort_multipart_upload(store: Store, call: Call) -> Response:
    store.abort_upload(*call.upload)
    return Response(204)


# --- which request is which --------------------------------------------------------------------------------

Handler = Callable[[Store, Call], Response]

#: S3's name, method, whether it is about the service, a bucket or an object, and the query parameter that tells it from
#: others of that method, which come first.
_OPERATIONS: list[tuple[str, str, str, str, Handler]] = [
    ("CreateSession", "GET", "bucket", "session", directory_bucket.create_session),
    ("ListMultipartUploads", "GET", "bucket", "uploads", _list_multipart_uploads),
    ("GetBucketVersioning", "GET", "bucket", "versioning", _get_bucket_versioning),
    ("ListObjectsV2", "GET", "bucket", "list-type", _list_objects_v2),
    ("HeadBucket", "HEAD", "bucket", "", _head_bucket),
    ("CreateBucket", "PUT", "bucket", "", _create_bucket),
    ("DeleteBucket", "DELETE", "bucket", "", _delete_bucket),
    ("DeleteObjects", "POST", "bucket", "delete", _delete_objects),
    ("GetObject", "GET", "object", "", _get_object),
    ("HeadObject", "HEAD", "object", "", _get_object),
    ("UploadPart", "PUT", "object", "uploadId", _upload_part),
    ("PutObject", "PUT", "object", "", _put_object),
    ("UploadPartCopy", "COPY", "object", "uploadId", _upload_part_copy),
    ("CopyObject", "COPY", "object", "", _copy_object),
    ("AbortMultipartUpload", "DELETE", "object", "uploadId", _abort_multipart_upload),
    ("DeleteObject", "DELETE", "object", "", _delete_object),
    ("CreateMultipartUpload", "POST", "object", "uploads", _create_multipart_upload),
    ("CompleteMultipartUpload", "POST", "object", "uploadId", _complete_multipart_upload),
]
_HANDLERS = {name: handler for name, _, _, _, handler in _OPERATIONS}
_OF_DIRECTORY_BUCKETS = _HANDLERS | {
    "ListObjectsV2": directory_bucket.list_objects,
    "ListMultipartUploads": directory_bucket.list_uploads,
}
#: Query parameters of features that this server does not have: refused rather than ignored.
_NOT_IMPLEMENTED = {
    "acl", "attributes", "cors", "encryption", "legal-hold", "lifecycle", "object-lock", "policy",
    "location", "replication", "restore", "retention", "select", "tagging", "torrent", "versions", "website",
    "versionId",
}  # fmt: skip
_NONE = "NotImplemented"


def identify(method: str, key: str, query: Mapping[str, str], headers: Mapping[str, str]) -> str:
    """S3's name for a request; ``NotImplemented`` for what this server does not know."""
    if _NOT_IMPLEMENTED.intersection(query):
        return _NONE
    level = "object" if key else "bucket"
    if method == "PUT" and "x-amz-copy-source" in headers:
        method = "COPY"
    rows = ((name, parameter) for name, how, about, parameter, _ in _OPERATIONS if (how, about) == (method, level))
    return next((name for name, parameter in rows if not parameter or parameter in query), _NONE)


class Operations:
    """Answers calls from a store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.refused: list[Call] = []
        """Requests that a directory bucket does not take."""

    def handle(self, operation: str, call: Call) -> Response:
        handlers = _HANDLERS
        if directory_bucket.is_one(call.bucket):
            handlers = _OF_DIRECTORY_BUCKETS
            try:
                directory_bucket.check(operation, call)
            except S3Error:
                self.refused.append(call)
                raise
        if operation not in handlers:
            raise S3Error(501, _NONE, "A header or parameter implies functionality that is not implemented")
        return handlers[operation](self._store, call)


def parse_range(header: str | None, size: int) -> tuple[int, int] | None:
    """The bytes [start, stop) of a Range header, None if there is none or it is not understood.

    Raises S3Error InvalidRange (416) if it lies outside the object.
    """
    match = re.fullmatch(r"bytes=(\d+)-(\d*)", header or "")  # boto3's own downloads leave the end of the last one open
    if match is None:
        return None
    start, stop = int(match[1]), min(int(match[2]) + 1, size) if match[2] else size
    if start >= stop:
        raise S3Error(416, "InvalidRange", "The requested range is not satisfiable")
    return start, stop
