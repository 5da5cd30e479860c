"""The one place that touches private parts of torch.distributed.checkpoint.

Everything here was seen in torch 2.13.0; ``tests/checkpoint/test_torch_private.py`` fails loudly when it moves.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from concurrent.futures import Future
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint import _storage_utils
from torch.distributed.checkpoint._async_process_executor import (
    _AsyncCheckpointProcess as AsyncCheckpointProcess,
)
from torch.distributed.checkpoint._extension import ExtensionRegistry, StreamTransformExtension
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo
from torch.distributed.checkpoint.filesystem import _StorageReaderTransforms as ReaderTransforms
from torch.distributed.checkpoint.filesystem import _StorageWriterTransforms as WriterTransforms
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner_helpers import _create_chunk_list as create_chunk_list

from dcp_s3.checkpoint.blocks import Blocks
from dcp_s3.errors import ShapeMismatchError

FileReader = torch._C.PyTorchFileReader  # of the archives of torch.save
storage_utils: Any = _storage_utils  # chooses a writer or reader where none is given

__all__ = [
    "CURRENT_DCP_VERSION",
    "AsyncCheckpointProcess",
    "Caller",
    "ExtensionRegistry",
    "FileReader",
    "ReaderTransforms",
    "ShardedTensor",
    "StorageInfo",
    "StreamTransformExtension",
    "WriterTransforms",
    "create_chunk_list",
    "find_load_group",
    "find_save_group",
    "find_upload_future",
    "get_blocks",
    "get_crc",
    "get_raw_offset",
    "is_first_look",
    "make_storage_info",
    "narrow_tensor_by_index",
    "shape_check",
    "shape_mismatch",
    "storage_utils",
]

# Extra attributes of _StorageInfo. Its pickled state is its __dict__, and other readers ignore what they do not
# know. Without raw_offset, the CRC is that of the whole stored item.
_RAW_OFFSET = "raw_offset"
_CRC = "crc64nvme"
_BLOCK = "crc64nvme_block"
_BLOCK_CRCS = "crc64nvme_blocks"


def make_storage_info(
    relative_path: str,
    offset: int,
    length: int,
    *,
    transform_descriptors: Sequence[str] | None = None,
    raw_offset: int | None = None,
    crc64nvme: int | None = None,
    blocks: Blocks | None = None,
) -> StorageInfo:
    """torch's `_StorageInfo` with our facts about the item.

    Args:
        relative_path: object, relative to the checkpoint.
        offset: of the item in the object, bytes.
        length: of the item, bytes.
        transform_descriptors: of stream extensions, None without.
        raw_offset: of the tensor's raw bytes in the item; None if the item is not raw bytes in a frame.
        crc64nvme: CRC-64/NVME of the raw bytes, or without ``raw_offset`` of the whole item.
        blocks: the CRCs inside of the raw bytes; None without.
    """
    info = StorageInfo(relative_path, offset, length, transform_descriptors)
    if raw_offset is not None:
        setattr(info, _RAW_OFFSET, raw_offset)
    if crc64nvme is not None:
        setattr(info, _CRC, crc64nvme)
    if blocks is not None:
        setattr(info, _BLOCK, blocks.size)
        setattr(info, _BLOCK_CRCS, blocks.crcs)
    return info


def get_raw_offset(info: Any) -> int | None:
    """Offset of the raw bytes in the item, None if not recorded (written by something else)."""
    value = getattr(info, _RAW_OFFSET, None)
    return value if isinstance(value, int) else None


def get_crc(info: Any) -> int | None:
    """Recorded CRC-64/NVME of the item, None if not recorded."""
    value = getattr(info, _CRC, None)
    return value if isinstance(value, int) else None


def get_blocks(info: Any, nbytes: int) -> Blocks | None:
    """Recorded CRCs inside of the ``nbytes`` raw bytes of an item (not 0); None if it has no checksum.

    Without a record of blocks that fits so many bytes, all of them are one block.
    """
    crc, size, crcs = get_crc(info), getattr(info, _BLOCK, None), getattr(info, _BLOCK_CRCS, None)
    if crc is None:
        return None
    if isinstance(size, int) and isinstance(crcs, bytes) and (blocks := Blocks(size, crcs, crc)).is_for(nbytes):
        return blocks
    return Blocks(nbytes, b"", crc)


_PLANNER_MODULE = "torch.distributed.checkpoint.default_planner"


class _CheckedSize(tuple):  # type: ignore[type-arg]
    """A saved size that raises `ShapeMismatchError` where torch's default planner would raise a ValueError."""

    __slots__ = ()
    __hash__ = tuple.__hash__
    __eq__ = tuple.__eq__

    def __ne__(self, other: object) -> bool:
        different = tuple.__ne__(self, other)
        if different is True and sys._getframe(1).f_globals.get("__name__") == _PLANNER_MODULE:
            raise shape_mismatch(str(sys._getframe(1).f_locals.get("fqn", "?")), self, other)
        return bool(different)


