"""The asynchronous saves under way: a queue in front of one upload, and their results."""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import logging
import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse

from dcp_s3.coordination.processes import withdraw
from dcp_s3.errors import SaveFailedError, SaveProtocolError
from dcp_s3.failures import frames_of_others, name_failed, panel, without_tracebacks
from dcp_s3.manager.agree import Ranks, for_others
from dcp_s3.save.writer import S3StorageWriter
from dcp_s3.stage.handover import StagedState
from dcp_s3.stage.stager import S3Stager
from dcp_s3.workers import InTurn

logger = logging.getLogger(__name__)

BeginUpload = Callable[[], object]
"""Begins an upload: returns its future, or what `dcp.async_save` does. Else it is done."""

_open: weakref.WeakSet[SavesInFlight] = weakref.WeakSet()


def save_in_background(
    state: dict[str, Any],
    writer: S3StorageWriter,
    ranks: Ranks,
    stager: AsyncStager | None,
    planner: SavePlanner | None,
) -> Future[None] | AsyncSaveResponse:
    """Copy the state and save it in the background; what `dcp.async_save` returns. All ranks call this."""
    return state_dict_saver.async_save(
        state, storage_writer=writer, process_group=ranks.group, async_stager=stager, planner=planner
    )


def stage_save(
    state: dict[str, Any], writer: S3StorageWriter, ranks: Ranks, stager: S3Stager, planner: SavePlanner | None
) -> BeginUpload:
    """Copy a state. Returns what begins its upload, on all ranks. A StagingError if the state cannot be copied, and
    there are no other ranks, or they are not `collective`."""
    began = time.monotonic()
    if ranks.collective:
        writer.staged = stager.stage_now(state)
        writer.stall_seconds = time.monotonic() - began
        return functools.partial(save_in_background, {}, writer, ranks, None, planner)
    with _telling(writer):
        staged = stager.stage_now(state)
        if isinstance(staged, StagedState) and staged.error is not None:  # saves with collectives fail on all ranks
            raise staged.error
    writer.stall_seconds = time.monotonic() - began
    return functools.partial(InTurn("dcp_s3-save").submit, save_separately, staged, writer, ranks.rank, planner)


def save_separately(
    state: dict[str, Any], writer: S3StorageWriter, rank: int, planner: SavePlanner | None = None
) -> None:
    """Save this rank's part (its rank in the job) of a state that does not change meanwhile, without collectives, and
    wait until the whole is committed.

    As torch's ``_save_state_dict(use_collectives=False)`` does; but that ends with a barrier, and `dcp.async_save`
    needs a process group with a CPU backend.
    """
    planner, is_first, counted = planner or DefaultSavePlanner(), rank == 0, writer.counted
    try:
        writer.reset()
        with _telling(writer):
            planner.set_up_planner(state, writer.storage_meta(), is_first)
        writer.set_up_storage_writer(is_first, rank=rank, use_collectives=False)
        with _telling(writer):
            plan = planner.create_local_plan()
        plan = writer.prepare_local_plan(plan)
        with _telling(writer):
            plans, metadata = planner.create_global_plan([plan])
        [plan] = writer.prepare_global_plan(plans)
        with _telling(writer):
            plan = planner.finish_plan(plan)
        written = writer.write_data(plan, planner)
        writer.finish(metadata, [written.wait()])
    except BaseException as error:
        if counted is not None:
            withdraw(counted, writer.settings, error)
        raise


@contextlib.contextmanager
def _telling(writer: S3StorageWriter) -> Iterator[None]:
    """If the body fails, the writer tells subscribers to events, as it does of its own failures."""
    try:
        yield
    except Exception as error:
        writer._tell_failed(error)
        raise


@dataclass(eq=False)
class SaveInFlight:
    """A save that waits for its upload, or uploads."""

    number: int
    step: int
    url: str
    ended: threading.Event = field(default_factory=threading.Event)
    """Set when its end has been handled, shortly after the future is done."""
    failure: SaveFailedError | None = None
    begun: Any = None
    """What its `BeginUpload` returned."""


