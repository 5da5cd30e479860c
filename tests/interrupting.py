"""Signals for the main thread, sent by other threads."""

from __future__ import annotations

import signal
import threading


class Interrupts:
    """Raises on the main thread; made on it.

    Args:
        kind: what is raised there.
    """

    def __init__(self, kind: type[BaseException] = KeyboardInterrupt) -> None:
        self._kind = kind
        self._raised = threading.Semaphore(0)
        self._before = signal.signal(signal.SIGUSR1, self._handle)

    def _handle(self, *_: object) -> None:
        self._raised.release()
        raise self._kind

    def send(self) -> None:
        """Returns when it is raised there.

        Python looks for signals, then waits for a lock: a signal between the two is not seen before the next one.
        """
        for _ in range(100):
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
            if self._raised.acquire(timeout=1):
                return
        raise AssertionError("the main thread handles no signals")

    def end(self) -> None:
        """Handle the signal as before."""
        signal.signal(signal.SIGUSR1, self._before)
