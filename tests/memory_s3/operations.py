"""What each S3 operation does and answers.

A new operation is a method of :class:`Operations` and a name in a table.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from email.utils import formatdate
from urllib.parse import unquote

from . import answers, checksums, directory_bucket
from .http import Received, Response
from .store import (
    LAST_CHARACTER,
    Page,
    S3Error,
    Store,
    StoredObject,
    continuation_token,
    parse_continuation_token,
)

#: The query parameter that names an operation, by method and level.
_BUCKET_OPERATIONS = {
    "GET": {
        "session": "CreateSession",
        "uploads": "ListMultipartUploads",
        "location": "GetBucketLocation",
        "versioning": "GetBucketVersioning",
        "list-type": "ListObjectsV2",
        "": "ListObjects",
    },
    "HEAD": {"": "HeadBucket"},
    "PUT": {"": "CreateBucket"},
    "DELETE": {"": "DeleteBucket"},
    "POST": {"delete": "DeleteObjects"},
}
_OBJECT_OPERATIONS = {
    "GET": {"uploadId": "ListParts", "": "GetObject"},
    "HEAD": {"": "HeadObject"},
    "PUT": {"uploadId": "UploadPart", "": "PutObject"},
    "DELETE": {"uploadId": "AbortMultipartUpload", "": "DeleteObject"},
    "POST": {"uploads": "CreateMultipartUpload", "uploadId": "CompleteMultipartUpload"},
}
#: Query parameters of features that this server does not have: refused rather than ignored.
_NOT_IMPLEMENTED = {
    "acl", "attributes", "cors", "encryption", "legal-hold", "lifecycle", "object-lock", "policy",
    "replication", "restore", "retention", "select", "tagging", "torrent", "versions", "website",
}  # fmt: skip
_NONE = "NotImplemented"


def identify(method: str, bucket: str, key: str, query: Mapping[str, str], headers: Mapping[str, str]) -> str:
    """S3's name for a request; ``NotImplemented`` for what this server does not know."""
    if _NOT_IMPLEMENTED.intersection(query):
        return _NONE
    if not bucket:
        return "ListBuckets" if method == "GET" else _NONE
    table = (_OBJECT_OPERATIONS if key else _BUCKET_OPERATIONS).get(method, {})
    operation = next((table[name] for name in table if name in query), table.get("", _NONE))
    if "x-amz-copy-source" in headers:
        copies = {"PutObject": "CopyObject", "UploadPart": "UploadPartCopy"}
        return copies.get(operation, operation)
    return operation


@dataclass(frozen=True)
class Call:
    """A request that has been received whole."""

    bucket: str
    key: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    received: Received
    not_deleted: str = ""
    """The error code for the first key of a DeleteObjects, which stays."""


