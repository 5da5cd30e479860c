"""Which checkpoint to restore: one on S3, or one that waits for S3 on the disks of the job's hosts."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from dcp_s3 import errors
from dcp_s3.checkpoint.directory import list_directory
from dcp_s3.checkpoint.info import CheckpointInfo, age_order
from dcp_s3.checkpoint.look import find_damage, tell_unreadable
from dcp_s3.coordination.processes import settle_saves
from dcp_s3.failures import name_failed
from dcp_s3.format.control_files import ObjectEntry
from dcp_s3.format.layout import METADATA
from dcp_s3.manager.agree import Failures, Ranks
from dcp_s3.retention.catalog import CheckpointCatalog
from dcp_s3.retention.policy import AnyOf, KeepBest, Mode, PolicyFunction, best_first
from dcp_s3.settings import Settings
from dcp_s3.spill.drain import drain_in_background
from dcp_s3.spill.store import open_store
from dcp_s3.url import parse_url

logger = logging.getLogger(__name__)

Order = Callable[[Sequence[CheckpointInfo]], list[CheckpointInfo]]
"""Selects and sorts checkpoints: the one to try first comes first."""

DRAIN_TIMEOUT = 600.0
"""Seconds without progress for which a restore waits for what drains from disks to S3."""
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.1, 2.0  # seconds between requests to S3 while a restore waits
_REPORT_SECONDS = 30.0
_ATTEMPTS = 3  # attempts for an S3 request that the disks may answer too


class ChosenCheckpoint(NamedTuple):
    """The checkpoint to load."""

    url: str
    step: int
    local: bool = False
    """Whether it is loaded from the disks: every rank has all of it on its own. It may not be on S3 yet."""
    reason: str = ""
    """Why it cannot be loaded now: it waits on disks, and can be loaded once it is on S3. Empty: it can."""


def latest_order(infos: Iterable[CheckpointInfo]) -> list[CheckpointInfo]:
    """Highest step first. Checkpoints without a step are not of the run, and are left out."""
    return sorted((info for info in infos if info.step is not None), key=age_order, reverse=True)


def step_order(step: int) -> Order:
    """Only the checkpoints of one step, the newest first."""
    return lambda infos: [info for info in latest_order(infos) if info.step == step]


def best_order(policy: PolicyFunction | None, metric: str | None, mode: Mode | None) -> Order:
    """Checkpoints with a finite value of a metric, the best first. What is not given is that of the `KeepBest` in the
    retention policy; the mode else ``min``. A SettingsError if there is none to name the metric, or several differ."""
    parts = policy.policies if isinstance(policy, AnyOf) else (policy,)
    kept = {(part.metric, part.mode) for part in parts if isinstance(part, KeepBest)}
    kept = {each for each in kept if metric in (None, each[0])}
    if metric is None and len(kept) != 1:
        why = f"there are several KeepBest in the retention policy: {sorted(kept)}" if kept else (
            "there is no KeepBest in the retention policy"
        )  # fmt: skip
        raise errors.SettingsError(f"which checkpoint is the best? {why}. Remedy: pass metric='val_loss', mode='min'")
    name, found = kept.pop() if len(kept) == 1 else (metric or "", "min")
    return lambda infos: best_first(latest_order(infos), name, mode or found)


def find(
    catalog: CheckpointCatalog,
    order: Order,
    *,
    passed_over: Collection[str] = (),
    disks: Sequence[Disk] = (),
    wait: bool = True,
    finish: bool = False,
) -> ChosenCheckpoint | None:
    """The first checkpoint in ``order`` that can be loaded, but for the URLs that were ``passed_over``. None if the run
    has none, a CheckpointNotFoundError if ``order`` selects none of them, a CorruptCheckpointError if none of those can
    be loaded. ``wait``: return one that still waits on ``disks`` (of each rank) for S3, rather than pass it over.
    ``finish``: write the last object of those that are decided, and whose ranks died before that."""
    waiting = {checkpoint.key: checkpoint for disk in disks for checkpoint in disk.commits}
    listing = CheckpointCatalog(str(catalog.root), settings=impatient(catalog.settings)) if waiting else catalog
    unusable, damages = set(passed_over), dict[str, str]()
    not_ready: ChosenCheckpoint | None = None
    while True:
        away: errors.TransferError | None = None
        try:
            infos = listing.checkpoints()
            begun = [parse_url(each.url) for each in infos if finish and each.state in ("in_progress", "leftover")]
            for url in begun:
                settle_saves(listing.store, url)
            if any(listing.store.exists(url.key(METADATA)) for url in begun):
                infos = listing.checkpoints()
            on_s3 = [each for each in infos if each.committed and each.step is not None]
        except errors.TransferError as error:
            if not waiting:
                raise
            on_s3, away = [], error
            logger.warning("S3 does not answer, so only the disks of this job were searched: %s", error)
        committed = {(info.url, info.save_id) for info in on_s3}
        local = {key: each for key, each in waiting.items() if key not in committed and each.info.step is not None}
        there = [*on_s3, *(each.info for each in local.values())]
        asked = order(there)
        left = [info for info in asked if info.url not in unusable]
        if not asked and there and not unusable and away is None:
            steps = sorted(info.step for info in there if info.step is not None)
            raise errors.CheckpointNotFoundError(
                f"none of the {len(there)} committed checkpoints under {catalog.root} is what was asked for (steps "
                f"{steps[0]} to {steps[-1]}). Remedy: `dcp-s3 ls {catalog.root}` shows their steps and metrics",
                url=str(catalog.root),
            )
        if not left:
            break
        for info in left:
            found: ChosenCheckpoint | None
            if each := local.get((info.url, info.save_id)):
                found = _try_local(listing, each, disks, away)
            elif damage := find_damage(catalog.store, parse_url(info.url)):
                damages[info.url], found = damage, None
            else:
                found = ChosenCheckpoint(info.url, info.step or 0)
            if found is not None and found.reason and not wait:
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


def choose(
    catalog: CheckpointCatalog, ranks: Ranks, order: Order, *, passed_over: Collection[str] = (), disks: bool = True,
    finish: bool = True, drain_timeout: float = DRAIN_TIMEOUT,
) -> ChosenCheckpoint | None:  # fmt: skip
    """The checkpoint to load, the same on all ranks; None if there is none at all. Every rank calls it.

    Waits for data that other ranks need from a disk, and that must reach S3 first: for ``drain_timeout`` seconds
    without progress. ``disks``: whether what waits on the disks for S3 counts, and is drained. See also `find`.
    """

    def look() -> Disk:
        disk = look_at_disk(catalog) if disks else Disk()
        if (disk.size or disk.commits) and (store := open_store(catalog.settings)) is not None:
            drain_in_background(store, patience=catalog.settings.spill_after)
        return disk

    def refuse(failures: Failures) -> errors.CheckpointError:
        return errors.CheckpointError(f"nothing is restored: {name_failed(failures)}", url=str(catalog.root))

    began = moved = time.monotonic()
    reported, pause, before = began - _REPORT_SECONDS, _SHORTEST_PAUSE, (-1, -1)
    while True:
        seen = ranks.agree(look, refuse)
        now, left = time.monotonic(), (sum(disk.size for disk in seen), sum(len(disk.commits) for disk in seen))
        if left != before:
            before, moved = left, now
        wait = now - moved <= drain_timeout
        found = ranks.from_first(
            functools.partial(find, catalog, order, passed_over=passed_over, disks=seen, wait=wait, finish=finish)
        )
        if found is None or not found.reason:
            return found
        if ranks.is_first and now - reported >= _REPORT_SECONDS:
            reported = now
            logger.warning("restore waits (for %.0f s now) for %s: %s", now - began, found.url, found.reason)
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)


def impatient(settings: Settings) -> Settings:
    """Settings for requests that are repeated anyway, or that the disks can answer too."""
    attempts = min(_ATTEMPTS, settings.retry_attempts)
    timeout = min(settings.read_timeout, settings.spill_after)
    return settings.model_copy(update={"read_timeout": timeout, "retry_attempts": attempts})


class WaitingCheckpoint(NamedTuple):
    """A checkpoint that was saved completely, but is not committed on S3 yet."""

    info: CheckpointInfo
    """The catalog's entry; its ``state`` is ``local``."""
    objects: tuple[ObjectEntry, ...]
    """Every data object of all ranks."""

    @property
    def key(self) -> tuple[str, str | None]:
        """URL and save id."""
        return self.info.url, self.info.save_id


