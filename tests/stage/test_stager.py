"""S3Stager: what is staged is the state, bit by bit, and nothing that happens to the original afterwards shows."""

from __future__ import annotations

import collections
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing._internal.two_tensor import TwoTensor

from dcp_s3 import S3Stager
from dcp_s3.errors import StagingError, StagingLimitError
from dcp_s3.stage.copier import Copier
from tests.end_to_end.states import assert_same, bits, every_kind, random_tensor
from tests.ranks import run_ranks

_PATIENCE_SECONDS = 30
_QUANTIZED = ("torch.quint8", "torch.qint8", "torch.qint32", "torch.quint4x2", "torch.quint2x4")
_ALL_DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
_PLAIN_DTYPES = [dtype for dtype in _ALL_DTYPES if str(dtype) not in _QUANTIZED]


def _stage(state: dict[str, Any], **options: Any) -> dict[str, Any]:
    staged = S3Stager(options or None).stage(state)
    assert isinstance(staged, dict)
    return staged


def _raw(dtype: torch.dtype, count: int = 8192) -> torch.Tensor:
    values = torch.arange(count).remainder(2 if dtype == torch.bool else 251).to(torch.uint8)
    return values.view(dtype)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Of a contiguous tensor, also of those dtypes that torch can do next to nothing with."""
    return torch.empty(0, dtype=torch.uint8).set_(
        tensor.untyped_storage(), tensor.storage_offset() * tensor.element_size(), (tensor.nbytes,), (1,)
    )


@pytest.mark.filterwarnings("ignore:ComplexHalf:UserWarning")
@pytest.mark.parametrize("dtype", _PLAIN_DTYPES, ids=str)
def test_every_dtype(dtype: torch.dtype) -> None:
    base = _raw(dtype)
    expected = _bytes(base).clone()
    staged = _stage({"all": base, "part": base[3:10], "scalar": base[5], "empty": base[:0]})
    _bytes(base).zero_()
    size = base.element_size()
    assert {tensor.dtype for tensor in staged.values()} == {dtype}
    assert torch.equal(_bytes(staged["all"]), expected)
    assert torch.equal(_bytes(staged["part"]), expected[3 * size : 10 * size])
    assert torch.equal(_bytes(staged["scalar"]), expected[5 * size : 6 * size])
    assert [tuple(tensor.shape) for tensor in staged.values()][1:] == [(7,), (), (0,)]


def _strided_dtype(dtype: torch.dtype) -> Any:
    return pytest.param(dtype, id=str(dtype))


@pytest.mark.filterwarnings("ignore:ComplexHalf:UserWarning")
@pytest.mark.parametrize("dtype", [_strided_dtype(dtype) for dtype in _PLAIN_DTYPES])
def test_a_sparse_view_of_every_dtype(dtype: torch.dtype) -> None:
    base = _raw(dtype)
    size = base.element_size()
    expected = _bytes(base).clone().view(-1, size)[::5].reshape(-1)
    staged = _stage({"every fifth": base[::5]})["every fifth"]
    _bytes(base).zero_()
    assert staged.dtype == dtype
    assert torch.equal(_bytes(staged), expected)


def test_every_kind_of_entry_survives_changes() -> None:
    state, expected = every_kind(), every_kind()
    expected["parameter"] = state["parameter"].detach().clone()
    staged = _stage(state)

    def spoil(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            value.untyped_storage().fill_(1)
        elif isinstance(value, dict):
            for entry in value.values():
                spoil(entry)
            value["added"] = 1
        elif isinstance(value, list):
            for entry in value:
                spoil(entry)
            value.append("added")

    spoil(state)
    assert_same(staged, expected)


def _quantized() -> torch.Tensor:
    return torch.quantize_per_channel(torch.ones(4, 3), torch.tensor([0.1] * 4), torch.tensor([0] * 4), 0, torch.qint8)


_APART: dict[str, Callable[[], torch.Tensor]] = {
    "coo": lambda: torch.tensor([[0.0, 2.0], [3.0, 0.0]]).to_sparse(),
    "csr": lambda: torch.tensor([[0.0, 2.0], [3.0, 0.0]]).to_sparse_csr(),
    "csc": lambda: torch.tensor([[0.0, 2.0], [3.0, 0.0]]).to_sparse_csc(),
    "bsr": lambda: torch.arange(16.0).view(4, 4).to_sparse_bsr((2, 2)),
    "hybrid": lambda: torch.arange(12.0).view(2, 3, 2).to_sparse(1),
}


@pytest.mark.parametrize("kind", _APART)
def test_sparse_tensors(kind: str) -> None:
    original, expected = _APART[kind](), _APART[kind]()
    staged = _stage({"s": original})["s"]
    values = original._values() if original.layout == torch.sparse_coo else original.values()
    values.fill_(9)
    assert staged.layout == expected.layout
    assert torch.equal(staged.to_dense(), expected.to_dense())
    for name in ("_indices",) if kind in ("coo", "hybrid") else ():
        getattr(original, name)().zero_()
        assert torch.equal(getattr(staged, name)(), getattr(expected, name)())


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_quantized_tensors() -> None:
    for dtype in (torch.qint8, torch.quint8, torch.qint32):
        original = torch.quantize_per_tensor(torch.arange(12.0), 0.5, 3, dtype)
        expected = original.int_repr().clone()
        staged = _stage({"q": original})["q"]
        original.copy_(torch.quantize_per_tensor(torch.zeros(12), 0.5, 3, dtype))
        assert (staged.dtype, staged.q_scale(), staged.q_zero_point()) == (dtype, 0.5, 3)
        assert torch.equal(staged.int_repr(), expected)
    staged = _stage({"q": _quantized()})["q"]
    assert torch.equal(staged.q_per_channel_scales(), _quantized().q_per_channel_scales())
    assert torch.equal(staged.dequantize(), _quantized().dequantize())


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_jagged_nested_tensors() -> None:
    original = torch.nested.nested_tensor([torch.ones(2), torch.arange(3.0)], layout=torch.jagged)
    staged = _stage({"n": original})["n"]
    original.values().zero_()
    assert [part.tolist() for part in staged.unbind()] == [[1, 1], [0, 1, 2]]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_strided_nested_tensors() -> None:
    original = torch.nested.nested_tensor([torch.ones(2), torch.arange(3.0)])
    staged = _stage({"n": original})["n"]
    assert [part.tolist() for part in staged.unbind()] == [[1, 1], [0, 1, 2]]


def test_meta_tensors_stay_what_they_are() -> None:
    staged = _stage({"m": torch.empty(3, 4, device="meta")})["m"]
    assert (staged.device.type, tuple(staged.shape)) == ("meta", (3, 4))


def test_lazy_views_and_parameters() -> None:
    base = torch.tensor([1 + 2j, 3 - 4j])
    state = {
        "conj": base.conj(),
        "neg": torch._neg_view(base),
        "both": torch._neg_view(base.conj()),
        "conj parameter": nn.Parameter(base.conj()),
        "parameter": nn.Parameter(torch.ones(3)),
        "buffer": nn.Buffer(torch.ones(3)),
    }
    expected = {name: value.detach().clone().resolve_conj().resolve_neg() for name, value in state.items()}
    staged = _stage(state)
    base.zero_()
    for name, value in expected.items():
        assert torch.equal(staged[name].resolve_conj().resolve_neg(), value), name
        assert not staged[name].requires_grad


class _Marked(torch.Tensor):
    pass


def test_subclasses_with_memory_of_their_own() -> None:
    original = torch.arange(5.0).as_subclass(_Marked)
    staged = _stage({"m": original})["m"]
    torch.Tensor.zero_(original)
    assert staged.tolist() == [0, 1, 2, 3, 4]


def test_wrappers_of_tensors() -> None:
    a, b = torch.arange(4.0), torch.ones(4)
    staged = _stage({"w": TwoTensor(a, b), "p": nn.Parameter(TwoTensor(a, b)), "a": a})
    a.zero_()
    b.zero_()
    for name in "wp":
        assert isinstance(staged[name], TwoTensor)
        assert (staged[name].a.tolist(), staged[name].b.tolist()) == ([0, 1, 2, 3], [1] * 4)
    staged["a"].fill_(7)
    assert staged["w"].a.tolist() == [7] * 4


# --- aliases, and where the bytes lie --------------------------------------------------------------------


def test_views_stay_aliased_to_each_other_and_not_to_the_original() -> None:
    base = torch.arange(24.0).view(4, 6)
    staged = _stage({"base": base, "row": base[1], "t": base.t(), "bytes": base.view(torch.uint8), "same": base})
    assert staged["same"] is staged["base"]
    staged["base"].fill_(5)
    assert staged["row"].tolist() == [5] * 6
    assert staged["t"].tolist() == [[5] * 4] * 6
    assert torch.equal(staged["bytes"].view(torch.float32), staged["base"])
    assert torch.equal(base, torch.arange(24.0).view(4, 6))


@pytest.mark.parametrize("order", [("w", "column"), ("column", "w")])
def test_a_column_stays_aliased_to_its_matrix(order: tuple[str, str]) -> None:
    w = torch.zeros(8, 100)
    entries = {"w": w, "column": w[:, 0]}
    staged = _stage({name: entries[name] for name in order})
    staged["w"].fill_(1)
    assert staged["column"].tolist() == [1] * 8


@pytest.mark.parametrize("count", [1000, 1_000_000])
@pytest.mark.parametrize("offset", [1, 3, 5])
def test_memory_that_is_not_aligned(count: int, offset: int) -> None:
    memory = bytearray(4 * count + 16)
    tensor = torch.frombuffer(memory, dtype=torch.float32, count=count, offset=offset)
    tensor.copy_(torch.arange(count))
    staged = _stage({"x": tensor, "part": tensor[3:9], "sparse": tensor[::5]})
    tensor.zero_()
    assert torch.equal(staged["x"], torch.arange(count).float())
    assert staged["part"].tolist() == list(range(3, 9))
    assert torch.equal(staged["sparse"], torch.arange(0, count, 5).float())
    assert staged["x"].data_ptr() % 4 == 0


@pytest.mark.parametrize("count", [1000, 1_000_000])
def test_two_storages_of_one_address(count: int) -> None:
    array = np.arange(count, dtype=np.float32)
    state = {"head": torch.from_numpy(array[:10]), "all": torch.from_numpy(array)}
    staged = _stage(state)
    assert_same(staged, state)


@pytest.mark.parametrize("count", [10, 5_000_000])
def test_a_small_view_of_a_large_storage_costs_the_view_only(count: int) -> None:
    base = torch.arange(count * 10)
    stager = S3Stager()
    staged = stager.stage({"part": base[count : 2 * count], "every": base[::100]})
    assert isinstance(staged, dict)
    assert stager._pool.size <= base.nbytes // 4 + 256
    assert torch.equal(staged["part"], base[count : 2 * count])
    assert torch.equal(staged["every"], base[::100])


def test_a_freed_storage_is_refused() -> None:
    tensor = torch.ones(100)
    tensor.untyped_storage().resize_(0)
    with pytest.raises(StagingError, match=r"'model.w'.*get_state_dict"):
        _stage({"model": {"w": tensor}})


# --- containers ------------------------------------------------------------------------------------------


class _Point(NamedTuple):
    x: torch.Tensor
    y: Any


class _Names(list[Any]):
    pass


class _Pair(tuple[Any, ...]):
    pass


class _Holder:
    def __init__(self, value: Any) -> None:
        self.value = value


def test_containers_keep_their_kind() -> None:
    ordered: Any = nn.Linear(2, 2).state_dict()
    lists: Any = collections.defaultdict(list, {"a": [torch.ones(1)]})
    names = _Names([torch.ones(2), 3])
    names.label = "kept"  # type: ignore[attr-defined]
    state: Any = {
        "ordered": ordered,
        "default": lists,
        "point": _Point(torch.ones(3), [torch.zeros(1)]),
        "names": names,
        "pair": _Pair((torch.ones(1), 2)),
        "max": torch.max(torch.ones(2, 2), 0),
        "set": {1, 2},
        1: {"int key": (torch.ones(1), ())},
    }
    staged = _stage(state)
    for name, value in state.items():
        assert type(staged[name]) is type(value), name
    assert list(staged["ordered"]) == list(ordered)
    assert staged["ordered"]._metadata == ordered._metadata
    assert staged["default"]["new"] == []
    assert staged["point"].x.tolist() == [1, 1, 1]
    assert staged["names"].label == "kept"
    ordered["weight"].zero_()
    lists["a"][0].zero_()
    state["point"].y[0].fill_(1)
    names[0].zero_()
    state["pair"][0].zero_()
    state["set"].add(3)
    assert staged["ordered"]["weight"].abs().sum() > 0
    assert staged["default"]["a"] == [torch.ones(1)]
    assert staged["point"].y[0].item() == 0
    assert staged["names"][0].tolist() == [1, 1]
    assert staged["pair"][0].item() == 1
    assert staged["set"] == {1, 2}


class _Twice(collections.namedtuple("_Twice", "a b")):
    def __new__(cls, both: Any) -> Any:
        return super().__new__(cls, both, both)


def test_a_named_tuple_with_a_constructor_of_its_own() -> None:
    staged = _stage({"t": _Twice(torch.ones(1))})
    assert type(staged["t"]) is _Twice


def test_shared_and_recursive_containers() -> None:
    shared = [torch.ones(2)]
    loop: list[Any] = [torch.ones(1)]
    loop.append(loop)
    through: dict[str, Any] = {"t": ()}
    through["t"] = (through, torch.ones(1))
    holder = _Holder(shared)
    staged = _stage({"a": shared, "b": {"c": shared}, "loop": loop, "through": through, "holder": holder})
    assert staged["a"] is staged["b"]["c"]
    assert staged["a"] is not shared
    assert staged["loop"][1] is staged["loop"]
    assert staged["through"]["t"][0] is staged["through"]
    assert staged["holder"].value is staged["a"]
    shared[0].zero_()
    assert staged["holder"].value[0].tolist() == [1, 1]


def test_objects_that_hold_tensors() -> None:
    holder, array = _Holder({"w": torch.ones(3)}), np.ones(3)
    staged = _stage({"h": holder, "n": array, "s": {holder.value["w"]}})
    holder.value["w"].zero_()
    array[:] = 0
    assert staged["h"].value["w"].tolist() == [1, 1, 1]
    assert staged["n"].tolist() == [1, 1, 1]
    assert staged["s"].pop().tolist() == [1, 1, 1]


def test_what_can_not_be_copied_is_named() -> None:
    with pytest.raises(StagingError, match=r"'model\.locks\.1' is a _thread\.lock .*Remedy"):
        _stage({"model": {"locks": [1, threading.Lock()]}})


def test_values_of_an_items_method_that_makes_new_tensors() -> None:
    class Lazy(dict[int, Any]):
        def items(self) -> Any:
            return ((key, torch.full((3,), float(key))) for key in self)

    staged = _stage({"lazy": Lazy.fromkeys(range(200))})
    assert [value.tolist() for value in dict.values(staged["lazy"])] == [[float(n)] * 3 for n in range(200)]


# --- random states ---------------------------------------------------------------------------------------


@st.composite
def _views(draw: st.DrawFn) -> torch.Tensor:
    base = draw(st.sampled_from(_BASES))
    dtype = draw(st.sampled_from([torch.uint8, torch.int16, torch.int32, torch.float64, torch.complex128]))
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


def _frozen(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone().resolve_conj()
    if isinstance(value, dict):
        return {key: _frozen(entry) for key, entry in value.items()}
    return [_frozen(entry) for entry in value] if isinstance(value, list) else value


@given(st.dictionaries(st.text(max_size=3), _trees, max_size=6))
def test_random_views_survive_bit_by_bit(state: dict[str, Any]) -> None:
    expected = _frozen(state)
    saved = [base.clone() for base in _BASES]
    staged = _stage(state)
    for base in _BASES:
        base.bitwise_not_()
    try:
        assert_same(staged, expected)
    finally:
        for base, before in zip(_BASES, saved, strict=True):
            base.copy_(before)


# --- limits, and the end ---------------------------------------------------------------------------------


def test_buffers_are_used_again_from_stage_to_stage() -> None:
    stager = S3Stager()
    addresses = []
    for step in range(4):
        staged: Any = stager.stage({"w": torch.full((100_000,), float(step))})
        assert bits(staged["w"]) == bits(torch.full((100_000,), float(step)))
        addresses.append(staged["w"].data_ptr())
        del staged
    assert len(set(addresses)) == 1


def test_too_large_a_state(tmp_path: Any) -> None:
    state = {"w": torch.arange(300_000.0), "b": torch.ones(3)}
    with pytest.raises(StagingLimitError):
        _stage(state, staging_limit="1MiB")
    assert_same(dict(_stage(state, staging_limit="1MiB", spill_dir=str(tmp_path))), state)


def test_a_closed_stager_stages_no_more() -> None:
    with S3Stager() as stager:
        kept: Any = stager.stage({"w": torch.ones(3)})
    stager.close()
    assert kept["w"].tolist() == [1, 1, 1]
    with pytest.raises(StagingError, match="closed"):
        stager.stage({"w": torch.ones(3)})


# --- in the background -----------------------------------------------------------------------------------


class _HeldUp:
    """The copy begins when `go` is set; `reached` tells that it is about to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go, self.reached = threading.Event(), threading.Event()
        copy = Copier.copy

        def wait(*arguments: Any) -> Any:
            self.reached.set()
            assert self.go.wait(_PATIENCE_SECONDS)
            return copy(*arguments)

        monkeypatch.setattr(Copier, "copy", wait)


