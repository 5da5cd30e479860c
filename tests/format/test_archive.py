"""Where a tensor's bytes lie, from the beginning of what torch.save wrote."""

from __future__ import annotations

import itertools
import math
import sys
import zipfile
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dcp_s3.format.archive import MAX_HEAD, ArchiveHead, HeadError, compute_frame, parse_head
from tests import hostile
from tests.archives import old, oldest, rewritten, saved, zipped
from tests.end_to_end.states import DTYPES, bits, random_tensor
from tests.hostile import archive, plain, storage, stream, tensor, was_tripped
from tests.mutations import mutated

ALL_DTYPES = [*DTYPES, torch.uint16, torch.uint32, torch.uint64]
SHAPES = [(), (0,), (3, 0, 2), (1,), (7, 9), (129, 33), (2, 1, 3, 1)]


def check_head(data: bytes, expected: torch.Tensor) -> ArchiveHead:
    head = parse_head(data)
    assert (head.dtype, head.shape) == (expected.dtype, tuple(expected.shape))
    assert data[head.raw_offset : head.raw_offset + head.nbytes] == bits(expected)
    return head


def reason(data: bytes) -> str:
    with pytest.raises(HeadError) as failure:
        parse_head(data)
    return str(failure.value)


# --- what is understood ---------------------------------------------------------------------------------

WRITERS: dict[str, Callable[[bytes], bytes]] = {
    "this torch": bytes, "old": old, "oldest": oldest, "zipfile": zipped,
    "aligned to pages": lambda data: rewritten(data, alignment=4096),
}  # fmt: skip


@pytest.mark.parametrize("writer", WRITERS)
def test_every_dtype(writer: str) -> None:
    for dtype, shape in itertools.product(ALL_DTYPES, SHAPES):
        value = random_tensor(shape, dtype)
        head = check_head(WRITERS[writer](saved(value)), value)
        assert head.length == head.raw_offset


@pytest.mark.parametrize("shape", [(2, 3), (2**31,)], ids=["small", "8 GiB"])
def test_frames_of_our_own(shape: tuple[int, ...]) -> None:
    frame = compute_frame(torch.float32, torch.Size(shape))
    head = parse_head(frame.header)
    assert (head.length, head.raw_offset, head.nbytes) == (len(frame.header), len(frame.header), frame.nbytes)
    assert (head.dtype, head.shape) == (torch.float32, shape)


@given(st.permutations([0, 1, 2, 3]), st.lists(st.integers(1, 3), min_size=4, max_size=4))
def test_only_contiguous_tensors_are_one_run_of_bytes(order: list[int], sizes: list[int]) -> None:
    value = random_tensor(tuple(sizes), torch.int32).permute(order)
    if value.is_contiguous():
        check_head(saved(value), value)
    else:
        assert "not contiguous" in reason(saved(value))


def test_a_view_and_a_parameter() -> None:
    whole = random_tensor((10, 4), torch.float64)
    data = saved(whole[3:5])
    head = check_head(data, whole[3:5])
    assert head.raw_offset == head.length + 3 * 4 * 8
    parameter = torch.nn.Parameter(torch.randn(3, 2))
    check_head(saved(parameter), parameter.detach())


@pytest.mark.parametrize("writer", WRITERS)
def test_the_head_is_enough_and_less_is_not(writer: str) -> None:
    data = WRITERS[writer](saved(torch.ones(3, 2)))
    head = parse_head(data)
    assert parse_head(data[: head.length]) == head
    step = 1 if head.length < 2000 else 37
    for length in range(0, head.length, step):
        with pytest.raises(HeadError):
            parse_head(data[:length])


# --- what is not ----------------------------------------------------------------------------------------

_OTHER_ORDER = b"big" if sys.byteorder == "little" else b"little"


class Subclass(torch.Tensor):
    pass


REFUSED: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "ends"),
    "old format": (saved(torch.ones(3), _use_new_zipfile_serialization=False), "no zip archive"),
    "safetensors": (b"\x30" + bytes(400), "no zip archive"),
    "a dict": (saved({"a": 1}), "no tensor"),
    "a sparse tensor": (saved(torch.eye(3).to_sparse()), "_rebuild_sparse_tensor"),
    "a subclass": (saved(torch.ones(3).as_subclass(Subclass)), "_rebuild_from_type_v2"),
    "a lazy conjugate": (saved(torch.ones(3, dtype=torch.complex64).conj()), "not an ordinary one"),
    "a strided view": (saved(torch.ones(4, 4)[:, :2]), "not contiguous"),
    "an expanded view": (saved(torch.ones(3, 1).expand(3, 4)), "not contiguous"),
    "compressed": (zipped(saved(torch.ones(3)), zipfile.ZIP_DEFLATED), "compressed"),
    "another byte order": (rewritten(saved(torch.ones(3)), changed={"byteorder": _OTHER_ORDER}), "byte order"),
    "no storage": (rewritten(saved(torch.ones(3)), without=("data/0",)), "ends within"),
    "another storage": (rewritten(saved(torch.ones(3)), changed={"data/1": b"abcd"}), "another storage"),
    "too many records": (
        rewritten(saved(torch.ones(3)), changed={f"r{i}": b"x" for i in range(20)}), "16 records"),
    "no pickle first": (zipped(rewritten(saved(torch.ones(3)))).replace(b"data.pkl", b"dota.pkl"), "not data.pkl"),
    "code": (archive(stream(hostile.call("tests.hostile", "trip", b"K\x01")), ("data/0", b"")), "tests.hostile.trip"),
    "beyond its storage": (archive(stream(tensor(4, 0, plain((5,)), plain((1,)))), ("data/0", bytes(16))), "larger"),
    "a short storage": (archive(stream(tensor(4, 0, plain((4,)), plain((1,)))), ("data/0", bytes(12))), "has 12 bytes"),
    "before its storage": (archive(stream(tensor(4, -1, plain((2,)), plain((1,))))), "without a shape"),
    "huge": (archive(stream(tensor(4, 0, plain((2**40, 2**40)), plain((2**40, 1)))), ("data/0", bytes(16))), "larger"),
    "a negative size": (archive(stream(tensor(4, 0, plain((-2,)), plain((1,))))), "without a shape"),
    "a bool for a size": (archive(stream(tensor(4, 0, plain((True,)), plain((1,))))), "without a shape"),
    "a storage alone": (archive(stream(storage(4))), "no tensor"),
}  # fmt: skip


@pytest.mark.parametrize("label", REFUSED)
def test_the_rest_is_refused_with_a_reason(label: str) -> None:
    data, expected = REFUSED[label]
    assert expected in reason(data)
    assert not was_tripped()


@pytest.mark.parametrize("label", hostile.ITEM_BOMBS)
def test_bombs(label: str) -> None:
    assert reason(hostile.ITEM_BOMBS[label])


@given(st.sampled_from(list(WRITERS)).flatmap(lambda name: mutated(_SAMPLES[name], _SNIPPETS)))
def test_damaged_heads_are_refused_or_stay_within_bounds(data: bytes) -> None:
    try:
        head = parse_head(data)
    except HeadError:
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
