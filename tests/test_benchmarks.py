"""Each benchmark runs at a tiny size, and measures what it says."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from rich.console import Console

from benchmarks import coordinator, decentralized, export, foreign, incremental, planning, reshard
from benchmarks import ranks as of_ranks
from benchmarks import tls as of_tls
from benchmarks.cases import CASES, Target, reason_to_skip
from benchmarks.llama import llama_bytes
from benchmarks.loopback import measure_loopback
from benchmarks.reshard_report import Load
from benchmarks.units import MIB
from benchmarks.worker import run_case
from tests.memory_s3 import MemoryS3
from tests.ranks import run_ranks


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> Iterator[Target]:
    for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "REGION", "DEFAULT_REGION"):
        monkeypatch.setenv(f"AWS_{name}", "us-east-1")
    with MemoryS3() as server:
        server.create_bucket("small")
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint_url)
        yield Target("small", "run", server.endpoint_url, "us-east-1", 2)
        assert server.open_uploads("small") == []


@pytest.mark.quick("dcp_s3")
@pytest.mark.parametrize("name", CASES)
def test_save_load(name: str, target: Target) -> None:
    reason = reason_to_skip(name)
    if reason:
        pytest.skip(reason)
    case = CASES[name](target)
    try:
        assert run_case(case, 8 * MIB).state_bytes == llama_bytes(8 * MIB)
    finally:
        case.clean_up()


@pytest.mark.parametrize("tls", [False, True])
def test_loopback(tls: bool) -> None:
    if tls and of_tls.nginx() is None:
        pytest.skip("nginx is not installed")
    save, load = measure_loopback(3 * MIB, 2, tls=tls)
    assert min(save.wall_seconds, load.wall_seconds) > 0


def test_link() -> None:
    """In a process of its own, which forks."""
    options = "--size 8MiB --rounds 1 --transfers 2 --raw 2 --part 1MiB --latency 0.001 --connection-rate 50MiB"
    command = [sys.executable, "-m", "benchmarks.link", *options.split()]
    told = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout
    for name in ("save, transfer 2", "load, transfer 1", "raw save, 2 connections, transfer 1"):
        assert f"{name}: free" in told


def test_without_ranks(tmp_path: Path, target: Target) -> None:
    file = tmp_path / "figures.json"
    coordinator.main(["--ranks", "8", "--items", "20", "--json", str(file)])
    assert json.loads(file.read_text())["ranks"]["8"]["finish"]["items"] == coordinator.State.of(20).stored(8)
    decentralized.main(["--ranks", "8", "--items", "20", "--latency", "0", "--json", str(file)])
    assert json.loads(file.read_text())["ranks"]["8"]["requests"] == {"LIST": 1, "GET": 16, "PUT": 3}
    assert {len(found) for found in export.run(export.make_state(MIB), 2).values()} == {2}


def test_foreign(target: Target) -> None:
    state = foreign.large_state(MIB) | foreign.small_state(3)
    assert foreign.run(state, str(target.endpoint_url), 2).keys() == set(foreign.WRITERS)


def _plan() -> list[bool]:
    return [planning.run(case, 2, 1).same for case in planning.CASES if case.share == 1]


@pytest.mark.soak
def test_planning() -> None:
    assert all(run_ranks(1, _plan)[0])


def test_ranks(target: Target) -> None:
    costs = run_ranks(2, of_ranks.work, 8 * MIB, ["dcp_s3"], 2, target)
    assert [[len(of_round) for of_round in of_rank] for of_rank in costs] == [[1, 1], [1, 1]]
    assert all(sample.save_seconds > 0 < sample.load_seconds for sample in of_ranks.summed_up(costs, ["dcp_s3"], 1))


@pytest.mark.soak
def test_reshard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "reshard.json"
    monkeypatch.setattr("sys.argv", ["reshard", "--quick", "--backends", "dcp_s3", "--out", str(file)])
    with contextlib.suppress(SystemExit):
        reshard.main()
    found = json.loads(file.read_text())
    assert found["failures"] == {}
    assert sorted(load["case"] for load in found["loads"]) == sorted(reshard.CASES)
    for fields in found["loads"]:
        load = Load(**fields)
        assert load.ratio(reshard.CASES[load.case].of) <= reshard.CASES[load.case].limit


def test_incremental_saves() -> None:
    with mock.patch.dict(os.environ):
        saves = incremental.run(160 * MIB, 2, None)
    assert [save.way for save in saves] == [*incremental.WAYS, *incremental.WAYS]
    full, frozen, changing = saves[3:]
    assert frozen.sent < 1.05 * frozen.changed
    assert min(full.sent, changing.sent) > 160 * MIB
    incremental.show(saves, Console())
