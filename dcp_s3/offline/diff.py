"""Compares two checkpoints: names, shapes, dtypes, values, attachments and metrics."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from dcp_s3.checkpoint.info import CheckpointInfo
from dcp_s3.format.blocks import get_crc, get_raw_offset
from dcp_s3.offline.boxes import BATCH, Piece, in_batches
from dcp_s3.offline.inspect import SavedCheckpoint, fetch_saved
from dcp_s3.offline.names import matches, no_match_error
from dcp_s3.offline.read import reading_under_lease
from dcp_s3.process import collector_paused
from dcp_s3.settings import Settings, SettingsLike, resolve_settings
from dcp_s3.torch_private import StorageInfo
from dcp_s3.units import one_line
from dcp_s3.url import URLLike
from dcp_s3.workers import Workers

Status = Literal["same", "changed", "unknown", "only in A", "only in B"]

_DIFFERENT: tuple[Status, ...] = ("changed", "only in A", "only in B")
_ALIKE: tuple[Status, ...] = ("unknown", "same")
_ONLY_IN_A: Status = "only in A"
_ONLY_IN_B: Status = "only in B"

_RANKS = "several ranks wrote it, without collectives"


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
    bytes_read: int = 0
    """Bytes of data that were read to compare values, of both together."""

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
    of their chunks. Where those cannot tell (chunks that are cut differently, as by another number of ranks, another
    writer, ``DCP_S3_CHECKSUM=none``, or encoded) an entry is ``unknown``, and so is what several ranks saved without
    collectives under one name.

    >>> print(diff("s3://bucket/run/step-00001000", "s3://bucket/run/step-00002000").summary)
    1 of 2 entries differ (1 changed), 1 same

    Equal CRC-64s of equally many bytes count as ``same``. A CRC is no proof against somebody who made them equal.

    Args:
        full: whether to read what is ``unknown``, unless several ranks saved it, and to compare values: tensors bit for
            bit, of objects the stored bytes. Takes about 160 MiB of host memory, and the bytes of an object twice, and
            holds a reader's lease on both checkpoints.
        filter: only the entries whose names match, such as ``model.*``; several: any of them.
        on_total: called with the bytes to read, of both checkpoints together; with ``full`` only.
        on_progress: called with the number of bytes as they are read, or need not be.

    Raises:
        CheckpointNotFoundError: no committed checkpoint is there.
        EntryNotFoundError: ``filter`` matches nothing in either.
        CorruptCheckpointError, UnsafeMetadataError
        InvalidURLError, SettingsError, StorageError
    """
    given = resolve_settings(settings)
    saved_a, saved_b = fetch_saved(a, b, settings=given)
    patterns = None if filter is None else [filter] if isinstance(filter, str) else list(filter)
    entries = compare(
        saved_a.metadata,
        saved_b.metadata,
        lambda name: patterns is None or matches(name, patterns),
        saved_often=saved_a.saved_often | saved_b.saved_often,
    )
    if patterns is not None and not entries:
        names = list(saved_a.metadata.state_dict_metadata)
        raise no_match_error(f"neither {saved_a.url} nor {saved_b.url} has an", patterns, names, str(saved_a.url))
    bytes_read = 0
    if full:
        entries, bytes_read = _compare_values(
            saved_a, saved_b, entries, given, on_total or (lambda _: None), on_progress or (lambda _: None)
        )
    attachments = {} if patterns is not None else _compare_attachments(saved_a, saved_b)
    ours, theirs = saved_a.info.metrics, saved_b.info.metrics
    pairs = {name: (ours.get(name), theirs.get(name)) for name in dict.fromkeys([*ours, *theirs])}
    metrics = {name: (x, y) for name, (x, y) in pairs.items() if x != y and not (x != x and y != y)}  # NaN equals NaN
    return CheckpointDiff(saved_a.info, saved_b.info, tuple(entries), attachments, metrics, bytes_read)


