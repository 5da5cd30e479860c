"""The checksums S3 accepts, computed as the bytes arrive.

CRC-64/NVME and CRC-32C need ``awscrt``; without it they are stored but not verified.
"""

from __future__ import annotations

import base64
import hashlib
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

try:
    from awscrt import checksums as _crt
except ImportError:  # an optional package: MemoryS3 itself is standard library only
    _crt = None

#: Header names are this prefix and the algorithm's name in lower case.
HEADER_PREFIX = "x-amz-checksum-"
ALGORITHMS = ("crc64nvme", "crc32c", "crc32", "sha256", "sha1")


class Checksum(Protocol):
    """A running checksum."""

    def update(self, data: memoryview, /) -> None:
        """Add bytes."""

    def digest(self) -> bytes:
        """The checksum, big-endian as S3 wants it."""


class _Crc:
    def __init__(self, function: Callable[[memoryview, int], int], size: int) -> None:
        self._function = function
        self._size = size
        self._value = 0

    def update(self, data: memoryview, /) -> None:
        self._value = self._function(data, self._value)

    def digest(self) -> bytes:
        return self._value.to_bytes(self._size, "big")


def new(algorithm: str) -> Checksum | None:
    """A checksum of that (lower case) name, or None if it cannot be computed here."""
    if algorithm == "crc32":
        return _Crc(zlib.crc32 if _crt is None else _crt.crc32, 4)
    if algorithm in ("sha1", "sha256"):
        return hashlib.new(algorithm)
    if _crt is not None and algorithm == "crc32c":
        return _Crc(_crt.crc32c, 4)
    if _crt is not None and algorithm == "crc64nvme":
        return _Crc(_crt.crc64nvme, 8)
    return None


def announced(headers: Mapping[str, str]) -> str | None:
    """The algorithm a request's checksum header or trailer names, or None."""
    trailer = headers.get("x-amz-trailer", "").lower()
    for algorithm in ALGORITHMS:
        name = HEADER_PREFIX + algorithm
        if name in headers or name == trailer:
            return algorithm
    return None


def given(headers: Mapping[str, str]) -> dict[str, str]:
    """The checksum headers among ``headers``: full header name to base64 value."""
    names = (HEADER_PREFIX + algorithm for algorithm in ALGORITHMS)
    return {name: headers[name] for name in names if name in headers}


def encode(digest: bytes) -> str:
    """A digest as it stands in a header."""
    return base64.b64encode(digest).decode()


def of(algorithm: str, pieces: Iterable[memoryview]) -> str | None:
    """The base64 checksum of ``pieces``, or None if it cannot be computed here."""
    checksum = new(algorithm)
    if checksum is None:
        return None
    for piece in pieces:
        checksum.update(piece)
    return encode(checksum.digest())
