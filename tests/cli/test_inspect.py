"""What ``dcp-s3 inspect`` prints."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from tests.cli.looking import run, save_layers, words

pytestmark = pytest.mark.servers("memory")


def test_inspect_prints_a_head_and_a_line_for_names_that_are_alike(root: str) -> None:
    url = save_layers(f"{root}/step-7", 32, metrics={"loss": math.nan})
    head, holds, *lines = run("inspect", url).stdout.splitlines()
    assert head.startswith(f"{url}: step 7, 1 rank, ")
    assert head.endswith(" in 1 object")
    assert holds == "33 tensors with 2.05K parameters; 1 other entry; metrics loss=nan"
    rows = words("\n".join(lines))
    assert rows[0] == ["name", "entries", "parameters", "size", "dtype", "shape", "chunks"]
    assert [row[0] for row in rows[1:]] == ["model.layers.0..31.w", "model.norm", "step"]
    layers = rows[1]
    assert layers[:3] == ["model.layers.0..31.w", "32", "2.05K"]
    assert layers[-3:] == ["float32", "8x8", "32"]


def test_inspect_chooses(root: str) -> None:
    url = save_layers(f"{root}/step-7", 4)
    assert "layers.3.w" not in run("inspect", url).stdout
    everything = run("inspect", url, "--all").stdout
    assert all(f"{number}.w" in everything for number in range(4))
    top = words(run("inspect", url, "--top", 2).stdout)[3:]
    assert [row[0] for row in top] == ["model.layers.0.w", "model.layers.1.w"]
    filtered = run("inspect", url, "--filter", "*.norm", "--filter", "step").stdout
    assert [row[0] for row in words(filtered)[3:]] == ["model.norm", "step"]
    assert "no entry that matches 'modle.*'" in run("inspect", url, "--filter", "modle.*", status=1).stderr


def test_inspect_prints_json_for_a_strict_parser(root: str) -> None:
    url = save_layers(f"{root}/step-7", 4, metrics={"loss": math.nan})

    def refuse(constant: str) -> Any:
        raise AssertionError(constant)

    found = json.loads(run("inspect", url, "--json", "--top", 1).stdout, parse_constant=refuse)
    assert found["checkpoint"]["metrics"] == {"loss": "NaN"}
    assert found["parameters"] == 4 * 64 + 3
    assert [each["fqn"] for each in found["entries"][-2:]] == ["model.norm", "step"]
    assert [entry["fqn"] for entry in found["largest"]] == ["model.layers.0.w"]
