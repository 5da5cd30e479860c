"""Trains with Hugging Face Accelerate and checkpoints to S3 while the training goes on.

    accelerate launch --cpu --num_processes 2 -m examples.accelerate --url s3://bucket/run

If it is killed and started again, on any number of processes, it continues from the newest complete
checkpoint below ``--url``, within its epoch. On GPUs, with DDP or FSDP2, leave out ``--cpu`` in both places.
"""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dcp_s3 import CheckpointManager
from dcp_s3.integrations.accelerate import training_state

#: Samples per step over all processes: divisible by 1, 2, 3, 4 and 6 of them.
BATCH = 12


def main(arguments: list[str] | None = None) -> None:
    """Train with the options of the command line."""
    options = parse_arguments(arguments)
    set_seed(0)
    # Batches that are split among the processes are the same for any number of them.
    data = DataLoaderConfiguration(use_seedable_sampler=True, split_batches=True)
    accelerator = Accelerator(cpu=options.cpu, dataloader_config=data)

    inputs = torch.randn(10 * BATCH, 8)
    dataset = TensorDataset(inputs, inputs.square().sum(1, keepdim=True))
    model = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 50, 0.5)
    model, optimizer, scheduler, loader = accelerator.prepare(
        model, optimizer, scheduler, DataLoader(dataset, batch_size=BATCH, shuffle=True)
    )

    state = training_state(accelerator)
    with CheckpointManager(options.url, retention="latest:3") as manager:
        step = manager.restore(state) or 0
        accelerator.print(f"step {step}: restored on {accelerator.num_processes} processes" if step else "a new run")
        while step < options.steps:
            epoch, done = divmod(step, len(loader))
            loader.set_epoch(epoch)
            for features, targets in accelerator.skip_first_batches(loader, done):
                loss = nn.functional.mse_loss(model(features), targets)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                step += 1
                if step % options.save_every == 0 or step == options.steps:
                    mean = accelerator.reduce(loss.detach(), "mean").item()
                    manager.save(step, state, metrics={"loss": mean})  # copied; the upload goes on in the background
                    accelerator.print(f"step {step}: loss {mean:.4f}")
                if step == options.steps:
                    break
    accelerator.end_training()


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="examples.accelerate", description=__doc__.partition("\n")[0])
    parser.add_argument("--url", required=True, help="s3://bucket/prefix of this run")
    parser.add_argument("--steps", type=int, default=100, help="train to here; default: %(default)s")
    parser.add_argument("--save-every", type=int, default=10, help="steps; default: %(default)s")
    parser.add_argument("--cpu", action=argparse.BooleanOptionalAction, default=True, help="default: %(default)s")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
