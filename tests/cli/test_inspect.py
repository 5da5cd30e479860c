"""What ``dcp-s3 show`` prints of what a checkpoint holds."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from tests.cli.looking import run, save_layers, words

pytestmark = pytest.mark.servers("memory")


def test_show_says_what_it_holds_with_a_line_for_names_that_are_alike(root: str) -> None:
    url = save_layers(f"{root}/step-7", 32, metrics={"loss": math.nan})
    rows = words(run("show", url).stdout)
    assert ["holds", "33 tensors with 2.05K parameters; 1 other entry"] in rows
    rows = rows[rows.index(["name", "entries", "parameters", "size", "dtype", "shape", "chunks"]) :]
    assert [row[0] for row in rows[1:]] == ["model.layers.0..31.w", "model.norm", "step"]
    layers = rows[1]
    assert layers[:3] == ["model.layers.0..31.w", "32", "2.05K"]
    assert layers[-3:] == ["float32", "8x8", "32"]


def test_show_chooses_entries_and_its_old_name_works(root: str) -> None:
    url = save_layers(f"{root}/step-7", 4)
    assert "layers.3.w" not in run("inspect", url).stdout
    everything = run("show", url, "--all").stdout
    assert all(f"{number}.w" in everything for number in range(4))
    assert ".distcp" in everything
    top = words(run("show", url, "--top", 2).stdout)[1:]
    assert [row[0] for row in top] == ["model.layers.0.w", "model.layers.1.w"]
    filtered = run("show", url, "--filter", "*.norm", "--filter", "step").stdout
    assert [row[0] for row in words(filtered)[1:]] == ["model.norm", "step"]
    assert "no entry that matches 'modle.*'" in run("show", url, "--filter", "modle.*", status=1).stderr


def test_show_prints_json_for_a_strict_parser(root: str) -> None:
    url = save_layers(f"{root}/step-7", 4, metrics={"loss": math.nan})

    def refuse(constant: str) -> Any:
        raise AssertionError(constant)

    found = json.loads(run("show", url, "--json").stdout, parse_constant=refuse)
    assert found["info"]["metrics"] == {"loss": "NaN"}
    assert [each["fqn"] for each in found["entries"][-2:]] == ["model.norm", "step"]
    top = json.loads(run("show", url, "--json", "--top", 1).stdout)
    assert [entry["fqn"] for entry in top["entries"]] == ["model.layers.0.w"]
