"""The one asynchronous save under way, and what became of it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from torch.distributed.checkpoint.api import CheckpointException

from dcp_s3.checkpoint.boundary import explain
from dcp_s3.errors import SaveFailedError
from dcp_s3.manager.ranks import portable
from dcp_s3.transport.retry import without_tracebacks

logger = logging.getLogger(__name__)


@dataclass
class _Save:
    """A save under way. ``ended`` is set when all has been done about its end, a moment after the future is."""

    step: int
    url: str
    future: Future[None]
    ended: threading.Event


class Saving:
    """At most one save at a time. A failure is kept until somebody takes it.

    Args:
        rank: of this process.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._save: _Save | None = None
        self._failure: SaveFailedError | None = None

    @property
    def step(self) -> int | None:
        """The step that is being saved; None if none is."""
        return None if self._save is None else self._save.step

    def begin(self, step: int, url: str, future: Future[None], *, on_success: Callable[[], None]) -> None:
        """A save is under way; the one before has been waited for.

        Args:
            step: of the training.
            url: of the checkpoint.
            future: of `dcp.async_save`.
            on_success: called in another thread when it is done.
        """
        ended = threading.Event()

        def end(future: Future[None]) -> None:
            try:
                error = future.exception()
                if error is None:
                    on_success()
                else:
                    logger.error("the save of step %d to %s failed: %s", step, url, error)
            finally:
                ended.set()

        self._save = _Save(step, url, future, ended)
        future.add_done_callback(end)

    def settle(self) -> None:
        """Wait for the save under way. If it failed, the failure is kept."""
        save = self._save
        if save is None:
            return
        save.ended.wait()
        error = save.future.exception()
        if error is not None:
            self._failure = explain_save(save.step, save.url, self._rank, error)
        self._save = None

    def take_failure(self) -> SaveFailedError | None:
        """What the last save failed with, once."""
        failure, self._failure = self._failure, None
        return failure

    def raise_failure(self) -> None:
        """Raise what the last save failed with, once."""
        failure = self.take_failure()
        if failure is not None:
            raise failure


def explain_save(step: int, url: str, rank: int, error: BaseException) -> SaveFailedError:
    """The error of a save as one that may be kept: it holds none of the state.

    Args:
        step: of the training.
        url: of the checkpoint.
        rank: of this process.
        error: what `dcp.save`, or the future of `dcp.async_save`, raised.
    """
    failures = {rank: error}
    if isinstance(error, CheckpointException):
        failures = {failed: cause for failed, (cause, _) in error.failures.items()}
    failures = {failed: portable(cause) for failed, cause in failures.items()}
    without_tracebacks(error)
    return SaveFailedError(
        f"the save of step {step} to {url} failed {explain(failures)}", url=url, step=step, failures=failures
    )
