"""Saves and loads in a loop, some of which fail: threads, sockets, files and memory do not become more.

DCP_S3_TEST_LOOPS says how many saves there are (60).
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import random
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from dcp_s3 import S3Stager, S3StorageReader, S3StorageWriter, latest
from dcp_s3.s3 import retry
from tests.faulty import BUCKET, FaultyServer, serve
from tests.memory_s3 import Fault

pytestmark = [pytest.mark.counted, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self")]

LOOPS = int(os.environ.get("DCP_S3_TEST_LOOPS", "60"))
WARM_UP = 20
MIB = 2**20
STATE_BYTES = 4 * MIB
# A copy of the state lost in each save of one of the six kinds is more than this with 60 of them; what the allocator
# and the interpreter do was 12 MiB.
GROWTH_BYTES = 24 * MIB

ROOT = f"s3://{BUCKET}/run"


class Process:
    """What this process has, the in-memory server's share included."""

    def __init__(self) -> None:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        self.threads = Counter(_without_number(thread.name) for thread in threading.enumerate())
        self.files = Counter(_kind(entry) for entry in Path("/proc/self/fd").iterdir())
        self.memory = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _without_number(name: str) -> str:
    return name.rstrip("0123456789-_")


def _kind(entry: Path) -> str:
    with contextlib.suppress(FileNotFoundError):  # the directory's own
        return os.readlink(entry).partition(":")[0]
    return ""


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyServer]:
    monkeypatch.setattr(retry, "BACKOFF_BASE", 0.001)
    monkeypatch.setenv("DCP_S3_RETRY_ATTEMPTS", "2")
    monkeypatch.setenv("DCP_S3_PART_SIZE", "5MiB")
    monkeypatch.setenv("DCP_S3_CONCURRENCY", "2")
    # pytest keeps the records of the log, those the exceptions that they name, and those the frames with the state.
    logging.disable(logging.CRITICAL)
    try:
        with serve(monkeypatch) as running:
            yield running
    finally:
        logging.disable(logging.NOTSET)


def make_state(seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {"weights": torch.rand(STATE_BYTES // 4, generator=generator), "step": seed}


class Loop:
    """Saves that replace each other, and loads; each in a way of its own."""

    def __init__(self, server: FaultyServer) -> None:
        self.done: Counter[str] = Counter()
        self._server = server
        self._rng = random.Random(0)

    def run(self, count: int, stager: S3Stager) -> None:
        for number in range(count):
            self._server.rule = lambda _: None
            self._step(number, stager)
            self._server.s3.reset_counters()  # its log of requests grows

    def _step(self, number: int, stager: S3Stager) -> None:
        kind = ("sync", "async", "async with a stager", "refused by S3", "async, refused by S3", "exists")[number % 6]
        writer = S3StorageWriter(f"{ROOT}/step", overwrite=kind != "exists")
        state = make_state(number)
        if "refused" in kind:
            operation = self._rng.choice(["PutObject", "GetObject"])
            fault = self._rng.choice([Fault.error(503, "SlowDown"), Fault.reset(), Fault.reset_request(MIB)])
            self._server.rule = lambda request: fault if request.operation == operation else None
        with pytest.raises(CheckpointException) if "refused" in kind or kind == "exists" else contextlib.nullcontext():
            if "async" in kind:
                options = {"async_stager": stager} if "stager" in kind else {}
                future: Any = dcp.async_save(state, storage_writer=writer, **options)
                future.result()
            else:
                dcp.save(state, storage_writer=writer)
        self.done[kind] += 1
        if number % 6 == 3:
            self._load_in_vain()
        self._server.rule = lambda _: None
        target = make_state(-1)
        dcp.load(target, storage_reader=S3StorageReader(f"{ROOT}/step"))
        if "refused" not in kind and kind != "exists":
            assert torch.equal(target["weights"], state["weights"])
        assert latest(ROOT) is not None

    def _load_in_vain(self) -> None:
        self._server.rule = lambda request: Fault.reset() if request.key.endswith(".distcp") else None
        for url, target in (
            (f"{ROOT}/step", make_state(0)),
            (f"{ROOT}/nothing", make_state(0)),
            (f"{ROOT}/step", {"weights": torch.zeros(3)}),
        ):
            with pytest.raises(CheckpointException):
                dcp.load(target, storage_reader=S3StorageReader(url))
        self.done["load in vain"] += 1


@pytest.mark.soak
@pytest.mark.timeout(300 + LOOPS)
def test_nothing_is_left_of_saves_and_loads(faulty: FaultyServer) -> None:
    loop = Loop(faulty)
    with S3Stager() as stager:
        loop.run(WARM_UP, stager)
        before = Process()
        loop.run(LOOPS, stager)
        after = Process()
    assert len(loop.done) == 7
    assert after.threads == before.threads
    # Connections that broke were made anew; no more are kept than are used at once.
    limit = {"socket": 4}
    for kind in before.files | after.files:
        assert after.files[kind] <= before.files[kind] + limit.get(kind, 0), kind
    growth = after.memory - before.memory
    assert growth < GROWTH_BYTES
