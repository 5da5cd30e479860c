"""Runs of the trainer in examples/torchtitan.py, which calls torchtitan's CheckpointManager as torchtitan's does."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import HuggingFaceStorageReader

from dcp_s3 import list_checkpoints
from dcp_s3.integrations.torchtitan import S3CheckpointManager
from examples.torchtitan import Trainer
from tests.faulty import BUCKET, FaultyServer
from tests.killing import begin
from tests.memory_s3 import Fault

ROOT = f"s3://{BUCKET}/run"
MODES = ("disabled", "async", "async_with_pinned_mem")


# --- on a rank ------------------------------------------------------------------------------------------


def config(**options: Any) -> S3CheckpointManager.Config:
    """Saves every second step, and in full, unless told otherwise."""
    return S3CheckpointManager.Config(
        **{"enable": True, "folder": ROOT, "interval": 2, "last_save_model_only": False, **options}
    )


@dataclass(frozen=True)
class Run:
    """What came of a run."""

    loaded_step: int
    digest: str
    local_files: tuple[str, ...]
    """What lies in the directory in which it ran."""


def train(directory: Path, steps: int, kind: type[Trainer] = Trainer, **options: Any) -> Run:
    """Train to ``steps`` in an empty directory, without s3fs."""
    sys.modules["s3fs"] = None  # type: ignore[assignment]  # importing it fails
    directory.mkdir(exist_ok=True)
    os.chdir(directory)
    trainer = kind(config(**options), steps=steps)
    try:
        trainer.train()
    finally:
        trainer.checkpointer.close()
    return Run(trainer.loaded_step, trainer.digest(), tuple(map(str, directory.rglob("*"))))


class Adapter:
    """torchtitan's adapter to Hugging Face's format, for a model whose names are the same there."""

    fqn_to_index_mapping = None

    def __init__(self, path: str | None = None) -> None:
        self.hf_assets_path = path

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return state_dict

    from_hf = to_hf

    def get_hf_storage_reader(self, path: str, from_quantized: bool) -> HuggingFaceStorageReader:
        assert not from_quantized
        return HuggingFaceStorageReader(path)


@dataclass(frozen=True)
class Job:
    """A rank of a run that is killed; pickled."""

    directory: Path
    """For output and the rendezvous."""
    environment: dict[str, str]
    rank: int
    world_size: int
    steps: int
    options: dict[str, Any]

    @property
    def cwd(self) -> Path:
        """Where it runs."""
        return self.directory / "cwd"


def train_until_killed(job: Job) -> None:
    """Train, in a process of its own."""
    begin(job.environment, job.directory / f"output-{job.rank}.log")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{job.directory / 'rendezvous'}",
        rank=job.rank,
        world_size=job.world_size,
        timeout=timedelta(seconds=120),
    )
    train(job.cwd, job.steps, **job.options)


# --- on S3 ----------------------------------------------------------------------------------------------


def steps_on_s3() -> list[int | None]:
    """Of the committed checkpoints."""
    return [info.step for info in list_checkpoints(ROOT) if info.committed]


@contextlib.contextmanager
def held_back(server: FaultyServer, directory: str, suffix: str) -> Iterator[threading.Event]:
    """No object with these parts of a key is stored. The event is set when one comes; at the end they are refused."""
    reached, over = threading.Event(), threading.Event()

    def hold(request: Any) -> Fault | None:
        if request.operation != "PutObject" or directory not in request.key or not request.key.endswith(suffix):
            return None
        reached.set()
        over.wait(60)
        return Fault.reset()

    server.rule = hold
    try:
        yield reached
    finally:
        server.rule = lambda _: None
        over.set()
