"""One checkpoint as the catalog sees it, concluded from listings and manifests. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from dcp_s3.format.added_metrics import AddedMetrics
from dcp_s3.format.layout import (
    CONTROL_PREFIX,
    DATA_SUFFIX,
    METADATA,
    METRICS,
    PIN,
    data_object,
    deletion_id,
    parse_deletion_object,
    parse_lease_object,
    parse_manifest_object,
    rank_of_metadata,
    step_by_patterns,
    step_of,
)
from dcp_s3.format.manifest import Manifest
from dcp_s3.store import ListedObject
from dcp_s3.url import CheckpointURL

State = Literal["committed", "incomplete", "in_progress", "leftover", "local"]


@dataclass(frozen=True)
class CheckpointInfo:
    """A checkpoint under a root.

    Attributes:
        url: ``s3://...`` of the checkpoint.
        name: last part of the URL.
        state: ``committed`` if it has what makes it a checkpoint (``.metadata``, or that of every rank); ``local`` if
            its commit waits in this host's spill directory; otherwise ``incomplete``, which a `CheckpointCatalog`
            tells apart by its grace period: ``in_progress``, or ``leftover``.
        step: training step, from the name; None without a number.
        created_at: seconds since the epoch; when it was committed, or if it was not, last written to.
        world_size: ranks that wrote it; None if that is not recorded.
        objects: number of its data objects.
        size: bytes of its data objects.
        metrics: the user's, as saved, and over them those of `annotate`.
        foreign: whether it was written by something else than dcp_s3: it has no manifest.
        save_id: of the save that committed it; None for a foreign one, or one that is not committed. Without
            collectives that of the lowest rank.
        etag: of ``.metadata``, with quotes; None without one.
        modified_at: seconds since the epoch on the clock of S3: when ``.metadata`` was written, or if there is none,
            the newest object.
        written_at: seconds since the epoch on the clock of S3, when the newest data object in its directory was
            written; None if they were not listed.
        pinned: whether `pin` protects it.
        pin_reason: why, if `pin` was told.
        leased_until: seconds since the epoch on the clock of S3, when the last reader's lease ends; None without any.
        waiting: whether a commit of this URL waits in this host's spill directory.
        deletions: ids (`layout.deletion_id`) of deletions that were begun and not finished.
        damage: why it can not be loaded; None if nothing is known of that. Of one that is not committed: why that can
            not be told, so that it may be a checkpoint.
    """

    url: str
    name: str
    state: State
    step: int | None
    created_at: float | None
    world_size: int | None
    objects: int | None
    size: int | None
    metrics: dict[str, Any] = field(default_factory=dict, hash=False)
    foreign: bool = False
    save_id: str | None = None
    etag: str | None = None
    modified_at: float | None = None
    written_at: float | None = None
    pinned: bool = False
    leased_until: float | None = None
    waiting: bool = False
    deletions: tuple[str, ...] = ()
    damage: str | None = None
    pin_reason: str | None = None

    @property
    def committed(self) -> bool:
        """Whether ``state`` is ``committed``."""
        return self.state == "committed"

    @property
    def deletion_id(self) -> str:
        """What a deletion of it is known by."""
        return deletion_id(self.save_id, self.etag)

    def to_dict(self) -> dict[str, Any]:
        """The fields, for JSON."""
        return asdict(self)


def age_order(info: CheckpointInfo) -> tuple[bool, int, float, str]:
    """Sort key: by step (those without one first), then by time, then by name."""
    created = info.created_at or 0.0
    return (info.step is not None, info.step or 0, 0.0 if math.isnan(created) else created, info.name)


def newest_first(infos: Iterable[CheckpointInfo]) -> list[CheckpointInfo]:
    """The committed ones, the one that `latest` tries first in front."""
    return sorted((info for info in infos if info.committed), key=age_order, reverse=True)


# --- names ---------------------------------------------------------------------------------------

_RANK_MANIFEST = re.compile(re.escape(CONTROL_PREFIX) + r"manifest-[0-9a-f]+\.(\d+)\.json")
_OUR_DATA = re.compile(r"__(\d+)_(\d+)-([0-9a-f]+)" + re.escape(DATA_SUFFIX))
_RANK_DATA = re.compile(r"(?:[^/]*/)?__(\d+)_\d+[^/]*" + re.escape(DATA_SUFFIX))
_SPREAD = re.compile(r"[0-9a-f]{1,4}")


def is_spread_data(path: str) -> bool:
    """Whether ``xx/__0_0-{nonce}.distcp`` lies where a save with ``prefix_spread`` to the directory above ``xx``
    puts it. The hash says so: ``500/__0_0-{nonce}.distcp`` is usually data of a checkpoint named 500."""
    directory, _, name = path.partition("/")
    match = _OUR_DATA.fullmatch(name)
    if match is None or not _SPREAD.fullmatch(directory):
        return False
    return path == data_object(int(match[1]), int(match[2]), match[3], prefix_spread=len(directory))


def is_our_data(path: str) -> bool:
    """Whether a path relative to a checkpoint is named like a data object that dcp_s3 writes there."""
    return _OUR_DATA.fullmatch(path) is not None or is_spread_data(path)


def own_data(paths: Iterable[str], needed: Collection[str] = ()) -> set[str]:
    """Of a listing below a checkpoint, the data objects of saves to this very directory.

    Directories in it may be checkpoints of their own, whose names are spread hashes by chance. Spread data counts if
    it lies like that of the checkpoint, and not in a directory that is a checkpoint. If nothing is needed (it was
    never committed), it counts if there is no other data and no such directory.

    Args:
        paths: all relative paths below it.
        needed: those that its manifest or metadata names.
    """
    data: set[str] = set()
    below: set[str] = set()
    nested: set[str] = set()
    for path in paths:
        directory, slash, rest = path.partition("/")
        if slash and (rest == METADATA or rest.startswith(CONTROL_PREFIX) or rank_of_metadata(rest) is not None):
            nested.add(directory)
        elif path.endswith(DATA_SUFFIX):
            (below if slash else data).add(path)
    widths = {path.index("/") for path in (needed or below) if is_spread_data(path)}
    if not needed and (data or nested or len(widths) > 1 or not all(map(is_spread_data, below))):
        return data
    spread = {path for path in below if is_spread_data(path) and path.partition("/")[0] not in nested}
    return data | {path for path in spread if path.index("/") in widths}


def spread_prefixes(prefixes: Iterable[str]) -> list[str]:
    """Those of some common prefixes (relative, with slash) that may hold spread data."""
    return [prefix for prefix in prefixes if _SPREAD.fullmatch(prefix.rstrip("/"))]


def shows_checkpoint(names: Iterable[str]) -> bool:
    """Whether names directly below a directory (relative; directories with a slash) show that it is, or was to
    become, a checkpoint."""
    return any(
        name in (METADATA, CONTROL_PREFIX) or name.endswith(DATA_SUFFIX) or rank_of_metadata(name) is not None
        for name in names
    )


# --- contents of one checkpoint ------------------------------------------------------------------


@dataclass(frozen=True)
class Contents:
    """The objects below a checkpoint's URL, sorted out.

    Attributes:
        data: data objects.
        commits: ``.metadata`` by rank; rank None is the global one.
        manifests: save ids of the manifests by rank, likewise.
        metrics: whether there is a ``metrics.json``.
        newest: when the last object was written, None without any.
        control: what lies below ``.dcp_s3/``, by relative path.
    """

    data: tuple[ListedObject, ...]
    commits: Mapping[int | None, ListedObject]
    manifests: Mapping[int | None, tuple[str, ...]]
    metrics: bool
    newest: float | None
    control: Mapping[str, ListedObject] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Bytes of the data objects."""
        return sum(found.size for found in self.data)

    @property
    def any(self) -> bool:
        """Whether there is anything of a checkpoint."""
        return bool(self.data or self.commits or self.manifests or self.control)


