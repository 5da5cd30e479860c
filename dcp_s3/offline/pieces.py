"""Cuts tensors into pieces of bounded size, and names of entries into new ones. Pure."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

_SUGGESTED = 3


@dataclass(frozen=True)
class Box:
    """A part of a tensor."""

    offsets: tuple[int, ...]
    """First element in each dimension."""
    lengths: tuple[int, ...]
    """Elements in each dimension."""


def cut(shape: Sequence[int], most: int) -> Iterator[Box]:
    """Cut a tensor into boxes that are runs of its elements in row-major order, from the first to the last.

    Args:
        shape: shape of the tensor.
        most: most elements of a box, at least 1.

    Yields:
        Boxes; none if the tensor is empty.
    """
    shape = tuple(shape)
    if 0 in shape:
        return
    row = math.prod(shape[1:])
    if math.prod(shape) <= most:
        yield Box((0,) * len(shape), shape)
    elif row > most:
        for number in range(shape[0]):
            for box in cut(shape[1:], most):
                yield Box((number, *box.offsets), (1, *box.lengths))
    else:
        step = most // row
        for start in range(0, shape[0], step):
            lengths = (min(step, shape[0] - start), *shape[1:])
            yield Box((start, *(0 for _ in shape[1:])), lengths)


def new_names(names: Iterable[str], rules: Mapping[str, str]) -> dict[str, str]:
    """New names for old ones: each rule's matches are replaced, in the order of the rules.

    Args:
        names: the old names, each once.
        rules: regular expressions, and what replaces their matches (``\\1`` stands for a group), as in `re.sub`.

    Returns:
        New names by old ones, in the order of ``names``.

    Raises:
        ValueError: a rule is no regular expression or matches nothing, or two entries would have one name.
    """
    found = {name: name for name in names}
    for pattern, new in rules.items():
        try:
            renamed = {old: re.sub(pattern, new, name) for old, name in found.items()}
            matches = any(re.search(pattern, name) for name in found.values())
        except (re.error, IndexError) as error:
            raise ValueError(f"{pattern}={new} cannot rename: {error}") from None
        if not matches:
            raise ValueError(f"{pattern!r} matches no name{closest(pattern, list(found.values()))}")
        found = renamed
    owners: dict[str, str] = {}
    for old, name in found.items():
        if name in owners:
            raise ValueError(f"{owners[name]!r} and {old!r} would both be called {name!r}")
        owners[name] = old
    return found


def parse_rules(texts: Iterable[str]) -> dict[str, str]:
    """Rules from texts like ``REGEX=NEW``; the last ``=`` divides, so that NEW has none.

    Raises:
        ValueError: a text has no ``=``, or two have the same expression.
    """
    rules: dict[str, str] = {}
    for text in texts:
        pattern, equals, new = text.rpartition("=")
        if not equals or not pattern:
            raise ValueError(f"{text!r} is no REGEX=NEW, for example '^model[.]='")
        if pattern in rules:
            raise ValueError(f"{pattern!r} is given twice")
        rules[pattern] = new
    return rules


def closest(name: str, names: Sequence[str]) -> str:
    """The end of a message: the names that are most like ``name``, which is none of them, or a pattern."""
    plain = re.sub(r"[\\^$*?()\[\]]", "", name)
    found = (
        difflib.get_close_matches(plain, names, _SUGGESTED) or [each for each in names if plain in each][:_SUGGESTED]
    )
    found = found or list(names[:_SUGGESTED])
    return f". The closest of {len(names)}: {', '.join(map(repr, found))}" if found else ": there are none"
