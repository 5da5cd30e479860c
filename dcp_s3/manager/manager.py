"""CheckpointManager: the checkpoints of one training run."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Literal

import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner

from dcp_s3 import errors
from dcp_s3.checkpoint.boundary import explain
from dcp_s3.checkpoint.reader import S3StorageReader
from dcp_s3.checkpoint.writer import S3StorageWriter, Separate
from dcp_s3.manager import restore as restoring
from dcp_s3.manager.arguments import check_settings, check_step, resolve_policy, step_name
from dcp_s3.manager.background import BackgroundRetention
from dcp_s3.manager.ranks import Ranks, portable
from dcp_s3.manager.saving import Saving, explain_save
from dcp_s3.retention.catalog import CheckpointCatalog
from dcp_s3.retention.counts import counting
from dcp_s3.retention.marks import annotate
from dcp_s3.retention.policy import Mode, PolicyFunction
from dcp_s3.retention.prune import prune
from dcp_s3.settings import Settings, SettingsLike, resolve_settings
from dcp_s3.staging.stager import S3Stager
from dcp_s3.url import parse_url

logger = logging.getLogger(__name__)


def _prune(root: str, policy: PolicyFunction, settings: Settings, check: Callable[[], None]) -> None:
    with counting() as count:
        count(prune(root, policy, settings=settings, progress=lambda *_: check()))


class CheckpointManager:
    """Saves and restores the checkpoints of a run, ``{root}/step-00001000`` and so on, and keeps what a policy keeps.

    Works with torch.distributed and without. With it every rank makes a manager, and every rank calls `save` and
    `restore`; they agree on what is saved and restored. The other methods are each rank's own.

    Saves go on in the background, one at a time. When one is committed, retention runs on the first rank in another
    thread. It never delays or fails the training: what goes wrong is logged and counted (``dcp_s3.metrics()``).

    A save that fails is logged at once, on every rank, and raised (`SaveFailedError`) by that rank's next `save`,
    `wait` or `close`, once.

    Args:
        root: ``s3://bucket/run``.
        retention: a policy (``KeepLatest(3) | KeepBest(2, "val_loss", "min")``), or text like that of
            ``DCP_S3_RETENTION``. None: what that says; without it, and for empty text, nothing is deleted.
        settings: a `Settings`, or a mapping of those that differ from the environment.
        process_group: of the saves and loads alone, with a CPU backend. None: a new gloo group of all ranks.
        overwrite: whether a save replaces a committed checkpoint of the same step. Otherwise it fails with
            CheckpointExistsError.
        separate: FQN prefixes that get objects of their own, see `S3StorageWriter`.
        weights_only: see `S3StorageReader`.
        retention_timeout: seconds for which `close` waits for retention.

    Raises:
        InvalidURLError, SettingsError
        PolicyError: ``retention`` is no policy.
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
    ) -> None:
        self.settings: Settings = resolve_settings(settings)
        self.root = parse_url(root)
        self.overwrite = overwrite
        self.separate = separate
        self.weights_only = weights_only
        self.retention_timeout = retention_timeout
        self.retention = resolve_policy(retention, self.settings)
        check_settings(self.settings, prunes=self.retention is not None)
        self._catalog = CheckpointCatalog(self.root_url, settings=self.settings)
        self._stager = S3Stager(self.settings)
        self._closed = False
        self._ranks = Ranks(process_group)
        self._saving = Saving(self._ranks.rank)
        self._retention: BackgroundRetention | None = None
        if self.retention is not None and self._ranks.is_first:
            work = functools.partial(_prune, self.root_url, self.retention, self.settings)
            self._retention = BackgroundRetention(work, self.root_url)

    @property
    def root_url(self) -> str:
        """``s3://bucket/run``."""
        return str(self.root)

    def url(self, step: int) -> str:
        """Where `save` puts a step."""
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

        First waits for the save before, if that still goes on; then copies the state and returns, while the upload goes
        on in the background.

        Args:
            step: of the training, 0 or more.
            state: as for `dcp.save`: tensors, DTensors, Stateful objects and so on by name.
            metrics: numbers, text and bools to store with it; those of the first rank count. See also `annotate`.
            blocking: return only when it is committed, without a copy.
            planner: see `dcp.save`.

        Raises:
            SaveFailedError: this save with ``blocking``, otherwise an earlier one: this state was not saved then.
            SaveProtocolError: the ranks save different steps, or a metric can not be stored.
            StagingError: the state can not be copied.
        """
        problem: BaseException | None = None
        writer = None
        try:
            self._check_open()
            writer = S3StorageWriter(
                self.url(step),
                overwrite=self.overwrite,
                metrics=metrics,
                separate=self.separate,
                settings=self.settings,
            )
        except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks wait for this one
            problem = error
        self._saving.settle()
        problem = self._saving.take_failure() or problem
        self._agree_on_save(step, problem)
        assert writer is not None  # noqa: S101 - for mypy
        url = self.url(step)
        if blocking:
            try:
                state_dict_saver.save(state, storage_writer=writer, process_group=self._ranks.group, planner=planner)
            except CheckpointException as error:
                raise explain_save(step, url, self._ranks.rank, error) from None
            self._saved(writer)
            return
        future = state_dict_saver.async_save(
            state,
            storage_writer=writer,
            process_group=self._ranks.group,
            async_stager=self._stager,
            planner=planner,
        )
        assert isinstance(future, Future)  # noqa: S101 - the stager is a blocking one
        self._saving.begin(step, url, future, on_success=lambda: self._saved(writer))

    def wait(self) -> None:
        """Wait for the save under way. With ``DCP_S3_DURABILITY=local`` that is until it is on local disks.

        Raises:
            SaveFailedError: a save has failed.
        """
        self._saving.settle()
        self._saving.raise_failure()

    def annotate(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Add metrics to a checkpoint that was saved, see `dcp_s3.annotate`. Every rank may call it: the first one
        writes. It waits for the save of this step, if that goes on.

        Raises:
            MetricsError, StorageError
            CheckpointNotFoundError: there is no committed checkpoint of this step.
        """
        if not self._ranks.is_first:
            return
        if self._saving.step == step:
            self._saving.settle()
        annotate(self.url(step), metrics, settings=self.settings)

    def _saved(self, writer: S3StorageWriter) -> None:
        if self._retention is not None:
            # With durability s3, a save that is done is committed.
            local = self.settings.durability == "local"
            self._retention.saved(writer.wait_committed if local else lambda _: None)

    def _agree_on_save(self, step: int, problem: BaseException | None) -> None:
        """Raise on all ranks if one of them can not go on, or means another step."""
        answers = self._ranks.gather((step, None if problem is None else portable(problem)))
        if problem is not None:
            raise problem
        for rank, (_, other) in enumerate(answers):
            if other is not None:
                raise errors.SaveFailedError(
                    f"step {step} is not saved: rank {rank} can not go on: {other}", url=self.url(step), step=step,
                    failures={rank: other},
                )  # fmt: skip
        steps = {rank: step for rank, (step, _) in enumerate(answers)}
        if len(set(steps.values())) > 1:
            raise errors.SaveProtocolError(
                f"the ranks save different steps to {self.root}: {steps} (by rank). Remedy: call save with the same "
                "step on all",
                url=self.root_url,
            )

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
        """Load a checkpoint into ``state``, in place. Every rank calls it; the first one chooses for all.

        If the latest or the best one turns out to be gone or damaged, the next one is loaded, with a warning in the
        log; what had been loaded is overwritten. Other failures are raised.

        Args:
            state: as for `dcp.load`.
            step: a step, or ``best``; None or ``latest``: the highest one.
            metric: by which the best is chosen; None: as the `KeepBest` of the retention policy says.
            mode: ``min`` (as without) if low values of it are better, or ``max``.
            planner: see `dcp.load`.

        Returns:
            The step that was loaded. None if there is none yet: nothing was committed under the root.

        Raises:
            CheckpointNotFoundError: there are checkpoints, but none of this step, or with this metric.
            CorruptCheckpointError: those that were asked for can not be loaded.
            RestoreFailedError: the load failed; ``failures`` has the causes by rank. The state may be loaded in part.
            PolicyError: what is best can not be told.
            StorageError
        """
        problem: Exception | None = None
        order: restoring.Order = restoring.latest_order
        try:
            self._check_open()
            order = self._order(step, metric, mode)
        except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks wait for this one
            problem = error
        self._saving.settle()
        self._agree_on_request((step, metric, mode), problem)
        passed_over: list[str] = []
        while True:
            found = self._ranks.from_first(lambda: self._find(order, passed_over))
            if found is None:
                return None
            url, loaded = found
            reader = S3StorageReader(url, weights_only=self.weights_only, settings=self.settings)
            mine = restoring.load(state, reader, group=self._ranks.group, rank=self._ranks.rank, planner=planner)
            failures: dict[int, BaseException] = {}
            for each in self._ranks.gather(mine):
                failures.update(each)
            if not failures:
                return loaded
            why = f"{url} could not be restored: {explain(failures)}"
            if not restoring.is_unusable(failures):
                raise errors.RestoreFailedError(why, url=url, step=loaded, failures=failures)
            if self._ranks.is_first:
                logger.warning("%s. Looking for another one", why)
            passed_over.append(url)

    def latest_step(self) -> int | None:
        """The step that `restore` would load, as this rank sees it; None if there is none.

        Raises:
            CorruptCheckpointError, StorageError
        """
        found = self._find(restoring.latest_order, ())
        return None if found is None else found[1]

    def best_step(self, metric: str | None = None, mode: Mode | None = None) -> int | None:
        """The step with the best value of a metric, as this rank sees it; None if there is none.

        Raises:
            CheckpointNotFoundError: there are checkpoints, but none with the metric.
            PolicyError: what is best can not be told.
            CorruptCheckpointError, StorageError
        """
        found = self._find(self._order("best", metric, mode), ())
        return None if found is None else found[1]

    def _order(self, step: int | str | None, metric: str | None, mode: Mode | None) -> restoring.Order:
        if step == "best":
            return restoring.best_order(*restoring.best_of(self.retention, metric, mode))
        if step is None or step == "latest":
            return restoring.latest_order
        return restoring.step_order(check_step(step))

    def _find(self, order: restoring.Order, passed_over: list[str] | tuple[()]) -> tuple[str, int] | None:
        info = restoring.find(self._catalog, order, passed_over=passed_over)
        if info is None or info.step is None:
            return None
        return info.url, info.step

    def _agree_on_request(self, request: tuple[Any, ...], problem: Exception | None) -> None:
        answers = self._ranks.gather((request, None if problem is None else portable(problem)))
        if problem is not None:
            raise problem
        for rank, (_, other) in enumerate(answers):
            if other is not None:
                raise errors.CheckpointError(
                    f"nothing is restored: rank {rank} can not go on: {type(other).__name__}: {other}",
                    url=self.root_url,
                )
        requests = [request for request, _ in answers]
        if len(set(requests)) > 1:
            raise errors.CheckpointError(
                f"the ranks restore different checkpoints of {self.root}: {dict(enumerate(requests))} (by rank). "
                "Remedy: call restore with the same arguments on all",
                url=self.root_url,
            )

    # --- end -----------------------------------------------------------------------------------------

    def close(self) -> None:
        """Wait for the save under way, then for retention (at most ``retention_timeout`` seconds); free the buffers.

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
