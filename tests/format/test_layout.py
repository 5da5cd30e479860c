"""Names of objects, the manifest's JSON with what may be stored in it as ``extra``, and safetensors files: headers,
indexes and shards, without the library (tests/frameworks has it)."""

from __future__ import annotations

import json
import math
import secrets
import struct
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dcp_s3.errors import SettingsError
from dcp_s3.format import layout
from dcp_s3.format.control_files import (
    MAX_EXTRA_BYTES,
    AddedMetrics,
    DeletionList,
    Manifest,
    ObjectEntry,
    check_extra,
)
from dcp_s3.format.layout import Kind, What
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

_hex = st.text("0123456789abcdef", min_size=1, max_size=16)
_ranks = st.integers(0, 10**6)
_maybe_rank = st.one_of(st.none(), _ranks)
_names = st.one_of(
    st.builds(lambda r, n, x: (layout.data_object(r, n, x), Kind(What.DATA, r, n, x)), _ranks, _ranks, _hex),
    st.builds(
        lambda r, x, d: (layout.spread(layout.data_object(r, 1, x), d), Kind(What.DATA, r, 1, x, spread=d)),
        _ranks, _hex, st.integers(1, 4),
    ),
    st.builds(lambda r: (layout.metadata_object(r), Kind(What.COMMIT, r)), _maybe_rank),
    st.builds(lambda x, r: (layout.manifest_object(x, r), Kind(What.MANIFEST, r, save_id=x)), _hex, _maybe_rank),
    st.builds(lambda x, s: (layout.lease_object(x, s), Kind(What.LEASE, seconds=s)), _hex, st.integers(0, 999_999_999)),
    st.builds(lambda x, y: (layout.deletion_object(x, y), Kind(What.DELETION, deletion=x, attempt=y)), _hex, _hex),
    st.builds(
        lambda x, kind, r: (layout.joint_object(x, kind, r), Kind(What.COORDINATION, save_id=x)),
        _hex, st.sampled_from(["intent", "part", "roll", "merged"]), _ranks,
    ),
    st.sampled_from([(layout.METRICS, Kind(What.METRICS)), (layout.PIN, Kind(What.PIN)),
                     (layout.CLAIM, Kind(What.COORDINATION))]),
)  # fmt: skip


@given(_names)
def test_every_name_that_is_made_is_told_for_what_it_is(made: tuple[str, Kind]) -> None:
    path, kind = made
    assert layout.classify(path) == kind


def _make(kind: Kind) -> str | None:
    made = {
        What.COMMIT: layout.metadata_object(kind.rank),
        What.MANIFEST: layout.manifest_object(kind.save_id, kind.rank),
        What.METRICS: layout.METRICS,
        What.PIN: layout.PIN,
        What.DELETION: layout.deletion_object(kind.deletion, kind.attempt),
    }
    if kind.rank is not None and kind.number is not None and kind.nonce:
        name = layout.data_object(kind.rank, kind.number, kind.nonce)
        made[What.DATA] = layout.spread(name, kind.spread) if kind.spread else name
    if not kind.save_id:
        made[What.COORDINATION] = layout.CLAIM
    return made.get(kind.what)


_edits = st.tuples(st.integers(0, 60), st.integers(0, 2), st.text("0٣/a.-_\\ \n", max_size=2))


