"""One hash for a whole training state, however it is sharded: to compare states bit for bit."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def state_digest(state: Mapping[str, Any]) -> str:
    """SHA-256 (hex) over the names, dtypes, shapes and bits of everything in a state dict.

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
