"""This process: what a forked child resets, imports of torch, and pauses of the cyclic garbage collector."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections.abc import Callable, Iterator

_resets: list[Callable[[], object]] = []


def reset_in_child(reset: Callable[[], object]) -> Callable[[], object]:
    """Call ``reset`` in every forked child before its own code goes on, in order of registration.

    Connections and threads are its parent's. A lock that another thread held at the time of the fork would stay locked
    forever: make a new one.
    """
    _resets.append(reset)
    return reset


os.register_at_fork(after_in_child=lambda: [reset() for reset in _resets])

_importing = threading.RLock()


@contextlib.contextmanager
def torch_imported_alone() -> Iterator[None]:
    """For an import of torch in the body, on any thread: two that import different parts of it at once abort the
    process."""
    with _importing:
        yield


@reset_in_child
def _forget_imports() -> None:
    global _importing
    _importing = threading.RLock()


_lock = threading.Lock()
_pauses = 0
_was_enabled = False


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Pause automatic garbage collection in this process, while many long-lived objects are made.

    Metadata and plans of a large checkpoint are millions of objects. While they are made, the collector walks all
    objects again and again, which takes as long as making them, and finds nothing. Pauses may overlap. The last one to
    end restores the state found by the first, whatever `gc.disable` and `gc.enable` were called in between.
    """
    global _pauses, _was_enabled
    with _lock:
        if _pauses == 0:
            _was_enabled = gc.isenabled()
            gc.disable()
        _pauses += 1
    try:
        yield
    finally:
        with _lock:
            _pauses = max(0, _pauses - 1)  # 0 in a child that was forked during the pause
            if _pauses == 0 and _was_enabled:
                gc.enable()


@reset_in_child
def _end_pauses() -> None:
    """A child has none of the threads that would end them."""
    global _lock, _pauses
    _lock = threading.Lock()
    if _pauses and _was_enabled:
        gc.enable()
    _pauses = 0


def collect_young() -> None:
    """Collect what was made since the last collection: for long pauses, which make garbage as well."""
    gc.collect(1)
