"""What Lightning's strategies need: the saves under way, and what Lightning sees of the checkpoints on S3 when it looks
for them through fsspec. Lightning itself decides which checkpoints go."""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any, NoReturn

from fsspec import AbstractFileSystem  # type: ignore[import-untyped]
from torch.distributed.checkpoint import state_dict_saver

from dcp_s3 import errors
from dcp_s3.checkpoint.info import CheckpointInfo
from dcp_s3.checkpoint.look import inspect_checkpoint
from dcp_s3.failures import name_failed
from dcp_s3.manager.agree import Failures, Ranks
from dcp_s3.manager.background import BackgroundRetention, WaitCommitted, commit_of
from dcp_s3.manager.inflight import SaveInFlight, SavesInFlight, save_in_background
from dcp_s3.retention.catalog import list_checkpoints
from dcp_s3.retention.prune import remove
from dcp_s3.s3.store import store_of
from dcp_s3.save.writer import S3StorageWriter
from dcp_s3.settings import Settings, resolve_settings
from dcp_s3.stage.stager import S3Stager
from dcp_s3.url import is_s3_url, parse_url

logger = logging.getLogger(__name__)

_REMOVAL_SECONDS = 60.0  # for which `close` waits for removals
_CHAINED = "s3::"


@dataclass(frozen=True)
class _Running:
    """A save whose end was not waited for yet."""

    url: str
    step: int
    save: SaveInFlight
    saves: SavesInFlight


class BackgroundSaves:
    """The saves of one rank that are under way, and the checkpoints that are to be removed after them.

    Saves of one step overlap: a framework that writes the same step to two URLs waits for neither. A save of another
    step waits until they have ended, and raises if one failed.

    A checkpoint is removed when the save that began last before the removal is committed, and never by its own save: so
    the newest committed one is never lost. If that save fails, the checkpoint stays.

    ``background`` are the same ranks in another group, for the saves: beside them ``ranks`` agree on the next one.
    """

    def __init__(self, ranks: Ranks, background: Ranks, settings: Settings) -> None:
        self._ranks, self._background, self._settings = ranks, background, settings
        self._stager = S3Stager(settings)
        self._running: list[_Running] = []
        self._last_good: int | None = None
        self._begun = self._committed = 0  # numbers of the last save begun and of the last one known to be committed
        self._numbers: dict[str, int] = {}  # of the last save to each URL
        self._good = {0}  # numbers of the saves that ended well
        self._commits: dict[int, WaitCommitted] = {}  # of those that did and are not known to be committed
        self._removals: dict[str, int] = {}  # URL -> number of the save that must end well before
        self._lock, self._removing = threading.Lock(), threading.Lock()
        self._retention: BackgroundRetention | None = None

    # --- saves ------------------------------------------------------------------------------------------

    def save(
        self,
        url: str,
        step: int,
        state: dict[str, Any],
        attach: Callable[[S3StorageWriter], None],
        metrics: Mapping[str, Any],
        *,
        blocking: bool,
    ) -> None:
        """Save to a URL, and replace the checkpoint that is there. Every rank calls it.

        ``attach`` attaches files to the writer. With ``blocking`` it returns only when the save has ended, and the
        state is not copied.

        Raises:
            SaveFailedError: an earlier save failed, or a rank cannot go on, and this state was not saved. With
                ``blocking``: this save failed.
            StagingError: the state cannot be copied.
        """
        made: list[S3StorageWriter] = []

        def begin() -> None:
            if blocking or any(each.step != step for each in self._running):
                self.wait()
            writer = S3StorageWriter(url, overwrite=True, metrics=metrics, settings=self._settings)
            writer.caller_reports = True
            attach(writer)
            made.append(writer)

        def refuse(failures: Failures) -> errors.SaveFailedError:
            text = f"step {step} is not saved to {url}: {name_failed(failures)}"
            return errors.SaveFailedError(text, url=url, step=step, failures=failures)

        self._ranks.agree(begin, refuse)
        if url in self._removals:
            with self._removing:
                self._removals.pop(url, None)
        saving = SavesInFlight(self._ranks.rank)
        saving.last_good = self._last_good
        self._begun += 1
        self._numbers[url] = self._begun
        saved = functools.partial(self._saved, self._begun, url, made[0], step)

        def upload() -> object:
            if blocking:
                return state_dict_saver.save(state, storage_writer=made[0], process_group=self._background.group)
            return save_in_background(state, made[0], self._background, self._stager, None)

        save = saving.start(step, url, upload, saved, wait=blocking)
        if not blocking:
            self._running.append(_Running(url, step, save, saving))

    def wait(self) -> None:
        """Wait for the saves under way.

        Raises:
            SaveFailedError: one of them failed. The others that failed are in the log.
        """
        running, self._running = self._running, []
        for each in running:
            each.saves.settle()
        for each in running:
            each.saves.raise_failure()

    def close(self) -> None:
        """Wait for the saves under way, then for removals that are due. Then free the buffers.

        Raises:
            SaveFailedError: a save failed.
        """
        try:
            self.wait()
        finally:
            if self._retention is not None:
                self._retention.close(_REMOVAL_SECONDS)
            for url in list(self._removals):
                logger.warning("%s stays: no later checkpoint is committed, or it could not be removed", url)
            self._stager.close()

    # --- removals ---------------------------------------------------------------------------------------

    def remove(self, url: str) -> None:
        """Remove a checkpoint in the background, when the last save before this call is committed. The first rank does.

        It stays if it is pinned or being read, with a warning in the log.
        """
        if not self._ranks.is_first:
            return
        own = self._numbers.get(url, 0)
        self._removals[url] = self._begun + 1 if own and own == self._begun else self._begun
        self._remove_later(url)

    def holds(self, url: str) -> bool | None:
        """Whether a checkpoint is at ``url`` once everything under way is done; None if nothing there is."""
        if any(each.url == url and not each.save.ended.is_set() for each in self._running):
            return True
        return False if url in self._removals else None

    def _saved(self, number: int, url: str, writer: S3StorageWriter, step: int) -> None:
        """In the thread of a save: it has ended well."""
        self._last_good = step
        if self._ranks.is_first:
            self._commits[number] = commit_of(writer, self._settings)
        self._good.add(number)
        self._remove_later(url)

    def _remove_later(self, url: str) -> None:
        if self._ranks.is_first:
            with self._lock:
                if self._retention is None:
                    self._retention = BackgroundRetention(self._remove_due, url.rpartition("/")[0])
            self._retention.saved(self._wait_committed)

    def _wait_committed(self, timeout: float) -> None:
        number = max(self._good)  # they need not end in the order in which they began
        if number in self._commits:
            self._commits[number](timeout)
        self._committed = number
        for each in list(self._commits):
            if each <= number:
                del self._commits[each]

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


