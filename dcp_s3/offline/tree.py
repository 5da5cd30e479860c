"""What a checkpoint has, as a tree of the parts of its names. Pure."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from dcp_s3.format.saved_entries import SavedEntry
from dcp_s3.offline.alike import is_number, ranges
from dcp_s3.reprs import one_line
from dcp_s3.units import format_count, format_size, plural

_MAX_DEPTH = 64


@dataclass(frozen=True, repr=False)
class TreeNode:
    """Part of a name, with what is saved below it. Its numbers are the sums of its children's.

    >>> [(node.name, node.parameters) for node in inspect("s3://bucket/run/step-00001000").root.children]
    [('weight', 8), ('step', 0)]
    """

    name: str
    """``layers``, or ``model.layers`` if nothing else begins with ``model``; ``0..31`` if several are alike."""
    parameters: int
    """Elements of tensors."""
    size: int
    """Stored bytes, framing included."""
    dtypes: tuple[str, ...]
    """Dtypes of the tensors, without ``torch.``, in the order of their bytes, the most first."""
    entries: int
    """Number of entries."""
    chunks: int
    """Number of stored chunks."""
    shape: tuple[int, ...] | None = None
    """Shape of a tensor; None if this is none."""
    repeats: int = 1
    """How many alike nodes below its parent this one stands for."""
    children: tuple[TreeNode, ...] = ()
    """What the next parts of the names are; none if this is an entry."""

    def __repr__(self) -> str:
        found = f"{plural(self.entries, 'entry')}, {format_count(self.parameters)} parameters, {format_size(self.size)}"
        return one_line("TreeNode", repr(self.name), found)

    def to_dict(self, depth: int | None = None) -> dict[str, Any]:
        """The fields, for JSON.

        Args:
            depth: how many levels of children; None: all.
        """
        below = None if depth is None else depth - 1
        return {
            "name": self.name, "parameters": self.parameters, "size": self.size, "dtypes": list(self.dtypes),
            "entries": self.entries, "chunks": self.chunks, "shape": None if self.shape is None else list(self.shape),
            "repeats": self.repeats, "children": [] if depth == 0 else [each.to_dict(below) for each in self.children],
        }  # fmt: skip


class _Branch:
    """A node that is being built."""

    def __init__(self) -> None:
        self.entries: list[SavedEntry] = []
        self.branches: dict[str, _Branch] = {}


def build_tree(entries: Iterable[SavedEntry], *, collapse: bool = True) -> TreeNode:
    """The tree of saved entries.

    Args:
        entries: what was saved.
        collapse: whether numbered nodes that have the same names, shapes and dtypes below them become one, such as
            ``0..31`` below ``layers``, with their sums.

    Returns:
        The root, whose name is empty.
    """
    root = _Branch()
    for entry in entries:
        branch = root
        for part in entry.fqn.split(".", _MAX_DEPTH):
            branch = branch.branches.setdefault(part, _Branch())
        branch.entries.append(entry)
    return _join(_node("", root, collapse=collapse))


def _node(name: str, branch: _Branch, *, collapse: bool) -> TreeNode:
    children = []
    for part, below in branch.branches.items():
        children += [leaf_of(entry, part) for entry in below.entries]
        if below.branches:
            children.append(_node(part, below, collapse=collapse))
    if all(is_number(child.name) for child in children):
        children.sort(key=lambda child: int(child.name))
    if collapse:
        children = _collapse(children)
    return _sum(name, children)


def _join(node: TreeNode) -> TreeNode:
    """A node with the name of its only child after its own, wherever there is only one."""
    while node.name and len(node.children) == 1:
        [child] = node.children
        node = replace(child, name=f"{node.name}.{child.name}", repeats=node.repeats * child.repeats)
    return replace(node, children=tuple(_join(child) for child in node.children))


def leaf_of(entry: SavedEntry, name: str = "") -> TreeNode:
    """The node of an entry."""
    parameters = 0 if entry.shape is None else math.prod(entry.shape)
    dtypes = () if entry.dtype is None else (entry.dtype,)
    return TreeNode(name, parameters, entry.size, dtypes, 1, entry.chunks, entry.shape)


def _sum(name: str, children: Iterable[TreeNode]) -> TreeNode:
    found = tuple(children)
    sizes: dict[str, int] = {}
    for child in found:
        for dtype in child.dtypes:
            sizes[dtype] = sizes.get(dtype, 0) + child.size // len(child.dtypes)
    return TreeNode(
        name,
        parameters=sum(child.parameters for child in found),
        size=sum(child.size for child in found),
        dtypes=tuple(sorted(sizes, key=lambda dtype: -sizes[dtype])),
        entries=sum(child.entries for child in found),
        chunks=sum(child.chunks for child in found),
        children=found,
    )


def _collapse(children: list[TreeNode]) -> list[TreeNode]:
    groups: dict[Hashable, list[TreeNode]] = {}
    for child in children:
        key = (None, _likeness(child)) if is_number(child.name) else (child.name, bool(child.children))
        groups.setdefault(key, []).append(child)
    return [found[0] if len(found) == 1 else _merge(found) for found in groups.values()]


def _likeness(node: TreeNode) -> tuple[Hashable, ...]:
    """What alike nodes have in common, whatever their own names."""
    below = tuple((child.name, _likeness(child)) for child in sorted(node.children, key=lambda child: child.name))
    return node.shape, () if node.children else node.dtypes, below


def _merge(nodes: list[TreeNode]) -> TreeNode:
    """One node for several that are alike."""
    label = ranges(node.name for node in nodes) if len({node.name for node in nodes}) > 1 else nodes[0].name
    by_name: dict[tuple[str, bool], list[TreeNode]] = {}
    for node in nodes:
        for child in node.children:
            by_name.setdefault((child.name, bool(child.children)), []).append(child)
    return replace(
        _sum(label, nodes),
        shape=nodes[0].shape,
        repeats=len(nodes) if label != nodes[0].name else nodes[0].repeats,
        children=tuple(_merge(found) for found in by_name.values()),
    )
