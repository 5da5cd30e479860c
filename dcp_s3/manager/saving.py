"""The one asynchronous save under way, and its result."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse

from dcp_s3.errors import SaveFailedError
from dcp_s3.failures import explain
from dcp_s3.manager.ranks import Ranks, for_others
from dcp_s3.save.writer import S3StorageWriter
from dcp_s3.stage.failure import FailedStaging
from dcp_s3.stage.stager import S3Stager
from dcp_s3.tracebacks import without_tracebacks

logger = logging.getLogger(__name__)


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
        stager: S3Stager | None,
        planner: SavePlanner | None,
        *,
        on_success: Callable[[], None],
    ) -> None:
        """Save on all ranks: in the background, or without a ``stager`` until it is committed. The previous save must
        have ended.

        Args:
            step: training step.
            url: URL of the checkpoint.
            state: the state, collected.
            writer: writer of this save.
            ranks: ranks that save together.
            stager: copies the state; None: it is not copied.
            planner: see `dcp.save`.
            on_success: called when the save is done, perhaps in another thread.

        Raises:
            SaveFailedError: the save has failed, or could not begin.
            StagingError: the state cannot be copied, and there are no other ranks.
        """
        if stager is None:
            try:
                state_dict_saver.save(state, storage_writer=writer, process_group=ranks.group, planner=planner)
            except CheckpointException as error:
                writer._tell_failed(error)  # also what a planner raised, and of other ranks
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
        without_tracebacks(error)
        good = "none yet" if self.last_good is None else f"step {self.last_good}"
        failure = SaveFailedError(
            f"the save of step {step} to {url} failed {explain(failures)}. Last good checkpoint of this run: {good}",
            url=url,
            step=step,
            failures=failures,
        )
        # One short line for the whole job: with CheckpointException every rank knows the failures of all ranks.
        logger.log(logging.DEBUG if shared and self._rank > 0 else logging.ERROR, "%s", failure)
        return failure

    def settle(self) -> None:
        """Wait for the current save. If it failed, keep the failure."""
        save = self._save
        if save is None:
            return
        save.ended.wait()
        self._failure = save.failure or self._failure
        self._save = None

    def raise_failure(self) -> None:
        """Raise the last save's failure, once."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
