"""Deletes checkpoints: those that a plan names, or one on request. `checkpoint.deletion` deletes a single one."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from dcp_s3 import errors
from dcp_s3.checkpoint.commit_state import not_found_error
from dcp_s3.checkpoint.deletion import Deleter, LeftAloneError
from dcp_s3.checkpoint.directory import list_directory
from dcp_s3.checkpoint.info import Deletion, LeftoverObject, age_order
from dcp_s3.checkpoint.look import inspect
from dcp_s3.events import Listener, Pruned, PruneFailed, emit
from dcp_s3.format.layout import DELETION_PREFIX, What, classify
from dcp_s3.limit import STALL_SETTING
from dcp_s3.retention.catalog import CheckpointCatalog
from dcp_s3.retention.plan import BOARDS, OpenUpload, Plan
from dcp_s3.retention.policy import PolicyFunction, parse_policy, policy_from_settings
from dcp_s3.s3.store import store_of
from dcp_s3.settings import Settings, SettingsLike, resolve_settings
from dcp_s3.store import DeleteTarget, Store
from dcp_s3.units import format_size, one_line, parse_duration, plural
from dcp_s3.url import CheckpointURL, URLLike, parse_url

logger = logging.getLogger(__name__)

MIN_GRACE = 3600.0
"""Seconds: a shorter grace period has to be forced. A save of one large object shows nothing new for a while."""

Progress = Callable[[int, int], None]
"""Called with the number of steps (checkpoints, groups of leftovers, uploads) that are done, and of all steps, in the
prune's threads, one call at a time."""

_FIELDS = ("deleted", "finished", "leftovers", "aborted", "left_alone", "failures")  # of the report, in their order
_Step = tuple[str, str, Any]
"""Field of the report for the result (empty: none), name of the checkpoint, and what the plan says of it."""


@dataclass(frozen=True)
class NotDeleted:
    """Something that a plan wanted to delete and a prune did not."""

    name: str
    """Name of the checkpoint."""
    reason: str
    """Why: it changed since the plan, or is protected now; or the error's name and message."""


@dataclass(frozen=True)
class PruneReport:
    """The results of a prune.

    >>> prune("s3://bucket/run", "latest:1").ok
    True
    """

    root: str
    """URL of the root."""
    plan: Plan
    """The plan that it carried out."""
    dry_run: bool = False
    """Whether nothing was deleted."""
    deleted: tuple[Deletion, ...] = ()
    """Checkpoints that were deleted, whether committed or leftovers."""
    finished: tuple[Deletion, ...] = ()
    """Deletions that an earlier prune had begun."""
    leftovers: tuple[Deletion, ...] = ()
    """Objects deleted from the directories of checkpoints that stay, and old messages between ranks
    (``.dcp_s3/board-*``)."""
    aborted: tuple[OpenUpload, ...] = ()
    """Multipart uploads that were aborted."""
    left_alone: tuple[NotDeleted, ...] = ()
    """Things that changed since the plan, or are protected now."""
    failures: tuple[NotDeleted, ...] = ()
    """What could not be deleted, or only in part. It did not stop the rest, and the next prune tries again."""

    def __repr__(self) -> str:
        done = f"{len(self.deleted)} deleted ({format_size(self.size)} in {plural(self.objects, 'object')})"
        if self.dry_run:
            done = f"dry run: {len(self.plan.deleted)} to delete"
        failures = [str(failure) for failure in self.failures[:1]]
        more = {"left_alone": len(self.left_alone) or None, "failures": len(self.failures) or None}
        return one_line("PruneReport", repr(self.root), done, **more, **{"first": failures[0]} if failures else {})

    @property
    def ok(self) -> bool:
        """Whether nothing failed."""
        return not self.failures

    @property
    def objects(self) -> int:
        """Number of objects that were deleted."""
        return sum(each.objects for each in (*self.deleted, *self.finished, *self.leftovers))

    @property
    def size(self) -> int:
        """Bytes that were deleted."""
        return sum(each.size for each in (*self.deleted, *self.finished, *self.leftovers))

    def to_dict(self) -> dict[str, Any]:
        """The fields and the properties, for JSON."""
        return asdict(self) | {"ok": self.ok, "objects": self.objects, "size": self.size}


