"""``dcp-s3 inspect``: what a checkpoint holds, as a tree."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from dcp_s3.cli.app import URL, AsJSON, app

if TYPE_CHECKING:
    from rich.table import Table

    from dcp_s3.offline.inspect import CheckpointTree, TreeNode

Filter = Annotated[
    list[str] | None,
    typer.Option("--filter", metavar="GLOB", help="Only the entries that match, as 'model.*'; may be repeated."),
]


@app.command()
def inspect(
    url: URL,
    depth: Annotated[
        int | None, typer.Option("--depth", min=1, metavar="N", help="Levels of the tree; without, all of it.")
    ] = None,
    filter: Filter = None,
    top: Annotated[
        int | None, typer.Option("--top", min=1, metavar="N", help="Show the N largest entries instead of the tree.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Show every layer, also those that are alike.")] = False,
    as_json: AsJSON = False,
) -> None:
    """Show what a checkpoint holds: a tree of names with parameters, bytes, dtypes and chunks. Reads no data."""
    from dcp_s3.cli.app import print_json, print_line
    from dcp_s3.cli.tables import make_console, make_table
    from dcp_s3.offline.inspect import build_tree, leaf_of
    from dcp_s3.offline.inspect import inspect as look

    tree = look(url, filter or None)
    if as_json:
        found = tree.to_dict(depth=depth, collapse=not everything)
        if top is not None:
            found["largest"] = [vars(entry) for entry in tree.largest(top)]
        print_json(found)
        return
    for line in _head(tree):
        print_line(line)
    table = make_table(("name", ">parameters", ">size", "dtype", "shape", ">chunks"))
    if top is not None:
        for entry in tree.largest(top):
            _add_row(table, entry.fqn, leaf_of(entry))
    else:
        _add_nodes(table, build_tree(tree.entries, collapse=False) if everything else tree.root, depth, "")
    make_console().print(table)


def _head(tree: CheckpointTree) -> list[str]:
    """The checkpoint in two lines."""
    from dcp_s3.cli.tables import format_age, format_metrics
    from dcp_s3.units import format_count, format_size

    info = tree.info
    facts = [
        None if info.step is None else f"step {info.step}",
        None if info.world_size is None else _count(info.world_size, "rank"),
        None if info.created_at is None else f"{format_age(time.time() - info.created_at)} old",
        None if info.size is None else f"{format_size(info.size)} in {_count(info.objects or 0, 'object')}",
        "written by something other than dcp_s3" if info.foreign else None,
    ]
    others = len(tree.entries) - tree.tensors
    holds = [
        f"{_count(tree.tensors, 'tensor')} with {format_count(tree.parameters)} parameters",
        f"{others} other entr{'y' if others == 1 else 'ies'}" if others else None,
        f"attachments {', '.join(tree.attachments)}" if tree.attachments else None,
        f"metrics {format_metrics(info.metrics)}" if info.metrics else None,
    ]
    return [
        f"{info.url}: {', '.join(fact for fact in facts if fact)}",
        "; ".join(part for part in holds if part),
    ]


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _add_nodes(table: Table, node: TreeNode, depth: int | None, indent: str) -> None:
    for child in node.children:
        _add_row(table, f"{indent}{child.name}" + (f"  x{child.repeats}" if child.repeats > 1 else ""), child)
        if depth is None or depth > 1:
            _add_nodes(table, child, None if depth is None else depth - 1, indent + "  ")


def _add_row(table: Table, name: str, node: TreeNode) -> None:
    from dcp_s3.cli.tables import add_row
    from dcp_s3.units import format_count, format_size

    shape = None if node.shape is None else "x".join(map(str, node.shape)) or "scalar"
    count = format_count(node.parameters) if node.dtypes else None
    add_row(table, (name, count, format_size(node.size), " ".join(node.dtypes), shape, node.chunks))
