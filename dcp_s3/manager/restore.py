"""Restore: all ranks load the checkpoint that the first rank chooses. And what else a manager reads."""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable, Mapping
from types import NoneType
from typing import Any, Literal

from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import LoadPlanner
from torch.distributed.checkpoint.stateful import Stateful

from dcp_s3 import errors
from dcp_s3.coordination.processes import end_era
from dcp_s3.events import Listener
from dcp_s3.failures import name_failed, panel, real_causes
from dcp_s3.load.planner import S3LoadPlanner
from dcp_s3.load.reader import S3StorageReader
from dcp_s3.manager import arguments
from dcp_s3.manager import select_checkpoint as select
from dcp_s3.manager.agree import Failures, Ranks, check_same, for_others
from dcp_s3.manager.arguments import check_step
from dcp_s3.manager.inflight import SavesInFlight
from dcp_s3.manager.step_policy import StepDecisions
from dcp_s3.retention.catalog import CheckpointCatalog
from dcp_s3.retention.marks import annotate
from dcp_s3.retention.policy import Mode, PolicyFunction
from dcp_s3.settings import Settings
from dcp_s3.url import CheckpointURL

logger = logging.getLogger(__name__)

# Errors that mean: this checkpoint cannot be loaded, but another one may be.
_UNUSABLE = (
    errors.CheckpointNotFoundError,
    errors.CorruptCheckpointError,
    errors.UnsafeMetadataError,
    errors.ObjectNotFoundError,
)


def load_error(
    error: CheckpointException | Failures, url: str, step: int | None = None, *, rank: int | None = None,
    alone: bool = False,
) -> errors.RestoreFailedError:  # fmt: skip
    """The error of a `dcp.load` that failed, with the causes by rank; ``alone``: the other ranks do not learn of it."""
    failures = error if isinstance(error, dict) else _failures_of(error)
    what = f"the load of {url}" if step is None else f"the load of step {step} from {url}"
    left, resume = "the state may be partly loaded", ""
    if alone:
        left += "; other ranks may have loaded it, so no other one is tried"
        resume = "manager.restore(state, step=...) on all ranks"
    text = panel(what, failures, left=left, resume=resume)
    return errors.RestoreFailedError(text, url=url, step=step, failures=failures, rank=rank)


def _failures_of(error: CheckpointException) -> Failures:
    return {rank: for_others(cause) for rank, (cause, _) in error.failures.items()}


