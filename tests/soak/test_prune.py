"""Prunes beside saves and restores: none of them ever fails.

DCP_S3_TEST_SECONDS says how long a run saves every 100 ms, beside a prune that keeps two, beside a reader (10).
"""

from __future__ import annotations

import itertools
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from dcp_s3 import CheckpointCatalog, S3StorageReader, S3StorageWriter, latest, prune
from dcp_s3.errors import CheckpointNotFoundError
from dcp_s3.s3 import retry
from tests.faulty import BUCKET, FaultyServer, serve
from tests.memory_s3 import Fault
from tests.objects import separate_objects

SECONDS = float(os.environ.get("DCP_S3_TEST_SECONDS", "10"))
ROOT = f"s3://{BUCKET}/run"

pytestmark = pytest.mark.counted


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyServer]:
    monkeypatch.setattr(retry, "BACKOFF_BASE", 0.01)
    monkeypatch.setenv("DCP_S3_READER_LEASE", "10s")
    with serve(monkeypatch) as server:
        yield server


def state(number: int) -> dict[str, Any]:
    return {"number": number, "weight": torch.full((1000,), float(number)), "other": torch.full((50,), -float(number))}


def save(number: int) -> None:
    time.sleep(0.1)  # the training
    with separate_objects("other"):
        dcp.save(state(number), storage_writer=S3StorageWriter(f"{ROOT}/step-{number}"), no_dist=True)


def dawdle(request: Any) -> Fault | None:
    """Some reads take as long as a few saves, so that what they read is pruned meanwhile, if it can be."""
    if request.operation == "GetObject" and random.random() < 0.1:
        return Fault.delay(random.uniform(0, 1.0))
    return None


def restore(done: Counter[str]) -> int:
    """The latest, as a job would: one that vanished before its lease was written is no failure, and there is another.

    Returns:
        Its number.
    """
    while True:
        found = latest(ROOT)
        assert found is not None
        loaded: dict[str, Any] = {"number": 0, "weight": torch.zeros(1000), "other": torch.zeros(50)}
        try:
            dcp.load(loaded, storage_reader=S3StorageReader(found.url), no_dist=True)
        except CheckpointException as error:
            ((cause, _),) = error.failures.values()
            if not isinstance(cause, CheckpointNotFoundError):
                raise
            done["vanished"] += 1
            continue
        number = int(loaded["number"])
        assert number == found.step
        assert bool((loaded["weight"] == number).all() and (loaded["other"] == -number).all())
        return number


@pytest.mark.soak
def test_no_reader_and_no_save_ever_fails(faulty: FaultyServer) -> None:
    save(1)
    until = time.monotonic() + SECONDS
    faulty.rule = dawdle
    done: Counter[str] = Counter()
    failures: list[BaseException] = []
    newest = [1]

    def read() -> None:
        before = newest[0]
        assert restore(done) >= before, "an older one, although a newer was there before it began"

    def write(numbers: Iterator[int]) -> None:
        number = next(numbers)
        save(number)
        newest[0] = number

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

    numbers = itertools.count(2)
    threads = [
        threading.Thread(target=loop, args=arguments)
        for arguments in (("saves", lambda: write(numbers)), ("restores", read), ("restores", read), ("prunes", delete))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(dict(done))
    faulty.rule = lambda _: None
    if failures:
        raise failures[0]
    assert min(done["saves"], done["restores"], done["prunes"], done["deleted"]) > 0
    prune(ROOT, "latest:2", grace="1h")
    infos = CheckpointCatalog(ROOT).scan().checkpoints
    assert [info.step for info in infos] == [newest[0] - 1, newest[0]]
    assert [info.damage for info in infos] == [None, None]
    assert {key.split("/")[1] for key in faulty.s3.objects(BUCKET)} == {info.name for info in infos}


# --- real processes ------------------------------------------------------------------------------
