"""Trains a small transformer with FSDP2 and checkpoints it to S3 while the training goes on.

    torchrun --nproc-per-node 2 -m dcp_s3.demo.train --url s3://bucket/run

If it is killed and started again, on any number of ranks, it continues from the newest complete
checkpoint below ``--url``. It runs on CPUs. On GPUs only the backend differs, nothing about S3.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sysconfig
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import dcp_s3

#: Sequences per step over all ranks: divisible by 1, 2, 3, 4, 6 and 12 of them.
BATCH = 12


class TrainState(Stateful):
    """Everything needed to continue the training. DCP calls these two methods when it saves and loads."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model = model
        self.optimizer = optimizer
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        """The state as sharded DTensors: every rank saves its own shards, and nothing is gathered."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "step": self.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Put a loaded state into the model and the optimizer."""
        model, optimizer = state_dict["model"], state_dict["optimizer"]
        set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)
        self.step = state_dict["step"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Train with these options, or those of the command line."""
    parser = argparse.ArgumentParser(prog="dcp_s3.demo.train", description=__doc__.partition("\n")[0])
    parser.add_argument("--url", required=True, help="s3://bucket/prefix of this run")
    parser.add_argument("--steps", type=int, default=200, help="train to here; default: %(default)s")
    parser.add_argument("--save-every", type=int, default=10, help="steps; default: %(default)s")
    parser.add_argument("--digest-file", type=Path, help="append a hash of what is saved and restored")
    options = parser.parse_args(arguments)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    config = ModelConfig()
    model = Transformer(config)
    mesh = init_device_mesh("cpu", (ranks,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    state = TrainState(model, optimizer := torch.optim.AdamW(model.parameters(), lr=1e-3))
    text = standard_library_text()

    with dcp_s3.CheckpointManager(options.url) as manager:
        if manager.restore({"train": state}) is None:
            say(f"no checkpoint at {options.url} yet: starting from scratch on {ranks} ranks")
        else:
            say(f"restored step {state.step} on {ranks} ranks")
            record("restored", state, options.digest_file)
        while state.step < options.steps:
            step, length = state.step, config.context
            inputs, targets = batch(text, step=step, sequences=BATCH, length=length, rank=rank, ranks=ranks)
            loss = nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            state.step += 1
            say(f"step {state.step:3}  loss {mean(loss):.3f}")

            if state.step % options.save_every == 0 or state.step == options.steps:
                manager.wait()  # for the save before this one; if that failed, on any rank, this raises
                record("saved", state, options.digest_file)
                started = time.perf_counter()
                manager.save(state.step, {"train": state})  # the upload goes on in the background
                stall = time.perf_counter() - started
                say(f"step {state.step:3}  copied in {stall:.2f} s, on its way to S3 in the background")
    dist.destroy_process_group()


def record(event: str, state: TrainState, path: Path | None) -> None:
    """Append the digest of the whole state to a file, if ``path`` is given. Slow; the demo compares the digests."""
    if path is not None:
        line = {"event": event, "step": state.step, "ranks": dist.get_world_size()}
        line["sha256"] = state_digest(state.state_dict())
        if dist.get_rank() == 0:
            with path.open("a") as file:
                file.write(json.dumps(line) + "\n")


def mean(value: Tensor) -> float:
    """The mean over all ranks."""
    total = value.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def say(message: str) -> None:
    """Print on rank 0 only."""
    if dist.get_rank() == 0:
        print(message, flush=True)


# --- the model, its text, and a hash of a training state; nothing here knows of checkpoints ---------------


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the model. The defaults give 5.1 million parameters: with AdamW's moments, 58 MiB of state."""

    width: int = 384
    layers: int = 3
    heads: int = 6
    hidden: int = 1344
    context: int = 64


class Transformer(nn.Module):
    """Predicts each byte from those before it: (batch, time) int64 -> (batch, time, 256) logits."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, config.width), nn.Embedding(config.context, config.width)
        sizes = (config.width, config.heads, config.hidden)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(*sizes, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(config.layers)
        )
        self.norm, self.head = nn.LayerNorm(config.width), nn.Linear(config.width, 256, bias=False)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        x = self.tokens(tokens) + self.positions(torch.arange(length))
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        logits: Tensor = self.head(self.norm(x))
        return logits


def standard_library_text() -> Tensor:
    """Text that every Python has: the top-level modules of its standard library (uint8, some megabytes)."""
    folder = Path(sysconfig.get_path("stdlib"))
    sources = b"\n".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    if not sources:
        raise FileNotFoundError(f"this Python has no sources in {folder}: there is no text to train on")
    return torch.frombuffer(bytearray(sources), dtype=torch.uint8)


def batch(
    text: Tensor, *, step: int, sequences: int, length: int, rank: int = 0, ranks: int = 1
) -> tuple[Tensor, Tensor]:
    """This rank's share of the batch of ``step``: inputs, and the bytes that follow them; two (sequences of this rank,
    length) int64 tensors. The whole batch depends only on the step, however many ranks there are."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - length, (sequences,), generator=generator)[rank::ranks]
    windows = text[starts[:, None] + torch.arange(length + 1)].long()
    return windows[:, :-1], windows[:, 1:]


def state_digest(state: Mapping[str, Any]) -> str:
    """SHA-256 (hex) over the names, dtypes, shapes and bits of everything in a state dict. Sharded tensors are gathered
    for that: every rank must call this, and all get the same answer."""
    digest = hashlib.sha256()
    for name, value in sorted(_leaves(state)):
        digest.update(f"{name}\0".encode())
        if isinstance(value, Tensor):
            tensor = value.full_tensor() if isinstance(value, DTensor) else value
            tensor = tensor.detach().cpu().contiguous()
            digest.update(f"{tensor.dtype} {list(tensor.shape)}\0".encode())
            # As bytes: 0.0 and -0.0 compare equal as floats but differ here; equal NaNs do not.
            digest.update(tensor.reshape(-1).view(torch.uint8).numpy())
        else:
            digest.update(f"{value!r}\0".encode())
    return digest.hexdigest()


def _leaves(state: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(state, (Mapping, list, tuple)):
        for key, value in state.items() if isinstance(state, Mapping) else enumerate(state):
            yield from _leaves(value, f"{name}/{key}")
    else:
        yield name, state


if __name__ == "__main__":
    main()
