"""What must be gone through to its end although a signal's handler raises: the other ranks wait for it.

A collective is one call of C++. A signal that comes meanwhile is raised right after it has succeeded: the other ranks
go on, this one would leave.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def run_through(function: Callable[[], T]) -> tuple[T, BaseException | None]:
    """Run ``function`` on a thread of its own, whatever is raised on this one meanwhile.

    Returns:
        What it returns, and the first exception that a signal raised here: for the caller to raise.

    Raises:
        BaseException: what ``function`` raises.
    """
    future: Future[T] = Future()
    ended = threading.Event()
    first = threading.Lock()  # held by the thread that runs it

    def run() -> None:
        if not first.acquire(blocking=False):
            return
        try:
            future.set_result(function())
        except BaseException as error:  # noqa: BLE001 - it is raised where it is waited for
            future.set_exception(error)
        finally:
            ended.set()

    raised: list[BaseException] = []
    try:
        threading.Thread(target=run, name="dcp_s3-collective").start()
    except BaseException as error:  # noqa: BLE001 - an interrupt, or no thread is left: the others wait all the same
        raised.append(error)
        run()
    wait_through(ended, raised.append)
    return future.result(), raised[0] if raised else None


def wait_through(ended: threading.Event, on_raise: Callable[[BaseException], None]) -> None:
    """Wait for ``ended``; what a signal raises here meanwhile goes to ``on_raise``.

    Not by `Thread.join`: in Python 3.11 one that was interrupted takes the thread for ended.
    """
    while not ended.is_set():
        try:
            ended.wait()
        except BaseException as error:  # noqa: BLE001 - whatever a handler raises
            on_raise(error)