def prune(
    root: URLLike,
    policy: PolicyFunction | str | None = None,
    *,
    grace: float | str | None = None,
    dry_run: bool = False,
    force: bool = False,
    settings: SettingsLike = None,
    progress: Progress | None = None,
    on_event: Listener | None = None,
    store: Store | None = None,
) -> PruneReport:
    """Delete the checkpoints under ``root`` that no policy keeps, and the leftovers of failed saves.

    The floors (docs/retention.md) are kept whatever the policy says. If it is interrupted, the next prune finishes it.
    Several at a time are harmless. A checkpoint that cannot be deleted does not stop the others.

    >>> prune("s3://bucket/run", "latest:1", dry_run=True)
    PruneReport('s3://bucket/run', dry run: 1 to delete)
    >>> [each.name for each in prune("s3://bucket/run", KeepLatest(1)).deleted]
    ['step-00001000']

    Args:
        root: the URL above the checkpoints.
        policy: the policy, as an object or in one line (`parse_policy`). None: the setting ``retention``, without which
            everything that is committed is kept.
        grace: seconds, or text like ``24h``, for which an uncommitted checkpoint counts as a save in progress. None:
            the setting ``retention_grace``.
        dry_run: only make the plan.
        force: allow a grace period under an hour. A save in progress may then be taken for a leftover, and lose its
            objects.
        progress: called with how far the prune is (`Progress`).
        on_event: gets the event `Pruned` or `PruneFailed`; none comes of a dry run.
        settings, store: see `CheckpointCatalog`.

    Raises:
        SettingsError: not a policy, the policy failed, or the grace period has to be forced. Nothing was deleted.
        InvalidURLError
        StorageError: the root could not be looked at. Nothing was deleted.
    """
    resolved = resolve_settings(settings)
    keep = parse_policy(policy) if isinstance(policy, str) else policy
    keep = policy_from_settings(resolved) if policy is None else keep
    seconds = check_grace(grace, resolved, force=force)
    catalog = CheckpointCatalog(root, settings=resolved, store=store)
    if dry_run:
        return PruneReport(str(catalog.root), catalog.scan().plan(keep, grace=seconds), dry_run=True)
    return _apply(
        catalog.store, catalog.root, lambda: catalog.scan().plan(keep, grace=seconds), resolved, progress, on_event
    )


def check_grace(grace: float | str | None, settings: Settings, *, force: bool) -> float:
    """The grace period in seconds; None: that of the settings."""
    given = settings.retention_grace if grace is None else grace
    try:
        seconds = settings.retention_grace if grace is None else parse_duration(grace)
    except ValueError:
        raise errors.SettingsError(f"grace = {grace!r}, expected seconds, or text like 24h") from None
    if seconds < MIN_GRACE and not force:
        raise errors.SettingsError(
            f"grace = {given!r} is under {MIN_GRACE / 3600:.0f} h: a save that is going on could be taken for a "
            "leftover, and lose its objects. Remedy: a longer one; or pass force=True, if nothing is being saved there"
        )
    return seconds


def apply_plan(
    root: URLLike,
    plan: Plan,
    *,
    settings: SettingsLike = None,
    progress: Progress | None = None,
    on_event: Listener | None = None,
    store: Store | None = None,
) -> PruneReport:
    """Carry out a plan as far as it still holds (see `prune`). Looks at each thing again before it deletes it. Raises
    InvalidURLError, SettingsError.

    >>> plan = CheckpointCatalog("s3://bucket/run").scan().plan(KeepLatest(1), grace=86400)
    >>> apply_plan("s3://bucket/run", plan).ok
    True
    """
    where, resolved = parse_url(root), resolve_settings(settings)
    store = store_of(where, resolved) if store is None else store
    return _apply(store, where, lambda: plan, resolved, progress, on_event)


def _apply(
    store: Store,
    root: CheckpointURL,
    make: Callable[[], Plan],
    settings: Settings,
    progress: Progress | None,
    on_event: Listener | None,
) -> PruneReport:
    """Make a plan and carry it out, some checkpoints at a time. Counted in `dcp_s3.stats`; emits its outcome."""
    began = time.monotonic()
    try:
        plan = make()
        deleter, counting = Deleter(store.within(store.limit.shared(settings.stall_timeout))), threading.Lock()
        finishing, others = _steps(plan)
        since, done = plan.now - plan.grace, 0
        good = [info for info in plan.kept if info.committed and info.damage is None]
        newest = root.child(max(good, key=age_order).name) if good else None  # from which a run would resume

        def take(store: Store, step: _Step) -> tuple[str, Any]:
            """The report's field, and what goes in there."""
            nonlocal done
            field, name, planned = step
            mine, url, result = replace(deleter, store=store), root.child(name), planned
            try:
                if field == "finished":
                    result = mine.finish(url, planned)
                elif field == "aborted":
                    store.abort(planned)
                elif field == "leftovers" and name == BOARDS:
                    changed = mine.delete_all([DeleteTarget(each.key, each.etag) for each in planned])
                    result = Deletion.of(name, [each for each in planned if each.key not in changed])
                elif field == "leftovers":
                    result = mine.delete_leftovers(url, planned, since=since)
                elif not field:
                    mine.withdraw_given_up(url, planned)
                else:
                    if planned.committed:
                        result = mine.delete_committed(url, planned, since=since, newest=newest)
                    else:
                        result = mine.delete_uncommitted(url, since=since)
                    logger.info("deleted %s: %d objects, %d bytes", url, result.objects, result.size)
            except LeftAloneError as error:
                logger.info("%s is left alone: %s", url, error)
                field, result = "left_alone", NotDeleted(name, str(error))
            except errors.DcpS3Error as error:
                if getattr(error, "setting", "") == STALL_SETTING:
                    raise  # the other checkpoints would wait as long
                logger.warning("%s could not be pruned: %s", url, error)
                field, result = "failures", NotDeleted(name, f"{type(error).__name__}: {error}")
            with counting:
                done += 1
                if progress is not None:
                    progress(done, len(finishing) + len(others))
            return field, result

        of: dict[str, Any] = {field: [] for field in _FIELDS}
        for steps in (finishing, others):
            for field, result in deleter.store.map(take, steps) if steps else ():
                if field and getattr(result, "objects", True):
                    of[field].append(result)
        report = PruneReport(str(root), plan, False, *(tuple(of[field]) for field in _FIELDS))
    except BaseException as error:
        emit(PruneFailed(root=str(root), error=error), on_event)
        raise
    deleted, freed, seconds = len(report.deleted), report.size, time.monotonic() - began
    emit(Pruned(root=str(root), deleted=deleted, freed_bytes=freed, seconds=seconds, ok=report.ok), on_event)
    return report


