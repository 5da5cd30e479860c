"""Runs of the trainer in examples/torchtitan.py, which calls torchtitan's CheckpointManager as torchtitan's does."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import HuggingFaceStorageReader

from dcp_s3 import list_checkpoints
from dcp_s3.integrations.torchtitan import S3CheckpointManager
from examples.torchtitan import Trainer
from tests.faulty import BUCKET
from tests.preload import MODULES

MODULES.append(__name__)  # imported once, by the process that ranks are forked from

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


# --- on S3 ----------------------------------------------------------------------------------------------


def steps_on_s3() -> list[int | None]:
    """Of the committed checkpoints."""
    return [info.step for info in list_checkpoints(ROOT) if info.committed]
