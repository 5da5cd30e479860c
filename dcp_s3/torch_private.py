"""Every private name of torch that dcp_s3 uses, for distributed checkpoints and for staging.

All were seen in torch 2.13.0. ``tests/test_torch_private.py`` and ``tests/test_torch_calls.py`` say who relies on each,
and fail when one moves.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import sys
from collections.abc import Sequence
from concurrent.futures import Future
from types import FrameType, TracebackType
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.cuda._pin_memory_utils import pin_memory, unpin_memory
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.distributed.checkpoint import _async_process_executor as async_process_executor
from torch.distributed.checkpoint._async_process_executor import (
    _ProcessBasedAsyncCheckpointExecutor as ProcessBasedAsyncCheckpointExecutor,
)
from torch.distributed.checkpoint._async_thread_executor import (
    _ThreadBasedAsyncCheckpointExecutor as ThreadBasedAsyncCheckpointExecutor,
)
from torch.distributed.checkpoint._extension import ExtensionRegistry, StreamTransformExtension
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.api import _wrap_exception as wrap_exception
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo
from torch.distributed.checkpoint.filesystem import _StoragePrefix as StoragePrefix
from torch.distributed.checkpoint.filesystem import _StorageReaderTransforms as ReaderTransforms
from torch.distributed.checkpoint.filesystem import _StorageWriterTransforms as WriterTransforms
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING as MEMORY_FORMAT_ENCODING
from torch.distributed.checkpoint.planner_helpers import _create_chunk_list as create_chunk_list
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.tensor import Placement
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from dcp_s3.torch_version import release

try:  # since torch 2.15, which warns of the other name
    _fsspec: Any = importlib.import_module("torch.distributed.checkpoint.fsspec_filesystem")
except ImportError:
    _fsspec = importlib.import_module("torch.distributed.checkpoint._fsspec_filesystem")

FsspecReader, FsspecWriter = _fsspec.FsspecReader, _fsspec.FsspecWriter
FileReader = torch._C.PyTorchFileReader  # reads the archives that torch.save writes

__all__ = [
    "CURRENT_DCP_VERSION",
    "MEMORY_FORMAT_ENCODING",
    "AsyncCollectiveTensor",
    "ExtensionRegistry",
    "FailedCall",
    "FakeTensorMode",
    "FileReader",
    "FsspecReader",
    "FsspecWriter",
    "ProcessBasedAsyncCheckpointExecutor",
    "ReaderTransforms",
    "ShardedTensor",
    "StorageInfo",
    "StoragePrefix",
    "StreamTransformExtension",
    "ThreadBasedAsyncCheckpointExecutor",
    "WriterTransforms",
    "compute_offset",
    "create_chunk_list",
    "default_store",
    "find_async_save",
    "find_direction",
    "find_failed_call",
    "find_save_group",
    "find_saving_rank",
    "find_upload_future",
    "flatten_state_dict",
    "has_checkpoint_process",
    "is_process_starting",
    "is_traceable_wrapper_subclass",
    "make_wrapper",
    "narrow_tensor_by_index",
    "offset_in_archive",
    "pin_memory",
    "rebuild_sharded_tensor",
    "record_size",
    "unpin_memory",
    "wrap_exception",
]

_Tensor = TypeVar("_Tensor", bound=torch.Tensor)
_LOADER_MODULE = "torch.distributed.checkpoint.state_dict_loader"
_SAVER_MODULE = "torch.distributed.checkpoint.state_dict_saver"
_MAX_STEPS = 8


def find_direction(steps: int = 2 * _MAX_STEPS) -> str:
    """``save`` or ``load``: what of DCP is among the callers, this many frames away at most. Empty: neither."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(steps):
        if frame is None:
            return ""
        module = frame.f_globals.get("__name__")
        if module in (_LOADER_MODULE, _SAVER_MODULE):
            return "load" if module == _LOADER_MODULE else "save"
        frame = frame.f_back
    return ""


