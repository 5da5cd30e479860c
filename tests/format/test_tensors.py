"""A tensor as it is stored: its frame is what torch.save writes, its blocks have checksums, its chunks cover it."""

from __future__ import annotations

import io
import itertools
import random
import resource
from collections.abc import Sequence

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from dcp_s3 import read_tensor
from dcp_s3.errors import CorruptCheckpointError
from dcp_s3.format.blocks import (
    MAX_BLOCK,
    MIN_BLOCK,
    Blocks,
    block_size,
    crcs_of_beginnings,
    cuts_between,
    get_raw_offset,
    pack_crcs,
    widen,
)
from dcp_s3.format.cover import find_flaw
from dcp_s3.format.framing import compute_frame
from dcp_s3.memory import Piece, crc64nvme
from tests.end_to_end.states import DTYPES, bits, random_tensor
from tests.offline.conftest import Saved
from tests.servers import S3Server

pytestmark = pytest.mark.servers("memory")


# --- frames ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*DTYPES, torch.uint16, torch.uint32, torch.uint64], ids=str)
def test_torch_load_reads_it_and_only_checksums_differ_from_torch_save(dtype: torch.dtype) -> None:
    for shape in [(), (0,), (3, 0, 2), (1,), (7, 9), (129, 33)]:
        tensor = random_tensor(shape, dtype)
        frame = compute_frame(dtype, torch.Size(shape))
        item = frame.header + bits(tensor) + frame.trailer
        assert len(item) == frame.length
        loaded = torch.load(io.BytesIO(item), weights_only=True)
        assert (loaded.dtype, loaded.shape, bits(loaded)) == (dtype, torch.Size(shape), bits(tensor))
        saved = io.BytesIO()
        torch.save(tensor, saved)
        differing = [i for i, (a, b) in enumerate(zip(item, saved.getvalue(), strict=True)) if a != b]
        # The zip CRC-32 of the data, in two places, and of the id record that is made from it.
        assert len(differing) <= 64
        assert not [i for i in differing if len(frame.header) <= i < len(frame.header) + frame.nbytes]


def test_a_large_shape_is_never_touched() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    frame = compute_frame(torch.float32, torch.Size([2**30]))  # 4 GiB
    assert frame.nbytes == 2**32
    assert len(frame.header) + len(frame.trailer) < 4096
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 2**10  # KiB


# --- blocks ----------------------------------------------------------------------------------------------


_BLOCK = 64  # the smallest that is allowed: the pure functions know no other limit


def _record(data: bytes, ends: Sequence[int], block: int) -> Blocks:
    """As a save makes it that sends ``data`` in pieces."""
    bounds = [0, *sorted(ends), len(data)]
    pieces = []
    for start, stop in itertools.pairwise(bounds):
        piece = Piece.of(data[start:stop], cuts=cuts_between(start, stop, block))
        pieces.append((piece.size, piece.checksum(), piece.cuts, piece.marks))
    return Blocks(block, pack_crcs(crcs_of_beginnings(pieces, block)), crc64nvme(data))


@st.composite
def _chunks(draw: st.DrawFn) -> tuple[bytes, list[int]]:
    data = random.Random(draw(st.integers(0, 9))).randbytes(draw(st.integers(1, 6 * _BLOCK)))
    ends = st.one_of(st.integers(0, len(data)), st.sampled_from(range(0, len(data) + 1, _BLOCK)))
    return data, draw(st.lists(ends, max_size=4))


@given(_chunks())
def test_the_record_does_not_depend_on_the_pieces(chunk: tuple[bytes, list[int]]) -> None:
    data, ends = chunk
    found = _record(data, ends, _BLOCK)
    assert found.is_for(len(data))
    assert found.crcs == pack_crcs(crc64nvme(data[:end]) for end in range(_BLOCK, len(data), _BLOCK))


