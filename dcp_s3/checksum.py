"""CRC-64/NVME and CRC-32C, and how to combine those of neighbouring ranges without reading the bytes again."""

from __future__ import annotations

import base64
import functools
from collections.abc import Iterable
from typing import Literal

from awscrt import checksums

ChecksumAlgorithm = Literal["crc64nvme", "crc32c", "none"]

_ONES = 2**64 - 1


def crc64nvme(data: bytes | memoryview, previous: int = 0) -> int:
    """CRC-64/NVME of ``data``, continuing from ``previous``."""
    return int(checksums.crc64nvme(data, previous))


def crc32c(data: bytes | memoryview, previous: int = 0) -> int:
    """CRC-32C of ``data``, continuing from ``previous``."""
    return int(checksums.crc32c(data, previous))


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


def encode_crc(crc: int, algorithm: ChecksumAlgorithm) -> str:
    """A CRC as S3's headers have it: base64 of its big-endian bytes."""
    return base64.b64encode(crc.to_bytes(8 if algorithm == "crc64nvme" else 4, "big")).decode()


def crc_hex(crc: int) -> str:
    """A CRC-64 as 16 hex digits, for manifests and messages."""
    return f"{crc:016x}"


def crc64nvme_linear(crc: int, length: int) -> int:
    """A CRC-64/NVME of ``length`` bytes without its part that depends on the length alone.

    What is left is linear: that of the XOR of two runs is the XOR of theirs, and `shift_crc64nvme` moves it.
    """
    return crc ^ _crc64nvme_of_zeros(length)


def shift_crc64nvme(linear: int, count: int) -> int:
    """The linear part of the CRC-64/NVME of a run that is followed by ``count`` bytes of 0."""
    return int(checksums.combine_crc64nvme(linear, 0, count))


@functools.lru_cache(maxsize=2**14)
def _crc64nvme_of_zeros(length: int) -> int:
    return int(checksums.combine_crc64nvme(_ONES, 0, length)) ^ _ONES  # the register begins and ends inverted
