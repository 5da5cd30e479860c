"""Trainings with Accelerate that tests/frameworks/test_accelerate.py runs on its ranks, and kills."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, DataLoaderConfiguration, DistributedType, PartialState
from accelerate.utils import FullyShardedDataParallelPlugin, set_seed
from torch.distributed.checkpoint import load, save
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM, get_cosine_schedule_with_warmup

from dcp_s3 import CheckpointManager, S3StorageReader, S3StorageWriter
from dcp_s3.demo.train import state_digest
from dcp_s3.integrations.accelerate import training_state
from tests.preload import MODULES

MODULES.append(__name__)  # imported once, by the process that ranks are forked from

SEQUENCES = 20
BATCH = 4  # 5 batches an epoch


def save_state(accelerator: Accelerator, url: str) -> None:
    save(training_state(accelerator), storage_writer=S3StorageWriter(url))


def load_state(accelerator: Accelerator, url: str) -> None:
    load(training_state(accelerator), storage_reader=S3StorageReader(url))


def pretend_devices() -> None:
    """Let Accelerate shard on CPUs, as it does on devices: it takes no notice of FSDP on ranks that have none."""
    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def tiny_llama(**options: Any) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=37, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=16, **options,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def texts() -> torch.Tensor:
    return torch.randint(37, (SEQUENCES, 8), generator=torch.Generator().manual_seed(1))


@dataclass(frozen=True)
class Run:
    """A training; pickled."""

    root: str  # URL above its checkpoints
    sharded: bool  # FSDP2; otherwise DDP, or on one rank the plain model
    # Each rank takes the gradients of the whole batch, and all draw the same random numbers: then the number of ranks
    # makes no difference to a single bit.
    alike: bool = True
    steps: int = 12  # train up to here


class Registered:
    """A registered object."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


class Training:
    """All of a training, made anew in each process."""

    def __init__(self, run: Run) -> None:
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        plugin = None
        if run.sharded:
            pretend_devices()
            plugin = FullyShardedDataParallelPlugin(
                fsdp_version=2, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=False,
                transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
            )  # fmt: skip
        # Of those that are alike any number goes on from any other's, and skips what was done.
        data = DataLoaderConfiguration(
            use_seedable_sampler=True, use_stateful_dataloader=not run.alike, split_batches=run.alike
        )
        self.run = run
        self.accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, dataloader_config=data)
        torch.set_num_threads(1)
        set_seed(7)
        model = tiny_llama(tie_word_embeddings=True, attention_dropout=0.1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        schedule = get_cosine_schedule_with_warmup(optimizer, 3, 100)
        size = BATCH if run.alike else BATCH // ranks
        # With a generator of its own it takes no number of the model's, of which an iterator that resumes takes one.
        loader = DataLoader(TensorDataset(texts()), batch_size=size, shuffle=True, generator=torch.Generator())
        self.model, self.optimizer, self.schedule, self.loader = self.accelerator.prepare(
            model, optimizer, schedule, loader
        )
        self.losses = Registered({})  # other keys each time
        self.accelerator.register_for_checkpointing(self.losses)
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
            epoch, done = divmod(self.step, SEQUENCES // BATCH)
            if self.run.alike:
                self.loader.set_epoch(epoch)
            left = self.accelerator.skip_first_batches(self.loader, done) if done and self.run.alike else self.loader
            for (batch,) in left:
                self.update(self.accelerator.gather(batch) if self.run.alike else batch)
                self.after(self.step)
                if self.step >= steps:
                    return

    def update(self, batch: torch.Tensor) -> None:
        loss = self.model(input_ids=batch, labels=batch).loss
        self.accelerator.backward(loss)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        self.step += 1
        self.losses.value[f"step-{self.step}"] = loss.item()

    def after(self, step: int) -> None:
        """Called after each step."""


class ManagedTraining(Training):
    """Restores the latest checkpoint under the root, and saves every second step in the background."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.manager = CheckpointManager(run.root, retention="latest:2")
        self.state = training_state(self.accelerator)
        self.restored = self.manager.restore(self.state)
        self.step = self.restored or 0

    def after(self, step: int) -> None:
        if step % 2 == 0:
            self.manager.save(step, self.state)


def uninterrupted(run: Run) -> tuple[str, dict[str, float]]:
    """Train without a checkpoint. Returns the digest at the end and the losses."""
    training = Training(run)
    training.train(run.steps)
    return training.digest(), training.losses.value


def resumed(run: Run, directory: Path) -> tuple[int | None, str, dict[str, float]]:
    """Train with checkpoints, in a working directory. Returns also the step at which it began."""
    os.chdir(directory)
    training = ManagedTraining(run)
    training.train(run.steps)
    training.manager.close()
    return training.restored, training.digest(), training.losses.value


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
    return second.digest(), second.losses.value


def with_weights(run: Run, loads: bool) -> str:
    """Save sharded tensors of a registered object, or load them. Returns their digest."""
    training = Training(run)
    weights = {name: tensor.detach() * 2 for name, tensor in get_model_state_dict(training.model).items()}
    kept = Registered({name: torch.zeros_like(tensor) if loads else tensor for name, tensor in weights.items()})
    training.accelerator.register_for_checkpointing(kept)
    (load_state if loads else save_state)(training.accelerator, f"{run.root}/step-1")
    return state_digest(kept.value)


def train_for_ever(run: Run) -> None:
    """Train until killed."""
    ManagedTraining(run).train(10**6)


class Failing(Registered):
    """Fails on the second rank when its value says."""

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.fail_in("save")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.fail_in("load")

    def fail_in(self, when: str) -> None:
        if self.value == when and dist.get_rank() == 1:
            raise ZeroDivisionError(f"in the {when} of rank 1")


def failing(root: str, when: str) -> str:
    """Save and load with an object that fails on the second rank."""
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(torch.nn.Linear(2, 2))
    accelerator.register_for_checkpointing(Failing(when))
    state = training_state(accelerator)
    try:
        with CheckpointManager(root) as manager:
            manager.save(1, state, blocking=True)
            manager.restore(state)
    except Exception as error:  # noqa: BLE001 - which one is the question
        return f"{type(error).__name__}: {error}"
    raise AssertionError("it did not fail")
