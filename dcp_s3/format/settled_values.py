"""Turns what was unpickled of metadata into what it stands for: plain values, and instances of torch's classes.

This is for values that planners add and nothing here relies on. They must only be harmless to look at, copy or send on:
such a value has no class or function in it, does not contain itself, and is not nested deeply.
"""

from __future__ import annotations

import operator
from collections import OrderedDict, defaultdict
from typing import Any

import torch

from dcp_s3.format.metadata_mirrors import MIRRORS, Mirror, become_torch_s
from dcp_s3.format.plain_values import PlainDefaultDict
from dcp_s3.format.unpickling import Deferred, MalformedPickleError, UnsafeGlobalError

_MAX_DEPTH = 50  # a plan of a nested state is flat

_LEAVES = frozenset((
    str, int, float, bool, type(None), bytes, complex, bytearray, range, slice, torch.Size, torch.dtype, torch.layout,
    torch.device, torch.memory_format,
))  # fmt: skip


class Settler:
    """Settles the values of one pickle, which may share parts."""

    def __init__(self) -> None:
        # id -> the value (kept so that its id is not reused), what it has become, and how deeply that is nested.
        self._known: dict[int, tuple[Any, Any, int]] = {}

    def settle(self, value: Any) -> Any:
        """Turn ``value`` into what it stands for. Mirrors, lists and dicts are changed in place.

        Raises:
            MalformedPickleError: it has a class or a function in it, is nested too deeply, contains itself, or stands
                for something that cannot be made.
        """
        try:
            return self._settle(value, 1)[0]
        except (MalformedPickleError, UnsafeGlobalError):
            raise
        except Exception as error:  # an enumeration has no such member, or a hash fails
            raise MalformedPickleError(f"{type(error).__name__}: {str(error)[:200]}") from error

    def settle_others(self, mirror: Mirror, known: frozenset[str]) -> None:
        """Settle the attributes of ``mirror`` that are not ``known``."""
        attributes = vars(mirror)
        for name in attributes.keys() - known:
            _check_name(mirror, name)
            attributes[name] = self.settle(attributes[name])
        mirror.settled()

    def _settle(self, value: Any, depth: int) -> tuple[Any, int]:
        kind = type(value)
        if kind in _LEAVES:
            return value, 0
        found = self._known.get(id(value))
        if found is not None:
            _check_depth(depth + found[2] - 1)
            return found[1], found[2]
        _check_depth(depth)
        if kind is tuple:
            items, height = self._settle_all(value, depth)
            settled = value if all(map(operator.is_, items, value)) else tuple(items)
        else:
            settled, height = self._settle_other(value, kind, depth)
        self._known[id(value)] = value, settled, height
        return settled, height

    def _settle_all(self, values: Any, depth: int) -> tuple[list[Any], int]:
        settled, height = [], 0
        for value in values:
            kind = type(value)
            if kind in _LEAVES:
                settled.append(value)
            elif kind is tuple and _LEAVES.issuperset(map(type, value)):  # a path; plans have many
                settled.append(value)
                height = max(height, 1)
            else:
                item, below = self._settle(value, depth + 1)
                settled.append(item)
                height = max(height, below)
        _check_depth(depth + height)
        return settled, height + 1

    def _settle_other(self, value: Any, kind: type, depth: int) -> tuple[Any, int]:
        if kind in (dict, OrderedDict, PlainDefaultDict):
            return self._settle_dict(value, kind, depth)
        if kind in (list, set, frozenset):
            items, height = self._settle_all(value, depth)
            if kind is not list:
                return kind(items), height
            value[:] = items
            return value, height
        if kind is Deferred:
            return value.make(*value.arguments), 0
        if isinstance(value, Mirror):
            height = self._settle_attributes(value, depth)
            value.settled()
            become_torch_s(value)
            return value, height
        if kind in MIRRORS:  # settled before
            return value, 1
        raise MalformedPickleError(f"it has a {kind.__name__} where a value belongs")

    def _settle_dict(self, value: Any, kind: type, depth: int) -> tuple[Any, int]:
        items, height = self._settle_all(value.values(), depth)
        keys: Any = value
        if not _LEAVES.issuperset(map(type, value)):
            keys, below = self._settle_all(list(value), depth)
            height = max(height, below)
        if kind is OrderedDict:
            height = max(height, self._settle_attributes(value, depth))
        pairs = list(zip(keys, items, strict=True))
        if kind is PlainDefaultDict:
            return defaultdict(value.factory, pairs), height
        if keys is not value:
            value.clear()
        value.update(pairs)
        return value, height

    def _settle_attributes(self, owner: Any, depth: int) -> int:
        attributes = vars(owner)
        for name in attributes:
            _check_name(owner, name)
        items, height = self._settle_all(attributes.values(), depth)
        attributes.update(zip(list(attributes), items, strict=True))
        return height


def _check_depth(depth: int) -> None:
    if depth > _MAX_DEPTH:
        raise MalformedPickleError(f"it is nested more than {_MAX_DEPTH} levels deep, or contains itself")


def _check_name(owner: object, name: Any) -> None:
    if type(name) is not str or name.startswith("__"):
        raise MalformedPickleError(f"a {type(owner).__name__} has an attribute {str(name)[:50]!r}")
