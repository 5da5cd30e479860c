"""Pools, stagers and saves of the tests of staging."""

from __future__ import annotations

import gc
import io
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse

from dcp_s3 import S3Stager, S3StorageWriter
from dcp_s3.errors import StagingError
from dcp_s3.stage.memory import BufferPool, HostBuffer
from dcp_s3.stage.snapshot import Snapshot

MIB = 2**20
PATIENCE = 60.0  # seconds; less than the process group's: whoever fails because a collective timed out is too late
THREAD, PROCESS = AsyncCheckpointerType.THREAD, AsyncCheckpointerType.PROCESS
STAGERS = ["blocking", "asynchronous", "writer"]


def make_pool(**options: Any) -> BufferPool:
    return BufferPool(**{"limit": None, "generations": 2, "spill_dir": None, **options})


def buffers_of(pool: BufferPool) -> list[HostBuffer]:
    generations_in_use(pool)
    return [*pool._free, *pool._used()]


def generations_in_use(pool: BufferPool) -> int:
    with suppress(StagingError):  # it may be closed
        pool._try([])  # takes back what is free
    return sum(map(bool, pool._in_use))


def stage_once(state: dict[str, Any], **options: Any) -> dict[str, Any]:
    return S3Stager(options or None).stage_now(state)


def frozen(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    if isinstance(value, dict):
        return {key: frozen(entry) for key, entry in value.items()}
    return [frozen(entry) for entry in value] if isinstance(value, list) else value


class Saver:
    def __init__(
        self,
        staging: str,
        kind: AsyncCheckpointerType = THREAD,
        settings: dict[str, Any] | None = None,
        generations: int = 2,
    ) -> None:
        self._settings, self._kind = settings or {}, kind
        # The writer's own stager belongs to the process and its settings: the same one each time.
        asynchronous = staging == "asynchronous"
        self.stager = None if staging == "writer" else S3Stager(self._settings, asynchronous=asynchronous)
        if self.stager is not None:
            self.stager._pool.generations = generations

    def save(self, url: str, state: dict[str, Any], **options: Any) -> Future[Any]:
        """The future of the upload; it has been staged."""
        answer: Any = dcp.async_save(
            state,
            storage_writer=S3StorageWriter(url, settings=self._settings, overwrite=options.pop("overwrite", False)),
            async_stager=self.stager,
            async_checkpointer_type=self._kind,
            **options,
        )
        upload: Future[Any] = answer.upload_completion if isinstance(answer, AsyncSaveResponse) else answer
        return upload


class WaitingPlanner(DefaultSavePlanner):
    """Gives out no data before `go` does not block any more: what the save reads, it reads after that."""

    def __init__(self, go: Callable[[], Any]) -> None:
        super().__init__()
        self._go = go

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        self._go()
        return super().resolve_data(write_item)


class HeldUp:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go, self.reached = threading.Event(), threading.Event()
        copy = Snapshot.copy

        def wait(*arguments: Any) -> Any:
            self.reached.set()
            assert self.go.wait(PATIENCE)
            return copy(*arguments)

        monkeypatch.setattr(Snapshot, "copy", wait)


@contextmanager
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
