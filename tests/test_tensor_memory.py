"""Tensors as memory."""

from __future__ import annotations

import gc

import pytest
import torch

from dcp_s3.tensor_memory import is_direct, iterate_bytes, view_bytes
from tests.end_to_end.states import DTYPES, bits, every_kind, random_tensor


def tensors_in(state: object) -> list[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        return [state]
    if isinstance(state, dict):
        return [t for value in state.values() for t in tensors_in(value)]
    return [t for value in state for t in tensors_in(value)] if isinstance(state, list) else []


@pytest.mark.parametrize("chunk_size", [1, 16, 100, 10**9])
def test_the_bytes_are_those_of_the_contiguous_tensor(chunk_size: int) -> None:
    for tensor in tensors_in(every_kind()):
        tensor = tensor.detach()
        assert b"".join(map(bytes, iterate_bytes(tensor, chunk_size))) == bits(tensor)


def test_copies_are_bounded() -> None:
    tensor = random_tensor((64, 32, 8), torch.float32).permute(1, 0, 2)
    sizes = [view.nbytes for view in iterate_bytes(tensor, 4096)]
    assert max(sizes) <= 4096
    assert sum(sizes) == tensor.nbytes


def test_plain_memory_is_not_copied() -> None:
    tensor = torch.zeros(1000)
    (view,) = iterate_bytes(tensor, 16)
    tensor[3] = 1.0
    assert bytes(view) == bits(tensor)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_views_are_writable_and_keep_the_memory(dtype: torch.dtype) -> None:
    expected = random_tensor((9, 5), dtype, 3)
    tensor = torch.zeros(9, 5, dtype=dtype)
    view = view_bytes(tensor)
    view[:] = bits(expected)
    assert bits(tensor) == bits(expected)
    del tensor
    gc.collect()
    torch.full((9, 5), 1, dtype=torch.int64)
    assert bytes(view) == bits(expected)


def test_what_is_direct() -> None:
    base = torch.zeros(6, 4)
    assert is_direct(base)
    assert is_direct(base[2:4])
    assert is_direct(torch.tensor(1.0))
    assert not is_direct(base.t())
    assert not is_direct(base[:, 1:])
    assert not is_direct(torch.zeros(3, dtype=torch.complex64).conj())
    assert not is_direct(torch.zeros(3, device="meta"))
    assert not is_direct(torch.zeros(3, 3).to_sparse())
