"""The Lightning strategy, with the real Lightning on gloo ranks and an in-memory S3 server.

The small training goes on bit by bit on any power of two of ranks.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import boto3
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.checkpoint import save
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.data import DataLoader, Dataset

from dcp_s3 import S3StorageWriter, copy, latest, list_checkpoints, verify
from dcp_s3.errors import SaveFailedError
from dcp_s3.integrations.lightning import CheckpointFiles, S3ModelParallelStrategy, find_url
from examples import lightning as example
from tests.end_to_end.states import assert_same
from tests.faulty import BUCKET, FaultyServer
from tests.frameworks.ranks import files_in, kill_in_save, run_example, run_ranks
from tests.killing import AtRequest
from tests.memory_s3 import Fault
from tests.preload import MODULES

MODULES.append("lightning.pytorch")  # imported once, by the process that ranks are forked from

ROOT = f"s3://{BUCKET}/run"
STEPS_PER_EPOCH = 4


class Numbers(Dataset[Tensor]):
    """The same for all ranks, so that the mean over 1, 2 or 4 ranks is exact."""

    def __len__(self) -> int:
        return 2 * STEPS_PER_EPOCH

    def __getitem__(self, index: int) -> Tensor:
        return torch.randn(8, generator=torch.Generator().manual_seed(index))


class Model(LightningModule):
    """FSDP2."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 5))
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if not isinstance(self.layers, FSDPModule):
            fully_shard(self.layers, mesh=self.device_mesh["data_parallel"])

    def forward(self, batch: Tensor) -> Tensor:
        return self.layers(batch)

    def training_step(self, batch: Tensor, number: int) -> Tensor:
        loss = self(batch).square().mean()
        self.log("loss", loss)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)}


@dataclass(frozen=True)
class Fitted:
    """What came of a run, on one rank."""

    state: dict[str, Tensor]  # parameters and the optimizer's state, whole
    losses: list[float]  # of its steps
    best: str  # as the ModelCheckpoint says
    last: str
    files: frozenset[str]  # all that lies in the working directory


@dataclass(frozen=True)
class Run:
    """One call of `Trainer.fit`; pickled."""

    dirpath: str
    epochs: int
    ckpt_path: str | None = None
    stock: bool = False  # by Lightning's own strategy
    ranks: int = 2
    checkpoint: dict[str, Any] = field(default_factory=lambda: {"save_last": True, "save_top_k": 1})


