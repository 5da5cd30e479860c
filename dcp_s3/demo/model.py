"""What the demo trains: a small transformer over bytes, the text that it learns, and one hash for a training state."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class ModelConfig:
    """The sizes of the model. The defaults give 5.1 million parameters: with AdamW's moments, 58 MiB of state."""

    vocabulary: int = 256
    width: int = 384
    layers: int = 3
    heads: int = 6
    hidden: int = 1344
    context: int = 64


class Transformer(nn.Module):
    """Predicts each byte from those before it."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                config.width, config.heads, config.hidden, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(config.layers)
        )
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, time) int64 -> (batch, time, vocabulary) logits."""
        length = tokens.shape[1]
        x = self.tokens(tokens) + self.positions(torch.arange(length))
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        logits: Tensor = self.head(self.norm(x))
        return logits


def standard_library_text() -> Tensor:
    """Text that every Python has: the top-level modules of its standard library (uint8, some megabytes).

    Raises:
        FileNotFoundError: this Python comes without sources.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    sources = b"\n".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    if not sources:
        raise FileNotFoundError(f"this Python has no sources in {folder}: there is no text to train on")
    return torch.frombuffer(bytearray(sources), dtype=torch.uint8)


def batch(
    text: Tensor, *, step: int, sequences: int, length: int, rank: int = 0, ranks: int = 1
) -> tuple[Tensor, Tensor]:
    """This rank's share of the batch of ``step``: inputs, and the bytes that follow them.

    The whole batch depends only on the step. So a run that continues on another number of ranks sees the same text in
    the same order.

    Returns:
        Two (sequences of this rank, length) int64 tensors.
    """
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - length, (sequences,), generator=generator)[rank::ranks]
    windows = text[starts[:, None] + torch.arange(length + 1)].long()
    return windows[:, :-1], windows[:, 1:]


def state_digest(state: Mapping[str, Any]) -> str:
    """SHA-256 (hex) over the names, dtypes, shapes and bits of everything in a state dict, however it is sharded.

    A sharded tensor is hashed as the whole tensor, which is gathered for that. So every rank must call this, and all
    get the same answer.
    """
    digest = hashlib.sha256()
    for name, value in sorted(_leaves(state)):
        digest.update(f"{name}\0".encode())
        if isinstance(value, Tensor):
            tensor = value.full_tensor() if isinstance(value, DTensor) else value
            tensor = tensor.detach().cpu().contiguous()
            digest.update(f"{tensor.dtype} {list(tensor.shape)}\0".encode())
            # As bytes: 0.0 and -0.0 compare equal as floats but differ here; equal NaNs do not.
            digest.update(tensor.reshape(-1).view(torch.uint8).numpy())
        else:
            digest.update(f"{value!r}\0".encode())
    return digest.hexdigest()


def _leaves(state: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """(path, value) of everything that is not a mapping, list or tuple."""
    if isinstance(state, Mapping):
        for key, value in state.items():
            yield from _leaves(value, f"{name}/{key}")
    elif isinstance(state, (list, tuple)):
        for number, value in enumerate(state):
            yield from _leaves(value, f"{name}/{number}")
    else:
        yield name, state
