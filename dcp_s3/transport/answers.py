"""Answers that were cut off in their heads, for botocore's clients.

http.client takes a connection that ends inside the headers for the end of the headers. What is left looks like a short
answer: a listing of nothing, an object without its user metadata, an ETag cut in half. Such an answer counts as a 500
here, so that the request is tried again. (aiohttp notices by itself.)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_WITH_ETAG = frozenset({"UploadPart", "GetObject", "HeadObject"})
_WITH_XML = frozenset(
    {
        "CompleteMultipartUpload", "CreateMultipartUpload", "DeleteObjects", "ListMultipartUploads", "ListObjectsV2",
        "ListParts",
    }
)  # fmt: skip


def refuse_incomplete(client: Any) -> None:
    """Let a boto3 client notice answers whose heads were cut off."""
    client.meta.events.register("before-parse.s3.*", _check)


def _check(operation_model: Any, response_dict: dict[str, Any], **_: Any) -> None:
    status = response_dict["status_code"]
    is_complete = _is_whole_result if status < 300 else _is_whole_error
    if not is_complete(operation_model.name, response_dict["headers"], response_dict["body"]):
        if hasattr(response_dict["body"], "close"):
            response_dict["body"].close()
        response_dict["status_code"], response_dict["body"] = 500, _ERROR


_ERROR = b"<Error><Code>InternalError</Code><Message>The answer was cut off in its head</Message></Error>"


def _is_whole_result(operation: str, headers: Mapping[str, str], body: Any) -> bool:
    if operation in _WITH_XML:
        return bool(body)
    if operation in _WITH_ETAG:
        etag = headers.get("etag", "")
        if not etag or etag.startswith('"') != (len(etag) > 1 and etag.endswith('"')):
            return False
    if operation in ("GetObject", "HeadObject"):
        return headers.get("content-length", "").isdigit() or "transfer-encoding" in headers
    return True


def _is_whole_error(operation: str, headers: Mapping[str, str], body: Any) -> bool:
    """A 404 may mean a missing bucket, object or upload: the body says which. That of a HEAD has none."""
    return operation.startswith("Head") or bool(body) or headers.get("content-length") == "0"
