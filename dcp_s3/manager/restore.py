"""Restore: all ranks load the checkpoint that the first rank chooses. And what else a manager reads."""

from __future__ import annotations

import functools
import logging
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from types import TracebackType
from typing import Any, Literal, TypeVar

from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import LoadPlanner

from dcp_s3 import errors
from dcp_s3.events import Listener
from dcp_s3.failures import Failed, explain, left_by_load, name_failed, panel, real_causes
from dcp_s3.load.planner import S3LoadPlanner
from dcp_s3.load.reader import S3StorageReader
from dcp_s3.manager import arguments
from dcp_s3.manager.agree import Failures, Ranks, StoreRanks, for_others
from dcp_s3.manager.arguments import StepFormat, check_step, step_name
from dcp_s3.manager.select_checkpoint import (
    ChosenCheckpoint,
    Disk,
    NotReady,
    Order,
    best_of,
    best_order,
    find,
    impatient,
    latest_order,
    look_at_disk,
    step_order,
)
from dcp_s3.retention.catalog import CheckpointCatalog
from dcp_s3.retention.policy import Mode, PolicyFunction
from dcp_s3.settings import Settings
from dcp_s3.spill.background import drain_in_background
from dcp_s3.spill.store import open_store
from dcp_s3.url import CheckpointURL

logger = logging.getLogger(__name__)

T = TypeVar("T", bound="RunReader")

DRAIN_TIMEOUT = 600.0
"""Seconds without progress for which a restore waits for what drains from disks to S3."""

_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.1, 2.0  # seconds between requests to S3 while a restore waits
_REPORT_SECONDS = 30.0
# Errors that mean: this checkpoint cannot be loaded, but another one may be.
_UNUSABLE = (
    errors.CheckpointNotFoundError,
    errors.CorruptCheckpointError,
    errors.UnsafeMetadataError,
    errors.ObjectNotFoundError,
)