class SavesInFlight:
    """The saves under way: one uploads, and up to ``queue`` of them are staged and wait. A failure is logged when it
    happens, and kept until it is raised. The first rank logs what all ranks know."""

    def __init__(self, rank: int, *, queue: int = 0) -> None:
        self._rank, self._room = rank, queue
        self._numbers = itertools.count(1)
        self._saves: list[SaveInFlight] = []  # that have not ended, or have failed and were not raised
        self._waiting: deque[tuple[SaveInFlight, BeginUpload, Callable[[], None]]] = deque()
        self._uploads = False
        self._changed = threading.Condition()
        self.last_good: int | None = None
        """The last step that was saved or restored."""
        _open.add(self)

    @property
    def is_under_way(self) -> bool:
        """Whether a save has not ended."""
        return any(not save.ended.is_set() for save in self._saves)

    def make_room(self) -> None:
        """Wait until one more save may be staged: until all have ended, if they do not queue."""
        if self._room == 0:
            self.settle()
        else:
            with self._changed:
                self._changed.wait_for(lambda: len(self._waiting) < self._room)

    def start(
        self, step: int, url: str, begin: BeginUpload, on_success: Callable[[], None], *, wait: bool = False
    ) -> SaveInFlight:
        """Begin an upload as soon as the earlier ones have ended, whether or not they succeeded: perhaps at once,
        perhaps in another thread, as ``on_success`` is called. With ``wait`` returns when it has ended. Raises the
        failure of this save if it has failed by then."""
        save = SaveInFlight(next(self._numbers), step, url)
        self._saves = [each for each in self._saves if each.failure or not each.ended.is_set()] + [save]
        with self._changed:
            self._waiting.append((save, begin, on_success))
        self._begin_next()
        if wait:
            save.ended.wait()
        self.raise_failure(save.number, since=save.number)
        return save

    def _begin_next(self) -> None:
        with self._changed:
            if self._uploads or not self._waiting:
                return
            save, begin, on_success = self._waiting.popleft()
            self._uploads = True
            self._changed.notify_all()
        try:
            begun = save.begun = begin()
        except BaseException as error:
            self._end(save, error, on_success)
            if not isinstance(error, (Exception, CheckpointException)):
                raise
        else:
            upload = begun.upload_completion if isinstance(begun, AsyncSaveResponse) else begun
            if isinstance(upload, Future):
                upload.add_done_callback(lambda future: self._end(save, future.exception(), on_success))
            else:
                self._end(save, None, on_success)
        finally:
            del begin  # it holds the staged copy

    def _end(self, save: SaveInFlight, error: BaseException | None, on_success: Callable[[], None]) -> None:
        try:
            if error is None:
                self.last_good = save.step
                on_success()
            elif isinstance(error, (Exception, CheckpointException)):  # who is interrupted knows
                save.failure = self._fail(save, error)
        finally:
            save.ended.set()
            with self._changed:
                self._uploads = False
            self._begin_next()

    def _fail(self, save: SaveInFlight, error: BaseException) -> SaveFailedError:
        """Log the failure in a few words. Returns its error, which holds none of the state and so may be kept."""
        failures, is_shared = {self._rank: error}, isinstance(error, CheckpointException)
        if isinstance(error, CheckpointException):
            failures = {failed: cause for failed, (cause, _) in error.failures.items()}
        failures = {failed: for_others(cause) for failed, cause in failures.items()}
        frames = frames_of_others(error)
        without_tracebacks(error)
        text = panel(
            f"the save of step {save.step} to {save.url}",
            failures,
            left="no new checkpoint, and the earlier ones untouched; `dcp-s3 prune` removes what was uploaded",
            last_good="none of this run yet" if self.last_good is None else f"step {self.last_good}",
            resume="" if self.last_good is None else "manager.restore(state)",
        )
        failure = SaveFailedError(text, url=save.url, step=save.step, failures=failures, rank=self._rank)
        if self._rank > 0 and isinstance(error, SaveProtocolError):  # without collectives: each rank that is left knows
            logger.error("step %d is not saved: %s", save.step, name_failed(failures))
        else:
            logger.log(logging.DEBUG if is_shared and self._rank > 0 else logging.ERROR, "%s%s", failure, frames)
        return failure

    def settle(self, step: int | None = None) -> None:
        """Wait for the saves of a step that are under way; None: all. Failures are kept."""
        for save in self._saves:
            if step in (None, save.step):
                save.ended.wait()

    def raise_failure(self, up_to: float = math.inf, since: int = 1) -> None:
        """Raise what has failed of the saves with these numbers, each failure once: the last one, with the earlier ones
        as its context."""
        due = [save for save in self._saves if save.ended.is_set() and since <= save.number <= up_to]
        self._saves = [save for save in self._saves if save not in due]
        failures = [save.failure for save in due if save.failure is not None]
        for earlier, later in itertools.pairwise(failures):
            later.__context__ = earlier
        if failures:
            raise failures[-1]


@atexit.register
def _at_exit() -> None:
    for each in list(_open):
        for save in each._saves if each._rank == 0 else ():
            if save.failure or not save.ended.is_set():
                lost = f"step {save.step} was not saved to {save.url}, and nothing raised it"
                logger.error("the process ends: %s. Remedy: close the CheckpointManager, or use it in a `with`", lost)
