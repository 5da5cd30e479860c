"""Failures on demand: what a fault function is told about a request, and what it can ask for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class RequestInfo:
    """One request, as its head tells it (the body has not been read yet)."""

    number: int
    """Counts requests to the server from 1, over all connections."""
    operation: str
    """S3's name for it, e.g. ``PutObject``, ``UploadPart``, ``ListObjectsV2``."""
    method: str
    bucket: str
    """Empty for ListBuckets."""
    key: str
    """Decoded; empty for operations on a bucket."""
    query: Mapping[str, str]
    headers: Mapping[str, str] = field(repr=False)
    """Names in lower case."""
    content_length: int
    """Bytes of the body on the wire; 0 if not announced."""

    @property
    def range(self) -> str | None:
        return self.headers.get("range")


Kind = Literal[
    "delay", "error", "error_in_200", "delete_partly", "reset", "reset_request", "reset_response", "cut_head",
    "truncate", "apply_then_reset", "forge", "repeat", "straggle", "stall", "crawl", "drip",
]  # fmt: skip


@dataclass(frozen=True)
class Fault:
    """What goes wrong with one request. Build it with the class methods."""

    kind: Kind
    status: int = 0
    code: str = ""
    after_bytes: int = 0
    seconds: float = 0.0
    """Waited before anything else happens, whatever the kind; of a ``stall``, inside of the body."""
    bytes_per_second: float = 0.0
    headers: tuple[tuple[str, str], ...] = ()
    """Of a forged answer, apart from Content-Length."""
    body: bytes = b""
    applied: bool = False
    """Whether what was asked is done before the forged answer."""

    @classmethod
    def delay(cls, seconds: float) -> Fault:
        return cls("delay", seconds=seconds)

    @classmethod
    def error(cls, status: int, code: str, *, seconds: float = 0.0) -> Fault:
        """Refuse with an HTTP status and S3 code, e.g. ``503, "SlowDown"``; nothing is applied."""
        return cls("error", status=status, code=code, seconds=seconds)

    @classmethod
    def error_in_200(cls, code: str = "InternalError") -> Fault:
        """Answer status 200 with an ``<Error>`` body, as of an operation that failed after the head was sent; nothing
        is applied."""
        return cls("error_in_200", status=200, code=code)

    @classmethod
    def delete_partly(cls, code: str = "InternalError") -> Fault:
        """Delete all keys of a DeleteObjects but the first, which is answered with that error inside a 200."""
        return cls("delete_partly", status=200, code=code)

    @classmethod
    def reset(cls, *, seconds: float = 0.0) -> Fault:
        """Reset the connection (RST) once the head has been read; nothing is applied."""
        return cls("reset", seconds=seconds)

    @classmethod
    def reset_request(cls, after_bytes: int) -> Fault:
        """Reset the connection after reading that many bytes of the request body."""
        return cls("reset_request", after_bytes=after_bytes)

    @classmethod
    def reset_response(cls, after_bytes: int) -> Fault:
        """Send the whole head and that many bytes of the response body, then reset the connection."""
        return cls("reset_response", after_bytes=after_bytes)

    @classmethod
    def cut_head(cls, after_bytes: int) -> Fault:
        """Do what was asked, send that many bytes of the answer's head (its status line at least), then close."""
        return cls("cut_head", after_bytes=after_bytes)

    @classmethod
    def truncate(cls, after_bytes: int) -> Fault:
        """Send the whole head but only that many bytes of the response body, then close."""
        return cls("truncate", after_bytes=after_bytes)

    @classmethod
    def apply_then_reset(cls) -> Fault:
        """Do what was asked, then reset the connection instead of answering."""
        return cls("apply_then_reset")

    @classmethod
    def forge(
        cls, status: int, body: bytes = b"", headers: Mapping[str, str] | None = None, *, applied: bool = False
    ) -> Fault:
        """Answer with exactly this status, body and headers, as something on the way would that is no S3; with
        ``applied``, what was asked is done all the same."""
        return cls("forge", status=status, body=body, headers=tuple((headers or {}).items()), applied=applied)

    @classmethod
    def repeat(cls) -> Fault:
        """Do what was asked twice, as with a proxy that sends a request again, and give the second answer."""
        return cls("repeat")

    @classmethod
    def straggle(cls, seconds: float) -> Fault:
        """Handle the request as usual, ``seconds`` later, unless the client hangs up before that."""
        return cls("straggle", seconds=seconds)

    @classmethod
    def stall(cls, after_bytes: int, seconds: float) -> Fault:
        """Send the head and that many bytes of the response body, and the rest ``seconds`` later."""
        return cls("stall", after_bytes=after_bytes, seconds=seconds)

    @classmethod
    def crawl(cls, bytes_per_second: float, *, after_bytes: int = 0) -> Fault:
        """Send the head and that many bytes of the response body at once, and the rest at that speed."""
        return cls("crawl", after_bytes=after_bytes, bytes_per_second=bytes_per_second)

    @classmethod
    def drip(cls, bytes_per_second: float) -> Fault:
        """Do what was asked, and send the answer, its head included, at that speed."""
        return cls("drip", bytes_per_second=bytes_per_second)


FaultFunction = Callable[[RequestInfo], "Fault | None"]
"""Asked before each request is handled, from many threads; None means no fault."""
