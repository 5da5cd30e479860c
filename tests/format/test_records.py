"""Shortcuts change nothing but the time, and are taken."""

from __future__ import annotations

import gc
import io
import itertools
import pickle
import pickletools
from collections import Counter
from collections.abc import Callable
from dataclasses import is_dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from dcp_s3.errors import CorruptMetadataError
from dcp_s3.format.blocks import Blocks
from dcp_s3.format.metadata import dump_metadata, load_metadata
from dcp_s3.format.metadata_globals import build_of, find_global
from dcp_s3.format.records import make_shortcuts
from dcp_s3.format.storage_info import make_storage_info
from dcp_s3.format.unpickle import MalformedPickleError, Shortcut, UnsafeGlobalError, unpickle
from tests import hostile
from tests.hostile import URL, call, make_metadata, metadata_with, name, number, text
from tests.mutations import mutated

TENSORS = 24


def _metadata() -> Metadata:
    """Tensors of 0 to 5 dimensions, of one to three chunks; CRCs of blocks of some. The memo has over 256 places."""
    entries: dict[str, Any] = {}
    items: dict[MetadataIndex, Any] = {}
    paths = ["__0_0-abc.distcp", "__1_0-abc.distcp"]
    for number_ in range(TENSORS):
        fqn = f"layers.{number_}.weight"
        dimensions, parts = number_ % 6, 1 + number_ % 3 if number_ % 6 else 1
        size = torch.Size([300 * parts, *[number_ * 10_000] * (dimensions - 1)] if dimensions else [])
        chunks = []
        for part in range(parts):
            offset = torch.Size([300 * part, *[0] * (dimensions - 1)] if dimensions else [])
            extent = torch.Size([300, *size[1:]] if dimensions else [])
            chunks.append(ChunkStorageMetadata(offset, extent))
            crc = 2**63 + number_ if number_ % 4 else None
            blocks = Blocks(2**20, bytes([number_]) * 24 * number_, crc) if crc is not None and number_ % 2 else None
            items[MetadataIndex(fqn, offset, part if number_ % 5 else None)] = make_storage_info(
                paths[part % 2], number_ * 2**30, 70_000, raw_offset=700, crc64nvme=crc, blocks=blocks
            )
        dtype = (torch.bfloat16, torch.float32)[number_ % 2]
        entries[fqn] = TensorStorageMetadata(TensorProperties(dtype, requires_grad=number_ % 3 == 0), size, chunks)
    return Metadata(entries, {fqn: ("layers", fqn) for fqn in entries}, items, version="1.0.0")


def _describe(value: Any, above: tuple[int, ...] = ()) -> Any:
    """Types and values of everything, as something that can be compared."""
    if id(value) in above:
        return "itself", above.index(id(value))
    above = (*above, id(value))
    if isinstance(value, dict):
        held: Any = [(_describe(key, above), _describe(item, above)) for key, item in value.items()]
    elif isinstance(value, (list, tuple)):
        held = [_describe(item, above) for item in value]
    else:
        held = None if is_dataclass(value) else repr(value)
    attributes = {key: _describe(item, above) for key, item in getattr(value, "__dict__", {}).items()}
    return type(value).__name__, held, attributes


def _outcome(data: bytes, make: Callable[..., Any] | None) -> Any:
    try:
        value, end = unpickle(data, find_global, build_of, make_shortcuts=make)
    except (MalformedPickleError, UnsafeGlobalError) as error:
        return type(error), str(error)
    try:
        return _describe(value), end
    except RecursionError:
        return "deep", end


_VALID = [pickle.dumps(_metadata(), protocol) for protocol in (2, 4, 5)]
_EVERYTHING_AGAIN = b"".join(b"h" + bytes([place]) for place in range(256))
_SNIPPETS = [
    call("tests.hostile", "trip"), text("fqn"), text("../x"), b"K\x05q\x09", b"K\x05q\xff", b"Nr\xff\xff\x00\x00",
    b"h\x09", b"h\x21K\x01\x85\x94\x85\x94R\x94", b")\x81\x94}\x94(", b"ub", b"0", b"1", b"(", b"u", b"a", b"R",
    b"\x94", b"\x85", b"\x95" + bytes(8), b"J\xff\xff\xff\xff", number(2**63), b"\x8a\x09" + bytes(8) + b"\x01",
    _EVERYTHING_AGAIN,
]  # fmt: skip


@pytest.mark.parametrize("data", _VALID)
def test_the_same_is_loaded(data: bytes) -> None:
    found = _outcome(data, make_shortcuts)
    assert found == _outcome(data, None)
    assert found == (_describe(pickle.loads(data)), len(data))


@given(mutated(_VALID[1], _SNIPPETS))
def test_the_same_of_mutated_pickles(data: bytes) -> None:
    """Values, or errors to the word."""
    assert _outcome(data, make_shortcuts) == _outcome(data, None)
    assert not hostile.was_tripped()


@pytest.mark.parametrize("size", [0, 1, 3, 4, 5, 64, 65])
@pytest.mark.parametrize("extent", [0, 255, 65_535, 2**31 - 1, 2**40, 2**63 - 1, -1, -(2**40)])
def test_sizes(size: int, extent: int) -> None:
    data = pickle.dumps([torch.Size([extent] * size) for _ in range(3)])
    assert _outcome(data, make_shortcuts) == _outcome(data, None)