@pytest.fixture
def held_up(monkeypatch: pytest.MonkeyPatch) -> _HeldUp:
    return _HeldUp(monkeypatch)


def _begin(stager: S3Stager, state: dict[str, Any]) -> Future[dict[str, Any]]:
    future = stager.stage(state)
    assert isinstance(future, Future)
    return future


def test_values_changed_after_stage_returned_do_not_show(held_up: _HeldUp) -> None:
    state = {"w": torch.ones(3), "list": [1, {"a": 2}], "object": _Holder(5)}
    with S3Stager(asynchronous=True) as stager:
        future = _begin(stager, state)
        state["list"].append(3)  # type: ignore[attr-defined]
        state["list"][1]["a"] = 9  # type: ignore[index]
        state["object"].value = 6  # type: ignore[attr-defined]
        state["new"] = 1
        assert not future.done()
        held_up.go.set()
        staged = future.result(_PATIENCE_SECONDS)
    assert (staged["list"], staged["object"].value, sorted(staged)) == ([1, {"a": 2}], 5, ["list", "object", "w"])


@pytest.mark.parametrize("change", [
    lambda w: w.add_(1), lambda w: w[3:5].zero_(), lambda w: w.detach().mul_(2), lambda w: w.copy_(w.clone()),
])  # fmt: skip
def test_a_change_in_place_while_it_is_staged_is_detected(held_up: _HeldUp, change: Callable[[Any], Any]) -> None:
    state = {"w": nn.Parameter(torch.ones(10)), "b": torch.ones(2)}
    with S3Stager(asynchronous=True) as stager:
        future = _begin(stager, state)
        with torch.no_grad():
            change(state["w"])
        held_up.go.set()
        with pytest.raises(StagingError, match=r"1 tensors were changed in place.*staging_completion"):
            future.result(_PATIENCE_SECONDS)
        assert _begin(stager, state).result(_PATIENCE_SECONDS)["b"].tolist() == [1, 1]
        assert stager._pool.in_use <= 1


