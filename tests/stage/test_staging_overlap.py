"""Saves in a row, through every kind of staging: each checkpoint is the state at its call, to the last bit."""

from __future__ import annotations

import subprocess
import sys
import zlib
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from dcp_s3 import S3Stager, S3StorageReader, S3StorageWriter
from dcp_s3.stage.handover import wait_for_saves
from tests.end_to_end.loads import assert_loads
from tests.end_to_end.states import DTYPES, assert_same, random_tensor
from tests.ranks import run_ranks
from tests.servers import S3Server
from tests.stage.making import PATIENCE, PROCESS, STAGERS, THREAD, Saver, UntilFile, WaitingPlanner

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


class _Job:
    """What a training has; DTensors where there are ranks."""

    def __init__(self, step: int) -> None:
        self.own, self.sharded = "rank 0", {}
        if dist.is_initialized():
            self.own, mesh = f"rank {dist.get_rank()}", init_device_mesh("cpu", (dist.get_world_size(),))
            for name, shape, placement in (
                ("rows", (7, 1000), Shard(0)),
                ("columns", (5, 9), Shard(1)),
                ("one row", (1, 4), Shard(0)),  # the second rank has nothing of it
            ):
                self.sharded[name] = distribute_tensor(torch.zeros(shape), mesh, [placement])
        self.tensors = {str(dtype): torch.zeros(5, 7, dtype=dtype) for dtype in DTYPES}
        self.tensors |= {"base": torch.zeros(60, 40), "large": torch.zeros(1_500_000)}  # 6 MB
        self.values: dict[str, Any] = {"list": [0, [0], {"x": 0}], "none": None}
        self.change(step)

    def change(self, step: int) -> None:
        """Everything, in place, to random bits that depend on names and step only."""
        for name, tensor in (self.tensors | self.sharded).items():
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            seed = zlib.crc32(f"{self.own}/{name}/{step}".encode())
            local.copy_(random_tensor(tuple(local.shape), local.dtype, seed))
        self.values["list"][0] = step
        self.values["list"][1][0] = step + 10
        self.values["list"][2]["x"] = step + 20
        self.values.update(text=f"step {step}", bytes=bytes([step]), number=step / 7)

    def state(self) -> dict[str, Any]:
        base = self.tensors["base"]
        views = {"columns": base[:, 1:3], "transposed": base.t(), "flat": base.view(-1)[7:19]}
        return {"sharded": self.sharded, self.own: {"tensors": self.tensors, "views": views, "values": self.values}}


def _leaves(state: dict[str, Any]) -> dict[str, Any]:
    flat, _ = flatten_state_dict(state)
    return {name: each.to_local() if isinstance(each, DTensor) else each for name, each in flat.items()}


def _assert_saved(url: str, step: int) -> None:
    """It loads, into another job with other values, as the state of that step."""
    state = _Job(100).state()
    dcp.load(state, storage_reader=S3StorageReader(url))
    assert_same(_leaves(state), _leaves(_Job(step).state()))


# --- slow saves ------------------------------------------------------------------------------------------


def _save_three(url: str, directory: str, stager_name: str, kind: AsyncCheckpointerType) -> None:
    """One after the other, all changed in between; each one's upload cannot go on before the next one waits for it."""
    job, stager = _Job(0), Saver(stager_name).stager
    rank = dist.get_rank() if dist.is_initialized() else 0
    go = [Path(directory, f"go-{step}-{rank}") for step in range(3)]
    uploads: list[Future[Any]] = []

    def wait() -> None:
        if uploads:
            assert not uploads[-1].done()
            go[len(uploads) - 1].touch()
        wait_for_saves()

    with mock.patch("dcp_s3.stage.stager.wait_for_saves", wait):
        for step in range(3):
            if step:
                job.change(step)
            answer: Any = dcp.async_save(
                job.state(),
                storage_writer=S3StorageWriter(f"{url}/{step}", settings={"part_size": "5MiB"}),
                planner=WaitingPlanner(UntilFile(go[step])),
                async_checkpointer_type=kind,
                async_stager=stager,
            )
            assert all(upload.done() for upload in uploads), "no save begins before the one before it has ended"
            if stager_name == "asynchronous":
                assert isinstance(answer, AsyncSaveResponse)
                answer.staging_completion.result(PATIENCE)
                answer = answer.upload_completion
            uploads.append(answer)
        job.change(3)
        go[-1].touch()
        for upload in uploads:
            upload.result(PATIENCE)
    for step in range(3):
        _assert_saved(f"{url}/{step}", step)
    if stager is not None:
        stager.close()


