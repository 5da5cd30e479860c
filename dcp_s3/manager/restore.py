"""Restore: all ranks load the checkpoint that the first rank chooses."""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Collection, Sequence
from typing import Any

from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import LoadPlanner

from dcp_s3 import errors
from dcp_s3.events import Listener
from dcp_s3.failures import Failed, explain, left_by_load, name_failed, panel, real_causes
from dcp_s3.load.planner import S3LoadPlanner
from dcp_s3.load.reader import S3StorageReader
from dcp_s3.manager.arguments import load_into, to_state_dict
from dcp_s3.manager.choosing import ChosenCheckpoint, Disk, NotReady, Order, Patience, find, impatient, look_at_disk
from dcp_s3.manager.notes import Notes
from dcp_s3.manager.ranks import Failures, Ranks, for_others
from dcp_s3.retention.catalog import CheckpointCatalog
from dcp_s3.spill.background import drain_in_background
from dcp_s3.spill.store import open_store

logger = logging.getLogger(__name__)

# Errors that mean: this checkpoint cannot be loaded, but another one may be.
_UNUSABLE = (
    errors.CheckpointNotFoundError,
    errors.CorruptCheckpointError,
    errors.UnsafeMetadataError,
    errors.ObjectNotFoundError,
)


class Restoring:
    """Restores checkpoints of a run.

    Args:
        weights_only: see `S3StorageReader`.
        drain_timeout: seconds without progress for which data is waited for that drains from the disks to S3.
        disks: whether what waits on the disks for S3 counts, and is drained.
        notes: where ranks that are not `collective` learn what the first of them chose; None: each chooses alone.
    """

    def __init__(
        self,
        catalog: CheckpointCatalog,
        ranks: Ranks,
        *,
        weights_only: bool,
        drain_timeout: float,
        disks: bool = True,
        notes: Notes | None = None,
        on_event: Listener | None = None,
    ) -> None:
        self._on_event, self._notes = on_event, notes
        self._catalog = catalog
        self._settings = catalog.settings
        self._ranks = ranks
        self._weights_only = weights_only
        self._drain_timeout = drain_timeout
        self._disks = disks

    def restore(
        self, state: dict[str, Any], order: Order, planner: LoadPlanner | None, request: object = None
    ) -> ChosenCheckpoint | None:
        """Load the first checkpoint in ``order``, which was made of ``request``, that can be loaded. None if there is
        none at all. Every rank calls it.

        Raises:
            RestoreFailedError, CheckpointNotFoundError, CorruptCheckpointError, StorageError
        """
        passed_over: list[str] = []
        while True:
            found = self._take(order, request, passed_over)
            failures = {} if found is None else self._load(found, state, planner)
            if self._notes is not None and not failures:
                self._notes.restored()
            if found is None or not failures:
                return found
            alone = not self._ranks.collective and self._ranks.size > 1
            if alone or not _is_unusable(failures):
                raise _restore_error(failures, found.url, found.step, self._ranks.rank, alone=alone)
            if self._ranks.is_first:
                why = f"{found.url} could not be restored {explain(failures)}"
                logger.warning("%s. Looking for another one", why)
            passed_over.append(found.url)

    def _take(self, order: Order, request: object, passed_over: Collection[str]) -> ChosenCheckpoint | None:
        if self._notes is None:
            return self.choose(order, passed_over)
        return self._notes.choose(request, lambda: self.choose(order, passed_over))

    def find(
        self, order: Order, passed_over: Collection[str], disks: Sequence[Disk], wait: bool
    ) -> ChosenCheckpoint | NotReady | None:
        """What to load, as this rank sees S3 and ``disks``."""
        return find(self._catalog, order, passed_over=passed_over, disks=disks, wait=wait)

    def step(self, order: Order) -> int | None:
        """The first step in ``order``, for this rank alone."""
        found = self.find(order, (), (self._look(),), True)
        return None if found is None else found.step

    def choose(self, order: Order, passed_over: Collection[str] = ()) -> ChosenCheckpoint | None:
        """The checkpoint to load, the same on all ranks; None if there is none at all. Every rank calls it.

        Waits for data that other ranks need from a disk, and that must reach S3 first. ``passed_over`` are URLs of
        checkpoints that could not be loaded.

        Raises:
            CheckpointNotFoundError: there are checkpoints, but none that ``order`` selects.
            CorruptCheckpointError, StorageError
        """
        patience = Patience(self._drain_timeout)
        while True:
            disks = self._ranks.agree(self._look_and_drain, self._refuse)
            choose = functools.partial(self.find, order, passed_over, disks, patience.is_left(disks))
            found = self._ranks.from_first(choose)
            if not isinstance(found, NotReady):
                return found
            patience.pause(found, quiet=not self._ranks.is_first)

    def _look(self) -> Disk:
        return look_at_disk(self._catalog) if self._disks else Disk()

    def _look_and_drain(self) -> Disk:
        disk = self._look()
        store = open_store(self._settings)
        if store is not None and (disk.size or disk.commits):
            drain_in_background(store, patience=self._settings.spill_after)
        return disk

    def _refuse(self, failures: Failures) -> errors.CheckpointError:
        root = str(self._catalog.root)
        return errors.CheckpointError(f"nothing is restored: {name_failed(failures)}", url=root)

    def _load(self, found: ChosenCheckpoint, state: dict[str, Any], planner: LoadPlanner | None) -> Failures:
        """Load on all ranks. Returns the causes by rank, the same on all ranks; empty if every rank has loaded it."""

        def refuse(failures: Failures) -> errors.RestoreFailedError:
            why = f"{found.url} is not restored: {name_failed(failures)}"
            return errors.RestoreFailedError(why, url=found.url, step=found.step, failures=failures)

        collected: dict[str, Any] = {}
        # The state's own code is called before DCP's first collective and after its last.
        self._ranks.agree(lambda: collected.update(to_state_dict(state)), refuse, alike=True)
        reader = S3StorageReader(
            found.url,
            include_uncommitted=found.local,
            weights_only=self._weights_only,
            process_group=self._ranks.group,
            settings=impatient(self._settings) if found.local else self._settings,
            on_event=self._on_event,
        )
        mine = _load(collected, reader, self._ranks, planner)
        if not mine:
            try:
                load_into(collected, state)
            except Exception as error:  # noqa: BLE001 - all ranks are told
                mine = {self._ranks.rank: for_others(error)}
        return {rank: error for each in self._ranks.gather(mine) for rank, error in each.items()}


