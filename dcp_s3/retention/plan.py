"""The plan: what a prune keeps and deletes, and all the reasons. Pure.

Whatever the policies say, these are kept (the floors):

- the newest committed checkpoint: the one with the highest step (`latest`), and the last committed one if that is
  another; also the newest of those not known to be damaged, by either order;
- pinned checkpoints, and those with a reader's lease that has not ended;
- a checkpoint that is being saved: it has no commit, and its newest object or open upload is younger than the grace
  period; or one that is being overwritten, by the same rule;
- those whose commit waits in this host's spill directory;
- those of ranks that committed for themselves, if nobody can tell whether all ranks did;
- committed ones without a step: retention thins out a sequence, and they have no place in it.

Foreign checkpoints (other writers') are treated like ours. Without a policy, every committed one is kept.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from dcp_s3.checkpoint.directory import LEASE_MARGIN
from dcp_s3.checkpoint.info import CheckpointInfo, LeftoverObject, age_order
from dcp_s3.format.layout import CONTROL_PREFIX
from dcp_s3.retention.policy import PolicyFunction, run_policy
from dcp_s3.store import Upload
from dcp_s3.units import format_size, one_line, plural

Action = Literal["keep", "delete"]

BOARDS = CONTROL_PREFIX.rstrip("/")
"""Directory under the root with boards: objects through which ranks of a run tell each other something."""
BOARDS_STAY = 86400.0
"""Seconds for which ranks may look at a board. Younger ones are not left over."""


@dataclass(frozen=True)
class OpenUpload(Upload):
    """A multipart upload that is neither completed nor aborted."""

    checkpoint: str = ""
    """Name of the directory under the root in which its object would lie."""


@dataclass(frozen=True)
class Decision:
    """Whether a checkpoint is kept or deleted, and why.

    >>> CheckpointCatalog("s3://bucket/run").scan().plan(KeepLatest(1), grace=86400).decisions[1].reasons
    ('the newest committed checkpoint', 'the last one that was committed', 'latest:1, number 1')
    """

    checkpoint: CheckpointInfo
    """The checkpoint, as the catalog saw it."""
    action: Action
    """``keep`` or ``delete``."""
    reasons: tuple[str, ...]
    """All reasons to keep it, floors first, then policies; or why it is deleted."""


@dataclass(frozen=True)
class UnfinishedDeletion:
    """A deletion that was begun and cut off. Only what its list (`layout.deletion_object`) names is still to delete."""

    checkpoint: str
    """Name of the directory under the root."""
    deletion: str
    """Id of the deletion (`layout.deletion_id`)."""


@dataclass(frozen=True)
class Plan:
    """Everything that a prune would do.

    >>> plan = CheckpointCatalog("s3://bucket/run").scan().plan(KeepLatest(1), grace=86400)
    >>> [info.step for info in plan.kept], [info.step for info in plan.deleted]
    ([2000], [1000])
    """

    now: float
    """Time of the plan, in seconds since the epoch, on the clock of S3."""
    grace: float
    """Grace period in seconds."""
    decisions: tuple[Decision, ...]
    """One decision per checkpoint, oldest first (`age_order`)."""
    uploads: tuple[OpenUpload, ...] = ()
    """Multipart uploads to abort, by key."""
    leftovers: tuple[LeftoverObject, ...] = ()
    """Objects to delete in the directories of committed checkpoints, also of those that are deleted, by key."""
    unfinished: tuple[UnfinishedDeletion, ...] = ()
    """Deletions to finish."""

    def __repr__(self) -> str:
        size = sum(info.size or 0 for info in self.deleted)
        counts = {"uploads": self.uploads, "leftovers": self.leftovers, "unfinished": self.unfinished}
        return one_line(
            "Plan", f"{len(self.kept)} kept", f"{len(self.deleted)} to delete ({format_size(size)})",
            **{name: len(found) or None for name, found in counts.items()},
        )  # fmt: skip

    @property
    def kept(self) -> tuple[CheckpointInfo, ...]:
        """Checkpoints that stay."""
        return tuple(found.checkpoint for found in self.decisions if found.action == "keep")

    @property
    def deleted(self) -> tuple[CheckpointInfo, ...]:
        """Checkpoints to delete."""
        return tuple(found.checkpoint for found in self.decisions if found.action == "delete")

    @property
    def empty(self) -> bool:
        """Whether there is nothing to do."""
        return not any((self.deleted, self.uploads, self.leftovers, self.unfinished))

    @property
    def freed(self) -> int:
        """Bytes of the data objects that would be deleted, as far as known."""
        return sum(info.size or 0 for info in self.deleted) + sum(left.size for left in self.leftovers)

    def to_dict(self) -> dict[str, Any]:
        """The fields, for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class CatalogSnapshot:
    """The contents of a root at one time.

    >>> CheckpointCatalog("s3://bucket/run").scan()
    CatalogSnapshot('s3://bucket/run', 2 checkpoints)
    """

    root: str
    """URL of the root."""
    now: float
    """Seconds since the epoch, on the clock of S3, from before anything else was looked at."""
    checkpoints: tuple[CheckpointInfo, ...]
    """Checkpoints, oldest first (`age_order`)."""
    uploads: tuple[OpenUpload, ...] = ()
    """Open multipart uploads of data objects in directories right under the root, by key."""
    leftovers: tuple[LeftoverObject, ...] = ()
    """Objects in committed checkpoints' directories that the checkpoints do not need, and old messages between ranks
    (``board-*``), by key."""

    def __repr__(self) -> str:
        counts = {"uploads": len(self.uploads) or None, "leftovers": len(self.leftovers) or None}
        return one_line("CatalogSnapshot", repr(self.root), f"{plural(len(self.checkpoints), 'checkpoint')}", **counts)

    def plan(self, policy: PolicyFunction | None, *, grace: float) -> Plan:
        """What a prune would do.

        Args:
            policy: decides which committed checkpoints to keep (SettingsError if it fails); None keeps all of them.
            grace: seconds for which an uncommitted checkpoint counts as a save in progress.
        """
        now, since, infos = self.now, self.now - grace, sorted(self.checkpoints, key=age_order)
        committed = [info for info in infos if info.committed]
        # Directories that have something written after `since` count as being saved to.
        written = "a save is in progress: an object was written within the grace period"
        active: dict[str, str] = {}
        for upload in self.uploads:
            if upload.initiated_at > since:
                active[upload.checkpoint] = "a save is in progress: an upload was begun within the grace period"
        for leftover in self.leftovers:
            if leftover.modified_at > since and not leftover.is_lease and leftover.checkpoint != BOARDS:
                active[leftover.checkpoint] = written
        for info in infos:
            newest = info.modified_at
            if info.state == "committed":  # a newer object is of a save in progress, or of a copy
                newest = info.written_at if (info.written_at or 0.0) > (info.modified_at or 0.0) else -math.inf
            if info.waiting or info.state == "local":
                active[info.name] = "its commit waits in this host's spill directory"
            elif newest is None or newest > since:
                active[info.name] = written
        kept = _floors(infos, committed, active, now)
        found = {info.name: ["no policy"] for info in committed}
        if policy is not None:
            found = run_policy(policy, committed, now)
        why = {True: "no policy keeps it", False: "left over: not committed, and older than the grace period"}
        decisions: list[Decision] = []
        unfinished: list[UnfinishedDeletion] = []
        for info in infos:
            reasons, is_there = (*kept[info.name], *found.get(info.name, ())), info.committed
            decisions.append(Decision(info, "keep" if reasons else "delete", reasons or (why[is_there],)))
            for each in info.deletions:
                if not (is_there and each == info.deletion_id):  # that one was given up
                    unfinished += [UnfinishedDeletion(info.name, each)]
        uploads = [each for each in self.uploads if each.checkpoint not in active]
        leftovers = [
            left
            for left in self.leftovers
            if (left.modified_at < since if left.checkpoint == BOARDS else left.checkpoint not in active)
        ]
        return Plan(now, grace, tuple(decisions), tuple(uploads), tuple(leftovers), tuple(unfinished))


