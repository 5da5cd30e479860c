"""S3Stager: its limits, its end, its work in the background and on several ranks; and what is staged: the state, bit by
bit, of which nothing shows that happens to the original afterwards."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing._internal.two_tensor import TwoTensor

from dcp_s3 import S3Stager, S3StorageWriter, Settings
from dcp_s3.errors import SettingsError, StagingError
from dcp_s3.stage import stager as stager_module
from dcp_s3.stage.snapshot import Snapshot
from tests.end_to_end.loads import load
from tests.end_to_end.states import assert_same, random_tensor, sharded_tensors
from tests.faulty import BUCKET, FaultyServer
from tests.ranks import run_ranks
from tests.stage.making import PATIENCE, buffers_of, frozen, generations_in_use


class HeldUp:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go, self.reached = threading.Event(), threading.Event()
        copy = Snapshot.copy

        def wait(*arguments: Any) -> Any:
            self.reached.set()
            assert self.go.wait(PATIENCE)
            return copy(*arguments)

        monkeypatch.setattr(Snapshot, "copy", wait)


@pytest.fixture
def held_up(monkeypatch: pytest.MonkeyPatch) -> HeldUp:
    return HeldUp(monkeypatch)


# --- in the background -----------------------------------------------------------------------------------


def _begin(stager: S3Stager, state: dict[str, Any]) -> Future[dict[str, Any]]:
    future = stager.stage(state)
    assert isinstance(future, Future)
    return future


def test_values_changed_after_stage_returned_do_not_show_and_close_waits_for_the_copy(held_up: HeldUp) -> None:
    state = {"w": torch.ones(3), "list": [1, {"a": 2}], "object": SimpleNamespace(value=5)}
    stager = S3Stager(asynchronous=True)
    future = _begin(stager, state)
    state["list"].append(3)  # type: ignore[attr-defined]
    state["list"][1]["a"] = 9  # type: ignore[index]
    state["object"].value = 6  # type: ignore[attr-defined]
    state["new"] = 1
    assert held_up.reached.wait(PATIENCE)
    closer = threading.Thread(target=stager.close)
    closer.start()
    assert not future.done()
    assert closer.is_alive()
    held_up.go.set()
    closer.join(PATIENCE)
    assert future.done()
    staged = future.result()
    assert (staged["list"], staged["object"].value, sorted(staged)) == ([1, {"a": 2}], 5, ["list", "object", "w"])
    assert staged["w"].tolist() == [1, 1, 1]
    with pytest.raises(StagingError, match="closed"):
        stager.stage({"w": torch.ones(3)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.add_(1), "tensors were changed in place.*staging_completion"),
        (lambda w: w[3:5].zero_(), "changed in place"),
        (lambda w: w.untyped_storage().resize_(0), "freed before it was staged"),
    ],
)
def test_a_change_in_place_meanwhile_is_detected(held_up: HeldUp, change: Callable[[Any], Any], message: str) -> None:
    state = {"w": nn.Parameter(torch.ones(10)), "b": torch.ones(2)}
    with S3Stager(asynchronous=True) as stager:
        future = _begin(stager, state)
        with torch.no_grad():
            change(state["w"])
        held_up.go.set()
        with pytest.raises(StagingError, match=message):
            future.result(PATIENCE)
        assert _begin(stager, {"b": state["b"]}).result(PATIENCE)["b"].tolist() == [1, 1]
        assert generations_in_use(stager._pool) <= 1


def test_where_no_thread_can_be_started_the_other_ranks_learn_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with S3Stager(asynchronous=True) as stager:
        monkeypatch.setattr(threading.Thread, "start", mock.Mock(side_effect=RuntimeError("can't start new thread")))
        monkeypatch.setattr(stager_module, "world_size", lambda: 2)
        staged: Any = _begin(stager, {"w": torch.ones(3)}).result(PATIENCE)
    assert "can't start new thread" in str(staged.error)


def _stage_distributed() -> None:
    mesh, full = init_device_mesh("cpu", (2,)), torch.arange(28.0).view(7, 4)
    given, by_spec = sharded_tensors(lambda seed, *shape: random_tensor(shape, torch.float32, seed))
    state = {"p": nn.Parameter(distribute_tensor(full, mesh, [Shard(0)])), "given": given, "by_spec": by_spec}

    def parts(state: Any) -> list[torch.Tensor]:
        shards = [*state["given"].local_shards(), *state["by_spec"].local_shards()]
        return [state["p"].to_local().detach(), *(shard.tensor for shard in shards)]

    before = [part.clone() for part in parts(state)]
    staged = S3Stager().stage_now(state)
    for part in parts(state):
        part.zero_()
    assert_same(parts(staged), before)
    assert isinstance(staged["p"], DTensor)
    assert (staged["p"].placements, staged["p"].device_mesh, staged["p"].shape) == ((Shard(0),), mesh, full.shape)
    assert (staged["given"].size(), staged["by_spec"].size()) == (given.size(), by_spec.size())


def test_distributed_tensors() -> None:
    run_ranks(2, _stage_distributed)


# --- settings -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "expected"),
    [("64GiB", 64 * 2**30), ("12.5 %", 0.125), ("1.0", 1.0), ("", None), *((bad, "") for bad in ("0", "150%", "1.5"))],
)
def test_forms_of_the_limit(monkeypatch: pytest.MonkeyPatch, value: str, expected: int | float | str | None) -> None:
    monkeypatch.setenv("DCP_S3_STAGING_LIMIT", value)
    if expected == "":
        with pytest.raises(SettingsError, match=f"DCP_S3_STAGING_LIMIT.*'{value}'.*expected"):
            S3Stager()
        return
    found = Settings().staging_limit
    assert (found, type(found)) == (expected, type(expected))  # 1.0 is all of the memory, 1 would be a byte


def test_a_fraction_is_measured_and_shared_by_the_ranks_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stager_module, "measure_available", lambda: 80 * 2**20)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert S3Stager({"staging_limit": "50%"})._pool.limit == 10 * 2**20

    monkeypatch.setattr(stager_module, "measure_available", mock.Mock(side_effect=OSError("not Linux")))
    assert S3Stager({"staging_limit": "8MiB"})._pool.limit == 8 * 2**20
    assert S3Stager()._pool.limit is None
    with pytest.raises(OSError, match="not Linux"):
        S3Stager({"staging_limit": 0.5})


def _targets() -> dict[str, torch.Tensor]:
    mesh, plain = init_device_mesh("cpu", (2,)), torch.zeros(600, 500)
    targets = {"plain": plain, "strided": torch.zeros(500, 600).t(), "cast": plain.double(), "small": torch.zeros(5, 3)}
    return {**targets, "replicated": distribute_tensor(plain, mesh, [Replicate()])}


def _save_and_load(url: str) -> None:
    """Of DTensors each state dict has its own, as that of FSDP; only their versions are those of the parameter."""
    old = {kind: torch.ones_like(target, dtype=torch.float32) for kind, target in _targets().items()}
    dcp.save(old, storage_writer=S3StorageWriter(f"{url}/old"))
    for kind, target in _targets().items():
        parameter = nn.Parameter(target)
        loss = (parameter * parameter).sum()
        with pytest.MonkeyPatch.context() as patch, S3Stager(asynchronous=True) as stager:
            held_up = HeldUp(patch)
            writer = S3StorageWriter(f"{url}/new")
            saved: Any = dcp.async_save({kind: parameter.detach()}, storage_writer=writer, async_stager=stager)
            try:
                load({kind: parameter.detach()}, f"{url}/old")
            finally:
                held_up.go.set()
            with pytest.raises(CheckpointException) as failure:
                saved.upload_completion.result(PATIENCE)
        texts = [str(error) for error, _ in failure.value.failures.values()]
        assert len(texts) == 2
        assert all("tensors were changed in place" in text for text in texts), (kind, texts)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    dist.barrier()


def test_a_load_between_forward_and_backward_or_while_the_state_is_staged_is_an_error(faulty: FaultyServer) -> None:
    run_ranks(2, _save_and_load, f"s3://{BUCKET}/run")
    assert not [key for key in faulty.s3.objects(BUCKET) if key.startswith("run/new/")]


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
        plain = tensor.dequantize() if tensor.is_quantized else tensor if tensor.is_nested else tensor.to_dense()
        return [part.tolist() for part in plain.unbind()]

    original, expected = _APART[kind](), _APART[kind]()
    staged = S3Stager().stage_now({"s": original, "m": torch.empty(3, 4, device="meta")})
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
    staged = S3Stager().stage_now({"w": TwoTensor(a, b), "p": nn.Parameter(TwoTensor(a, b)), "a": a, "m": marked})
    for tensor in (a, b, marked):
        torch.Tensor.zero_(tensor)
    for name in "wp":
        assert isinstance(staged[name], TwoTensor)
        assert (staged[name].a.tolist(), staged[name].b.tolist()) == ([0, 1, 2, 3], [1] * 4)
    assert staged["m"].tolist() == [0, 1, 2, 3, 4]
    staged["a"].fill_(7)
    assert staged["w"].a.tolist() == [7] * 4


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
    base, stager = torch.arange(count * 10), S3Stager()
    state = {"part": base[count : 2 * count], "every": base[::100]}
    assert_same(stager.stage_now(state), state)
    assert sum(buffer.size for buffer in buffers_of(stager._pool)) <= base.nbytes // 4 + 256


# --- containers ------------------------------------------------------------------------------------------


class _Point(NamedTuple):
    x: torch.Tensor
    y: Any


def test_containers_keep_their_kind_and_what_they_share() -> None:
    ordered: Any = nn.Linear(2, 2).state_dict()
    holder, array, shared = SimpleNamespace(value={"w": torch.ones(3)}), np.ones(3), [torch.ones(2)]
    state: Any = {
        "ordered": ordered,
        "default": collections.defaultdict(list, {"a": [torch.ones(1)]}),
        "point": _Point(torch.ones(3), [torch.zeros(1)]),
        "max": torch.max(torch.ones(2, 2), 0),
        1: {"int key": (torch.ones(1), ())},
        "shared": [shared, {"c": shared}, SimpleNamespace(value=shared)],
        "holder": holder,
        "array": array,
        "set": {holder.value["w"]},
    }
    staged = S3Stager().stage_now(state)
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
    freed = torch.ones(100)
    freed.untyped_storage().resize_(0)
    for state, message in (
        ({"locks": [1, threading.Lock()]}, r"'model\.locks\.1' is a _thread\.lock .*Remedy"),
        ({"w": freed}, r"'model.w'.*get_state_dict"),
    ):
        with pytest.raises(StagingError, match=message):
            S3Stager().stage_now({"model": state})


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
    expected, staged = frozen(state), S3Stager().stage_now(state)
    for base in _BASES:
        base.bitwise_not_()
    try:
        assert_same(staged, expected)
    finally:
        for base in _BASES:
            base.bitwise_not_()
