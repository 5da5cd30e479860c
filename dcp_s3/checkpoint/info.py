"""A summary of one checkpoint, drawn from its directory and manifests. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from itertools import chain
from typing import Any, Literal

from dcp_s3.checkpoint.directory import CONTROL_KINDS, Directory, DirectoryEntry
from dcp_s3.format.control_files import Manifest
from dcp_s3.format.layout import What, deletion_id, step_of
from dcp_s3.units import format_size, one_line
from dcp_s3.url import CheckpointURL

State = Literal["committed", "incomplete", "in_progress", "leftover", "local"]


@dataclass(frozen=True)
class CheckpointInfo:
    """A checkpoint under a root.

    >>> latest("s3://bucket/run")
    CheckpointInfo('s3://bucket/run/step-00002000', committed, ... KiB, step=2000, metrics={'val_loss': 1.5})
    """

    url: str
    """``s3://...`` of the checkpoint."""
    name: str
    """Last part of the URL."""
    state: State
    """``committed`` if it has what makes it a checkpoint (``.metadata``, or that of every rank); ``local`` if its
    commit waits in this host's spill directory; otherwise ``incomplete``, in a catalog ``in_progress`` or, after its
    grace period, ``leftover``."""
    step: int | None
    """Training step, from the name; None if the name has no number."""
    created_at: float | None
    """Seconds since the epoch when it was committed, or else last written to."""
    world_size: int | None
    """Number of ranks that wrote it; None if not recorded."""
    objects: int | None
    """Number of its data objects."""
    size: int | None
    """Bytes of its data objects."""
    metrics: dict[str, Any] = field(default_factory=dict, hash=False)
    """The user's metrics as saved, overridden by those of `annotate`."""
    foreign: bool = False
    """Whether something other than dcp_s3 wrote it: it has no manifest."""
    save_id: str | None = None
    """Id of the save that committed it; None if it is foreign or not committed. Without collectives, the lowest rank's
    id."""
    etag: str | None = None
    """ETag of ``.metadata``, with quotes; None if there is none."""
    modified_at: float | None = None
    """Seconds since the epoch on the clock of S3 when ``.metadata`` was written, or without it the newest object."""
    written_at: float | None = None
    """Seconds since the epoch on the clock of S3 when the newest data object in its directory was written; None if
    those were not listed."""
    pinned: bool = False
    """Whether `pin` protects it."""
    leased_until: float | None = None
    """Seconds since the epoch on the clock of S3 when the last reader's lease ends; None without a lease."""
    waiting: bool = False
    """Whether a commit to this URL waits in this host's spill directory."""
    deletions: tuple[str, ...] = ()
    """Ids (`layout.deletion_id`) of deletions that were begun and not finished."""
    damage: str | None = None
    """Why it cannot be loaded; None if no damage is known. If it is not committed: why nobody can tell whether it is,
    so that it may be a checkpoint."""
    pin_reason: str | None = None
    """Why it is pinned, if `pin` was told."""
    extra: dict[str, Any] = field(default_factory=dict, hash=False)
    """What else the user stored with the save (``extra=``)."""
    started_at: float | None = None
    """Seconds since the epoch when its save began; None if not recorded."""

    def __repr__(self) -> str:
        facts = [] if self.size is None else [format_size(self.size)]
        return one_line(
            "CheckpointInfo", repr(self.url), self.state, *facts, step=self.step, damage=self.damage,
            pinned=self.pinned or None, metrics=self.metrics or None, extra=self.extra or None,
        )  # fmt: skip

    @property
    def committed(self) -> bool:
        """Whether ``state`` is ``committed``."""
        return self.state == "committed"

    @property
    def deletion_id(self) -> str:
        """The id of a deletion of this checkpoint (`layout.deletion_id`)."""
        return deletion_id(self.save_id, self.etag)

    def to_dict(self) -> dict[str, Any]:
        """The fields, for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class LeftoverObject:
    """An object in a committed checkpoint's directory that the checkpoint does not need."""

    key: str
    size: int
    """Bytes."""
    modified_at: float
    """Seconds since the epoch, on the clock of S3."""
    checkpoint: str
    """Name of the directory under the root."""
    is_lease: bool = False
    """Whether it is a reader's lease that has ended, not part of a save."""
    etag: str = ""
    """ETag as S3 gave it, with quotes; empty if it gave none."""