@given(_names, st.lists(_edits, max_size=3))
def test_nothing_else_is_told_for_it(made: tuple[str, Kind], edits: list[tuple[int, int, str]]) -> None:
    path = made[0]
    for start, length, text in edits:
        path = path[:start] + text + path[start + length :]
    kind = layout.classify(path)
    assert _make(kind) in (None, path)
    if kind.what is What.LEASE:
        assert path.startswith(layout.LEASE_PREFIX)
        assert path.endswith(f".{kind.seconds}")
    if kind.what is What.DATA and not kind.nonce:
        assert path.endswith(layout.DATA_SUFFIX)
        assert "/" not in path


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("__3_1.distcp", Kind(What.DATA, 3, 1)),  # torch's
        ("x.distcp", Kind(What.DATA)),
        (".dcp_s3/other", Kind(What.CONTROL)),
        (".dcp_s3/part-ab.1.0.ef", Kind(What.COORDINATION, save_id="ab")),  # version 0.1
        (".dcp_s3/joint-ab.other.1", Kind(What.CONTROL)),
        (".dcp_s3/claim.json.1", Kind(What.CONTROL)),
        (".dcp_s3/board-ab-queue", Kind(What.BOARD)),
        (".dcp_s3/board-ab/../x", Kind(What.OTHER)),
        ("run/.dcp_s3/claim.json", Kind(What.NESTED, below="run")),
        (".dcp_s3/lease-ab.1234567890", Kind(What.CONTROL)),
        ("step-1/.metadata", Kind(What.NESTED, below="step-1")),
        ("5/__0.metadata", Kind(What.NESTED, below="5")),
        ("6/__0_0-ab.distcp", Kind(What.NESTED_DATA, 0, below="6")),
        ("a/b/.metadata", Kind(What.OTHER)),
        ("a/b/__0_0.distcp", Kind(What.NESTED_DATA, below="a")),
        ("a/../__0_0.distcp", Kind(What.OTHER)),
        (".dcp_s3/../x", Kind(What.OTHER)),
        ("__00.metadata", Kind(What.OTHER)),
        ("__٣.metadata", Kind(What.OTHER)),
        ("model.pt", Kind(What.OTHER)),
        ("", Kind(What.OTHER)),
        ("/" * 1024, Kind(What.OTHER)),
    ],
)
def test_names_that_others_make(path: str, kind: Kind) -> None:
    assert layout.classify(path) == kind


def test_spread_data_is_told_by_its_hash() -> None:
    path = layout.spread(layout.data_object(3, 1, secrets.token_hex(8)), 2)
    directory, _, name = path.partition("/")
    other = "".join("0" if digit != "0" else "1" for digit in directory)
    assert layout.classify(f"{other}/{name}") == Kind(What.NESTED_DATA, 3, below=other)
    assert layout.classify(f"{directory}/__3_1.distcp") == Kind(What.NESTED_DATA, 3, below=directory)


STEPS = {
    "step-00001000": 1000, "step_5": 5, "iter_0000100": 100, "global_step7": 7, "run2-step-9": 9, "500": 500,
    "checkpoint-500": 500, "epoch=3-step=100-val_loss=0.25.ckpt": 100, "s3://bucket/run-4/step-1000/": 1000,
    **dict.fromkeys(("final", "run-4", "llama-8b", "Meta-Llama-3", "step-8b", "stepfun-3", "s3://bkt/not/there",
                     "s3://bkt/step-3/model")),
}  # fmt: skip


def test_step_of_a_name() -> None:
    assert {name: layout.step_of(name) for name in STEPS} == STEPS


MANIFEST = Manifest(
    "ab12", 1e9, 5, 2, (ObjectEntry("__0_0-x.distcp", 10, "00ff"), ObjectEntry("__1_0-x.distcp", 5)), 3,
    metrics={"val_loss": 1.5},
)  # fmt: skip
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


_SELF: dict[str, Any] = {}
_SELF["me"] = _SELF
REFUSED: list[tuple[Any, str]] = [
    ({"weights": [1, torch.ones(2)]}, "Tensor"), ({"loss": math.nan}, "Out of range float"),
    ({"betas": (0.9, 0.95)}, "betas"), ({"seen": {1, 2}}, "set"), ({"a": {3: 1}}, "3"), ([1], r"\[1\]"),
    (_SELF, "Circular"), ({"long": "x" * MAX_EXTRA_BYTES}, "at most 65536"),
]  # fmt: skip


def test_what_json_does_not_have_or_what_is_large_is_refused() -> None:
    for extra, message in REFUSED:
        with pytest.raises(SettingsError, match=rf"extra .*{message}.*Remedy"):
            check_extra(extra)


def test_manifests_without_it_and_with_later_fields_are_read() -> None:
    fields = json.loads(MANIFEST.to_json())
    assert fields["total_size"] == 15
    del fields["extra"]
    assert Manifest.from_json(json.dumps({**fields, "later": [1]}).encode()) == MANIFEST


def test_what_is_no_manifest_or_is_of_a_later_format() -> None:
    fields = json.loads(MANIFEST.to_json())
    wrong = [fields | each for each in ({"extra": 5}, {"objects": [1]}, {"save_id": [1]}, {"format_version": 2})]
    infinite = MANIFEST.to_json().replace(b'"size": 10', b'"size": 1e999')
    for data in (b"", b"{", b"[]", b"\xff", b"{}", b"null", *(json.dumps(each).encode() for each in wrong), infinite):
        with pytest.raises(ValueError, match="not a dcp_s3 manifest"):
            Manifest.from_json(data)


