"""CheckpointManager: the checkpoints of one training run."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Literal

import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner

from dcp_s3 import errors
from dcp_s3.failures import name_failed
from dcp_s3.format.layout import step_of
from dcp_s3.manager import arguments
from dcp_s3.manager.arguments import check_step, step_name
from dcp_s3.manager.background import BackgroundRetention, commit_of, retain
from dcp_s3.manager.choosing import Order, best_of, best_order, latest_order, step_order
from dcp_s3.manager.ranks import Failures, Ranks
from dcp_s3.manager.restore import Restoring
from dcp_s3.manager.saving import Saving, save_in_background, upload_of
from dcp_s3.manager.waiting import look_at_disk
from dcp_s3.retention.catalog import CheckpointCatalog
from dcp_s3.retention.marks import annotate
from dcp_s3.retention.policy import Mode, PolicyFunction
from dcp_s3.save.writer import S3StorageWriter, Separate
from dcp_s3.settings import SettingsLike
from dcp_s3.stage.stager import S3Stager
from dcp_s3.uncaught import install

logger = logging.getLogger(__name__)


class CheckpointManager:
    """Saves and restores the checkpoints of a run, ``{root}/step-00001000`` and so on, and applies a retention policy.

    Works with and without torch.distributed. With it, every rank makes a manager and calls `save` and `restore`; the
    ranks agree on what is saved and restored. The other methods are local to each rank.

    Saves run in the background, one at a time. After each commit, retention runs on the first rank, in another thread.
    It never delays or fails the training: its failures are logged and counted (``dcp_s3.metrics()``).

    A failed save is logged at once, by the first rank. Each rank's next `save`, `wait` or `close` raises it once, as
    `SaveFailedError`.

    An error on one rank is an error on all. The other ranks raise a CheckpointError that names it.

    Args:
        root: ``s3://bucket/run``.
        retention: a policy (``KeepLatest(3) | KeepBest(2, "val_loss", "min")``), or text in the form of
            ``DCP_S3_RETENTION``. None: the policy in ``DCP_S3_RETENTION``. If that is unset, or the text is empty,
            nothing is deleted.
        settings: a `Settings`, or a mapping of settings that override the environment.
        process_group: a group with a CPU backend, used only for these saves and loads. None: a new gloo group of all
            ranks.
        overwrite: replace a committed checkpoint of the same step. Otherwise the save fails with CheckpointExistsError.
        separate: FQN prefixes that get their own objects, see `S3StorageWriter`.
        weights_only: see `S3StorageReader`.
        retention_timeout: seconds for which `close` waits for retention.
        drain_timeout: seconds for which `restore` waits for a checkpoint on the disks of several hosts to reach S3,
            counted from the last progress. After that it takes an older one.

    Raises:
        InvalidURLError, SettingsError
        PolicyError: ``retention`` is not a policy.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        retention: PolicyFunction | str | None = None,
        settings: SettingsLike = None,
        process_group: dist.ProcessGroup | None = None,
        overwrite: bool = False,
        separate: Separate | None = None,
        weights_only: bool = True,
        retention_timeout: float = 60.0,
        drain_timeout: float = 600.0,
    ) -> None:
        install()  # first: what is wrong with the arguments is told as well
        self.overwrite = overwrite
        self.separate = separate
        self.weights_only = weights_only
        self.retention_timeout = retention_timeout
        self.drain_timeout = drain_timeout
        self._closed = False
        # First: through the group the other ranks learn if the arguments of one rank are wrong.
        self._ranks = Ranks(process_group)

        def configure() -> tuple[str, frozenset[str]]:
            timeouts = {"retention_timeout": retention_timeout, "drain_timeout": drain_timeout}
            found = arguments.configure(root, retention, settings, separate, timeouts)
            self.root, self.settings, self.retention = found.root, found.settings, found.retention
            self._catalog = CheckpointCatalog(str(found.root), settings=found.settings)
            self._stager = S3Stager(found.settings)
            waiting = look_at_disk(self._catalog).commits
            return self.root_url, frozenset(each.info.url for each in waiting)

        told = self._ranks.agree(configure, self._refuse("no CheckpointManager is made"))
        roots = {rank: url for rank, (url, _) in enumerate(told)}
        if len(set(roots.values())) > 1:
            raise errors.CheckpointError(
                f"the ranks have different roots: {roots} (by rank). Remedy: pass the same root"
            )
        self._left = frozenset[str]().union(*(urls for _, urls in told))
        """URLs of steps that an earlier run left on disk and this run has not reached yet. If this run saves one of
        them, it has diverged from that run, and replaces the old checkpoint."""
        self._saving = Saving(self._ranks.rank)
        self._restoring = Restoring(self._catalog, self._ranks, weights_only=weights_only, drain_timeout=drain_timeout)
        self._retention: BackgroundRetention | None = None
        if self.retention is not None and self._ranks.is_first:
            self._retention = retain(self.root_url, self.retention, self.settings)

    @property
    def root_url(self) -> str:
        """``s3://bucket/run``."""
        return str(self.root)

    def url(self, step: int) -> str:
        """URL to which `save` saves a step."""
        return str(self.root.child(step_name(step)))

    # --- save ----------------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        state: dict[str, Any],
        metrics: Mapping[str, Any] | None = None,
        *,
        blocking: bool = False,
        planner: SavePlanner | None = None,
    ) -> None:
        """Save the state of a step. Every rank calls it.

        Waits for the previous save, copies the state, and returns. The upload goes on in the background.

        Args:
            step: training step, 0 or more.
            state: as for `dcp.save`: a dict of tensors, DTensors, Stateful objects and so on.
            metrics: numbers, text and bools to store with it. The first rank's metrics are used. See also `annotate`.
            blocking: return only when the save is committed; the state is not copied.
            planner: see `dcp.save`.

        Raises:
            SaveFailedError: with ``blocking``: this save failed. Otherwise: an earlier save failed, and this state was
                not saved. Or a rank cannot go on, or a ``state_dict`` in the state raised on a rank.
            SaveProtocolError: the ranks save different steps, or a metric cannot be stored.
            StagingError: the state cannot be copied.
        """
        made: list[S3StorageWriter] = []
        collected: dict[str, Any] = {}

        def begin() -> tuple[int, bool]:
            self._saving.settle()
            self._saving.raise_failure()
            self._check_open()
            arguments.check_save(step, state, metrics, planner)
            url = self.url(step)
            writer = S3StorageWriter(
                url,
                overwrite=self.overwrite or url in self._left,
                metrics=metrics,
                separate=self.separate,
                settings=self.settings,
            )
            writer.caller_reports = True
            made.append(writer)
            return step, arguments.has_stateful(state)

        told = self._ranks.agree(begin, self._refuse_save(step))
        steps = {rank: each for rank, (each, _) in enumerate(told)}
        if len(set(steps.values())) > 1:
            raise errors.SaveProtocolError(
                f"the ranks save different steps to {self.root}: {steps} (by rank). Remedy: call save with the same "
                "step on all",
                url=self.root_url,
            )
        if any(stateful for _, stateful in told):
            # Separately: a `state_dict` may use collectives, so all ranks must have come this far.
            self._ranks.agree(
                lambda: collected.update(arguments.to_state_dict(state)), self._refuse_save(step), alike=True
            )
        else:
            collected.update(state)
        url, writer = self.url(step), made[0]
        if url in self._left:
            self._left -= {url}
            if self._ranks.is_first:
                logger.warning("%s waited on disk from an earlier run: it is saved again and replaced", url)
        if blocking:
            try:
                state_dict_saver.save(
                    collected, storage_writer=writer, process_group=self._ranks.group, planner=planner
                )
            except CheckpointException as error:
                raise self._saving.fail(step, url, error) from None
            self._saving.last_good = step
            self._saved(writer)
            return
        try:
            future = upload_of(save_in_background(collected, writer, self._ranks, self._stager, planner))
        except CheckpointException as error:
            raise self._saving.fail(step, url, error) from error.__cause__
        self._saving.begin(step, url, future, on_success=lambda: self._saved(writer))

    def wait(self) -> None:
        """Wait for the current save: until it is committed, or with ``DCP_S3_DURABILITY=local`` until it is on local
        disks.

        Raises:
            SaveFailedError: a save has failed.
        """
        self._saving.settle()
        self._saving.raise_failure()

    def annotate(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Add metrics to a saved checkpoint, see `dcp_s3.annotate`. Every rank may call it; only the first one writes.

        Waits for the save of this step if it is still going on.

        Raises:
            MetricsError, StorageError
            CheckpointNotFoundError: there is no committed checkpoint of this step.
        """
        arguments.check_annotate(step, metrics)
        if not self._ranks.is_first:
            return
        if self._saving.step == step:
            self._saving.settle()
        annotate(self.url(step), metrics, settings=self.settings)

    def _saved(self, writer: S3StorageWriter) -> None:
        if self._retention is not None:
            self._retention.saved(commit_of(writer, self.settings))

    def _refuse_save(self, step: int) -> Callable[[Failures], errors.SaveFailedError]:
        """Make the error of a save that did not begin because some ranks cannot go on."""
        return lambda failures: errors.SaveFailedError(
            f"step {step} is not saved: {name_failed(failures)}", url=self.url(step), step=step, failures=failures
        )

    def _refuse(self, what: str) -> Callable[[Failures], errors.CheckpointError]:
        return lambda failures: errors.CheckpointError(f"{what}: {name_failed(failures)}")

    # --- restore -------------------------------------------------------------------------------------

    def restore(
        self,
        state: dict[str, Any],
        step: int | Literal["best", "latest"] | None = None,
        *,
        metric: str | None = None,
        mode: Mode | None = None,
        planner: LoadPlanner | None = None,
    ) -> int | None:
        """Load a checkpoint into ``state``, in place. Every rank calls it; the first rank chooses for all.

        Checkpoints that wait on disk for S3 count too (``DCP_S3_DURABILITY=local``, or S3 was away when they were
        saved). One that every rank has whole on its own disk is loaded from there; otherwise it must reach S3 first.

        If the latest or best one turns out to be gone or damaged, the next one is loaded and a warning logged; what had
        been loaded is overwritten. Other failures are raised.

        Args:
            state: as for `dcp.load`.
            step: a step, or ``best``. None or ``latest``: the highest step.
            metric: the metric that decides which is best. None: that of the retention policy's `KeepBest`.
            mode: ``min`` (the default) if low values are better, or ``max``.
            planner: see `dcp.load`.

        Returns:
            The step that was loaded. None if nothing was committed under the root yet.

        Raises:
            CheckpointNotFoundError: there are checkpoints, but none of this step, or with this metric.
            CorruptCheckpointError: the requested checkpoints cannot be loaded.
            RestoreFailedError: the load failed; ``failures`` has the causes by rank. The state may be partly loaded.
            PolicyError: it is undefined or ambiguous what is best.
            StorageError
        """
        orders: list[Order] = []

        def begin() -> tuple[int | str | None, str | None, Mode | None]:
            self._saving.settle()
            self._check_open()
            arguments.check_restore(state, step, planner)
            orders.append(self._order(step, metric, mode))
            return step, metric, mode

        requests = self._ranks.agree(begin, self._refuse("nothing is restored"))
        if len(set(requests)) > 1:
            raise errors.CheckpointError(
                f"the ranks restore different checkpoints of {self.root}: {dict(enumerate(requests))} (by rank). "
                "Remedy: call restore with the same arguments on all",
                url=self.root_url,
            )
        found = self._restoring.restore(state, orders[0], planner)
        if found is None:
            return None
        # Up to this step, what an earlier run left is this run's own past.
        self._left = frozenset(url for url in self._left if (step_of(url) or 0) > found.step)
        self._saving.last_good = found.step
        return found.step

    def latest_step(self) -> int | None:
        """The step that `restore` would load, as this rank sees it; None if there is none.

        Raises:
            CorruptCheckpointError, StorageError
        """
        return self._restoring.step(latest_order)

    def best_step(self, metric: str | None = None, mode: Mode | None = None) -> int | None:
        """The step with the best value of a metric, as this rank sees it; None if there is none.

        Raises:
            CheckpointNotFoundError: there are checkpoints, but none with the metric.
            PolicyError: it is undefined or ambiguous what is best.
            CorruptCheckpointError, StorageError
        """
        return self._restoring.step(self._order("best", metric, mode))

    def _order(self, step: int | str | None, metric: str | None, mode: Mode | None) -> Order:
        if step == "best":
            return best_order(*best_of(self.retention, metric, mode))
        if step is None or step == "latest":
            return latest_order
        return step_order(check_step(step))

    # --- end -----------------------------------------------------------------------------------------

    def close(self) -> None:
        """Wait for the current save, then for retention (at most ``retention_timeout`` seconds). Then free the buffers.

        Raises:
            SaveFailedError: a save has failed.
        """
        if self._closed:
            return
        self._saving.settle()
        self._closed = True
        if self._retention is not None:
            self._retention.close(self.retention_timeout)
        self._stager.close()
        self._saving.raise_failure()

    def __enter__(self) -> CheckpointManager:
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

    def _check_open(self) -> None:
        if self._closed:
            raise errors.CheckpointError(
                f"the CheckpointManager of {self.root} was closed. Remedy: close it after the last save, or make a new "
                "one",
                url=self.root_url,
            )
