"""S3CheckpointManager loads: what torchtitan's options choose, what others wrote, what is on the local disk."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torchtitan.components.checkpointer import CheckpointManager

from dcp_s3 import errors, read_tensors
from dcp_s3.offline.copy import copy as download
from dcp_s3.offline.copy import copy as upload
from examples.torchtitan import Trainer
from tests.faulty import FaultyServer
from tests.frameworks.ranks import run_ranks
from tests.frameworks.titan import ROOT, Adapter, Run, config, steps_on_s3, train
from tests.memory_s3 import Fault
from tests.ranks import RankFailed


def go_back(directory: Path) -> tuple[Run, Run, Run]:
    first = train(directory, 6, async_mode="async")
    back = train(directory, 6, async_mode="async", load_step=2)
    with pytest.raises(errors.CheckpointNotFoundError, match="steps 2 to 6"):
        train(directory, 6, load_step=3)
    with pytest.raises(errors.CheckpointNotFoundError, match=r"load_step = 3.*no checkpoint under"):
        train(directory, 6, load_step=3, folder=f"{ROOT}-other")
    return first, back, train(directory, 6)


def test_a_run_that_goes_back_saves_its_steps_again(faulty: FaultyServer, tmp_path: Path) -> None:
    ((first, back, latest_one),) = run_ranks(1, go_back, tmp_path)
    assert back == replace(first, loaded_step=2)
    assert latest_one == replace(first, loaded_step=6)
    assert steps_on_s3() == [2, 4, 6]


def start_from_another_run(directory: Path) -> dict[str, Any]:
    base = train(directory, 4, last_save_model_only=True, export_dtype="bfloat16", async_mode="async_with_pinned_mem")
    found: dict[str, Any] = {"base": base}
    model = Trainer(config(folder=f"{ROOT}-2", initial_load_path=f"{ROOT}/step-4"), steps=0)
    model.train()
    found["model"] = {name: tensor.full_tensor() for name, tensor in model.model.state_dict().items()}
    weights = directory / "weights"
    weights.mkdir()
    save_file({name: 2 * tensor for name, tensor in found["model"].items()}, weights / "model.safetensors")
    from_hf = config(folder=f"{ROOT}-4", initial_load_in_hf=True)
    doubled = Trainer(from_hf, steps=0, sd_adapter=Adapter(str(weights)))
    doubled.train()
    found["doubled"] = {name: tensor.full_tensor() for name, tensor in doubled.model.state_dict().items()}
    everything = Trainer(
        config(
            folder=f"{ROOT}-3",
            initial_load_path=f"{ROOT}/step-2",
            initial_load_model_only=False,
            exclude_from_loading=["lr_scheduler", "dataloader"],
        ),
        steps=0,
    )
    everything.train()
    found["everything"] = (
        everything.step,
        everything.ntokens_seen,
        everything.lr_schedulers.state_dict(),
        everything.dataloader.dataset.number,
        len(everything.optimizers.optimizers[0].state),
    )
    with pytest.raises(errors.RestoreFailedError, match=r"step-5 failed on rank 0\s+Cause: CheckpointNotFound"):
        train(directory, 0, folder=f"{ROOT}-2", initial_load_path=f"{ROOT}/step-5")
    with pytest.raises(errors.RestoreFailedError, match=r"(?s)step-4 failed .*Missing key.*optimizer"):
        train(directory, 6)
    return found


def test_a_run_starts_from_another_one(faulty: FaultyServer, tmp_path: Path) -> None:
    (found,) = run_ranks(1, start_from_another_run, tmp_path)
    exported = read_tensors(f"{ROOT}/step-4", ["*"])
    assert {tensor.dtype for tensor in exported.values()} == {torch.bfloat16}
    assert exported.keys() == found["model"].keys()
    assert all(torch.equal(exported[name].float(), tensor) for name, tensor in found["model"].items())
    assert all(torch.equal(2 * exported[name].float(), tensor) for name, tensor in found["doubled"].items())
    step, tokens, schedule, number, states = found["everything"]
    assert (step, tokens, schedule, number) == (2, 2 * 4 * 16, {"last_epoch": 0}, 0)
    assert states == len(exported)
    assert found["base"].local_files == ()


def exchange(directory: Path) -> list[str]:
    ours = train(directory, 4, async_mode="async")
    stock = directory / "stock"
    download(f"{ROOT}/step-2", stock / "step-2")
    theirs = Trainer(
        CheckpointManager.Config(enable=True, folder=str(stock), interval=2, last_save_model_only=False), steps=4
    )
    theirs.train()
    theirs.checkpointer.close()
    assert theirs.loaded_step == 2
    upload(stock / "step-4", f"{ROOT}-2/step-4")
    back = train(directory, 4, folder=f"{ROOT}-2")
    assert back.loaded_step == 4
    return [ours.digest, theirs.digest(), back.digest]


def test_torchtitan_itself_reads_what_is_downloaded_and_writes_what_is_loaded_after_an_upload(
    faulty: FaultyServer, tmp_path: Path
) -> None:
    ((ours, theirs, back),) = run_ranks(1, exchange, tmp_path)
    assert ours == theirs == back


class Dying(Trainer):
    """SIGKILL after the save of step 4, as soon as it is durable on every rank."""

    def train_step(self, data: Any) -> None:
        if self.step == 5:
            self.checkpointer.maybe_wait_for_saving()
            dist.barrier()
            os.kill(os.getpid(), signal.SIGKILL)
        super().train_step(data)


def train_and_die(directory: Path) -> None:
    train(directory, 8, Dying, async_mode="async")


def test_a_save_that_is_only_on_the_local_disk_is_loaded_from_there(
    faulty: FaultyServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DCP_S3_DURABILITY", "local")
    monkeypatch.setenv("DCP_S3_SPILL_DIR", str(tmp_path / "spill"))
    monkeypatch.setenv("DCP_S3_SPILL_AFTER", "1s")
    monkeypatch.setenv("DCP_S3_RETRY_ATTEMPTS", "1")
    faulty.rule = lambda request: (
        Fault.error(503, "SlowDown") if request.method == "PUT" and "/step-4/" in request.key else None
    )
    with pytest.raises(RankFailed, match="exit code -9"):
        run_ranks(2, train_and_die, tmp_path / "first")
    assert 4 not in steps_on_s3()
    faulty.rule = lambda _: None
    first, second = run_ranks(2, train, tmp_path / "second", 6)
    assert first == second
    assert first.loaded_step == 4
