"""Export and import with Hugging Face's own libraries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig

import dcp_s3
from tests.end_to_end.states import assert_same
from tests.offline.weights import model, save

pytestmark = pytest.mark.servers("memory")


def tiny(**arguments: Any) -> Any:
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, **arguments
    )
    return AutoModelForCausalLM.from_config(config)


def test_what_is_exported_is_loaded(root: str, tmp_path: Path) -> None:
    save({"model": model()}, f"{root}/x")
    dcp_s3.export(f"{root}/x", tmp_path, rename={"^model[.]": ""})
    assert_same(load_file(tmp_path / "model.safetensors"), model())
    with safetensors.safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert_same(file.get_slice("large")[3:9, 5:], model()["large"][3:9, 5:])


@pytest.mark.parametrize("shard", ["5GB", "10KB"])
def test_a_model_of_transformers(root: str, tmp_path: Path, shard: str) -> None:
    ours = tiny(tie_word_embeddings=False)
    save({"model": ours.state_dict(), "step": 3}, f"{root}/x")
    result = dcp_s3.export(f"{root}/x", tmp_path, include="model.*", rename={"^model[.]": ""}, max_shard_size=shard)
    assert (len(result.files) > 1) == (shard == "10KB")
    ours.config.save_pretrained(tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, use_safetensors=True)
    assert_same(dict(theirs.state_dict()), dict(ours.state_dict()))


@pytest.mark.parametrize("tied", [True, False])  # tied: without lm_head.weight
@pytest.mark.parametrize("shard", ["5GB", "10KB"])
def test_what_transformers_saved_is_trained_on(root: str, tmp_path: Path, shard: str, tied: bool) -> None:
    theirs = tiny(tie_word_embeddings=tied)
    theirs.save_pretrained(tmp_path, max_shard_size=shard)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard == "10KB")
    dcp_s3.import_weights(tmp_path, f"{root}/x", prefix="model.")
    torch.manual_seed(6)
    ours = AutoModelForCausalLM.from_config(theirs.config)
    state = {"model": ours.state_dict()}
    dcp.load(state, storage_reader=dcp_s3.S3StorageReader(f"{root}/x"), planner=dcp_s3.S3LoadPlanner())
    assert_same(dict(ours.state_dict()), dict(theirs.state_dict()))