def _compare_attachments(a: SavedCheckpoint, b: SavedCheckpoint) -> dict[str, Status]:
    found: dict[str, Status] = {}
    in_a, in_b = ({**each.files, **each.attachments} for each in (a, b))
    for name in sorted({*in_a, *in_b}):
        one, two = in_a.get(name), in_b.get(name)
        if one is None or two is None:
            found[name] = "only in B" if one is None else "only in A"
        elif one.size == two.size and None in (one.crc64nvme, two.crc64nvme):
            found[name] = "unknown"
        else:
            found[name] = "same" if (one.size, one.crc64nvme) == (two.size, two.crc64nvme) else "changed"
    return found


# --- by checksums, pure ------------------------------------------------------------------------------


def compare(
    a: Metadata, b: Metadata, wanted: Callable[[str], bool] = lambda _: True, *, saved_often: Collection[str] = ()
) -> list[EntryDiff]:
    """Compare two checkpoints by their metadata: entries in the order of ``a``, then those that only ``b`` has.

    Args:
        saved_often: names under which several ranks have saved something.
    """
    with collector_paused():
        at_a, at_b = _places(a), _places(b)
        found = []
        for fqn in filter(wanted, dict.fromkeys([*a.state_dict_metadata, *b.state_dict_metadata])):
            one, two = a.state_dict_metadata.get(fqn), b.state_dict_metadata.get(fqn)
            saved, places = (two, at_b) if one is None else (one, at_a)
            size = sum(info.length for info in places.get(fqn, {}).values())
            if isinstance(saved, TensorStorageMetadata):
                size = math.prod(saved.size) * saved.properties.dtype.itemsize
            if one is None or two is None:
                status, what = _ONLY_IN_B if one is None else _ONLY_IN_A, ""
            elif fqn in saved_often:
                status, what = "unknown", _RANKS
            else:
                status, what = _compare_entries(one, two, at_a.get(fqn, {}), at_b.get(fqn, {}))
            found.append(EntryDiff(fqn, _kind(saved), status, what, size))
        return found


def _places(metadata: Metadata) -> dict[str, dict[Any, StorageInfo]]:
    """What is stored of each entry, by the offsets of its chunks (none: the empty tuple)."""
    found: dict[str, dict[Any, StorageInfo]] = {}
    for index, info in (metadata.storage_data or {}).items():
        found.setdefault(index.fqn, {})[index.offset or ()] = info
    return found


def _kind(saved: Any) -> str:
    return "tensor" if isinstance(saved, TensorStorageMetadata) else "bytes"


def _compare_entries(
    a: Any, b: Any, at_a: Mapping[Any, StorageInfo], at_b: Mapping[Any, StorageInfo]
) -> tuple[Status, str]:
    if _kind(a) != _kind(b):
        return "changed", f"kind {_kind(a)} -> {_kind(b)}"
    if not isinstance(a, TensorStorageMetadata):
        return _compare_stored(at_a.get(()), at_b.get(()), None)
    shapes = ["x".join(map(str, each.size)) or "scalar" for each in (a, b)]
    dtypes = [str(each.properties.dtype).removeprefix("torch.") for each in (a, b)]
    changes = [
        f"{name} {one} -> {two}" for name, (one, two) in {"shape": shapes, "dtype": dtypes}.items() if one != two
    ]
    if changes or 0 in a.size:
        return ("changed", ", ".join(changes)) if changes else ("same", "")
    boxes_a, boxes_b = ({(c.offsets, c.sizes) for c in each.chunks if 0 not in c.sizes} for each in (a, b))
    doubts = set() if boxes_a == boxes_b else {"its chunks are cut differently"}
    for offsets, sizes in boxes_a & boxes_b:
        # Other writers may leave out an offset of zeros.
        one, two = (each.get(offsets) or (None if any(offsets) else each.get(())) for each in (at_a, at_b))
        status, what = _compare_stored(one, two, math.prod(sizes) * a.properties.dtype.itemsize)
        if status == "changed":
            return status, what
        if status == "unknown":
            doubts.add(what)
    return ("unknown", min(doubts)) if doubts else ("same", "")


