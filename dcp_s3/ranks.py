"""This process among the ranks of torch.distributed."""

from __future__ import annotations

import torch.distributed as dist


def rank() -> int:
    """This process's rank; 0 without a process group."""
    return dist.get_rank() if is_initialized() else 0


def world_size() -> int:
    """Number of ranks; 1 without a process group."""
    return dist.get_world_size() if is_initialized() else 1


def is_initialized() -> bool:
    """Whether there is a default process group."""
    return dist.is_available() and dist.is_initialized()
