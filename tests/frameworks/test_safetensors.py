"""Export and loads of weights with Hugging Face's own libraries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import dcp_s3
from tests.end_to_end.states import assert_same
from tests.offline.conftest import model, save
from tests.ranks import run_ranks
from tests.retention.making import put

pytestmark = pytest.mark.servers("memory")


def tiny(**arguments: Any) -> Any:
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, **arguments
    )
    return AutoModelForCausalLM.from_config(config)


def test_what_is_exported_is_loaded(root: str, tmp_path: Path) -> None:
    save({"model": model()}, f"{root}/x")
    dcp_s3.export(f"{root}/x", tmp_path, rename={"^model[.]": ""})
    assert_same(load_file(tmp_path / "model.safetensors"), model())
    with safetensors.safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert_same(file.get_slice("large")[3:9, 5:], model()["large"][3:9, 5:])


@pytest.mark.parametrize("shard", ["5GB", "20KB"])
def test_a_model_of_transformers(root: str, tmp_path: Path, shard: str) -> None:
    ours = tiny(tie_word_embeddings=False)
    save({"model": ours.state_dict(), "step": 3}, f"{root}/x")
    result = dcp_s3.export(f"{root}/x", tmp_path, include="model.*", rename={"^model[.]": ""}, max_shard_size=shard)
    assert (len(result.files) > 1) == (shard == "20KB")
    ours.config.save_pretrained(tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, use_safetensors=True)
    assert_same(dict(theirs.state_dict()), dict(ours.state_dict()))


@pytest.mark.parametrize("tied", [True, False])  # tied: without lm_head.weight
@pytest.mark.parametrize("shard", ["5GB", "20KB"])
def test_what_transformers_saved_is_trained_on(root: str, s3: Any, tmp_path: Path, shard: str, tied: bool) -> None:
    theirs = tiny(tie_word_embeddings=tied)
    theirs.save_pretrained(tmp_path, max_shard_size=shard)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard == "20KB")
    upload(s3, tmp_path, f"{root}/hf")
    torch.manual_seed(6)
    ours = AutoModelForCausalLM.from_config(theirs.config)
    dcp_s3.load_safetensors(f"{root}/hf", {"model": ours.state_dict()}, prefix="model.")
    assert_same(dict(ours.state_dict()), dict(theirs.state_dict()))


# --- loaded on ranks ------------------------------------------------------------------------------------


def upload(s3: Any, directory: Path, url: str) -> None:
    for path in directory.iterdir():
        put(s3, url, path.name, path.read_bytes())


def parallel(mesh: str) -> LlamaForCausalLM:
    """A model of zeros, sharded, tensor parallel, or both."""
    found = tiny(tie_word_embeddings=True)
    with torch.no_grad():
        for parameter in found.parameters():
            parameter.zero_()
    shape, names = ((2, 2), ("dp", "tp")) if mesh == "both" else ((4,), ("dp" if mesh == "fsdp" else "tp",))
    devices = init_device_mesh("cpu", shape, mesh_dim_names=names)
    if mesh != "fsdp":
        columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
        plan: dict[str, Any] = {f"model.layers.*.{name}": ColwiseParallel() for name in columns}
        plan |= {f"model.layers.*.{name}": RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")}
        parallelize_module(found, devices["tp"], plan)
    if mesh != "tp":
        fully_shard(found, mesh=devices["dp"])
    return found


def load_parallel(url: str, mesh: str) -> dict[str, torch.Tensor]:
    net = parallel(mesh)
    dcp_s3.load_safetensors(url, net.state_dict())
    state = net.state_dict()
    return {name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in state.items()}


@pytest.mark.parametrize("mesh", ["fsdp", "tp", "both"])
def test_a_model_of_transformers_on_four_ranks(root: str, s3: Any, tmp_path: Path, mesh: str) -> None:
    theirs = tiny(tie_word_embeddings=True)
    theirs.save_pretrained(tmp_path, max_shard_size="20KB")
    files = list(tmp_path.glob("*.safetensors"))
    assert len(files) > 1
    upload(s3, tmp_path, f"{root}/hf")
    saved = {name: tensor for path in files for name, tensor in load_file(path).items()}
    for found in run_ranks(4, load_parallel, f"{root}/hf", mesh):
        assert_same({name: found[name] for name in saved}, saved)
        assert_same(found, dict(theirs.state_dict()))  # the head is tied
