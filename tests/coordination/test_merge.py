"""Parts of many ranks become one checkpoint's metadata, as DCP's coordinator makes it."""

from __future__ import annotations

import dataclasses
import itertools
import math
import pickle
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from benchmarks.coordinator import State, local_plan, results_of
from dcp_s3.checkpoint import commit
from dcp_s3.coordination import merge as merge_module
from dcp_s3.coordination.merge import MergedSave, Merging, assign
from dcp_s3.errors import DcpS3Error, SaveProtocolError, ShardingError
from dcp_s3.format import metadata_columns
from dcp_s3.format.blocks import get_blocks, pack_crcs
from dcp_s3.format.control_files import ObjectEntry
from dcp_s3.format.layout import DCP_VERSION
from dcp_s3.format.metadata import load_metadata
from dcp_s3.format.part import Part, WrittenItem, encode
from dcp_s3.memory import crc64nvme
from dcp_s3.torch_private import StorageInfo
from dcp_s3.url import parse_url
from tests.coordination.making_parts import SAVE, other, part_of, plain, tensor

URL = "s3://bucket/run/step-1"
SAVE_ID = SAVE + "0a1b2c3d"


def merging_of(parts: Sequence[Part]) -> Merging:
    merging = Merging(SAVE, parts[0].world_size)
    for part in parts:
        merging.add(encode(part))
    return merging


def merge(parts: Sequence[Part]) -> MergedSave:
    return merging_of(parts).merged(save_id=SAVE_ID, checkpoint_id=URL)


def assert_same(merged: MergedSave, parts: Sequence[Part], directory: Path | None = None) -> Metadata:
    """Our reader and Python's find what the oracle says, to the last attribute."""
    expected = expected_of(parts, save_id=SAVE_ID, checkpoint_id=URL)
    found = load_metadata(merged.metadata, url=URL)
    for each in (found, pickle.loads(merged.metadata)):
        assert each == expected
        assert list(each.state_dict_metadata) == list(expected.state_dict_metadata)
        hints = {index: index.index for index in expected.storage_data}
        assert {index: index.index for index in each.storage_data} == hints
        for index, info in each.storage_data.items():
            assert vars(info) == {k: v for k, v in vars(expected.storage_data[index]).items() if v is not None}
    assert merged.items == len(expected.storage_data)
    return found


# --- as DCP does it -------------------------------------------------------------------------------


def dcp_part(rank: int, ranks: int, held: SavePlan, written: SavePlan) -> Part:
    """The part of a rank with these plans before and after deduplication."""
    results = results_of(rank, written)
    items = tuple(
        WrittenItem(item.index, item.tensor_data, result.storage_data, item.type is WriteItemType.SHARD)
        for item, result in zip(written.items, results, strict=True)
    )
    objects = tuple(each.object_entry for each in results if each.object_entry is not None)
    paths = {item.index.fqn: held.planner_data[item.index.fqn] for item in written.items}
    return Part(SAVE, rank, ranks, items, objects, paths)


@pytest.mark.parametrize("slab", [2**14, 7])
def test_the_metadata_is_that_of_dcp_s_coordinator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slab: int) -> None:
    monkeypatch.setattr(metadata_columns, "_SLAB", slab)
    state = State.of(50)
    held = [local_plan(state, 4, rank) for rank in range(4)]
    written, expected = DefaultSavePlanner().create_global_plan(held)
    parts = [dcp_part(rank, 4, *plans) for rank, plans in enumerate(zip(held, written, strict=True))]
    merged = merge(parts[::-1])
    (tmp_path / ".metadata").write_bytes(merged.metadata)
    for found in (assert_same(merged, parts), FileSystemReader(tmp_path).read_metadata()):
        assert found.state_dict_metadata == expected.state_dict_metadata
        assert list(found.state_dict_metadata) == list(expected.state_dict_metadata)
        assert found.planner_data == expected.planner_data
        assert found.storage_data == {item.index: item.storage for part in parts for item in part.written}
    assert merged.items == state.stored(4)
    assert merged.objects == tuple(entry for part in parts for entry in part.objects)


# --- in any order, again and again ----------------------------------------------------------------


