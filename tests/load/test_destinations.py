"""What a state and a checkpoint may differ in: names, shapes, dtypes, and entries that lie in the same memory."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
from torch.testing._internal.two_tensor import TwoTensor

from dcp_s3 import S3LoadPlanner, S3StorageReader, S3StorageWriter, errors
from dcp_s3.errors import MissingKeysError
from dcp_s3.load.read import find_late, keeps_values
from tests.end_to_end.states import DTYPES, random_tensor
from tests.end_to_end.test_failures import failure_of_load
from tests.ranks import run_ranks
from tests.servers import S3Server

_LAYERS = [f"layers.{i}.{part}" for i in range(12) for part in ("weight", "bias")]


def _named(prefix: str) -> list[str]:
    return [prefix + name for name in _LAYERS]


@pytest.fixture
def saved(root: str, memory_server: Any) -> str:
    state = {"train": {"model": {name: torch.ones(2, 3) for name in _LAYERS}}, "epoch": 3}
    dcp.save(state, storage_writer=S3StorageWriter(f"{root}/step-1"))
    return root


def test_all_missing_names_are_in_one_error(saved: str) -> None:
    error = failure_of_load(
        f"{saved}/step-1", {"model": {name: torch.zeros(2, 3) for name in _LAYERS}}, S3LoadPlanner()
    )
    assert isinstance(error, errors.MissingKeysError)
    assert isinstance(error, (errors.EntryNotFoundError, RuntimeError))
    assert error.missing == _named("model.")
    assert sorted(error.unexpected) == sorted([*_named("train.model."), "epoch"])
    assert str(error).startswith("Missing key in checkpoint state_dict: model.layers.0.weight and 23 more (")
    assert f"{saved}/step-1" in str(error)
    assert "Remedy: " in str(error)
    assert len(str(error)) < 1000


def test_all_other_shapes_are_in_one_error(saved: str) -> None:
    state = {"train": {"model": {name: torch.zeros(3, 2) for name in _LAYERS}, "more": 1}}
    error = failure_of_load(f"{saved}/step-1", state, S3LoadPlanner())
    assert isinstance(error, errors.TensorMismatchError)
    assert len(error.shapes) == 24
    assert error.shapes[error.fqn] == ((2, 3), (3, 2))
    assert str(error).startswith(
        "Size mismatch between saved (2, 3) and current (3, 2) for train.model.layers.0.weight"
    )
    assert "and for 23 more: " in str(error)
    assert "also not saved: 1 name of the state (train.more)" in str(error)


def test_a_partial_load_may_lack_names_but_not_differ_in_shape(saved: str) -> None:
    partial = S3LoadPlanner(allow_partial_load=True)
    dcp.load({"new": torch.zeros(1)}, storage_reader=S3StorageReader(f"{saved}/step-1"), planner=partial)
    for other in (torch.zeros(1), 7):
        state = {"train": {"model": {_LAYERS[0]: other}}, "new": 1}
        error = failure_of_load(f"{saved}/step-1", state, S3LoadPlanner(allow_partial_load=True))
        assert isinstance(error, errors.TensorMismatchError)
        assert f"{saved}/step-1" in str(error)
        assert "not saved" not in str(error)


pytestmark = [
    pytest.mark.filterwarnings("ignore:Casting complex values to real:UserWarning"),
    pytest.mark.timeout(180),
]


def test_what_is_converted_comes_through_bounded_memory(
    memory_server: S3Server, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"w": torch.randn(3_000_000)}
    dcp.save(state, storage_writer=S3StorageWriter(root, settings={"part_size": "5MiB"}))
    sizes, empty = [0], torch.empty

    def record(*size: Any, **options: Any) -> torch.Tensor:
        if "pin_memory" in options:
            sizes.append(*size)
        return empty(*size, **options)

    monkeypatch.setattr(torch, "empty", record)
    target = {"w": torch.zeros(3_000_000, dtype=torch.bfloat16)}
    monkeypatch.setattr("dcp_s3.load.fetch.LOAD_BUFFERS", 4 * 2**20)
    dcp.load(target, storage_reader=S3StorageReader(root, settings={"concurrency": 4}))
    assert torch.equal(target["w"], state["w"].bfloat16())
    assert 2**19 < max(sizes) < 2**20 + 2**12, "a quarter of 4 MiB for each of 4 connections"


def test_one_warning_counts_and_names_what_was_narrowed(
    memory_server: S3Server, root: str, caplog: pytest.LogCaptureFixture
) -> None:
    state: dict[str, Any] = {"model": {f"w{n}": torch.randn(4) for n in range(9)}, "n": torch.tensor([2**40 + 1])}
    kept = {"same": torch.ones(3), "wider": torch.ones(3).half(), "exact": torch.ones(3, dtype=torch.int32)}
    dcp.save({**state, **kept}, storage_writer=S3StorageWriter(root))
    target = {
        "model": {f"w{n}": torch.zeros(4, dtype=torch.bfloat16) for n in range(9)},
        "n": torch.zeros(1, dtype=torch.float32),
        "same": torch.zeros(3),
        "wider": torch.zeros(3),
        "exact": torch.zeros(3, dtype=torch.float64),
    }
    dcp.load(target, storage_reader=S3StorageReader(root))
    (record,) = (record for record in caplog.records if record.name == "dcp_s3.load.read")
    message = record.getMessage()
    assert record.levelno == logging.WARNING
    for part in (root, "10 tensors", "9 from torch.float32 to torch.bfloat16 (model.w0, ",
                 "1 from torch.int64 to torch.float32 (n)", "S3StorageReader(allow_dtype_cast=False)"):  # fmt: skip
        assert part in message, message
    assert not [name for name in kept if f"({name}" in message or f", {name}" in message]
    assert torch.equal(target["model"]["w3"], state["model"]["w3"].bfloat16())  # type: ignore[index]


@pytest.mark.parametrize("other", [torch.float16, torch.float64])
def test_a_strict_load_changes_nothing(memory_server: S3Server, root: str, other: torch.dtype) -> None:
    dcp.save({"a": torch.ones(3), "w": torch.ones(3)}, storage_writer=S3StorageWriter(root))
    target = {"a": torch.full((3,), 7.0), "w": torch.full((3,), 7.0, dtype=other)}
    error = failure_of_load(root, target, allow_dtype_cast=False)
    assert isinstance(error, errors.TensorMismatchError)
    assert error.fqn == "w"
    assert "allow_dtype_cast" in str(error)
    assert (target["a"] == 7).all()


@given(st.sampled_from(DTYPES), st.sampled_from(DTYPES), st.integers(0, 1000))
def test_what_keeps_its_values_comes_back(saved: torch.dtype, target: torch.dtype, seed: int) -> None:
    """Bit for bit, but for the payloads of NaNs."""
    values = random_tensor((64,), saved, seed)
    if not keeps_values(saved, target):
        return
    back = values.to(target).to(saved)
    nan = values != values
    assert torch.equal(back != back, nan)
    assert torch.equal(_bytes(back)[~nan], _bytes(values)[~nan])


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8).view(len(tensor), -1)


_SETTINGS = {"part_size": "5MiB", "concurrency": 16}


def save(url: str, state: dict[str, Any]) -> None:
    dcp.save(state, storage_writer=S3StorageWriter(url, settings=_SETTINGS))


def load(url: str, state: dict[str, Any], planner: S3LoadPlanner | None = None) -> None:
    dcp.load(state, storage_reader=S3StorageReader(url, settings=_SETTINGS), planner=planner)


def test_tied_parameters_of_one_content_are_read_at_once(memory_server: S3Server, root: str) -> None:
    weight = torch.arange(1000.0)
    save(f"{root}/tied", {"in": weight, "out": weight})
    memory_server.handle.reset_counters()
    tied = torch.zeros(1000)
    load(f"{root}/tied", {"in": tied, "out": tied})
    assert torch.equal(tied, weight)
    assert memory_server.handle.counters.requests["GetObject"] == 2  # .metadata, and both in one


def test_tied_parameters_of_one_content_need_no_copy_although_their_chunks_are_columns() -> None:
    tied = torch.zeros(8, 8)

    def transfers(*crcs: tuple[str, int, int]) -> Any:
        return [
            SimpleNamespace(
                target=tied[:, at : at + 4], stored=SimpleNamespace(sizes=(8, 4), crc=crc),
                item=SimpleNamespace(dest_index=SimpleNamespace(fqn=fqn), dest_offsets=(0, at), lengths=(8, 4),
                                     storage_offsets=(0, 0)),
            )
            for fqn, at, crc in crcs
        ]  # fmt: skip

    assert find_late(transfers(("in", 0, 1), ("in", 4, 2), ("out", 0, 1), ("out", 4, 2))) == []
    assert find_late(transfers(("in", 0, 1), ("in", 4, 2), ("out", 0, 1), ("out", 4, 3))) == [2, 3]


def test_entries_that_share_no_memory_but_that_of_a_third() -> None:
    whole = torch.zeros(100)
    transfers: Any = [
        SimpleNamespace(
            target=target, stored=SimpleNamespace(sizes=target.shape, crc=number),
            item=SimpleNamespace(dest_index=SimpleNamespace(fqn=str(number)), dest_offsets=(0,),
                                 lengths=target.shape, storage_offsets=(0,)),
        )
        for number, target in enumerate((whole, whole[10:20], whole[50:60], torch.zeros(3)))
    ]  # fmt: skip
    assert find_late(transfers) == [1, 2]


def test_entries_that_interleave(memory_server: S3Server, root: str) -> None:
    saved = {"q": torch.full((8, 4), 1.0), "k": torch.full((8, 4), 2.0)}
    save(f"{root}/columns", saved)
    fused = torch.zeros(8, 8)
    load(f"{root}/columns", {"q": fused[:, :4], "k": fused[:, 4:]})
    assert torch.equal(fused, torch.cat([saved["q"], saved["k"]], dim=1))


def test_a_tensor_without_memory_of_its_own_is_loaded(memory_server: S3Server, root: str) -> None:
    save(f"{root}/wrapped", {"w": torch.arange(10.0), "x": torch.ones(3)})
    wrapped, plain = TwoTensor(torch.zeros(10), torch.zeros(10)), torch.zeros(3)
    load(f"{root}/wrapped", {"w": wrapped, "x": plain})
    assert wrapped.a.tolist() == wrapped.b.tolist() == list(range(10))
    assert torch.equal(plain, torch.ones(3))


@pytest.mark.servers("memory")
@pytest.mark.parametrize("part", [slice(None), slice(2**20, 2**21)], ids=["all", "a part"])
def test_of_what_entries_share_the_last_one_in_the_plan_stays(root: str, part: slice) -> None:
    saved = {name: torch.full((3 * 2**20,), value) for name, value in (("a", 1.0), ("b", 2.0), ("c", 3.0))}
    saved["b"] = saved["b"][part]
    save(f"{root}/apart", saved)
    for _ in range(6):
        shared, other = torch.zeros(3 * 2**20), torch.zeros(3 * 2**20)
        load(f"{root}/apart", {"b": shared[part], "a": shared, "c": other})  # DCP sorts the names
        expected = saved["a"].clone()
        expected[part] = 2.0
        assert torch.equal(shared, expected)
        assert torch.equal(other, saved["c"])


@pytest.mark.servers("memory")
def test_a_name_that_is_not_saved_is_found_by_the_one_that_it_is_tied_to(root: str) -> None:
    save(f"{root}/one", {"in": torch.arange(6.0)})
    tied = torch.zeros(6)
    load(f"{root}/one", {"out": tied, "in": tied}, planner=S3LoadPlanner())
    assert tied.tolist() == [0, 1, 2, 3, 4, 5]
    for other in (tied[1:], tied.view(2, 3), tied.view(torch.int32), tied.clone()):
        with pytest.raises(CheckpointException) as raised:
            load(f"{root}/one", {"out": other, "in": tied}, planner=S3LoadPlanner())
        assert isinstance(raised.value.failures[0][0], MissingKeysError)


@pytest.mark.servers("memory")
def test_shards_are_tied_too(root: str) -> None:
    save(f"{root}/one", {"in": torch.arange(8.0).view(2, 4)})
    assert run_ranks(3, _load_tied, f"{root}/one") == [[[0, 1, 2, 3]], [[4, 5, 6, 7]], []]


def _load_tied(url: str) -> list[Any]:
    """What a rank has got, the last one nothing."""
    tied, other = (distribute_tensor(torch.zeros(2, 4), init_device_mesh("cpu", (3,)), [Shard(0)]) for _ in range(2))
    load(url, {"out": tied, "in": tied}, planner=S3LoadPlanner())
    with pytest.raises(CheckpointException):
        load(url, {"out": other, "in": tied}, planner=S3LoadPlanner())
    return tied.to_local().tolist()