@given(_chunks(), st.data())
def test_every_range_can_be_widened_to_one_with_a_checksum(chunk: tuple[bytes, list[int]], draw: st.DataObject) -> None:
    data, ends = chunk
    start = draw.draw(st.integers(0, len(data) - 1))
    stop = draw.draw(st.integers(start + 1, len(data)))
    checked = widen(start, stop, len(data), _record(data, ends, _BLOCK))
    assert checked.start <= start < stop <= checked.stop <= len(data)
    assert start - checked.start < _BLOCK
    assert checked.stop - stop < _BLOCK
    assert checked.crc == crc64nvme(data[checked.start : checked.stop])


@given(st.integers(1, 2**45))
def test_there_are_few_blocks_of_some_size(nbytes: int) -> None:
    size = block_size(nbytes)
    assert MIN_BLOCK <= size <= MAX_BLOCK
    assert size % 64 == 0
    assert size == MAX_BLOCK or -(-nbytes // size) <= 64


# --- parts of a tensor -----------------------------------------------------------------------------------

BOXES = {
    "first rows": ((0, 0), (3, 32768)),
    "rows in the middle": ((17, 0), (2, 32768)),
    "last row": ((47, 0), (1, 32768)),
    "all but one row": ((1, 0), (47, 32768)),
    "columns": ((10, 1000), (20, 31)),
    "an element": ((40, 5), (1, 1)),
}


@pytest.fixture
def sliced(s3: object, root: str) -> tuple[Saved, torch.Tensor]:
    """A tensor of 6 MiB in two parts and 64 blocks."""
    tensor = torch.arange(6 * 2**20 // 4, dtype=torch.int32).view(48, -1)
    return Saved(s3, root).save({"t": tensor}), tensor


@pytest.mark.parametrize("box", BOXES.values(), ids=list(BOXES))
def test_a_part_is_read_with_little_more_and_a_flipped_bit_in_it_is_found(
    memory_server: S3Server, sliced: tuple[Saved, torch.Tensor], box: tuple[tuple[int, int], tuple[int, int]]
) -> None:
    saved, tensor = sliced
    (row, column), (rows, columns) = box
    index = slice(row, row + rows), slice(column, column + columns)
    before = memory_server.handle.counters.bytes_out
    assert torch.equal(read_tensor(saved.url, "t", index), tensor[index])
    covering = 4 * (rows * 32768 if columns == 32768 else (rows - 1) * 32768 + columns)
    fetched = memory_server.handle.counters.bytes_out - before
    assert fetched < covering + 2 * block_size(tensor.nbytes) + 64 * 1024
    info = saved.info("t")
    start = info.offset + (get_raw_offset(info) or 0)
    for position in (row * 32768 + column, (row + rows - 1) * 32768 + column + columns - 1):
        saved.flip(info.relative_path, start + 4 * position)
        with pytest.raises(CorruptCheckpointError, match="'t'"):
            read_tensor(saved.url, "t", index)
        saved.flip(info.relative_path, start + 4 * position)


# --- chunks ----------------------------------------------------------------------------------------------


_PLACE = st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(0, 4), st.integers(0, 4))


@given(st.lists(_PLACE, max_size=5), st.booleans())
def test_any_boxes(boxes: list[tuple[int, int, int, int]], filled: bool) -> None:
    counts = np.zeros((4, 4), int)
    chunks = []
    for a, b, rows, columns in boxes:
        rows, columns = min(rows, 4 - a), min(columns, 4 - b)
        counts[a : a + rows, b : b + columns] += 1
        chunks.append(((a, b), (rows, columns)))
    is_right = bool((counts == 1).all() if filled else (counts <= 1).all())
    assert (find_flaw((4, 4), chunks, filled=filled) is None) == is_right


def test_scalars_and_empty_tensors() -> None:
    assert find_flaw((), [((), ())]) is None
    assert find_flaw((), []) == "has 1 elements, its chunks have 0"
    assert find_flaw((), [((), ()), ((), ())]) == "has 1 elements, its chunks have 2"
    assert find_flaw((0, 3), []) is None
    assert find_flaw((0, 3), [((0, 0), (0, 3)), ((0, 0), (0, 3))]) is None