# --- what Lightning sees ----------------------------------------------------------------------------------


class CheckpointFiles(AbstractFileSystem):
    """A read-only view: committed checkpoints are directories, and there is nothing else. What ``saves`` under way
    write is there already, and what they are to remove is not."""

    protocol = "s3"
    cachable = False

    def __init__(self, saves: BackgroundSaves | None = None, **options: Any) -> None:
        super().__init__()
        self._saves = saves

    def exists(self, path: str, **kwargs: Any) -> bool:
        """Whether a committed checkpoint is at or directly below ``path``."""
        url = str(parse_url(_text(path)))
        expected = None if self._saves is None else self._saves.holds(url)
        return bool(_inspect(url) or self.ls(url)) if expected is None else expected

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        """The committed checkpoints directly below ``path``."""
        found = [info for info in list_checkpoints(_text(path)) if info.committed]
        # Lightning normalizes the names as paths, and s3:/... would be a local one. A chained URL stays what it is.
        entries = [{"name": _CHAINED + info.url.removeprefix("s3://"), **_TYPE} for info in found]
        return entries if detail else [entry["name"] for entry in entries]

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        """The entry of a committed checkpoint, or of a directory of them."""
        if not self.exists(path):
            raise FileNotFoundError(path)
        return {"name": self._strip_protocol(path), **_TYPE}

    def modified(self, path: str) -> datetime:
        """When the checkpoint at ``path`` was committed."""
        info = _inspect(_text(path))
        if info is None:
            raise FileNotFoundError(path)
        return datetime.fromtimestamp(info.created_at or 0.0, tz=timezone.utc)

    def _open(self, path: str, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            f"dcp_s3 shows only which checkpoints there are, not {path}. Remedy: pip install s3fs"
        )


_TYPE = {"size": 0, "type": "directory"}


def find_url(path: str | os.PathLike[str] | None) -> str | None:
    """The S3 URL that Lightning means by a path; None if it is another path.

    Raises:
        InvalidURLError: Lightning took an S3 URL for a local path.
    """
    if path is None:
        return None
    text = os.fspath(path)
    if text.startswith(_CHAINED):
        text = _text(text)
    if is_s3_url(text):
        return str(parse_url(text))
    if "/s3:/" in text:
        raise errors.InvalidURLError(
            f"{text!r} is an S3 URL that was taken for a local path. Remedy: pass it as text, not as a pathlib.Path"
        )
    return None


def newest(dirpath: str) -> str | None:
    """URL of the checkpoint directly below ``dirpath`` that was committed last, whatever its name; None without one.

    For ``Trainer.fit(ckpt_path=newest(dirpath))``. ``ckpt_path="last"`` knows only ``last.ckpt``.

    Raises:
        InvalidURLError, StorageError
    """
    found = [info for info in list_checkpoints(dirpath) if info.committed]
    return max(found, key=lambda info: info.created_at or 0.0).url if found else None


def _text(path: str) -> str:
    return path if is_s3_url(path) else "s3://" + path.removeprefix(_CHAINED)


def _inspect(path: str) -> CheckpointInfo | None:
    url = parse_url(path)
    info = inspect_checkpoint(store_of(url, resolve_settings(None)), url)
    return info if info is not None and info.committed else None
