"""The Hugging Face Trainer's checkpoints on S3, and adapters of PEFT without the base model, with the real packages."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from datasets import Dataset
from peft import LoraConfig, PeftModel, VeraConfig, get_peft_model
from safetensors import safe_open
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback, TrainingArguments
from trl import SFTConfig, SFTTrainer

from dcp_s3 import KeepLatest, describe, list_checkpoints, read_tensors, remove
from dcp_s3.demo.train import state_digest
from dcp_s3.errors import CheckpointError, CheckpointNotFoundError
from dcp_s3.integrations.accelerate import ModelPart, OptimizerPart
from dcp_s3.integrations.transformers import PRIVATE, S3Checkpoints, S3Trainer
from examples import transformers as example
from tests.faulty import BUCKET, FaultyServer
from tests.frameworks.ranks import AtWrite, files_in, kill_in_save, run_example, run_ranks
from tests.frameworks.test_accelerate import BATCH, load_state, pretend_devices, save_state, texts, tiny_llama
from tests.preload import MODULES

MODULES.append("transformers")  # imported once, by the process that ranks are forked from

ROOT = f"s3://{BUCKET}/run"


@dataclass(frozen=True)
class Run:
    """A training; pickled."""

    root: str  # URL above its checkpoints
    sharded: bool = False  # FSDP2; otherwise DDP, or on one rank the plain model
    adapter: bool = False  # LoRA: only an adapter is trained
    steps: int = 12  # train up to here
    arguments: tuple[tuple[str, Any], ...] = ()  # further TrainingArguments


class Trainer(S3Trainer):
    """Its ranks all compute the whole batch."""

    began = -1  # the step

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if model.training:
            inputs = self.accelerator.gather(inputs)
        return super().compute_loss(model, inputs, *args, **{**kwargs, "num_items_in_batch": None})


def trainer(run: Run, **more: Any) -> Trainer:
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    sharded: dict[str, Any] = {}
    if run.sharded:
        plugin = {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
        sharded = {"fsdp": "full_shard auto_wrap", "fsdp_config": plugin}
    options = {
        "output_dir": "output", "use_cpu": True, "max_steps": 12, "save_steps": 2, "save_total_limit": 2, "seed": 7,
        "logging_steps": 1, "report_to": "none", "disable_tqdm": True, "learning_rate": 1e-2, "warmup_steps": 3,
        "per_device_train_batch_size": BATCH // ranks, "max_grad_norm": 0.0,  # a norm depends on the number of shards
        **sharded, **dict(run.arguments),
    }  # fmt: skip
    arguments = TrainingArguments(**options)
    if run.sharded:
        pretend_devices()
    torch.set_num_threads(1)
    torch.manual_seed(3)
    model = tiny_llama(tie_word_embeddings=True, attention_dropout=0.1)
    if run.adapter:
        model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.1))
    data = [{"input_ids": text, "labels": text} for text in texts()]
    made = Trainer(
        model=model, args=arguments, train_dataset=data, eval_dataset=data[:4], checkpoint_root=run.root, **more,
    )  # fmt: skip
    made.add_callback(_Between(made, run.steps))
    return made


class _Between(TrainerCallback):
    """Notes where it begins, and stops after a step."""

    def __init__(self, trainer: Trainer, stop: int) -> None:
        self.trainer, self.stop = trainer, stop

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.began = state.global_step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop |= state.global_step >= self.stop


def losses(made: Trainer) -> list[float]:
    return [entry["loss"] for entry in made.state.log_history if "loss" in entry]


def train(run: Run, directory: Path | None, resume: Any = True) -> tuple[int, str, list[float]]:
    """Train, with the given working directory. Returns the step at which it began, a digest of the end and the
    losses."""
    if directory is not None:
        os.chdir(directory)
    made = trainer(run)
    made.train(resume_from_checkpoint=resume)
    model = made.model_wrapped
    assert run.sharded == isinstance(model, FSDPModule)
    state = {
        "model": ModelPart(model).state_dict(),
        "optimizer": OptimizerPart(made.optimizer, [model]).state_dict(),
        "schedule": made.lr_scheduler.state_dict(),
        "random": torch.get_rng_state(),
        "epoch": made.state.epoch,
    }
    return made.began, state_digest(state), losses(made)


def train_for_ever(run: Run) -> None:
    """Train until killed."""
    trainer(replace(run, steps=10**6)).train()
    raise AssertionError("it was not killed")


# --- tests ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sharded", [False, True], ids=["ddp", "fsdp2"])
def test_killed_in_a_save_it_goes_on_to_the_same_bits_on_other_ranks(
    faulty: FaultyServer, tmp_path: Path, sharded: bool
) -> None:
    cwd = tmp_path / "cwd"
    cwd.mkdir()
    [(_, *expected)] = run_ranks(1, train, Run(f"{ROOT}-expected", sharded), tmp_path, None)
    kill_in_save(faulty, AtWrite("step-00000006"), 2, tmp_path, train_for_ever, Run(ROOT, sharded))
    assert [info.step for info in list_checkpoints(ROOT) if info.committed] == [2, 4]

    [(began, *_)] = run_ranks(1, train, Run(ROOT, sharded, steps=9), cwd)
    assert began == 4
    for began, *found in run_ranks(2, train, Run(ROOT, sharded), cwd):
        assert began == 8
        assert found == expected
    assert files_in(cwd) == ["output"]  # the Trainer makes it; nothing is in it
    assert [info.step for info in list_checkpoints(ROOT) if info.committed] == [10, 12]


def test_the_example_trains_and_goes_on(faulty: FaultyServer, tmp_path: Path) -> None:
    options = ["--url", ROOT, "--save-every", "2"]
    run_ranks(2, run_example, example.main, [*options, "--steps", "4"], tmp_path)
    assert [info.step for info in list_checkpoints(ROOT)] == [2, 4]
    run_ranks(1, run_example, example.main, [*options, "--steps", "8"], tmp_path)
    assert [info.step for info in list_checkpoints(ROOT)] == [4, 6, 8]
    assert files_in(tmp_path) == ["output"]


# --- one process, without torch.distributed ------------------------------------------------------------


@pytest.fixture
def alone(faulty: FaultyServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def steps() -> list[int | None]:
    return [info.step for info in list_checkpoints(ROOT)]


def test_the_best_by_the_trainers_metric_is_kept_besides(alone: Path) -> None:
    (alone / "output/checkpoint-500").mkdir(parents=True)  # of before: it stays
    values = {2: 0.8, 4: 0.9, 6: 0.7, 8: 0.6}
    arguments = {
        "eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "accuracy", "greater_is_better": True,
        "save_total_limit": 1,
    }  # fmt: skip
    made = trainer(Run(ROOT, steps=8, arguments=tuple(arguments.items())))

    def evaluate(*args: Any, **kwargs: Any) -> dict[str, float]:
        found = {"eval_accuracy": values[made.state.global_step]}
        made.log(dict(found))
        return found

    made.evaluate = evaluate
    made.train()
    assert steps() == [4, 8]
    assert files_in(alone) == ["output", "output/checkpoint-500"]
    assert made.args.save_total_limit == 1


def test_a_step_may_be_chosen_and_nothing_there_is_a_new_training(alone: Path) -> None:
    everything = KeepLatest(10)
    first = trainer(Run(ROOT, steps=6), retention=everything)
    first.train(resume_from_checkpoint=True)
    for info in list_checkpoints(ROOT):
        if info.step in (4, 6):
            remove(info.url)
    with pytest.raises(CheckpointNotFoundError):
        trainer(Run(ROOT)).train(resume_from_checkpoint=3)
    again = trainer(Run(ROOT, steps=6), retention=everything)
    again.train(resume_from_checkpoint=2)
    assert losses(again) == losses(first)
    assert steps() == [2, 4, 6]


@pytest.mark.parametrize("start", [None, False, 4])
def test_a_training_that_begins_before_what_is_there_is_refused(alone: Path, start: Any) -> None:
    trainer(Run(ROOT, steps=6)).train()
    before = {info.step: info.save_id for info in list_checkpoints(ROOT)}
    with pytest.raises(CheckpointError, match=rf"{ROOT} has checkpoints up to step 6, .*Remedy"):
        trainer(Run(ROOT, steps=6)).train(resume_from_checkpoint=start)
    assert {info.step: info.save_id for info in list_checkpoints(ROOT)} == before == {4: before[4], 6: before[6]}


def test_what_cannot_be_is_refused(alone: Path) -> None:
    assert all(callable(getattr(S3Trainer, name)) for name in PRIVATE)
    made = trainer(Run(ROOT))
    with pytest.raises(CheckpointError, match=rf"{ROOT}/step-4' is a path. Remedy: the step"):
        made.train(resume_from_checkpoint=f"{ROOT}/step-4")
    made.args.load_best_model_at_end = True
    with pytest.raises(CheckpointError, match=r"load_best_model_at_end .*Remedy: leave it out"):
        made.train()


# --- adapters of PEFT -----------------------------------------------------------------------------------


def assert_holds_only_the_adapter(url: str) -> None:
    names = [entry.fqn for entry in describe(url).entries if entry.fqn.startswith("model.")]
    assert names
    assert all(".lora_" in name for name in names)


@pytest.mark.parametrize("sharded", [False, True], ids=["ddp", "fsdp2"])
def test_an_adapter_goes_on_to_the_same_bits(faulty: FaultyServer, tmp_path: Path, sharded: bool) -> None:
    run = Run(ROOT, sharded, adapter=True, steps=6)
    [(_, *expected)] = run_ranks(1, train, replace(run, root=f"{ROOT}-expected"), tmp_path, None)
    run_ranks(2, train, replace(run, steps=4), tmp_path, None)
    assert_holds_only_the_adapter(f"{ROOT}/step-00000004")
    assert run_ranks(2, train, run, tmp_path) == [(4, *expected)] * 2


def tiny() -> LlamaForCausalLM:
    torch.manual_seed(3)
    return tiny_llama()


def two_adapters() -> PeftModel:
    model = get_peft_model(tiny(), LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]))
    model.add_adapter("other", LoraConfig(target_modules=["v_proj"], use_dora=True))  # not active: it is frozen
    return model


MODELS = {"several": two_adapters, "vera": lambda: get_peft_model(tiny(), VeraConfig(target_modules=["q_proj"]))}


@pytest.mark.parametrize("kind", MODELS)
def test_accelerate_saves_every_kind_of_adapter_and_loads_it(alone: Path, kind: str) -> None:
    def changed(by: float) -> tuple[Accelerator, nn.Module]:
        accelerator = Accelerator(cpu=True)
        model = accelerator.prepare(MODELS[kind]())
        with torch.no_grad():
            for tensor in ModelPart(model).state_dict().values():
                tensor.add_(by)
        return accelerator, model

    accelerator, model = changed(1)
    save_state(accelerator, f"{ROOT}/step-1")
    expected = model.state_dict()
    model.save_pretrained("stock")
    stock = 0
    for path in Path("stock").rglob("adapter_model.safetensors"):
        with safe_open(path, "pt") as file:
            stock += sum(file.get_tensor(name).nbytes for name in file.keys())  # noqa: SIM118
    saved = sum(tensor.nbytes for tensor in read_tensors(f"{ROOT}/step-1", "model.*").values())
    assert saved == stock if kind != "vera" else saved < 3 * stock  # whose projections are in every layer
    accelerator.free_memory()

    accelerator, model = changed(2)
    load_state(accelerator, f"{ROOT}/step-1")
    found = model.state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_trl(alone: Path) -> None:
    class S3SFTTrainer(S3Checkpoints, SFTTrainer):
        pass

    words = {"[EOS]": 0, **{f"w{number}": number for number in range(1, 37)}}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, "[EOS]")), eos_token="[EOS]", pad_token="[EOS]"
    )

    def sft(steps: int) -> S3SFTTrainer:
        arguments = SFTConfig(
            output_dir="output", use_cpu=True, bf16=False, max_steps=steps, save_steps=2, report_to="none",
            lr_scheduler_type="constant", per_device_train_batch_size=2, logging_steps=1, disable_tqdm=True,
            gradient_checkpointing=False,
        )  # fmt: skip
        return S3SFTTrainer(
            model=tiny(), args=arguments, processing_class=tokenizer, checkpoint_root=ROOT,
            peft_config=LoraConfig(target_modules=["q_proj"], lora_dropout=0.1),
            train_dataset=Dataset.from_dict({"text": [f"w{number} w{number + 1} w3" for number in range(1, 12)]}),
        )  # fmt: skip

    sft(2).train()
    assert_holds_only_the_adapter(f"{ROOT}/step-00000002")
    resumed = sft(4)
    resumed.train(resume_from_checkpoint=True)
    other = sft(4)
    other.checkpoint_root = f"{ROOT}-expected"
    other.train()
    assert losses(resumed) == losses(other)
