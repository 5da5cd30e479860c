"""Damage between S3 and its reader."""

from __future__ import annotations

from typing import Any

import pytest

from dcp_s3.s3 import download


def flip_in_flight(monkeypatch: pytest.MonkeyPatch, value: bytes, *, times: int) -> list[int]:
    """Change one bit of what is received, where ``value`` passes by; the list says how often that was."""
    read, seen = download.readinto_response, []

    def readinto(body: Any, view: memoryview) -> int:
        count = read(body, view)
        position = bytes(view[:count]).find(value)
        if position >= 0 and len(seen) < times:
            seen.append(position)
            view[position] ^= 1
        return count

    monkeypatch.setattr(download, "readinto_response", readinto)
    return seen
