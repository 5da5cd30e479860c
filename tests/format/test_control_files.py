"""The manifest's JSON."""

import dataclasses
import json
import math

import pytest

from dcp_s3.format.control_files import Manifest, ObjectEntry

MANIFEST = Manifest(
    save_id="ab12",
    created_at=1e9,
    step=5,
    world_size=2,
    objects=(ObjectEntry("__0_0-x.distcp", 10, "00ff"), ObjectEntry("__1_0-x.distcp", 5)),
    items=3,
    metrics={"val_loss": 1.5},
)


def test_round_trip() -> None:
    assert Manifest.from_json(MANIFEST.to_json()) == MANIFEST
    assert json.loads(MANIFEST.to_json())["total_size"] == MANIFEST.total_size == 15


def test_fields_of_later_versions_are_ignored() -> None:
    fields = json.loads(MANIFEST.to_json()) | {"colour": "blue"}
    assert Manifest.from_json(json.dumps(fields).encode()) == MANIFEST


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"\xff", b"{}", b"null"])
def test_what_is_no_manifest(data: bytes) -> None:
    with pytest.raises(ValueError, match="manifest"):
        Manifest.from_json(data)


def test_a_later_format_is_refused() -> None:
    fields = json.loads(MANIFEST.to_json()) | {"format_version": 2}
    with pytest.raises(ValueError, match="version 2"):
        Manifest.from_json(json.dumps(fields).encode())


def test_metrics_that_are_not_finite_are_still_json() -> None:
    metrics = {"z": math.nan, "a": math.inf, "b": -math.inf, "c": 1.5, "d": "text"}
    data = dataclasses.replace(MANIFEST, metrics=metrics).to_json()
    json.loads(data, parse_constant=pytest.fail)
    found = Manifest.from_json(data).metrics
    assert list(found) == list(metrics)
    assert math.isnan(found["z"])
    assert found["a"] == math.inf
    assert found["b"] == -math.inf
    assert (found["c"], found["d"]) == (1.5, "text")