@pytest.mark.parametrize("count", [10, 1_000_000], ids=["small", "large"])
def test_a_storage_that_is_freed_before_it_is_copied_fails_the_save(held_up: _HeldUp, count: int) -> None:
    state = {"w": torch.ones(count)}
    with S3Stager(asynchronous=True) as stager:
        future = _begin(stager, state)
        state["w"].untyped_storage().resize_(0)
        held_up.go.set()
        with pytest.raises(StagingError, match="freed before it was staged"):
            future.result(_PATIENCE_SECONDS)


def test_close_waits_for_the_copy(held_up: _HeldUp) -> None:
    stager = S3Stager(asynchronous=True)
    future = _begin(stager, {"w": torch.ones(3)})
    assert held_up.reached.wait(_PATIENCE_SECONDS)
    closer = threading.Thread(target=stager.close)
    closer.start()
    assert not future.done()
    assert closer.is_alive()
    held_up.go.set()
    closer.join(_PATIENCE_SECONDS)
    assert future.done()
    assert future.result()["w"].tolist() == [1, 1, 1]


def test_synchronize_waits_for_the_latest() -> None:
    with S3Stager(asynchronous=True) as stager:
        stager.synchronize_staging()
        future = _begin(stager, {"w": torch.ones(3)})
        stager.synchronize_staging()
        assert future.done()


