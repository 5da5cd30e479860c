"""Compares two checkpoints: names, shapes, dtypes, checksums of values, attachments and metrics."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from dcp_s3.checkpoint.info import CheckpointInfo
from dcp_s3.format.blocks import get_crc, get_raw_offset
from dcp_s3.offline.inspect import SavedCheckpoint, fetch_saved
from dcp_s3.offline.names import matches, no_match_error
from dcp_s3.process import collector_paused
from dcp_s3.settings import SettingsLike
from dcp_s3.units import one_line
from dcp_s3.url import URLLike

Status = Literal["same", "changed", "unknown", "only in A", "only in B"]

_DIFFERENT: tuple[Status, ...] = ("changed", "only in A", "only in B")
_ALIKE: tuple[Status, ...] = ("unknown", "same")


@dataclass(frozen=True)
class EntryDiff:
    """How one entry of the saved states compares.

    >>> found = diff("s3://bucket/run/step-00001000", "s3://bucket/run/step-00002000")
    >>> [(entry.fqn, entry.status) for entry in found.entries]
    [('weight', 'same'), ('step', 'changed')]
    """

    fqn: str
    """FQN (fully qualified name) of the entry."""
    kind: str
    """``tensor``, or ``bytes`` for any other object; of A if they differ."""
    status: Status
    """``unknown``: the checksums that are stored do not tell."""
    what: str = ""
    """What changed (``shape``, ``dtype``, ``kind``: old -> new; ``values``; ``bytes`` of an object, whose value may be
    equal), or why it is not known. Empty if nothing did."""
    size: int = 0
    """Bytes of the values of a tensor, or of the stored object; in A, or in B where only that has it."""

    def __repr__(self) -> str:
        return one_line("EntryDiff", repr(self.fqn), self.status, what=self.what or None)


@dataclass(frozen=True, repr=False)
class CheckpointDiff:
    """How two checkpoints compare. Made by `diff`.

    >>> diff("s3://bucket/run/step-00001000", "s3://bucket/run/step-00002000").same
    False
    """

    a: CheckpointInfo
    """One checkpoint, A."""
    b: CheckpointInfo
    """The other, B."""
    entries: tuple[EntryDiff, ...]
    """All entries that were compared, the same ones too: in the order of A, then those that only B has."""
    attachments: Mapping[str, Status]
    """How each attachment, or file with a name of its own, compares, by name; ``unknown`` without a checksum. Empty if
    ``filter`` was given."""
    metrics: Mapping[str, tuple[Any, Any]]
    """Metrics that differ: their values in A and B, None where there is none. They do not count as a difference of the
    checkpoints: nothing loads them."""

    @property
    def counts(self) -> dict[Status, int]:
        """Number of entries by status, without those of 0."""
        return dict(Counter(entry.status for entry in self.entries))

    @property
    def status(self) -> Status:
        """``changed`` if an entry or attachment differs, else ``unknown`` if one is, else ``same``."""
        found = {entry.status for entry in self.entries} | set(self.attachments.values())
        return "same" if found <= {"same"} else "unknown" if found <= {"same", "unknown"} else "changed"

    @property
    def same(self) -> bool:
        """Whether everything is known to be the same."""
        return self.status == "same"

    def __repr__(self) -> str:
        return one_line("CheckpointDiff", repr(self.a.name), repr(self.b.name), self.summary)

    @property
    def summary(self) -> str:
        """``3 of 312 entries differ (2 changed, 1 only in A), 309 same``."""
        counts = self.counts
        different = {status: counts[status] for status in _DIFFERENT if status in counts}
        how = ", ".join(f"{count} {status}" for status, count in different.items())
        parts = [f"{sum(different.values())} of {len(self.entries)} entries differ" + (f" ({how})" if how else "")]
        parts += [f"{counts[status]} {status}" for status in _ALIKE if status in counts]
        attached = sum(status not in _ALIKE for status in self.attachments.values())
        return ", ".join(parts + ([f"{attached} of {len(self.attachments)} attachments differ"] if attached else []))

    def to_dict(self, *, everything: bool = False) -> dict[str, Any]:
        """The differences, for JSON; with ``everything`` also the entries and attachments that are the same."""
        return {
            "a": self.a.url,
            "b": self.b.url,
            "status": self.status,
            "counts": self.counts,
            "entries": [asdict(each) for each in self.entries if everything or each.status != "same"],
            "attachments": {name: how for name, how in self.attachments.items() if everything or how != "same"},
            "metrics": {name: list(values) for name, values in self.metrics.items()},
        }


def diff(
    a: URLLike, b: URLLike, *, filter: str | Iterable[str] | None = None, settings: SettingsLike = None
) -> CheckpointDiff:
    """Compare two committed checkpoints, without reading their data.

    Fetches metadata and manifests, mostly three requests for each checkpoint. Tensors are compared by the checksums
    of their chunks. Where those cannot tell (chunks that are cut differently, as by another number of ranks, another
    writer, ``DCP_S3_CHECKSUM=none``, or encoded) an entry is ``unknown``.

    >>> print(diff("s3://bucket/run/step-00001000", "s3://bucket/run/step-00002000").summary)
    1 of 2 entries differ (1 changed), 1 same

    Equal CRC-64s of equally many bytes count as ``same``. A CRC is no proof against somebody who made them equal.

    Args:
        filter: only the entries whose names match, such as ``model.*``; several: any of them.

    Raises:
        CheckpointNotFoundError: no checkpoint is there that all ranks committed together.
        EntryNotFoundError: ``filter`` matches nothing in either.
        CorruptCheckpointError, UnsafeMetadataError
        InvalidURLError, SettingsError, StorageError
    """
    one, two = fetch_saved(a, b, settings=settings)
    patterns = None if filter is None else [filter] if isinstance(filter, str) else list(filter)
    entries = compare(one.metadata, two.metadata, patterns)
    if patterns is not None and not entries:
        names = list(one.metadata.state_dict_metadata)
        raise no_match_error(f"neither {one.url} nor {two.url} has an", patterns, names, str(one.url))
    attachments = {} if patterns is not None else _compare_attachments(one, two)
    ours, theirs = one.info.metrics, two.info.metrics
    pairs = {name: (ours.get(name), theirs.get(name)) for name in dict.fromkeys([*ours, *theirs])}
    metrics = {name: (x, y) for name, (x, y) in pairs.items() if x != y and not (x != x and y != y)}  # NaN equals NaN
    return CheckpointDiff(one.info, two.info, tuple(entries), attachments, metrics)


def _compare_attachments(a: SavedCheckpoint, b: SavedCheckpoint) -> dict[str, Status]:
    found: dict[str, Status] = {}
    for name in sorted({*a.files, *b.files}):
        one, two = a.files.get(name), b.files.get(name)
        if one is None or two is None:
            found[name] = "only in B" if one is None else "only in A"
        elif one.size == two.size and None in (one.crc64nvme, two.crc64nvme):
            found[name] = "unknown"
        else:
            found[name] = "same" if (one.size, one.crc64nvme) == (two.size, two.crc64nvme) else "changed"
    return found


# --- by checksums, pure ------------------------------------------------------------------------------


def compare(a: Metadata, b: Metadata, patterns: Iterable[str] | None = None) -> list[EntryDiff]:
    """Compare two checkpoints by their metadata: entries in the order of ``a``, then those that only ``b`` has; with
    patterns, those that match one."""
    found = []
    with collector_paused():
        for fqn in dict.fromkeys([*a.state_dict_metadata, *b.state_dict_metadata]):
            if patterns is not None and not matches(fqn, patterns):
                continue
            one, two = (_Stored.of(each, fqn) for each in (a, b))
            status, what = _compare_entries(one, two)
            saved = one or two
            if saved is not None:
                found.append(EntryDiff(fqn, saved.kind, status, what, saved.size))
    return found


@dataclass(frozen=True)
class _Stored:
    """An entry, and what is stored of it."""

    kind: str
    size: int
    shape: str
    dtype: str
    chunks: Mapping[Any, Any]
    """Where each chunk that is not empty lies, by offsets and sizes."""

    @classmethod
    def of(cls, metadata: Metadata, fqn: str) -> _Stored | None:
        saved, storage = metadata.state_dict_metadata.get(fqn), metadata.storage_data or {}
        if saved is None:
            return None
        if not isinstance(saved, TensorStorageMetadata):
            info = storage.get(MetadataIndex(fqn))
            return cls("bytes", info.length if info else 0, "", "", {(): info})
        dtype = saved.properties.dtype
        chunks = {
            (chunk.offsets, chunk.sizes): storage.get(MetadataIndex(fqn, chunk.offsets))
            for chunk in saved.chunks
            if 0 not in chunk.sizes
        }
        shape = "x".join(map(str, saved.size)) or "scalar"
        return cls("tensor", math.prod(saved.size) * dtype.itemsize, shape, str(dtype).removeprefix("torch."), chunks)


def _compare_entries(a: _Stored | None, b: _Stored | None) -> tuple[Status, str]:
    if a is None or b is None:
        return "only in B" if a is None else "only in A", ""
    for name in ("kind", "shape", "dtype"):
        one, two = getattr(a, name), getattr(b, name)
        if one != two:
            return "changed", f"{name} {one} -> {two}"
    doubts = set() if a.chunks.keys() == b.chunks.keys() else {"its chunks are cut differently"}
    for box in a.chunks.keys() & b.chunks.keys():
        status, what = _compare_chunks(a.chunks[box], b.chunks[box], is_object=a.kind == "bytes")
        if status == "changed":
            return status, what
        if status == "unknown":
            doubts.add(what)
    return ("unknown", min(doubts)) if doubts else ("same", "")


def _compare_chunks(a: Any, b: Any, *, is_object: bool) -> tuple[Status, str]:
    unchecked = [side for side, info in (("A", a), ("B", b)) if get_crc(info) is None]
    if unchecked:
        return "unknown", f"no checksum in {' and '.join(unchecked)}"
    one, two = _covered(a), _covered(b)
    if (one, get_crc(a)) == (two, get_crc(b)):
        return "same", ""
    if is_object and not (a.transform_descriptors or b.transform_descriptors):
        return "changed", "bytes"
    return ("changed", "values") if one is two is None else ("unknown", "it was encoded before it was stored")


def _covered(info: Any) -> Any:
    """What the checksum of a stored chunk covers: its length and how it was encoded; None: its elements."""
    encoding = tuple(info.transform_descriptors or ())
    return None if get_raw_offset(info) is not None and not encoding else (info.length, encoding)