class Disk(NamedTuple):
    """What one rank finds in its spill directory for the checkpoints under a root."""

    commits: tuple[WaitingCheckpoint, ...] = ()
    """Checkpoints whose commit waits there."""
    files: Mapping[tuple[str, str], int] = {}
    """Size in bytes of each data object there, by (URL, path in the checkpoint)."""

    @property
    def size(self) -> int:
        """Bytes that wait for S3."""
        return sum(self.files.values())

    def lacks(self, checkpoint: WaitingCheckpoint) -> set[str]:
        """Paths of the checkpoint's data objects that are not on this disk."""
        url = checkpoint.info.url
        return {entry.path for entry in checkpoint.objects if self.files.get((url, entry.path)) != entry.size}


def look_at_disk(catalog: CheckpointCatalog) -> Disk:
    """What waits in this process's spill directory under the catalog's root. Nothing is changed."""
    store = open_store(catalog.settings)
    if store is None:
        return Disk()
    # Read before the files: a checkpoint that is drained meanwhile then lacks files, and is looked for on S3.
    commits = {
        info.url: WaitingCheckpoint(info, tuple(manifest.objects))  # of several the last, as a load does
        for info, manifest in catalog.waiting()
        if manifest.rank is None
    }
    root = f"{catalog.root}/"
    waiting = {
        (save.journal.url, spilled.entry.path): spilled.entry.size
        for save in store.scan()
        if save.journal.url.startswith(root)
        for spilled in save.journal.objects
    }
    return Disk(tuple(commits.values()), waiting)


def _try_local(
    catalog: CheckpointCatalog, waiting: WaitingCheckpoint, disks: Sequence[Disk], away: errors.TransferError | None
) -> ChosenCheckpoint | None:
    """None: parts of the checkpoint are lost."""
    info = waiting.info
    not_yet = ChosenCheckpoint(info.url, info.step or 0)
    if all(any(each.key == waiting.key for each in disk.commits) and not disk.lacks(waiting) for disk in disks):
        return not_yet._replace(local=True)
    what = "it waits on disk to be committed, and not every rank has all of it on its own"
    if away is None:
        try:
            on_s3 = list_directory(catalog.store, parse_url(info.url))
        except errors.TransferError as error:
            away = error
        else:
            # What is neither on S3 nor on a disk of this job's ranks cannot come any more.
            missing = set(on_s3.lacking({entry.path: entry.size for entry in waiting.objects}, exact=True))
            missing = missing.intersection(*(disk.lacks(waiting) for disk in disks))
            if not missing:
                return not_yet._replace(reason=f"{what}: it is being uploaded to S3")
            lost = f"{len(missing)} of its {len(waiting.objects)} objects, the first {min(missing)}"
            why = f"it waits on disk to be committed, but {lost}, are neither on S3 nor on a disk of this job"
            logger.warning("%s is passed over: %s", info.url, why)
            return None
    return not_yet._replace(reason=f"{what}, but S3 does not answer: {away}")
