"""Pools of buffers, and threads that wait for them."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

import pytest

from dcp_s3.stage.pool import BufferPool, Slot

MIB = 2**20
PATIENCE_SECONDS = 30


def make_pool(**options: Any) -> BufferPool:
    return BufferPool(**{"limit": None, "generations": 2, "spill_dir": None, **options})


class Waiter:
    """A thread that asks the pool for memory; `waits` returns once it waits."""

    def __init__(self, pool: BufferPool, sizes: list[int], caplog: pytest.LogCaptureFixture) -> None:
        self._caplog = caplog
        caplog.set_level(logging.INFO, "dcp_s3.stage.pool")
        self._before = self._reports()
        self.slots: list[Slot] = []
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(pool, sizes), daemon=True)
        self._thread.start()

    def _reports(self) -> int:
        return sum(record.getMessage().startswith("staging waits") for record in self._caplog.records)

    def _run(self, pool: BufferPool, sizes: list[int]) -> None:
        try:
            self.slots = pool.acquire(sizes)
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            self.error = error

    def waits(self) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while self._reports() == self._before:
            assert self._thread.is_alive(), f"it did not wait: {self.error!r}"
            assert time.monotonic() < deadline
            time.sleep(0.005)

    def result(self) -> list[Slot]:
        self._thread.join(PATIENCE_SECONDS)
        assert not self._thread.is_alive(), "it still waits"
        if self.error is not None:
            raise self.error
        return self.slots

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()