def _floors(
    infos: Sequence[CheckpointInfo], committed: Sequence[CheckpointInfo], active: Mapping[str, str], now: float
) -> dict[str, list[str]]:
    """Reasons to keep each checkpoint whatever the policies say, by name. All are in `age_order`."""
    kept: dict[str, list[str]] = {info.name: [] for info in infos}
    times = {info.name: info.modified_at for info in committed if not math.isnan(info.modified_at or 0.0)}
    by_time = sorted(committed, key=lambda info: times.get(info.name) or -math.inf)  # stable: then by age
    for candidates, why, of_good in (
        (committed, "the newest committed checkpoint", "the newest checkpoint that is not known to be damaged"),
        (by_time, "the last one that was committed", "the last one that was committed and is not known to be damaged"),
    ):
        good = [info for info in candidates if info.damage is None]
        if candidates:
            kept[candidates[-1].name].append(why)
        if good and not kept[good[-1].name]:
            kept[good[-1].name].append(of_good)
    for info in infos:
        reasons = kept[info.name]
        if info.pinned:
            reasons.append(f"pinned ({info.pin_reason})" if info.pin_reason else "pinned")
        if info.leased_until is not None and now < info.leased_until + LEASE_MARGIN:
            reasons.append(f"a reader has a lease for {max(0.0, info.leased_until - now):.0f} s more")
        if info.name in active:
            reasons.append(active[info.name])
        if info.state == "committed":
            if info.step is None:
                reasons.append("has no step, so no place in the sequence that policies thin out")
        elif info.damage is not None:
            reasons.append(info.damage)
    return kept
