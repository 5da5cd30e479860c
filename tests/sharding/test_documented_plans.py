"""The plans of docs/hand-sharded.md fit the models that they are for."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import dcp_s3

_PAGE = (Path(__file__).resolve().parents[2] / "docs" / "hand-sharded.md").read_text()
_TP, _HIDDEN, _WIDE, _WORDS = 4, 16, 64, 40


def _documented(name: str) -> dict[str, Any]:
    (block,) = [block for block in re.findall(r"```python\n(.*?)```", _PAGE, re.DOTALL) if f"{name} = {{" in block]
    values: dict[str, Any] = {"dcp_s3": dcp_s3, "hidden": _HIDDEN, "tp": _TP}
    exec(block, values)
    found: dict[str, Any] = values[name]
    return found


# Of the whole model; a dimension that is split is the first to differ from a rank's.
_LLAMA = {
    "embed_tokens.weight": ((_WORDS, _HIDDEN), 0), "lm_head.weight": ((_WORDS, _HIDDEN), 0),
    "layers.0.self_attn.q_proj.weight": ((_HIDDEN, _HIDDEN), 0),
    "layers.0.self_attn.k_proj.weight": ((8, _HIDDEN), 0), "layers.0.self_attn.v_proj.weight": ((8, _HIDDEN), 0),
    "layers.0.self_attn.o_proj.weight": ((_HIDDEN, _HIDDEN), 1),
    "layers.0.mlp.gate_proj.weight": ((_WIDE, _HIDDEN), 0), "layers.0.mlp.up_proj.weight": ((_WIDE, _HIDDEN), 0),
    "layers.0.mlp.down_proj.weight": ((_HIDDEN, _WIDE), 1),
    "layers.0.input_layernorm.weight": ((_HIDDEN,), None),
    "layers.0.post_attention_layernorm.weight": ((_HIDDEN,), None), "norm.weight": ((_HIDDEN,), None),
}  # fmt: skip
_GPT2 = {
    "transformer.wte.weight": ((_WORDS, _HIDDEN), 0), "transformer.wpe.weight": ((32, _HIDDEN), None),
    "transformer.h.0.ln_1.weight": ((_HIDDEN,), None), "transformer.h.0.ln_1.bias": ((_HIDDEN,), None),
    "transformer.h.0.attn.c_attn.weight": ((_HIDDEN, 3 * _HIDDEN), 1),
    "transformer.h.0.attn.c_attn.bias": ((3 * _HIDDEN,), 0),
    "transformer.h.0.attn.c_proj.weight": ((_HIDDEN, _HIDDEN), 0),
    "transformer.h.0.attn.c_proj.bias": ((_HIDDEN,), None),
    "transformer.h.0.mlp.c_fc.weight": ((_HIDDEN, _WIDE), 1), "transformer.h.0.mlp.c_fc.bias": ((_WIDE,), 0),
    "transformer.h.0.mlp.c_proj.weight": ((_WIDE, _HIDDEN), 0), "transformer.h.0.mlp.c_proj.bias": ((_HIDDEN,), None),
    "transformer.ln_f.weight": ((_HIDDEN,), None), "lm_head.weight": ((_WORDS, _HIDDEN), 0),
}  # fmt: skip


@pytest.mark.parametrize(("name", "model"), [("llama", _LLAMA), ("gpt2", _GPT2)])
def test_a_documented_plan_says_how_its_model_is_split(name: str, model: dict[str, Any]) -> None:
    def local(shape: tuple[int, ...], dim: int | None) -> torch.Tensor:
        return torch.zeros([n // _TP if d == dim else n for d, n in enumerate(shape)])

    weights = {fqn: local(*whole) for fqn, whole in model.items()}
    moments = {fqn: {"exp_avg": each.clone(), "step": torch.tensor(1.0)} for fqn, each in weights.items()}
    state = {"model": weights, "optimizer": {"state": moments}}
    found = dcp_s3.shard_state(state, _documented(name), rank=1, world_size=_TP)
    for fqn, (shape, dim) in model.items():
        for each in (found["model"][fqn], found["optimizer"]["state"][fqn]["exp_avg"]):
            assert tuple(each.shape) == shape, fqn
            assert (type(each) is torch.Tensor) == (dim is None), fqn
    if name == "gpt2":
        assert len(found["model"]["transformer.h.0.attn.c_attn.weight"].boxes) == 3
