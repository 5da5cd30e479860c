"""S3's XML: the answers written, the requests read."""

from __future__ import annotations

import time
from collections.abc import Iterable
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from .http import Response
from .memory import Body
from .store import S3Error, StoredObject, Upload

_NAMESPACE = "http://s3.amazonaws.com/doc/2006-03-01/"

#: A tree of elements: name, and text or children.
Element = tuple[str, "str | list[Element]"]


def fields(**values: object) -> list[Element]:
    texts = {True: "true", False: "false"}
    return [
        (name, texts[value] if isinstance(value, bool) else str(value))
        for name, value in values.items()
        if value is not None
    ]


def xml(root: str, *children: Element, **values: object) -> Response:
    text = f'<?xml version="1.0" encoding="UTF-8"?>\n<{root} xmlns="{_NAMESPACE}">'
    text += f"{_render([*fields(**values), *children])}</{root}>"
    return Response(200, Body.of(text.encode()), {"Content-Type": "application/xml"})


def error(failure: S3Error, *, resource: str, request_id: str) -> Response:
    """The answer that reports a failure. Errors have no namespace in S3."""
    inner = fields(Code=failure.code, Message=failure.message, Resource=resource, RequestId=request_id)
    text = f'<?xml version="1.0" encoding="UTF-8"?>\n<Error>{_render(inner)}</Error>'
    return Response(failure.status, Body.of(text.encode()), {"Content-Type": "application/xml"})


def _render(children: Iterable[Element]) -> str:
    return "".join(
        f"<{name}>{escape(inner) if isinstance(inner, str) else _render(inner)}</{name}>" for name, inner in children
    )


def contents(key: str, stored: StoredObject, storage_class: str = "STANDARD") -> Element:
    values = {"LastModified": iso_time(stored.modified), "ETag": stored.etag, "Size": stored.size}
    return "Contents", fields(Key=key, **values, StorageClass=storage_class)


def open_upload(key: str, upload: Upload) -> Element:
    return "Upload", fields(Key=key, UploadId=upload.id, Initiated=iso_time(upload.initiated), StorageClass="STANDARD")


def iso_time(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)) + f".{int(seconds * 1000) % 1000:03}Z"


def _parse(body: Body) -> ElementTree.Element:
    try:
        root = ElementTree.fromstring(bytes(body))
    except ElementTree.ParseError:
        raise S3Error(400, "MalformedXML", "The XML you provided was not well-formed") from None
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
    return root


def parse_delete(body: Body) -> tuple[dict[str, str], bool]:
    """Keys to delete with the ETags that they must have (``*``: any), and whether the client wants to hear of failures
    only."""
    root = _parse(body)
    keys = {element.findtext("Key", ""): element.findtext("ETag", "*") for element in root.iter("Object")}
    return keys, root.findtext("Quiet", "false").strip().lower() == "true"


def parse_complete(body: Body) -> list[tuple[int, str]]:
    parts = []
    for element in _parse(body).iter("Part"):
        number = element.findtext("PartNumber", "").strip()
        if not number.isdigit():
            raise S3Error(400, "MalformedXML", f"PartNumber is {number!r}, expected a number")
        parts.append((int(number), element.findtext("ETag", "").strip()))
    return parts
