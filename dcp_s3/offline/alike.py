"""Names that differ only in their numbers, such as those of a model's layers: one line instead of many. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

_RANGES = 4


@dataclass(frozen=True)
class AlikeNames:
    """Names that differ only in numbers between dots."""

    label: str
    """``layers.0..31.weight``; the name itself if there is one."""
    names: tuple[str, ...]
    """The names, in the order in which they were given."""


def group_alike(names: Iterable[tuple[str, Hashable]]) -> list[AlikeNames]:
    """Group names that differ only in numbers between dots, and belong together.

    Args:
        names: names, each with what those of a group have in common.

    Returns:
        Groups in the order of their first names.
    """
    groups: dict[Hashable, list[str]] = {}
    for name, common in names:
        pattern = tuple(None if is_number(part) else part for part in name.split("."))
        groups.setdefault((pattern, common), []).append(name)
    return [AlikeNames(_label(found), tuple(found)) for found in groups.values()]


def is_number(part: str) -> bool:
    """Whether a part of a name is a number as Python counts: without zeros in front."""
    return part.isascii() and part.isdigit() and len(part) <= 9 and (part == "0" or part[0] != "0")


def _label(names: Sequence[str]) -> str:
    parts: list[dict[str, None]] = [{} for _ in names[0].split(".")]
    for name in names:
        for seen, part in zip(parts, name.split("."), strict=True):
            seen[part] = None
    return ".".join(ranges(seen) if len(seen) > 1 else next(iter(seen)) for seen in parts)


def ranges(numbers: Iterable[str]) -> str:
    """``0..2,5,7..9``; for many ranges, the first of them and the last number."""
    found: list[list[int]] = []
    for number in sorted(map(int, numbers)):
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    texts = [str(first) if first == last else f"{first}..{last}" for first, last in found]
    if len(texts) > _RANGES:
        texts = [*texts[: _RANGES - 1], "...", texts[-1]]
    return ",".join(texts)
