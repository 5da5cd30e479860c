"""Saves through every kind of staging: each checkpoint is the state at its call, to the last bit; staging that fails on
one rank fails the save on all; and failed saves give their copies back, whoever keeps what tells of them."""

from __future__ import annotations

import errno
import gc
import os
import subprocess
import sys
import threading
import weakref
import zlib
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from dcp_s3 import S3Stager, S3StorageReader, S3StorageWriter, errors
from dcp_s3.errors import StagingError
from dcp_s3.stage.handover import failed_staging, wait_for_saves
from tests.end_to_end.loads import assert_loads
from tests.end_to_end.states import DTYPES, assert_same, random_tensor
from tests.faulty import BUCKET, FaultyServer
from tests.memory_s3 import Fault
from tests.ranks import run_ranks
from tests.s3.waiting import until
from tests.servers import S3Server
from tests.stage.making import MIB, PATIENCE, WaitingPlanner, no_collector

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

ROOT = f"s3://{BUCKET}"
THREAD, PROCESS = AsyncCheckpointerType.THREAD, AsyncCheckpointerType.PROCESS
STAGERS = ["blocking", "asynchronous", "writer"]


class Saver:
    def __init__(
        self,
        staging: str,
        kind: AsyncCheckpointerType = THREAD,
        settings: dict[str, Any] | None = None,
        generations: int = 2,
    ) -> None:
        self._settings, self._kind = settings or {}, kind
        # The writer's own stager belongs to the process and its settings: the same one each time.
        asynchronous = staging == "asynchronous"
        self.stager = None if staging == "writer" else S3Stager(self._settings, asynchronous=asynchronous)
        if self.stager is not None:
            self.stager._pool.generations = generations

    def save(self, url: str, state: dict[str, Any], **options: Any) -> Future[Any]:
        """The future of the upload; it has been staged."""
        answer: Any = dcp.async_save(
            state,
            storage_writer=S3StorageWriter(url, settings=self._settings, overwrite=options.pop("overwrite", False)),
            async_stager=self.stager,
            async_checkpointer_type=self._kind,
            **options,
        )
        upload: Future[Any] = answer.upload_completion if isinstance(answer, AsyncSaveResponse) else answer
        return upload


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
        self.values: dict[str, Any] = {"list": [0, {"x": 0}], "none": None}
        self.change(step)

    def change(self, step: int) -> None:
        """Everything, in place, to random bits that depend on names and step only."""
        for name, tensor in (self.tensors | self.sharded).items():
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            seed = zlib.crc32(f"{self.own}/{name}/{step}".encode())
            local.copy_(random_tensor(tuple(local.shape), local.dtype, seed))
        self.values["list"][0] = self.values["list"][1]["x"] = step
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
            # A writer has its URL, or gets it with the save.
            writer = S3StorageWriter(None if step else f"{url}/0", settings={"part_size": "5MiB"})
            answer: Any = dcp.async_save(
                job.state(),
                checkpoint_id=f"{url}/{step}" if step else None,
                storage_writer=writer,
                planner=WaitingPlanner(partial(until, go[step].exists)),
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
        found = [upload.result(PATIENCE).storage_meta.checkpoint_id for upload in uploads]
    assert found == [f"{url}/{step}" for step in range(3)] or rank
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
def test_a_cuda_state_is_that_of_the_call(root: str, memory_server: S3Server, asynchronous: bool) -> None:
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


def _make_state(mebibytes: int = 4, value: float = 1.0) -> dict[str, Any]:
    """Of a name per rank: DCP would store what is on all ranks only once."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    parts = [torch.full((MIB // 4,), value + number) for number in range(mebibytes)]
    return {f"of rank {rank}": {"parts": parts, "epoch": 3}}


def _cases(directory: str, *, sent: bool) -> Iterator[tuple[Any, ...]]:
    """What fails on which rank with which words; with which settings, state and context; and a state that does not."""
    full, budget = {"staging_limit": "1MiB", "spill_dir": directory}, {"staging_limit": "3MiB"}
    full_disk = partial(mock.patch.object, os, "posix_fallocate", side_effect=OSError(errno.ENOSPC, "No space left"))
    uncopyable = {**_make_state(), "extra": {"lock": threading.Lock()}}
    unsendable = {**_make_state(), "extra": lambda: None}  # nobody pickles it
    for name, rank, words, settings, bad, breaks, size in (
        ("full disk", 1, "No space left", full, _make_state(), full_disk, 4),
        ("over budget", 1, "DCP_S3_STAGING_LIMIT", budget, _make_state(), nullcontext, 2),
        ("uncopyable", 0, "'extra.lock'", {}, uncopyable, nullcontext, 4),
        *[("unsendable", 0, "to the checkpoint process", {}, unsendable, nullcontext, 4)] * sent,
    ):
        yield name, rank, words, settings, bad, breaks, _make_state(size, value=5.0)


def _fail_on_one_rank(directory: str, staging: str, kind: AsyncCheckpointerType) -> bool:
    ranks, kept = dist.get_world_size(), []
    for name, rank, words, settings, bad, breaks, good in _cases(directory, sent=ranks > 1 and kind is PROCESS):
        failing = rank % ranks
        fails_here = dist.get_rank() == failing
        saver = Saver(staging, kind, settings if fails_here else {})
        state, good = (bad, good) if fails_here else (_make_state(), _make_state(value=5.0))
        kept.append(weakref.ref(next(own for key, own in state.items() if key.startswith("of rank"))["parts"][0]))
        # One rank hears of it from async_save, or from the upload's future what failed in the background.
        later = ranks > 1 or (staging == "asynchronous" and name != "uncopyable")
        with breaks() if fails_here else nullcontext():
            try:
                error = saver.save(f"{ROOT}/{name}-bad", state).exception(PATIENCE)
                assert later, name
            except StagingError as raised:
                assert not later, name
                error = raised
        if ranks > 1:
            assert isinstance(error, CheckpointException), f"{name}: {error!r}"
            failures = {failed: cause for failed, (cause, _) in error.failures.items()}
            assert set(failures) == {failing}, f"{name}: {failures}"
            error = failures[failing]
        assert type(error) is StagingError, f"{name}: {error!r}"
        assert words in str(error), f"{name}: {error}"
        saver.save(f"{ROOT}/{name}-good", good).result(PATIENCE)
        assert_loads(f"{ROOT}/{name}-good", good)
    del state, error, bad
    failures = {}
    gc.collect()
    return all(each() is None for each in kept)


@pytest.mark.quick("blocking-PROCESS-2", "asynchronous-PROCESS-2", "writer-PROCESS-1", "asynchronous-THREAD-1")
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", [THREAD, PROCESS], ids=lambda kind: str(kind.name))
@pytest.mark.parametrize("staging", STAGERS)
def test_staging_that_fails_on_one_rank_fails_the_save_on_all_and_the_next_is_right(
    faulty: FaultyServer, tmp_path: Path, staging: str, kind: AsyncCheckpointerType, ranks: int
) -> None:
    assert run_ranks(ranks, _fail_on_one_rank, str(tmp_path), staging, kind) == [True] * ranks
    keys = list(faulty.s3.objects(BUCKET))
    assert [key for key in keys if "-bad/" in key] == []
    assert sum(key.endswith("-good/.metadata") for key in keys) == 3 + (ranks > 1 and kind is PROCESS)


# --- saves that fail later -------------------------------------------------------------------------------

_ONCE = {"retry_attempts": 1, "part_size": "5MiB"}
_FAULTS = {
    "denied": Fault.error(403, "AccessDenied"),
    "reset": Fault.reset_request(1000),
    "exists": Fault.delay(0),  # planning fails
}


def _refuse(server: FaultyServer, fault: str, *, rank: int | None = None) -> None:
    name = "/__" if rank is None else f"/__{rank}_"
    server.rule = lambda request: (
        _FAULTS[fault]
        if request.operation in ("PutObject", "UploadPart") and request.key.startswith("bad/") and name in request.key
        else None
    )
    if fault == "exists":
        dcp.save({"w": torch.zeros(3)}, storage_writer=S3StorageWriter(f"{ROOT}/bad/step"))


def _fail_again_and_again(staging: str, kind: AsyncCheckpointerType, keep: bool) -> str:
    """Each save needs the one generation there is."""
    saver, kept = Saver(staging, kind, _ONCE, generations=1), []
    with no_collector():
        for number in range(4):
            future = saver.save(f"{ROOT}/bad/step", _make_state(12, value=float(number)))
            error = future.exception(PATIENCE)
            assert isinstance(error, CheckpointException), repr(error)
            if keep:
                kept.append((future, error))
            del future, error
        good = _make_state(12, value=77.0)
        saver.save(f"{ROOT}/good", good).result(PATIENCE)
    assert_loads(f"{ROOT}/good", good)
    return str(kept[0][1]) if keep else ""


@pytest.mark.quick("one rank", "both", "first of two")
@pytest.mark.parametrize(
    ("fault", "staging", "kind", "ranks", "failing", "keep"),
    [
        ("denied", "blocking", THREAD, 1, None, False), ("reset", "writer", THREAD, 1, None, True),
        ("exists", "asynchronous", THREAD, 1, None, True), ("denied", "blocking", THREAD, 2, None, True),
        ("denied", "asynchronous", THREAD, 2, 0, True), ("denied", "blocking", THREAD, 2, 1, True),
        ("denied", "asynchronous", PROCESS, 1, None, True), ("exists", "blocking", PROCESS, 1, None, True),
    ],
    ids=["one rank", "reset", "planning", "both", "first of two", "second of two", "process", "process that plans"],
)  # fmt: skip
def test_saves_that_fail_do_not_hold_up_the_next(
    faulty: FaultyServer, fault: str, staging: str, kind: AsyncCheckpointerType, ranks: int, failing: int | None,
    keep: bool,
) -> None:  # fmt: skip
    _refuse(faulty, fault, rank=failing)
    texts = run_ranks(ranks, _fail_again_and_again, staging, kind, keep)
    assert all("dcp_s3.errors." in text for text in texts if keep)


def test_a_state_whose_save_has_ended_is_refused() -> None:
    """Its tensors are empty: nobody may save those for the state."""
    staged: Any = S3Stager().stage({"w": torch.ones(3)})
    view = staged["w"][1:]
    staged.release()
    with pytest.raises(errors.StagingError, match="stage_now"):
        dcp.save(staged, storage_writer=S3StorageWriter(f"{ROOT}/x"))
    assert view.tolist() == [1, 1], "what somebody still looks at is not overwritten"


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_left_of_a_save_that_has_ended(faulty: FaultyServer, fails: bool) -> None:
    """Its metadata may have hundreds of MiB, and a training makes thousands of saves."""
    _refuse(faulty, "denied" if fails else "exists")
    writer = S3StorageWriter(f"{ROOT}/bad/step-1")
    saving: Any = dcp.async_save({"w": torch.ones(10)}, storage_writer=writer)
    assert (saving.exception(PATIENCE) is not None) == fails
    left = [weakref.ref(each) for each in (writer, saving)]
    del writer, saving
    until(lambda: gc.collect() >= 0 and not any(each() for each in left))  # its thread ends shortly after its future


def test_torchs_writer_raises_the_cause_and_leaves_no_half_of_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointException, match="no room") as failure:
        dcp.save(failed_staging(StagingError("no room")), storage_writer=dcp.FileSystemWriter(tmp_path))
    assert [type(cause) for cause, _ in failure.value.failures.values()] == [StagingError]
    assert not (tmp_path / ".metadata").exists()
