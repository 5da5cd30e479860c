"""Safetensors files: headers, indexes and shards, without the library (tests/frameworks has it)."""

from __future__ import annotations

import json
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dcp_s3.format.safetensors import (
    DTYPES,
    PREFIX,
    PlacedTensor,
    SafetensorsError,
    Shard,
    TensorEntry,
    header_length,
    make_header,
    make_index,
    parse_header,
    parse_index,
    plan_shards,
)

_SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)
_ENTRIES = st.dictionaries(
    st.text(max_size=8).filter(lambda name: name != "__metadata__" and name.isprintable()),
    st.tuples(st.sampled_from(sorted(DTYPES.values(), key=str)), _SHAPES),
    max_size=12,
).map(lambda found: [TensorEntry(name, dtype, shape) for name, (dtype, shape) in found.items()])


def parse(file: bytes, size: int | None = None) -> list[PlacedTensor]:
    size = len(file) if size is None else size
    length = header_length(file[:PREFIX], size)
    return parse_header(file[PREFIX : PREFIX + length], size)


def with_header(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def test_a_file_as_it_is_written() -> None:
    header = make_header([TensorEntry("a", torch.float32, (2, 3)), TensorEntry("ü", torch.bool, ())])
    assert len(header) % 8 == 0
    assert json.loads(header[8:]) == {
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "ü": {"dtype": "BOOL", "shape": [], "data_offsets": [24, 25]},
    }
    assert [placed.start for placed in parse(header + bytes(25))] == [len(header), len(header) + 24]


@given(_ENTRIES)
def test_what_is_written_is_read(entries: list[TensorEntry]) -> None:
    header = make_header(entries)
    size = sum(entry.nbytes for entry in entries)
    found = parse(header, len(header) + size)
    assert {placed.entry.name: placed.entry for placed in found} == {entry.name: entry for entry in entries}
    assert sum(placed.entry.nbytes for placed in found) == size


@given(_ENTRIES, st.integers(1, 300))
def test_shards_hold_each_tensor_once_and_are_not_too_large(entries: list[TensorEntry], most: int) -> None:
    shards = plan_shards(entries, most)
    assert sorted(tensor.name for shard in shards for tensor in shard.tensors) == sorted(e.name for e in entries)
    for shard in shards:
        assert shard.nbytes <= most or len([tensor for tensor in shard.tensors if tensor.nbytes]) == 1
        offset = 0
        for tensor in shard.tensors:
            assert offset % tensor.dtype.itemsize == 0  # aligned
            offset += tensor.nbytes
    if len(shards) == 1:
        assert shards[0].name == "model.safetensors"
    else:
        names = [f"model-{n:05d}-of-{len(shards):05d}.safetensors" for n in range(1, len(shards) + 1)]
        assert [shard.name for shard in shards] == names
        places = parse_index(make_index(shards))
        assert places == {tensor.name: shard.name for shard in shards for tensor in shard.tensors}


def test_the_index_is_hugging_faces() -> None:
    shards = [Shard("b", (TensorEntry("y", torch.int8, (3,)),)), Shard("a", (TensorEntry("x", torch.int64, ()),))]
    assert json.loads(make_index(shards)) == {"metadata": {"total_size": 11}, "weight_map": {"x": "a", "y": "b"}}


def test_what_safetensors_does_not_know_is_named() -> None:
    with pytest.raises(SafetensorsError, match=r"'odd', which is torch\.complex128"):
        plan_shards([TensorEntry("fine", torch.float32, (1,)), TensorEntry("odd", torch.complex128, (1,))], 100)
    with pytest.raises(SafetensorsError, match="may be called '__metadata__'"):
        plan_shards([TensorEntry("__metadata__", torch.float32, (1,))], 100)


GOOD = {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}


@pytest.mark.parametrize(
    ("file", "message"),
    [
        (b"", "has 0 bytes"),
        (struct.pack("<Q", 100) + b"{}", "header would have 100 bytes"),
        (with_header(b"{"), "no JSON"),
        (with_header(b"\xff\xfe"), "no JSON"),
        (with_header([1]), "no JSON object"),
        (with_header(b'{"a": 1, "a": 2}'), "twice"),
        (with_header({"a": 1}), "does not describe 'a'"),
        (with_header({"a": {**GOOD, "shape": [-2]}}, b"12"), "no proper shape"),
        (with_header({"a": {**GOOD, "shape": [True, 2]}}, b"12"), "no proper shape"),
        (with_header({"a": {**GOOD, "shape": [1] * 100_000, "data_offsets": [0, 1]}}, b"1"), "no proper shape"),
        (with_header({"a": {**GOOD, "dtype": "F6_E2M3"}}, b"12"), "'F6_E2M3', which torch does not have"),
        (with_header(b"[" * 100_000), "no JSON"),
        (with_header({"a": {**GOOD, "shape": [3]}}, b"12"), "'a' of 3 bytes lies at 0 to 2"),
        (with_header({"a": GOOD, "b": GOOD}, b"12"), "'b' of 2 bytes lies at 0 to 2, expected from 2"),
        (with_header({"a": GOOD}, b"1"), "cut short"),
        (with_header({"a": GOOD}, b"123"), "cut short or damaged"),
    ],
)  # fmt: skip
def test_damage_is_an_error(file: bytes, message: str) -> None:
    with pytest.raises(SafetensorsError, match=message):
        parse(file)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (b"{", "no weight_map"),
        (b'{"weight_map": []}', "does not name a file"),
        (b'{"weight_map": {"a": 1}}', "does not name a file"),
        (b'{"weight_map": {"a": "../x.safetensors"}}', "no file beside it"),
        (b'{"weight_map": {"a": ".."}}', "no file beside it"),
        (b'{"weight_map": {"a": "\\ud800.safetensors"}}', "no file beside it"),
        (b"[" * 100_000, "no weight_map"),
    ],
)
def test_a_bad_index_is_an_error(index: bytes, message: str) -> None:
    with pytest.raises(SafetensorsError, match=message):
        parse_index(index)
