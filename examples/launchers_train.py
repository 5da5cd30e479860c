"""Trains on the ranks that torchrun has started. Started again after any end, it goes on where it was.

    torchrun --nproc-per-node 2 -m examples.launchers_train --root s3://bucket/run

This is what SLURM, Kubernetes and SkyPilot start in docs/launchers.md. It needs nothing from them but to be started
again with the same ``--root``, on any number of ranks. SIGTERM, or SIGUSR1, makes it save once more and end.
"""

from __future__ import annotations

import argparse
import signal
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

from dcp_s3 import CheckpointManager
from dcp_s3.demo.train import record, say, standard_library_text
from examples.training import make_state, train_step


class StopSignal:
    """Notes that SIGTERM or SIGUSR1 has come. torchrun passes them on to all its ranks."""

    def __init__(self) -> None:
        self.came = False
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.came = True


def main() -> None:
    """Train with the options of the command line."""
    options = parse_arguments()
    stop = StopSignal()
    dist.init_process_group("gloo")
    train(options, stop)
    dist.destroy_process_group()


def train(options: argparse.Namespace, stop: StopSignal) -> None:
    """Restore, train, and save now and then. When it returns, the last save is committed."""
    ranks = dist.get_world_size()
    state = make_state()
    text = standard_library_text()
    # overwrite: a step after the restored one may exist, but damaged, so that `restore` passed over it.
    with CheckpointManager(options.root, overwrite=True) as manager:
        restored = manager.restore({"train": state})
        say(f"{ranks} ranks begin at step {state.step}, {'from scratch' if restored is None else 'restored'}")
        record("begun", state, options.digest_file)
        while state.step < options.steps:
            loss = train_step(state, text)
            # A signal may reach some ranks a step earlier than others: they stop together if one knows of it.
            told = torch.tensor([loss.item() / ranks, float(stop.came)])
            dist.all_reduce(told)
            mean, stopping = told[0].item(), told[1].item() > 0
            say(f"step {state.step:3}  loss {mean:.3f}")
            if stopping or state.step == options.steps or state.step % options.save_every == 0:
                record("saved", state, options.digest_file)
                manager.save(state.step, {"train": state}, {"loss": mean})  # in the background
            if stopping:
                say(f"asked to stop at step {state.step}")
                break


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="examples.launchers_train", description=__doc__.partition("\n")[0])
    parser.add_argument("--root", required=True, help="s3://bucket/prefix of this run, the same at each start")
    parser.add_argument("--steps", type=int, default=200, help="train to here; default: %(default)s")
    parser.add_argument("--save-every", type=int, default=10, help="steps; default: %(default)s")
    parser.add_argument("--digest-file", type=Path, help="append a hash of what is saved and restored")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