class Restorer:
    """Restores checkpoints of a run.

    Args:
        weights_only: see `S3StorageReader`.
        disks: whether what waits on the disks for S3 counts, and is drained.
        finish: whether checkpoints that are decided, and whose ranks died before the last object, are finished.
    """

    def __init__(
        self,
        catalog: CheckpointCatalog,
        ranks: Ranks,
        *,
        weights_only: bool = True,
        disks: bool = True,
        finish: bool = True,
        on_event: Listener | None = None,
    ) -> None:
        self._catalog, self._ranks, self._finish = catalog, ranks, finish
        self._weights_only, self._disks, self._on_event = weights_only, disks, on_event

    def restore(
        self, state: dict[str, Any], order: Order, planner: LoadPlanner | None, request: object, drain_timeout: float
    ) -> ChosenCheckpoint | None:
        """Load the first checkpoint in ``order``, which was made of ``request``, that can be loaded. None if there is
        none at all. Every rank calls it.

        Raises:
            RestoreFailedError, CheckpointNotFoundError, CorruptCheckpointError, StorageError
        """
        passed_over: list[str] = []
        ranks = self._ranks
        while True:
            choose = functools.partial(self.choose, order, passed_over, drain_timeout=drain_timeout)
            found = ranks.choose(request, choose) if isinstance(ranks, StoreRanks) else choose()
            failures = {} if found is None else self._load(found, state, planner)
            if found is None or not failures:
                return found
            alone = not ranks.collective and ranks.size > 1
            if alone or not all(isinstance(error, _UNUSABLE) for error in real_causes(failures).values()):
                raise _restore_error(failures, found.url, found.step, ranks.rank, alone=alone)
            if ranks.is_first:
                why = f"{found.url} could not be restored {explain(failures)}"
                logger.warning("%s. Looking for another one", why)
            passed_over.append(found.url)

    def step(self, order: Order) -> int | None:
        """The first step in ``order``, for this rank alone."""
        found = find(self._catalog, order, disks=(self._look(),))
        return None if found is None else found.step

    def choose(
        self, order: Order, passed_over: Collection[str] = (), *, drain_timeout: float = DRAIN_TIMEOUT
    ) -> ChosenCheckpoint | None:
        """The checkpoint to load, the same on all ranks; None if there is none at all. Every rank calls it.

        Waits for data that other ranks need from a disk, and that must reach S3 first: for ``drain_timeout`` seconds
        without progress. ``passed_over`` are URLs of checkpoints that could not be loaded.

        Raises:
            CheckpointNotFoundError: there are checkpoints, but none that ``order`` selects.
            CorruptCheckpointError, StorageError
        """
        began = moved = time.monotonic()
        reported, pause, seen = began - _REPORT_SECONDS, _SHORTEST_PAUSE, (-1, -1)
        while True:
            disks = self._ranks.agree(self._look_and_drain, self._refuse)
            now, left = time.monotonic(), (sum(disk.size for disk in disks), sum(len(disk.commits) for disk in disks))
            if left != seen:
                seen, moved = left, now
            wait = now - moved <= drain_timeout
            found = self._ranks.from_first(
                lambda disks=disks, wait=wait: find(  # type: ignore[misc]
                    self._catalog, order, passed_over=passed_over, disks=disks, wait=wait, finish=self._finish
                )
            )
            if not isinstance(found, NotReady):
                return found
            if self._ranks.is_first and now - reported >= _REPORT_SECONDS:
                reported = now
                logger.warning("restore waits (for %.0f s now) for %s: %s", now - began, found.url, found.reason)
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _look(self) -> Disk:
        return look_at_disk(self._catalog) if self._disks else Disk()

    def _look_and_drain(self) -> Disk:
        disk, settings = self._look(), self._catalog.settings
        store = open_store(settings)
        if store is not None and (disk.size or disk.commits):
            drain_in_background(store, patience=settings.spill_after)
        return disk

    def _refuse(self, failures: Failures) -> errors.CheckpointError:
        root = str(self._catalog.root)
        return errors.CheckpointError(f"nothing is restored: {name_failed(failures)}", url=root)

    def _load(self, found: ChosenCheckpoint, state: dict[str, Any], planner: LoadPlanner | None) -> Failures:
        """Load on all ranks. Returns the causes by rank, the same on all ranks; empty if every rank has loaded it."""

        def refuse(failures: Failures) -> errors.RestoreFailedError:
            why = f"{found.url} is not restored: {name_failed(failures)}"
            return errors.RestoreFailedError(why, url=found.url, step=found.step, failures=failures)

        ranks, settings = self._ranks, self._catalog.settings
        collected: dict[str, Any] = {}
        # The state's own code is called before DCP's first collective and after its last.
        ranks.agree(lambda: collected.update(arguments.to_state_dict(state)), refuse, alike=True)
        reader = S3StorageReader(
            found.url,
            include_uncommitted=found.local,
            weights_only=self._weights_only,
            process_group=ranks.group,
            settings=impatient(settings) if found.local else settings,
            on_event=self._on_event,
        )
        mine = _load(collected, reader, ranks, planner)
        if not mine:
            try:
                arguments.load_into(collected, state)
            except Exception as error:  # noqa: BLE001 - all ranks are told
                mine = {ranks.rank: for_others(error)}
        return {rank: error for each in ranks.gather(mine) for rank, error in each.items()}


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
    failed = Failed(what, failures, left=left, resume="manager.restore(state, step=...) on all ranks" if alone else "")
    return errors.RestoreFailedError(panel(failed), url=url, step=step, failures=failures, rank=rank)


def _failures_of(error: CheckpointException) -> Failures:
    return {rank: for_others(cause) for rank, (cause, _) in error.failures.items()}


# --- what a manager reads --------------------------------------------------------------------------------


