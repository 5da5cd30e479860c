"""Shows what a checkpoint holds, by its metadata and manifests, without reading its data."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from dcp_s3 import errors
from dcp_s3.checkpoint import look
from dcp_s3.checkpoint.info import CheckpointInfo
from dcp_s3.checkpoint.stored_metadata import check_metadata, not_found_error
from dcp_s3.format.control_files import AttachmentEntry, Manifest
from dcp_s3.format.layout import metadata_object
from dcp_s3.format.metadata import is_unproven, mark_unproven
from dcp_s3.format.saved_entries import SavedEntry, saved_entries
from dcp_s3.offline.names import is_number, matches, no_match_error, ranges
from dcp_s3.reprs import one_line
from dcp_s3.s3.store import store_of
from dcp_s3.settings import SettingsLike, resolve_settings
from dcp_s3.store import Store, same_etag
from dcp_s3.units import format_count, format_size, plural
from dcp_s3.url import CheckpointURL, URLLike, parse_url

_ROUNDS = 3
_MAX_DEPTH = 64


@dataclass(frozen=True, repr=False)
class CheckpointTree:
    """What a checkpoint holds, as its metadata and manifest say. Made by `inspect`.

    >>> inspect("s3://bucket/run/step-00001000").parameters
    8
    """

    info: CheckpointInfo
    """The checkpoint: URL, step, ranks, time, metrics, objects and their bytes."""
    writer: dict[str, str]
    """Library versions that wrote it; empty if it is foreign."""
    attachments: tuple[str, ...]
    """Names of the files attached to it."""
    entries: tuple[SavedEntry, ...]
    """The entries of the saved state, each with its dtype, shape, chunks and bytes."""

    @cached_property
    def root(self) -> TreeNode:
        """The tree of the names' parts; layers that are alike are one node."""
        return build_tree(self.entries)

    @property
    def parameters(self) -> int:
        """Elements of all tensors."""
        return self.root.parameters

    @property
    def tensors(self) -> int:
        """Number of tensors."""
        return sum(entry.kind == "tensor" for entry in self.entries)

    def largest(self, count: int) -> tuple[SavedEntry, ...]:
        """The entries with the most stored bytes, the largest first."""
        return tuple(sorted(self.entries, key=lambda entry: (-entry.size, entry.fqn))[:count])

    def __repr__(self) -> str:
        tensors, parameters = plural(self.tensors, "tensor"), format_count(self.parameters)
        found = f"{tensors}, {parameters} parameters, {format_size(self.root.size)}"
        return one_line("CheckpointTree", repr(self.info.url), found)

    def to_dict(self, *, depth: int | None = None, collapse: bool = True) -> dict[str, Any]:
        """The tree, for JSON: ``depth`` levels (None: all); with ``collapse``, layers that are alike are one node."""
        root = self.root if collapse else build_tree(self.entries, collapse=False)
        return {
            "checkpoint": self.info.to_dict(),
            "writer": self.writer,
            "attachments": list(self.attachments),
            "tensors": self.tensors,
            "tree": root.to_dict(depth),
        }


def inspect(
    url: URLLike, filter: str | Iterable[str] | None = None, *, settings: SettingsLike = None
) -> CheckpointTree:
    """Look at what a committed checkpoint holds: names, shapes, dtypes, parameters, bytes, chunks.

    Fetches its ``.metadata`` and its manifest, no data: three requests. Without collectives, those of each rank. Works
    for checkpoints of other DCP writers, too.

    >>> [entry.fqn for entry in inspect("s3://bucket/run/step-00001000").entries]
    ['weight', 'step']

    Args:
        url: URL of the checkpoint.
        filter: only the entries whose names match, such as ``model.*``; several: any of them.
        settings: a `Settings`, or a mapping of those that differ from the environment.

    Raises:
        CheckpointNotFoundError: no committed checkpoint is there.
        EntryNotFoundError: ``filter`` matches nothing.
        CorruptCheckpointError, UnsafeMetadataError: its metadata cannot, or must not, be read.
        InvalidURLError, SettingsError, StorageError
    """
    [saved] = fetch_saved(url, settings=settings)
    entries = saved_entries(saved.metadata)
    if filter is not None:
        patterns = [filter] if isinstance(filter, str) else list(filter)
        names = [entry.fqn for entry in entries]
        entries = [entry for entry in entries if matches(entry.fqn, patterns)]
        if not entries:
            raise no_match_error(f"{saved.url} has no", patterns, names, str(saved.url))
    writer = dict(saved.manifests[0].writer) if saved.manifests else {}
    return CheckpointTree(saved.info, writer, tuple(sorted(saved.attachments)), tuple(entries))


