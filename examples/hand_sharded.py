"""Trains a tensor-parallel attention layer that is sharded by hand, without DTensor, and checkpoints it to S3.

    torchrun --nproc-per-node 4 -m examples.hand_sharded --url s3://bucket/run --steps 10
    torchrun --nproc-per-node 2 -m examples.hand_sharded --url s3://bucket/run --steps 20

The second run goes on from the newest checkpoint of the first, on another number of ranks.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

import dcp_s3

WIDTH, HEAD = 16, 4
QUERIES, KEYS = 8, 4  # heads; each head of keys and values serves two of queries


class Attention(nn.Module):
    """One rank's heads. Its weights are plain tensors, a part of the whole."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        keys = KEYS // ranks
        self.sizes = (keys * QUERIES // KEYS * HEAD, keys * HEAD, keys * HEAD)
        self.qkv = nn.Linear(WIDTH, sum(self.sizes))  # rows of q, then of k, then of v
        self.dense = nn.Linear(self.sizes[0], WIDTH, bias=False)
        self.norm = nn.LayerNorm(WIDTH)  # every rank has all of it

    def forward(self, batch: Tensor) -> Tensor:
        """Attention over ``batch`` (sequences, positions, width), summed over the ranks."""
        q, k, v = (part.unflatten(-1, (-1, HEAD)).transpose(1, 2) for part in self.qkv(batch).split(self.sizes, -1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2).flatten(2)
        return self.norm(_Sum.apply(self.dense(mixed)))


class _Sum(torch.autograd.Function):
    """The sum over the ranks; each gets the whole gradient."""

    @staticmethod
    def forward(_: Any, part: Tensor) -> Tensor:
        total = part.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return gradient


def sharded_state(model: Attention, optimizer: torch.optim.SGD, step: int) -> dict[str, Any]:
    """The state of this rank, of which DCP knows where it lies in the whole. Shares memory with the model."""
    plan = {
        "*qkv.*": dcp_s3.Fused(0, model.sizes),
        "*dense.weight": 1,
        "*norm.*": None,
    }
    momentum = {name: optimizer.state[each]["momentum_buffer"] for name, each in model.named_parameters()}
    state = {"model": model.state_dict(), "momentum": momentum, "step": step}
    return dcp_s3.shard_state(state, plan, group=dist.group.WORLD)


def main() -> None:
    """Train with the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True, help="s3://bucket/prefix below which checkpoints are written")
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    train(options.url, options.steps)
    dist.destroy_process_group()


def train(url: str, steps: int) -> int:
    """Train up to step ``steps``, from the newest checkpoint below ``url``, and save. Returns the step it began at."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    model = Attention(ranks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for parameter in model.parameters():
        optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)

    found = [dcp_s3.latest(url) if rank == 0 else None]
    dist.broadcast_object_list(found)
    begun = 0
    if found[0] is not None:
        state = sharded_state(model, optimizer, 0)
        dcp.load(state, storage_reader=dcp_s3.S3StorageReader(found[0].url))
        begun = state["step"]
        if rank == 0:
            print(f"goes on from {found[0].url} on {ranks} ranks")

    for step in range(begun, steps):
        batch = torch.randn(4, 8, WIDTH, generator=torch.Generator().manual_seed(step))
        loss = nn.functional.mse_loss(model(batch), batch.flip(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if begun < steps:
        writer = dcp_s3.S3StorageWriter(f"{url}/step-{steps}")
        dcp.save(sharded_state(model, optimizer, steps), storage_writer=writer)
        if rank == 0:
            print(f"saved step {steps}")
    return begun


if __name__ == "__main__":
    main()
