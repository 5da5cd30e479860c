"""The asynchronous saves under way, and their results."""

from __future__ import annotations

import atexit
import itertools
import logging
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse

from dcp_s3.errors import SaveFailedError, SaveProtocolError
from dcp_s3.failures import Failed, first_cause, frames_of_others, left_by_save, panel, without_tracebacks
from dcp_s3.manager.line import Line, Overlap
from dcp_s3.manager.ranks import Ranks, for_others
from dcp_s3.save.separately import begin_separately, stage_separately
from dcp_s3.save.writer import S3StorageWriter
from dcp_s3.stage.handover import FailedStaging
from dcp_s3.stage.stager import S3Stager, StagedBefore

logger = logging.getLogger(__name__)

_open: weakref.WeakSet[Saving] = weakref.WeakSet()


def save_in_background(
    state: dict[str, Any],
    writer: S3StorageWriter,
    ranks: Ranks,
    stager: AsyncStager,
    planner: SavePlanner | None = None,
) -> Future[None] | AsyncSaveResponse:
    """Copy the state and save it in the background; what `dcp.async_save` returns. All ranks call this. With a blocking
    stager the result is a future, with an asynchronous one a response.

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


@dataclass(frozen=True)
class SaveRequest:
    """A save that the training asks for, without its state."""

    step: int
    url: str
    """URL of the checkpoint."""
    writer: S3StorageWriter
    """Writer of this save alone."""
    ranks: Ranks
    """The ranks that save together."""
    stager: S3Stager
    """Copies the state."""
    planner: SavePlanner | None
    """See `dcp.save`."""
    on_success: Callable[[], None]
    """Called when the save is done, perhaps in another thread."""


@dataclass(eq=False)
class _SaveUnderWay:
    """A save that waits for its upload, or uploads. ``ended`` is set when its end has been handled, shortly after the
    future is done."""

    number: int
    step: int
    url: str
    ended: threading.Event = field(default_factory=threading.Event)
    failure: SaveFailedError | None = None


class Saving:
    """The saves under way: at most one uploads, and as many as ``room`` are staged and wait. A failure is logged when
    it happens, and kept until it is raised. The first rank logs what all ranks know.
    """

    def __init__(self, rank: int, overlap: Overlap = "wait", room: int = 0) -> None:
        self._rank = rank
        self._overlap: Overlap = overlap
        self._begun = 0
        self._saves: list[_SaveUnderWay] = []
        self._failures: list[tuple[int, SaveFailedError]] = []
        self.line = Line(room)
        """The saves whose uploads have not begun."""
        self.last_good: int | None = None
        """The last step that was saved or restored."""
        self.fails_first = True
        """Whether an earlier failure is raised instead of a save. Not where each rank fails alone: the others would
        save without it."""
        _open.add(self)

    @property
    def is_first(self) -> bool:
        """Whether this rank says what all know."""
        return self._rank == 0

    @property
    def is_under_way(self) -> bool:
        """Whether a save has not ended."""
        return any(not save.ended.is_set() for save in self._saves)

    def look(self) -> int | None:
        """Number of the newest save that has failed and was not raised, when another one is to begin. All ranks number
        them alike.

        Raises:
            SaveFailedError: if saves do not overlap: an earlier save has failed.
        """
        if self._overlap == "wait":
            self.settle()
            if self.fails_first:
                self.raise_failure()
            return None
        self._collect()
        return max((number for number, _ in self._failures), default=None) if self.fails_first else None

    def make_room(self) -> None:
        """Wait until one more save may wait."""
        if self._overlap != "wait":
            self.line.wait_for_room()

    def run(self, request: SaveRequest, state: dict[str, Any], *, blocking: bool) -> None:
        """Save on all ranks, in the background, as soon as the previous saves have ended.

        ``blocking``: return when it is committed, and do not copy the state. Of ranks that are not `collective`: return
        when this rank's part is on S3; the state is copied, as what a dead rank leaves is made up for later.

        Raises:
            SaveFailedError: the save has failed, or could not begin.
            StagingError: the state cannot be copied, and there are no other ranks, or they are not `collective`.
        """
        step, url, writer, ranks = request.step, request.url, request.writer, request.ranks
        if blocking:
            self.settle()
        if not ranks.collective and (blocking or self._overlap == "wait"):
            save = begin_separately(
                stage_separately(state, writer, request.stager), writer, rank=ranks.rank, planner=request.planner
            )
            begun = self.begin(step, url, save.committed, on_success=request.on_success)
            if blocking:
                save.durable.wait()
                if save.committed.done():
                    self._raise_failure_of(begun)
            return
        if blocking:
            try:
                state_dict_saver.save(state, storage_writer=writer, process_group=ranks.group, planner=request.planner)
            except CheckpointException as error:
                raise self.fail(step, url, error) from None
            self.last_good = step
            request.on_success()
            return
        if self._overlap != "wait":
            self._put_in_line(request, state)
            return
        try:
            future = upload_of(save_in_background(state, writer, ranks, request.stager, request.planner))
        except CheckpointException as error:
            raise self.fail(step, url, error) from error.__cause__
        self.begin(step, url, future, on_success=request.on_success)

    def _put_in_line(self, request: SaveRequest, state: dict[str, Any]) -> None:
        """Stage the state now, and begin the upload when its turn comes."""
        writer, ranks, planner = request.writer, request.ranks, request.planner
        if ranks.collective:
            began = time.monotonic()
            copied = request.stager.stage_now(state)
            staged = StagedBefore(copied, time.monotonic() - began)
            del copied

            def upload() -> Future[None]:
                return upload_of(save_in_background({}, writer, ranks, staged, planner))

        else:
            copies = [stage_separately(state, writer, request.stager)]

            def upload() -> Future[None]:
                return begin_separately(copies.pop(), writer, rank=ranks.rank, planner=planner).committed

        save = self._track(request.step, request.url)

        def begin() -> Future[None]:
            future: Future[None] = Future()
            try:
                future = upload()
            except BaseException as error:
                future.set_exception(error)
                if not isinstance(error, (Exception, CheckpointException)):
                    raise
            finally:
                self._end_with(save, future, request.on_success)
            return future

        self.line.add(begin)

    def _raise_failure_of(self, save: _SaveUnderWay) -> None:
        """Raise the failure of one save, if it has failed. Those of others are kept."""
        save.ended.wait()
        self._collect()
        if save.failure is not None:
            self._failures = [each for each in self._failures if each[0] != save.number]
            raise save.failure

    def begin(self, step: int, url: str, future: Future[None], *, on_success: Callable[[], None]) -> _SaveUnderWay:
        """Track a save that has begun, by the future of `dcp.async_save`. The previous one must have ended.
        ``on_success`` is called in another thread when it is done."""
        save = self._track(step, url)
        self._end_with(save, future, on_success)
        return save

    def _track(self, step: int, url: str) -> _SaveUnderWay:
        self._begun += 1
        save = _SaveUnderWay(self._begun, step, url)
        self._saves.append(save)
        return save

    def _end_with(self, save: _SaveUnderWay, future: Future[None], on_success: Callable[[], None]) -> None:
        """Handle the end of a save when its future is done."""

        def end(future: Future[None]) -> None:
            try:
                error = future.exception()
                if error is None:
                    self.last_good = save.step
                    on_success()
                else:
                    save.failure = self.fail(save.step, save.url, error)
            finally:
                save.ended.set()

        future.add_done_callback(end)

    def fail(self, step: int, url: str, error: BaseException) -> SaveFailedError:
        """Log the failure of a save in a few words. Returns its error, which holds none of the state and so may be
        kept."""
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
            level = logging.DEBUG if shared and self._rank > 0 else logging.ERROR
            logger.log(level, "%s%s", failure, frames)
        return failure

    def settle(self, up_to: int | None = None) -> None:
        """Wait for the saves under way, up to that number; None: all. Failures are kept."""
        for save in list(self._saves):
            if up_to is None or save.number <= up_to:
                save.ended.wait()
        self._collect()

    def settle_step(self, step: int) -> None:
        """Wait for the saves of a step that are under way, and for those before them. Failures are kept."""
        numbers = [save.number for save in self._saves if save.step == step]
        if numbers:
            self.settle(max(numbers))

    def _collect(self) -> None:
        """Forget the saves that have ended, but not their failures."""
        ended = [save for save in self._saves if save.ended.is_set()]
        self._saves = [save for save in self._saves if save not in ended]
        self._failures += [(save.number, save.failure) for save in ended if save.failure is not None]

    @property
    def left(self) -> str:
        """What nobody was told when the process ends: saves that failed, or that are not done. Empty: nothing."""
        failures = [failure for _, failure in self._failures]
        failures += [save.failure for save in self._saves if save.failure is not None]
        told = [f"step {each.step} was not saved to {each.url}, and nothing raised it" for each in failures]
        told += [
            f"the save of step {save.step} to {save.url} is cut off" for save in self._saves if not save.ended.is_set()
        ]
        return "; ".join(told)

    def raise_failure(self, up_to: int | None = None) -> None:
        """Raise what has failed of the saves up to that number (None: all), each failure once: the last one, with the
        earlier ones as its context."""
        due = [each for each in self._failures if up_to is None or each[0] <= up_to]
        self._failures = [each for each in self._failures if each not in due]
        for (_, earlier), (_, later) in itertools.pairwise(due):
            later.__context__ = earlier
        if due:
            raise due[-1][1]


@atexit.register
def _at_exit() -> None:
    # The exit status stays as it is: only os._exit could change it here, which skips what other libraries do at the
    # end, and what waits to be written.
    for each in list(_open):
        if each.is_first and (left := each.left):
            logger.error("the process ends: %s. Remedy: close the CheckpointManager, or use it in a `with`", left)
