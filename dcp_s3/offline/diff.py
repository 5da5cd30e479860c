"""Compares two checkpoints: names, shapes, dtypes, checksums of values, attachments and metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from dcp_s3.checkpoint.info import CheckpointInfo
from dcp_s3.format.blocks import get_crc, get_raw_offset
from dcp_s3.format.control_files import Manifest, ObjectEntry
from dcp_s3.format.saved_entries import SavedEntry, saved_entries
from dcp_s3.offline.inspect import fetch_saved
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
    """``unknown``: the stored checksums cannot decide it."""
    what: str = ""
    """What changed (``shape``, ``dtype``, ``kind``: old -> new; ``values``; ``bytes`` of an object, whose value may be
    equal), or why it is not known. Empty if nothing did."""
    size: int = 0
    """Stored bytes, framing included; in A, or in B where only that has it."""

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
    one, two = fetch_saved(a, settings), fetch_saved(b, settings)
    patterns = None if filter is None else [filter] if isinstance(filter, str) else list(filter)
    entries = compare(one.metadata, two.metadata, patterns)
    if patterns is not None and not entries:
        names = list(one.metadata.state_dict_metadata)
        raise no_match_error(f"neither {one.info.url} nor {two.info.url} has an", patterns, names, one.info.url)
    attachments = {} if patterns is not None else _compare_attachments(_files(one.manifest), _files(two.manifest))
    ours, theirs = one.info.metrics, two.info.metrics
    pairs = {name: (ours.get(name), theirs.get(name)) for name in dict.fromkeys([*ours, *theirs])}
    metrics = {name: (x, y) for name, (x, y) in pairs.items() if x != y and not (x != x and y != y)}  # NaN equals NaN
    return CheckpointDiff(one.info, two.info, tuple(entries), attachments, metrics)


def _files(manifest: Manifest | None) -> Mapping[str, ObjectEntry]:
    return {} if manifest is None else {**manifest.files, **manifest.attachments}


def _compare_attachments(a: Mapping[str, ObjectEntry], b: Mapping[str, ObjectEntry]) -> dict[str, Status]:
    found: dict[str, Status] = {}
    for name in sorted({*a, *b}):
        one, two = a.get(name), b.get(name)
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
    found: list[EntryDiff] = []
    status: Status
    with collector_paused():
        ours, theirs = ({each.fqn: each for each in saved_entries(metadata)} for metadata in (a, b))
        for fqn in dict.fromkeys([*ours, *theirs]):
            if patterns is not None and not matches(fqn, patterns):
                continue
            one, two = ours.get(fqn), theirs.get(fqn)
            if one is None or two is None:
                entry, status = (theirs[fqn], "only in B") if one is None else (one, "only in A")
                found.append(EntryDiff(fqn, entry.kind, status, "", entry.size))
                continue
            status = "changed"
            old = {"kind": one.kind, "shape": _shape(one), "dtype": one.dtype}
            new = {"kind": two.kind, "shape": _shape(two), "dtype": two.dtype}
            what = next((f"{name} {old[name]} -> {new[name]}" for name in old if old[name] != new[name]), "")
            if not what:
                status, what = _compare_chunks(_chunks(a, fqn), _chunks(b, fqn), is_object=one.kind == "bytes")
            found.append(EntryDiff(fqn, one.kind, status, what, one.size))
    return found


def _shape(entry: SavedEntry) -> str:
    return "x".join(map(str, entry.shape or ())) or "scalar"


def _chunks(metadata: Metadata, fqn: str) -> dict[Any, Any]:
    """Where each chunk of an entry lies that is not empty, by offsets and sizes."""
    saved, storage = metadata.state_dict_metadata[fqn], metadata.storage_data or {}
    if not isinstance(saved, TensorStorageMetadata):
        return {(): storage.get(MetadataIndex(fqn))}
    return {
        (chunk.offsets, chunk.sizes): storage.get(MetadataIndex(fqn, chunk.offsets))
        for chunk in saved.chunks
        if 0 not in chunk.sizes
    }


def _compare_chunks(a: Mapping[Any, Any], b: Mapping[Any, Any], *, is_object: bool) -> tuple[Status, str]:
    doubts = set() if a.keys() == b.keys() else {"its chunks are cut differently"}
    for one, two in ((a[box], b[box]) for box in a.keys() & b.keys()):
        unchecked = [side for side, info in (("A", one), ("B", two)) if get_crc(info) is None]
        if unchecked:
            doubts.add(f"no checksum in {' and '.join(unchecked)}")
        elif (_covered(one), get_crc(one)) == (_covered(two), get_crc(two)):
            continue
        elif is_object and not (one.transform_descriptors or two.transform_descriptors):
            return "changed", "bytes"
        elif _covered(one) is _covered(two) is None:
            return "changed", "values"
        else:
            doubts.add("it was encoded before it was stored")
    return ("unknown", min(doubts)) if doubts else ("same", "")


def _covered(info: Any) -> Any:
    """What the checksum of a stored chunk covers: its length and how it was encoded; None: its elements."""
    encoding = tuple(info.transform_descriptors or ())
    return None if get_raw_offset(info) is not None and not encoding else (info.length, encoding)
