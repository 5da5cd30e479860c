"""Shows what a checkpoint holds, by its metadata and manifest, without reading its data."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from torch.distributed.checkpoint.metadata import Metadata

from dcp_s3 import errors
from dcp_s3.checkpoint import look
from dcp_s3.checkpoint.commit_state import check_metadata, fetch_metadata, not_found_error
from dcp_s3.checkpoint.info import CheckpointInfo
from dcp_s3.format.control_files import Manifest
from dcp_s3.format.saved_entries import SavedEntry, saved_entries
from dcp_s3.offline.names import matches, no_match_error
from dcp_s3.s3.store import store_of
from dcp_s3.settings import SettingsLike, resolve_settings
from dcp_s3.store import same_etag
from dcp_s3.units import format_count, format_size, one_line, plural
from dcp_s3.url import URLLike, parse_url

_ROUNDS = 3


@dataclass(frozen=True, repr=False)
class CheckpointEntries:
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

    @property
    def parameters(self) -> int:
        """Elements of all tensors."""
        return sum(entry.parameters for entry in self.entries)

    @property
    def tensors(self) -> int:
        """Number of tensors."""
        return sum(entry.kind == "tensor" for entry in self.entries)

    def largest(self, count: int) -> tuple[SavedEntry, ...]:
        """The entries with the most stored bytes, the largest first."""
        return tuple(sorted(self.entries, key=lambda entry: (-entry.size, entry.fqn))[:count])

    def __repr__(self) -> str:
        tensors, parameters = plural(self.tensors, "tensor"), format_count(self.parameters)
        size = format_size(sum(entry.size for entry in self.entries))
        return one_line("CheckpointEntries", repr(self.info.url), f"{tensors}, {parameters} parameters, {size}")

    def to_dict(self) -> dict[str, Any]:
        """The fields, for JSON."""
        return {
            "checkpoint": self.info.to_dict(),
            "writer": self.writer,
            "attachments": list(self.attachments),
            "tensors": self.tensors,
            "parameters": self.parameters,
            "entries": [asdict(entry) for entry in self.entries],
        }


def inspect(
    url: URLLike, filter: str | Iterable[str] | None = None, *, settings: SettingsLike = None
) -> CheckpointEntries:
    """Look at what a committed checkpoint holds: names, shapes, dtypes, parameters, bytes, chunks.

    Fetches its ``.metadata`` and its manifest, no data: three requests. Works for checkpoints of other DCP writers,
    too.

    >>> [entry.fqn for entry in inspect("s3://bucket/run/step-00001000").entries]
    ['weight', 'step']

    Args:
        filter: only the entries whose names match, such as ``model.*``; several: any of them.

    Raises:
        CheckpointNotFoundError: no checkpoint is there that all ranks committed together.
        EntryNotFoundError: ``filter`` matches nothing.
        CorruptCheckpointError, UnsafeMetadataError: its metadata cannot, or must not, be read.
        InvalidURLError, SettingsError, StorageError
    """
    saved = fetch_saved(url, settings)
    entries = saved_entries(saved.metadata)
    if filter is not None:
        patterns = [filter] if isinstance(filter, str) else list(filter)
        names = [entry.fqn for entry in entries]
        entries = [entry for entry in entries if matches(entry.fqn, patterns)]
        if not entries:
            raise no_match_error(f"{saved.info.url} has no", patterns, names, saved.info.url)
    manifest = saved.manifest
    writer, attached = (dict(manifest.writer), sorted(manifest.attachments)) if manifest else ({}, [])
    return CheckpointEntries(saved.info, writer, tuple(attached), tuple(entries))


class SavedCheckpoint(NamedTuple):
    """A committed checkpoint without its data."""

    info: CheckpointInfo
    manifest: Manifest | None
    """None if it is foreign."""
    metadata: Metadata


def fetch_saved(where: URLLike, settings: SettingsLike) -> SavedCheckpoint:
    """Fetch metadata and manifest of one save: three requests for a checkpoint that dcp_s3 wrote."""
    url = parse_url(where)
    store = store_of(url, resolve_settings(settings))
    for _ in range(_ROUNDS):
        found = look.inspect(store, url)
        commit = found.directory.commits.get(None) if found else None
        if found is None or commit is None:
            alone = found is not None and found.info.committed
            why = ": each rank has committed its own part, which `dcp-s3 show` shows" if alone else ""
            raise not_found_error(url, why=why)
        stored = fetch_metadata(store, url)
        if same_etag(stored.etag, commit.etag):
            return SavedCheckpoint(found.info, found.manifests.get(None), check_metadata(stored, url))
    raise errors.CheckpointError(
        f"{url} was replaced {_ROUNDS} times while it was looked at. Remedy: look when nobody saves to it",
        url=str(url),
    )
