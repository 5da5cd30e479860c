"""A load counts as a change in place: autograd and staging, which look at tensors' versions, learn of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

from dcp_s3 import S3Stager, S3StorageReader, S3StorageWriter
from tests.faulty import BUCKET, FaultyServer
from tests.ranks import run_ranks
from tests.stage.making import PATIENCE, HeldUp

pytestmark = [pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"), pytest.mark.timeout(120)]

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
        assert all("1 tensors were changed in place" in text for text in texts), (kind, texts)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    dist.barrier()


def test_a_load_between_forward_and_backward_or_while_the_state_is_staged_is_an_error(faulty: FaultyServer) -> None:
    run_ranks(2, _save_and_load, f"s3://{BUCKET}/run")
    assert not [key for key in faulty.s3.objects(BUCKET) if key.startswith("run/new/")]
