"""Trainings with Accelerate that tests/frameworks/test_accelerate.py runs on its ranks, and kills."""

from __future__ import annotations

import contextlib
import io
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, DataLoaderConfiguration, DistributedType, PartialState
from accelerate.utils import FullyShardedDataParallelPlugin, set_seed
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM, get_cosine_schedule_with_warmup

import dcp_s3
from dcp_s3 import CheckpointManager
from dcp_s3.demo.train import state_digest
from dcp_s3.integrations.accelerate import load_state, save_state, training_state
from examples import accelerate as example
from tests.frameworks.ranks import files_in
from tests.preload import MODULES

MODULES.append(__name__)  # imported once, by the process that ranks are forked from

SEQUENCES = 20
BATCH = 4  # 5 batches an epoch


def pretend_devices() -> None:
    """Let Accelerate shard on CPUs, as it does on devices: it takes no notice of FSDP on ranks that have none."""
    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


@dataclass(frozen=True)
class Run:
    """A training; pickled."""

    root: str
    """URL above its checkpoints."""
    sharded: bool
    """FSDP2; otherwise DDP, or on one rank the plain model."""
    alike: bool = True
    """Each rank takes the gradients of the whole batch, and all draw the same random numbers: then the number of ranks
    makes no difference to a single bit."""
    steps: int = 12
    """Train up to here."""
    save_every: int = 2
    """Steps."""


class History:
    """A registered object: other keys each time it is saved."""

    def __init__(self) -> None:
        self.losses: dict[str, float] = {}

    def state_dict(self) -> dict[str, Any]:
        return {"losses": dict(self.losses)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.losses = dict(state["losses"])


class Training:
    """All of a training, made anew in each process."""

    def __init__(self, run: Run, *, dropout: float = 0.1) -> None:
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        plugin = None
        if run.sharded:
            pretend_devices()
            plugin = FullyShardedDataParallelPlugin(
                fsdp_version=2,
                auto_wrap_policy="transformer_based_wrap",
                transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
                cpu_ram_efficient_loading=False,
            )
        data = DataLoaderConfiguration(use_seedable_sampler=True, use_stateful_dataloader=True, split_batches=run.alike)
        self.run = run
        self.accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, dataloader_config=data)
        torch.set_num_threads(1)
        set_seed(7)
        config = LlamaConfig(
            vocab_size=37, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
            max_position_embeddings=16, tie_word_embeddings=True, attention_dropout=dropout,
        )  # fmt: skip
        model = LlamaForCausalLM(config)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        schedule = get_cosine_schedule_with_warmup(optimizer, 3, 100)
        texts = torch.randint(37, (SEQUENCES, 8), generator=torch.Generator().manual_seed(1))
        size = BATCH if run.alike else BATCH // ranks
        loader = DataLoader(TensorDataset(texts), batch_size=size, shuffle=True)
        self.model, self.optimizer, self.schedule, self.loader = self.accelerator.prepare(
            model, optimizer, schedule, loader
        )
        self.history = History()
        self.accelerator.register_for_checkpointing(self.history)
        self.model.train()
        assert run.sharded == isinstance(self.model, FSDPModule)
        set_seed(11, device_specific=not run.alike)
        self.step = 0

    def digest(self) -> str:
        """Of all that decides how the training goes on."""
        state = training_state(self.accelerator)
        parts = {name: state[name].state_dict() for name in ("model", "optimizer")}
        rest = {
            "schedule": self.schedule.state_dict(), "step": self.step,
            "epoch": self.loader.iteration, "random": torch.get_rng_state(),
        }  # fmt: skip
        return state_digest({**parts, "rest": rest})

    def train(self, steps: int) -> None:
        """Train up to ``steps``."""
        while self.step < steps:
            for (texts,) in self.loader:
                self.update(self.accelerator.gather(texts) if self.run.alike else texts)
                self.after(self.step)
                if self.step >= steps:
                    return

    def update(self, texts: torch.Tensor) -> None:
        loss = self.model(input_ids=texts, labels=texts).loss
        self.accelerator.backward(loss)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        self.step += 1
        self.history.losses[f"step-{self.step}"] = loss.item()

    def after(self, step: int) -> None:
        """Called after each step."""