class Operations:
    """Answers calls from a store."""

    def __init__(self, store: Store, *, verify_checksums: bool) -> None:
        self._store = store
        self._verify = verify_checksums
        self.refused: list[Call] = []
        """Requests that a directory bucket does not take."""
        self._handlers: dict[str, Callable[[Call], Response]] = {
            "ListBuckets": self._list_buckets,
            "CreateSession": self._create_session,
            "CreateBucket": self._create_bucket,
            "HeadBucket": self._head_bucket,
            "DeleteBucket": self._delete_bucket,
            "GetBucketLocation": self._get_bucket_location,
            "GetBucketVersioning": self._get_bucket_versioning,
            "ListObjects": self._list_objects,
            "ListObjectsV2": self._list_objects_v2,
            "ListMultipartUploads": self._list_multipart_uploads,
            "DeleteObjects": self._delete_objects,
            "PutObject": self._put_object,
            "GetObject": self._get_object,
            "HeadObject": self._get_object,
            "DeleteObject": self._delete_object,
            "CopyObject": self._copy_object,
            "CreateMultipartUpload": self._create_multipart_upload,
            "UploadPart": self._upload_part,
            "UploadPartCopy": self._upload_part_copy,
            "ListParts": self._list_parts,
            "CompleteMultipartUpload": self._complete_multipart_upload,
            "AbortMultipartUpload": self._abort_multipart_upload,
        }

    def handle(self, operation: str, call: Call) -> Response:
        """Carry out an operation, or raise S3Error."""
        if directory_bucket.is_one(call.bucket):
            try:
                directory_bucket.check(operation, call)
            except S3Error:
                self.refused.append(call)
                raise
        if operation not in self._handlers:
            message = "A header or parameter implies functionality that is not implemented"
            raise S3Error(501, _NONE, message)
        return self._handlers[operation](call)

    # Buckets

    def _list_buckets(self, call: Call) -> Response:
        entries: list[answers.Element] = [
            ("Bucket", [("Name", name), ("CreationDate", answers.iso_time(created))])
            for name, created in self._store.buckets().items()
        ]
        owner: answers.Element = ("Owner", [("ID", "memory"), ("DisplayName", "memory")])
        return answers.xml("ListAllMyBucketsResult", [owner, ("Buckets", entries)])

    def _create_bucket(self, call: Call) -> Response:
        self._store.create_bucket(call.bucket)
        return Response(headers={"Location": f"/{call.bucket}"})

    def _create_session(self, call: Call) -> Response:
        return directory_bucket.create_session()

    def _head_bucket(self, call: Call) -> Response:
        self._store.check_bucket(call.bucket)
        return Response(headers={"x-amz-bucket-region": "us-east-1"})

    def _delete_bucket(self, call: Call) -> Response:
        self._store.delete_bucket(call.bucket)
        return Response(204)

    def _get_bucket_location(self, call: Call) -> Response:
        self._store.check_bucket(call.bucket)
        return answers.xml("LocationConstraint", [])

    def _get_bucket_versioning(self, call: Call) -> Response:
        self._store.check_bucket(call.bucket)
        return answers.xml("VersioningConfiguration", [])

    def _list_objects_v2(self, call: Call) -> Response:
        if directory_bucket.is_one(call.bucket):
            return directory_bucket.list_objects(self._store, call)
        query = call.query
        token = query.get("continuation-token")
        start_after = query.get("start-after", "")
        after = parse_continuation_token(token) if token else start_after
        page, children = self._list(call, after)
        children.append(("KeyCount", str(len(page.keys) + len(page.prefixes))))
        if token:
            children.append(("ContinuationToken", token))
        elif start_after:
            encode = answers.name_encoder(query.get("encoding-type", ""))
            children.append(("StartAfter", encode(start_after)))
        if page.next_after is not None:
            children.append(("NextContinuationToken", continuation_token(page.next_after)))
        return answers.xml("ListBucketResult", children)

    def _list_objects(self, call: Call) -> Response:
        marker = call.query.get("marker", "")
        encode = answers.name_encoder(call.query.get("encoding-type", ""))
        page, children = self._list(call, marker)
        children.append(("Marker", encode(marker)))
        if page.next_after is not None:
            children.append(("NextMarker", encode(page.next_after.rstrip(LAST_CHARACTER))))
        return answers.xml("ListBucketResult", children)

    def _list(self, call: Call, after: str) -> tuple[Page, list[answers.Element]]:
        query = call.query
        encoding = query.get("encoding-type", "")
        encode = answers.name_encoder(encoding)
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        max_keys = min(_number(query, "max-keys", 1000), 1000)
        page, objects = self._store.page(
            call.bucket, prefix=prefix, delimiter=delimiter, after=after, max_keys=max_keys
        )
        children: list[answers.Element] = [
            ("Name", call.bucket),
            ("Prefix", encode(prefix)),
            ("MaxKeys", str(max_keys)),
            ("IsTruncated", "false" if page.next_after is None else "true"),
        ]
        if delimiter:
            children.append(("Delimiter", encode(delimiter)))
        if encoding:
            children.append(("EncodingType", encoding))
        for key, stored in objects.items():
            entry: list[answers.Element] = [
                ("Key", encode(key)),
                ("LastModified", answers.iso_time(stored.modified)),
                ("ETag", stored.etag),
                ("Size", str(stored.size)),
                ("StorageClass", "STANDARD"),
            ]
            children.append(("Contents", entry))
        children += [("CommonPrefixes", [("Prefix", encode(name))]) for name in page.prefixes]
        return page, children

    def _delete_objects(self, call: Call) -> Response:
        etags, quiet = answers.parse_delete(call.received.body)
        keys = list(etags)
        if len(keys) > 1000:
            raise S3Error(400, "MalformedXML", f"{len(keys)} keys to delete, the limit is 1000")
        left = keys[:1] if call.not_deleted else []
        refused = self._store.delete(call.bucket, keys[len(left) :], etags)
        answer: list[answers.Element] = [
            ("Error", [("Key", key), ("Code", call.not_deleted), ("Message", "Injected by the fault function.")])
            for key in left
        ]
        answer += [
            ("Error", [("Key", key), ("Code", "PreconditionFailed"), ("Message", "It has another ETag.")])
            for key in refused
        ]
        if not quiet:
            answer += [("Deleted", [("Key", key)]) for key in keys[len(left) :] if key not in refused]
        return answers.xml("DeleteResult", answer)

    # Objects

    def _put_object(self, call: Call) -> Response:
        stored = self._store.put(
            call.bucket,
            call.key,
            call.received.body,
            headers=_object_headers(call.headers),
            checksums=self._checked(call),
            if_none_match=call.headers.get("if-none-match"),
            if_match=call.headers.get("if-match"),
        )
        return Response(headers={"ETag": stored.etag, **stored.checksums})

    def _get_object(self, call: Call) -> Response:
        stored = self._store.get(call.bucket, call.key)
        headers = {
            "ETag": stored.etag,
            "Last-Modified": formatdate(stored.modified, usegmt=True),
            "Accept-Ranges": "bytes",
            **stored.headers,
        }
        if _unchanged(stored, call.headers):
            return Response(304, headers={"ETag": stored.etag})
        span = self._span(stored, call, headers)
        if span is None:
            if call.headers.get("x-amz-checksum-mode", "").upper() == "ENABLED":
                headers.update(stored.checksums)
            return Response(200, stored.body, headers)
        start, stop = span
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{stored.size}"
        return Response(206, stored.body.slice(start, stop), headers)

    def _span(self, stored: StoredObject, call: Call, headers: dict[str, str]) -> tuple[int, int] | None:
        """The bytes [start, stop) that a Range header or part number asks for; None: all."""
        if "partNumber" not in call.query:
            return parse_range(call.headers.get("range"), stored.size)
        sizes = stored.part_sizes or (stored.size,)
        number = _number(call.query, "partNumber", 1)
        if not 1 <= number <= len(sizes):
            raise S3Error(416, "InvalidPartNumber", "The requested part is not satisfiable")
        if stored.part_sizes:
            headers["x-amz-mp-parts-count"] = str(len(sizes))
        start = sum(sizes[: number - 1])
        return (start, start + sizes[number - 1]) if stored.size else None

    def _delete_object(self, call: Call) -> Response:
        etag = call.headers.get("if-match", "*")
        if self._store.delete(call.bucket, [call.key], {call.key: etag}):
            raise S3Error(412, "PreconditionFailed", "It has another ETag.")
        return Response(204)

    def _copy_object(self, call: Call) -> Response:
        source = self._copy_source(call)
        replace = call.headers.get("x-amz-metadata-directive", "COPY").upper() == "REPLACE"
        stored = self._store.put(
            call.bucket,
            call.key,
            source.body,
            headers=_object_headers(call.headers) if replace else source.headers,
            checksums=source.checksums,
            if_none_match=call.headers.get("if-none-match"),
            if_match=call.headers.get("if-match"),
        )
        return _copied("CopyObjectResult", stored.etag, stored.modified)

    def _copy_source(self, call: Call) -> StoredObject:
        path = unquote(call.headers["x-amz-copy-source"]).lstrip("/")
        bucket, _, key = path.partition("/")
        source = self._store.get(bucket, key.partition("?versionId=")[0])
        wanted = call.headers.get("x-amz-copy-source-if-match")
        if wanted is not None and wanted.strip('"') != source.etag.strip('"'):
            raise S3Error(412, "PreconditionFailed", "The copy source has another ETag")
        return source

    def _checked(self, call: Call) -> dict[str, str]:
        """The checksums given with a body, after comparing them to what arrived."""
        given = checksums.given({**call.headers, **call.received.trailers})
        algorithm = checksums.announced(call.headers)
        computed = call.received.checksum
        if self._verify and algorithm is not None and computed is not None:
            expected = given.get(checksums.HEADER_PREFIX + algorithm)
            if expected != computed:
                message = (
                    f"The {algorithm.upper()} you specified did not match the calculated "
                    f"checksum: {expected}, calculated {computed}"
                )
                raise S3Error(400, "BadDigest", message)
        return given

    # Multipart uploads

    def _create_multipart_upload(self, call: Call) -> Response:
        upload = self._store.create_upload(call.bucket, call.key, _object_headers(call.headers))
        children: list[answers.Element] = [
            ("Bucket", call.bucket),
            ("Key", call.key),
            ("UploadId", upload.id),
        ]
        response = answers.xml("InitiateMultipartUploadResult", children)
        names = ("x-amz-checksum-algorithm", "x-amz-checksum-type")
        echoed = {name: call.headers[name] for name in names if name in call.headers}
        return Response(200, response.body, {**response.headers, **echoed})

    def _upload_part(self, call: Call) -> Response:
        number = _part_number(call)
        part = self._store.put_part(
            call.bucket,
            call.key,
            call.query["uploadId"],
            number,
            call.received.body,
            self._checked(call),
        )
        return Response(headers={"ETag": part.etag, **part.checksums})

    def _upload_part_copy(self, call: Call) -> Response:
        source = self._copy_source(call)
        span = parse_range(call.headers.get("x-amz-copy-source-range"), source.size)
        body = source.body if span is None else source.body.slice(*span)
        part = self._store.put_part(call.bucket, call.key, call.query["uploadId"], _part_number(call), body)
        return _copied("CopyPartResult", part.etag, part.modified)

    def _list_parts(self, call: Call) -> Response:
        after = _number(call.query, "part-number-marker", 0)
        limit = min(_number(call.query, "max-parts", 1000), 1000)
        parts = self._store.parts(call.bucket, call.key, call.query["uploadId"])
        numbers = [number for number in parts if number > after]
        shown = numbers[:limit]
        children: list[answers.Element] = [
            ("Bucket", call.bucket),
            ("Key", call.key),
            ("UploadId", call.query["uploadId"]),
            ("PartNumberMarker", str(after)),
            ("NextPartNumberMarker", str(shown[-1] if shown else after)),
            ("MaxParts", str(limit)),
            ("IsTruncated", "true" if len(numbers) > limit else "false"),
        ]
        for number in shown:
            part = parts[number]
            entry: list[answers.Element] = [
                ("PartNumber", str(number)),
                ("LastModified", answers.iso_time(part.modified)),
                ("ETag", part.etag),
                ("Size", str(len(part.body))),
            ]
            entry += [(_checksum_element(name), value) for name, value in part.checksums.items()]
            children.append(("Part", entry))
        return answers.xml("ListPartsResult", children)

    def _list_multipart_uploads(self, call: Call) -> Response:
        if directory_bucket.is_one(call.bucket):
            return directory_bucket.list_uploads(self._store, call)
        query = call.query
        prefix = query.get("prefix", "")
        encode = answers.name_encoder(query.get("encoding-type", ""))
        limit = min(_number(query, "max-uploads", 1000), 1000)
        uploads = [u for u in self._store.uploads(call.bucket) if u.key.startswith(prefix)]
        key_marker, id_marker = query.get("key-marker", ""), query.get("upload-id-marker", "")
        if key_marker:
            markers = [(u.key, u.id) for u in uploads]
            if (key_marker, id_marker) in markers:
                uploads = uploads[markers.index((key_marker, id_marker)) + 1 :]
            else:
                uploads = [u for u in uploads if u.key > key_marker]
        shown = uploads[:limit]
        children: list[answers.Element] = [
            ("Bucket", call.bucket),
            ("Prefix", encode(prefix)),
            ("KeyMarker", encode(key_marker)),
            ("UploadIdMarker", id_marker),
            ("MaxUploads", str(limit)),
            ("IsTruncated", "true" if len(uploads) > limit else "false"),
        ]
        if query.get("encoding-type"):
            children.append(("EncodingType", query["encoding-type"]))
        if len(uploads) > limit and shown:
            children.append(("NextKeyMarker", encode(shown[-1].key)))
            children.append(("NextUploadIdMarker", shown[-1].id))
        for upload in shown:
            entry: list[answers.Element] = [
                ("Key", encode(upload.key)),
                ("UploadId", upload.id),
                ("StorageClass", "STANDARD"),
                ("Initiated", answers.iso_time(upload.initiated)),
            ]
            children.append(("Upload", entry))
        return answers.xml("ListMultipartUploadsResult", children)

    def _complete_multipart_upload(self, call: Call) -> Response:
        whole = checksums.given(call.headers)
        stored = self._store.complete_upload(
            call.bucket,
            call.key,
            call.query["uploadId"],
            answers.parse_complete(call.received.body),
            checksums=whole,
            verify_checksums=self._verify,
            if_none_match=call.headers.get("if-none-match"),
            if_match=call.headers.get("if-match"),
        )
        children: list[answers.Element] = [
            ("Location", f"/{call.bucket}/{call.key}"),
            ("Bucket", call.bucket),
            ("Key", call.key),
            ("ETag", stored.etag),
        ]
        children += [(_checksum_element(name), value) for name, value in whole.items()]
        return answers.xml("CompleteMultipartUploadResult", children)

    def _abort_multipart_upload(self, call: Call) -> Response:
        self._store.abort_upload(call.bucket, call.key, call.query["uploadId"])
        return Response(204)