def _cut(whole: Sequence[int], cuts: Sequence[Sequence[int]]) -> list[tuple[list[int], list[int]]]:
    """All boxes between cuts along each dimension."""
    edges = [[0, *sorted(cut), size] for cut, size in zip(cuts, whole, strict=True)]
    spans = [list(itertools.pairwise(each)) for each in edges]
    return [([a for a, _ in box], [b - a for a, b in box]) for box in itertools.product(*spans)]


@st.composite
def saves(draw: st.DrawFn) -> list[Part]:
    """Parts of ranks that wrote the boxes of some tensors, and other things; some of them more than once, and some
    wrong."""
    ranks = draw(st.integers(1, 4))
    items: list[WriteItem] = []
    for fqn in draw(st.lists(st.sampled_from(["a", "b.c", "d", "e\ud800", "f"]), unique=True, max_size=4)):
        whole = draw(st.lists(st.integers(0, 6), max_size=3))
        cuts = [draw(st.lists(st.integers(0, size), max_size=2)) for size in whole]
        dtype = draw(st.sampled_from([torch.float32, torch.float16]))
        boxes = _cut(whole, cuts)
        if draw(st.integers(0, 7)) == 0:  # one is wrong, perhaps
            where, what = draw(st.integers(0, len(boxes) - 1)), draw(st.integers(0, 1))
            size = len(whole) + (draw(st.integers(0, 9)) == 0)
            boxes[where][what][:] = draw(st.lists(st.integers(0, 6), min_size=size, max_size=size))
        items += [tensor(fqn, whole, *box, TensorProperties(dtype)) for box in boxes]
        if draw(st.integers(0, 9)) == 0:
            again = draw(st.sampled_from([other(fqn), plain(fqn, whole), tensor(fqn, [7], [0], [7])]))
            items.append(again)
    items += [other(fqn) for fqn in draw(st.lists(st.sampled_from(["step", "lr", "g"]), max_size=3))]
    owners = [draw(st.integers(0, ranks - 1)) for _ in items]
    parts = []
    for rank in range(ranks):
        mine = [item for item, owner in zip(items, owners, strict=True) if owner == rank]
        mine += draw(st.lists(st.sampled_from(items), max_size=2)) if items else []
        paths = draw(st.none() | st.just({item.index.fqn: (item.index.fqn, rank) for item in mine}))
        parts.append(part_of(rank, ranks, mine, paths=paths))
    return parts


@settings(max_examples=60)
@given(saves(), st.randoms(use_true_random=False))
def test_the_columns_say_what_the_items_say_one_by_one(parts: list[Part], random: Any) -> None:
    """Right or wrong."""
    try:
        expected_of(parts, save_id=SAVE_ID, checkpoint_id=URL)
    except DcpS3Error:
        with pytest.raises((ShardingError, SaveProtocolError)):
            merge(parts)
        return
    merged = merge(parts)
    assert_same(merged, parts)
    random.shuffle(shuffled := [*parts])
    merging = merging_of(shuffled)
    assert merging.facts == [{"by": rank} for rank in range(len(parts))]
    assert merging.merged(save_id=SAVE_ID, checkpoint_id=URL) == merged


def test_offsets_beyond_4_gib_and_large_shapes_survive() -> None:
    part = part_of(0, 1, [tensor("w", [2**40, 3], [2**33, 0], [5, 3]), other("step")])
    first = dataclasses.replace(part.written[0].storage, offset=2**35, length=2**34)
    vars(first).update(raw_offset=2**33, crc64nvme=2**64 - 1, crc64nvme_block=2**32, crc64nvme_blocks=b"\0" * 304)
    written = (dataclasses.replace(part.written[0], storage=first), part.written[1])
    objects = (ObjectEntry(part.objects[0].path, 2**40),)
    parts = [dataclasses.replace(part, written=written, objects=objects)]
    assert_same(merge(parts), parts)


def test_what_is_read_back_before_the_commit_has_the_names_of_all_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit, "_known", set())  # as in a new process
    merging, sample = (Merging(SAVE, 4) for _ in range(2))
    dtypes = (torch.float32, torch.float32, torch.int8, torch.int8)
    added = []
    for rank, dtype in enumerate(dtypes):
        shard = tensor("w" if dtype.is_floating_point else "v", [4], [2 * (rank % 2)], [2], TensorProperties(dtype))
        data = encode(part_of(rank, 4, [shard, other(f"state-{rank}")]))
        added.append(merging.add(data))
        if added[-1]:
            sample.add(data)
    assert added == [True, False, True, False]
    few = sample.merged(save_id=SAVE_ID, checkpoint_id=URL, is_whole=False)
    commit.check_readable(few.metadata, parse_url(URL))
    with mock.patch("dcp_s3.format.metadata.load_metadata") as load:
        commit.check_readable(merging.merged(save_id=SAVE_ID, checkpoint_id=URL).metadata, parse_url(URL))
    assert not load.called, "it names what was read back already"
    assert len(load_metadata(few.metadata, url=URL).storage_data) == 4


