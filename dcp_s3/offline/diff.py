"""Compares two checkpoints: names, shapes, dtypes, values, attachments and metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from dcp_s3.checkpoint.info import CheckpointInfo
from dcp_s3.offline.diff_copies import compare_copies
from dcp_s3.offline.diff_full import compare_values
from dcp_s3.offline.diff_plan import EntryDiff, Renaming, Status, compare, find_renaming
from dcp_s3.offline.inspect import matches, no_match_error
from dcp_s3.offline.saved import SavedCheckpoint, fetch_saved
from dcp_s3.reprs import one_line
from dcp_s3.settings import SettingsLike, resolve_settings
from dcp_s3.url import URLLike


@dataclass(frozen=True)
class AttachmentDiff:
    """How one attachment compares."""

    name: str
    """Its name."""
    status: Status
    """``unknown``: it was attached without a checksum."""


@dataclass(frozen=True)
class MetricDiff:
    """A metric that is not the same."""

    name: str
    """Its name."""
    a: Any
    """Its value in A; None if A has none."""
    b: Any
    """Its value in B; None if B has none."""


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
    attachments: tuple[AttachmentDiff, ...]
    """All attachments; none if ``filter`` was given."""
    metrics: tuple[MetricDiff, ...]
    """Metrics that differ. They do not count as a difference of the checkpoints: nothing loads them."""
    renaming: Renaming | None = None
    """Prefixes by which names that only one of them has would be equal; None if there are none."""
    bytes_read: int = 0
    """Bytes of data that were read to compare values, of both together."""

    @property
    def counts(self) -> dict[Status, int]:
        """Number of entries by status, without those of 0."""
        return dict(Counter(entry.status for entry in self.entries))

    @property
    def status(self) -> Status:
        """``changed`` if an entry or attachment differs, else ``unknown`` if one is, else ``same``."""
        found = {entry.status for entry in self.entries} | {attached.status for attached in self.attachments}
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
        shown: tuple[Status, ...] = ("changed", "only in A", "only in B")
        different = {status: counts[status] for status in shown if status in counts}
        how = ", ".join(f"{count} {status}" for status, count in different.items())
        parts = [f"{sum(different.values())} of {len(self.entries)} entries differ" + (f" ({how})" if how else "")]
        others: tuple[Status, ...] = ("unknown", "same")
        parts += [f"{counts[status]} {status}" for status in others if status in counts]
        attached = sum(each.status not in ("same", "unknown") for each in self.attachments)
        if attached:
            parts.append(f"{attached} of {len(self.attachments)} attachments differ")
        return ", ".join(parts)

    def to_dict(self, *, everything: bool = False) -> dict[str, Any]:
        """The differences, for JSON.

        Args:
            everything: whether to have the entries and attachments that are the same, too.
        """
        return {
            "a": self.a.url,
            "b": self.b.url,
            "status": self.status,
            "counts": self.counts,
            "entries": [asdict(each) for each in self.entries if everything or each.status != "same"],
            "attachments": [asdict(each) for each in self.attachments if everything or each.status != "same"],
            "metrics": {each.name: [each.a, each.b] for each in self.metrics},
            "renaming": None if self.renaming is None else self.renaming.to_dict(),
            "bytes_read": self.bytes_read,
        }


def diff(
    a: URLLike,
    b: URLLike,
    *,
    full: bool = False,
    filter: str | Iterable[str] | None = None,
    settings: SettingsLike = None,
    on_total: Callable[[int], None] | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> CheckpointDiff:
    """Compare two committed checkpoints, without reading their data.

    Fetches metadata and manifests, mostly three requests for each checkpoint. Tensors are compared by the checksums
    that are stored, also if another number of ranks cut them into other rows. Where those cannot tell (saved by rows
    and by columns, by another writer, with ``DCP_S3_CHECKSUM=none``, or encoded) an entry is ``unknown``. What several
    ranks saved without collectives under one name is compared rank by rank, by checksums only.

    >>> print(diff("s3://bucket/run/step-00001000", "s3://bucket/run/step-00002000").summary)
    1 of 2 entries differ (1 changed), 1 same

    Equal CRC-64s of equally many bytes count as ``same``. A CRC is no proof against somebody who made them equal.

    Args:
        a: URL of one checkpoint.
        b: URL of the other.
        full: whether to read what is ``unknown``, and the objects whose stored bytes differ, and to compare values:
            tensors bit for bit, objects as far as they can be unpickled safely. Takes about 160 MiB of host memory,
            and both values of an object, and holds a reader's lease on both checkpoints. An object that cannot be
            unpickled keeps its status.
        filter: only the entries whose names match, such as ``model.*``; several: any of them.
        settings: a `Settings`, or a mapping of those that differ from the environment.
        on_total: called with the bytes to read, of both checkpoints together; with ``full`` only.
        on_progress: called with the number of bytes as they are read, or need not be.

    Raises:
        CheckpointNotFoundError: no committed checkpoint is there.
        EntryNotFoundError: ``filter`` matches nothing in either.
        CorruptMetadataError, UnsafeMetadataError, CorruptCheckpointError
        InvalidURLError, SettingsError, StorageError
    """
    given = resolve_settings(settings)
    saved_a, saved_b = fetch_saved(a, b, settings=given)
    patterns = None if filter is None else [filter] if isinstance(filter, str) else list(filter)
    entries = compare(saved_a.metadata, saved_b.metadata, lambda name: patterns is None or matches(name, patterns))
    if patterns is not None and not entries:
        names = list(saved_a.metadata.state_dict_metadata)
        raise no_match_error(f"neither {saved_a.url} nor {saved_b.url} has an", patterns, names, str(saved_a.url))
    bytes_read = 0
    if full:
        entries, bytes_read = compare_values(
            saved_a, saved_b, entries, given, on_total or (lambda _: None), on_progress or (lambda _: None)
        )
    entries = compare_copies(entries, saved_a.of_ranks, saved_b.of_ranks)
    return CheckpointDiff(
        saved_a.info,
        saved_b.info,
        tuple(entries),
        () if patterns is not None else compare_attachments(saved_a, saved_b),
        compare_metrics(saved_a.info.metrics, saved_b.info.metrics),
        find_renaming(
            [each.fqn for each in entries if each.status == "only in A"],
            [each.fqn for each in entries if each.status == "only in B"],
        ),
        bytes_read,
    )


def compare_attachments(a: SavedCheckpoint, b: SavedCheckpoint) -> tuple[AttachmentDiff, ...]:
    """Compare the attachments of two checkpoints by size and CRC-64."""
    ours, theirs = a.attachments, b.attachments
    found = []
    for name in sorted({*ours, *theirs}):
        status: Status
        if name not in theirs:
            status = "only in A"
        elif name not in ours:
            status = "only in B"
        elif ours[name].size != theirs[name].size:
            status = "changed"
        elif None in (ours[name].crc64nvme, theirs[name].crc64nvme):
            status = "unknown"
        else:
            status = "same" if ours[name].crc64nvme == theirs[name].crc64nvme else "changed"
        found.append(AttachmentDiff(name, status))
    return tuple(found)


def compare_metrics(a: Mapping[str, Any], b: Mapping[str, Any]) -> tuple[MetricDiff, ...]:
    """The metrics that differ; NaN is equal to NaN."""
    return tuple(
        MetricDiff(name, a.get(name), b.get(name))
        for name in dict.fromkeys([*a, *b])
        if name not in a or name not in b or not (a[name] == b[name] or (a[name] != a[name] and b[name] != b[name]))
    )
