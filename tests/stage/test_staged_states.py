"""What is staged is the state, bit by bit, and nothing that happens to the original afterwards shows."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils import _pytree as pytree

from dcp_s3 import S3Stager
from dcp_s3.errors import StagingError
from tests.end_to_end.states import assert_same, every_kind, random_tensor
from tests.stage.making import Holder, buffers_of, frozen, stage_once


@pytest.mark.filterwarnings("ignore:B?Complex:UserWarning")
def test_every_kind_is_apart_from_the_original() -> None:
    state = every_kind()
    expected, staged = frozen(state), stage_once(state)
    for tensor in filter(torch.is_tensor, pytree.tree_leaves(state)):
        tensor.untyped_storage().fill_(0)
    assert_same(staged, expected)
    assert not staged["parameter"].requires_grad


_APART: dict[str, Callable[[], torch.Tensor]] = {
    "coo": lambda: torch.eye(2).to_sparse(),
    "csr": lambda: torch.eye(2).to_sparse_csr(),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2), torch.arange(3.0)], layout=torch.jagged),
    "quantized": lambda: torch.quantize_per_tensor(torch.arange(12.0), 0.5, 3, torch.qint8),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", _APART)
def test_tensors_that_are_no_plain_memory(kind: str) -> None:
    def values(tensor: torch.Tensor) -> list[Any]:
        return [
            part.tolist()
            for part in (
                tensor.unbind()
                if tensor.is_nested
                else [tensor.dequantize() if tensor.is_quantized else tensor.to_dense()]
            )
        ]

    original, expected = _APART[kind](), _APART[kind]()
    staged = stage_once({"s": original, "m": torch.empty(3, 4, device="meta")})
    if kind == "quantized":
        original.copy_(torch.zeros(12))
    else:
        (original._values() if kind == "coo" else original.values()).fill_(9)
    assert values(staged["s"]) == values(expected) != values(original)
    assert (staged["m"].device.type, tuple(staged["m"].shape)) == ("meta", (3, 4)), "it stays what it is"


class _Marked(torch.Tensor):
    pass


def test_wrappers_of_tensors_and_subclasses_with_memory_of_their_own() -> None:
    a, b, marked = torch.arange(4.0), torch.ones(4), torch.arange(5.0).as_subclass(_Marked)
    staged = stage_once({"w": TwoTensor(a, b), "p": nn.Parameter(TwoTensor(a, b)), "a": a, "m": marked})
    for tensor in (a, b, marked):
        torch.Tensor.zero_(tensor)
    for name in "wp":
        assert isinstance(staged[name], TwoTensor)
        assert (staged[name].a.tolist(), staged[name].b.tolist()) == ([0, 1, 2, 3], [1] * 4)
    assert staged["m"].tolist() == [0, 1, 2, 3, 4]
    staged["a"].fill_(7)
    assert staged["w"].a.tolist() == [7] * 4


# --- aliases, and where the bytes lie --------------------------------------------------------------------


def test_the_same_view_twice_is_staged_once_and_no_copy_is_aliased_to_the_original() -> None:
    base, large = torch.arange(24.0).view(4, 6), torch.arange(1_000_000.0)
    state = {"base": base, "same": base, "row": base[1], "t": base.t(), "bytes": base.view(torch.uint8)}
    state |= {"large": large, "tied": large.detach(), "parameter": nn.Parameter(large)}
    state |= {"permuted": torch.arange(24.0).view(2, 3, 4).permute(2, 0, 1), "expanded": torch.arange(3.0).expand(4, 3)}
    expected = {name: value.detach().clone() for name, value in state.items()}
    stager = S3Stager()
    staged = stager.stage_now(state)
    base.zero_()
    large.zero_()
    assert_same(staged, expected)
    assert staged["same"] is staged["base"]
    assert staged["large"].data_ptr() == staged["tied"].data_ptr() == staged["parameter"].data_ptr()
    assert staged["t"].stride() == (1, 6), "what fills its memory is copied as it lies there"
    assert sum(buffer.size for buffer in buffers_of(stager._pool)) < large.nbytes + 2048


@pytest.mark.parametrize("count", [10, 5_000_000])
def test_a_small_view_of_a_large_storage_costs_the_view_only(count: int) -> None:
    base = torch.arange(count * 10)
    stager = S3Stager()
    staged: Any = stager.stage_now({"part": base[count : 2 * count], "every": base[::100]})
    assert sum(buffer.size for buffer in buffers_of(stager._pool)) <= base.nbytes // 4 + 256
    assert torch.equal(staged["part"], base[count : 2 * count])
    assert torch.equal(staged["every"], base[::100])


def test_a_freed_storage_is_refused() -> None:
    tensor = torch.ones(100)
    tensor.untyped_storage().resize_(0)
    with pytest.raises(StagingError, match=r"'model.w'.*get_state_dict"):
        stage_once({"model": {"w": tensor}})


# --- containers ------------------------------------------------------------------------------------------


class _Point(NamedTuple):
    x: torch.Tensor
    y: Any


def test_containers_keep_their_kind_and_what_they_share() -> None:
    ordered: Any = nn.Linear(2, 2).state_dict()
    holder, array, shared = Holder({"w": torch.ones(3)}), np.ones(3), [torch.ones(2)]
    state: Any = {
        "ordered": ordered,
        "default": collections.defaultdict(list, {"a": [torch.ones(1)]}),
        "point": _Point(torch.ones(3), [torch.zeros(1)]),
        "max": torch.max(torch.ones(2, 2), 0),
        1: {"int key": (torch.ones(1), ())},
        "shared": [shared, {"c": shared}, Holder(shared)],
        "holder": holder,
        "array": array,
        "set": {holder.value["w"]},
    }
    staged = stage_once(state)
    for name, value in state.items():
        assert type(staged[name]) is type(value), name
    assert list(staged["ordered"]) == list(ordered)
    assert staged["ordered"]._metadata == ordered._metadata
    assert staged["default"]["new"] == []
    one, other, holds = staged["shared"]
    assert one is other["c"] is holds.value is not shared
    for tensor in (ordered["weight"], state["default"]["a"][0], state["point"].x, holder.value["w"], shared[0]):
        tensor.zero_()
    array[:] = 0
    assert staged["ordered"]["weight"].abs().sum() > 0
    assert staged["default"]["a"] == [torch.ones(1)]
    assert staged["point"].x.tolist() == staged["holder"].value["w"].tolist() == staged["array"].tolist() == [1, 1, 1]
    assert staged["set"].pop().tolist() == [1, 1, 1]
    assert one[0].tolist() == [1, 1]


def test_what_can_not_be_copied_is_named() -> None:
    with pytest.raises(StagingError, match=r"'model\.locks\.1' is a _thread\.lock .*Remedy"):
        stage_once({"model": {"locks": [1, threading.Lock()]}})


# --- random states ---------------------------------------------------------------------------------------


@st.composite
def _views(draw: st.DrawFn) -> torch.Tensor:
    base = draw(st.sampled_from(_BASES))
    dtype = draw(st.sampled_from([torch.uint8, torch.int16, torch.float64, torch.complex128]))
    flat = base[draw(st.integers(0, 3)) * 16 :].view(dtype)
    shape = draw(st.lists(st.integers(0, 6), max_size=3))
    strides = [draw(st.integers(0, 40)) for _ in shape]
    reach = 1 + sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True) if length)
    offset = draw(st.integers(0, max(0, flat.numel() - reach)))
    view = flat.as_strided(shape, strides, flat.storage_offset() + offset)
    return view.conj() if dtype.is_complex and draw(st.booleans()) else view


_BASES = [random_tensor((20_000,), torch.uint8, seed) for seed in range(2)]
_trees = st.recursive(
    _views() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=3), inner, max_size=5),
    max_leaves=15,
)


@given(st.dictionaries(st.text(max_size=3), _trees, max_size=6))
def test_random_views_survive_bit_by_bit(state: dict[str, Any]) -> None:
    expected = frozen(state)
    saved = [base.clone() for base in _BASES]
    staged = stage_once(state)
    for base in _BASES:
        base.bitwise_not_()
    try:
        assert_same(staged, expected)
    finally:
        for base, before in zip(_BASES, saved, strict=True):
            base.copy_(before)
