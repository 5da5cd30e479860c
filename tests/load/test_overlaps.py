"""Overlaps of chunks: what torch finds, in its order, without looking at all pairs."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from dcp_s3.load import boxes as overlaps
from dcp_s3.load.boxes import AnyBox as Box
from dcp_s3.load.boxes import Overlaps, find_overlaps
from tests.relying import in_torchs_order


def grid(shape: tuple[int, ...], parts: tuple[int, ...]) -> list[Box]:
    """The tensor cut into so many pieces in each dimension, as even as it goes (empty, if there are too many)."""
    cuts = [[(i * n // p, (i + 1) * n // p) for i in range(p)] for n, p in zip(shape, parts, strict=True)]
    return [
        (tuple(start for start, _ in cell), tuple(stop - start for start, stop in cell))
        for cell in itertools.product(*cuts)
    ]


def chunks(boxes: list[Box]) -> list[ChunkStorageMetadata]:
    return [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in boxes]


def by_torch(saved: list[Box], local: list[Box]) -> Overlaps:
    metadata = TensorStorageMetadata(TensorProperties(), torch.Size(()), chunks(saved))
    items = create_read_items_for_chunk_list("x", metadata, chunks(local))
    return Overlaps(
        [item.dest_index.index for item in items],  # type: ignore[misc]
        [item.storage_index.index for item in items],  # type: ignore[misc]
        [tuple(item.dest_offsets) for item in items],
        [tuple(item.storage_offsets) for item in items],
        [tuple(item.lengths) for item in items],
    )


def _rows(found: Overlaps) -> list[Any]:
    return in_torchs_order(list(zip(*vars(found).values(), strict=True)))


@st.composite
def chunkings(draw: st.DrawFn) -> tuple[list[Box], list[Box]]:
    """Saved and local chunks of a tensor: grids, and boxes anywhere; empty, equal and overlapping ones among them."""
    dims = draw(st.integers(0, 4))
    shape = tuple(draw(st.lists(st.integers(0, 9), min_size=dims, max_size=dims)))

    def some() -> list[Box]:
        boxes = grid(shape, tuple(draw(st.integers(1, 4)) for _ in shape)) if draw(st.booleans()) else []
        for _ in range(draw(st.integers(0, 5))):
            starts = [draw(st.integers(0, n)) for n in shape]
            sizes = [draw(st.integers(0, n - start)) for n, start in zip(shape, starts, strict=True)]
            boxes.append((tuple(starts), tuple(sizes)))
        if boxes and draw(st.booleans()):
            boxes += draw(st.lists(st.sampled_from(boxes), max_size=4))  # replicated
        return draw(st.permutations(boxes))

    return some(), some()


@pytest.mark.parametrize("block", [2**14, 4, 1])
@settings(max_examples=150)
@given(both=chunkings())
def test_random_chunks(block: int, both: tuple[list[Box], list[Box]]) -> None:
    saved, local = both
    expected = _rows(by_torch(saved, local))
    assert _rows(find_overlaps(saved, local)) == expected
    if saved and local and saved[0][0]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(overlaps, "_BLOCK_PAIRS", block)
            assert _rows(overlaps._join(saved, local)) == expected
        assert _rows(overlaps._compare_all(saved, local, len(saved[0][0]))) == expected


@pytest.mark.parametrize(
    ("shape", "saved", "local"),
    [
        ((640, 8), (80, 1), (80, 1)),
        ((640, 8), (80, 1), (79, 1)),
        ((80, 999), (80, 1), (80, 1)),
        ((80, 80), (80, 1), (1, 80)),
        ((96, 96), (12, 12), (9, 16)),
        ((24, 24, 24), (6, 5, 4), (4, 5, 6)),
        ((640,), (300,), (1,)),
        ((640,), (1,), (300,)),
        ((10,), (40,), (37,)),
    ],
    ids=str,
)
def test_grids(shape: tuple[int, ...], saved: tuple[int, ...], local: tuple[int, ...]) -> None:
    both = grid(shape, saved), grid(shape, local)
    assert _rows(find_overlaps(*both)) == _rows(by_torch(*both))


@pytest.mark.parametrize(
    ("shape", "saved", "local"),
    [
        ((3000, 9000), (3000, 1), (3000, 1)),
        ((9000, 3000), (1, 3000), (1, 3000)),
        ((900, 900), (45, 50), (50, 45)),
    ],
    ids=["the shorter dimension", "the inner dimension", "a grid"],
)
def test_far_fewer_than_all_pairs_are_compared(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], saved: tuple[int, ...], local: tuple[int, ...]
) -> None:
    compared = 0
    nonzero = overlaps.np.nonzero

    def counting(hits: Any) -> Any:
        nonlocal compared
        compared += hits.size
        return nonzero(hits)

    monkeypatch.setattr(overlaps.np, "nonzero", counting)
    left, right = grid(shape, saved), grid(shape, local)
    found = find_overlaps(left, right)
    assert sum(map(torch.Size.numel, map(torch.Size, found.lengths))) == shape[0] * shape[1]
    assert 0 < compared < len(left) * len(right) / 10


def test_other_numbers_of_dimensions_are_refused() -> None:
    with pytest.raises(ValueError, match="differ in their number of dimensions"):
        find_overlaps([((0,), (1,)), ((0, 0), (1, 1))], [((0,), (1,))])


def test_negative_sizes_are_treated_as_torch_does() -> None:
    saved: list[Box] = [((i,), (-1,)) for i in range(20)]
    local: list[Box] = [((0,), (i,)) for i in range(20)]
    assert find_overlaps(saved, local) == by_torch(saved, local)
