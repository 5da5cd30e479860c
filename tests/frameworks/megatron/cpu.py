"""Megatron-Core on a machine without a GPU: what it asks of CUDA without looking whether there is one."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.dist_checkpointing.strategies import async_utils


def pretend() -> None:
    """Let the CPU answer for a GPU, in this process and in the persistent ones that it starts."""
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.device_count = lambda: 1
    torch.cuda.set_device = torch.cuda.synchronize = lambda *_: None
    if async_utils.PersistentAsyncCaller.async_loop is not async_loop:
        async_utils.PersistentAsyncCaller.async_loop = staticmethod(async_loop)


def async_loop(*args: Any) -> None:
    """What the persistent process runs: there, Megatron's own is as it was."""
    stock = async_utils.PersistentAsyncCaller.async_loop
    pretend()
    torch.set_num_threads(1)
    stock(*args)
