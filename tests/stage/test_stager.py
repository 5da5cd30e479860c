"""S3Stager: its limits, its end, its work in the background, and on several ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from dcp_s3 import S3Stager, S3StorageReader, S3StorageWriter, Settings
from dcp_s3.errors import SettingsError, StagingError
from dcp_s3.stage import stager as stager_module
from tests.faulty import BUCKET, FaultyServer
from tests.ranks import run_ranks
from tests.stage.making import PATIENCE, HeldUp, Holder, generations_in_use, stage_once


@pytest.fixture
def held_up(monkeypatch: pytest.MonkeyPatch) -> HeldUp:
    return HeldUp(monkeypatch)


# --- in the background -----------------------------------------------------------------------------------


def _begin(stager: S3Stager, state: dict[str, Any]) -> Future[dict[str, Any]]:
    future = stager.stage(state)
    assert isinstance(future, Future)
    return future


def test_values_changed_after_stage_returned_do_not_show(held_up: HeldUp) -> None:
    state = {"w": torch.ones(3), "list": [1, {"a": 2}], "object": Holder(5)}
    with S3Stager(asynchronous=True) as stager:
        future = _begin(stager, state)
        state["list"].append(3)  # type: ignore[attr-defined]
        state["list"][1]["a"] = 9  # type: ignore[index]
        state["object"].value = 6  # type: ignore[attr-defined]
        state["new"] = 1
        assert not future.done()
        held_up.go.set()
        staged = future.result(PATIENCE)
    assert (staged["list"], staged["object"].value, sorted(staged)) == ([1, {"a": 2}], 5, ["list", "object", "w"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.add_(1), "tensors were changed in place.*staging_completion"),
        (lambda w: w[3:5].zero_(), "changed in place"),
        (lambda w: w.untyped_storage().resize_(0), "freed before it was staged"),
    ],
)
def test_a_change_in_place_while_it_is_staged_is_detected(
    held_up: HeldUp, change: Callable[[Any], Any], message: str
) -> None:
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


def test_close_waits_for_the_copy_and_what_is_copied_stays(held_up: HeldUp) -> None:
    stager = S3Stager(asynchronous=True)
    future = _begin(stager, {"w": torch.ones(3)})
    assert held_up.reached.wait(PATIENCE)
    closer = threading.Thread(target=stager.close)
    closer.start()
    assert not future.done()
    assert closer.is_alive()
    held_up.go.set()
    closer.join(PATIENCE)
    assert future.done()
    assert future.result()["w"].tolist() == [1, 1, 1]
    with pytest.raises(StagingError, match="closed"):
        stager.stage({"w": torch.ones(3)})


# --- distributed tensors ---------------------------------------------------------------------------------


def test_where_no_thread_can_be_started_the_other_ranks_learn_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with S3Stager(asynchronous=True) as stager:
        monkeypatch.setattr(threading.Thread, "start", refuse)
        monkeypatch.setattr(stager_module, "world_size", lambda: 2)
        staged: Any = _begin(stager, {"w": torch.ones(3)}).result(PATIENCE)
    assert "can't start new thread" in str(staged.error)


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
    staged = stage_once({"s": sharded, "r": copied, "p": nn.Parameter(sharded), "old": old})
    for tensor in (sharded, copied):
        tensor.to_local().zero_()
    local.tensor.fill_(-1)
    for name, source in (("s", sharded), ("r", copied), ("p", sharded)):
        assert isinstance(staged[name], DTensor)
        assert (staged[name].placements, staged[name].device_mesh) == (source.placements, mesh)
        assert torch.equal(staged[name].full_tensor(), full)
    assert staged["old"].local_shards()[0].tensor.tolist() == [[float(rank)] * 3] * 2
    assert staged["old"].size() == old.size()


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

    def fail() -> int:
        raise OSError("not Linux")

    monkeypatch.setattr(stager_module, "measure_available", fail)
    assert S3Stager({"staging_limit": "8MiB"})._pool.limit == 8 * 2**20
    assert S3Stager()._pool.limit is None
    with pytest.raises(OSError, match="not Linux"):
        S3Stager({"staging_limit": 0.5})


_SETTINGS = {"part_size": "5MiB"}


def _loaded(kind: str) -> torch.Tensor:
    """What both ranks read, into memory in which it can be received and into others."""
    if kind == "replicated":
        return distribute_tensor(torch.zeros(600, 500), init_device_mesh("cpu", (2,)), [Replicate()])
    return {
        "plain": torch.zeros(600, 500), "strided": torch.zeros(500, 600).t(), "cast": torch.zeros(600, 500).double(),
        "small": torch.zeros(5, 3),
    }[kind]  # fmt: skip


_KINDS = ["plain", "strided", "cast", "small", "replicated"]


def _save_and_load(url: str) -> None:
    """Of DTensors each state dict has its own, as that of FSDP; only their versions are those of the parameter."""
    dcp.save({kind: torch.ones_like(_loaded(kind)) for kind in _KINDS}, storage_writer=S3StorageWriter(f"{url}/old"))
    for kind in _KINDS:
        parameter = nn.Parameter(_loaded(kind))
        loss = (parameter * parameter).sum()
        with pytest.MonkeyPatch.context() as patch, S3Stager(asynchronous=True) as stager:
            held_up = HeldUp(patch)
            writer = S3StorageWriter(f"{url}/new")
            saved: Any = dcp.async_save({kind: parameter.detach()}, storage_writer=writer, async_stager=stager)
            try:
                reader = S3StorageReader(f"{url}/old", settings=_SETTINGS)
                dcp.load({kind: parameter.detach()}, storage_reader=reader)
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
