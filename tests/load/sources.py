"""A checkpoint's objects in memory, for what stands on the engine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

from dcp_s3.limit import Deadline, Limit
from dcp_s3.load.engine import Source
from dcp_s3.memory import ReadTarget
from dcp_s3.s3.store import S3Store
from dcp_s3.settings import Settings
from dcp_s3.url import parse_url

URL = "s3://bucket/run"


class MemorySource(Source):
    """Reads from ``objects``, by path, and remembers what was asked for.

    Args:
        objects: bytes by path.
        damage: called with the path, the first byte, and the bytes that are about to be received; may change them.
        deadline: of all reads.
        settings: of the engine.
    """

    def __init__(
        self,
        objects: Mapping[str, bytes],
        *,
        damage: Callable[[str, int, bytearray], None] = lambda *_: None,
        deadline: Deadline | None = None,
        settings: Settings | None = None,
    ) -> None:
        super().__init__(S3Store("bucket", settings or Settings(), Limit(deadline=deadline)), parse_url(URL))
        self.objects, self._damage = objects, damage
        self.asked: list[tuple[str, int, int]] = []
        """Path, first byte and length."""
        self.distrusted: list[str] = []
        self._asking = threading.Lock()

    def distrust(self, path: str) -> None:
        self.distrusted.append(path)

    def read(
        self, path: str, start: int, targets: Sequence[ReadTarget], *, moved: Callable[[int], None] | None = None
    ) -> None:
        size = sum(target.view.nbytes for target in targets)
        data = bytearray(self.objects[path][start : start + size])
        assert len(data) == size
        with self._asking:
            self.asked.append((path, start, size))
            self._damage(path, start, data)
        at = 0
        for target in targets:
            target.view[:] = data[at : at + target.view.nbytes]
            target.received(0, target.view.nbytes)
            at += target.view.nbytes
