"""What may be stored with a checkpoint as ``extra``."""

from __future__ import annotations

import json
import math
from enum import IntEnum
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dcp_s3.checkpoint.info import CheckpointInfo
from dcp_s3.errors import SettingsError
from dcp_s3.format.control_files import MAX_EXTRA_BYTES, Manifest, check_extra

_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text("abc", max_size=5), inner, max_size=4),
    max_leaves=20,
)  # fmt: skip


@given(st.dictionaries(st.text("xyz", max_size=5), _VALUES, max_size=5))
def test_what_is_read_back_equals_what_was_given(extra: dict[str, Any]) -> None:
    manifest = Manifest("ab", 1.0, 5, 1, (), 0, extra=check_extra(extra))
    assert Manifest.from_json(manifest.to_json()).extra == extra


class _Level(IntEnum):
    LOW = 1


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"data": {"weights": [1, torch.ones(2)]}}, r"extra\['data'\]\['weights'\]\[1\] is a Tensor .*tolist"),
        ({"loss": math.nan}, r"extra\['loss'\] is nan .*JSON has no such number"),
        ({"a": {"b": -math.inf}}, r"extra\['a'\]\['b'\] is -inf"),
        ({"betas": (0.9, 0.95)}, r"extra\['betas'\] is a tuple .*list\(\.\.\.\)"),
        ({"seen": {1, 2}}, r"extra\['seen'\] is a set"),
        ({"raw": b"bytes"}, r"extra\['raw'\] is a bytes"),
        ({"a": {3: 1}}, r"extra\['a'\] is a mapping with the key 3 .*keys are text"),
        ({1: 1}, r"extra is a mapping with the key 1"),
        ({"big": 2**63}, r"extra\['big'\] is a whole number of more than 64 bits"),
        ({"text": "\ud800"}, r"extra\['text'\] is text that is not Unicode"),
        ([1], r"extra is a list, expected a dict"),
        ("text", r"extra is a str, expected a dict"),
    ],
)
def test_what_json_does_not_have_is_refused_by_its_path(extra: Any, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        check_extra(extra)


def test_it_is_small() -> None:
    assert check_extra({"text": "x" * (MAX_EXTRA_BYTES - 20)})
    with pytest.raises(SettingsError, match=r"at most 65536 .*extra\['long'\]"):
        check_extra({"short": 1, "long": "x" * MAX_EXTRA_BYTES})


def test_nesting_ends_somewhere_also_of_what_holds_itself() -> None:
    extra: dict[str, Any] = {}
    extra["me"] = extra
    with pytest.raises(SettingsError, match="more than 32 levels"):
        check_extra(extra)


def test_it_is_a_copy_of_plain_values() -> None:
    given: dict[str, Any] = {"steps": [1], "level": _Level.LOW}
    copied = check_extra(given)
    given["steps"].append(2)
    assert copied == {"steps": [1], "level": 1}
    assert type(copied["level"]) is int
    assert check_extra(None) == {}


def test_manifests_without_it_and_with_later_fields_are_read() -> None:
    fields = json.loads(Manifest("ab", 1.0, 5, 1, (), 0).to_json())
    del fields["extra"]
    assert Manifest.from_json(json.dumps({**fields, "later": [1]}).encode()).extra == {}
    with pytest.raises(ValueError, match="not a dcp_s3 manifest"):
        Manifest.from_json(json.dumps({**fields, "extra": 5}).encode())


def test_a_summary_with_it_is_hashable() -> None:
    info = CheckpointInfo("s3://b/x", "x", "committed", 1, 1.0, 1, 1, 1, extra={"a": [1]})
    assert hash(info) == hash(info)
