"""Sizes as people write them.

Standard library only (``dcp_s3.units`` would import torch), so that the server starts at once.
"""

from __future__ import annotations

import re

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

_UNITS = {"": 1, "B": 1, "KIB": KIB, "MIB": MIB, "GIB": GIB, "TIB": 1 << 40,
          "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}  # fmt: skip


def parse_size(text: str) -> int:
    """Bytes in ``4GiB``, ``500 MB``, ``1.5MiB``, ``1024``. Raises ValueError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].upper() not in _UNITS:
        raise ValueError(f"{text!r} is not a size: expected a number and a unit, such as 4GiB")
    return round(float(match[1]) * _UNITS[match[2].upper()])
