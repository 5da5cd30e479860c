"""Detection of answers that are not S3's, or not whole, before anything is concluded from them.

A proxy or a captive portal may answer in place of S3: with a 200 and its own page, or with a 404. And http.client takes
a connection that ends inside the headers for the end of the headers. botocore reads either as a short answer: an object
that was stored, an empty listing, an ETag cut in half. Here each answer must have what S3's has. One that lacks it
counts as a 500, so that the request is retried.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from xml.sax.saxutils import escape

from botocore.exceptions import ClientError

# Statuses of operations that succeeded: https://docs.aws.amazon.com/AmazonS3/latest/API/API_Operations_Amazon_Simple_Storage_Service.html
_OK = frozenset({200})
_STATUS = {
    "AbortMultipartUpload": frozenset({204}),
    "DeleteObject": frozenset({204}),
    "GetObject": frozenset({200, 206}),
    "HeadObject": frozenset({200, 206}),
}
_WITH_ETAG = frozenset({"GetObject", "HeadObject", "PutObject", "UploadPart"})
_WITH_LENGTH = frozenset({"GetObject", "HeadObject"})
_WITH_TIME = frozenset({"HeadObject"})
_WITHOUT_BODY = frozenset({"PutObject", "UploadPart"})
# Start of the name of the answer's root: stores differ in the rest of it (Result, Response, nothing).
_ROOTS = {
    "CompleteMultipartUpload": b"CompleteMultipartUpload",
    "CreateMultipartUpload": b"InitiateMultipartUpload",
    "DeleteObjects": b"Delete",
    "GetBucketEncryption": b"ServerSideEncryptionConfiguration",
    "GetBucketLifecycleConfiguration": b"LifecycleConfiguration",
    "GetObjectLockConfiguration": b"ObjectLockConfiguration",
    "ListMultipartUploads": b"ListMultipartUploads",
    "ListObjectVersions": b"ListVersions",
    "ListObjectsV2": b"ListBucket",
    "ListParts": b"ListParts",
}
# Element that asks for the next page; each page but the last must have it.
_NEXT = {
    "ListMultipartUploads": b"NextKeyMarker>",
    "ListObjectVersions": b"NextKeyMarker>",
    "ListObjectsV2": b"NextContinuationToken>",
    "ListParts": b"NextPartNumberMarker>",
}
_REDIRECTIONS = frozenset({301, 302, 303, 307, 308})
_CHECKSUM = "x-amz-checksum-crc"


def check_answers(client: Any) -> None:
    """Let a client detect answers that are not S3's, or not whole."""
    events = client.meta.events
    events.register("before-parse.s3.*", _check)
    for operation in ("PutObject", "UploadPart"):
        events.register(f"before-call.s3.{operation}", _remember_checksums)
        events.register(f"after-call.s3.{operation}", _compare_checksums)


def _check(operation_model: Any, response_dict: dict[str, Any], **_: Any) -> None:
    status, headers, body = response_dict["status_code"], response_dict["headers"], response_dict["body"]
    find_fault = _fault_of_result if status < 301 else _fault_of_error  # botocore takes a 300 for a success
    fault = find_fault(operation_model.name, status, headers, body)
    if fault is None:
        return
    if hasattr(body, "close"):
        body.close()
    message = (
        f"the answer, with status {status}, {fault}{_describe(headers, body)}. Either it was cut off, or a proxy or "
        "captive portal on the way gave it in the place of S3"
    )
    text = f"<Error><Code>NotAnsweredByS3</Code><Message>{escape(message)}</Message></Error>"
    response_dict["status_code"], response_dict["body"] = 500, text.encode()


