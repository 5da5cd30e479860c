"""Training without a spill directory is killed in the middle of saves: what was saved stays, nothing torn is visible.

Real processes and SIGKILL. DCP_S3_TEST_KILLS says how many kill points there are (10), DCP_S3_TEST_SEED the first (0).
Each has a number, which is in the name of its test: ``DCP_S3_TEST_SEED=17 DCP_S3_TEST_KILLS=1`` repeats number 17, as
far as processes and sockets repeat at all.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp

from dcp_s3 import S3StorageReader, S3StorageWriter, latest, list_checkpoints
from tests.end_to_end.states import assert_same, blank
from tests.faulty import BUCKET, FaultyServer, serve
from tests.killing import AtRequest, kill_all, new_process, read_lines, running, wait_until_quiet
from tests.soak.saving_worker import Job, make_state, save_for_ever

pytestmark = [
    pytest.mark.counted,
    pytest.mark.skipif(sys.platform != "linux", reason="relies on Linux's signals"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
]

ROOT = f"s3://{BUCKET}/run"
KILLS = int(os.environ.get("DCP_S3_TEST_KILLS", "10"))
FIRST_SEED = int(os.environ.get("DCP_S3_TEST_SEED", "0"))

_START_SECONDS = 60.0
_LONGEST_LIFE = 3.0  # of a process whose kill point does not come
_OPERATIONS = (
    "CreateMultipartUpload", "UploadPart", "CompleteMultipartUpload", "PutObject", "PutObject", "PutObject",
    "GetObject",
)  # fmt: skip
_OPERATIONS_OF_OVERWRITES = ("DeleteObjects", "ListObjectsV2", "GetObject")


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyServer]:
    for name, value in {
        "DCP_S3_PART_SIZE": "5MiB",
        "DCP_S3_CONCURRENCY": "4",
        "GLOO_SOCKET_IFNAME": "lo",
        "MASTER_ADDR": "127.0.0.1",
    }.items():
        monkeypatch.setenv(name, value)
    with serve(monkeypatch) as server:
        yield server


def points() -> list[Any]:
    kinds = [(overwrite, ranks) for ranks in (1, 2) for overwrite in (False, True)]
    found = []
    for seed in range(FIRST_SEED, FIRST_SEED + KILLS):
        overwrite, ranks = kinds[seed % len(kinds)]
        name = f"{'overwrite' if overwrite else 'new_url'}-{ranks}_ranks-seed{seed}"
        found.append(pytest.param(overwrite, ranks, seed, id=name))
    return found


@pytest.mark.quick("new_url-1_ranks-seed0", "overwrite-2_ranks-seed3")
@pytest.mark.parametrize(("overwrite", "ranks", "seed"), points())
def test_after_a_kill_a_checkpoint_is_whole_or_not_there(
    faulty: FaultyServer, tmp_path: Path, overwrite: bool, ranks: int, seed: int
) -> None:
    rng = random.Random(seed)
    asynchronous = rng.random() < 0.3
    jobs = [
        Job(ROOT, tmp_path, dict(os.environ), overwrite, asynchronous, rank, ranks) for rank in range(ranks)
    ]  # fmt: skip
    how = kill_in_the_middle(faulty, jobs, rng)
    wait_until_quiet(faulty)
    saved = [
        max((int(line.split()[1]) for line in read_lines(job.report) if line.startswith("saved")), default=0)
        for job in jobs
    ]
    try:
        check(jobs[0], saved)
    except BaseException as error:
        print(f"seed {seed}: {jobs[0]}, killed {how}; saved {saved}; output in {tmp_path}")
        if hasattr(error, "add_note"):
            error.add_note(f"killed {how}, when {saved} were saved; the output of the processes is in {tmp_path}")
        raise


def kill_in_the_middle(server: FaultyServer, jobs: list[Job], rng: random.Random) -> str:
    """Kill all ranks at once at a request, or at any instant; how it was done."""
    at_request = None
    seconds = rng.uniform(0, 1.0)
    if rng.random() < 0.7:
        operations = _OPERATIONS + _OPERATIONS_OF_OVERWRITES * jobs[0].overwrite
        at_request = AtRequest(rng.choice(operations), rng.randint(1, 8), applied=rng.random() < 0.5)
        seconds = _LONGEST_LIFE
    with running([new_process(save_for_ever, job) for job in jobs]) as processes:
        with at_request.on(server) if at_request else contextlib.nullcontext():
            deadline = time.monotonic() + _START_SECONDS
            while not all(read_lines(job.report) for job in jobs):
                assert time.monotonic() < deadline, "the ranks did not start"
                assert all(process.exitcode is None for process in processes), "a rank ended before it began"
                time.sleep(0.005)
            if at_request:
                at_request.reached.wait(seconds)
            else:
                time.sleep(seconds)  # any instant will do: there is no event to wait for
            kill_all(processes)
        assert {process.exitcode for process in processes} == {-9}, "a rank ended by itself"
    return f"at {at_request}" if at_request else f"after {seconds:.2f} s"


def check(job: Job, saved: list[int]) -> None:
    """What is visible is whole, and what was reported is there; a save to the same URL works."""
    known, begun = max(saved), max(saved) + 1
    committed = {info.name for info in list_checkpoints(ROOT) if info.committed}
    if job.overwrite:
        assert committed == {"step-1"} or (not known and not committed)
        numbers = {"step-1": range(known, begun + 1)}
    else:
        assert {f"step-{number}" for number in range(1, known + 1)} <= committed
        numbers = {f"step-{number}": range(number, number + 1) for number in range(1, begun + 1)}
    assert committed <= set(numbers)
    for name in committed:
        found = load(job, f"{ROOT}/{name}")
        assert found["number"] in numbers[name]
        assert_same(found, make_state(found["number"], job.world_size), name)
    newest = latest(ROOT)
    assert (newest.name if newest else None) == max(committed, default=None, key=lambda name: int(name[5:]))

    name = job.url(begun).rpartition("/")[2]
    again = make_state(1000, job.world_size)
    dcp.save(again, storage_writer=S3StorageWriter(job.url(begun), overwrite=name in committed), no_dist=True)
    assert_same(load(job, job.url(begun)), again)
    newest = latest(ROOT)
    assert newest is not None
    assert newest.name == name


def load(job: Job, url: str) -> dict[str, Any]:
    found: dict[str, Any] = blank(make_state(0, job.world_size))
    dcp.load(found, storage_reader=S3StorageReader(url), no_dist=True)
    return found
