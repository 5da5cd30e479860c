"""CRC-64/NVME, and how to combine those of neighbouring ranges without reading the bytes again."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from typing import Protocol

from awscrt import checksums


class _CRC(Protocol):
    """The CRC of ``data``, continuing from ``previous``."""

    def __call__(self, data: bytes | memoryview, previous: int = 0, /) -> int: ...


crc64nvme: _CRC = checksums.crc64nvme


def combine_crc64nvme(parts: Iterable[tuple[int, int]]) -> int:
    """The CRC-64/NVME of ranges laid end to end, from their (crc, length) pairs; 0 for none."""
    crc = 0
    for part_crc, length in parts:
        crc = int(checksums.combine_crc64nvme(crc, part_crc, length))
    return crc


def crc64nvme_between(before: int, through: int, length: int) -> int:
    """The CRC-64/NVME of the last ``length`` bytes of a run, from the CRC of the bytes before them and that of the
    whole run."""
    return int(checksums.combine_crc64nvme(before, 0, length)) ^ through


def encode_crc(crc: int) -> str:
    """A CRC-64 as S3's headers have it: base64 of its big-endian bytes."""
    return base64.b64encode(crc.to_bytes(8, "big")).decode()


def crc_hex(crc: int) -> str:
    """A CRC-64 as 16 hex digits, for manifests and messages."""
    return f"{crc:016x}"
