"""Python's cyclic garbage collector, out of the way while many objects are made that all stay.

Metadata and plans of a large checkpoint are millions of objects. The collector goes through all that there are again
and again while they are made, which takes as long as making them, and finds nothing.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

from dcp_s3.forking import reset_in_child

_lock = threading.Lock()
_pauses = 0
_was_enabled = False


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """No automatic collection in this process meanwhile. Pauses may overlap; the last one puts back what was found,
    whatever `gc.disable` and `gc.enable` were called meanwhile."""
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
            _pauses = max(0, _pauses - 1)  # 0 in a child that was forked meanwhile
            if _pauses == 0 and _was_enabled:
                gc.enable()


@reset_in_child
def _begin_anew() -> None:
    """A forked child has none of the threads that pause: they would never end it."""
    global _lock, _pauses
    _lock = threading.Lock()
    if _pauses and _was_enabled:
        gc.enable()
    _pauses = 0


def collect_young() -> None:
    """Collect what was made since the last collection: for long pauses, in which garbage is made as well."""
    gc.collect(1)
