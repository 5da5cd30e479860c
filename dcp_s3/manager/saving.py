"""The one asynchronous save under way, and its result."""

from __future__ import annotations

import atexit
import logging
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse

from dcp_s3.boundary import frames_of_others, left_by_save, log_failed_save
from dcp_s3.errors import SaveFailedError, SaveProtocolError
from dcp_s3.failures import Failed, first_cause, panel
from dcp_s3.manager.ranks import Ranks, for_others
from dcp_s3.save.separately import begin_separately
from dcp_s3.save.writer import S3StorageWriter
from dcp_s3.stage.failure import FailedStaging
from dcp_s3.stage.release import release
from dcp_s3.stage.stager import S3Stager
from dcp_s3.tracebacks import without_tracebacks

logger = logging.getLogger(__name__)

_open: weakref.WeakSet[Saving] = weakref.WeakSet()


def save_in_background(
    state: dict[str, Any],
    writer: S3StorageWriter,
    ranks: Ranks,
    stager: S3Stager,
    planner: SavePlanner | None = None,
) -> Future[None] | AsyncSaveResponse:
    """Copy the state and save it in the background; what `dcp.async_save` returns.

    Args:
        state: as for `dcp.save`.
        writer: writer of this save.
        ranks: ranks that save together; all of them call this.
        stager: with a blocking one the result is a future, with an asynchronous one a response.
        planner: see `dcp.save`.

    Raises:
        CheckpointException: the save could not begin on this rank, with the reason as its cause. It fails on all ranks.
        StagingError: the state cannot be copied, and there are no other ranks.
    """
    try:
        return state_dict_saver.async_save(
            state, storage_writer=writer, process_group=ranks.group, async_stager=stager, planner=planner
        )
    except Exception as error:
        if ranks.size == 1:
            raise
        # For example, no thread could start. The other ranks' saves wait for this rank, so it takes part and makes
        # them fail.
        try:
            state_dict_saver.save(FailedStaging(error), storage_writer=writer, process_group=ranks.group)
        except CheckpointException as failed:
            raise failed from error
        raise


def upload_of(begun: Future[None] | AsyncSaveResponse) -> Future[None]:
    """The future of the whole save, of what `save_in_background` returned."""
    return begun.upload_completion if isinstance(begun, AsyncSaveResponse) else begun


@dataclass
class _SaveUnderWay:
    """A save under way. ``ended`` is set when its end has been handled, shortly after the future is done."""

    step: int
    url: str
    ended: threading.Event
    failure: SaveFailedError | None = None


