"""Compares two checkpoints by what metadata and manifests say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from dcp_s3.checkpoint import look
from dcp_s3.checkpoint.commit_state import check_metadata, fetch_metadata, not_found_error
from dcp_s3.checkpoint.info import CheckpointInfo
from dcp_s3.format.blocks import get_crc, get_raw_offset
from dcp_s3.format.control_files import ObjectEntry
from dcp_s3.format.saved_entries import saved_entries
from dcp_s3.offline.names import matches, no_match_error
from dcp_s3.process import collector_paused
from dcp_s3.s3.store import store_of
from dcp_s3.settings import SettingsLike, resolve_settings
from dcp_s3.store import same_etag
from dcp_s3.units import one_line
from dcp_s3.url import URLLike, parse_url

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
    """How attachments compare, by name; ``unknown`` without a checksum. Empty if ``filter`` was given."""
    metrics: Mapping[str, tuple[Any, Any]]
    """Metrics that differ: their values in A and B, None where there is none. They do not count as a difference."""

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

    Takes three requests for each that dcp_s3 wrote. Tensors are compared by the checksums of their chunks. Where those
    cannot tell (chunks that are cut differently, as by another number of ranks, another writer,
    ``DCP_S3_CHECKSUM=none``, or encoded) an entry is ``unknown``.

    >>> print(diff("s3://bucket/run/step-00001000", "s3://bucket/run/step-00002000").summary)
    1 of 2 entries differ (1 changed), 1 same

    Args:
        filter: only the entries whose names match, such as ``model.*``; several: any of them.

    Raises:
        CheckpointNotFoundError: no checkpoint is there that all ranks committed together.
        EntryNotFoundError: ``filter`` matches nothing in either.
        CorruptCheckpointError, UnsafeMetadataError
        InvalidURLError, SettingsError, StorageError
    """
    (info, files, metadata), (other, others, theirs) = (_fetch(each, settings) for each in (a, b))
    patterns = None if filter is None else [filter] if isinstance(filter, str) else list(filter)
    entries = compare(metadata, theirs, patterns)
    if patterns is not None and not entries:
        raise no_match_error(
            f"neither {info.url} nor {other.url} has an", patterns, [*metadata.state_dict_metadata], info.url
        )
    attachments: dict[str, Status] = {}
    for name in sorted({*files, *others}) if patterns is None else ():
        x, y = files.get(name), others.get(name)
        if x is None or y is None:
            attachments[name] = "only in B" if x is None else "only in A"
        elif x.size == y.size and None in (x.crc64nvme, y.crc64nvme):
            attachments[name] = "unknown"
        else:
            attachments[name] = "same" if (x.size, x.crc64nvme) == (y.size, y.crc64nvme) else "changed"
    names = dict.fromkeys([*info.metrics, *other.metrics])
    pairs = {name: (info.metrics.get(name), other.metrics.get(name)) for name in names}
    metrics = {name: (x, y) for name, (x, y) in pairs.items() if x != y and not (x != x and y != y)}  # NaN equals NaN
    return CheckpointDiff(info, other, tuple(entries), attachments, metrics)


def _fetch(where: URLLike, settings: SettingsLike) -> tuple[CheckpointInfo, Mapping[str, ObjectEntry], Metadata]:
    """A committed checkpoint, its files with names of their own, and its metadata, all of one save: three requests for
    one that dcp_s3 wrote."""
    url = parse_url(where)
    store = store_of(url, resolve_settings(settings))
    while True:
        found = look.inspect(store, url)
        commit = found.directory.commits.get(None) if found else None
        if found is None or commit is None:
            alone = found is not None and found.info.committed
            why = ": each rank has committed its own part, which `dcp-s3 show` shows" if alone else ""
            raise not_found_error(url, why=why)
        stored = fetch_metadata(store, url)
        if same_etag(stored.etag, commit.etag):
            manifest = found.manifests.get(None)
            files = {**manifest.files, **manifest.attachments} if manifest else {}
            return found.info, files, check_metadata(stored, url)


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
            what = ""
            for name in ("kind", "shape", "dtype"):
                old, new = getattr(one, name), getattr(two, name)
                if old != new:
                    status, what = "changed", f"{name} {_text(old)} -> {_text(new)}"
                    break
            else:
                status, what = _compare_chunks(_chunks(a, fqn), _chunks(b, fqn), is_object=one.kind == "bytes")
            found.append(EntryDiff(fqn, one.kind, status, what, one.size))
    return found


def _text(value: Any) -> str:
    return "x".join(map(str, value)) or "scalar" if isinstance(value, tuple) else str(value)


def _chunks(metadata: Metadata, fqn: str) -> dict[Any, Any]:
    """Where each chunk of an entry lies that is not empty, by offsets and sizes."""
    saved, storage = metadata.state_dict_metadata[fqn], metadata.storage_data or {}
    if not isinstance(saved, TensorStorageMetadata):
        return {(): storage.get(MetadataIndex(fqn))}
    chunks = [chunk for chunk in saved.chunks if 0 not in chunk.sizes]
    return {(each.offsets, each.sizes): storage.get(MetadataIndex(fqn, each.offsets)) for each in chunks}


def _compare_chunks(a: Mapping[Any, Any], b: Mapping[Any, Any], *, is_object: bool) -> tuple[Status, str]:
    doubts = set() if a.keys() == b.keys() else {"its chunks are cut differently"}
    for one, two in ((a[box], b[box]) for box in a.keys() & b.keys()):
        encoded = [tuple(info.transform_descriptors or ()) for info in (one, two)]
        # What a checksum covers: the elements, or (without a raw offset, or encoded) the stored bytes.
        covers = [
            None if get_raw_offset(info) is not None and not how else (info.length, how)
            for info, how in zip((one, two), encoded, strict=True)
        ]
        unchecked = [side for side, info in (("A", one), ("B", two)) if get_crc(info) is None]
        if unchecked:
            doubts.add(f"no checksum in {' and '.join(unchecked)}")
        elif covers[0] == covers[1] and get_crc(one) == get_crc(two):
            continue
        elif is_object and not any(encoded):
            return "changed", "bytes"
        elif covers == [None, None]:
            return "changed", "values"
        else:
            doubts.add("it was encoded before it was stored")
    return ("unknown", min(doubts)) if doubts else ("same", "")
