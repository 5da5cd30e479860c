"""Request and response bodies without copies in between.

Upload: botocore insists on ``bytes`` or a file object as Body, and http.client would read the file in small
copies. `GatherBody` satisfies botocore (``read``, ``seek``, ``tell``, ``__len__``); just before the request is
sent, `send_without_copy` replaces it by its memoryviews, and http.client hands each to ``sendall`` as it is,
with the GIL released. Download: http.client's response can ``readinto`` memory; urllib3's wrapper around it
copies, so `readinto_response` goes below it.
"""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

_JOIN_BELOW = 64 * 2**10
# Python's socket timeout is for a whole `sendall`, and while a new connection sends its first body that is the connect
# timeout: a part of 64 MiB in one call would have to be through within 5 s. 1 MiB leaves that to dead connections.
_SEND_AT_ONCE = 2**20


class GatherBody:
    """Several buffers sent as one body.

    Args:
        views: the buffers in order; they must not change or go away before the request is done.
        cancel: when set, a body that is being sent is broken off.
        patience: seconds after which it is, too.
    """

    def __init__(
        self, views: Sequence[memoryview], cancel: threading.Event | None = None, *, patience: float | None = None
    ) -> None:
        self._views = views
        self._cancel = cancel
        self._patience = patience
        self._size = sum(view.nbytes for view in views)
        self._position = 0

    def release(self) -> None:
        """Let go of the buffers, after the last attempt: botocore's errors keep the request, and so this body."""
        self._views = ()

    def __len__(self) -> int:
        return self._size

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = base + offset
        return self._position

    def read(self, size: int = -1) -> bytes:
        """The next bytes, copied: only for callers that do not send views (none on the usual path)."""
        end = self._size if size is None or size < 0 else min(self._size, self._position + size)
        out = bytearray()
        start = 0
        for view in self._views:
            low, high = max(self._position, start), min(end, start + view.nbytes)
            if low < high:
                out += view[low - start : high - start]
            start += view.nbytes
        self._position = max(self._position, end)
        return bytes(out)

    def chunks(self) -> Iterator[memoryview | bytes]:
        """The buffers for ``sendall``: large ones in slices, neighbours that are small joined."""
        started = time.monotonic()
        small: list[memoryview] = []
        small_size = 0
        for view in self._views:
            if small and small_size + view.nbytes > _JOIN_BELOW:
                yield b"".join(small)
                small, small_size = [], 0
            if view.nbytes >= _JOIN_BELOW:
                for start in range(0, view.nbytes, _SEND_AT_ONCE):
                    if self._cancel is not None and self._cancel.is_set():
                        raise ConnectionAbortedError("the upload was cancelled")
                    if self._patience is not None and time.monotonic() - started > self._patience:
                        raise ConnectionAbortedError(f"the body was not through after {self._patience:g} s")
                    yield view[start : start + _SEND_AT_ONCE]
            elif view.nbytes:
                small.append(view)
                small_size += view.nbytes
        if small:
            yield b"".join(small)


class _Chunks:
    """An iterable that can be iterated again. It must not look like a file, or it would be read."""

    def __init__(self, body: GatherBody) -> None:
        self._body = body

    def __iter__(self) -> Iterator[memoryview | bytes]:
        return self._body.chunks()

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Called by botocore before it sends the body again to another region; every iteration begins at 0 anyway."""
        return 0


def send_without_copy(request: Any, **_: Any) -> None:
    """botocore ``before-send`` handler: put the views themselves in the place of a `GatherBody`."""
    if isinstance(request.body, GatherBody):
        request.body = _Chunks(request.body)


def readinto_response(body: Any, view: memoryview) -> int:
    """Read from a botocore StreamingBody into ``view``; at least one byte unless the body is at its end.

    Uses http.client's own ``readinto`` below urllib3 (seen in urllib3 1.26 to 2.8, where the response keeps it
    as ``_fp``), which receives straight into ``view``. Elsewhere 1 MiB at a time goes through ``read``.

    Returns:
        Number of bytes read, 0 at the end.
    """
    below = getattr(getattr(body, "_raw_stream", None), "_fp", None)
    if below is not None and hasattr(below, "readinto"):
        return int(below.readinto(view))
    data = body.read(min(view.nbytes, 2**20))
    view[: len(data)] = data
    return len(data)


def finish_response(body: Any, *, complete: bool) -> None:
    """Give the connection back for the next request if the body was read to its end, close it otherwise."""
    raw = getattr(body, "_raw_stream", None)
    if complete and raw is not None and hasattr(raw, "release_conn"):
        raw.release_conn()
    else:
        body.close()