def test_added_metrics_and_lists_of_deletions() -> None:
    added = AddedMetrics("ab", {"loss": math.inf, "note": "x"})
    assert AddedMetrics.from_json(added.to_json()) == added
    listed = DeletionList(None, {".metadata": "e"}, {"__0_0-ab.distcp": ""})
    assert DeletionList.from_json(listed.to_json()) == listed
    earlier = {**json.loads(listed.to_json()), "all_versions": True}  # earlier versions had this field
    assert DeletionList.from_json(json.dumps(earlier).encode()) == listed
    outside = DeletionList(None, {}, {"../x": ""})
    for kind, data in ((AddedMetrics, b"{}"), (DeletionList, b"[]"), (DeletionList, outside.to_json())):
        with pytest.raises(ValueError, match="not "):
            kind.from_json(data)


# --- safetensors files ---------------------------------------------------------------------------------


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


def test_a_file_and_an_index_as_they_are_written() -> None:
    header = make_header([TensorEntry("a", torch.float32, (2, 3)), TensorEntry("ü", torch.bool, ())])
    assert len(header) % 8 == 0
    assert json.loads(header[8:]) == {
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "ü": {"dtype": "BOOL", "shape": [], "data_offsets": [24, 25]},
    }
    assert [placed.start for placed in parse(header + bytes(25))] == [len(header), len(header) + 24]
    shards = [Shard("b", (TensorEntry("y", torch.int8, (3,)),)), Shard("a", (TensorEntry("x", torch.int64, ()),))]
    assert json.loads(make_index(shards)) == {"metadata": {"total_size": 11}, "weight_map": {"x": "a", "y": "b"}}


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


def test_what_safetensors_does_not_know_is_named() -> None:
    with pytest.raises(SafetensorsError, match=r"'odd', which is torch\.complex128"):
        plan_shards([TensorEntry("fine", torch.float32, (1,)), TensorEntry("odd", torch.complex128, (1,))], 100)
    with pytest.raises(SafetensorsError, match="may be called '__metadata__'"):
        plan_shards([TensorEntry("__metadata__", torch.float32, (1,))], 100)


_GOOD = {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}


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
        (with_header({"a": {**_GOOD, "shape": [-2]}}, b"12"), "no proper shape"),
        (with_header({"a": {**_GOOD, "shape": [True, 2]}}, b"12"), "no proper shape"),
        (with_header({"a": {**_GOOD, "shape": [1] * 100_000, "data_offsets": [0, 1]}}, b"1"), "no proper shape"),
        (with_header({"a": {**_GOOD, "dtype": "F6_E2M3"}}, b"12"), "'F6_E2M3', which torch does not have"),
        (with_header(b"[" * 100_000), "no JSON"),
        (with_header({"a": {**_GOOD, "shape": [3]}}, b"12"), "'a' of 3 bytes lies at 0 to 2"),
        (with_header({"a": _GOOD, "b": _GOOD}, b"12"), "'b' of 2 bytes lies at 0 to 2, expected from 2"),
        (with_header({"a": _GOOD}, b"1"), "cut short"),
        (with_header({"a": _GOOD}, b"123"), "cut short or damaged"),
    ],
)  # fmt: skip
def test_damage_is_an_error(file: bytes, message: str) -> None:
    with pytest.raises(SafetensorsError, match=message):
        parse(file)


def test_a_bad_index_is_an_error() -> None:
    for index, message in (
        (b"{", "no weight_map"),
        (b"[" * 100_000, "no weight_map"),
        (b'{"weight_map": []}', "does not name a file"),
        (b'{"weight_map": {"a": 1}}', "does not name a file"),
        (b'{"weight_map": {"a": "../x.safetensors"}}', "no file beside it"),
        (b'{"weight_map": {"a": ".."}}', "no file beside it"),
        (b'{"weight_map": {"a": "\\ud800.safetensors"}}', "no file beside it"),
    ):
        with pytest.raises(SafetensorsError, match=message):
            parse_index(index)