def _compare_stored(a: StorageInfo | None, b: StorageInfo | None, nbytes: int | None) -> tuple[Status, str]:
    """Compare what was stored of a chunk of ``nbytes``, or of an object (None)."""
    one, two = _covered(a, nbytes), _covered(b, nbytes)
    crcs = get_crc(a), get_crc(b)
    exact = one is not None and two is not None and (nbytes is None or one == two == nbytes)
    if exact and (one != two or (None not in crcs and crcs[0] != crcs[1])):
        return "changed", "values" if nbytes is not None else "bytes"
    unchecked = [side for side, of, crc in (("A", one, crcs[0]), ("B", two, crcs[1])) if of is None or crc is None]
    if unchecked:
        return "unknown", f"no checksum in {' and '.join(unchecked)}"
    return ("same", "") if (one, crcs[0]) == (two, crcs[1]) else ("unknown", "it was encoded before it was stored")


def _covered(info: StorageInfo | None, nbytes: int | None) -> Any:
    """What the checksum of a stored chunk covers: its elements (their bytes), or its length and how it was encoded."""
    if info is None:
        return None
    encoding, raw_offset = tuple(getattr(info, "transform_descriptors", None) or ()), get_raw_offset(info)
    if nbytes is None or raw_offset is None or encoding:
        return info.length, encoding
    return nbytes if raw_offset + nbytes <= info.length else None


# --- by values ---------------------------------------------------------------------------------------


def _compare_values(
    a: SavedCheckpoint,
    b: SavedCheckpoint,
    entries: Sequence[EntryDiff],
    settings: Settings,
    on_total: Callable[[int], None],
    on_progress: Callable[[int], None],
) -> tuple[list[EntryDiff], int]:
    """The entries, those that were unknown by what was read; and the bytes that were read."""
    unknown = {each.fqn: each for each in entries if each.status == "unknown" and each.what != _RANKS}
    if not unknown:
        return list(entries), 0
    on_total(2 * sum(each.size for each in unknown.values()))
    changed: dict[str, str] = {}
    bytes_read = 0

    def pieces() -> Iterator[Piece]:
        for fqn, entry in unknown.items():
            if entry.kind != "tensor":
                continue
            saved: Any = a.metadata.state_dict_metadata[fqn]
            for piece in Piece.all_of(fqn, saved.size, saved.properties.dtype):
                if fqn in changed:
                    on_progress(2 * piece.size)
                else:
                    yield piece

    with contextlib.ExitStack() as stack:
        readings = [
            stack.enter_context(
                reading_under_lease(
                    each.url, settings, metadata=each.metadata, rank=each.manifests[0].rank if each.manifests else None
                )
            )
            for each in (a, b)
        ]
        workers = stack.enter_context(contextlib.closing(Workers(2, "dcp_s3-diff")))
        buffers = [torch.empty(BATCH, dtype=torch.uint8) for _ in readings]
        for batch in in_batches(pieces(), lambda piece: piece.room):
            pairs = zip(readings, buffers, strict=True)
            jobs = [workers.submit(reading.fill_pieces, batch, buffer) for reading, buffer in pairs]
            for piece, one, two in zip(batch, jobs[0].result(), jobs[1].result(), strict=True):
                bytes_read += 2 * piece.size
                on_progress(2 * piece.size)
                if not torch.equal(one.view(-1).view(torch.uint8), two.view(-1).view(torch.uint8)):
                    changed[piece.fqn] = "values"
        for fqn, entry in unknown.items():
            if entry.kind == "bytes":
                bytes_read += 2 * entry.size
                on_progress(2 * entry.size)
                if readings[0].checkpoint.read_stored(fqn) != readings[1].checkpoint.read_stored(fqn):
                    changed[fqn] = "bytes"
    for fqn, entry in unknown.items():
        unknown[fqn] = replace(entry, status="changed" if fqn in changed else "same", what=changed.get(fqn, ""))
    return [unknown.get(each.fqn, each) for each in entries], bytes_read
