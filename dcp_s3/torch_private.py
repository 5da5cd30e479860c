"""Every private name of torch that dcp_s3 uses, for distributed checkpoints and for staging: fourteen.

All are in torch 2.9 to 2.15 (``make test-torch``). What relies on each, and what to do when it moves, stands in
``tests/test_torch_private.py``, which fails then.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint._async_executor import _AsyncCheckpointExecutor as AsyncCheckpointExecutor
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo
from torch.distributed.checkpoint.filesystem import _StorageReaderTransforms as ReaderTransforms
from torch.distributed.checkpoint.planner_helpers import _create_chunk_list as create_chunk_list
from torch.distributed.distributed_c10d import _get_default_store

try:  # since torch 2.15, which warns of the other name
    _fsspec: Any = importlib.import_module("torch.distributed.checkpoint.fsspec_filesystem")
except ImportError:
    _fsspec = importlib.import_module("torch.distributed.checkpoint._fsspec_filesystem")

FsspecReader, FsspecWriter = _fsspec.FsspecReader, _fsspec.FsspecWriter
FileReader = torch._C.PyTorchFileReader  # reads the archives that torch.save writes

__all__ = [
    "AsyncCheckpointExecutor", "FileReader", "FsspecReader", "FsspecWriter", "ReaderTransforms", "ShardedTensor",
    "StorageInfo", "create_chunk_list", "default_store",
    "is_traceable_wrapper_subclass", "make_wrapper", "narrow_tensor_by_index",
    "pin_memory", "rebuild_sharded_tensor", "record_sizes", "unpin_memory",
]  # fmt: skip

_Tensor = TypeVar("_Tensor", bound=torch.Tensor)


def default_store() -> Any:
    """The `torch.distributed.Store` through which the ranks of the default group found each other; None without."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    # MPI needs no store. That of the fake backend stores nothing.
    return None if dist.get_backend() in ("mpi", "fake") else _get_default_store()


def pin_memory(address: int, size: int) -> None:
    """Register host memory with CUDA. RuntimeError if CUDA refuses."""
    cuda: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    status = int(cuda.cudaHostRegister(address, size, 1))  # 1: for all contexts
    if status:
        raise RuntimeError(f"cudaHostRegister answers {status}, perhaps for an operation before it")


def unpin_memory(address: int) -> None:
    """Undo `pin_memory`."""
    cuda: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    cuda.cudaHostUnregister(address)


def narrow_tensor_by_index(tensor: torch.Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    """A view of the box of ``sizes`` at ``offsets``."""
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        if size < tensor.size(dim):
            tensor = tensor.narrow(dim, offset, size)
    return tensor


def is_traceable_wrapper_subclass(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a subclass that says which tensors it is made of, such as a DTensor or a quantised one."""
    return all(hasattr(tensor, name) for name in ("__tensor_flatten__", "__tensor_unflatten__"))


def record_sizes(reader: Any) -> dict[str, int]:
    """Bytes of each record of an archive, as torch's reader finds it; before torch 2.13 by reading it."""
    find = getattr(reader, "get_record_size", lambda name: len(reader.get_record(name)))
    return {name: int(find(name)) for name in reader.get_all_records()}


def rebuild_sharded_tensor(source: ShardedTensor, tensors: Sequence[torch.Tensor]) -> ShardedTensor:
    """``source`` with ``tensors`` in CPU memory as its local shards, and metadata to match."""
    cpu = torch.device("cpu")
    metadata = copy.deepcopy(source.metadata())
    shards = [
        type(shard)(tensor, copy.deepcopy(shard.metadata))
        for shard, tensor in zip(source.local_shards(), tensors, strict=True)
    ]
    for each in (*metadata.shards_metadata, *(shard.metadata for shard in shards)):
        if each.placement is not None:
            each.placement._device = cpu
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        shards,
        sharded_tensor_metadata=metadata,
        process_group=source._process_group,
        init_rrefs=source._init_rrefs,
    )


def make_wrapper(cls: type[_Tensor], shape: Sequence[int], like: torch.Tensor) -> _Tensor:
    """A tensor of the subclass ``cls`` without memory, of the dtype and on the device of ``like``."""
    made: _Tensor = torch.Tensor._make_wrapper_subclass(
        cls, torch.Size(shape), dtype=like.dtype, device=like.device, requires_grad=False
    )
    return made