def find_save_group() -> str | None:
    """Name of the process group of the save that calls a storage writer; None if its ranks do not communicate.

    DCP does not pass the group to a storage writer. As in a load, it is a variable of torch's `local_step`.
    """
    variables = _local_step_variables(_SAVER_MODULE) or {}
    wrapper: Any = variables.get("distW")
    if not getattr(wrapper, "use_dist", False) or variables.get("use_collectives") is False:
        return None
    group = wrapper.group if wrapper.group is not None else dist.group.WORLD
    return None if group is None or wrapper.get_world_size() < 2 else str(group.group_name)


def find_save_ranks() -> list[int] | None:
    """Ranks of the process group of the save that calls a storage writer; None if DCP knows of no group, or something
    else calls it."""
    wrapper: Any = (_local_step_variables(_SAVER_MODULE) or {}).get("distW")
    if not getattr(wrapper, "use_dist", False):
        alone = wrapper is not None and dist.is_available() and dist.is_initialized()  # with no_dist=True
        return [dist.get_rank()] if alone else None
    return dist.get_process_group_ranks(wrapper.group)


def _local_step_variables(module: str) -> dict[str, Any] | None:
    """The variables of torch's `local_step` in ``module``, if it is the caller."""
    frame: FrameType | None = sys._getframe(2)
    for _ in range(_MAX_STEPS):
        if frame is None:
            return None
        if frame.f_code.co_name == "local_step" and frame.f_globals.get("__name__") == module:
            return frame.f_locals
        frame = frame.f_back
    return None


_DCP = "torch.distributed.checkpoint."
# What the thread of an asynchronous save runs, by AsyncCheckpointerType.
_UPLOADS = {(_DCP + "_async_thread_executor", "save_wrapper"), (_DCP + "_async_process_executor", "_execute_save_impl")}


def find_upload_future() -> Future[Any] | None:
    """The future of the `dcp.async_save` whose thread calls this; None in a `dcp.save`, which raises to its caller.

    DCP gives the future only to the caller of `async_save`. It belongs to the task that the thread runs.
    """
    frame, found = sys._getframe(1).f_back, False
    while frame is not None:
        module = frame.f_globals.get("__name__")
        if found and module == "concurrent.futures.thread":
            variables = frame.f_locals
            future = getattr(variables.get("self"), "future", None)
            if type(variables) is dict:
                variables.clear()  # before Python 3.13: a copy that lives as long as the frame, and keeps the state
            if isinstance(future, Future):
                return future
        found = found or (module, frame.f_code.co_name) in _UPLOADS
        frame = frame.f_back
    return None


class FailedCall(NamedTuple):
    """The `dcp.save` or `dcp.load` of a traceback."""

    storage: Any
    """Its storage writer or reader."""
    loading: bool
    """Whether it was a load."""
    rank: int
    """This process's rank among those that save or load together."""
    url: str | None
    """URL of the checkpoint."""


_WORK = {(_SAVER_MODULE, "_save_state_dict"): "storage_writer", (_LOADER_MODULE, "_load_state_dict"): "storage_reader"}


def find_failed_call(trace: TracebackType | None) -> FailedCall | None:
    """The `dcp.save` or `dcp.load` in which an error was raised; None if the traceback has none."""
    while trace is not None:
        module = trace.tb_frame.f_globals.get("__name__")
        name = _WORK.get((module, trace.tb_frame.f_code.co_name))  # type: ignore[arg-type]
        if name is not None:
            variables = trace.tb_frame.f_locals
            storage, wrapper = variables.get(name), variables.get("distW")
            if storage is not None and isinstance(rank := getattr(wrapper, "rank", None), int):
                url = (variables.get("ckpt_kwargs") or {}).get("checkpoint_id")
                return FailedCall(storage, module == _LOADER_MODULE, rank, None if url is None else str(url))
        trace = trace.tb_next
    return None


