"""Items that somebody made to harm: our errors, little memory, and nothing is run."""

from __future__ import annotations

import contextlib
import io
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp_s3 import errors
from dcp_s3.format.safe_items import check_item
from tests import hostile
from tests.format.test_hostile import FORBIDDEN, _nothing_ran_and_no_class_was_changed  # noqa: F401 - a fixture
from tests.format.test_items import VALUES, same
from tests.hostile import (
    HOSTILE,
    TEXT,
    U1,
    archive,
    array,
    call,
    decode_item,
    decode_tensor,
    dtype,
    name,
    plain,
    save,
    scalar,
    stream,
    text,
)
from tests.mutations import mutated

REFUSED = (errors.UnsafeItemError, errors.CorruptCheckpointError)
# Python's unpickler takes them, too, and nobody is harmed.
HARMLESS = {
    "tuples that double", "a dict that contains itself", "a list that contains itself", "10,000 lists", "10,000 tuples",
    "10,000 dicts", "a range of 10**12",
}  # fmt: skip


@pytest.mark.timeout(180)
def test_bombs_are_our_errors() -> None:
    """All of them, metadata and items, in a process that may use no more than half a GiB."""
    script = [sys.executable, "-W", "ignore", "-m", "tests.hostile"]
    root = Path(__file__).parents[2]
    done = subprocess.run(script, cwd=root, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    *cases, summary = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(cases) == 2 * (len(hostile.METADATA_BOMBS) + len(hostile.ITEM_BOMBS) + len(HOSTILE))
    ours = tuple(
        f"dcp_s3.errors.{kind}" for kind in ("CorruptCheckpointError", "UnsafeMetadataError", "UnsafeItemError")
    )
    loaded = {case["case"] for case in cases if not case["found"].startswith(ours)}
    harmless = {f"{label}, item" for label in HARMLESS}
    assert loaded == harmless, [case for case in cases if case["case"] in loaded ^ harmless]
    assert not [case for case in cases if case["ran"]]
    assert summary["unchanged"]


@pytest.mark.parametrize(
    "pickled",
    [
        *map(stream, FORBIDDEN),
        stream(name("tests.hostile", "trip")),
        stream(call("os", "system", text("true"))),
        stream(name("torch", "Tensor") + plain((None, {"x": 1})) + b"b"),
        stream(b"]" + plain((None, {"append": 1})) + b"b"),
        stream(name("collections", "OrderedDict") + b"K\x01K\x02s"),
        stream(text("x") + b")R"),
        stream(call("torch._utils", "_rebuild_parameter", b"K\x01", b"\x88", b"}")),
        stream(b"(" + text("module") + b"K\x01K\x02K\x03K\x04tQ"),
        stream(b"K\x01K\x02s"),
        stream(b""),
        b"",
    ],
)
def test_what_torch_refuses_is_refused(pickled: bytes) -> None:
    data = archive(pickled)
    with pytest.raises(Exception):  # noqa: B017 - whatever torch raises
        torch.load(io.BytesIO(data), weights_only=True)
    with pytest.raises(errors.UnsafeItemError) as refused:
        decode_item(data)
    assert refused.value.fqn == "x"
    with pytest.raises(errors.CorruptCheckpointError):
        decode_tensor(data)


@pytest.mark.filterwarnings("ignore:.*TorchScript archive.*:UserWarning", "ignore:Detected pickle protocol:UserWarning")
def test_other_formats_are_refused() -> None:
    scripted = io.BytesIO()
    torch.jit.save(torch.jit.trace(torch.nn.Linear(2, 2), torch.ones(1, 2)), scripted)
    old = save(3, _use_new_zipfile_serialization=False)
    overlapping = save({"a": torch.ones(100)})  # each storage is the whole file: a square of its length
    central = overlapping.index(b"PK\x01\x02")
    entry = overlapping[central : overlapping.index(b"PK\x01\x02", central + 4)]
    overlapping = overlapping[:central] + entry * 50 + overlapping[central:]
    for data in (
        scripted.getvalue(), old, overlapping, b"", b"{}", bytes(1000), b"PK\x03\x04", b"PK\x05\x06" + bytes(18)
    ):  # fmt: skip
        with pytest.raises(errors.UnsafeItemError):
            decode_item(data)
        with pytest.raises(errors.CorruptCheckpointError):
            decode_tensor(data)


@pytest.mark.parametrize("value", [5, {"a": torch.ones(3)}])
def test_truncated_items(value: Any) -> None:
    data = save(value)
    for end in range(0, len(data), 37):
        with pytest.raises(REFUSED):
            decode_item(data[:end])
        with pytest.raises(errors.CorruptCheckpointError):
            decode_tensor(data[:end])


def test_python_2_s_names_are_not_imported() -> None:
    """torch's unpickler would take ``UserDict`` for ``collections``, Python's would import a module of that name."""
    for module, qualified in (("UserDict", "OrderedDict"), ("__builtin__", "set")):
        for begin in (b"\x80\x03", b"\x80\x02\x80\x03"):
            data = archive(begin + name(module, qualified) + b")R.")
            with pytest.raises(errors.UnsafeItemError, match="protocol"):
                decode_item(data)


_ITEMS = [
    save({"a": [1, (2.5, {"x"})], "t": torch.ones(2, 2), "s": torch.Size([1]), "b": b"x"}),
    save(torch.arange(4.0).reshape(2, 2)),
]
_SNIPPETS = [
    call("tests.hostile", "trip"), name("tests.hostile", "trip"), b"(itests.hostile\ntrip\n", b"R", b"\x81", b"b",
    b"h\x01", text("tests.hostile") + text("trip") + b"\x93", b"0", b"(", b"]", b"}", b"s", b"u", b"a", b"e",
    b"\x85", b".", b"Q",
    plain((None, {"x": 1})), hostile.storage(10**9), hostile.tensor(4, 0, plain((9, 9)), plain((9, 1))),
]  # fmt: skip


@st.composite
def mutated_items(draw: st.DrawFn, items: list[bytes], snippets: list[bytes]) -> bytes:
    data = draw(st.sampled_from(items))
    if data.startswith(b"PK") and draw(st.booleans()):
        # An archive around a changed pickle: what is changed in place seldom stays an archive.
        start = data.index(b"\x80\x02")
        end = data.index(b"PK", start)
        return archive(draw(mutated(data[start:end], snippets)), ("data/0", bytes(16)))
    return draw(mutated(data, snippets))


@pytest.mark.filterwarnings("ignore:Detected pickle protocol:UserWarning")
@settings(max_examples=200)
@given(mutated_items(_ITEMS, _SNIPPETS))
def test_mutated_items(data: bytes) -> None:
    found = io.BytesIO(data)
    with contextlib.suppress(*REFUSED):
        check_item(found, fqn="x", url=hostile.URL, verified=True)
        # It was taken: then torch takes it, too, and so does a planner (where there is the device that it names).
        for weights_only in (True, False):
            torch.load(found, map_location="cpu", weights_only=weights_only)
            found.seek(0)
    with contextlib.suppress(errors.CorruptCheckpointError):
        assert decode_tensor(data).shape == (2, 2)
    assert not hostile.was_tripped()


_BEGIN = call("datetime", "timedelta", b"K\x01", b"K\x02", b"K\x03")


def test_hostile_values_are_refused() -> None:
    for label, opcodes in HOSTILE.items():
        for pickled in (opcodes, b"(" + _BEGIN + opcodes + b"t"):
            with pytest.raises(REFUSED):
                raise AssertionError(label, decode_item(archive(stream(pickled), ("data/0", bytes(16)))))
            assert not hostile.was_tripped(), label


def test_what_the_hostile_ones_are_made_of_is_taken() -> None:
    """Otherwise they would be refused for the wrong reason."""
    assert same(decode_item(archive(stream(array((2,), b"xy")))), np.frombuffer(b"xy", "u1"))
    assert same(decode_item(archive(stream(scalar(dtype("U3", TEXT), b"x\0\0\0y\0\0\0z\0\0\0")))), np.str_("xyz"))


_VALUES = [
    save(value)
    for value in (
        [np.arange(6.0).reshape(2, 3), np.float32(1), np.array(["x"])],
        [VALUES[label] for label in ("aware", "time", "delta", "path")],
        [VALUES[label] for label in ("nested", "bounded", "counter", "by set", "range", "beside tensors", "keys")],
        [np.random.RandomState(1).get_state(), random.getstate()[1][:5]],
    )
]
_OF_VALUES = [
    *(HOSTILE[label] for label in sorted(HOSTILE) if len(HOSTILE[label]) < 300),
    U1, dtype("U3", TEXT), array((1,), b"x"), scalar(dtype("f8"), bytes(8)), plain((0,)), b"R", b"\x81", b"b",
    b"h\x01", b"0", b"(", b"]", b"}", b"s", b"u", b"a", b"e", b"\x85", b".", b"N", b"\x88",
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:Detected pickle protocol:UserWarning", "ignore::DeprecationWarning:numpy")
@given(mutated_items(_VALUES, _OF_VALUES))
def test_mutated_values(data: bytes) -> None:
    """Refused, or unpickled by Python without harm."""
    found = io.BytesIO(data)
    with contextlib.suppress(*REFUSED):
        check_item(found, fqn="x", url=hostile.URL, verified=True)
        with contextlib.suppress(ModuleNotFoundError, NotImplementedError):  # a path of another system, or Python
            repr(torch.load(found, map_location="cpu", weights_only=False))
    assert not hostile.was_tripped()
