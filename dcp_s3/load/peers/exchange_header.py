"""The message that an exchange sends before each piece, or instead of it."""

from __future__ import annotations

import struct

import torch

from dcp_s3.tensor_memory import view_bytes

HEADER_BYTES = 512
_HEADER = struct.Struct("<?iQH")  # whether a payload follows; else the rank that failed; CRC-64/NVME; bytes of the text


def pack_header(follows: bool, rank: int, crc: int, text: str) -> torch.Tensor:
    """Pack a header: `HEADER_BYTES` of uint8; a text that is too long is cut off."""
    encoded = text.encode()[: HEADER_BYTES - _HEADER.size]
    packed = _HEADER.pack(follows, rank, crc, len(encoded)) + encoded
    return torch.frombuffer(bytearray(packed.ljust(HEADER_BYTES, b"\0")), dtype=torch.uint8)


def unpack_header(header: torch.Tensor) -> tuple[bool, int, int, str]:
    """Return what `pack_header` was given."""
    view = bytes(view_bytes(header))
    follows, rank, crc, length = _HEADER.unpack_from(view)
    return follows, rank, crc, view[_HEADER.size : _HEADER.size + length].decode(errors="replace")