class RunReader:
    """The checkpoints of a run that are there: what `CheckpointManager` reads, goes back to, and annotates."""

    root: CheckpointURL
    settings: Settings
    retention: PolicyFunction | None
    read_only: bool
    weights_only: bool
    on_event: Listener | None
    _catalog: CheckpointCatalog
    _ranks: Ranks
    _in_flight: SavesInFlight
    _decisions: StepDecisions
    _left: dict[str, int | None]
    """Steps by URL that an earlier run left on disk and this run has not reached yet. If this run saves one of them,
    it has diverged from that run, and replaces the old checkpoint."""
    _uses_disks: bool
    """Whether what waits on local disks counts."""
    _closed = False

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
        return str(self.root.child(f"step-{check_step(step):08d}"))

    def restore(
        self,
        state: dict[str, Any],
        step: int | Literal["best"] | None = None,
        *,
        metric: str | None = None,
        mode: Mode | None = None,
        planner: LoadPlanner | None = None,
        drain_timeout: float = select.DRAIN_TIMEOUT,
    ) -> int | None:
        """Load a checkpoint into ``state``, in place. Every rank calls it; the first rank chooses for all.

        Waits for the saves under way first. Saves that failed before stay failed, whatever the ranks do next.

        >>> with CheckpointManager("s3://bucket/run", read_only=True) as manager:
        ...     manager.restore(state), manager.restore(state, 1000), manager.restore(state, "best", metric="val_loss")
        (2000, 1000, 1000)

        Args:
            step: a step, or ``best``. None: the highest step.
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
        orders: list[select.Order] = []

        def begin() -> tuple[int | str | None, str | None, Mode | None]:
            self._in_flight.settle()
            self._check_open()
            if not self._ranks.collective and not self.read_only:
                end_era(self.root, self.settings)
            arguments.check_state(state)
            arguments.check_type("planner", planner, (LoadPlanner, NoneType), "a LoadPlanner or None")
            orders.append(self._order(step, metric, mode))
            return step, metric, mode

        requests = self._ranks.agree(begin, self._refuse("nothing is restored"))
        check_same("restore asks for different steps (step, metric, mode)", requests)
        passed_over: list[str] = []
        ranks, alone = self._ranks, not self._ranks.collective and self._ranks.size > 1
        while True:
            find = functools.partial(
                select.choose, self._catalog, ranks, orders[0], passed_over=passed_over, disks=self._uses_disks,
                finish=not self.read_only, drain_timeout=drain_timeout,
            )  # fmt: skip
            chosen = ranks.choose(requests[0], find)
            if chosen is None:
                return None
            found = select.ChosenCheckpoint(*chosen)
            failures = self._load(found, state, planner)
            if not failures:
                # Up to this step, what an earlier run left is this run's own past.
                self._left = {url: left for url, left in self._left.items() if (left or 0) > found.step}
                self._in_flight.last_good = found.step
                self._decisions.restored(found.step)
                return found.step
            if alone or not all(isinstance(error, _UNUSABLE) for error in real_causes(failures).values()):
                raise load_error(failures, found.url, found.step, rank=ranks.rank, alone=alone)
            if ranks.is_first:
                logger.warning(
                    "%s could not be restored: %s. Looking for another one", found.url, name_failed(failures)
                )
            passed_over.append(found.url)

    def _load(self, found: select.ChosenCheckpoint, state: dict[str, Any], planner: LoadPlanner | None) -> Failures:
        """Load on all ranks. Returns the causes by rank, the same on all ranks; empty if every rank has loaded it."""

        def refuse(failures: Failures) -> errors.RestoreFailedError:
            why = f"{found.url} is not restored: {name_failed(failures)}"
            return errors.RestoreFailedError(why, url=found.url, step=found.step, failures=failures)

        ranks, collected = self._ranks, dict[str, Any]()
        # The state's own code is called before DCP's first collective and after its last.
        ranks.agree(lambda: collected.update(arguments.to_state_dict(state)), refuse, alike=True)
        reader = S3StorageReader(
            found.url, include_uncommitted=found.local, weights_only=self.weights_only, process_group=ranks.group,
            settings=select.impatient(self.settings) if found.local else self.settings, on_event=self.on_event,
        )  # fmt: skip
        mine: Failures = {}
        try:
            with warnings.catch_warnings():
                if not ranks.collective:
                    warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # as meant
                planner = planner or S3LoadPlanner()  # its errors name the checkpoint
                state_dict_loader.load(
                    collected, storage_reader=reader, process_group=ranks.group, planner=planner,
                    no_dist=not ranks.collective,
                )  # fmt: skip
            for name in sorted(collected, key=str):  # the same order on all ranks: load_state_dict may use collectives
                if isinstance(state[name], Stateful):
                    state[name].load_state_dict(collected[name])
                else:
                    state[name] = collected[name]
        except CheckpointException as error:
            mine = _failures_of(error)
            # Without collectives, torch takes each rank for the only one.
            mine = mine if ranks.collective else {ranks.rank: mine[0]}
        except Exception as error:  # noqa: BLE001 - all ranks are told
            mine = {ranks.rank: for_others(error)}
        return {rank: error for each in ranks.gather(mine) for rank, error in each.items()}

    def _first(self, order: select.Order) -> int | None:
        disk = select.look_at_disk(self._catalog) if self._uses_disks else select.Disk()
        found = select.find(self._catalog, order, disks=(disk,))
        return None if found is None else found.step

    def latest_step(self) -> int | None:
        """The step that `restore` would load, as this rank sees it; None if there is none.

        >>> CheckpointManager("s3://bucket/run", read_only=True).latest_step()
        2000

        Raises:
            CorruptCheckpointError, StorageError
        """
        return self._first(select.latest_order)

    def best_step(self, metric: str | None = None, mode: Mode | None = None) -> int | None:
        """The step with the best value of a metric, as this rank sees it; None if there is none.

        >>> CheckpointManager("s3://bucket/run", read_only=True).best_step("val_loss")
        1000

        Raises:
            CheckpointNotFoundError: there are checkpoints, but none with the metric.
            SettingsError: it is undefined or ambiguous what is best.
            CorruptCheckpointError, StorageError
        """
        return self._first(self._order("best", metric, mode))

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
        self._in_flight.settle(check_step(step))
        waiting = self.settings.spill_dir is not None and not self.read_only
        return S3StorageReader(self.url(step), include_uncommitted=waiting, settings=self.settings).extra()

    def annotate(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Add metrics to a saved checkpoint, see `dcp_s3.annotate`. Every rank may call it; only the first one writes.

        Waits for the save of this step, and those before it, if it is still going on.

        >>> with CheckpointManager("s3://bucket/run") as manager:
        ...     manager.annotate(2000, {"val_loss": 1.0})
        ...     manager.best_step("val_loss")
        2000

        Raises:
            SettingsError: the metrics cannot be stored.
            StorageError
            CheckpointNotFoundError: there is no committed checkpoint of this step.
        """
        if self.read_only:
            raise self._read_only_error("nothing is annotated")
        check_step(step)
        arguments.check_metrics(metrics)
        if self._ranks.is_first:
            self._in_flight.settle(step)
            annotate(self.url(step), metrics, settings=self.settings)

    def _order(self, step: int | str | None, metric: str | None, mode: Mode | None) -> select.Order:
        if step == "best":
            return select.best_order(self.retention, metric, mode)
        return select.latest_order if step is None else select.step_order(check_step(step))

    def _refuse(self, what: str) -> Callable[[Failures], errors.CheckpointError]:
        return lambda failures: errors.CheckpointError(f"{what}: {name_failed(failures)}")

    def _check_open(self) -> None:
        if self._closed:
            why = f"the CheckpointManager of {self.root} was closed"
            raise errors.CheckpointError(f"{why}. Remedy: close it after the last save, or make a new one")

    def _read_only_error(self, what: str) -> errors.CheckpointError:
        why = f"the CheckpointManager of {self.root} was made with read_only=True"
        return errors.CheckpointError(f"{what}: {why}. Remedy: make one without, for the root of this run")
