"""Names of entries: patterns, new names, those alike, and the closest to one that is not there. Pure."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Hashable, Iterable, Mapping, Sequence

from dcp_s3 import errors

_SUGGESTED = 3


def matches(name: str, patterns: Iterable[str]) -> bool:
    return any(name == pattern or fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def closest(name: str, names: Sequence[str]) -> str:
    """The end of a message: the names that are most like ``name``, which is none of them, or a pattern."""
    plain = re.sub(r"[\\^$*?()\[\]]", "", name)
    found = difflib.get_close_matches(plain, names, _SUGGESTED)
    found = found or [each for each in names if plain in each][:_SUGGESTED] or list(names[:_SUGGESTED])
    return f". The closest of {len(names)}: {', '.join(map(repr, found))}" if found else ": there are none"


# --- new names ---------------------------------------------------------------------------------------


def new_names(names: Iterable[str], rules: Mapping[str, str]) -> dict[str, str]:
    """New names by old ones: each rule replaces its matches, in their order, as by `re.sub`. WeightsError if a rule is
    no regular expression or matches nothing, or two entries would have one name."""
    found = {name: name for name in names}
    for pattern, new in rules.items():
        try:
            renamed = {old: re.sub(pattern, new, name) for old, name in found.items()}
            is_used = any(re.search(pattern, name) for name in found.values())
        except (re.error, IndexError) as error:
            raise errors.WeightsError(f"{pattern}={new} cannot rename: {error}") from None
        if not is_used:
            raise errors.WeightsError(f"{pattern!r} matches no name{closest(pattern, list(found.values()))}")
        found = renamed
    owners: dict[str, str] = {}
    for old, name in found.items():
        if name in owners:
            raise errors.WeightsError(f"{owners[name]!r} and {old!r} would both be called {name!r}")
        owners[name] = old
    return found


def parse_rules(texts: Iterable[str]) -> dict[str, str]:
    """Rules from texts like ``REGEX=NEW``; the last ``=`` divides, so that NEW has none. ValueError if that is missing,
    or two have the same expression."""
    rules: dict[str, str] = {}
    for text in texts:
        pattern, equals, new = text.rpartition("=")
        if not equals or not pattern:
            raise ValueError(f"{text!r} is no REGEX=NEW, for example '^model[.]='")
        if pattern in rules:
            raise ValueError(f"{pattern!r} is given twice")
        rules[pattern] = new
    return rules


# --- names that are alike ----------------------------------------------------------------------------


_NUMBER = re.compile(r"(?<![^.])[0-9]+(?![^.])")


def group_alike(names: Iterable[tuple[str, Hashable]]) -> list[tuple[str, list[str]]]:
    """Group names that differ only in numbers between dots; each comes with what those of a group have in common.
    Returns the pattern of each group (``layers.*.weight``; of a single name, the name) and its names."""
    groups: dict[tuple[str, Hashable], list[str]] = {}
    for name, common in names:
        groups.setdefault((_NUMBER.sub("*", name), common), []).append(name)
    return [(pattern if len(found) > 1 else found[0], found) for (pattern, _), found in groups.items()]