class RunReader(ABC):
    """The checkpoints of a run, as `CheckpointManager` reads them."""

    root: CheckpointURL
    settings: Settings
    retention: PolicyFunction | None
    read_only: bool
    _step_format: StepFormat
    _ranks: Ranks
    _restorer: Restorer

    @property
    def root_url(self) -> str:
        """``s3://bucket/run``.

        >>> CheckpointManager("s3://bucket/run/", read_only=True).root_url
        's3://bucket/run'
        """
        return str(self.root)

    def url(self, step: int) -> str:
        """URL to which `save` saves a step.

        >>> CheckpointManager("s3://bucket/run", read_only=True).url(2000)
        's3://bucket/run/step-00002000'
        """
        return str(self.root.child(step_name(check_step(step), self._step_format)))

    def restore(
        self,
        state: dict[str, Any],
        step: int | Literal["best", "latest"] | None = None,
        *,
        best: str | None = None,
        metric: str | None = None,
        mode: Mode | None = None,
        planner: LoadPlanner | None = None,
        drain_timeout: float = DRAIN_TIMEOUT,
    ) -> int | None:
        """Load a checkpoint into ``state``, in place. Every rank calls it; the first rank chooses for all.

        Waits for the saves under way first. Those that have failed are never merged with later ones (`restart`).

        >>> with CheckpointManager("s3://bucket/run", read_only=True) as manager:
        ...     manager.restore(state), manager.restore(state, 1000), manager.restore(state, best="val_loss")
        (2000, 1000, 1000)

        Args:
            step: a step, or ``best``. None or ``latest``: the highest step.
            best: the metric whose best value decides; short for ``"best"`` with ``metric``.
            metric: the metric that decides which is best. None: that of the retention policy's `KeepBest`.
            mode: ``min`` if low values are better, or ``max``. None: that of the metric's `KeepBest`, else ``min``.
            drain_timeout: seconds for which to wait for a checkpoint on the disks of several hosts to reach S3, counted
                from the last progress. After that an older one is loaded.

        Returns:
            The step that was loaded. None if nothing was committed under the root yet.

        Raises:
            CheckpointNotFoundError: there are checkpoints, but none of this step, or with this metric.
            CorruptCheckpointError: the requested checkpoints cannot be loaded.
            RestoreFailedError: the load failed; ``failures`` has the causes by rank. The state may be partly loaded.
            SettingsError: it is undefined or ambiguous what is best.
            StorageError
        """
        orders: list[Order] = []

        def begin() -> tuple[int | str | None, str | None, Mode | None]:
            self._settle()
            arguments.check_restore(state, step, planner, best, metric)
            request = ("best", best, mode) if best is not None else (step, metric, mode)
            orders.append(self._order(*request))
            return request

        requests = self._ranks.agree(begin, self._refuse("nothing is restored"))
        if len(set(requests)) > 1:
            raise errors.CheckpointError(
                f"the ranks restore different checkpoints of {self.root}: {dict(enumerate(requests))} (by rank). "
                "Remedy: call restore with the same arguments on all",
                url=self.root_url,
            )
        found = self._restorer.restore(state, orders[0], planner, requests[0], drain_timeout)
        if found is not None:
            self._restored(found.step)
        return None if found is None else found.step

    def latest_step(self) -> int | None:
        """The step that `restore` would load, as this rank sees it; None if there is none.

        >>> CheckpointManager("s3://bucket/run", read_only=True).latest_step()
        2000

        Raises:
            CorruptCheckpointError, StorageError
        """
        return self._restorer.step(latest_order)

    def best_step(self, metric: str | None = None, mode: Mode | None = None) -> int | None:
        """The step with the best value of a metric, as this rank sees it; None if there is none.

        >>> CheckpointManager("s3://bucket/run", read_only=True).best_step("val_loss")
        1000

        Raises:
            CheckpointNotFoundError: there are checkpoints, but none with the metric.
            SettingsError: it is undefined or ambiguous what is best.
            CorruptCheckpointError, StorageError
        """
        return self._restorer.step(self._order("best", metric, mode))

    def extra(self, step: int) -> dict[str, Any]:
        """What was saved with a step as ``extra``; empty if nothing was. Waits for the save of this step if it is still
        going on.

        >>> with CheckpointManager("s3://bucket/run") as manager:
        ...     saved = manager.save(3000, state, extra={"tokens": 12_000_000})
        ...     manager.extra(3000)
        {'tokens': 12000000}

        Raises:
            CheckpointNotFoundError: there is no checkpoint of this step.
            CorruptCheckpointError, StorageError
        """
        self._settle_step(check_step(step))
        waiting = self.settings.spill_dir is not None and not self.read_only
        return S3StorageReader(self.url(step), include_uncommitted=waiting, settings=self.settings).extra()

    def _order(self, step: int | str | None, metric: str | None, mode: Mode | None) -> Order:
        if step == "best":
            return best_order(*best_of(self.retention, metric, mode))
        if step is None or step == "latest":
            return latest_order
        return step_order(check_step(step))

    def _refuse(self, what: str) -> Callable[[Failures], errors.CheckpointError]:
        return lambda failures: errors.CheckpointError(f"{what}: {name_failed(failures)}")

    def __enter__(self: T) -> T:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except Exception as failure:
            if error is None:
                raise
            logger.error("while %s went through the manager: %s", type(error).__name__, failure)  # noqa: TRY400

    @abstractmethod
    def close(self) -> None:
        """End the work of the manager."""

    @abstractmethod
    def _settle(self) -> None:
        """Before a restore: wait for the saves under way, end this era, and check that the manager is open."""

    @abstractmethod
    def _settle_step(self, step: int) -> None:
        """Wait for the current save if it is of this step."""

    @abstractmethod
    def _restored(self, step: int) -> None:
        """The run goes on from a step."""
