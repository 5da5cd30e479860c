"""A tensor as it is stored: its frame is what torch.save writes, its blocks have checksums, its chunks cover it; and
where its bytes lie, by the beginning of what anybody wrote."""

from __future__ import annotations

import io
import itertools
import math
import random
import sys
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import astuple

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import example, given

from dcp_s3.format.archive import MAX_HEAD, compute_frame, parse_head
from dcp_s3.format.blocks import (
    MAX_BLOCK,
    MIN_BLOCK,
    Blocks,
    block_size,
    crcs_of_beginnings,
    cuts_between,
    pack_crcs,
    widen,
)
from dcp_s3.format.saved_entries import find_flaw
from dcp_s3.memory import Piece, crc64nvme
from tests import hostile
from tests.archives import old, oldest, rewritten, saved, zipped
from tests.end_to_end.states import DTYPES, bits, random_tensor
from tests.hostile import archive, plain, storage, stream, tensor, was_tripped
from tests.mutations import mutated


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


# --- blocks --------------------------------------------------------------------------------------------


_BLOCK = 64  # the smallest that is allowed: the pure functions know no other limit


def _record(data: bytes, ends: Sequence[int], block: int) -> Blocks:
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
@example(50_000_000)  # halves of it are aligned, and too large
def test_there_are_few_blocks_of_some_size(nbytes: int) -> None:
    size = block_size(nbytes)
    assert MIN_BLOCK <= size <= MAX_BLOCK
    assert size % 64 == 0
    assert size == MAX_BLOCK or -(-nbytes // size) <= 64


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


WRITERS: dict[str, Callable[[bytes], bytes]] = {
    "this torch": bytes, "old": old, "oldest": oldest, "zipfile": zipped,
    "aligned to pages": lambda data: rewritten(data, alignment=4096),
}  # fmt: skip


@pytest.mark.parametrize("shape", [(2, 3), (2**31,)], ids=["small", "8 GiB"])
def test_frames_of_our_own(shape: tuple[int, ...]) -> None:
    frame = compute_frame(torch.float32, torch.Size(shape))
    start = len(frame.header)
    head = parse_head(frame.header)
    assert head is not None
    assert astuple(head) == (start, start, frame.nbytes, torch.float32, shape)


@pytest.mark.parametrize("writer", WRITERS)
def test_the_head_is_enough_and_less_is_not(writer: str) -> None:
    data = WRITERS[writer](saved(torch.ones(3, 2)))
    head = parse_head(data)
    assert head is not None
    assert parse_head(data[: head.length]) == head
    step = 1 if head.length < 2000 else 37
    for length in range(0, head.length, step):
        assert parse_head(data[:length]) is None


_OTHER_ORDER = b"big" if sys.byteorder == "little" else b"little"


class Subclass(torch.Tensor):
    pass


REFUSED: dict[str, bytes] = {
    "nothing": b"",
    "old format": saved(torch.ones(3), _use_new_zipfile_serialization=False),
    "safetensors": b"\x30" + bytes(400),
    "a dict": saved({"a": 1}),
    "a sparse tensor": saved(torch.eye(3).to_sparse()),
    "a subclass": saved(torch.ones(3).as_subclass(Subclass)),
    "a lazy conjugate": saved(torch.ones(3, dtype=torch.complex64).conj()),
    "a strided view": saved(torch.ones(4, 4)[:, :2]),
    "compressed": zipped(saved(torch.ones(3)), zipfile.ZIP_DEFLATED),
    "another byte order": rewritten(saved(torch.ones(3)), changed={"byteorder": _OTHER_ORDER}),
    "no storage": rewritten(saved(torch.ones(3)), without=("data/0",)),
    "another storage": rewritten(saved(torch.ones(3)), changed={"data/1": b"abcd"}),
    "too many records": rewritten(saved(torch.ones(3)), changed={f"r{i}": b"x" for i in range(20)}),
    "no pickle first": zipped(rewritten(saved(torch.ones(3)))).replace(b"data.pkl", b"dota.pkl"),
    "code": archive(stream(hostile.call("tests.hostile", "trip", b"K\x01")), ("data/0", b"")),
    "beyond its storage": archive(stream(tensor(4, 0, plain((5,)), plain((1,)))), ("data/0", bytes(16))),
    "a short storage": archive(stream(tensor(4, 0, plain((4,)), plain((1,)))), ("data/0", bytes(12))),
    "before its storage": archive(stream(tensor(4, -1, plain((2,)), plain((1,)))), ("data/0", bytes(16))),
    "huge": archive(stream(tensor(4, 0, plain((2**40, 2**40)), plain((2**40, 1)))), ("data/0", bytes(16))),
    "a negative size": archive(stream(tensor(4, 0, plain((-2,)), plain((1,)))), ("data/0", bytes(16))),
    "a bool for a size": archive(stream(tensor(4, 0, plain((True,)), plain((1,)))), ("data/0", bytes(16))),
    "a storage alone": archive(stream(storage(4))),
}  # fmt: skip


def test_the_rest_is_refused() -> None:
    for label, data in REFUSED.items():
        assert parse_head(data) is None, label
        assert not was_tripped(), label
    assert not any(map(parse_head, hostile.ITEM_BOMBS.values()))


@given(st.sampled_from(list(WRITERS)).flatmap(lambda name: mutated(_SAMPLES[name], _SNIPPETS)))
def test_damaged_heads_are_refused_or_stay_within_bounds(data: bytes) -> None:
    head = parse_head(data)
    if head is None:
        return
    assert 0 < head.length <= min(len(data), MAX_HEAD)
    assert head.length <= head.raw_offset
    assert head.nbytes == math.prod(head.shape) * head.dtype.itemsize >= 0


_SNIPPETS = [
    b"PK\x03\x04", b"PK\x07\x08", b"PK\x01\x02", b"archive/data/0", b"K\x00", b"\xff\xff", b"\x8a\x01", b"tR", b"q\x00",
    b"ctorch\nFloatStorage\n", b"ctests.hostile\ntrip\n",
]  # fmt: skip
_SAMPLES = {name: write(saved(torch.ones(3, 2)))[:1200] for name, write in WRITERS.items() if "pages" not in name} | {
    "aligned to pages": bytes(WRITERS["aligned to pages"](saved(torch.ones(3, 2))))
}
