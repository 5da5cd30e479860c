"""Metadata that somebody made to harm: our errors, and nothing else happens."""

from __future__ import annotations

import contextlib
import copyreg
import io
import pickle
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties

from dcp_s3.errors import CorruptCheckpointError, UnsafeMetadataError
from dcp_s3.format.allow_list import METADATA
from dcp_s3.format.metadata import seal
from tests import hostile
from tests.hostile import call, decode_metadata, make_metadata, metadata_with, name, number, plain, stream, text
from tests.mutations import mutated

REFUSED = (CorruptCheckpointError, UnsafeMetadataError)


def test_plain_values_get_through_the_corpus_s_own_tools() -> None:
    """Otherwise everything below would be refused for the wrong reason."""
    assert decode_metadata(metadata_with(plain({"w": ("w", 1)}))) == make_metadata({"w": ("w", 1)})


@pytest.fixture(autouse=True)
def _nothing_ran_and_no_class_was_changed() -> Iterator[None]:
    before = hostile.classes()
    yield
    assert hostile.classes() == before
    assert not hostile.was_tripped()


_ARGUMENTS = {
    "none": b")",
    "None": b"N\x85",
    "a huge integer": number(10**12) + b"\x85",
    "negative": number(-1) + b"\x85",
    "text": text("cuda:9") + b"\x85",
    "bytes": plain((b"latin1",)),
    "list": plain(([1, "a", [2]],)),
    "tuple of texts": plain((("a", "b"),)),
    "dict": plain(({"a": 1},)),
    "floats": plain((1.5, 2.5)),
    "text and text": plain(("a", "rot13")),
    "text and number": plain(("a", 1)),
    "five": plain((1, "2", 3.0, None, [4])),
    "trip": name("tests.hostile", "Trip") + b"\x85",
    "itself": b"q\x01h\x01\x85",
    "a class and a name": name("torch.distributed.checkpoint.metadata", "Metadata") + text("__init__") + b"\x86",
    "a class and a dict": name("torch.distributed.checkpoint.metadata", "Metadata") + plain({"a": 1}) + b"\x86",
}
_STATES = {
    "attributes": plain({"__class__": 1, "offset": "x", "fqn": 3}),
    "slots": plain((None, {"__init__": 1, "relative_path": 2, "cache": 3})),
    "a number": b"K\x01",
    "text": text("x"),
    "numbers as names": plain({1: 2}),
}


@pytest.mark.parametrize("known", [each for each, value in METADATA.items() if value is not vars(torch).get(each[6:])])
def test_what_is_allowed_is_harmless(known: str) -> None:
    module, _, qualified = known.rpartition(".")
    found = name(module, qualified)
    cases = [found + arguments + opcode for arguments in _ARGUMENTS.values() for opcode in (b"R", b"\x81")]
    cases += [made + state + b"b" for state in _STATES.values() for made in (found, found + b")\x81", found + b")R")]
    for arguments in _ARGUMENTS.values():
        cases += [
            found + arguments + b"Rq\x01" + use for use in (b"h\x01a", b"K\x01K\x02s", b"(K\x01K\x02e", b"(K\x01\x90")
        ]
    cases += [found, b"]" + found + b"a", b"}" + found + b"K\x01s"]
    cases += [found + use for use in (b"Q", b"K\x01a", b"K\x01K\x02s")]
    refused = 0
    for opcodes in cases:
        for data in (metadata_with(opcodes), stream(opcodes)):
            try:
                loaded = decode_metadata(data)
            except REFUSED:
                refused += 1
            else:
                assert repr(pickle.loads(pickle.dumps(loaded))) == repr(loaded), "what is loaded is plain data"
    assert refused > len(cases)


