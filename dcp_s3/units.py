"""Sizes and durations as people write them (``64MiB``, ``30s``), and reprs of one line. Pure functions."""

from __future__ import annotations

import re
from typing import Any

_SIZE_UNITS = {
    "": 1, "b": 1,
    "k": 2**10, "kb": 10**3, "kib": 2**10,
    "m": 2**20, "mb": 10**6, "mib": 2**20,
    "g": 2**30, "gb": 10**9, "gib": 2**30,
    "t": 2**40, "tb": 10**12, "tib": 2**40,
}  # fmt: skip
_DURATION_UNITS = {"": 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_NUMBER_UNIT = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)\s*", re.IGNORECASE)

MAX_SIZE = 2**63 - 1
MAX_DURATION = 3650 * 86400.0
"""Ten years. The operating system's timeouts overflow somewhere above that."""

_FRACTION = re.compile(r"\s*([0-9]*\.[0-9]+|[0-9]+(\.[0-9]+)?\s*%)\s*")


def _parse(value: object, units: dict[str, float] | dict[str, int], example: str) -> float:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return value
    match = _NUMBER_UNIT.fullmatch(value) if isinstance(value, str) else None
    if match is None or match[2].lower() not in units:
        names = ", ".join(unit for unit in units if unit)
        raise ValueError(f"expected a number and a unit ({names}), for example {example}")
    return float(match[1]) * units[match[2].lower()]


def parse_size(value: object) -> int:
    """Bytes from ``64MiB``, ``5GB``, ``1048576`` or an int. ``K``, ``M``, ``G``, ``T`` are binary.

    Raises:
        ValueError: not a size, negative, or above `MAX_SIZE`.
    """
    size = _parse(value, _SIZE_UNITS, "64MiB")
    if size > MAX_SIZE:
        raise ValueError("expected at most 2^63 - 1 bytes")
    if not size >= 0 or size != int(size):
        raise ValueError("expected a whole number of bytes, zero or more")
    return int(size)


def parse_size_or_fraction(value: object) -> int | float:
    """Bytes (int) from what `parse_size` takes, or a fraction (float) from ``0.5``, ``"0.5"`` or ``50%``.

    Raises:
        ValueError: not a size or fraction, or a fraction that is not above 0 and at most 1.
    """
    fraction: float | None = None
    if isinstance(value, float) and value <= 1:
        fraction = value
    elif isinstance(value, str) and _FRACTION.fullmatch(value):
        fraction = float(value.strip().rstrip("%")) / (100 if "%" in value else 1)
    if fraction is None:
        return parse_size(value)
    if not 0 < fraction <= 1:
        raise ValueError("expected a fraction above 0 and at most 1, for example 0.5 or 50%, or a size like 64GiB")
    return fraction


def parse_duration(value: object) -> float:
    """Seconds from ``30s``, ``5m``, ``250ms``, ``2h``, ``1d``, or a plain number of seconds.

    Raises:
        ValueError: not a duration, negative, or above `MAX_DURATION`.
    """
    seconds = _parse(value, _DURATION_UNITS, "30s")
    if seconds > MAX_DURATION:
        raise ValueError("expected at most ten years (3650d)")
    if not seconds >= 0:
        raise ValueError("expected a duration of zero seconds or more, for example 30s")
    return float(seconds)


def format_seconds(seconds: float) -> str:
    """``0.14 s``, ``2.3 s``, ``47 s``, ``12.5 min``, ``2.1 h``."""
    if seconds < 1:
        return f"{seconds:.2f} s"
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 2 * 3600 else f"{seconds / 3600:.1f} h"


def format_size(size: float) -> str:
    """``1536`` -> ``1.5 KiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def format_count(count: float) -> str:
    """``8030261248`` -> ``8.03B``: thousands, millions, billions, trillions (10^12), as parameters are counted."""
    if abs(count) < 1000:
        return f"{count:.0f}"
    for unit in ("K", "M", "B"):
        count /= 1000
        if abs(count) < 999.5:
            return f"{count:.3g}{unit}"
    return f"{count / 1000:.3g}T"


def plural(count: int, what: str) -> str:
    """``1 object``, ``2 objects``, ``0 entries``."""
    if count == 1:
        return f"1 {what}"
    return f"{count} {what[:-1]}ies" if what.endswith("y") else f"{count} {what}s"


_LONGEST = 120


def one_line(name: str, *values: str, **fields: Any) -> str:
    """``Name(value, field=...)`` in at most 120 characters; fields that are None are not shown. Long values are cut in
    their middle, and what does not fit is left out and counted."""
    shown = [*values, *(f"{field}={value!r}" for field, value in fields.items() if value is not None)]
    shown = [" ".join(each.split()) for each in shown]
    shown = [each if len(each) <= 64 else f"{each[:30]}...{each[-30:]}" for each in shown]
    for count in range(len(shown), -1, -1):
        left = len(shown) - count
        text = f"{name}({', '.join([*shown[:count], *([f'... {left} more'] if left else [])])})"
        if len(text) <= _LONGEST:
            break
    return text
