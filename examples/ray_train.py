"""Trains with Ray Train, which starts the workers again when one dies, and checkpoints to S3.

    python -m examples.ray_train --root s3://bucket/run --storage s3://bucket/ray --workers 2

Each worker writes its shards to S3. Ray is told of a checkpoint by a small pointer, for it takes none from outside of
its own storage (``--storage``).
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import ray.train
import torch.distributed as dist
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from dcp_s3 import CheckpointManager
from dcp_s3.demo.train import mean, record, say, standard_library_text
from examples.training import make_state, train_step

POINTER = "pointer.json"


def report(pointer: dict[str, Any]) -> None:
    """Tell Ray of a committed checkpoint. Every worker calls it: Ray waits for all of them."""
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = None
        if dist.get_rank() == 0:
            Path(directory, POINTER).write_text(json.dumps(pointer))
            checkpoint = Checkpoint.from_directory(directory)
        ray.train.report({"loss": pointer["loss"]}, checkpoint=checkpoint)


def read_pointer(checkpoint: Checkpoint) -> dict[str, Any]:
    """``url``, ``step`` and ``loss`` of a checkpoint that was reported."""
    with checkpoint.as_directory() as directory:
        pointer: dict[str, Any] = json.loads(Path(directory, POINTER).read_text())
    return pointer


def train(options: argparse.Namespace) -> None:
    """What each worker runs, at the first start and after each failure."""
    state = make_state()
    text = standard_library_text()
    with CheckpointManager(options.root, overwrite=True) as manager:
        manager.restore({"train": state})  # the newest on S3 is at least as new as the one that Ray knows
        say(f"{dist.get_world_size()} workers begin at step {state.step}")
        record("begun", state, options.digest_file)
        saving: dict[str, Any] | None = None
        while state.step < options.steps:
            loss = mean(train_step(state, text))
            if state.step % options.save_every == 0 or state.step == options.steps:
                record("saved", state, options.digest_file)
                manager.save(state.step, {"train": state}, {"loss": loss})
                if saving is not None:
                    report(saving)  # `save` has waited for its commit
                saving = {"url": manager.url(state.step), "step": state.step, "loss": loss}
        if saving is not None:
            manager.wait()
            report(saving)


def main() -> None:
    """Train with the options of the command line, and print where the last checkpoint is."""
    options = parse_arguments()
    settings = {name: value for name, value in os.environ.items() if name.startswith("DCP_S3_")}
    trainer = TorchTrainer(
        train,
        train_loop_config=options,
        scaling_config=ScalingConfig(num_workers=options.workers),
        run_config=RunConfig(
            name=options.name,
            storage_path=options.storage,
            failure_config=FailureConfig(max_failures=options.max_failures),
            worker_runtime_env={"env_vars": settings},  # the workers of other nodes do not inherit the driver's
        ),
    )
    result = trainer.fit()
    if result.checkpoint is not None:
        print(json.dumps(read_pointer(result.checkpoint)))


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="examples.ray_train", description=__doc__.partition("\n")[0])
    parser.add_argument("--root", required=True, help="s3://bucket/prefix of this run's checkpoints")
    parser.add_argument("--storage", required=True, help="Ray's own storage: s3://bucket/prefix, or a shared directory")
    parser.add_argument("--name", default="run", help="of the run in Ray's storage; default: %(default)s")
    parser.add_argument("--workers", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--max-failures", type=int, default=3, help="restarts by Ray; default: %(default)s")
    parser.add_argument("--steps", type=int, default=200, help="train to here; default: %(default)s")
    parser.add_argument("--save-every", type=int, default=10, help="steps; default: %(default)s")
    parser.add_argument("--digest-file", type=Path, help="append a hash of what is saved and restored")
    return parser.parse_args()


if __name__ == "__main__":
    main()
