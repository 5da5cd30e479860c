"""Small groups of named threads that end when their owner is done.

`concurrent.futures.ThreadPoolExecutor` will not do. At the end of a script the interpreter waits for torch's thread
that carries out an asynchronous save, but executors already refuse every `submit`. A last `async_save` that nobody
waited for would be lost silently.
"""

from __future__ import annotations

import collections
import logging
import math
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from dcp_s3.errors import DcpS3Error
from dcp_s3.limit import Cancelled

logger = logging.getLogger(__name__)


class Workers:
    """Threads that run submitted tasks, in order of submission. One is started for a task that finds none idle.

    Args:
        count: most threads; at least one.
        name: of the threads.
        waiting: most tasks that wait for a thread; `submit` blocks while there are as many.
    """

    _lingers = True

    def __init__(self, count: int, name: str, *, waiting: float = math.inf) -> None:
        self._count, self._name, self._waiting = max(1, count), name, waiting
        self._changed = threading.Condition()
        self._tasks: collections.deque[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]] = collections.deque()
        self._threads: list[threading.Thread] = []
        self._alive = self._unfinished = 0
        self._idle = 0
        """Threads that take the next task."""
        self._is_closed = False

    @property
    def is_full(self) -> bool:
        """Whether `submit` blocks."""
        return self._unfinished >= self._count + self._waiting

    def submit(
        self, function: Callable[..., Any], *arguments: Any, cancel: threading.Event | None = None
    ) -> Future[Any]:
        """Run ``function(*arguments)`` on a thread.

        Raises:
            Cancelled: ``cancel`` was set before there was a place for it.
            DcpS3Error: no thread can be started. If there are some, they have to do.
        """
        future: Future[Any] = Future()
        with self._changed:
            while self._unfinished >= self._count + self._waiting and not (cancel is not None and cancel.is_set()):
                self._changed.wait(0.5)
            if cancel is not None and cancel.is_set():
                raise Cancelled
            self._tasks.append((future, function, arguments))
            self._unfinished += 1
            try:
                self._start_threads()
            except DcpS3Error:
                self._tasks.pop()
                self._unfinished -= 1
                raise
            self._changed.notify_all()
        return future

    def resize(self, count: int) -> None:
        """Have up to ``count`` threads from now on. Threads too many end after their task."""
        with self._changed:
            self._count = max(1, count)
            self._start_threads()
            self._changed.notify_all()

    def _start_threads(self) -> None:
        while self._idle < len(self._tasks) and self._alive < self._count:
            thread = threading.Thread(target=self._work, name=f"{self._name}-{self._alive}")
            # Before it starts: an interrupt meanwhile may leave it running.
            self._threads = [*(each for each in self._threads if each.is_alive()), thread]
            try:
                thread.start()
            except RuntimeError as error:
                if not self._alive:
                    raise DcpS3Error(
                        f"no thread could be started for {self._name} ({error}): a limit on the threads of this user, "
                        "host or container is reached. Remedy: raise it (ulimit -u, pids.max of the container), or set "
                        "DCP_S3_CONCURRENCY to a smaller number"
                    ) from None
                self._count = self._alive
                logger.warning("%s: no more than %d threads can be started: %s", self._name, self._count, error)
                return
            self._alive += 1
            self._idle += 1

    def close(self) -> None:
        """Cancel tasks that have not begun, wait for the others, and end the threads."""
        with self._changed:
            self._is_closed = True
            while self._tasks:
                self._tasks.popleft()[0].cancel()
            self._changed.notify_all()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._tasks and self._lingers and not self._is_closed and self._alive <= self._count:
                    self._changed.wait()
                self._idle -= 1
                if not self._tasks or self._alive > self._count:
                    self._alive -= 1
                    return
                future, function, arguments = self._tasks.popleft()
            try:
                if future.set_running_or_notify_cancel():
                    future.set_result(function(*arguments))
            except BaseException as error:  # noqa: BLE001 - passed on to whoever waits for the future
                future.set_exception(error)
            # No cycle, as the error's traceback has this frame; and an idle thread must not keep a save's memory.
            del future, function, arguments
            with self._changed:
                self._unfinished -= 1
                self._idle += 1
                self._changed.notify_all()


class InTurn(Workers):
    """Runs submitted tasks one after the other, on a thread that lives only while there are tasks.

    An idle thread would keep the interpreter from ending. As a daemon it would be killed inside torch's C++ at exit.
    """

    _lingers = False

    def __init__(self, name: str) -> None:
        super().__init__(1, name)

    def join(self) -> None:
        """Wait until all submitted tasks are done."""
        with self._changed:
            threads = self._threads
        for thread in threads:
            if thread.ident is not None:  # it could not be started
                thread.join()