def test_an_idle_stager_has_no_thread() -> None:
    stager = S3Stager(asynchronous=True)
    _begin(stager, {"w": torch.ones(3)}).result(_PATIENCE_SECONDS)
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while any(thread.name.startswith("dcp_s3-") for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert _begin(stager, {"w": torch.ones(3)}).result(_PATIENCE_SECONDS)["w"].tolist() == [1, 1, 1]


def _run(script: str) -> str:
    begin = "import time, torch\nfrom dcp_s3 import S3Stager\nstager = S3Stager(asynchronous=True)\n"
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", begin + script], timeout=100, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_a_process_ends_with_a_stager_that_was_never_closed() -> None:
    script = """
print(stager.stage({"w": torch.ones(3)}).result(30)["w"].tolist())
time.sleep(1)  # until the thread is idle; before, see the next test
"""
    assert _run(script) == "[1.0, 1.0, 1.0]\n"


@pytest.mark.soak
def test_a_process_ends_in_the_middle_of_a_copy() -> None:
    for _ in range(3):
        assert _run('w = torch.ones(50_000_000)\nstager.stage({"w": w})\nprint("end")') == "end\n"


# --- distributed tensors ---------------------------------------------------------------------------------


def _stage_distributed() -> None:
    from torch.distributed._shard.sharded_tensor import init_from_local_shards
    from torch.distributed._shard.sharded_tensor.shard import Shard as LocalShard

    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    full = torch.arange(7 * 4.0).view(7, 4)
    sharded = distribute_tensor(full.clone(), mesh, [Shard(0)])
    copied = distribute_tensor(full.clone(), mesh, [Replicate()])
    local = LocalShard.from_tensor_and_offsets(torch.full((2, 3), float(rank)), [2 * rank, 0], rank)
    old: Any = init_from_local_shards([local], 2 * ranks, 3)
    staged = _stage({"s": sharded, "r": copied, "p": nn.Parameter(sharded), "old": old})
    for tensor in (sharded, copied):
        tensor.to_local().zero_()
    local.tensor.fill_(-1)
    for name, source in (("s", sharded), ("r", copied), ("p", sharded)):
        assert isinstance(staged[name], DTensor)
        assert (staged[name].placements, staged[name].device_mesh) == (source.placements, mesh)
        assert torch.equal(staged[name].full_tensor(), full)
    assert staged["old"].local_shards()[0].tensor.tolist() == [[float(rank)] * 3] * 2
    assert staged["old"].size() == old.size()


@pytest.mark.parametrize("ranks", [1, 2])
def test_distributed_tensors(ranks: int) -> None:
    run_ranks(ranks, _stage_distributed)
