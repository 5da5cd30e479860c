"""Work that must run to its end although a signal's handler raises: the other ranks wait for it.

A collective is one call of C++. A signal that comes meanwhile is raised right after the call has succeeded: the other
ranks would go on, and this one would leave.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


class Latch:
    """Set once, by any thread; one thread waits for it.

    A `threading.Event` would not do: its wait, interrupted twice, may leave the lock of the event locked, and then
    nobody can set it any more.
    """

    def __init__(self) -> None:
        self.is_set = False
        self._unset = threading.Lock()
        self._unset.acquire()

    def set(self) -> None:
        """End all waiting. At most once."""
        self.is_set = True
        self._unset.release()

    def wait(self) -> None:
        """Wait until it is set. An interrupt changes nothing: wait again."""
        if not self.is_set:
            self._unset.acquire()


def run_through(function: Callable[[], T]) -> tuple[T, BaseException | None]:
    """Run ``function`` to its end on a thread of its own, whatever is raised on this one meanwhile.

    Returns:
        Its result, and the first exception that a signal raised here, for the caller to raise.

    Raises:
        BaseException: raised by ``function``.
    """
    future: Future[T] = Future()
    ended = Latch()
    first = threading.Lock()  # held by the thread that runs it

    def run() -> None:
        if not first.acquire(blocking=False):
            return
        try:
            future.set_result(function())
        except BaseException as error:  # noqa: BLE001 - raised where the result is awaited
            future.set_exception(error)
        finally:
            ended.set()

    raised: list[BaseException] = []
    try:
        threading.Thread(target=run, name="dcp_s3-collective").start()
    except BaseException as error:  # noqa: BLE001 - an interrupt, or no thread is left: the others wait anyway
        raised.append(error)
        run()
    wait_through(ended, raised.append)
    return future.result(), raised[0] if raised else None


def wait_through(ended: Latch, on_raise: Callable[[BaseException], None]) -> None:
    """Wait for ``ended``, whatever is raised here meanwhile.

    `Thread.join` would not do: in Python 3.11, once interrupted, it takes the thread for ended.

    Args:
        ended: set on another thread.
        on_raise: gets what a signal raises here. Another signal may interrupt it: it must be one call of C, such as
            `list.append`.
    """
    while True:
        try:
            while not ended.is_set:
                try:
                    ended.wait()
                except BaseException as error:  # noqa: BLE001 - whatever a handler raises
                    on_raise(error)
            return
        except BaseException as error:  # noqa: BLE001 - raised between two waits
            on_raise(error)
