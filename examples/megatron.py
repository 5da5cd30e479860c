"""Trains a tensor-parallel layer of Megatron-Core and checkpoints it to S3 while the training goes on.

    torchrun --nproc-per-node 2 -m examples.megatron --url s3://bucket/run

If it is killed and started again, on any number of ranks that divides 64, it continues from the newest complete
checkpoint below ``--url``. Megatron-Core needs a GPU for each rank.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import ModelParallelConfig, dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch import Tensor, nn

import dcp_s3
from dcp_s3.integrations import megatron

WIDTH = 64


class MLP(nn.Module):
    """Two layers, of which each rank holds some columns and some rows."""

    def __init__(self) -> None:
        super().__init__()
        config: Any = ModelParallelConfig(
            tensor_model_parallel_size=dist.get_world_size(),
            use_cpu_initialization=True,  # the same values on any number of ranks
            params_dtype=torch.float32,
        )
        options: dict[str, Any] = {"config": config, "init_method": nn.init.xavier_normal_, "bias": True}
        self.up = ColumnParallelLinear(WIDTH, 4 * WIDTH, gather_output=False, **options)
        self.down = RowParallelLinear(
            4 * WIDTH, WIDTH, input_is_parallel=True, skip_bias_add=False, **options
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        """From (batch, WIDTH) to (batch, WIDTH)."""
        hidden, _ = self.up(x)
        out, _ = self.down(torch.relu(hidden))
        return out

    def sharded_state_dict(self) -> dict[str, Any]:
        """What Megatron checkpoints: which part of which tensor this rank has."""
        metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
        return {
            **self.up.sharded_state_dict(prefix="up.", metadata=metadata),
            **self.down.sharded_state_dict(prefix="down.", metadata=metadata),
        }


def main(arguments: list[str] | None = None) -> None:
    """Train with the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", required=True, help="where the checkpoints go: s3://bucket/run")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save-every", type=int, default=5)
    options = parser.parse_args(arguments)

    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())

    megatron.install()  # the one line that Megatron needs for s3://

    torch.manual_seed(0)
    model = MLP().to(device)
    step = 0
    if (newest := dcp_s3.latest(options.url)) is not None:
        loaded = dist_checkpointing.load(model.sharded_state_dict(), newest.url)
        step = loaded.pop("step")
        model.load_state_dict(loaded, strict=False)
        say(f"restored {newest.url} on {dist.get_world_size()} ranks")

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    saves = AsyncCallsQueue()
    while step < options.steps:
        torch.manual_seed(step)
        x = torch.randn(16, WIDTH).to(device)
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        say(f"step {step:3}  loss {loss.item():.6f}")
        saves.maybe_finalize_async_calls()  # commits what has been uploaded meanwhile
        if step % options.save_every == 0:
            request = dist_checkpointing.save(
                {**model.sharded_state_dict(), "step": step},
                f"{options.url}/iter_{step:07d}",
                async_sharded_save=True,
            )
            saves.schedule_async_request(request)
    saves.close()  # waits for the last save
    if dist.get_rank() == 0:
        dcp_s3.prune(options.url, dcp_s3.KeepLatest(2))
    parallel_state.destroy_model_parallel()


def say(line: str) -> None:
    """Print on one rank."""
    if dist.get_rank() == 0:
        print(line, flush=True)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
