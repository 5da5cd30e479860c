"""What ``dcp-s3 diff`` prints, and its exit status."""

from __future__ import annotations

import json

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_s3 import S3StorageWriter
from tests.cli.looking import run, save_layers, words
from tests.retention.making import save

pytestmark = pytest.mark.servers("memory")


def test_diff_says_by_its_status_whether_they_are_the_same(root: str) -> None:
    one, two = save_layers(f"{root}/1", 12), save_layers(f"{root}/2", 12, metrics={"loss": 2.0})
    same = run("diff", one, two)
    assert same.stdout.splitlines() == ["0 of 14 entries differ, 14 same", "metric loss: None -> 2.0"]
    other = save_layers(f"{root}/3", 13, value=2.0)
    summary, *lines = run("diff", one, other, status=5).stdout.splitlines()
    assert summary == "13 of 15 entries differ (12 changed, 1 only in B), 2 same"
    assert words("\n".join(lines))[1:] == [
        ["model.layers.0..11.w", "12", "changed", "values", "3.0 KiB"],
        ["model.layers.12.w", "-", "only in B", "-", "256 B"],
    ]
    everything = run("diff", one, other, "--all", status=5).stdout
    assert len(words(everything)) == 1 + 1 + 15
    assert run("diff", one, other, "--filter", "*.norm").stdout.splitlines() == ["0 of 1 entries differ, 1 same"]
    found = json.loads(run("diff", one, other, "--json", status=5).stdout)
    assert found["status"] == "changed"
    assert len(found["entries"]) == 13
    assert len(json.loads(run("diff", one, other, "--json", "--all", status=5).stdout)["entries"]) == 15


def test_diff_of_what_is_not_known_asks_for_full(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DCP_S3_CHECKSUM", "none")
    one, two = save(f"{root}/1"), save(f"{root}/2")
    result = run("diff", one, two, status=5)
    assert result.stdout.splitlines()[0] == "0 of 3 entries differ, 3 unknown"
    assert "--full reads and compares it" in result.stderr
    full = run("diff", one, two, "--full")
    assert full.stdout.splitlines() == ["0 of 3 entries differ, 3 same"]
    assert not full.stderr


def test_diff_prints_a_bounded_table(root: str) -> None:
    states = [{f"{letter}{n}": torch.full((1,), float(n)) for n in range(60)} for letter in "ab"]
    for name, state in zip("12", states, strict=True):
        dcp.save(state, storage_writer=S3StorageWriter(f"{root}/{name}"), no_dist=True)
    result = run("diff", f"{root}/1", f"{root}/2", status=5)
    assert len(words(result.stdout)) == 1 + 1 + 40
    assert "80 more lines: see --all" in result.stderr
    assert len(words(run("diff", f"{root}/1", f"{root}/2", "--all", status=5).stdout)) == 1 + 1 + 120