def shape_mismatch(fqn: str, saved: Sequence[int], current: Any) -> ShapeMismatchError:
    """The error for an entry whose shape is not that of the tensor to load into."""
    return ShapeMismatchError(  # begins as torch's does, which callers match
        f"Size mismatch between saved {tuple(saved)} and current {tuple(current)} for {fqn}. Remedy: build the "
        "model with the configuration that was saved, or leave this entry out of the state and pass "
        "planner=DefaultLoadPlanner(allow_partial_load=True)",
        fqn=fqn,
    )


def shape_check(metadata: Metadata, *, enable: bool) -> None:
    """Turn on or off our own error for shapes that differ, while torch's planner makes its plan.

    torch raises a bare ValueError from inside the planner, where a storage reader has no say. Between
    `set_up_storage_reader` and `prepare_local_plan` the sizes in the metadata therefore carry the check; it acts on
    comparisons made by torch's default planner only, and is gone afterwards.
    """
    for tensor in metadata.state_dict_metadata.values():
        if isinstance(tensor, TensorStorageMetadata):
            tensor.size = _CheckedSize(tensor.size) if enable else torch.Size(tensor.size)  # type: ignore[assignment]


_LOADER_MODULE = "torch.distributed.checkpoint.state_dict_loader"
_SAVER_MODULE = "torch.distributed.checkpoint.state_dict_saver"
_MAX_STEPS = 8


class Caller(NamedTuple):
    """The load that called a storage reader.

    Attributes:
        group: its process group.
        rank: of this process in it.
        world_size: of the group, at least 2.
        coordinator: rank in the group.
        plain_finish: whether the planner's `finish_plan` is torch's, which returns what it was given and can not fail.
    """

    group: dist.ProcessGroup
    rank: int
    world_size: int
    coordinator: int
    plain_finish: bool


def find_load_group() -> Caller | None:
    """The process group of the `dcp.load` that is calling `read_metadata`; None where it is not all ranks that do so.

    DCP tells it to no storage reader. It is among the variables of torch's `local_step`, which all ranks of the group
    go through, and which has no metadata yet the first time it asks for them: a planner that calls `read_metadata`
    itself, later in `local_step`, gets None, and so does everybody who calls it without `dcp.load`.
    """
    variables = _first_look()
    return None if variables is None else _caller_of(variables)


def is_first_look() -> bool:
    """Whether `dcp.load` is calling `read_metadata` for the metadata of all ranks, before it asks for that of one."""
    return _first_look() is not None


def _first_look() -> dict[str, Any] | None:
    """The variables of torch's `local_step`, if that is what calls, and has not asked for metadata before."""
    variables = _local_step_variables(_LOADER_MODULE)
    if variables is None or variables.get("metadata", ...) is not None or variables.get("global_metadata_exc"):
        return None
    return variables


def find_save_group() -> str | None:
    """Name of the process group of the save that calls a storage writer; None if its ranks tell each other nothing.

    DCP tells it to no storage writer; like that of a load, it is among the variables of torch's `local_step`.
    """
    variables = _local_step_variables(_SAVER_MODULE) or {}
    wrapper: Any = variables.get("distW")
    if not getattr(wrapper, "use_dist", False) or variables.get("use_collectives") is False:
        return None
    group = wrapper.group if wrapper.group is not None else dist.group.WORLD
    return None if group is None or wrapper.get_world_size() < 2 else str(group.group_name)


def _local_step_variables(module: str) -> dict[str, Any] | None:
    """Of torch's `local_step` in ``module``, if that is what calls."""
    frame: FrameType | None = sys._getframe(2)
    for _ in range(_MAX_STEPS):
        if frame is None:
            return None
        if frame.f_code.co_name == "local_step" and frame.f_globals.get("__name__") == module:
            return frame.f_locals
        frame = frame.f_back
    return None


def _caller_of(variables: dict[str, Any]) -> Caller | None:
    wrapper: Any = variables.get("distW")
    if not getattr(wrapper, "use_dist", False):
        return None
    group = wrapper.group if wrapper.group is not None else dist.group.WORLD
    world_size = wrapper.get_world_size()
    if group is None or world_size < 2 or wrapper.rank < 0:
        return None
    finish = getattr(variables.get("planner"), "finish_plan", None)
    plain = getattr(finish, "__func__", None) is DefaultLoadPlanner.finish_plan
    return Caller(group, wrapper.rank, world_size, wrapper.coordinator_rank, plain)


_DCP = "torch.distributed.checkpoint."
# What the thread of an asynchronous save runs, by AsyncCheckpointerType.
_UPLOADS = {(_DCP + "_async_thread_executor", "save_wrapper"), (_DCP + "_async_process_executor", "_execute_save_impl")}


def find_upload_future() -> Future[Any] | None:
    """The future of the `dcp.async_save` whose thread calls this; None in a `dcp.save`, which raises to its caller.

    DCP gives it to nobody but the caller of `async_save`. It is that of the task which the thread runs.
    """
    frame, found = sys._getframe(1).f_back, False
    while frame is not None:
        module = frame.f_globals.get("__name__")
        if found and module == "concurrent.futures.thread":
            variables = frame.f_locals
            future = getattr(variables.get("self"), "future", None)
            if type(variables) is dict:
                variables.clear()  # before Python 3.13 a copy that stays with the frame, and would keep the state
            if isinstance(future, Future):
                return future
        found = found or (module, frame.f_code.co_name) in _UPLOADS
        frame = frame.f_back
    return None
