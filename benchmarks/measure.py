"""Measures an operation in this process: wall time, CPU time, peak memory."""

from __future__ import annotations

import ctypes
import gc
import resource
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class Sample:
    """What one operation cost."""

    wall_seconds: float
    cpu_seconds: float
    """User and system time of this process, all threads."""
    peak_bytes: int
    """Most resident memory during the operation, above what was resident before it."""


def measure(operation: Callable[[], object]) -> Sample:
    """Run ``operation`` once and measure it."""
    gc.collect()
    _return_free_memory()
    before = _resident_bytes()
    with_kernel = _reset_peak()
    sampler = None if with_kernel else _Sampler()
    cpu = _cpu_seconds()
    start = time.perf_counter()
    operation()
    wall = time.perf_counter() - start
    cpu = _cpu_seconds() - cpu
    peak = _status_bytes("VmHWM") if sampler is None else sampler.stop()
    return Sample(wall, cpu, max(peak - before, 0))


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _return_free_memory() -> None:
    """Give freed memory back, or the operation would reuse it and seem to need none."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it, musl has not
        if trim is not None:
            trim(0)


def _reset_peak() -> bool:
    """Make the kernel forget the peak so far (Linux; see proc(5), clear_refs)."""
    try:
        _CLEAR_REFS.write_text("5")
    except OSError:
        return False
    return True


def _status_bytes(name: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{_STATUS} has no {name}")


def _resident_bytes() -> int:
    if _STATUS.exists():
        return _status_bytes("VmRSS")
    # Elsewhere only the peak is to be had: in bytes on macOS, in KiB on other systems.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class _Sampler:
    """Looks at the resident memory every few milliseconds; used where the kernel does not help."""

    def __init__(self, interval: float = 0.005) -> None:
        self._interval = interval
        self._peak = _resident_bytes()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory-sampler", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopping.wait(self._interval):
            self._peak = max(self._peak, _resident_bytes())

    def stop(self) -> int:
        self._stopping.set()
        self._thread.join()
        return max(self._peak, _resident_bytes())