# --- what was saved ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class SavedCheckpoint:
    """A committed checkpoint without its data."""

    url: CheckpointURL
    info: CheckpointInfo
    manifests: tuple[Manifest, ...]
    """Its manifests: one, or one for each rank that saved without collectives; none if it is foreign."""
    metadata: Metadata
    """What was saved, and where it lies; that of all ranks together."""
    of_ranks: tuple[Metadata, ...]
    """That of each rank that saved without collectives; else only ``metadata``."""

    @property
    def attachments(self) -> Mapping[str, AttachmentEntry]:
        """Its attachments, by name."""
        return {name: entry for each in reversed(self.manifests) for name, entry in each.attachments.items()}


def fetch_saved(*urls: URLLike, settings: SettingsLike = None) -> list[SavedCheckpoint]:
    """Fetch metadata and manifests of checkpoints: three requests for each that dcp_s3 wrote with collectives."""
    resolved = resolve_settings(settings)
    return [fetch_from(store_of(url, resolved), url) for url in map(parse_url, urls)]


def fetch_from(store: Store, url: CheckpointURL) -> SavedCheckpoint:
    """`fetch_saved` for a checkpoint on a store."""
    for _ in range(_ROUNDS):
        found = look.inspect(store, url)
        if found is None or not found.info.committed:
            raise not_found_error(url)
        # An overwritten save may have had more ranks.
        size = found.info.world_size
        ranks = [rank for rank in found.directory.committing if rank is None or size is None or rank < size]
        try:
            stored = store.map(lambda store, rank: store.get(url.key(metadata_object(rank))), ranks)
        except errors.ObjectNotFoundError:
            continue  # deleted or replaced meanwhile: the next look tells
        listed = [found.directory.commits[rank].etag for rank in ranks]
        if all(same_etag(each.etag, etag) for each, etag in zip(stored, listed, strict=True)):
            of_ranks = tuple(check_metadata(each, url, rank) for rank, each in zip(ranks, stored, strict=True))
            manifests = found.manifests_of_ranks[: len(ranks)] if found.manifest is None else (found.manifest,)
            return SavedCheckpoint(url, found.info, manifests, merge_metadata(of_ranks), of_ranks)
    raise errors.CheckpointError(
        f"{url} was replaced {_ROUNDS} times while it was looked at. Remedy: look when nobody saves to it",
        url=str(url),
    )


def merge_metadata(parts: Sequence[Metadata]) -> Metadata:
    """One metadata from those of all ranks: without collectives, each describes only what it wrote.

    A chunk or object that several ranks wrote is that of the first.
    """
    if len(parts) == 1:
        return parts[0]
    entries: dict[str, Any] = {}
    storage: dict[Any, Any] = {}
    for part in parts:
        for fqn, entry in part.state_dict_metadata.items():
            before = entries.setdefault(fqn, entry)
            if isinstance(before, TensorStorageMetadata) and isinstance(entry, TensorStorageMetadata):
                known = {(chunk.offsets, chunk.sizes) for chunk in before.chunks}
                added = [chunk for chunk in entry.chunks if (chunk.offsets, chunk.sizes) not in known]
                if added:
                    entries[fqn] = replace(before, chunks=before.chunks + added)
        for index, info in (part.storage_data or {}).items():
            storage.setdefault(index, info)
    merged = Metadata(state_dict_metadata=entries, storage_data=storage)
    return mark_unproven(merged) if any(map(is_unproven, parts)) else merged


# --- the tree, pure ----------------------------------------------------------------------------------


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
        """The fields, for JSON, with ``depth`` levels of children; None: all."""
        below = None if depth is None else depth - 1
        return {
            "name": self.name, "parameters": self.parameters, "size": self.size, "dtypes": list(self.dtypes),
            "entries": self.entries, "chunks": self.chunks, "shape": None if self.shape is None else list(self.shape),
            "repeats": self.repeats, "children": [] if depth == 0 else [each.to_dict(below) for each in self.children],
        }  # fmt: skip


class _Branch:
    def __init__(self) -> None:
        self.entries: list[SavedEntry] = []
        self.branches: dict[str, _Branch] = {}


def build_tree(entries: Iterable[SavedEntry], *, collapse: bool = True) -> TreeNode:
    """The tree of saved entries: its root, whose name is empty. With ``collapse``, numbered nodes that have the same
    names, shapes and dtypes below them become one, such as ``0..31`` below ``layers``, with their sums."""
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
