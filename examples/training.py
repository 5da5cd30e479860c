"""What the examples of launchers and of Ray train: a small transformer with FSDP2, on any number of ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from dcp_s3.demo.train import BATCH, ModelConfig, TrainState, Transformer, batch

#: 0.3 million parameters: a step takes milliseconds, also where several ranks share a core.
CONFIG = ModelConfig(width=96, layers=2, heads=4, hidden=192)


def make_state() -> TrainState:
    """A model, sharded over all ranks, and its optimizer: the same on any number of ranks."""
    torch.manual_seed(0)
    model = Transformer(CONFIG)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return TrainState(model, torch.optim.AdamW(model.parameters(), lr=1e-3))


def train_step(state: TrainState, text: Tensor) -> Tensor:
    """Train on the batch of the next step. Returns this rank's loss (a float scalar)."""
    inputs, targets = batch(
        text,
        step=state.step,
        sequences=BATCH,
        length=CONFIG.context,
        rank=dist.get_rank(),
        ranks=dist.get_world_size(),
    )
    loss = nn.functional.cross_entropy(state.model(inputs).flatten(0, 1), targets.flatten())
    loss.backward()
    state.optimizer.step()
    state.optimizer.zero_grad()
    state.step += 1
    return loss.detach()