def _fault_of_result(operation: str, status: int, headers: Mapping[str, str], body: Any) -> str | None:
    root = _ROOTS.get(operation)
    if root is not None and _root_of(body) == b"Error":
        return None  # S3 began to answer before it failed: botocore makes an error of it
    if status not in _STATUS.get(operation, _OK):
        return f"is none of S3's to {operation}"
    if root is not None:
        return _fault_of_xml(operation, root, body)
    etag = headers.get("etag", "")
    if operation in _WITH_ETAG and (not etag or etag.startswith('"') != (len(etag) > 1 and etag.endswith('"'))):
        return "has no whole ETag"
    if operation in _WITH_LENGTH and not (
        headers.get("content-length", "").isdigit() or "transfer-encoding" in headers
    ):
        return "does not say how long it is"
    if operation in _WITH_TIME and not _TIME.fullmatch(headers.get("last-modified", "")):
        return "does not say when the object was written"
    if operation in _WITHOUT_BODY and body.strip():
        return "has a body, which S3's has not"
    return None


def _fault_of_xml(operation: str, root: bytes, body: bytes) -> str | None:
    if not _root_of(body).startswith(root):
        return f"is no whole {root.decode()}Result"
    if operation == "CreateMultipartUpload" and b"UploadId>" not in body:
        return "has no UploadId"
    if operation in _NEXT and _TRUNCATED.search(body) and _NEXT[operation] not in body:
        return "does not say how to go on"
    return None


def _fault_of_error(operation: str, status: int, headers: Mapping[str, str], body: bytes) -> str | None:
    """A 404 may mean a missing bucket, object or upload: the body says which. A HEAD's answer has no body."""
    # S3 says where the bucket is. If a redirection does not, botocore asks, and so on for the answer to that.
    if status in _REDIRECTIONS and "x-amz-bucket-region" not in headers and _root_of(body) != b"Error":
        return "does not lead to a region"
    if operation.startswith("Head"):
        return None
    if not body and headers.get("content-length") != "0":
        return "says nothing"
    # Other refusals are errors, whoever gives them. But a 404 is an answer on which a save or a prune acts.
    return "does not say what is missing" if status == 404 and body and _root_of(body) != b"Error" else None


_TIME = re.compile(r"\w{3}, \d{1,2} \w{3} \d{4} \d\d:\d\d:\d\d \w{3}")
_TRUNCATED = re.compile(rb"IsTruncated>\s*true\s*<", re.IGNORECASE)
_ROOT = re.compile(rb"\s*(?:<\?xml[^>]*\?>\s*)?(?:<!--.*?-->\s*)*<(?:\w+:)?(\w+)[\s/>]", re.DOTALL)


def _root_of(body: bytes) -> bytes:
    """The name of an XML document's root, empty if it is not XML or has no end. The inside is not looked at."""
    found = _ROOT.match(body)
    if found is None:
        return b""
    name = found[1]
    has_end = re.search(rb"</(?:\w+:)?" + name + rb"\s*>\s*$", body[-200:])
    return name if has_end or re.compile(rb"[^<]*/>\s*$").match(body, found.end(1)) else b""


def _describe(headers: Mapping[str, str], body: Any) -> str:
    kind = headers.get("content-type", "")
    begins = repr(body[:40].decode("utf-8", "replace")) if isinstance(body, bytes) and body else ""
    known = [f"type {kind}"] * bool(kind) + [f"beginning with {begins}"] * bool(begins)
    return f" ({', '.join(known)})" if known else ""


def _remember_checksums(params: Mapping[str, Any], context: dict[str, Any], **_: Any) -> None:
    """Remember the checksums that are sent with a body."""
    headers = {name.lower(): value for name, value in params["headers"].items()}
    context["dcp_s3_checksums"] = {name: value for name, value in headers.items() if name.startswith(_CHECKSUM)}


def _compare_checksums(http_response: Any, model: Any, context: Mapping[str, Any], **_: Any) -> None:
    """Compare what was stored: stores that know a checksum send it back."""
    for name, sent in context.get("dcp_s3_checksums", {}).items():
        stored = http_response.headers.get(name, sent)
        if http_response.status_code < 300 and stored != sent:
            message = f"what was stored has another checksum: {name} is {stored}, expected {sent}"
            raise ClientError({"Error": {"Code": "BadDigest", "Message": message}}, model.name)
