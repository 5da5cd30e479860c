"""SIGTERM as a flag: the process goes on until its training, or a last save, ends it."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType


class SigtermFlag:
    """Notes that SIGTERM has come, and calls the handler that was there before. For the main thread."""

    def __init__(self) -> None:
        self.seen = False
        self._process: int | None = os.getpid()
        self._before = signal.signal(signal.SIGTERM, self._handle) or signal.SIG_DFL

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # Not in a process that was forked since, for example to load data: it has to end. Nor after `close`: whoever
        # set a handler meanwhile may still call this one.
        watching = os.getpid() == self._process
        self.seen = self.seen or watching
        if callable(self._before):
            self._before(number, frame)
        elif self._before == signal.SIG_DFL and not watching:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def close(self) -> None:
        """Put the previous handler back, unless somebody has set another one meanwhile, which may call this one: it
        only passes signals on from now on."""
        self._process = None
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, self._before)
