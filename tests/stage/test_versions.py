"""A load counts as a change in place: autograd and staging, which look at tensors' versions, learn of it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing._internal.two_tensor import TwoTensor

from dcp_s3 import S3Stager, S3StorageReader, S3StorageWriter, errors
from dcp_s3.load.peers.exchange import Exchange
from tests.faulty import BUCKET, FaultyServer
from tests.ranks import run_ranks
from tests.servers import S3Server
from tests.stage.making import PATIENCE, HeldUp

pytestmark = [pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"), pytest.mark.timeout(120)]

_MODIFIED = "modified by an inplace operation"
LARGE = (700, 300)  # more than what is received through a buffer, and than an item that is decoded at once
SMALL = (5, 3)


_MAKERS: dict[str, Callable[[tuple[int, ...]], nn.Parameter]] = {
    "ordinary": lambda shape: nn.Parameter(torch.ones(shape)),
    "transposed": lambda shape: nn.Parameter(torch.ones(shape[::-1]).permute(tuple(range(len(shape))[::-1]))),
    "double": lambda shape: nn.Parameter(torch.ones(shape, dtype=torch.float64)),
}
_VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "itself": lambda parameter: parameter,
    "detached": lambda parameter: parameter.detach(),
    "part": lambda parameter: parameter.detach()[:1] if parameter.dim() else parameter.detach().view(1),
}


@pytest.mark.parametrize("writer", ["dcp_s3", "torch"])
def test_a_load_between_forward_and_backward_is_an_error_as_with_torch(
    memory_server: S3Server, root: str, s3: Any, bucket: str, tmp_path: Path, writer: str
) -> None:
    """However the bytes arrive, and whatever is given of the parameter."""
    parameters, stored, targets = {}, {}, {}
    for make, shape, view in itertools.product(_MAKERS, (SMALL, LARGE, ()), _VIEWS):
        name = f"{make} {shape} {view}"
        parameters[name] = _MAKERS[make](shape)
        targets[name] = _VIEWS[view](parameters[name])
        stored[name] = torch.rand_like(targets[name], dtype=torch.float32)
    if writer == "torch":
        dcp.save(stored, checkpoint_id=tmp_path)
        for path in tmp_path.iterdir():
            s3.upload_file(str(path), bucket, f"run/{path.name}")
    else:
        dcp.save(stored, storage_writer=S3StorageWriter(root))
    losses = {name: (parameter * parameter).sum() for name, parameter in parameters.items()}
    dcp.load(targets, storage_reader=S3StorageReader(root))
    for name, loss in losses.items():
        assert torch.equal(targets[name].detach(), stored[name].to(targets[name].dtype)), name
        with pytest.raises(RuntimeError, match=_MODIFIED):
            loss.backward()


def test_tensors_without_versions_and_wrappers(memory_server: S3Server, root: str) -> None:
    """Those of inference mode have none; others change in it as well. What is not loaded keeps its version."""
    dcp.save({"w": torch.ones(4), "v": torch.ones(4), "two": torch.ones(4)}, storage_writer=S3StorageWriter(root))
    ordinary, other, wrapper = torch.zeros(4), torch.zeros(4), TwoTensor(torch.zeros(4), torch.zeros(4))
    before = ordinary._version, wrapper._version, other._version
    with torch.inference_mode():
        made = torch.zeros(4)
        dcp.load({"w": made, "v": ordinary}, storage_reader=S3StorageReader(root))
    dcp.load({"two": wrapper}, storage_reader=S3StorageReader(root))
    assert made.tolist() == ordinary.tolist() == wrapper.a.tolist() == [1] * 4
    assert ordinary._version > before[0]
    assert wrapper._version > before[1]
    assert other._version == before[2]


def test_a_load_that_fails_counts(memory_server: S3Server, root: str, s3: Any, bucket: str) -> None:
    """Some of its bytes may have arrived."""
    dcp.save({"w": torch.ones(LARGE)}, storage_writer=S3StorageWriter(root))
    (data,) = (found["Key"] for found in s3.list_objects_v2(Bucket=bucket)["Contents"] if "distcp" in found["Key"])
    body = bytearray(s3.get_object(Bucket=bucket, Key=data)["Body"].read())
    body[len(body) // 2] ^= 1
    s3.put_object(Bucket=bucket, Key=data, Body=bytes(body))
    parameter = nn.Parameter(torch.zeros(LARGE))
    loss = (parameter * parameter).sum()
    with pytest.raises(CheckpointException):
        dcp.load({"w": parameter}, storage_reader=S3StorageReader(root))
    with pytest.raises(RuntimeError, match=_MODIFIED):
        loss.backward()


# --- while the state is staged ---------------------------------------------------------------------------


def _failure_of_save(
    state: dict[str, Any], monkeypatch: pytest.MonkeyPatch, run: str, change: Callable[[], object]
) -> BaseException:
    """Of a save to ``run``/new, of which staging is held up during ``change``."""
    held_up = HeldUp(monkeypatch)
    with S3Stager(asynchronous=True) as stager:
        saved = dcp.async_save(state, storage_writer=S3StorageWriter(f"{run}/new"), async_stager=stager)
        try:
            assert isinstance(saved, AsyncSaveResponse)
            change()
        finally:
            held_up.go.set()
        with pytest.raises((CheckpointException, errors.StagingError)) as failure:
            saved.upload_completion.result(PATIENCE)
    return failure.value


def _load_old(run: str, state: dict[str, Any]) -> None:
    dcp.load(state, storage_reader=S3StorageReader(f"{run}/old", settings={"part_size": "5MiB"}))


# --- several ranks, which read together what they share --------------------------------------------------


_KINDS = ["plain", "strided", "view", "cast", "replicated", "sharded"]


def _shared(kind: str) -> torch.Tensor:
    """What both ranks read, into memory in which it can be received and into others."""
    tensor = torch.zeros(600, 500)
    if kind == "strided":
        return torch.zeros(500, 600).t()
    if kind == "view":
        return torch.zeros(900, 500)[100:700]
    if kind in ("replicated", "sharded"):
        mesh = init_device_mesh("cpu", (2,))
        return distribute_tensor(tensor, mesh, [Replicate() if kind == "replicated" else Shard(1)])
    return tensor.double() if kind == "cast" else tensor


def _load_on_ranks() -> None:
    url = f"s3://{BUCKET}/run"
    dcp.save({kind: torch.ones(600, 500) for kind in _KINDS}, storage_writer=S3StorageWriter(url))
    for kind in _KINDS:
        parameter = nn.Parameter(_shared(kind))
        reader = S3StorageReader(url, settings={"part_size": "5MiB"})
        loss = (parameter * parameter).sum()
        with mock.patch.object(Exchange, "provide", autospec=True, side_effect=Exchange.provide) as shared:
            dcp.load({kind: parameter.detach()}, storage_reader=reader)
        assert shared.call_count == 1
        with pytest.raises(RuntimeError, match=_MODIFIED):
            loss.backward()
        loaded: Any = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        assert torch.equal(loaded, torch.ones_like(loaded)), kind


def test_shared_loads_count(faulty: FaultyServer) -> None:
    run_ranks(2, _load_on_ranks)


def _save_on_ranks() -> None:
    """Of DTensors each state dict has its own, as that of FSDP; only their versions are those of the parameter."""
    run = f"s3://{BUCKET}/run"
    dcp.save({kind: torch.ones(600, 500) for kind in _KINDS}, storage_writer=S3StorageWriter(f"{run}/old"))
    for kind in _KINDS:
        parameter = nn.Parameter(_shared(kind))

        def load(parameter: nn.Parameter = parameter, kind: str = kind) -> None:
            _load_old(run, {kind: parameter.detach()})

        def train(parameter: nn.Parameter = parameter) -> None:
            with torch.no_grad():
                parameter.add_(1)

        for change in (load, train):
            with pytest.MonkeyPatch.context() as patch:
                failure = _failure_of_save({kind: parameter.detach()}, patch, run, change)
            assert isinstance(failure, CheckpointException)
            texts = [str(error) for error, _ in failure.failures.values()]
            assert len(texts) == 2
            assert all("1 tensors were changed in place" in text for text in texts), (kind, texts)
    dist.barrier()


def test_a_shared_load_while_the_state_is_staged_fails_the_save(faulty: FaultyServer) -> None:
    run_ranks(2, _save_on_ranks)
    assert not [key for key in faulty.s3.objects(BUCKET) if key.startswith("run/new/")]
