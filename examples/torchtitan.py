"""torchtitan's checkpoints on S3: its CheckpointManager, optimizers and data loader, a small model, on CPUs.

    torchrun --nproc-per-node 2 -m examples.torchtitan --url s3://bucket/run

If it is killed and started again, on any number of ranks, it continues from the newest checkpoint, bit for bit.
torchtitan's own trainer needs GPUs; the one here calls the CheckpointManager as that does. With torchtitan's, all you
write is the `checkpoint` of `parse_arguments`, in your function in a config_registry.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import IterableDataset
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.metrics import BaseLogger
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig

from dcp_s3.demo.train import ModelConfig, Transformer, batch, standard_library_text, state_digest
from dcp_s3.integrations.torchtitan import S3CheckpointManager

SEQUENCES = 4  # per step


class Trainer(Stateful):
    """Calls the CheckpointManager in the order in which torchtitan's trainer does.

    All ranks train on the same batches, like the ranks of a tensor-parallel group. The gradients are computed in
    bfloat16 and summed up in float32, which is exact, so that the result does not depend on the number of ranks.
    """

    def __init__(
        self,
        checkpoint: CheckpointManager.Config,
        *,
        steps: int,
        dump_folder: str = "outputs",
        sd_adapter: Any = None,
    ) -> None:
        self.config, self.steps = checkpoint, steps
        self.step = self.loaded_step = 0
        self.ntokens_seen = 0
        torch.manual_seed(0)
        self.sizes = ModelConfig(width=96, layers=2, heads=2, hidden=192, context=16)
        self.model = Transformer(self.sizes)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=precision)
        fully_shard(self.model, mesh=mesh, mp_policy=precision)
        adamw = ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 1e-2})
        optimizers = OptimizersContainer.Config(param_groups=[adamw], implementation="foreach")
        self.optimizers = optimizers.build(model_parts=[self.model])
        schedule = LRSchedulersContainer.Config(warmup_steps=4, total_steps=1000)
        self.lr_schedulers = schedule.build(optimizers=self.optimizers, training_steps=steps)
        self.metrics_processor = SimpleNamespace(logger=BaseLogger())
        self.text = standard_library_text()
        self.dataloader = ParallelAwareDataloader(
            Batches(self.text, self.sizes.context), dp_rank=0, dp_world_size=1, batch_size=None
        )
        self.checkpointer = checkpoint.build(
            dataloader=self.dataloader,
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=self.lr_schedulers,
            states={"train_state": self},
            sd_adapter=sd_adapter,
            base_folder=dump_folder,
        )

    def train(self) -> None:
        """Load what there is, then train to the last step."""
        self.checkpointer.load(step=self.config.load_step)
        self.loaded_step = self.step
        say(f"training starts at step {self.step + 1}")
        data = iter(self.dataloader)
        while self.step < self.steps:
            self.step += 1
            self.train_step(data)
            self.checkpointer.save(self.step, last_step=self.step == self.steps)
            if self.step % self.config.interval == 0:
                self.validate()

    def train_step(self, data: Iterator[tuple[dict[str, Tensor], Tensor]]) -> None:
        """Forward, backward, and a step of the optimizers."""
        self.optimizers.zero_grad()
        inputs, labels = next(data)
        self.ntokens_seen += labels.numel()
        loss = self.loss(inputs["input"], labels)
        loss.backward()
        self.checkpointer.maybe_wait_for_staging()
        self.optimizers.step()
        self.lr_schedulers.step()
        self.metrics_processor.logger.log({"loss_metrics/global_avg_loss": loss.item()}, self.step)
        say(f"step {self.step:3}  loss {loss.item():.3f}")

    @torch.no_grad()
    def validate(self) -> None:
        """Log the loss on text that is not trained on."""
        loss = self.loss(*batch(self.text, step=0, sequences=SEQUENCES, length=self.sizes.context)).item()
        self.metrics_processor.logger.log({"validation_metrics/loss": loss}, self.step)
        say(f"step {self.step:3}  validation loss {loss:.3f}")

    def loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """The mean cross entropy."""
        return nn.functional.cross_entropy(self.model(inputs).float().flatten(0, 1), labels.flatten())

    def digest(self) -> str:
        """One hash of everything that is trained, the same on any number of ranks."""
        return state_digest(
            {
                "model": self.model.state_dict(),
                "optimizer": self.optimizers.state_dict(),
                "lr_scheduler": self.lr_schedulers.state_dict(),
                "train_state": self.state_dict(),
            }
        )

    def state_dict(self) -> dict[str, Any]:
        """What the trainer itself saves."""
        return {"step": self.step, "ntokens_seen": self.ntokens_seen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there."""
        self.step = state_dict["step"]
        self.ntokens_seen = state_dict["ntokens_seen"]


class Batches(IterableDataset, Stateful):
    """Endless batches of text, numbered from 1."""

    def __init__(self, text: Tensor, length: int) -> None:
        self.text, self.length = text, length
        self.number = 0

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        """Inputs and labels: two (sequences, length) int64 tensors."""
        while True:
            self.number += 1
            inputs, labels = batch(self.text, step=self.number, sequences=SEQUENCES, length=self.length)
            yield {"input": inputs}, labels

    def state_dict(self) -> dict[str, Any]:
        """Where it is."""
        return {"number": self.number}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there."""
        self.number = state_dict["number"]


def main() -> None:
    """Train with the options of the command line."""
    checkpoint, steps = parse_arguments()
    dist.init_process_group("gloo")
    trainer = Trainer(checkpoint, steps=steps)
    try:
        trainer.train()
        say(f"digest {trainer.digest()}")
    finally:
        trainer.checkpointer.close()
    dist.destroy_process_group()


def say(message: str) -> None:
    """Print on rank 0 only."""
    if dist.get_rank() == 0:
        print(message, flush=True)


def parse_arguments() -> tuple[CheckpointManager.Config, int]:
    """The configuration, and the number of steps."""
    parser = argparse.ArgumentParser(prog="examples.torchtitan", description=__doc__.partition("\n")[0])
    parser.add_argument("--url", required=True, help="s3://bucket/prefix of this run")
    parser.add_argument("--steps", type=int, default=60, help="train to here; default: %(default)s")
    parser.add_argument("--interval", type=int, default=10, help="steps between saves; default: %(default)s")
    options = parser.parse_args()
    checkpoint = S3CheckpointManager.Config(
        enable=True,
        folder=options.url,
        interval=options.interval,
        async_mode="async_with_pinned_mem",
        retention="latest:3 best:2:val_loss:min every:50",
        last_save_model_only=False,
    )
    return checkpoint, options.steps


if __name__ == "__main__":
    main()