FORBIDDEN = [
    call("tests.hostile", "trip"),
    b"(" + text("x") + b"itests.hostile\ntrip\n",
    b"(" + name("tests.hostile", "trip") + b"o",
    name("tests", "hostile.trip") + b")R",
    text("tests.hostile") + text("trip") + b"\x93)R",
    text("torch") + text("nn.functional.torch.load") + b"\x93)R",
    name("builtins", "getattr") + name("builtins", "list") + text("__class__") + b"\x86R",
    call("builtins", "__import__", text("os")),
    call("subprocess", "Popen", text("true")),
    name("torch.serialization", "load"),
    name("torch.distributed.checkpoint.metadata", "os.system"),
    name("torch._utils", "sys.modules"),
    b"\x82\x01",
    b"Pid\n",
    text("id") + b"Q",
]


@pytest.mark.parametrize("opcodes", [*FORBIDDEN, call("torch", "serialization._get_layout", text("torch.strided"))])
def test_no_other_global(opcodes: bytes) -> None:
    for data in (stream(opcodes), metadata_with(opcodes)):
        with pytest.raises(REFUSED) as refused:
            decode_metadata(data)
        if opcodes == call("tests.hostile", "trip"):
            assert isinstance(refused.value, UnsafeMetadataError)
            assert "names the global tests.hostile.trip" in str(refused.value)


# --- fields --------------------------------------------------------------------------------------------

WRONG: dict[str, Any] = {
    "None": None, "an int": 7, "negative": -1, "huge": 2**70, "a bool": True, "a float": 0.5, "text": "../x",
    "bytes": b"x", "a list": [1], "a dict": {"a": 1}, "a tuple": (1, "a"), "a size": torch.Size([1, -2, 3]),
    "a dtype": torch.int8,
}  # fmt: skip
# Of the fields' values, what may be there.
RIGHT = {
    "metadata.planner_data": set(WRONG), "metadata.storage_data": {"None"}, "metadata.storage_meta": {"None"},
    "metadata.version": {"None", "text"}, "info.raw_offset": {"None", "an int"}, "info.crc64nvme": {"None", "an int"},
    "info.transform_descriptors": {"None"}, "info.offset": {"an int"}, "info.length": set(), "index.offset": {"None"},
    "index.index": {"None", "an int"}, "index.fqn": {"text"}, "meta.save_id": {"None", "text"},
    "properties.dtype": {"a dtype"},
    "properties.requires_grad": {"a bool"}, "properties.pin_memory": {"a bool"},
}  # fmt: skip
OTHERS = [
    "metadata.state_dict_metadata", "tensor.properties", "tensor.size", "tensor.chunks", "chunk.offsets", "chunk.sizes",
    "info.relative_path",
]  # fmt: skip


def owners(metadata: Any) -> dict[str, Any]:
    index, info = next(iter(metadata.storage_data.items()))
    tensor = metadata.state_dict_metadata["w"]
    return {
        "metadata": metadata, "tensor": tensor, "chunk": tensor.chunks[0], "properties": tensor.properties,
        "info": info, "index": index, "meta": metadata.storage_meta,
    }  # fmt: skip


@pytest.mark.parametrize("field", [*RIGHT, *OTHERS])
def test_wrong_types(field: str) -> None:
    owner, _, attribute = field.partition(".")
    for wrong, value in WRONG.items():
        metadata = make_metadata()
        vars(owners(metadata)[owner])[attribute] = value
        data = pickle.dumps(metadata)
        if wrong in RIGHT.get(field, ()):
            assert isinstance(decode_metadata(seal(io.BytesIO(data))), Metadata)
        else:
            with pytest.raises(REFUSED, match="step-1"):
                decode_metadata(data)


