"""Which checkpoint to restore: one on S3, or one that waits for S3 on the disks of the job's hosts."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from dcp_s3 import errors
from dcp_s3.checkpoint.directory import Directory, list_directory
from dcp_s3.checkpoint.info import CheckpointInfo, age_order
from dcp_s3.checkpoint.look import find_damage, tell_unreadable
from dcp_s3.format.control_files import Manifest, ObjectEntry
from dcp_s3.retention.catalog import CheckpointCatalog
from dcp_s3.retention.policy import AnyOf, KeepBest, Mode, PolicyFunction, best_first
from dcp_s3.settings import Settings
from dcp_s3.spill.local import find_commits, find_kept, find_waiting
from dcp_s3.spill.store import open_store
from dcp_s3.url import parse_url

logger = logging.getLogger(__name__)

Order = Callable[[Sequence[CheckpointInfo]], list[CheckpointInfo]]
"""Selects and sorts checkpoints: the one to try first comes first."""

_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.1, 2.0  # seconds between requests to S3 while a restore waits
_REPORT_SECONDS = 30.0
_ATTEMPTS = 3  # attempts for an S3 request that the disks may answer too


class ChosenCheckpoint(NamedTuple):
    """The checkpoint to load."""

    url: str
    step: int
    local: bool = False
    """Whether it is loaded from the disks: every rank has all of it on its own. It may not be on S3 yet."""


@dataclasses.dataclass(frozen=True)
class NotReady:
    """The checkpoint to load waits on disks. It can be loaded once it is on S3."""

    url: str
    """URL of the checkpoint."""
    step: int
    """Step of the checkpoint."""
    reason: str
    """Why it cannot be loaded now."""


class Patience:
    """Limits how long a restore waits for data that drains from the disks to S3: to ``seconds`` without progress."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._began = self._moved = time.monotonic()
        self._reported: float | None = None
        self._seen: tuple[int, int] | None = None
        self._pause = _SHORTEST_PAUSE

    def is_left(self, disks: Sequence[Disk]) -> bool:
        """Whether to keep waiting, given the current state of the disks."""
        now, seen = time.monotonic(), (sum(disk.size for disk in disks), sum(len(disk.commits) for disk in disks))
        if seen != self._seen:
            self._seen, self._moved = seen, now
        return now - self._moved <= self._seconds

    def pause(self, reason: NotReady, *, quiet: bool) -> None:
        """Wait a moment, and log why from time to time, unless ``quiet``."""
        now = time.monotonic()
        if quiet:
            pass
        elif self._reported is None or now - self._reported >= _REPORT_SECONDS:
            self._reported = now
            logger.warning("restore waits (for %.0f s now) for %s: %s", now - self._began, reason.url, reason.reason)
        time.sleep(self._pause)
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)


def latest_order(infos: Iterable[CheckpointInfo]) -> list[CheckpointInfo]:
    """Highest step first. Checkpoints without a step are not of the run, and are left out."""
    return sorted((info for info in infos if info.step is not None), key=age_order, reverse=True)


def step_order(step: int) -> Order:
    """Only the checkpoints of one step, the newest first."""
    return lambda infos: [info for info in latest_order(infos) if info.step == step]


def best_order(metric: str, mode: Mode) -> Order:
    """Checkpoints with a finite value of a metric, the best first."""
    return lambda infos: best_first(latest_order(infos), metric, mode)


def best_of(policy: PolicyFunction | None, metric: str | None, mode: Mode | None) -> tuple[str, Mode]:
    """What "best" means: the arguments, or else the `KeepBest` of the retention policy. Of a metric without a mode:
    that of its `KeepBest`, else ``min``.

    Raises:
        SettingsError: there is no `KeepBest`, or several that differ.
    """
    parts = policy.policies if isinstance(policy, AnyOf) else (policy,)
    found = {(part.metric, part.mode) for part in parts if isinstance(part, KeepBest)}
    if metric is not None:
        modes = {kept for name, kept in found if name == metric}
        return metric, mode or (modes.pop() if len(modes) == 1 else "min")
    if len(found) != 1:
        why = f"there are several KeepBest in the retention policy: {sorted(found)}" if found else (
            "there is no KeepBest in the retention policy"
        )  # fmt: skip
        raise errors.SettingsError(f"which checkpoint is the best? {why}. Remedy: pass metric='val_loss', mode='min'")
    return found.pop()