def _load(state: dict[str, Any], reader: S3StorageReader, ranks: Ranks, planner: LoadPlanner | None) -> Failures:
    """Run `dcp.load` in place. Returns the failures by rank."""
    try:
        with warnings.catch_warnings():
            if not ranks.collective:
                warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # as meant
            state_dict_loader.load(
                state,
                storage_reader=reader,
                process_group=ranks.group,
                planner=planner or S3LoadPlanner(),  # its errors name the checkpoint
                no_dist=not ranks.collective,
            )
    except CheckpointException as error:
        failures = _failures_of(error)
        # Without collectives, torch takes each rank for the only one.
        return failures if ranks.collective else {ranks.rank: failures[0]}
    except Exception as error:  # noqa: BLE001 - all ranks are told
        return {ranks.rank: for_others(error)}
    return {}


def load_error(error: CheckpointException, url: str, step: int | None = None) -> errors.RestoreFailedError:
    """The error of a `dcp.load` that failed, with the causes by rank."""
    return _restore_error(_failures_of(error), url, step, None)


def _restore_error(
    failures: Failures, url: str, step: int | None, rank: int | None, *, alone: bool = False
) -> errors.RestoreFailedError:
    what = f"the load of {url}" if step is None else f"the load of step {step} from {url}"
    left = left_by_load(failures.values())
    if alone:  # the others do not learn of it
        left = f"{left}{'; ' if left else ''}other ranks may have loaded it, so no other one is tried"
    told = Failed(what, failures, left=left, resume="manager.restore(state, step=...) on all ranks" if alone else "")
    return errors.RestoreFailedError(panel(told), url=url, step=step, failures=failures, rank=rank)


def _failures_of(error: CheckpointException) -> Failures:
    return {rank: for_others(cause) for rank, (cause, _) in error.failures.items()}


def _is_unusable(failures: Failures) -> bool:
    """Whether a load failed only because the checkpoint has vanished or is damaged."""
    return all(isinstance(error, _UNUSABLE) for error in real_causes(failures).values())