@pytest.mark.parametrize("place", ["a key", "an entry", "an index", "an info", "a chunk"])
def test_wrong_entries(place: str) -> None:
    for wrong, value in WRONG.items():
        metadata = make_metadata()
        entries: Any = metadata.state_dict_metadata
        items: Any = metadata.storage_data
        if (place in ("a key", "an index") and wrong in ("a list", "a dict")) or (place, wrong) == ("a key", "text"):
            continue  # no keys; a name
        if place == "a key":
            entries[value] = entries.pop("w")
        elif place == "an entry":
            entries["w"] = value
        elif place == "an index":
            items[value] = items.pop(next(iter(items)))
        elif place == "an info":
            items[next(iter(items))] = value
        else:
            entries["w"].chunks[0] = value
        with pytest.raises(REFUSED, match="step-1"):
            decode_metadata(pickle.dumps(metadata))


def test_properties_without_a_dtype() -> None:
    data = io.BytesIO()
    pickler = pickle.Pickler(data)
    new = copyreg.__newobj__  # type: ignore[attr-defined]
    pickler.dispatch_table = {TensorProperties: lambda _: (new, (TensorProperties,))}
    pickler.dump(make_metadata())
    with pytest.raises(CorruptCheckpointError, match="'w'"):
        decode_metadata(data.getvalue())


def test_impossible_chunks_shapes_and_ranges_and_paths_out_of_the_checkpoint() -> None:
    chunks = [((0,), (2,)), ((0, 0, 0), (2, 2, 1)), ((0, -1), (2, 2)), ((3, 0), (2, 2)), ((0, 0), (5, 2)),
              ((2**62, 0), (2**62, 2))]  # fmt: skip
    ranges = [(-1, 5), (0, -5), (2**63, 1), (0, 2**45), (-(2**70), 2**70)]
    paths = ["..", "../x", "a/..", "a/../../x", "/x", "//x", "", "a\0b", "\0", "..\\x", "a\\..\\..\\x", "\\x", "C:\\x",
             "s3://other/x", "http://169.254.0.1/x", "a\nb", "a\x7fb", "\ud800"]  # fmt: skip
    cases: list[tuple[str, dict[str, Any], type[Exception]]] = [
        ("tensor", {"size": torch.Size([2**40, 2**40])}, CorruptCheckpointError),  # which no memory holds
        *(("chunk", {"offsets": torch.Size(at), "sizes": torch.Size(of)}, CorruptCheckpointError) for at, of in chunks),
        *(("info", {"offset": offset, "length": length}, CorruptCheckpointError) for offset, length in ranges),
        *(("info", {"relative_path": path}, UnsafeMetadataError) for path in paths),
    ]
    for owner, fields, error in cases:
        metadata = make_metadata()
        vars(owners(metadata)[owner]).update(fields)
        with pytest.raises(error, match="'w'"):
            decode_metadata(pickle.dumps(metadata))


_VALID = [pickle.dumps(make_metadata(), protocol) for protocol in (2, 4)]
_SNIPPETS = [
    call("tests.hostile", "trip"), name("tests.hostile", "trip"), b"(itests.hostile\ntrip\n",
    text("tests.hostile") + text("trip") + b"\x93", b"R", b"\x81", b"b", b"h\x01", b"0", b"1", b"2", b"(", b"]", b"}",
    b"s", b"u", b"a", b"e", b"\x85", b"\x91", b".", number(2**70), b"\x8f(", b"\x90",
    *list(hostile.METADATA_BOMBS.values())[:4],
]  # fmt: skip


@given(st.sampled_from(_VALID).flatmap(lambda data: mutated(data, _SNIPPETS)))
def test_mutated_metadata(data: bytes) -> None:
    found: Metadata | None = None
    with contextlib.suppress(*REFUSED):
        found = decode_metadata(data)
    if found is not None:
        assert repr(pickle.loads(pickle.dumps(found))) == repr(found), "what is loaded is plain data"
    assert not hostile.was_tripped()


# --- what planners add ---------------------------------------------------------------------------------


def test_depth_counts_what_occurs_often_wherever_it_is() -> None:
    deep: Any = "x"
    for _ in range(50):
        deep = [deep]
    shared, doubled = deep[0][0], ()
    for _ in range(45):
        doubled = (doubled, doubled)  # type: ignore[assignment]
    for right in (deep, doubled):
        decode_metadata(pickle.dumps(make_metadata(right)))  # in little time
    with pytest.raises(CorruptCheckpointError, match="levels"):
        decode_metadata(pickle.dumps(make_metadata([shared, [[[shared]]]])))


