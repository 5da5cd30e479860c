"""The drain in the background of training: one thread in each process that spills. Only one process drains at a
time."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time

from dcp_s3.errors import CheckpointError, SpillError
from dcp_s3.process import reset_in_child
from dcp_s3.spill.drain import Drainer
from dcp_s3.spill.store import SpilledSave, SpillStore

logger = logging.getLogger(__name__)

_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.25, 5.0  # seconds between passes while S3 refuses
_REPORT_SECONDS = 30.0
_EXIT_SECONDS = 5.0

_running: dict[str, BackgroundDrain] = {}  # by absolute path
_lock = threading.Lock()


@reset_in_child
def _reset_after_fork() -> None:
    # A lock held by another thread at the time of the fork would stay locked forever.
    global _lock
    _lock = threading.Lock()
    _running.clear()


class BackgroundDrain:
    """Drains one spill directory until it is empty. If the process dies, another can go on."""

    def __init__(self, store: SpillStore, *, patience: float) -> None:
        self.ended = False
        self.reasons: dict[str, str] = {}
        """Why saves wait, by save name, from the last pass."""
        self.store = store
        self._patience = patience
        self.wake = threading.Event()
        """Set when there is something new to drain."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="dcp_s3-drain", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread, after the current object if that does not take long."""
        self._stop.set()
        self.wake.set()
        self._thread.join(_EXIT_SECONDS)

    def _work(self) -> None:
        pause = _SHORTEST_PAUSE
        while not self._stop.is_set():
            self.wake.clear()
            try:
                report = Drainer(self.store, stop=self._stop, patience=self._patience).run()
            except SpillError as error:
                logger.warning("the background drain waits: %s", error)
                pause = _LONGEST_PAUSE
            except Exception:
                logger.exception("the background drain of %s failed; it is tried again later", self.store.path)
                pause = _LONGEST_PAUSE
            else:
                self.reasons = report.waiting
                if not report.waiting and not report.busy:
                    with _lock:
                        self.ended = not self.wake.is_set()
                    if self.ended:
                        return
                moved = report.uploaded or report.committed or report.busy
                pause = _SHORTEST_PAUSE if moved else min(_LONGEST_PAUSE, 2 * pause)
            self.wake.wait(pause)


def drain_in_background(store: SpillStore, *, patience: float) -> None:
    """Drain a spill directory now, in this process's thread for it. The thread is started if needed."""
    key = os.path.abspath(store.path)
    with _lock:
        running = _running.get(key)
        if running is None or running.ended:
            _running[key] = BackgroundDrain(store, patience=patience)
        else:
            running.wake.set()


def stop_draining() -> None:
    """End this process's drain threads. `dcp-s3 drain` or the next process uploads what is left."""
    with _lock:
        ending = [running for running in _running.values() if not running.ended]
        _running.clear()
    for running in ending:
        running.stop()


@atexit.register
def _at_exit() -> None:
    stores = [running.store for running in _running.values()]
    stop_draining()
    for store in stores:
        if left := len(store.scan()):
            what = "%d spilled saves are left in %s: `dcp-s3 drain` or the next training process uploads them"
            logger.warning(what, left, store.path)


def _why_waiting(store: SpillStore, save: SpilledSave) -> str:
    running = _running.get(os.path.abspath(store.path))
    reason = running.reasons.get(save.name) if running is not None else None
    return f"It waits: {reason}" if reason else "Another process may drain it: see `dcp-s3 drain --status`"


def wait_until_drained(store: SpillStore, save: SpilledSave, *, timeout: float | None = None) -> None:
    """Wait until a spilled save is on S3, or its commit is done.

    Raises:
        CheckpointError: the save cannot be drained, and was set aside.
        TimeoutError: ``timeout`` seconds have passed; the drain goes on.
    """
    started = reported = time.monotonic()
    while save.path.exists():
        now = time.monotonic()
        if timeout is not None and now - started > timeout:
            raise TimeoutError(
                f"{save.journal.url} is not on S3 after {timeout:g} s; the drain goes on. {_why_waiting(store, save)}"
            )
        if now - reported > _REPORT_SECONDS:
            reported = now
            logger.warning(
                "%s has waited for S3 for %.0f s. %s", save.journal.url, now - started, _why_waiting(store, save)
            )
        time.sleep(0.05)
    for refused in store.list_refused():
        if refused.path.name == save.name:
            raise CheckpointError(f"{save.journal.url} was not committed: {refused.reason}", url=save.journal.url)
