"""Weights as transformers and safetensors wrote them, loaded from S3 on several ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import dcp_s3
from tests.end_to_end.states import assert_same
from tests.offline.weights import model
from tests.ranks import run_ranks
from tests.retention.making import put

pytestmark = pytest.mark.servers("memory")

CONFIG = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    tie_word_embeddings=True,
)  # fmt: skip


def upload(s3: Any, directory: Path, url: str) -> None:
    for path in directory.iterdir():
        put(s3, url, path.name, path.read_bytes())


def parallel(mesh: str) -> LlamaForCausalLM:
    """A model of zeros, sharded, tensor parallel, or both."""
    found = AutoModelForCausalLM.from_config(CONFIG)
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
    torch.manual_seed(5)
    theirs = AutoModelForCausalLM.from_config(CONFIG)
    theirs.save_pretrained(tmp_path, max_shard_size="20KB")
    files = list(tmp_path.glob("*.safetensors"))
    assert len(files) > 1
    upload(s3, tmp_path, f"{root}/hf")
    saved = {name: tensor for path in files for name, tensor in load_file(path).items()}
    for found in run_ranks(4, load_parallel, f"{root}/hf", mesh):
        assert_same({name: found[name] for name in saved}, saved)
        assert_same(found, dict(theirs.state_dict()))  # the head is tied


def test_every_dtype_of_a_file_of_safetensors(root: str, s3: Any, tmp_path: Path) -> None:
    save_file({name: tensor.contiguous().clone() for name, tensor in model().items()}, tmp_path / "model.safetensors")
    upload(s3, tmp_path, f"{root}/hf")
    expected = load_file(tmp_path / "model.safetensors")
    state = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    dcp_s3.load_safetensors(f"{root}/hf", state)
    assert_same(state, expected)