@dataclass(frozen=True)
class Deletion:
    """The objects that were deleted from one checkpoint's directory."""

    name: str
    """Name of the checkpoint."""
    objects: int
    """Number of objects, without the deletion's list."""
    size: int
    """Bytes."""

    @classmethod
    def of(cls, name: str, gone: Iterable[DirectoryEntry | LeftoverObject]) -> Deletion:
        sizes = [each.size for each in gone]
        return cls(name, len(sizes), sum(sizes))


def age_order(info: CheckpointInfo) -> tuple[bool, int, float, str]:
    """Sort key: by step (those without one first), then by time, then by name."""
    created = info.created_at or 0.0
    return (info.step is not None, info.step or 0, 0.0 if math.isnan(created) else created, info.name)


def summarize(url: CheckpointURL, directory: Directory, manifests: Mapping[int | None, Manifest]) -> CheckpointInfo:
    """The summary of a directory: a checkpoint with ``.metadata``, one of ranks that committed for themselves, as torch
    and earlier versions do without collectives, or one that was never committed.

    That of ranks is committed if ranks 0 to n - 1 are there and each manifest says n; without manifests (other
    writers'), if no rank is missing. Otherwise it has ``damage``: nobody can tell whether it is complete.

    Args:
        manifests: manifests of the commits by rank, as far as they are clear and can be read.
    """
    ranks, damage, committed = directory.ranks, None, None in directory.commits
    name, objects = url.name, directory.objects.values()
    written = [manifests[rank] for rank in directory.committing if rank in manifests]
    if ranks and not committed:
        if written or directory.manifests.keys() & set(ranks):
            committed = ranks == [*range(len(written))] and {each.world_size for each in written} == {len(ranks)}
        else:
            # Data in a directory below counts, unless that is a checkpoint itself: other writers may put theirs there.
            nested = (each for each in objects if each.kind.what is What.NESTED_DATA)
            below = [each for each in nested if each.kind.below not in directory.nested]
            writers = {each.kind.rank for each in (*directory.data.values(), *below)} - {None}
            committed = ranks == [*range(len(ranks))] and writers <= set(ranks)
        if not committed:
            damage = "it may be complete: ranks, or manifests of ranks, are missing, cannot be read, or disagree"
    written = written if committed else []
    ours = any(each.kind.nonce or each.kind.what in CONTROL_KINDS for each in objects)
    dated = directory.commits.values() if committed else objects
    modified_at = max((each.modified_at for each in dated), default=None)
    sizes = [each.size for each in (chain(*(each.objects for each in written)) if written else directory.data.values())]
    metadata = directory.commits.get(None)
    return CheckpointInfo(
        url=str(url),
        name=name,
        state="committed" if committed else "incomplete",
        step=step_of(name),
        created_at=max((each.created_at for each in written), default=modified_at),
        world_size=written[0].world_size if written else None,
        objects=len(sizes),
        size=sum(sizes),
        metrics={metric: value for each in reversed(written) for metric, value in each.metrics.items()},
        foreign=not written and (committed or not ours),
        save_id=written[0].save_id if written else None,
        etag=metadata.etag if metadata else None,
        modified_at=modified_at,
        pinned=directory.pin is not None,
        leased_until=max((found.modified_at + found.kind.seconds for found in directory.leases), default=None),
        deletions=tuple(sorted(directory.deletions)),
        damage=damage,
        extra=written[0].extra if written else {},
        started_at=min((each.started_at for each in written if each.started_at is not None), default=None),
    )
