"""Short reprs: one line each, for logs and interactive use. Pure."""

from __future__ import annotations

from typing import Any

_LONGEST = 120
_LONGEST_VALUE = 64


def one_line(name: str, *values: str, **fields: Any) -> str:
    """``Name(value, field=...)`` in at most 120 characters; fields that are None are not shown. Long values are cut in
    their middle, and what does not fit is left out and counted."""
    shown = [_cut(value) for value in values]
    shown += [f"{field}={_cut(repr(value))}" for field, value in fields.items() if value is not None]
    for count in range(len(shown), -1, -1):
        left = len(shown) - count
        text = f"{name}({', '.join([*shown[:count], *([f'... {left} more'] if left else [])])})"
        if len(text) <= _LONGEST:
            break
    return text


def _cut(text: str) -> str:
    text = " ".join(text.split())
    if len(text) <= _LONGEST_VALUE:
        return text
    half = (_LONGEST_VALUE - 3) // 2
    return f"{text[:half]}...{text[-half:]}"