def test_every_record_is_made_at_once() -> None:
    """But the first of each kind, which names its class, and those with texts in them."""
    made: Counter[str] = Counter()

    def counting(data: bytes, memo: list[Any]) -> dict[str, Shortcut]:
        def count(label: str, shortcut: Shortcut) -> Shortcut:
            def run(position: int) -> tuple[Any, int]:
                found = shortcut(position)
                made[label.rpartition(".")[2]] += 1
                return found

            return run

        return {label: count(label, shortcut) for label, shortcut in make_shortcuts(data, memo).items()}

    metadata = _metadata()
    found, _ = unpickle(pickle.dumps(metadata), find_global, build_of, make_shortcuts=counting)
    assert found == metadata
    items = len(metadata.storage_data or {})
    chunks = [len(entry.chunks) for entry in metadata.state_dict_metadata.values()]  # type: ignore[union-attr]
    several = sum(count for count in chunks if count > 1)
    # Behind the first: of one path, of the other, without a CRC, with blocks.
    assert items - 4 <= made["_StorageInfo"] < items
    assert items - 2 <= made["MetadataIndex"] < items
    assert several - 2 <= made["ChunkStorageMetadata"] <= several
    assert made["TensorStorageMetadata"] == chunks[1:].count(1)


def test_a_place_that_is_written_again_ends_the_shortcuts() -> None:
    """They keep what they found in the memo."""
    names = ["a", "b", "c"]
    data = pickle.dumps((names, [MetadataIndex(fqn, [1]) for fqn in names]))
    before = itertools.takewhile(lambda found: found[1] != "offset", pickletools.genops(data))
    places = sum(op.name == "MEMOIZE" for op, _, _ in before)
    last = data.rindex(b"h", 0, data.rindex(b")\x81"))
    changed = data[:last] + text("another") + b"q" + bytes([places]) + b"0" + data[last:]
    (_, value), _ = unpickle(changed, find_global, build_of, make_shortcuts=make_shortcuts)
    assert [list(vars(index)) for index in value] == [["fqn", "index", "offset"]] * 2 + [["fqn", "index", "another"]]
    assert _outcome(changed, make_shortcuts) == _outcome(changed, None)


@pytest.mark.parametrize("dimensions", [0, 1, 2, 4])
def test_what_records_add_to_the_memo(dimensions: int) -> None:
    """Each place, after records of every kind that were made at once."""
    size = torch.Size([70_000] * dimensions)
    entries: dict[str, Any] = {}
    items = {}
    for fqn in "abc":
        chunk = ChunkStorageMetadata(torch.Size([0] * dimensions), torch.Size(size))
        entries[fqn] = TensorStorageMetadata(TensorProperties(torch.int8), torch.Size(size), [chunk])
        blocks = Blocks(2**20, fqn.encode() * 8, 2**63)
        items[MetadataIndex(fqn, size, 0)] = make_storage_info("x", 0, 5, raw_offset=1, crc64nvme=2**63, blocks=blocks)
    data = pickle.dumps(Metadata(entries, None, items))
    for place in range(256):
        again = data[:-1] + b"h" + bytes([place]) + b"."
        assert _outcome(again, make_shortcuts) == _outcome(again, None)


# --- the garbage collector ------------------------------------------------------------------------------


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("data", [dump_metadata(make_metadata()), b"nothing"])
def test_the_garbage_collector_is_left_as_it_was(data: bytes, enabled: bool) -> None:
    before = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        try:
            load_metadata(data, url=URL)
        except CorruptMetadataError:
            assert data == b"nothing"
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if before else gc.disable)()


# --- keys of one hash -----------------------------------------------------------------------------------

_PRIMES = 11400714785074694791, 14029467366897019727, 2870177450012600261


def _tuples_of_one_hash(count: int) -> list[tuple[int, int]]:
    """Pairs of numbers below 2**60, by CPython's hash of tuples, backwards."""
    found: list[tuple[int, int]] = []
    first = 0
    while len(found) < count:
        first += 1
        lane = (_PRIMES[2] + first * _PRIMES[1]) % 2**64
        lane = (lane << 31 | lane >> 33) * _PRIMES[0] % 2**64
        second = (12345 - lane) * pow(_PRIMES[1], -1, 2**64) % 2**64
        if second < 2**60:
            found.append((first, second))
    return found


def _plain(value: Any) -> bytes:
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, 2)
    pickler.fast = True
    pickler.dump(value)
    return buffer.getvalue()[2:-1]


def _index(fqn: bytes, offset: bytes) -> bytes:
    return (
        name("torch.distributed.checkpoint.metadata", "MetadataIndex")
        + b")\x81}("
        + text("fqn")
        + fqn
        + text("offset")
        + offset
        + b"ub"
    )  # fmt: skip


def test_keys_that_were_chosen_to_have_one_hash() -> None:
    pairs = _tuples_of_one_hash(200)
    assert len({hash(pair) for pair in pairs}) == 1
    for keys in (
        [_plain(pair) for pair in pairs],
        [_index(text("w"), _plain(pair)) for pair in pairs],
        [_index(number(factor * (2**61 - 1)), b"N") for factor in range(200)],
    ):
        for opcodes in (b"}(" + b"N".join(keys) + b"Nu", b"}" + b"".join(key + b"Ns" for key in keys)):
            with pytest.raises(CorruptMetadataError, match="equal hashes"):
                load_metadata(metadata_with(opcodes), url=URL)


def test_keys_that_are_equal_are_no_attack() -> None:
    value = [{(1, 2): number_, MetadataIndex("w", [number_ // 100]): None} for number_ in range(300)]
    found = load_metadata(pickle.dumps(Metadata({}, planner_data=value)), url=URL)
    assert found.planner_data == value
