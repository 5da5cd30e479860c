"""Small groups of named threads that end when their owner is done.

`concurrent.futures.ThreadPoolExecutor` will not do. At the end of a script the interpreter waits for torch's thread
that carries out an asynchronous save, but executors already refuse every `submit`. A last `async_save` that nobody
waited for would be lost silently.
"""

from __future__ import annotations

import collections
import contextlib
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from dcp_s3.errors import DcpS3Error

_Task = tuple["Future[Any]", Callable[..., Any], tuple[Any, ...]]


def _start(thread: threading.Thread) -> None:
    try:
        thread.start()
    except RuntimeError as error:
        raise DcpS3Error(
            f"no thread could be started for {thread.name} ({error}): a limit on the threads of this user, host or "
            "container is reached. Remedy: raise it (ulimit -u, pids.max of the container), or set DCP_S3_CONCURRENCY "
            "to a smaller number"
        ) from None


class Workers:
    """``count`` threads (at least one) that run submitted tasks, in order of submission.

    Raises:
        DcpS3Error: a thread cannot be started.
    """

    def __init__(self, count: int, name: str) -> None:
        self._name = name
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._count = 0
        try:
            while self._count < count:
                self._add()
        except BaseException:
            self.close()
            raise

    def _add(self) -> None:
        thread = threading.Thread(target=self._work, name=f"{self._name}-{len(self._threads)}")
        self._threads.append(thread)  # before it starts: an interrupt meanwhile may leave it running
        _start(thread)
        self._count += 1

    def resize(self, count: int) -> None:
        """Have ``count`` threads from now on. Threads too many end when the tasks submitted so far have begun.

        To be called by one thread at a time, and not after `close`. If it raises, those that there are go on.
        """
        while self._count < count:
            self._add()
        while self._count > count:
            self._count -= 1
            self._tasks.put(None)

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._tasks.put((future, function, arguments))
        return future

    def close(self) -> None:
        """Cancel tasks that have not begun, wait for the others, and end the threads."""
        with contextlib.suppress(queue.Empty):
            while True:
                task = self._tasks.get_nowait()
                if task is not None:
                    task[0].cancel()
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            _run(task)
            del task  # an idle thread must not keep a save's memory


class Slots:
    """A number of places, of which those in use are given back: a semaphore whose size can change."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._count = count
        self._changed = threading.Condition()

    @property
    def all_taken(self) -> bool:
        return self._free <= 0

    def acquire(self, timeout: float) -> bool:
        """Take a place; False if there was none within ``timeout`` seconds."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._free > 0, timeout):
                return False
            self._free -= 1
            return True

    def release(self) -> None:
        with self._changed:
            self._free += 1
            self._changed.notify()

    def resize(self, count: int) -> None:
        """Have ``count`` places from now on. Places that are in use stay so until they are given back."""
        with self._changed:
            self._free += count - self._count
            self._count = count
            self._changed.notify_all()


class InTurn:
    """Runs submitted tasks one after the other, on a thread that lives only while there are tasks.

    An idle thread would keep the interpreter from ending. As a daemon it would be killed inside torch's C++ at exit.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._tasks: collections.deque[_Task] = collections.deque()
        self._thread: threading.Thread | None = None

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Run ``function(*arguments)`` once all earlier tasks are done; DcpS3Error if no thread can be started."""
        future: Future[Any] = Future()
        with self._lock:
            if self._thread is None:
                thread = threading.Thread(target=self._work, name=self._name)
                _start(thread)  # it waits for the lock
                self._thread = thread
            self._tasks.append((future, function, arguments))
        return future

    def join(self) -> None:
        """Wait until all submitted tasks are done."""
        thread = self._thread
        if thread is not None:
            thread.join()

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._tasks:
                    self._thread = None
                    return
                task = self._tasks.popleft()
            _run(task)
            del task


def _run(task: _Task) -> None:
    future, function, arguments = task
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function(*arguments))
    except BaseException as error:  # noqa: BLE001 - passed on to whoever waits for the future
        future.set_exception(error)
    finally:
        del task, future, function, arguments  # no cycle: the error's traceback has this frame