def sort_out(url: CheckpointURL, objects: Iterable[ListedObject]) -> Contents:
    """What the objects of a listing below ``url`` are to the checkpoint."""
    skip = len(url.key(""))
    data: list[ListedObject] = []
    commits: dict[int | None, ListedObject] = {}
    manifests: dict[int | None, list[str]] = {}
    metrics = False
    newest: float | None = None
    control: dict[str, ListedObject] = {}
    for found in objects:
        path = found.key[skip:]
        rank = rank_of_metadata(path)
        save_id = parse_manifest_object(path)
        if path == METADATA or rank is not None:
            commits[rank] = found
        elif save_id is not None:
            match = _RANK_MANIFEST.fullmatch(path)
            manifests.setdefault(int(match[1]) if match else None, []).append(save_id)
        elif path == METRICS:
            metrics = True
        elif path.endswith(DATA_SUFFIX):
            data.append(found)
        if path.startswith(CONTROL_PREFIX):
            control[path] = found
        newest = max(newest or 0.0, found.modified_at)
    sorted_manifests = {rank: tuple(ids) for rank, ids in manifests.items()}
    return Contents(tuple(data), commits, sorted_manifests, metrics, newest, control)


def with_marks(info: CheckpointInfo, contents: Contents) -> CheckpointInfo:
    """The checkpoint with what the names and times in its listing say besides: pin, leases, deletions, its commit."""
    leases = [
        found.modified_at + seconds
        for path, found in contents.control.items()
        if (seconds := parse_lease_object(path)) is not None
    ]
    deletions = {each for path in contents.control if (each := parse_deletion_object(path)) is not None}
    commits = contents.commits.values() if info.committed else ()
    metadata = contents.commits.get(None)
    return replace(
        info,
        pinned=PIN in contents.control,
        leased_until=max(leases, default=None),
        deletions=tuple(sorted(deletions)),
        modified_at=max((found.modified_at for found in commits), default=contents.newest),
        etag=metadata.etag if metadata else None,
    )


