"""Shows what a checkpoint holds, without reading its data."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from dcp_s3 import errors
from dcp_s3.checkpoint.info import CheckpointInfo
from dcp_s3.format.saved_entries import SavedEntry, saved_entries
from dcp_s3.offline.pieces import closest
from dcp_s3.offline.saved import fetch_saved
from dcp_s3.offline.tree import TreeNode, build_tree
from dcp_s3.reprs import one_line
from dcp_s3.settings import SettingsLike
from dcp_s3.units import format_count, format_size, plural
from dcp_s3.url import URLLike


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
        """The tree, for JSON.

        Args:
            depth: how many levels of it; None: all.
            collapse: whether layers that are alike are one node.
        """
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
        CorruptMetadataError, UnsafeMetadataError: its metadata cannot, or must not, be read.
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


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a name is one of the patterns, or matches one."""
    return any(name == pattern or fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def no_match_error(what: str, patterns: list[str], names: list[str], url: str) -> errors.EntryNotFoundError:
    """The error for patterns that match none of the names."""
    shown = ", ".join(map(repr, patterns))
    message = f"{what} entry that matches {shown}{closest(' '.join(patterns), names)}"
    return errors.EntryNotFoundError(message, url=url, fqn=" ".join(patterns))