def _steps(plan: Plan) -> tuple[list[_Step], list[_Step]]:
    """What finishes earlier deletions, and what is done after that."""
    deleted = plan.deleted
    steps: list[_Step] = [("deleted", info.name, info) for info in deleted]
    leftovers, gone = defaultdict[str, list[LeftoverObject]](list), {info.name for info in deleted}
    for left in plan.leftovers:
        if left.checkpoint not in gone:
            leftovers[left.checkpoint].append(left)
    steps += [("leftovers", name, found) for name, found in leftovers.items()]
    steps += [("aborted", each.checkpoint, each) for each in plan.uploads]
    for info in plan.kept:
        if info.deletions and info.committed and info.deletion_id in info.deletions:
            steps.append(("", info.name, info.deletion_id))  # it was given up
    return [("finished", each.checkpoint, each.deletion) for each in plan.unfinished], steps


# --- one checkpoint on request -----------------------------------------------------------------------


def remove(
    url: URLLike,
    *,
    force: bool = False,
    dry_run: bool = False,
    settings: SettingsLike = None,
    store: Store | None = None,
) -> Deletion:
    """Delete one checkpoint whatever the policies say, even the newest or one that was never committed.

    >>> remove("s3://bucket/run/step-00001000").name
    'step-00001000'

    Args:
        url: URL of the checkpoint.
        force: delete it even if it is pinned, being read, or being saved; the reader or the save then fails.
        dry_run: only look. The result says what would be deleted; an error says why it would be kept.
        settings: a `Settings`, or a mapping of those that differ from the environment.

    Raises:
        CheckpointNotFoundError: nothing of a checkpoint is there.
        CheckpointProtectedError: it is pinned, a reader has a lease, something was written there within the grace
            period (setting ``retention_grace``), or its commit waits in this host's spill directory.
        InvalidURLError, SettingsError
        StorageError: all or part of it is still there; `prune` or another `remove` finishes it.
    """
    where, resolved = parse_url(url), resolve_settings(settings)
    catalog = CheckpointCatalog(str(where.parent), settings=resolved, store=store)
    why = None
    if where.name in [info.name for info in catalog.local()]:
        why = "its commit waits in this host's spill directory"
    deleter = Deleter(catalog.store, force=force, dry_run=dry_run)
    start = where.key("")
    uploads = [each for each in deleter.store.uploads(start) if classify(each.key[len(start) :]).what is What.DATA]
    found = inspect(deleter.store, where)
    if found is None and not uploads:
        raise not_found_error(where, "nothing of a checkpoint")
    directory = found.directory if found else list_directory(deleter.store, where, DELETION_PREFIX)
    since = math.inf if force else directory.now - resolved.retention_grace
    if any(each.initiated_at > since for each in uploads):
        why = "a save is in progress: an upload was begun within the grace period"
    if found is not None and (protection := found.directory.protection()):
        why = f"it is pinned ({found.info.pin_reason})" if found.info.pin_reason else protection
    done = []
    try:
        if why is not None and not force:
            raise LeftAloneError(why)
        if found is not None:
            info = found.info
            begun = [each for each in info.deletions if not info.committed or each != info.deletion_id]
            if not dry_run:
                done = [deleter.finish(where, each) for each in begun]
            if info.committed:
                done.append(deleter.delete_committed(where, info, since=since))
            else:
                done.append(deleter.delete_uncommitted(where, since=since))
    except LeftAloneError as error:
        raise errors.CheckpointProtectedError(
            f"{where} was not deleted: {error}. Remedy: `unpin` it, wait, or pass force=True, if nobody needs what is "
            "there",
            url=str(where),
        ) from None
    for each in () if dry_run else uploads:
        deleter.store.abort(each)
    return Deletion(where.name, sum(each.objects for each in done), sum(each.size for each in done))
