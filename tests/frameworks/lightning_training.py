"""A small Lightning training that goes on bit by bit on any power of two of ranks."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import boto3
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.data import DataLoader, Dataset

from dcp_s3.errors import SaveFailedError
from dcp_s3.integrations.lightning import CheckpointFiles, S3ModelParallelStrategy
from tests.faulty import BUCKET
from tests.preload import MODULES

MODULES.append("lightning.pytorch")  # imported once, by the process that ranks are forked from

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
        found: Tensor = self.layers(batch)
        return found

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

    state: dict[str, Tensor]
    """Parameters and the optimizer's state, whole."""
    losses: list[float]
    """Of its steps."""
    best: str
    last: str
    """As the ModelCheckpoint says."""
    files: frozenset[str]
    """All that lies in the working directory."""


@dataclass(frozen=True)
class Run:
    """One call of `Trainer.fit`; pickled."""

    dirpath: str
    epochs: int
    ckpt_path: str | None = None
    stock: bool = False  # by Lightning's own strategy
    ranks: int = 2
    checkpoint: dict[str, Any] = field(default_factory=lambda: {"save_last": True, "save_top_k": 1})


def make_trainer(run: Run, *callbacks: Callback) -> Trainer:
    """The trainer of a run, with a working directory of its own."""
    kind = ModelParallelStrategy if run.stock else S3ModelParallelStrategy
    strategy = kind(data_parallel_size=run.ranks, tensor_parallel_size=1)
    return Trainer(
        accelerator="cpu",
        devices=run.ranks,
        strategy=strategy,
        max_epochs=run.epochs,
        callbacks=[ModelCheckpoint(dirpath=run.dirpath, **run.checkpoint), *callbacks],
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
    return [fit(run) for run in runs]


def fit(run: Run, *callbacks: Callback) -> Fitted:
    """Fit, and say what came of it."""
    trainer, model = make_trainer(run, *callbacks), Model()
    trainer.fit(model, loader(), ckpt_path=run.ckpt_path)
    callback = trainer.checkpoint_callback
    assert isinstance(callback, ModelCheckpoint)
    files = frozenset(str(path) for path in Path.cwd().rglob("*"))
    return Fitted(whole_state(model), model.losses, callback.best_model_path, callback.last_model_path, files)


class Marker(Callback):
    """Writes an object when a step is done."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == self._step:
            client = boto3.Session().client("s3", endpoint_url=os.environ["DCP_S3_ENDPOINT_URL"])
            client.put_object(Bucket=BUCKET, Key="marker", Body=b"")


def fit_with_marker(directory: Path, run: Run, step: int) -> Fitted:
    """Fit, and write an object called ``marker`` after a step."""
    os.chdir(directory)
    return fit(run, Marker(step))


def fit_and_fail(directory: Path, runs: list[Run]) -> list[tuple[str, int]]:
    """The error of each run, and after how many steps it was raised."""
    os.chdir(directory)
    found = []
    for run in runs:
        trainer = make_trainer(run)
        try:
            trainer.fit(Model(), loader())
        except SaveFailedError as error:
            found.append((str(error), trainer.global_step))
    return found


def work_after_fit(directory: Path, run: Run) -> dict[str, Any]:
    """What a trainer can do with checkpoints when it has fitted."""
    os.chdir(directory)
    trainer, model = make_trainer(run), Model()
    trainer.fit(model, loader())
    url, path = f"{run.dirpath}/after.ckpt", directory / "local.ckpt"
    found: dict[str, Any] = {}
    trainer.save_checkpoint(url)
    found["saved"] = CheckpointFiles().exists(url)
    before = trainer.predict(model, loader())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    after = trainer.predict(model, loader(), ckpt_path=url)
    found["same"] = all(map(torch.equal, before, after))
    trainer.strategy.remove_checkpoint(url)
    found["removed"] = not CheckpointFiles().exists(url)
    trainer.save_checkpoint(path)
    found["local"] = sorted(each.name for each in path.iterdir())
    return found