class ManagedTraining(Training):
    """Restores the latest checkpoint under the root, and saves every few steps in the background."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.manager = CheckpointManager(run.root, retention="latest:2")
        self.state = training_state(self.accelerator)
        self.restored = self.manager.restore(self.state)
        self.step = self.restored or 0

    def after(self, step: int) -> None:
        if step % self.run.save_every == 0:
            self.manager.save(step, self.state)


def uninterrupted(run: Run) -> tuple[str, dict[str, float]]:
    """Train without a checkpoint. Returns the digest at the end and the losses."""
    training = Training(run)
    training.train(run.steps)
    return training.digest(), training.history.losses


def resumed(run: Run, directory: Path) -> tuple[int | None, str, dict[str, float]]:
    """Train with checkpoints, in a working directory. Returns also the step at which it began."""
    os.chdir(directory)
    training = ManagedTraining(run)
    training.train(run.steps)
    training.manager.close()
    return training.restored, training.digest(), training.history.losses


def interrupted(run: Run, at: int) -> tuple[str, dict[str, float]]:
    """Train up to step ``at``, save in the background, and let a new training go on from there."""
    first = Training(run)
    first.train(at)
    with CheckpointManager(run.root) as manager:
        manager.save(at, training_state(first.accelerator))
        first.train(at + 1)  # changes everything while it is saved
        url = manager.url(at)
    first.accelerator.free_memory()
    second = Training(run)
    set_seed(99)
    load_state(second.accelerator, url)
    second.step = at
    second.train(run.steps)
    return second.digest(), second.history.losses


class Average:
    """A registered object with sharded tensors: the mean of the weights so far."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.weights = {name: tensor.detach().clone() for name, tensor in get_model_state_dict(model).items()}

    def update(self, model: torch.nn.Module) -> None:
        for name, tensor in get_model_state_dict(model).items():
            self.weights[name].lerp_(tensor.detach(), 0.25)

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights, "note": "mean"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["note"] == "mean"
        for name, tensor in state["weights"].items():
            self.weights[name].copy_(tensor)


def with_average(run: Run, at: int, load: bool) -> str:
    """Train some steps with a registered average, and save; or load. Returns the average's digest."""
    training = Training(run)
    average = Average(training.model)
    training.accelerator.register_for_checkpointing(average)
    url = f"{run.root}/step-{at}"
    if load:
        load_state(training.accelerator, url)
    else:
        training.train(at)
        average.update(training.model)
        save_state(training.accelerator, url)
    return state_digest(average.state_dict())


def stock(run: Run, directory: Path) -> tuple[str, str, list[str]]:
    """Accelerate's own `save_state` and `load_state` with an S3 URL, after `dcp_s3.register`. Returns the digest when
    it was saved, that when it is loaded, and the local files."""
    os.chdir(directory)
    dcp_s3.register()
    training = Training(run)
    training.train(3)
    before = training.digest()
    training.accelerator.save_state(f"{run.root}/step-3")
    training.train(5)
    training.accelerator.load_state(f"{run.root}/step-3")
    training.step, training.loader.iteration = 3, 0
    return before, training.digest(), files_in(directory)


def run_example(arguments: list[str], directory: Path) -> str:
    """Run examples/accelerate.py. Returns what it prints."""
    os.chdir(directory)
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        example.main(arguments)
    return output.getvalue()


def train_for_ever(run: Run) -> None:
    """Train until killed."""
    ManagedTraining(run).train(10**6)


class Failing:
    """A registered object that fails on the second rank."""

    def __init__(self, when: str) -> None:
        self.when = when

    def _fail(self, when: str) -> None:
        if self.when == when and dist.get_rank() == 1:
            raise ZeroDivisionError(f"in the {when} of rank 1")

    def state_dict(self) -> dict[str, Any]:
        self._fail("save")
        return {"value": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._fail("load")


def failing(url: str, when: str) -> tuple[str, str]:
    """Save and load with an object that fails on the second rank, or that only the first one has."""
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(torch.nn.Linear(2, 2))
    if when != "count" or dist.get_rank() == 0:
        accelerator.register_for_checkpointing(Failing(when))
    try:
        save_state(accelerator, url)
        load_state(accelerator, url)
    except Exception as error:  # noqa: BLE001 - which one is the question
        return type(error).__name__, str(error)
    raise AssertionError("it did not fail")
