"""A few named threads that end when their owner is done.

Not `concurrent.futures.ThreadPoolExecutor`: at the end of a script the interpreter waits for torch's thread that
carries out an asynchronous save, but refuses every `submit` of an executor meanwhile. A last `async_save` that nobody
waited for would be lost without a word.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

_Task = tuple["Future[Any]", Callable[..., Any], tuple[Any, ...]]


class Workers:
    """``count`` threads that run what is submitted, in order of submission.

    Args:
        count: number of threads, at least one.
        name: of the threads; a number is added.
        daemon: whether the interpreter may end without waiting for the threads.
    """

    def __init__(self, count: int, name: str, *, daemon: bool = False) -> None:
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}-{number}", daemon=daemon) for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Run ``function(*arguments)`` on one of the threads."""
        future: Future[Any] = Future()
        self._tasks.put((future, function, arguments))
        return future

    def close(self) -> None:
        """Cancel what has not begun, wait for what has, and end the threads."""
        while True:
            try:
                task = self._tasks.get_nowait()
            except queue.Empty:
                break
            if task is not None:
                task[0].cancel()
        self.end()
        self.join()

    def end(self) -> None:
        """Let the threads end when all that was submitted is done; nothing may be submitted any more."""
        for _ in self._threads:
            self._tasks.put(None)

    def join(self) -> None:
        """Wait for the threads, after `end`."""
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            future, function, arguments = task
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(function(*arguments))
            except BaseException as error:  # noqa: BLE001 - it goes to whoever waits for the future
                future.set_exception(error)
            del task, future, function, arguments  # an idle thread must not keep a save's memory
