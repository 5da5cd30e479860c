"""Whether what was unpickled can be walked through: it may refer to itself, and be nested deeply."""

from __future__ import annotations

import functools
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

from dcp_s3.format.unpickle import Constructor, MalformedPickleError

_LEAVES = (str, int, float, bool, type(None), bytes, complex, bytearray)


def check_nesting(value: Any, *, max_depth: int, max_nodes: int) -> None:
    """Check that whatever walks ``value`` recursively comes to an end.

    Args:
        value: containers and dataclasses.
        max_depth: levels.
        max_nodes: of the tree that it unfolds to; what occurs several times counts as often.

    Raises:
        MalformedPickleError: it contains itself, a class, a dataclass that lacks attributes, or more than that.
    """
    if type(value) in _LEAVES:
        return
    # Postorder; id -> (depth, nodes) of what is finished, None of what is being visited.
    known: dict[int, tuple[int, int] | None] = {}
    pending: list[tuple[Any, list[Any] | None]] = [(value, None)]
    while pending:
        item, children = pending.pop()
        if children is None:
            if id(item) in known:
                if known[id(item)] is None:
                    raise MalformedPickleError(f"a {type(item).__name__} contains itself")
                continue
            children = [child for child in _children(item) if type(child) not in _LEAVES]
            known[id(item)] = None
            pending.append((item, children))
            pending += [(child, None) for child in children]
            continue
        depth, nodes = 1, 1 + _width(item)
        for child in children:
            found = known[id(child)]
            if found is None:
                raise MalformedPickleError(f"a {type(item).__name__} contains itself")
            depth, nodes = max(depth, found[0] + 1), nodes + found[1]
        if depth > max_depth:
            raise MalformedPickleError(f"it is nested more than {max_depth} levels deep")
        if nodes > max_nodes:
            raise MalformedPickleError(f"it unfolds to more than {max_nodes} values")
        known[id(item)] = depth, nodes


def _children(item: Any) -> list[Any]:
    if isinstance(item, Constructor):
        raise MalformedPickleError(f"it has {item.name} itself where a value belongs")
    if isinstance(item, dict):
        return [*item.keys(), *item.values()]
    if isinstance(item, (list, tuple, set, frozenset)):
        return list(item)
    if not is_dataclass(item):
        return []
    cls: type = type(item)
    missing = _required(cls) - vars(item).keys()
    if missing:
        raise MalformedPickleError(f"a {type(item).__name__} has no {min(missing)}")
    return list(vars(item).values())


@functools.cache
def _required(cls: type) -> frozenset[str]:
    """Names of the attributes that an instance must have of its own."""
    return frozenset(field.name for field in fields(cls) if field.default is MISSING)


def _width(item: Any) -> int:
    return len(item) if isinstance(item, (dict, list, tuple, set, frozenset)) else 1
