"""``dcp-s3 bench``, as somebody uses it on a bucket where other things lie."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from dcp_s3 import bench
from dcp_s3.bench import BenchReport, Transfer, join
from dcp_s3.errors import CorruptCheckpointError
from dcp_s3.s3.store import S3Store
from dcp_s3.settings import MIN_PART_SIZE, Settings
from tests.cli import looking
from tests.faulty import BUCKET, FaultyServer, serve
from tests.interpreter import Interpreter, Program
from tests.memory_s3 import Fault

URL = f"s3://{BUCKET}/run"
_ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")
_DENIED = Fault.error(403, "AccessDenied")
_COMMAND = [sys.executable, "-m", "dcp_s3.cli.main", "bench", URL, "--size", "32MiB"]


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyServer]:
    """With one object where the benchmark writes."""
    monkeypatch.setenv("DCP_S3_PART_SIZE", str(MIN_PART_SIZE))
    with serve(monkeypatch) as server:
        S3Store(BUCKET, Settings()).put("run/before", b"kept")
        yield server


run = partial(looking.run, "bench")


def assert_as_before(server: FaultyServer) -> None:
    server.rule = lambda _: None
    assert server.s3.objects(BUCKET) == {"run/before": len(b"kept")}
    assert not S3Store(BUCKET, Settings()).uploads("")


def test_a_table_a_limit_and_an_empty_bucket(faulty: FaultyServer) -> None:
    result = run(URL, "--size", "12MiB")
    lines = [line.split() for line in result.stdout.splitlines()]
    rows = [line for line in lines if line[1:2] in (["save"], ["load"])]
    assert [row[:2] for row in rows] == [["1", "save"], ["1", "load"], ["2", "save"], ["2", "load"]]
    assert all(len(row) == 7 for row in rows)
    assert "what limits a save: " in result.stdout
    assert faulty.s3.counters.requests["UploadPart"] >= 4
    assert_as_before(faulty)


def test_two_ranks_and_json(faulty: FaultyServer) -> None:
    found = json.loads(run(URL, "--size", "12MiB", "--ranks", "2", "--rounds", "1", "--json").stdout)
    assert (found["url"], found["ranks"], found["bytes_per_rank"]) == (URL, 2, 12 * 2**20)
    save, load = found["transfers"]
    assert (save["direction"], load["direction"]) == ("save", "load")
    for each in (save, load):
        assert each["bytes"] == 24 * 2**20
        assert each["cpu_seconds"] > 0
        assert each["connections"] >= 1
    assert found["limits"].keys() == {"save", "load"}
    assert_as_before(faulty)


@pytest.mark.parametrize("arguments", [("file:///tmp",), ("s3://b//c",), (URL, "--size", "much"), (URL, "--size", "0")])
def test_wrong_usage_is_status_2(arguments: tuple[str, ...]) -> None:
    run(*arguments, status=2)


def test_without_permission_to_delete_nothing_large_is_written_and_the_prefix_is_named(faulty: FaultyServer) -> None:
    faulty.rule = lambda request: _DENIED if request.operation.startswith("DeleteObject") else None
    result = run(URL, status=1)
    prefixes = {key.rpartition("/")[0] for key in faulty.s3.objects(BUCKET)} - {"run"}
    assert len(prefixes) == 1
    assert f"removing s3://{BUCKET}/{prefixes.pop()}; if that fails" in result.stderr
    assert sum(faulty.s3.objects(BUCKET).values()) == len(b"kept")


def test_a_save_that_fails_is_the_message_of_its_rank(faulty: FaultyServer) -> None:
    faulty.rule = lambda request: _DENIED if request.operation == "UploadPart" else None
    result = run(URL, "--size", "12MiB", "--ranks", "2", status=1)
    assert "dcp-s3: rank " in result.stderr
    assert "UploadPart" in result.stderr
    assert_as_before(faulty)


# --- what limits it, and what was not saved or loaded ------------------------------------------------------

GIB = 2**30
# 32 connections of 32 MiB/s each, a core of sixteen.
SAVE = Transfer("save", 2, 4 * GIB, 4.0, cpu_seconds=2.0, connections=32, throttled=0)


def test_the_slowest_rank_counts_and_all_bytes() -> None:
    one = Transfer("load", 1, 4 * GIB, 2.0, cpu_seconds=1.0, connections=8, throttled=0)
    other = Transfer("load", 1, 4 * GIB, 4.0, cpu_seconds=0.5, connections=16, throttled=3)
    assert join([one, other]) == Transfer("load", 1, 8 * GIB, 4.0, cpu_seconds=1.5, connections=16, throttled=3)


@pytest.mark.parametrize(
    ("changes", "host", "text"),
    [
        ({}, {}, "the network or the server: 32 connections of a rank carry 32.0 MiB/s"),
        ({"bytes": 16 * GIB}, {"ranks": 4}, "carry 32.0 MiB/s"),  # the bytes and connections of four ranks
        ({"connections": 0}, {}, "the network or the server"),
        ({"throttled": 17, "cpu_seconds": 64.0, "seconds": 0.1}, {}, "it refused 17 requests"),
        ({"seconds": 0.2}, {}, "too short to tell"),
        ({"cpu_seconds": 50.0}, {}, "the network"),
        ({"cpu_seconds": 52.0}, {}, "the CPU: 1 rank use 81% of 16 cores"),
        ({}, {"most_connections": 32}, "DCP_S3_CONCURRENCY"),
    ],
)
def test_what_limits_it(changes: dict[str, Any], host: dict[str, Any], text: str) -> None:
    known = {"ranks": 1, "cores": 16, "most_connections": 64} | host
    report = BenchReport(
        "s3://bucket/run", transfers=(replace(SAVE, direction="load"), replace(SAVE, **changes)), **known
    )
    assert text in report.limits["save"]


@pytest.fixture
def _small_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "_TENSOR_BYTES", 1024)


@pytest.mark.usefixtures("_small_tensors")
def test_a_state_has_the_size_that_was_asked_for() -> None:
    sizes = (8, 1024, 1032, 5000)
    assert [sum(each.nbytes for each in bench.make_state(0, size, 1).values()) for size in sizes] == [*sizes]
    assert len(bench.make_state(0, 1032, 1)) == 2


@pytest.mark.usefixtures("_small_tensors")
def test_one_bit_that_differs_is_found_and_so_is_another_round_or_rank() -> None:
    state, again = bench.make_state(0, 5000, 1), bench.make_state(0, 5000, 1)
    bench.check(state, again)
    again["rank-0/tensor-4"][-1] ^= 1
    others = (again, bench.make_state(0, 5000, 2), {name: torch.zeros_like(tensor) for name, tensor in state.items()})
    for other in others:
        with pytest.raises(CorruptCheckpointError, match="rank-0/tensor-"):
            bench.check(state, other)
    theirs = bench.make_state(1, 5000, 1).values()
    assert not any(one.equal(each) for one in state.values() for each in theirs)


# --- interrupted -------------------------------------------------------------------------------------------


def start(interpreter: Interpreter, *arguments: str) -> Program:
    return interpreter.popen([*_COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@contextlib.contextmanager
def in_the_middle_of_a_save(interpreter: Interpreter, server: FaultyServer, *arguments: str) -> Iterator[Program]:
    """The command, of whose parts all but the first two get no answer while this lasts."""
    over, parts = threading.Event(), itertools.count(1)

    def hold(request: Any) -> Fault | None:
        if request.operation == "UploadPart" and next(parts) > 2:
            over.wait(120)
            return Fault.reset()
        return None

    server.rule = hold
    process = start(interpreter, *arguments)
    try:
        wait_for(lambda: server.s3.counters.requests.get("UploadPart", 0) > 2, process)
        yield process
    finally:
        over.set()
        process.kill()
        process.communicate()


def wait_for(condition: Callable[[], bool], process: Program) -> None:
    deadline = time.monotonic() + 90
    while not condition():
        assert process.poll() is None, "it ended by itself"
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_interrupted_it_leaves_the_bucket_as_it_was(faulty: FaultyServer, interpreter: Interpreter) -> None:
    with in_the_middle_of_a_save(interpreter, faulty) as process:
        process.send_signal(signal.SIGTERM)
        output, messages = process.communicate(timeout=90)
        assert process.returncode != 0
        assert output == ""
        assert "Traceback" not in messages
    assert_as_before(faulty)


@_ON_LINUX
def test_a_rank_that_dies_ends_the_others(faulty: FaultyServer, interpreter: Interpreter) -> None:
    with in_the_middle_of_a_save(interpreter, faulty, "--ranks", "2") as process:
        ranks = children_of(process)
        assert len(ranks) == 2
        os.kill(ranks[1], signal.SIGKILL)
        _, messages = process.communicate(timeout=90)
        assert process.returncode == 1
        assert "its process ended with status -9" in messages
        assert not any(map(is_running, ranks))
    assert_as_before(faulty)


def children_of(process: Program) -> list[int]:
    tasks = Path(f"/proc/{process.pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


def is_running(number: int) -> bool:
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the latter if it ends while it is read
        return False