def make_trainer(run: Run) -> Trainer:
    """The trainer of a run, with a working directory of its own."""
    kind = ModelParallelStrategy if run.stock else S3ModelParallelStrategy
    strategy = kind(data_parallel_size=run.ranks, tensor_parallel_size=1)
    return Trainer(
        accelerator="cpu",
        devices=run.ranks,
        strategy=strategy,
        max_epochs=run.epochs,
        callbacks=[ModelCheckpoint(dirpath=run.dirpath, **run.checkpoint)],
        use_distributed_sampler=False,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def loader() -> DataLoader[Tensor]:
    return DataLoader(Numbers(), batch_size=2)


def whole_state(model: Model) -> dict[str, Tensor]:
    """Parameters, buffers and the optimizer's state, gathered on all ranks."""
    options = StateDictOptions(full_state_dict=True)
    state, optimizer = get_state_dict(model, model.trainer.optimizers, options=options)
    found = dict(state)
    for name, values in optimizer["state"].items():
        found.update({f"{name}.{key}": value for key, value in values.items()})
    return {name: value.clone() for name, value in found.items() if isinstance(value, Tensor)}


def fit_all(directory: Path, runs: list[Run]) -> list[Fitted]:
    """Fit one after the other, on each rank, in a working directory of the test's."""
    os.chdir(directory)
    found = []
    for run in runs:
        trainer, model = make_trainer(run), Model()
        trainer.fit(model, loader(), ckpt_path=run.ckpt_path)
        callback: Any = trainer.checkpoint_callback
        files = frozenset(files_in(directory))
        best, last = callback.best_model_path, callback.last_model_path
        found.append(Fitted(whole_state(model), model.losses, best, last, files))
    return found


def fit_and_fail(directory: Path) -> None:
    """Each run hears of its failure, of one epoch, after another one."""
    os.chdir(directory)
    for root, failed, raised in (("a", 1, 2), ("b", 3, 3)):
        trainer = make_trainer(Run(f"{ROOT}/{root}", 3, checkpoint={"save_top_k": 1}))
        with pytest.raises(SaveFailedError, match=rf"(?s)the save of step {STEPS_PER_EPOCH * failed} .*AccessDenied"):
            trainer.fit(Model(), loader())
        assert trainer.global_step == STEPS_PER_EPOCH * raised


def work_after_fit(directory: Path, run: Run) -> None:
    """What a trainer can do with checkpoints when it has fitted."""
    os.chdir(directory)
    trainer, model = make_trainer(run), Model()
    trainer.fit(model, loader())
    url, path = f"{run.dirpath}/after.ckpt", directory / "local.ckpt"
    trainer.save_checkpoint(url)
    assert CheckpointFiles().exists(url)
    before = trainer.predict(model, loader())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert all(map(torch.equal, before, trainer.predict(model, loader(), ckpt_path=url)))
    trainer.strategy.remove_checkpoint(url)
    assert not CheckpointFiles().exists(url)
    trainer.save_checkpoint(path)
    assert (path / "meta.pt").is_file()


# --- tests ----------------------------------------------------------------------------------------------


def committed(root: str) -> set[str]:
    return {info.name for info in list_checkpoints(root) if info.committed}


def name(epoch: int) -> str:
    """As ModelCheckpoint names the checkpoint after ``epoch`` epochs."""
    return f"epoch={epoch - 1}-step={STEPS_PER_EPOCH * epoch}.ckpt"


def assert_goes_on(whole: Fitted, later: Fitted) -> None:
    """A run that was interrupted has ended like one that was not."""
    assert later.losses == whole.losses[-len(later.losses) :]
    assert len(later.state) == 16  # 4 parameters, each with step and two moments
    assert_same(later.state, whole.state)


def test_a_run_goes_on_from_its_last_checkpoint_bit_by_bit(faulty: FaultyServer, tmp_path: Path) -> None:
    runs = [Run(f"{ROOT}/whole", 4), Run(ROOT, 2), Run(ROOT, 4, "last")]
    for whole, earlier, later in run_ranks(2, fit_all, tmp_path, runs):
        assert (earlier.best, earlier.last) == (f"{ROOT}/{name(2)}", f"{ROOT}/last.ckpt")
        assert (later.best, later.last) == (f"{ROOT}/{name(4)}", f"{ROOT}/last.ckpt")
        assert len(later.losses) == 2 * STEPS_PER_EPOCH
        assert_goes_on(whole, later)
        assert later.files == frozenset()
    assert committed(ROOT) == {name(4), "last.ckpt"}  # save_top_k=1: those before are removed
    assert verify(f"{ROOT}/last.ckpt").ok


@pytest.mark.parametrize(("ranks", "requests"), [(1, 25), (4, 30)])
def test_a_run_that_is_killed_in_a_save_goes_on_on_another_number_of_ranks(
    faulty: FaultyServer, tmp_path: Path, ranks: int, requests: int
) -> None:
    run = Run(ROOT, 9, checkpoint={"save_last": True, "save_top_k": -1})
    kill_in_save(faulty, AtRequest("PutObject", requests, applied=False), 2, tmp_path, fit_all, tmp_path, [run])
    epochs = len(committed(ROOT) - {"last.ckpt"})
    assert 0 < epochs < 9
    assert all(verify(f"{ROOT}/{each}").ok for each in committed(ROOT))

    whole = run_ranks(1, fit_all, tmp_path, [Run(f"{ROOT}/whole", 9, ranks=1)])[0][0]
    later = Run(ROOT, 9, latest(ROOT).url, ranks=ranks)
    for [found] in run_ranks(ranks, fit_all, tmp_path, [later]):
        assert len(found.losses) == (9 - epochs) * STEPS_PER_EPOCH
        assert_goes_on(whole, found)
    assert not [path for path in tmp_path.rglob("*") if "ckpt" in path.name or "s3:" in path.name]


def test_a_failed_save_is_raised_on_all_ranks_at_the_next_save_or_at_the_end_of_fit(
    faulty: FaultyServer, tmp_path: Path
) -> None:
    failing = (f"a/{name(1)}", f"b/{name(3)}")

    def refuse(request: Any) -> Fault | None:
        fails = request.operation == "PutObject" and any(each in request.key for each in failing)
        return Fault.error(403, "AccessDenied") if fails else None

    faulty.rule = refuse
    run_ranks(2, fit_and_fail, tmp_path)
    assert committed(f"{ROOT}/a") == set()
    assert committed(f"{ROOT}/b") == {name(2)}  # that it was to replace


def test_a_trainer_saves_loads_and_removes_after_fit(faulty: FaultyServer, tmp_path: Path) -> None:
    run_ranks(1, work_after_fit, tmp_path, Run(ROOT, 1, ranks=1))


def test_lightnings_own_strategy_goes_on_from_a_download_and_ours_from_a_copy(
    faulty: FaultyServer, tmp_path: Path
) -> None:
    download, own = tmp_path / "copy", tmp_path / "own"
    [[whole, _]] = run_ranks(1, fit_all, tmp_path, [Run(f"{ROOT}/whole", 6, ranks=1), Run(ROOT, 2, ranks=1)])
    copy(f"{ROOT}/last.ckpt", download)
    stock = Run(str(own), 4, str(download), stock=True, ranks=1, checkpoint={"save_last": True, "save_top_k": -1})
    run_ranks(1, fit_all, tmp_path, [stock])
    copy(own / "last.ckpt", f"{ROOT}/uploaded")
    [[back]] = run_ranks(1, fit_all, tmp_path, [Run(f"{ROOT}/back", 6, f"{ROOT}/uploaded", ranks=1)])
    assert len(back.losses) == 2 * STEPS_PER_EPOCH
    assert_goes_on(whole, back)


def test_the_checkpoint_that_a_run_began_from_stays(faulty: FaultyServer, tmp_path: Path) -> None:
    runs = [Run(ROOT, 1, ranks=1), Run(f"{ROOT}/other", 2, f"{ROOT}/{name(1)}", ranks=1)]
    run_ranks(1, fit_all, tmp_path, runs)
    assert committed(ROOT) == {name(1), "last.ckpt"}
    assert committed(f"{ROOT}/other") == {name(2), "last.ckpt"}


def test_paths_that_mean_s3_and_checkpoints_that_are_not_sharded() -> None:
    paths = ["s3://bucket/run/last.ckpt", Path("s3://bucket/run"), "s3::bucket/run/last.ckpt", "/data/run", None]
    last = "s3://bucket/run/last.ckpt"
    assert [find_url(path) for path in paths] == [last, "s3://bucket/run", last, None, None]
    with pytest.raises(ValueError, match="save_distributed_checkpoint=False"):
        S3ModelParallelStrategy(save_distributed_checkpoint=False)


def test_what_lightning_sees(faulty: FaultyServer) -> None:
    assert isinstance(ModelCheckpoint(dirpath=ROOT)._fs, CheckpointFiles)  # the private name that the strategy sets
    files, a, b, last = CheckpointFiles(), f"{ROOT}/{name(1)}", f"{ROOT}/{name(2)}", f"{ROOT}/last.ckpt"
    assert not files.exists(ROOT)
    assert files.ls(ROOT, detail=False) == []
    started = datetime.now(tz=timezone.utc)
    for url in (b, last):
        save({"w": torch.ones(1)}, storage_writer=S3StorageWriter(url))
    client = boto3.Session().client("s3", endpoint_url=faulty.s3.endpoint_url)
    client.put_object(Bucket=BUCKET, Key=f"run/{name(1)}/__0_0-0123456789abcdef.distcp", Body=b"left")
    assert files.exists(ROOT)
    assert files.isdir(ROOT)
    assert files.exists(last)
    assert not files.exists(a), "what is not committed"
    found = sorted(files.ls(ROOT, detail=False))
    assert [find_url(os.path.normpath(each)) for each in found] == [b, last]
    assert files.exists(found[0])
    assert files.modified(found[0]) >= started
    for missing in (a, f"{ROOT}/other"):
        with pytest.raises(FileNotFoundError):
            files.modified(missing)
    # What will be there: otherwise it would take another name for the next one.
    saves: Any = SimpleNamespace(will_hold=lambda url: {a: True, b: False}.get(url))
    assert [CheckpointFiles(saves).exists(url) for url in (a, b, last, f"{ROOT}/other")] == [True, False, True, False]


def test_the_example_goes_on_when_it_is_started_again(faulty: FaultyServer, tmp_path: Path) -> None:
    for epochs in (2, 3):
        options = ["--url", ROOT, "--epochs", str(epochs)]
        [output] = run_ranks(1, run_example, example.main, options, tmp_path)
        steps = 8 * epochs
        assert f"{steps} steps, best: {ROOT}/epoch={epochs - 1}-step={steps}.ckpt" in output
    assert committed(ROOT) == {"epoch=1-step=16.ckpt", "epoch=2-step=24.ckpt", "last.ckpt"}
    assert not (tmp_path / "s3:").exists()
