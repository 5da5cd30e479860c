"""Trainings with the Hugging Face Trainer that tests/frameworks/test_transformers.py runs on its ranks, and kills."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedTokenizerFast, TrainerCallback, TrainingArguments

from dcp_s3.demo.train import state_digest
from dcp_s3.integrations.accelerate import model_part, optimizer_part
from dcp_s3.integrations.transformers import S3Trainer
from examples import transformers as example
from tests.frameworks.accelerate_runs import pretend_devices, texts, tiny_llama
from tests.preload import MODULES

MODULES.append(__name__)  # imported once, by the process that ranks are forked from

SEQUENCES = 20
BATCH = 4  # 5 batches an epoch


@dataclass(frozen=True)
class Run:
    """A training; pickled."""

    root: str
    """URL above its checkpoints."""
    sharded: bool = False
    """FSDP2; otherwise DDP, or on one rank the plain model."""
    adapter: bool = False
    """LoRA: only an adapter is trained."""
    steps: int = 12
    """Train up to here."""
    arguments: tuple[tuple[str, Any], ...] = ()
    """Further TrainingArguments."""


class Trainer(S3Trainer):
    """Its ranks all compute the whole batch."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if model.training:
            inputs = self.accelerator.gather(inputs)
        return super().compute_loss(model, inputs, *args, **{**kwargs, "num_items_in_batch": None})


def trainer(run: Run, **options: Any) -> Trainer:
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    sharded: dict[str, Any] = {}
    if run.sharded:
        plugin = {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
        sharded = {"fsdp": "full_shard auto_wrap", "fsdp_config": plugin}
    arguments = TrainingArguments(
        **{
            "output_dir": "output",
            "use_cpu": True,
            "max_steps": 12,
            "save_steps": 2,
            "logging_steps": 1,
            "report_to": "none",
            "disable_tqdm": True,
            "learning_rate": 1e-2,
            "warmup_steps": 3,
            "max_grad_norm": 0.0,  # a norm depends on the number of shards
            "per_device_train_batch_size": BATCH // ranks,
            "seed": 7,
            "save_total_limit": 2,
            **sharded,
            **dict(run.arguments),
        }
    )
    if run.sharded:
        pretend_devices()
    torch.set_num_threads(1)
    torch.manual_seed(3)
    model = tiny_llama(tie_word_embeddings=True, attention_dropout=0.1)
    if run.adapter:
        model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.1))
    data = [{"input_ids": text, "labels": text} for text in texts(SEQUENCES)]
    made = Trainer(
        model=model, args=arguments, train_dataset=data, eval_dataset=data[:4],
        checkpoint_root=run.root, **options,
    )  # fmt: skip
    made.add_callback(_StopAt(run.steps))
    return made


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    words = {"[EOS]": 0, **{f"w{number}": number for number in range(1, 37)}}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, "[EOS]")), eos_token="[EOS]", pad_token="[EOS]"
    )


class _StopAt(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step >= self.step:
            control.should_training_stop = True


class _Began(TrainerCallback):
    step = -1

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.step = state.global_step


def train(run: Run, directory: Path | None, resume: Any = True) -> tuple[int, str, list[float]]:
    """Train, with the given working directory. Returns the step at which it began, a digest of the end and the
    losses."""
    if directory is not None:
        os.chdir(directory)
    made = trainer(run)
    began = _Began()
    made.add_callback(began)
    made.train(resume_from_checkpoint=resume)
    model = made.model_wrapped
    assert run.sharded == isinstance(model, FSDPModule)
    state = {
        "model": model_part(model).state_dict(),
        "optimizer": optimizer_part(made.optimizer, [model]).state_dict(),
        "schedule": made.lr_scheduler.state_dict(),
        "random": torch.get_rng_state(),
        "epoch": made.state.epoch,
    }
    losses = [entry["loss"] for entry in made.state.log_history if "loss" in entry]
    return began.step, state_digest(state), losses


def run_example(arguments: list[str], directory: Path) -> None:
    """Run examples/transformers.py."""
    os.chdir(directory)
    example.main(arguments)


def train_for_ever(run: Run) -> None:
    """Train until killed."""
    trainer(Run(run.root, run.sharded, steps=10**6, arguments=(*run.arguments, ("max_steps", 12)))).train()
    raise AssertionError("it was not killed")