def parse_range(header: str | None, size: int) -> tuple[int, int] | None:
    """The bytes [start, stop) of a Range header, None if there is none or it is not understood.

    Raises S3Error InvalidRange (416) if it lies outside the object.
    """
    match = re.fullmatch(r"bytes=(\d*)-(\d*)", (header or "").replace(" ", ""))
    if match is None or match[1] == match[2] == "":
        return None
    if match[1] == "":
        start, stop = max(size - int(match[2]), 0), size
    else:
        start = int(match[1])
        stop = min(int(match[2]) + 1, size) if match[2] else size
        if match[2] and int(match[2]) < start:
            return None
    if start >= stop:
        raise S3Error(416, "InvalidRange", "The requested range is not satisfiable")
    return start, stop


def _unchanged(stored: StoredObject, headers: Mapping[str, str]) -> bool:
    """Whether to answer 304; raises PreconditionFailed if If-Match does not hold."""
    wanted = headers.get("if-match")
    if wanted not in (None, "*", stored.etag, stored.etag.strip('"')):
        message = "At least one of the pre-conditions you specified did not hold"
        raise S3Error(412, "PreconditionFailed", message)
    known = headers.get("if-none-match")
    return known is not None and known in ("*", stored.etag, stored.etag.strip('"'))


def _object_headers(headers: Mapping[str, str]) -> dict[str, str]:
    kept = {name: value for name, value in headers.items() if name.startswith("x-amz-meta-")}
    encoding = headers.get("content-encoding", "").replace("aws-chunked", "").strip(", ")
    if encoding:
        kept["Content-Encoding"] = encoding
    return {"Content-Type": headers.get("content-type", "binary/octet-stream"), **kept}


def _copied(name: str, etag: str, modified: float) -> Response:
    return answers.xml(name, [("LastModified", answers.iso_time(modified)), ("ETag", etag)])


def _checksum_element(header: str) -> str:
    return "Checksum" + header.removeprefix(checksums.HEADER_PREFIX).upper()


def _part_number(call: Call) -> int:
    number = _number(call.query, "partNumber", 0)
    if not 1 <= number <= 10_000:
        message = "Part number must be an integer between 1 and 10000, inclusive"
        raise S3Error(400, "InvalidArgument", message)
    return number


def _number(query: Mapping[str, str], name: str, default: int) -> int:
    text = query.get(name, "")
    if text and not text.isdigit():
        raise S3Error(400, "InvalidArgument", f"{name} is {text!r}, expected a number")
    return int(text) if text else default