class Saving:
    """At most one save at a time. A failure is logged when it happens, and kept until it is raised.

    Args:
        rank: rank of this process. The first rank logs what all ranks know.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._save: _SaveUnderWay | None = None
        self._failure: SaveFailedError | None = None
        self.last_good: int | None = None
        """The last step that was saved or restored."""
        _open.add(self)

    @property
    def is_first(self) -> bool:
        """Whether this rank says what all know."""
        return self._rank == 0

    @property
    def step(self) -> int | None:
        """The step being saved; None if none is."""
        return None if self._save is None else self._save.step

    def run(
        self,
        step: int,
        url: str,
        state: dict[str, Any],
        writer: S3StorageWriter,
        ranks: Ranks,
        stager: S3Stager,
        planner: SavePlanner | None,
        *,
        blocking: bool,
        on_success: Callable[[], None],
    ) -> None:
        """Save on all ranks, in the background. The previous save must have ended.

        Args:
            step: training step.
            url: URL of the checkpoint.
            state: the state, collected.
            writer: writer of this save.
            ranks: ranks that save together.
            stager: copies the state.
            planner: see `dcp.save`.
            blocking: return when it is committed, and do not copy the state. Of ranks that are not `collective`: return
                when this rank's part is on S3; the state is copied, as what a dead rank leaves is made up for later.
            on_success: called when the save is done, perhaps in another thread.

        Raises:
            SaveFailedError: the save has failed, or could not begin.
            StagingError: the state cannot be copied, and there are no other ranks, or they are not `collective`.
        """
        if not ranks.collective:
            save = begin_separately(state, writer, rank=ranks.rank, stager=stager, planner=planner)
            self.begin(step, url, save.committed, on_success=on_success)
            save.committed.add_done_callback(release)  # after its failure was told, with its frames
            if blocking:
                save.durable.wait()
                if save.committed.done():
                    self.settle()
                    self.raise_failure()
            return
        if blocking:
            try:
                state_dict_saver.save(state, storage_writer=writer, process_group=ranks.group, planner=planner)
            except CheckpointException as error:
                raise self.fail(step, url, error) from None
            self.last_good = step
            on_success()
            return
        try:
            future = upload_of(save_in_background(state, writer, ranks, stager, planner))
        except CheckpointException as error:
            raise self.fail(step, url, error) from error.__cause__
        self.begin(step, url, future, on_success=on_success)

    def begin(self, step: int, url: str, future: Future[None], *, on_success: Callable[[], None]) -> None:
        """Track a save that has begun. The previous one must have ended.

        Args:
            step: training step.
            url: URL of the checkpoint.
            future: future of `dcp.async_save`.
            on_success: called in another thread when the save is done.
        """
        save = _SaveUnderWay(step, url, threading.Event())

        def end(future: Future[None]) -> None:
            try:
                error = future.exception()
                if error is None:
                    self.last_good = step
                    on_success()
                else:
                    save.failure = self.fail(step, url, error)
            finally:
                save.ended.set()

        self._save = save
        future.add_done_callback(end)

    def fail(self, step: int, url: str, error: BaseException) -> SaveFailedError:
        """Log the failure of a save in a few words. Returns its error, which holds none of the state and so may be
        kept.

        Args:
            step: training step.
            url: URL of the checkpoint.
            error: the error of `dcp.save`, or of the future of `dcp.async_save`.
        """
        failures = {self._rank: error}
        shared = isinstance(error, CheckpointException)
        if isinstance(error, CheckpointException):
            failures = {failed: cause for failed, (cause, _) in error.failures.items()}
        failures = {failed: for_others(cause) for failed, cause in failures.items()}
        frames = frames_of_others(error)
        without_tracebacks(error)
        told = Failed(
            f"the save of step {step} to {url}",
            failures,
            left=left_by_save(failures.values()),
            last_good="none of this run yet" if self.last_good is None else f"step {self.last_good}",
            resume="" if self.last_good is None else "manager.restore(state)",
        )
        failure = SaveFailedError(panel(told), url=url, step=step, failures=failures, rank=self._rank)
        if self._rank > 0 and isinstance(error, SaveProtocolError):  # without collectives: each rank that is left knows
            logger.error("step %d is not saved: %s", step, first_cause(failures))
        else:
            log_failed_save(str(failure) + frames, failure, others_know=shared, rank=self._rank)
        return failure

    def settle(self) -> None:
        """Wait for the current save. If it failed, keep the failure."""
        save = self._save
        if save is None:
            return
        save.ended.wait()
        self._failure = save.failure or self._failure
        self._save = None

    @property
    def left(self) -> str:
        """What nobody was told when the process ends: a save that failed, or that is not done. Empty: nothing."""
        save = self._save
        failure = self._failure or (None if save is None else save.failure)
        if failure is not None:
            return f"step {failure.step} was not saved to {failure.url}, and nothing raised it"
        if save is not None and not save.ended.is_set():
            return f"the save of step {save.step} to {save.url} is cut off"
        return ""

    def raise_failure(self) -> None:
        """Raise the last save's failure, once."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure


@atexit.register
def _at_exit() -> None:
    # The exit status stays as it is: only os._exit could change it here, which skips what other libraries do at the
    # end, and what waits to be written.
    for each in list(_open):
        if each.is_first and (left := each.left):
            logger.error("the process ends: %s. Remedy: close the CheckpointManager, or use it in a `with`", left)
