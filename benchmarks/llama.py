"""The state that is saved and loaded: the parameters of a Llama of any size."""

from __future__ import annotations

import math

import torch

#: Hidden size and feed-forward size grow with the model in Llama's proportions (Llama 3 8B: 4096,
#: 14336); a quarter as many key/value heads as query heads.
_HEAD = 128


def llama_shapes(total_bytes: int, *, layers: int = 20) -> dict[str, tuple[int, ...]]:
    """Names and shapes of fp32 parameters that take about ``total_bytes`` (never less).

    Pure. The hidden size is chosen so that the model has about ``layers`` layers, by default as many as a real one;
    the last layers are added until the size is reached.
    """
    if total_bytes <= 0:
        raise ValueError(f"total_bytes is {total_bytes}, expected more than 0")
    # About 10 * hidden**2 parameters in each layer.
    hidden = max(_HEAD, round(math.sqrt(total_bytes / 4 / (10 * layers)) / _HEAD) * _HEAD)
    feed_forward = hidden * 7 // 2
    key_value = max(_HEAD, hidden // 4 // _HEAD * _HEAD)
    vocabulary = 8 * hidden
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocabulary, hidden),
        "model.norm.weight": (hidden,),
    }
    layer: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (hidden, hidden),
        "self_attn.k_proj.weight": (key_value, hidden),
        "self_attn.v_proj.weight": (key_value, hidden),
        "self_attn.o_proj.weight": (hidden, hidden),
        "mlp.gate_proj.weight": (feed_forward, hidden),
        "mlp.up_proj.weight": (feed_forward, hidden),
        "mlp.down_proj.weight": (hidden, feed_forward),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    number = 0
    while _bytes(shapes) < total_bytes:
        shapes |= {f"model.layers.{number}.{name}": shape for name, shape in layer.items()}
        number += 1
    return shapes


def llama_state(total_bytes: int, *, seed: int = 0) -> dict[str, torch.Tensor]:
    """Those parameters with random values that ``seed`` determines, contiguous on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.empty(shape).uniform_(-1, 1, generator=generator)
        for name, shape in llama_shapes(total_bytes).items()
    }


def llama_bytes(total_bytes: int) -> int:
    """Bytes that the parameters really take."""
    return _bytes(llama_shapes(total_bytes))


def _bytes(shapes: dict[str, tuple[int, ...]]) -> int:
    return sum(4 * math.prod(shape) for shape in shapes.values())