def find_saving_rank() -> int | None:
    """This process's rank in the `dcp.save` that calls a storage writer; None if it has no ranks, or none calls."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if (frame.f_globals.get("__name__"), frame.f_code.co_name) == (_SAVER_MODULE, "_save_state_dict"):
            rank = getattr(frame.f_locals.get("distW"), "rank", None)
            return rank if isinstance(rank, int) else None
        frame = frame.f_back
    return None


def find_async_save() -> AsyncCheckpointerType | None:
    """The type of the `dcp.async_save` that is calling a stager; None if something else calls it."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_MAX_STEPS):
        if frame is None:
            return None
        if frame.f_code.co_name == "async_save" and frame.f_globals.get("__name__") == _SAVER_MODULE:
            found = frame.f_locals.get("async_checkpointer_type")
            return found if isinstance(found, AsyncCheckpointerType) else None
        frame = frame.f_back
    return None


def default_store() -> Any:
    """The `torch.distributed.Store` through which the ranks of the default group found each other; None without."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    # MPI needs no store. That of the fake backend stores nothing.
    return None if dist.get_backend() in ("mpi", "fake") else _get_default_store()


def has_checkpoint_process() -> bool:
    """Whether the process of saves by `AsyncCheckpointerType.PROCESS` is there."""
    return async_process_executor._CHECKPOINT_PROCESS is not None


def is_process_starting() -> bool:
    """Whether any thread is starting that process, or about to send a state to it."""
    starting = ProcessBasedAsyncCheckpointExecutor._execute_save_impl.__code__
    for frame in list(sys._current_frames().values()):
        each: FrameType | None = frame
        while each is not None:
            if each.f_code is starting:
                return True
            each = each.f_back
    return False


def record_size(reader: Any, name: str) -> int:
    """Bytes of a record of an archive, as torch's reader finds it; before torch 2.13 by reading it."""
    find = getattr(reader, "get_record_size", None)
    return len(reader.get_record(name)) if find is None else int(find(name))


def without_data() -> contextlib.AbstractContextManager[object]:
    """In it, ``torch.load(map_location="meta")`` makes tensors for `offset_in_archive`; torch 2.11 does so anywhere."""
    return contextlib.nullcontext() if release(torch.__version__) >= (2, 11) else FakeTensorMode()


def offset_in_archive(tensor: torch.Tensor) -> int | None:
    """Byte at which the storage of a tensor begins in the archive from which torch.load made it `without_data`.

    None if torch does not say, as for a tensor that was made otherwise.
    """
    return getattr(tensor.untyped_storage(), "_checkpoint_offset", None)


def rebuild_sharded_tensor(source: ShardedTensor, tensors: Sequence[torch.Tensor]) -> ShardedTensor:
    """``source`` with ``tensors`` in CPU memory as its local shards, and metadata to match."""
    cpu = torch.device("cpu")
    metadata = copy.deepcopy(source.metadata())
    for shard_metadata in metadata.shards_metadata:
        _place(shard_metadata, cpu)
    shards = []
    for shard, tensor in zip(source.local_shards(), tensors, strict=True):
        shard_metadata = copy.deepcopy(shard.metadata)
        _place(shard_metadata, cpu)
        shards.append(Shard(tensor, shard_metadata))
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        shards,
        sharded_tensor_metadata=metadata,
        process_group=source._process_group,
        init_rrefs=source._init_rrefs,
    )


def _place(shard_metadata: Any, device: torch.device) -> None:
    if shard_metadata.placement is not None:
        shard_metadata.placement._device = device


def make_wrapper(cls: type[_Tensor], shape: Sequence[int], like: torch.Tensor) -> _Tensor:
    """A tensor of the subclass ``cls`` without memory, of the dtype and on the device of ``like``."""
    made: _Tensor = torch.Tensor._make_wrapper_subclass(
        cls, torch.Size(shape), dtype=like.dtype, device=like.device, requires_grad=False
    )
    return made


def compute_offset(
    shape: Sequence[int], mesh_shape: Sequence[int], place: Sequence[int], placements: Sequence[Placement]
) -> tuple[int, ...]:
    """Where the chunk of the rank at ``place`` of a mesh begins in a DTensor of ``shape``.

    In a dimension of which the rank has nothing: at its end.
    """
    return _compute_local_shape_and_global_offset(torch.Size(shape), tuple(mesh_shape), list(place), placements)[1]
