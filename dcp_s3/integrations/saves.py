"""The saves of a framework that says itself when to save what to which URL, and what to delete. Needs no framework."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException

from dcp_s3 import errors
from dcp_s3.failures import name_failed
from dcp_s3.format.layout import step_of
from dcp_s3.load.planner import S3LoadPlanner
from dcp_s3.load.reader import S3StorageReader
from dcp_s3.manager.agree import Failures, Ranks
from dcp_s3.manager.background import BackgroundRetention, WaitCommitted, commit_of
from dcp_s3.manager.inflight import BeginUpload, SaveInFlight, SavesInFlight, save_in_background, stage_save
from dcp_s3.manager.restore import load_error
from dcp_s3.retention.prune import remove
from dcp_s3.save.writer import S3StorageWriter
from dcp_s3.settings import Settings
from dcp_s3.stage.stager import S3Stager

logger = logging.getLogger(__name__)

_RETENTION_SECONDS = 60.0  # for which `close` waits for what is being deleted

Describe = Callable[[], tuple[Mapping[str, Any] | None, Mapping[str, bytes]]]
"""Metrics and attachments of a save. Called on every rank; what it raises there, all ranks raise."""


class Saves:
    """The saves of one rank. One uploads; up to ``queue`` further ones of the same step are staged and wait for it. A
    save of another step waits until all have ended, and raises if one failed.

    ``background`` are the same ranks in another group, for the saves: beside them ``ranks`` agree on the next one.
    None: ``ranks``, if they agree on nothing while a save is under way.

    ``retention`` says what is deleted after commits. Without it, a checkpoint is removed by its URL when the save that
    began last before that call, and is not its own, is committed. If that save fails, it stays.
    """

    def __init__(
        self, ranks: Ranks, settings: Settings, stager: S3Stager, *,
        background: Ranks | None = None, queue: int = 0, retention: BackgroundRetention | None = None,
    ) -> None:  # fmt: skip
        self._ranks, self._settings, self._stager = ranks, settings, stager
        self._background, self._queues = background or ranks, queue > 0
        self._retention = retention
        self.in_flight = SavesInFlight(ranks.rank, queue=queue)
        self._step: int | None = None
        self._begun = 0  # number of the last save that has begun
        self._last: dict[str, int] = {}  # URL -> number of its last save
        self._under_way: list[SaveInFlight] = []
        self._good = {0}  # numbers of the saves that have ended well
        self._commit: tuple[int, WaitCommitted] = (0, lambda _: None)  # of the last one of these
        self._committed = 0  # number of the last save that is known to be committed
        self._removals: dict[str, int] = {}  # URL -> number of the save that must end well before
        self._removing = threading.Lock()

    def save(self, url: str, step: int, state: dict[str, Any], describe: Describe, *, blocking: bool) -> Any:
        """Save to a URL, and replace the checkpoint that is there. Every rank calls it.

        Returns what `dcp.async_save` does. With ``blocking`` it returns only when the save has ended, and the state is
        not copied.

        Raises:
            SaveFailedError: an earlier save failed, or a rank cannot go on, and this state was not saved. Or this save
                has failed by now.
            StagingError: the state cannot be copied.
        """
        made: list[S3StorageWriter] = []

        def begin() -> None:
            if blocking or step != self._step:
                self.wait()
            self.in_flight.make_room()
            metrics, attachments = describe()
            writer = S3StorageWriter(url, overwrite=True, metrics=metrics, settings=self._settings)
            for name, data in attachments.items():
                writer.attach(name, data)
            writer.caller_reports = True
            made.append(writer)

        def refuse(failures: Failures) -> errors.SaveFailedError:
            text = f"step {step} is not saved to {url}: {name_failed(failures)}"
            return errors.SaveFailedError(text, url=url, step=step, failures=failures)

        self._ranks.agree(begin, refuse)
        [writer] = made
        if url in self._removals:  # only then wait for a removal that is under way
            with self._removing:
                self._removals.pop(url, None)
        self._step, self._begun = step, self._begun + 1
        number = self._last[url] = self._begun
        upload: BeginUpload
        if blocking:
            group = self._background.group
            upload = functools.partial(state_dict_saver.save, state, storage_writer=writer, process_group=group)
        elif self._queues:
            upload = stage_save(state, writer, self._background, self._stager, None)
        else:
            upload = functools.partial(save_in_background, state, writer, self._background, self._stager, None)

        def saved() -> None:
            self._good.add(number)
            self._commit = (number, commit_of(writer, self._settings))
            if self._retention is not None:
                self._retention.saved(self._wait_committed)

        started = self.in_flight.start(step, url, upload, saved, wait=blocking)
        self._under_way = [each for each in self._under_way if not each.ended.is_set()] + [started]
        return started.begun

    def wait(self) -> None:
        """Wait for the saves under way. Raises SaveFailedError: of the last that failed, with the earlier ones as its
        context."""
        self.in_flight.settle()
        self.in_flight.raise_failure()

    def close(self) -> None:
        """Wait for the saves under way and for what is to be deleted, and free the buffers. Raises SaveFailedError."""
        try:
            self.wait()
        finally:
            if self._retention is not None:
                self._retention.close(_RETENTION_SECONDS)
            for url in list(self._removals):
                logger.warning("%s stays: no later checkpoint is committed, or it could not be removed", url)
            self._stager.close()

    def remove(self, url: str) -> None:
        """Remove a checkpoint in the background, when the last save before this call is committed. The first rank does.
        It stays if it is pinned or being read, with a warning in the log."""
        if self._ranks.is_first:
            is_newest = self._last.get(url) == self._begun
            self._removals[url] = self._begun + 1 if is_newest else self._begun
            if self._retention is None:
                self._retention = BackgroundRetention(self._remove_due, url.rpartition("/")[0])
            self._retention.saved(self._wait_committed)

    def will_hold(self, url: str) -> bool | None:
        """Whether a checkpoint is at ``url`` once everything under way is done; None if nothing there is."""
        if any(each.url == url and not each.ended.is_set() for each in self._under_way):
            return True
        return False if url in self._removals else None

    def _wait_committed(self, timeout: float) -> None:
        number, wait = self._commit
        wait(timeout)
        self._committed = number

    def _remove_due(self, check: Callable[[], None]) -> None:
        """Remove what may go now. ``check`` raises if this must end."""
        # Nobody else saves to these URLs: what an earlier, killed save left there is no save in progress.
        settings = self._settings.model_copy(update={"retention_grace": 0.0})
        for url in list(self._removals):
            check()
            with self._removing:
                after = self._removals.get(url)
                if after is None or after > self._committed or after not in self._good:
                    continue
                try:
                    remove(url, settings=settings)
                except errors.CheckpointNotFoundError:
                    pass
                except errors.CheckpointProtectedError as error:
                    logger.warning("%s", error)
                self._removals.pop(url, None)


def load_state(
    url: str, state: dict[str, Any], group: Any, settings: Settings, *, partial: bool = False, **options: Any
) -> None:
    """`dcp.load`, with the options of an `S3StorageReader`. Raises RestoreFailedError with the causes by rank."""
    reader = S3StorageReader(url, process_group=group, settings=settings, **options)
    planner = S3LoadPlanner(allow_partial_load=partial)
    try:
        state_dict_loader.load(state, storage_reader=reader, planner=planner, process_group=group)
    except CheckpointException as error:
        raise load_error(error, url, step_of(url)) from error
