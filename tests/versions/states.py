"""What is saved with one version of torch and loaded with another: every value follows from its name."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests.end_to_end.states import DTYPES, random_tensor

WHOLE = (6, 5)
"""Shape of the tensors that ranks save in shards."""


def one_rank() -> dict[str, Any]:
    """Dtypes, strides and other entries that all supported versions have."""
    return {
        "dtypes": {str(dtype): random_tensor((2, 3), dtype, i) for i, dtype in enumerate(DTYPES)},
        "scalar": random_tensor((), torch.bfloat16, 1),
        "empty": torch.empty(3, 0, 2),
        "transposed": random_tensor((4, 3), torch.float32, 2).t(),
        "channels_last": random_tensor((2, 3, 4, 5), torch.float16, 3).to(memory_format=torch.channels_last),
        "parameter": torch.nn.Parameter(torch.arange(3.0)),
        "objects": {"step": 12, "text": "läuft", "none": None, "list": [1, {"x": 2.5}]},
    }


def whole(name: str) -> torch.Tensor:
    """The whole of a tensor that ranks save in shards."""
    return torch.arange(len(name), len(name) + 30, dtype=torch.float32).reshape(WHOLE)


def ranks(blank: bool = False) -> dict[str, Any]:
    """Of each of several ranks: shards along both dimensions, and what all have."""
    import torch.distributed as dist

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    placements = {"rows": Shard(0), "columns": Shard(1), "replicated": Replicate()}
    state: dict[str, Any] = {
        name: DTensor.from_local(_part(torch.zeros(WHOLE) if blank else whole(name), each), mesh, [each], shape=WHOLE,
                                 stride=(WHOLE[1], 1), run_check=False)
        for name, each in placements.items()
    }  # fmt: skip
    return {**state, "step": 0 if blank else 7}


def _part(full: torch.Tensor, placement: Any) -> torch.Tensor:
    import torch.distributed as dist

    if isinstance(placement, Replicate):
        return full.clone()
    chunks = full.chunk(dist.get_world_size(), placement.dim)
    return chunks[dist.get_rank()].contiguous()