_META = name("torch.distributed.checkpoint.metadata", "StorageMeta")


@pytest.mark.parametrize(
    "opcodes",
    [
        name("torch", "Size"),
        name("collections", "OrderedDict"),
        name("torch.distributed.checkpoint.metadata", "Metadata"),
        b"]" + name("torch.distributed.checkpoint.planner", "WriteItemType") + b"a",
        b"]" + call("torch.distributed.checkpoint.planner", "WriteItemType", b"K\x02") + b"a",
        b"]" + name("torch.distributed.checkpoint.metadata", "MetadataIndex") + b")\x81a",
        call("collections", "OrderedDict") + plain({"__reduce_ex__": "x"}) + b"b",
        call("collections", "OrderedDict") + plain({1: "x"}) + b"b",
        _META + b")\x81" + plain((None, {"save_id": "x"})) + b"b",
        _META + b")\x81K\x01a",
        _META + plain({"save_id": "x"}) + b"b",
        _META + plain((None, {"save_id": "x"})) + b"b",
        _META + b"K\x01\x85\x81",
        _META + b")" + plain({"a": 1}) + b"\x92",
        call("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING", b"K\x00")
        + plain((None, {"member": 1}))
        + b"b",
        call("collections", "defaultdict") + plain((None, {"default_factory": 1})) + b"b",
        call("collections", "defaultdict", name("torch.distributed.checkpoint.metadata", "Metadata")),
    ],
)
def test_no_class_is_left_in_it_and_none_is_changed(opcodes: bytes) -> None:
    with pytest.raises(CorruptCheckpointError):
        decode_metadata(metadata_with(opcodes))


def test_attributes_that_newer_torch_may_add_are_kept_and_checked() -> None:
    def parts_of(metadata: Any) -> list[Any]:
        return [vars(each) for name, each in owners(metadata).items() if name != "properties"] + [
            vars(metadata.state_dict_metadata["x"])
        ]

    metadata = make_metadata()
    newer = {"kind": torch.channels_last, "path": [("a", 1), OrderedDict(b={2})]}
    for owner in parts_of(metadata):
        owner["newer"] = newer
    found = decode_metadata(pickle.dumps(metadata))
    assert repr(found) == repr(metadata)
    assert [owner["newer"] for owner in parts_of(found)] == [newer] * 7
    for owner in parts_of(metadata):
        owner["newer"] = torch.Size
        with pytest.raises(CorruptCheckpointError):
            decode_metadata(pickle.dumps(metadata))
        del owner["newer"]


def test_items_do_not_lie_at_the_same_bytes() -> None:
    metadata = make_metadata()
    one, other, _ = (metadata.storage_data or {}).values()
    other.relative_path = one.relative_path
    with pytest.raises(CorruptCheckpointError, match="same bytes"):
        decode_metadata(pickle.dumps(metadata))


def test_the_extension_registry_is_no_way_around() -> None:
    for code, opcode in ((0x7F, b"\x82\x7f"), (0x7FFF, b"\x83\xff\x7f"), (0x7FFFFFF, b"\x84\xff\xff\xff\x07")):
        copyreg.add_extension("tests.hostile", "trip", code)
        try:
            for cached in (False, True):
                if cached:
                    assert pickle.loads(opcode + b".") is hostile.trip  # now in the cache
                with pytest.raises(CorruptCheckpointError, match="registry"):
                    decode_metadata(metadata_with(opcode + b")R"))
            decode_metadata(metadata_with(plain("\x82\x83\x84")))  # no opcodes
        finally:
            copyreg.remove_extension("tests.hostile", "trip", code)
            copyreg.clear_extension_cache()
