"""Facts about an item that ride along in torch's `_StorageInfo`: where its raw bytes lie, and their checksums. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dcp_s3.format.blocks import Blocks
from dcp_s3.torch_private import StorageInfo

# Extra attributes of _StorageInfo. Its pickled state is its __dict__, and other readers ignore what they do not
# know. Without raw_offset, the CRC covers the whole stored item.
_RAW_OFFSET = "raw_offset"
_CRC = "crc64nvme"
_BLOCK = "crc64nvme_block"
_BLOCK_CRCS = "crc64nvme_blocks"


def make_storage_info(
    relative_path: str,
    offset: int,
    length: int,
    *,
    transform_descriptors: Sequence[str] | None = None,
    raw_offset: int | None = None,
    crc64nvme: int | None = None,
    blocks: Blocks | None = None,
) -> StorageInfo:
    """torch's `_StorageInfo` with our facts about the item.

    Args:
        relative_path: path of the object, relative to the checkpoint.
        offset: offset of the item in the object, in bytes.
        length: length of the item, in bytes.
        transform_descriptors: descriptors of stream extensions; None without any.
        raw_offset: offset of the tensor's raw bytes in the item; None if the item is not raw bytes in a frame.
        crc64nvme: CRC-64/NVME of the raw bytes, or of the whole item without ``raw_offset``.
        blocks: CRCs inside the raw bytes; None without any.
    """
    info = StorageInfo(relative_path, offset, length, transform_descriptors)
    if raw_offset is not None:
        setattr(info, _RAW_OFFSET, raw_offset)
    if crc64nvme is not None:
        setattr(info, _CRC, crc64nvme)
    if blocks is not None:
        setattr(info, _BLOCK, blocks.size)
        setattr(info, _BLOCK_CRCS, blocks.crcs)
    return info


def get_raw_offset(info: Any) -> int | None:
    """Offset of the raw bytes in the item; None if not recorded (written by something else)."""
    value = getattr(info, _RAW_OFFSET, None)
    return value if isinstance(value, int) else None


def get_crc(info: Any) -> int | None:
    """Recorded CRC-64/NVME of the item; None if not recorded."""
    value = getattr(info, _CRC, None)
    return value if isinstance(value, int) else None


def get_blocks(info: Any, nbytes: int) -> Blocks | None:
    """Recorded CRCs inside the ``nbytes`` raw bytes of an item (not 0); None if it has no checksum.

    If no record of blocks fits that many bytes, all of them are one block.
    """
    crc, size, crcs = get_crc(info), getattr(info, _BLOCK, None), getattr(info, _BLOCK_CRCS, None)
    if crc is None:
        return None
    if isinstance(size, int) and isinstance(crcs, bytes) and (blocks := Blocks(size, crcs, crc)).is_for(nbytes):
        return blocks
    return Blocks(nbytes, b"", crc)
