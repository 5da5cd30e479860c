"""Facts about an item that ride along in torch's `_StorageInfo`: where its raw bytes lie, and their checksums. Pure.

Besides the CRC-64/NVME of a chunk's bytes, ``.metadata`` has the CRCs of its beginnings: of the first block, of the
first two, and so on. The CRC of any run of whole blocks follows from two of them, so a part can be checked alone. They
are values of the running CRC while a chunk is sent.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from dcp_s3.memory import combine_crc64nvme, crc64nvme_between
from dcp_s3.torch_private import StorageInfo

MIN_BLOCK = 8 * 2**10
"""Minimum bytes of a block. Each block costs 8 bytes of metadata."""
MAX_BLOCK = 4 * 2**20
"""Maximum bytes of a block. Limits what is fetched in vain at either end of a part, for its checksum."""

_ALIGNMENT = 64
# Blocks per chunk, unless that makes them too small or too large. Parts are mostly halves, thirds and quarters, and a
# part that ends where a block ends is fetched without a byte in vain.
_COUNTS = (64, 48, 32, 24, 16, 12, 8, 6, 4, 3, 2)


def block_size(nbytes: int) -> int:
    """Bytes per block in a chunk of ``nbytes``; the last block may be shorter."""
    if nbytes > _COUNTS[0] * MAX_BLOCK:
        return MAX_BLOCK
    for count in _COUNTS:
        size, left = divmod(nbytes, count)
        if MIN_BLOCK <= size <= MAX_BLOCK and not left and size % _ALIGNMENT == 0:
            return size
    size = max(MIN_BLOCK, -(-nbytes // _COUNTS[0]))
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def cuts_between(start: int, stop: int, block: int) -> tuple[int, ...]:
    """Ends of blocks strictly between two bytes of a chunk, counted from ``start``."""
    return tuple(cut - start for cut in range((start // block + 1) * block, stop, block))


def pack_crcs(crcs: Iterable[int]) -> bytes:
    """Pack CRCs as they are stored: 8 bytes each, the most significant first."""
    return b"".join(crc.to_bytes(8, "big") for crc in crcs)


class Blocks(NamedTuple):
    """The recorded checksums of a chunk."""

    size: int
    """Bytes of a block, which ends between elements of any dtype."""
    crcs: bytes
    """CRC-64/NVME of the first block, of the first two, and so on, packed; without the whole chunk's."""
    crc: int
    """CRC-64/NVME of the whole chunk."""

    def crc_between(self, start: int, stop: int, nbytes: int) -> int:
        """CRC-64/NVME of whole blocks of a chunk of ``nbytes``, from the first byte of one to the end of another."""
        before, through = (
            int.from_bytes(self.crcs[8 * (count - 1) : 8 * count], "big")  # of no blocks: 0
            for count in (start // self.size, stop // self.size)
        )
        return crc64nvme_between(before, self.crc if stop == nbytes else through, stop - start)


class Range(NamedTuple):
    """A run of bytes, of a chunk or anything else with bytes, and their CRC-64/NVME, if it is known."""

    start: int
    stop: int
    crc: int | None


def widen(start: int, stop: int, nbytes: int, blocks: Blocks) -> Range:
    """The smallest range around ``start`` to ``stop`` (not empty) of a chunk of ``nbytes`` that can be checked."""
    first, last = start // blocks.size, -(-stop // blocks.size)
    start, end = first * blocks.size, min(last * blocks.size, nbytes)
    return Range(start, end, blocks.crc_between(start, end, nbytes))


def crcs_of_beginnings(pieces: Iterable[tuple[int, int, Sequence[int], Sequence[int]]], block: int) -> list[int]:
    """CRCs at the ends of blocks, from the CRCs of the pieces in which a chunk was sent.

    Args:
        pieces: each piece in order: bytes, CRC, block ends inside it (`cuts_between`), and its CRCs up to those.
    """
    found: list[int] = []
    done = total = 0
    for size, crc, cuts, marks in pieces:
        if done and size and done % block == 0:
            found.append(total)
        found += [combine_crc64nvme([(total, done), (mark, cut)]) for cut, mark in zip(cuts, marks, strict=True)]
        total = combine_crc64nvme([(total, done), (crc, size)])
        done += size
    return found


# --- torch's _StorageInfo -------------------------------------------------------------------------

# Its pickled state is its __dict__, and other readers ignore what they do not know.


def make_storage_info(
    relative_path: str,
    offset: int,
    length: int,
    *,
    raw_offset: int | None = None,
    crc64nvme: int | None = None,
    blocks: Blocks | None = None,
) -> StorageInfo:
    """torch's `_StorageInfo` with our facts about the item.

    Args:
        raw_offset: offset of the tensor's raw bytes in the item; None if the item is not raw bytes in a frame.
        crc64nvme: CRC-64/NVME of the raw bytes, or of the whole item without ``raw_offset``.
        blocks: CRCs inside the raw bytes; None without any.
    """
    info = StorageInfo(relative_path, offset, length)
    facts: dict[str, Any] = {"raw_offset": raw_offset, "crc64nvme": crc64nvme}
    if blocks is not None:
        facts |= {"crc64nvme_block": blocks.size, "crc64nvme_blocks": blocks.crcs}
    vars(info).update({name: value for name, value in facts.items() if value is not None})
    return info


def moved_info(info: StorageInfo, relative_path: str, offset: int) -> StorageInfo:
    """The record of an item, once its bytes are copied to another object."""
    other = copy.copy(info)
    other.relative_path, other.offset = relative_path, offset
    return other


def get_facts(info: Any) -> tuple[int | None, int | None]:
    """Offset of the raw bytes in the item, and its CRC-64/NVME; None for what is not recorded (written by something
    else)."""
    raw_offset, crc = getattr(info, "raw_offset", None), getattr(info, "crc64nvme", None)
    return raw_offset if isinstance(raw_offset, int) else None, crc if isinstance(crc, int) else None


def get_blocks(info: Any, nbytes: int) -> Blocks | None:
    """Recorded CRCs inside the ``nbytes`` raw bytes of an item (not 0); None if it has no checksum.

    If no record of blocks fits that many bytes, all of them are one block.
    """
    (_, crc), size, crcs = get_facts(info), getattr(info, "crc64nvme_block", 0), getattr(info, "crc64nvme_blocks", None)
    if crc is None:
        return None
    right = isinstance(size, int) and size > 0 and size % _ALIGNMENT == 0
    if right and isinstance(crcs, bytes) and len(crcs) == 8 * max(0, -(-nbytes // size) - 1):
        return Blocks(size, crcs, crc)
    return Blocks(nbytes, b"", crc)
