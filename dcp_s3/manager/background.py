"""Retention in the background of training: a prune after each committed save, on its own thread."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable

from dcp_s3.errors import DcpS3Error
from dcp_s3.events import Listener
from dcp_s3.retention.policy import PolicyFunction
from dcp_s3.retention.prune import prune
from dcp_s3.save.writer import S3StorageWriter
from dcp_s3.settings import Settings

logger = logging.getLogger(__name__)

_SLICE = 1.0  # seconds between checks whether a commit is done, or no longer awaited
_FAILED = "retention under %s failed and is tried again after the next save; nothing else is affected"
WaitCommitted = Callable[[float], None]
"""Waits at most this many seconds for a save to be committed. TimeoutError: it is not committed yet."""


class Stopped(Exception):  # noqa: N818 - not an error
    """Ends a prune early."""


class BackgroundRetention:
    """Runs one prune at a time; its argument is a function that raises if it must end early. Saves that commit during a
    prune share the next one. The thread lives only while there is work, and is a daemon: a prune may be cut off
    anywhere."""

    def __init__(self, prune: Callable[[Callable[[], None]], object], root: str) -> None:
        self._prune, self._root = prune, root
        self._lock = threading.Lock()
        self._pending: WaitCommitted | None = None
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()

    def saved(self, wait_committed: WaitCommitted) -> None:
        """Prune as soon as a finished save is committed. Returns at once."""
        with self._lock:
            if self._stop.is_set():
                return
            self._pending = wait_committed
            if self._thread is None:
                thread = threading.Thread(target=self._work, name="dcp_s3-retention", daemon=True)
                try:
                    thread.start()  # the thread waits for the lock
                except RuntimeError as error:  # the interpreter is ending
                    logger.warning("retention under %s did not run: %s", self._root, error)
                else:
                    self._thread = thread

    def close(self, timeout: float) -> bool:
        """Wait for the current prune and those that are due, up to ``timeout`` seconds; after that it is told to end,
        and not waited for. Returns whether all are done."""
        deadline = time.monotonic() + timeout
        while (thread := self._thread) is not None and time.monotonic() < deadline:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._stop.set()
        if thread is not None:
            what = "retention under %s was not done within %.0f s and is left to the next run, or to `dcp-s3 prune`"
            logger.warning(what, self._root, timeout)
        return thread is None

    def _work(self) -> None:
        while True:
            with self._lock:
                wait_committed, self._pending = self._pending, None
                if wait_committed is None or self._stop.is_set():
                    self._thread = None
                    return
            try:
                while True:
                    with contextlib.suppress(TimeoutError):
                        wait_committed(_SLICE)
                        break
                    self._raise_if_stopped()
                    if self._pending is not None:
                        raise Stopped  # a later save has replaced it
            except Stopped:
                continue
            except DcpS3Error as error:  # it will not be committed
                logger.warning("retention under %s waits for the next save: %s", self._root, error)
                continue
            except Exception:
                logger.exception(_FAILED, self._root)
                continue
            try:
                self._prune(self._raise_if_stopped)
            except Stopped:
                pass
            except Exception:
                logger.exception(_FAILED, self._root)

    def _raise_if_stopped(self) -> None:
        if self._stop.is_set():
            raise Stopped


def retain(
    root: str, policy: PolicyFunction, settings: Settings, on_event: Listener | None = None
) -> BackgroundRetention:
    """Retention of the checkpoints under ``root`` (a URL) by a policy."""
    return BackgroundRetention(
        lambda check: prune(root, policy, settings=settings, progress=lambda *_: check(), on_event=on_event), root
    )


def commit_of(writer: S3StorageWriter, settings: Settings) -> WaitCommitted:
    """Waits for the commit of a save that has ended well. With durability s3 it is committed then."""
    return writer.wait_committed if settings.durability == "local" else lambda _: None
