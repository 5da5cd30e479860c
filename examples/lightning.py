"""Trains a small model with Lightning on FSDP2 shards and checkpoints it to S3 while the training goes on.

    torchrun --nproc-per-node 2 -m examples.lightning --url s3://bucket/run

If it is killed and started again, on any number of ranks, it goes on from the last checkpoint below ``--url``.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from dcp_s3.integrations.lightning import S3ModelParallelStrategy


class Regression(LightningModule):
    """Learns a sum of sines."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 1))

    def configure_model(self) -> None:
        """Shard the parameters over all ranks."""
        fully_shard(self.layers, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        """The loss of one batch, which the ModelCheckpoint monitors."""
        inputs, targets = batch
        loss = nn.functional.mse_loss(self.layers(inputs), targets)
        self.log("loss", loss, on_epoch=True, on_step=False, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW on the shards."""
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main(arguments: list[str] | None = None) -> None:
    """Train with the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True, help="s3://bucket/run: where the checkpoints go")
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args(arguments)

    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    trainer: Any = Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=S3ModelParallelStrategy(data_parallel_size=ranks, tensor_parallel_size=1),
        callbacks=[ModelCheckpoint(dirpath=options.url, monitor="loss", save_top_k=2, save_last=True)],
        max_epochs=options.epochs,
        logger=False,
        enable_progress_bar=False,
    )
    inputs = torch.rand(256, 4, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(inputs, inputs.mul(6).sin().sum(1, keepdim=True))
    torch.manual_seed(0)
    model = Regression()
    trainer.fit(model, DataLoader(data, batch_size=32), ckpt_path="last")
    if trainer.is_global_zero:
        checkpoints = trainer.checkpoint_callback
        print(f"{trainer.global_step} steps, best: {checkpoints.best_model_path} ({checkpoints.best_model_score:.4f})")


if __name__ == "__main__":
    main()