@pytest.mark.quick("blocking-1-PROCESS", "asynchronous-2-PROCESS", "writer-2-THREAD")
@pytest.mark.parametrize(
    ("world_size", "kind"),
    [(0, THREAD), (1, THREAD), (1, PROCESS), (2, THREAD), (2, PROCESS)],
    ids=["0-THREAD", "1-THREAD", "1-PROCESS", "2-THREAD", "2-PROCESS"],
)
@pytest.mark.parametrize("stager", STAGERS)
def test_three_saves_in_a_row_are_each_the_state_at_their_call(
    root: str, memory_server: S3Server, tmp_path: Path, stager: str, world_size: int, kind: AsyncCheckpointerType
) -> None:
    if world_size:
        run_ranks(world_size, _save_three, root, str(tmp_path), stager, kind)
    else:
        _save_three(root, str(tmp_path), stager, kind)


_SCRIPT = """
import sys, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from dcp_s3 import S3Stager, S3StorageWriter

if __name__ == "__main__":
    url, kind, rendezvous = sys.argv[1:]
    if kind == "PROCESS":
        dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=0, world_size=1)
    state = {"x": torch.arange(3_000_000), "y": {"z": torch.ones(3, dtype=torch.bfloat16), "epoch": 7}}
    dcp.async_save(
        state,
        storage_writer=S3StorageWriter(url),
        async_stager=S3Stager(asynchronous=True),
        async_checkpointer_type=AsyncCheckpointerType[kind],
    )
"""


@pytest.mark.timeout(360)
@pytest.mark.parametrize("kind", ["THREAD", "PROCESS"])
def test_a_script_may_end_right_after_an_asynchronous_save(
    root: str, memory_server: S3Server, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT)
    command = [sys.executable, "-W", "ignore", str(script), root, kind, str(tmp_path / "rendezvous")]
    ended = subprocess.run(command, timeout=300, check=False, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    expected = {"x": torch.arange(3_000_000), "y": {"z": torch.ones(3, dtype=torch.bfloat16), "epoch": 7}}
    assert_loads(root, expected)


def _work_on(tensor: torch.Tensor) -> None:
    """Many kernels in the default stream, for which the host does not wait."""
    for _ in range(50):
        tensor.add_(1)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("asynchronous", [False, True], ids=["blocking", "asynchronous"])
def test_a_cuda_state_is_that_of_the_call_while_the_gpu_goes_on(
    root: str, memory_server: S3Server, asynchronous: bool
) -> None:
    base = torch.zeros(2000, 3000, device="cuda")
    state = {"base": base, "t": base.t(), "strided": base[::3, 5:9], "narrow": base[:, 7], "cpu": torch.arange(100)}
    with S3Stager(asynchronous=asynchronous) as stager:
        for step in range(3):
            _work_on(base)  # still under way when it is staged
            answer: Any = dcp.async_save(state, storage_writer=S3StorageWriter(f"{root}/{step}"), async_stager=stager)
            if asynchronous:
                answer.staging_completion.result(PATIENCE)
                answer = answer.upload_completion
            _work_on(base)
            answer.result(PATIENCE)
            full = torch.full((2000, 3000), 100.0 * step + 50)
            parts = {"t": full.t(), "strided": full[::3, 5:9], "narrow": full[:, 7]}
            assert_loads(f"{root}/{step}", {"base": full, "cpu": torch.arange(100), **parts})
        staged: Any = stager.stage_now(state)
        assert staged["base"].is_pinned()
