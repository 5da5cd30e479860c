"""The benchmark of saves without collectives runs, at a tiny size, and counts its requests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.coordinator import State
from benchmarks.decentralized import main, parts_of
from dcp_s3.format.part import decode


def test_ranks_write_each_item_once() -> None:
    state = State.of(20)
    parts = list(map(decode, parts_of(state, 3)))
    written = [item.index for part in parts for item in part.written]
    assert len(set(written)) == len(written) == state.stored(3)
    assert all(len(part.held) == 20 for part in parts)


def test_a_small_run_says_what_it_cost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "decentralized.json"
    main(["--ranks", "4,8", "--items", "20", "--latency", "0", "--json", str(file)])
    runs = json.loads(file.read_text())["ranks"]
    assert list(runs) == ["4", "8"]
    for ranks, run in runs.items():
        assert run["requests"] == {"LIST": 1, "GET": int(ranks), "PUT": 2}
        assert list(run["steps"]) == ["list", "get and add", "unwritten", "merge", "commit"]
        assert list(run["with_collectives"]) == [
            "unpickle the plans", "create_global_plan", "unpickle the results", "finish",
        ]  # fmt: skip
    assert "8 ranks" in capsys.readouterr().out
