"""Reads the text in which Prometheus endpoints give their metrics. Pure."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

_SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)\s*(\{.*\})?\s+(\S+)(?:\s+-?\d+)?\s*")
_LABEL = re.compile(r'\s*([a-zA-Z_][a-zA-Z0-9_]*)\s*=\s*"((?:[^"\\]|\\.)*)"\s*,?')
_ESCAPED = re.compile(r"\\(.)")


@dataclass(frozen=True)
class Sample:
    """One number of an endpoint."""

    name: str
    labels: tuple[tuple[str, str], ...]
    """Names and values, in the order given."""
    value: float

    def __str__(self) -> str:
        labels = ", ".join(f"{name}={value}" for name, value in self.labels)
        number = f"{self.value:.0f}" if self.value == int_or_nan(self.value) else f"{self.value:.6g}"
        return f"{self.name}{f' ({labels})' if labels else ''} {number}"


def int_or_nan(value: float) -> float:
    """The whole number in a value; NaN if it has none."""
    return float(int(value)) if math.isfinite(value) else math.nan


def parse_exposition(text: str, prefix: str = "") -> list[Sample]:
    """The samples whose names begin with ``prefix``. Comments, and lines that are no samples, are left out."""
    found = []
    for line in text.splitlines():
        match = _SAMPLE.fullmatch(line.strip())
        if match is None or not match[1].startswith(prefix):
            continue
        try:
            value = float(match[3])
        except ValueError:
            continue
        labels = tuple((name, _ESCAPED.sub(_unescape, value)) for name, value in _LABEL.findall(match[2] or ""))
        found.append(Sample(match[1], labels, value))
    return found


def _unescape(match: re.Match[str]) -> str:
    return "\n" if match[1] == "n" else match[1]