def test_of_many_items_fewer_checksums_of_blocks_are_kept_and_these_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    data = random.Random(0).randbytes(10 * 64 + 1)
    nbytes, crcs = len(data), [crc64nvme(data[: 64 * n]) for n in range(1, 11)]
    part = part_of(0, 4, [tensor("w", [nbytes], [0], [nbytes]), plain("b", [3]), tensor("v", [nbytes], [0], [nbytes])])
    for item in (part.written[0], part.written[2]):
        vars(item.storage).update(crc64nvme=crc64nvme(data), crc64nvme_blocks=pack_crcs(crcs))
    for every, left in ((1, 10), (2, 5), (4, 2), (672, 0)):
        monkeypatch.setattr(merge_module, "_MAX_CRC_BYTES", 672 // every)  # of four such parts
        merging = Merging(SAVE, 4)
        merging.add(encode(part))
        merged = merging.merged(save_id=SAVE_ID, checkpoint_id=URL, is_whole=False)
        infos = {index.fqn: info for index, info in load_metadata(merged.metadata, url=URL).storage_data.items()}
        for name in ("w", "v"):
            blocks = get_blocks(infos[name], nbytes)
            assert (blocks.size, len(blocks.crcs) // 8) == (64 * every, left)
            assert blocks.crc_between(0, nbytes, nbytes) == crc64nvme(data)
            if left:
                second = data[blocks.size : 2 * blocks.size]
                assert blocks.crc_between(blocks.size, 2 * blocks.size, nbytes) == crc64nvme(second)


def test_parts_of_another_save_and_second_ones_of_a_rank_are_refused() -> None:
    data = encode(part_of(0, 1, [other("step")]))
    known = merging_of([part_of(0, 1, [other("step")])])
    for merging, match in (
        (Merging("cd34", 1), "expected cd34 of 1"), (Merging(SAVE, 2), f"expected {SAVE} of 2"), (known, "there twice"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=match):
            merging.add(data)


# --- what is wrong --------------------------------------------------------------------------------

W = "model.w"


def _w(offsets: Sequence[int], sizes: Sequence[int], *, of: int = 4, dtype: torch.dtype = torch.float32) -> WriteItem:
    return tensor(W, [of], offsets, sizes, TensorProperties(dtype))


_REMEDY = "Remedy: see that ranks 0 to 1"
WRONG: dict[str, tuple[WriteItem, WriteItem, str]] = {
    "another shape": (
        _w([0], [2]), _w([2], [2], of=5),
        r"is torch.float32 of shape \(4,\) on rank 0, but torch.float32 of shape \(5,\) on rank 1",
    ),
    "another dtype": (
        _w([0], [2]), _w([2], [2], dtype=torch.int8), "torch.float32 of .* on rank 0, but torch.int8 of .* on rank 1",
    ),
    "no tensor": (other(W), plain(W, [4]), r"is no tensor on rank 0, but torch.float32 of shape .* on rank 1"),
    "outside": (_w([0], [2]), _w([2], [3]), r"outside of it: .*\(3,\) at \(2,\) of rank 1"),
    "dimensions": (_w([0], [2]), _w([2, 0], [2, 1]), "outside of it: .* of rank 1"),
    "overlap": (_w([0], [3]), _w([2], [2]), f"4 elements, its chunks have 5. {_REMEDY}"),
    "overlap beside a hole": (
        _w([0], [3], of=5), _w([2], [2], of=5), r"overlap: .*\(3,\) at \(0,\) and .*\(2,\) at \(2,\)",
    ),
    "hole": (_w([0], [1]), _w([2], [2]), f"4 elements, its chunks have 3. {_REMEDY}"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_what_does_not_fit_is_named_with_its_ranks(what: str) -> None:
    *written, match = WRONG[what]
    error = SaveProtocolError if what == "no tensor" else ShardingError
    with pytest.raises(error, match=f"'{W}' .*{match}") as caught:
        merge([part_of(rank, 2, [item]) for rank, item in enumerate(written)])
    assert what == "no tensor" or caught.value.fqn == W


def test_one_rank_may_save_a_part_of_a_tensor() -> None:
    parts = [part_of(0, 1, [_w([0], [1])])]
    assert_same(merge(parts), parts)


# --- what no rank would write ---------------------------------------------------------------------


def test_what_all_leave_to_others_is_spread_over_its_holders() -> None:
    leaves = [np.array(each, np.uint64) for each in ([3, 7, 8], [3, 7, 9], [7, 8, 2**64 - 1])]
    writes = [np.array(each, np.uint64) for each in ([1], [3], [])]
    found = assign(leaves, writes)
    assert sorted(itertools.chain(*found.values())) == [7, 8, 9, 2**64 - 1]
    assert found == {0: [7], 1: [9], 2: [8, 2**64 - 1]}
    assert assign(leaves[:1], [np.array([3, 7, 8], np.uint64)]) == {}
    assert assign([], []) == {}


# --- what it must say: DCP's objects, pickled by Python, checked one by one -----------------------------


def expected_of(parts: Sequence[Part], *, save_id: str, checkpoint_id: str) -> Metadata:
    """The metadata of all parts of a save, or an error as that of `Merging.merged`."""
    parts = sorted(parts, key=lambda part: part.rank)
    storage_data: dict[MetadataIndex, StorageInfo] = {}
    entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    wholes: dict[str, tuple[torch.Size, torch.dtype]] = {}
    paths: dict[str, tuple[str | int, ...]] = {}
    for item in (each for part in parts for each in part.written):
        fqn, data, index = item.index.fqn, item.tensor, item.index
        if data is not None and item.is_shard:
            _check_whole(wholes, fqn, data.size, data.properties.dtype)
        if index in storage_data:
            continue
        entry = entries.get(fqn)
        if data is None and entry is None:
            entries[fqn] = BytesStorageMetadata()
        elif data is not None and not isinstance(entry, BytesStorageMetadata):
            if entry is None:
                entry = entries[fqn] = TensorStorageMetadata(data.properties, data.size, [])
            _check_whole(wholes, fqn, data.size, data.properties.dtype)
            index = MetadataIndex(fqn, index.offset, len(entry.chunks))
            entry.chunks.append(data.chunk)
        else:
            raise SaveProtocolError(f"{fqn!r} is a tensor and something else")
        storage_data[index] = item.storage
    for part in parts:
        for name, path in (part.paths or {}).items():
            paths.setdefault(name, path)
    for fqn, entry in entries.items():
        if isinstance(entry, TensorStorageMetadata):
            _check_chunks(fqn, entry.size, entry.chunks, filled=parts[0].world_size > 1)
    return Metadata(
        entries,
        planner_data=None if all(part.paths is None for part in parts) else paths,
        storage_data=storage_data,
        storage_meta=StorageMeta(checkpoint_id=checkpoint_id, save_id=save_id),
        version=DCP_VERSION,
    )


def _check_whole(
    wholes: dict[str, tuple[torch.Size, torch.dtype]], fqn: str, size: torch.Size, dtype: torch.dtype
) -> None:
    if wholes.setdefault(fqn, (size, dtype)) != (size, dtype):
        raise ShardingError("different", fqn=fqn)


def _check_chunks(fqn: str, size: torch.Size, chunks: Sequence[ChunkStorageMetadata], *, filled: bool) -> None:
    if not all(len(chunk.offsets) == len(chunk.sizes) == len(size) for chunk in chunks):
        raise ShardingError("dimensions", fqn=fqn)
    for number, chunk in enumerate(chunks if size else []):
        if any(a + b > c for a, b, c in zip(chunk.offsets, chunk.sizes, size, strict=True)):
            raise ShardingError("outside", fqn=fqn)
        for before in chunks[:number]:
            boxes = zip(chunk.offsets, chunk.sizes, before.offsets, before.sizes, strict=True)
            is_nothing = 0 in (*chunk.sizes, *before.sizes)
            if not is_nothing and all(a < c + d and c < a + b for a, b, c, d in boxes):
                raise ShardingError("overlap", fqn=fqn)
    if filled and sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(size):
        raise ShardingError("holes", fqn=fqn)