def in_grace(info: CheckpointInfo, *, now: float, grace: float) -> CheckpointInfo:
    """An incomplete checkpoint as ``in_progress`` or ``leftover``; others as they are.

    Args:
        info: the checkpoint.
        now: seconds since the epoch, on the clock of S3.
        grace: seconds after its newest object for which a save counts as in progress.
    """
    if info.state != "incomplete":
        return info
    young = info.modified_at is None or now - info.modified_at < grace
    return replace(info, state="in_progress" if young else "leftover")


def with_step(info: CheckpointInfo, patterns: Sequence[re.Pattern[str]]) -> CheckpointInfo:
    """The checkpoint with the step that ``patterns`` find in its name. Without patterns it keeps the one it has."""
    return replace(info, step=step_by_patterns(info.name, patterns)) if patterns else info


def with_metrics(info: CheckpointInfo, added: AddedMetrics) -> CheckpointInfo:
    """The checkpoint with metrics that came after the save, if they are of this save."""
    identity = info.save_id or info.etag
    return replace(info, metrics={**info.metrics, **added.metrics}) if identity and added.of == identity else info


def from_manifest(url: CheckpointURL, manifest: Manifest) -> CheckpointInfo:
    """A committed checkpoint with the manifest that its ``.metadata`` names."""
    return CheckpointInfo(
        url=str(url),
        name=url.name,
        state="committed",
        step=step_of(url.name),
        created_at=manifest.created_at,
        world_size=manifest.world_size,
        objects=len(manifest.objects),
        size=manifest.total_size,
        metrics=manifest.metrics,
        save_id=manifest.save_id,
    )


def from_contents(url: CheckpointURL, contents: Contents, *, committed_at: float | None) -> CheckpointInfo:
    """A checkpoint without a manifest: a foreign one, or one that was never committed (``committed_at`` None)."""
    skip = len(url.key(""))
    ours = bool(contents.control) or any(
        _OUR_DATA.fullmatch(found.key[skip:].rpartition("/")[2]) for found in contents.data
    )
    return CheckpointInfo(
        url=str(url),
        name=url.name,
        state="incomplete" if committed_at is None else "committed",
        step=step_of(url.name),
        created_at=contents.newest if committed_at is None else committed_at,
        world_size=None,
        objects=len(contents.data),
        size=contents.size,
        foreign=not ours if committed_at is None else True,
    )


def from_rank_manifests(url: CheckpointURL, contents: Contents, manifests: Mapping[int, Manifest]) -> CheckpointInfo:
    """A save without collectives.

    The manifest that was written last says how many ranks there must be. It is committed if each of them has
    committed and says the same: after a save that was to overwrite another with a different number of ranks, and
    was cut off, they do not. Where there are no manifests at all (other writers'), it is committed if no rank is
    missing. What can not be told has ``damage``.

    Args:
        url: of the checkpoint.
        contents: its listing.
        manifests: by rank; a rank whose manifest cannot be told is left out, and is then not committed.
    """
    by_rank = {rank: found for rank, found in contents.commits.items() if rank is not None}
    if not manifests:
        if not any(rank in contents.manifests for rank in by_rank) and _no_rank_missing(url, contents, by_rank):
            return from_contents(url, contents, committed_at=max(found.modified_at for found in by_rank.values()))
        return replace(from_contents(url, contents, committed_at=None), damage=_untold(by_rank, manifests))
    last = max(manifests.values(), key=lambda manifest: manifest.created_at)
    ranks = range(last.world_size)
    committed = bool(ranks) and all(
        rank in contents.commits and rank in manifests and manifests[rank].world_size == last.world_size
        for rank in ranks
    )
    written = [manifests[rank] for rank in ranks if rank in manifests]
    return CheckpointInfo(
        url=str(url),
        name=url.name,
        state="committed" if committed else "incomplete",
        step=step_of(url.name),
        created_at=last.created_at if committed else contents.newest,
        world_size=last.world_size,
        objects=sum(len(manifest.objects) for manifest in written) if committed else len(contents.data),
        size=sum(manifest.total_size for manifest in written) if committed else contents.size,
        metrics={name: value for manifest in reversed(written) for name, value in manifest.metrics.items()},
        save_id=written[0].save_id if committed else None,
        damage=None if committed else _untold(by_rank, manifests),
    )


def _no_rank_missing(url: CheckpointURL, contents: Contents, commits: Collection[int]) -> bool:
    """Whether ranks 0 to n have committed, and no other has data there."""
    skip = len(url.key(""))
    writers = {int(match[1]) for found in contents.data if (match := _RANK_DATA.fullmatch(found.key[skip:]))}
    return bool(commits) and set(range(len(commits))) == set(commits) and writers <= set(commits)


def _untold(commits: Collection[int], manifests: Mapping[int, Manifest]) -> str | None:
    """Why it can not be told whether all ranks have committed; None if some certainly have not."""
    unknown = sorted(set(commits) - set(manifests))
    if unknown:
        return f"it may be complete: the manifest of rank {unknown[0]} is missing or can not be read"
    for size in sorted({manifest.world_size for manifest in manifests.values()}):
        if all(rank in commits and rank in manifests and manifests[rank].world_size == size for rank in range(size)):
            return f"it may be complete: {size} ranks say so, and others do not"
    return None