def find(
    catalog: CheckpointCatalog,
    order: Order,
    *,
    passed_over: Collection[str] = (),
    disks: Sequence[Disk] = (),
    wait: bool = True,
) -> ChosenCheckpoint | NotReady | None:
    """The first checkpoint in ``order`` that can be loaded. None if the run has no checkpoints.

    Args:
        order: selects and sorts the checkpoints.
        passed_over: URLs of checkpoints that could not be loaded.
        disks: what each rank has on its disk.
        wait: return a checkpoint that still waits on disks for S3, rather than pass it over.

    Raises:
        CheckpointNotFoundError: there are checkpoints, but none that ``order`` selects.
        CorruptCheckpointError: the selected checkpoints cannot be loaded.
        StorageError
    """
    waiting = waiting_checkpoints(disks)
    listing = CheckpointCatalog(str(catalog.root), settings=impatient(catalog.settings)) if waiting else catalog
    unusable: set[str] = set(passed_over)
    not_ready: NotReady | None = None
    damages: dict[str, str] = {}
    while True:
        away: errors.TransferError | None = None
        try:
            on_s3 = [info for info in listing.checkpoints() if info.committed and info.step is not None]
        except errors.TransferError as error:
            if not waiting:
                raise
            on_s3, away = [], error
            logger.warning("S3 does not answer, so only the disks of this job were searched: %s", error)
        committed = {(info.url, info.save_id) for info in on_s3}
        local = {each.info: each for each in waiting if each.key not in committed and each.info.step is not None}
        there = [*on_s3, *local]
        asked = order(there)
        left = [info for info in asked if info.url not in unusable]
        if not asked and there and not unusable and away is None:
            raise _none_asked_for(catalog, there)
        if not left:
            break
        for info in left:
            found: ChosenCheckpoint | NotReady | None
            if info in local:
                found = _try_local(listing, local[info], disks, away)
            elif damage := find_damage(catalog.store, parse_url(info.url)):
                damages[info.url], found = damage, None
            else:
                found = ChosenCheckpoint(info.url, info.step or 0)
            if isinstance(found, NotReady) and not wait:
                logger.warning("%s is passed over: %s", info.url, found.reason)
                not_ready, found = not_ready or found, None
            if found is not None:
                tell_unreadable(damages, found.url)
                return found
            unusable.add(info.url)
        # A prune may have deleted them meanwhile: then there are newer ones.
    tell_unreadable(damages, None)
    if away is not None:
        raise away if not_ready is None else errors.TransferError(
            f"{not_ready.url} cannot be restored: {not_ready.reason}", bucket=away.bucket, key=away.key
        ) from away  # fmt: skip
    if unusable:
        raise errors.CorruptCheckpointError(
            f"there are checkpoints under {catalog.root}, and none of those asked for can be loaded: "
            f"{', '.join(sorted(unusable))}. Remedy: `dcp-s3 verify` says what is wrong with each",
            url=str(catalog.root),
        )
    return None


def impatient(settings: Settings) -> Settings:
    """Settings for requests that are repeated anyway, or that the disks can answer too."""
    attempts = min(_ATTEMPTS, settings.retry_attempts)
    names = ("connect_timeout", "read_timeout")
    timeouts = {name: min(getattr(settings, name), settings.spill_after) for name in names}
    return settings.model_copy(update={**timeouts, "retry_attempts": attempts})


def _none_asked_for(catalog: CheckpointCatalog, there: Sequence[CheckpointInfo]) -> errors.CheckpointNotFoundError:
    steps = sorted({info.step for info in there if info.step is not None})
    return errors.CheckpointNotFoundError(
        f"none of the {len(there)} committed checkpoints under {catalog.root} is what was asked for (steps "
        f"{steps[0]} to {steps[-1]}). Remedy: `dcp-s3 ls {catalog.root}` shows their steps and metrics",
        url=str(catalog.root),
    )


