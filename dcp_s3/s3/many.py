"""Many small requests at once: a function of one item each, in threads. See `Store.map`."""

from __future__ import annotations

import collections
import math
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TypeVar

from dcp_s3.limit import Cancelled
from dcp_s3.store import SelfStore

T = TypeVar("T")
U = TypeVar("U")

AT_ONCE = 32
"""Most items under way. S3 answers thousands of requests a second; a listing is bound by one process's CPU, which 32
keep busy over round trips of tens of milliseconds."""

_POLL_SECONDS = 0.05  # between looks at the caller's `cancel` while a request waits to be tried again


class _Failed(threading.Event):
    """Set by the first failure of a map, or with the event that cancels its caller's own requests."""

    def __init__(self, caller: threading.Event | None) -> None:
        super().__init__()
        self._caller = caller
        inner = isinstance(caller, _Failed)
        self.free: threading.Semaphore = caller.free if inner else threading.Semaphore(AT_ONCE - 1)  # type: ignore[union-attr]
        """The threads that may still be started. A map inside another one shares them, and each works in its caller's
        thread, too: none waits for a thread."""

    def is_set(self) -> bool:
        return super().is_set() or (self._caller is not None and self._caller.is_set())

    def wait(self, timeout: float | None = None) -> bool:
        if self._caller is None:
            return super().wait(timeout)
        until = math.inf if timeout is None else time.monotonic() + timeout
        while not self.is_set() and (left := until - time.monotonic()) > 0:
            super().wait(min(_POLL_SECONDS, left))
        return self.is_set()


def map_in_threads(store: SelfStore, function: Callable[[SelfStore, T], U], items: Iterable[T]) -> list[U]:
    """`Store.map` for a store whose requests take time."""
    failed = _Failed(store.limit.cancel)
    bounded = store.within(replace(store.limit, cancel=failed))
    pending = collections.deque(enumerate(items))
    results: dict[int, U] = {}
    failures: list[BaseException] = []

    def work() -> None:
        while True:
            try:
                number, item = pending.popleft()
            except IndexError:
                return
            try:
                if failed.is_set():
                    raise Cancelled
                results[number] = function(bounded, item)
            except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
                failures.append(error)
                failed.set()
                return

    count = len(pending)
    threads: list[threading.Thread] = []
    try:
        for _ in range(count - 1):
            if not pending or not _start(work, failed.free, threads):
                break
        work()
        for thread in threads:
            thread.join()
    except BaseException:  # an interrupt of the caller
        failed.set()
        for thread in threads:
            thread.join()
        raise
    try:
        if failures:
            raise failures[0]
    finally:
        failures.clear()  # its traceback has this frame
    return [results[number] for number in range(count)]


def _start(work: Callable[[], None], free: threading.Semaphore, threads: list[threading.Thread]) -> bool:
    """Work in one more thread; return whether there may be one."""
    if not free.acquire(blocking=False):
        return False

    def target() -> None:
        try:
            work()
        finally:
            free.release()

    thread = threading.Thread(target=target, name="dcp_s3-requests", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # the system has no more of them
        free.release()
        return False
    threads.append(thread)
    return True
