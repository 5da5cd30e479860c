"""The part of CheckpointManager that only reads: restore, and what there is to restore."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import TracebackType
from typing import Any, Literal, TypeVar

from torch.distributed.checkpoint.planner import LoadPlanner

from dcp_s3 import errors
from dcp_s3.failures import name_failed
from dcp_s3.load.reader import S3StorageReader
from dcp_s3.manager import arguments
from dcp_s3.manager.arguments import check_step
from dcp_s3.manager.choosing import ChosenCheckpoint, Order, best_of, best_order, latest_order, step_order
from dcp_s3.manager.names import StepFormat, step_name
from dcp_s3.manager.ranks import Failures, Ranks
from dcp_s3.manager.restore import Restoring
from dcp_s3.retention.policy import Mode, PolicyFunction
from dcp_s3.settings import Settings
from dcp_s3.url import CheckpointURL

logger = logging.getLogger(__name__)

T = TypeVar("T", bound="RunReader")


class RunReader(ABC):
    """The checkpoints of a run, as `CheckpointManager` reads them."""

    root: CheckpointURL
    settings: Settings
    retention: PolicyFunction | None
    read_only: bool
    _step_format: StepFormat
    _ranks: Ranks
    _restoring: Restoring

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
    ) -> int | None:
        """Load a checkpoint into ``state``, in place. Every rank calls it; the first rank chooses for all.

        Checkpoints that wait on disk for S3 count too (``DCP_S3_DURABILITY=local``, or S3 was away when they were
        saved). One that every rank has whole on its own disk is loaded from there; otherwise it must reach S3 first.

        If the latest or best one turns out to be gone or damaged, the next one is loaded and a warning logged; what had
        been loaded is overwritten. Other failures are raised.

        >>> with CheckpointManager("s3://bucket/run", read_only=True) as manager:
        ...     manager.restore(state), manager.restore(state, 1000), manager.restore(state, best="val_loss")
        (2000, 1000, 1000)

        Args:
            step: a step, or ``best``. None or ``latest``: the highest step.
            best: the metric whose best value decides; short for ``"best"`` with ``metric``.
            metric: the metric that decides which is best. None: that of the retention policy's `KeepBest`.
            mode: ``min`` if low values are better, or ``max``. None: that of the metric's `KeepBest`, else ``min``.

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
        found = self._restoring.restore(state, orders[0], planner, requests[0])
        if found is None:
            return None
        self._restored(found)
        return found.step

    def latest_step(self) -> int | None:
        """The step that `restore` would load, as this rank sees it; None if there is none.

        >>> CheckpointManager("s3://bucket/run", read_only=True).latest_step()
        2000

        Raises:
            CorruptCheckpointError, StorageError
        """
        return self._restoring.step(latest_order)

    def best_step(self, metric: str | None = None, mode: Mode | None = None) -> int | None:
        """The step with the best value of a metric, as this rank sees it; None if there is none.

        >>> CheckpointManager("s3://bucket/run", read_only=True).best_step("val_loss")
        1000

        Raises:
            CheckpointNotFoundError: there are checkpoints, but none with the metric.
            SettingsError: it is undefined or ambiguous what is best.
            CorruptCheckpointError, StorageError
        """
        return self._restoring.step(self._order("best", metric, mode))

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
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
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
        """Before a restore: wait for the saves under way, and check that the manager is open."""

    @abstractmethod
    def _settle_step(self, step: int) -> None:
        """Wait for the current save if it is of this step."""

    @abstractmethod
    def _restored(self, found: ChosenCheckpoint) -> None:
        """Take note of the checkpoint that was loaded."""