def _try_local(
    catalog: CheckpointCatalog, waiting: WaitingCheckpoint, disks: Sequence[Disk], away: errors.TransferError | None
) -> ChosenCheckpoint | NotReady | None:
    """None: parts of the checkpoint are lost."""
    info = waiting.info
    url, step = parse_url(info.url), info.step or 0
    if all(disk.holds_all_of(waiting) for disk in disks):
        return ChosenCheckpoint(info.url, step, local=True)
    what = "it waits on disk to be committed, and not every rank has all of it on its own"
    if away is None:
        try:
            missing = find_missing(waiting, disks, list_directory(catalog.store, url))
        except errors.TransferError as error:
            away = error
        else:
            if not missing:
                return NotReady(info.url, step, f"{what}: it is being uploaded to S3")
            logger.warning(
                "%s is passed over: it waits on disk to be committed, but %d of its %d objects, the first %s, are "
                "neither on S3 nor on a disk of this job",
                info.url,
                len(missing),
                len(waiting.objects),
                missing[0],
            )
            return None
    return NotReady(info.url, step, f"{what}, but S3 does not answer: {away}")


# --- what waits on the disks of the job's hosts ---------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class WaitingCheckpoint:
    """A checkpoint that was saved completely, but is not committed on S3 yet."""

    info: CheckpointInfo
    """The catalog's entry; its ``state`` is ``local``."""
    objects: tuple[ObjectEntry, ...]
    """Every data object of all ranks."""

    @property
    def key(self) -> tuple[str, str | None]:
        """URL and save id."""
        return self.info.url, self.info.save_id


@dataclasses.dataclass(frozen=True)
class Disk:
    """What one rank finds in its spill directory for the checkpoints under a root."""

    commits: tuple[WaitingCheckpoint, ...] = ()
    """Checkpoints whose commit waits there."""
    files: Mapping[tuple[str, str], int] = dataclasses.field(default_factory=dict)
    """Size in bytes of each data object there, by (URL, path in the checkpoint)."""
    size: int = 0
    """Bytes that wait for S3."""

    def holds_all_of(self, checkpoint: WaitingCheckpoint) -> bool:
        """Whether this rank can load the checkpoint without S3."""
        return any(each.key == checkpoint.key for each in self.commits) and not self.lacks(checkpoint)

    def lacks(self, checkpoint: WaitingCheckpoint) -> list[ObjectEntry]:
        """The checkpoint's data objects that are not on this disk."""
        url = checkpoint.info.url
        return [entry for entry in checkpoint.objects if self.files.get((url, entry.path)) != entry.size]


def look_at_disk(catalog: CheckpointCatalog) -> Disk:
    """What waits in this process's spill directory under the catalog's root. Nothing is changed."""
    store = open_store(catalog.settings)
    if store is None:
        return Disk()
    # Read before the files: a checkpoint that is drained meanwhile then lacks files, and is looked for on S3.
    manifests = {
        journal.url: Manifest.from_json(data)
        for journal, data, _ in find_commits(store)
        if journal.commit is not None and journal.commit.rank is None
    }
    infos = {info.url: info for info in catalog.local()}
    commits = tuple(
        WaitingCheckpoint(infos[url], tuple(manifest.objects))
        for url, manifest in manifests.items()
        if url in infos and infos[url].save_id == manifest.save_id
    )
    root = f"{catalog.root}/"
    waiting = {(facts.url, facts.path): facts.size for _, facts in find_waiting(store) if facts.url.startswith(root)}
    wanted = {checkpoint.info.url for checkpoint in commits}
    kept = {
        (facts.url, facts.path): facts.size for path, facts in find_kept(store) if facts.url in wanted and path.exists()
    }
    return Disk(commits, {**kept, **waiting}, sum(waiting.values()))


def waiting_checkpoints(disks: Iterable[Disk]) -> list[WaitingCheckpoint]:
    """The checkpoints that wait on any of the disks, each once."""
    found = {each.key: each for disk in disks for each in disk.commits}
    return list(found.values())


def find_missing(checkpoint: WaitingCheckpoint, disks: Sequence[Disk], on_s3: Directory) -> list[str]:
    """The data objects that are neither on S3 nor on a disk of this job's ranks: without them the checkpoint cannot
    become complete."""
    missing = set(on_s3.lacking({entry.path: entry.size for entry in checkpoint.objects}, exact=True))
    for disk in disks:
        missing &= {entry.path for entry in disk.lacks(checkpoint)}
    return sorted(missing)
