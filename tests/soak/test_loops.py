"""Saves and loads in a loop: beside prunes none of them ever fails; and threads, sockets, files and memory do not
become more.

DCP_S3_TEST_SECONDS says how long a run saves every 100 ms, beside a prune that keeps two, beside a reader (10);
DCP_S3_TEST_LOOPS how many saves there are in the loop of which nothing may be left (60).
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
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from dcp_s3 import CheckpointCatalog, S3Stager, S3StorageWriter, latest, prune
from dcp_s3.errors import CheckpointNotFoundError
from dcp_s3.s3 import retry
from tests.end_to_end import loads
from tests.end_to_end.states import assert_same, blank, random_values
from tests.faulty import BUCKET, FaultyServer
from tests.memory_s3 import Fault
from tests.objects import separate_objects

SECONDS = float(os.environ.get("DCP_S3_TEST_SECONDS", "10"))
ROOT = f"s3://{BUCKET}/run"

pytestmark = pytest.mark.counted


def state(number: int) -> dict[str, Any]:
    return {"number": number, "weight": torch.full((1000,), float(number)), "other": torch.full((50,), -float(number))}


def save(number: int) -> None:
    time.sleep(0.1)  # the training
    with separate_objects("other"):
        loads.save(state(number), f"{ROOT}/step-{number}")


def dawdle(request: Any) -> Fault | None:
    """Some reads take as long as a few saves, so that what they read is pruned meanwhile, if it can be."""
    if request.operation == "GetObject" and random.random() < 0.1:
        return Fault.delay(random.uniform(0, 1.0))
    return None


def restore(done: Counter[str]) -> int:
    """The latest, as a job would: one that vanished before its lease was written is no failure, and there is another.
    Its number."""
    while True:
        found = latest(ROOT)
        assert found is not None
        try:
            loaded = loads.load(blank(state(0)), found.url)
        except CheckpointException as error:
            ((cause, _),) = error.failures.values()
            if not isinstance(cause, CheckpointNotFoundError):
                raise
            done["vanished"] += 1
            continue
        number = int(loaded["number"])
        assert number == found.step
        assert_same(loaded, state(number))
        return number


@pytest.mark.soak
def test_no_reader_and_no_save_ever_fails(faulty: FaultyServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DCP_S3_READER_LEASE", "10s")
    save(1)
    until = time.monotonic() + SECONDS
    faulty.rule = dawdle
    done: Counter[str] = Counter()
    failures: list[BaseException] = []
    newest = 1

    def read() -> None:
        before = newest
        assert restore(done) >= before, "an older one, although a newer was there before it began"

    def write() -> None:
        nonlocal newest
        save(newest + 1)
        newest += 1

    def delete() -> None:
        report = prune(ROOT, "latest:2", grace="1h")
        assert report.ok, report.failures
        assert not report.finished
        done["deleted"] += len(report.deleted)
        done["left alone"] += len(report.left_alone)

    def loop(name: str, work: Callable[[], None]) -> None:
        try:
            while time.monotonic() < until and not failures:
                work()
                done[name] += 1
        except BaseException as error:  # noqa: BLE001 - CheckpointException is no Exception
            failures.append(error)

    work = (("saves", write), ("restores", read), ("restores", read), ("prunes", delete))
    with ThreadPoolExecutor(len(work)) as pool:
        for name, each in work:
            pool.submit(loop, name, each)
    print(dict(done))
    faulty.rule = lambda _: None
    if failures:
        raise failures[0]
    assert min(done["saves"], done["restores"], done["prunes"], done["deleted"]) > 0
    prune(ROOT, "latest:2", grace="1h")
    infos = CheckpointCatalog(ROOT).scan().checkpoints
    assert [info.step for info in infos] == [newest - 1, newest]
    assert [info.damage for info in infos] == [None, None]
    assert {key.split("/")[1] for key in faulty.s3.objects(BUCKET)} == {info.name for info in infos}


# --- what is left ---------------------------------------------------------------------------------------

LOOPS = int(os.environ.get("DCP_S3_TEST_LOOPS", "60"))
WARM_UP = 20
MIB = 2**20
# A copy of the state lost in each save of one of the six kinds is more than this with 60 of them; what the allocator
# and the interpreter do was 12 MiB.
GROWTH_BYTES = 24 * MIB


class Process:
    """What this process has, the in-memory server's share included."""

    def __init__(self) -> None:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        self.threads = Counter(thread.name.rstrip("0123456789-_") for thread in threading.enumerate())
        self.files: Counter[str] = Counter()
        for entry in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # the directory's own
                self.files[os.readlink(entry).partition(":")[0]] += 1
        self.memory = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(retry, "BACKOFF_BASE", 0.001)
    for name, value in {"RETRY_ATTEMPTS": "2", "PART_SIZE": "5MiB", "CONCURRENCY": "2"}.items():
        monkeypatch.setenv(f"DCP_S3_{name}", value)
    # pytest keeps the records of the log, those the exceptions that they name, and those the frames with the state.
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def make_state(seed: int) -> dict[str, Any]:
    return {"weights": random_values(seed, MIB), "step": seed}


def save_and_load(server: FaultyServer, number: int, stager: S3Stager) -> None:
    """A save that replaces the one before in one of six ways, and loads."""
    kind = ("sync", "async", "async with a stager", "refused by S3", "async, refused by S3", "exists")[number % 6]
    writer = S3StorageWriter(f"{ROOT}/step", overwrite=kind != "exists")
    state, fails = make_state(number), "refused" in kind or kind == "exists"
    if "refused" in kind:
        operation = ("PutObject", "GetObject")[number // 6 % 2]
        fault = (Fault.error(503, "SlowDown"), Fault.reset(), Fault.reset_request(MIB))[number // 12 % 3]
        server.rule = lambda request: fault if request.operation == operation else None
    with pytest.raises(CheckpointException) if fails else contextlib.nullcontext():
        if "async" in kind:
            options = {"async_stager": stager} if "stager" in kind else {}
            future: Any = dcp.async_save(state, storage_writer=writer, **options)
            future.result()
        else:
            dcp.save(state, storage_writer=writer)
    if number % 6 == 3:
        server.rule = lambda request: Fault.reset() if request.key.endswith(".distcp") else None
        for name, size in (("step", MIB), ("nothing", MIB), ("step", 3)):
            wanted, url = {"weights": torch.zeros(size)}, f"{ROOT}/{name}"
            loads.failure(lambda wanted=wanted, url=url: loads.load(wanted, url))
    server.rule = lambda _: None
    target = loads.load(make_state(-1), f"{ROOT}/step")
    assert fails or torch.equal(target["weights"], state["weights"])
    assert latest(ROOT) is not None
    server.s3.reset_counters()  # its log of requests grows


@pytest.mark.soak
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self")
@pytest.mark.timeout(300 + LOOPS)
@pytest.mark.usefixtures("small")
def test_nothing_is_left_of_saves_and_loads(faulty: FaultyServer) -> None:
    with S3Stager() as stager:
        for number in range(WARM_UP):
            save_and_load(faulty, number, stager)
        before = Process()
        for number in range(LOOPS):
            save_and_load(faulty, number, stager)
        after = Process()
    assert after.threads == before.threads
    # Connections that broke were made anew; no more are kept than are used at once.
    for kind in before.files | after.files:
        assert after.files[kind] <= before.files[kind] + (4 if kind == "socket" else 0), kind
    assert after.memory - before.memory < GROWTH_BYTES
