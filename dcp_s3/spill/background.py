"""The drain behind the training: a thread in each process that spills, of which one drains at a time."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time

from dcp_s3.errors import CheckpointError, SpillError
from dcp_s3.spill.drain import Drainer
from dcp_s3.spill.store import SpilledSave, SpillStore

logger = logging.getLogger(__name__)

_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.25, 5.0  # seconds between passes while S3 refuses
_IDLE_SECONDS = 10.0  # another process may spill without telling this one
_REPORT_SECONDS = 30.0
_EXIT_SECONDS = 5.0

_running: dict[tuple[int, str], BackgroundDrain] = {}
_lock = threading.Lock()


class BackgroundDrain:
    """Drains one spill directory until the process ends. A process that dies in the middle does no harm."""

    def __init__(self, store: SpillStore, *, patience: float) -> None:
        self._store = store
        self._patience = patience
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="dcp_s3-drain", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """There is something new to drain."""
        self._wake.set()

    def stop(self) -> None:
        """End the thread, after the object under way if that does not take long."""
        self._stop.set()
        self._wake.set()
        self._thread.join(_EXIT_SECONDS)
        left = len(self._store.scan()) if self._store.saves.exists() else 0
        if left:
            logger.warning(
                "%d spilled saves are left in %s: `dcp-s3 drain` or the next training process uploads them",
                left,
                self._store.path,
            )

    def _work(self) -> None:
        pause = _SHORTEST_PAUSE
        while not self._stop.is_set():
            self._wake.clear()
            try:
                report = Drainer(self._store, stop=self._stop, patience=self._patience).run()
            except SpillError as error:
                logger.warning("the background drain waits: %s", error)
                pause = _LONGEST_PAUSE
            except Exception:
                logger.exception("the background drain of %s failed; it goes on later", self._store.path)
                pause = _LONGEST_PAUSE
            else:
                if report.uploaded or report.committed:
                    pause = _SHORTEST_PAUSE
                elif report.waiting:
                    pause = min(_LONGEST_PAUSE, 2 * pause)
                else:
                    pause = _SHORTEST_PAUSE if report.busy else _IDLE_SECONDS
            self._wake.wait(pause)


def ensure_draining(store: SpillStore, *, patience: float) -> BackgroundDrain:
    """This process's thread for a spill directory; started if there is none."""
    key = (os.getpid(), os.path.abspath(store.path))
    with _lock:
        if key not in _running:
            _running[key] = BackgroundDrain(store, patience=patience)
            atexit.register(_running[key].stop)
        return _running[key]


def wait_until_drained(store: SpillStore, save: SpilledSave, *, timeout: float | None = None) -> None:
    """Wait until a spilled save is on S3, or its commit done.

    Raises:
        CheckpointError: it can not be drained, and was set aside.
        TimeoutError: ``timeout`` seconds have passed; the drain goes on.
    """
    started = reported = time.monotonic()
    while save.path.exists():
        now = time.monotonic()
        if timeout is not None and now - started > timeout:
            raise TimeoutError(f"{save.journal.url} is not on S3 after {timeout:g} s; the drain goes on")
        if now - reported > _REPORT_SECONDS:
            reported = now
            logger.warning("%s has waited for S3 for %.0f s", save.journal.url, now - started)
        time.sleep(0.05)
    for refused in store.list_refused():
        if refused.path.name == save.name:
            raise CheckpointError(f"{save.journal.url} was not committed: {refused.reason}", url=save.journal.url)
