"""Adapters of PEFT: checkpoints without the base model, with the real packages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset
from peft import LoraConfig, PeftModel, PrefixTuningConfig, VeraConfig, get_peft_model
from safetensors import safe_open
from torch import nn
from transformers import LlamaForCausalLM
from trl import SFTConfig, SFTTrainer

from dcp_s3 import inspect, read_tensors
from dcp_s3.integrations.accelerate import model_part
from dcp_s3.integrations.transformers import S3Checkpoints
from tests.faulty import BUCKET, FaultyServer
from tests.frameworks.accelerate_runs import load_state, save_state, tiny_llama
from tests.frameworks.ranks import run_ranks
from tests.frameworks.transformers_runs import Run, tiny_tokenizer, train, trainer

ROOT = f"s3://{BUCKET}/run"


@pytest.fixture(autouse=True)
def _alone(faulty: FaultyServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def saved_names(url: str) -> set[str]:
    """Names in a checkpoint's model, without those of the adapters, as PEFT writes them."""
    names = {entry.fqn for entry in inspect(url).entries if entry.fqn.startswith("model.")}
    return {name.removeprefix("model.").replace(".default", "") for name in names}


def test_it_saves_what_the_trainer_saves() -> None:
    made = trainer(Run(ROOT, steps=2, adapter=True))
    made.train()
    url = f"{ROOT}/step-00000002"
    made.save_model("stock")
    with safe_open("stock/adapter_model.safetensors", "pt") as file:
        assert saved_names(url) == set(file.keys())


@pytest.mark.parametrize("sharded", [False, True], ids=["ddp", "fsdp2"])
def test_it_goes_on_to_the_same_bits(tmp_path: Path, sharded: bool) -> None:
    run = Run(ROOT, sharded, adapter=True, steps=6)
    [(_, *expected)] = run_ranks(1, train, Run(f"{ROOT}-expected", sharded, adapter=True, steps=6), tmp_path, None)
    run_ranks(2, train, Run(ROOT, sharded, adapter=True, steps=4), tmp_path, None)
    assert all(".lora_" in name for name in saved_names(f"{ROOT}/step-00000004"))
    assert run_ranks(2, train, run, tmp_path) == [(4, *expected)] * 2


def tiny() -> LlamaForCausalLM:
    torch.manual_seed(3)
    return tiny_llama()


def two_adapters() -> PeftModel:
    model = get_peft_model(tiny(), LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]))
    model.add_adapter("other", LoraConfig(target_modules=["v_proj"], use_dora=True))  # not active: it is frozen
    return model


def own_adapter() -> nn.Module:
    model = tiny()
    model.add_adapter(LoraConfig(target_modules=["q_proj"]))  # of transformers, without a PeftModel
    return model


def with_new_tokens() -> PeftModel:
    tiny().save_pretrained("base")
    model = LlamaForCausalLM.from_pretrained("base")
    model.resize_token_embeddings(41)
    return get_peft_model(model, LoraConfig(target_modules=["q_proj"]))


MODELS = {
    "several": two_adapters,
    "of_transformers": own_adapter,
    "new_tokens": with_new_tokens,
    "vera": lambda: get_peft_model(tiny(), VeraConfig(target_modules=["q_proj"])),
    "prefix": lambda: get_peft_model(tiny(), PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)),
}


@pytest.mark.parametrize("kind", MODELS)
def test_accelerate_saves_every_kind_of_adapter_and_loads_it(kind: str) -> None:
    def changed(by: float) -> tuple[Accelerator, nn.Module]:
        accelerator = Accelerator(cpu=True)
        model = accelerator.prepare(MODELS[kind]())
        with torch.no_grad():
            for tensor in model_part(model).state_dict().values():
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
    assert sum(tensor.nbytes for tensor in read_tensors(f"{ROOT}/step-1", "model.*").values()) == stock
    accelerator.free_memory()

    accelerator, model = changed(2)
    load_state(accelerator, f"{ROOT}/step-1")
    found = model.state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_trl(tmp_path: Path) -> None:
    class S3SFTTrainer(S3Checkpoints, SFTTrainer):
        pass

    def sft(steps: int) -> S3SFTTrainer:
        arguments = SFTConfig(
            output_dir="output", use_cpu=True, bf16=False, max_steps=steps, save_steps=2, report_to="none",
            lr_scheduler_type="constant", per_device_train_batch_size=2, logging_steps=1, disable_tqdm=True,
            gradient_checkpointing=False,
        )  # fmt: skip
        return S3SFTTrainer(
            model=tiny(), args=arguments, processing_class=tiny_tokenizer(), checkpoint_root=ROOT,
            peft_config=LoraConfig(target_modules=["q_proj"], lora_dropout=0.1),
            train_dataset=Dataset.from_dict({"text": [f"w{number} w{number + 1} w3" for number in range(1, 12)]}),
        )  # fmt: skip

    def losses(made: Any) -> list[float]:
        return [entry["loss"] for entry in made.state.log_history if "loss" in entry]

    sft(2).train()
    assert all(".lora_" in name for name in saved_names(f"{ROOT}/step-00000002"))
    resumed = sft(4)
    resumed.train(resume_from_checkpoint=True)
    other = sft(4)
    other.checkpoint_root = f"{ROOT}-expected"
    other.train()
    assert losses(resumed) == losses(other)
