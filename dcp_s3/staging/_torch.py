"""The private torch APIs that staging needs, in one place."""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ClassVar

import torch
from torch.cuda._pin_memory_utils import pin_memory, unpin_memory
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.distributed.checkpoint import _async_process_executor as async_process_executor
from torch.distributed.checkpoint import _async_thread_executor as async_thread_executor
from torch.distributed.checkpoint._async_process_executor import (
    _ProcessBasedAsyncCheckpointExecutor as ProcessBasedAsyncCheckpointExecutor,
)
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = [
    "AsyncCollectiveTensor",
    "ProcessBasedAsyncCheckpointExecutor",
    "ShardedTensor",
    "find_future_of_save",
    "is_traceable_wrapper_subclass",
    "pin_memory",
    "rebuild_sharded_tensor",
    "save_in_turn",
    "unpin_memory",
]


def rebuild_sharded_tensor(source: ShardedTensor, tensors: Sequence[torch.Tensor]) -> ShardedTensor:
    """``source`` with its local shards replaced by ``tensors`` in CPU memory; its metadata says so."""
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


_MAX_STEPS = 12


def find_future_of_save() -> Future[Any] | None:
    """The future of the asynchronous save that this thread carries out, None if it does not.

    `dcp.async_save` gives it to its caller alone. The function that the thread runs is called by the item of work of
    an executor, which has the future.
    """
    frame, inside = sys._getframe(1), False
    for _ in range(_MAX_STEPS):
        if inside:
            future = getattr(frame.f_locals.get("self"), "future", None)
            if isinstance(future, Future):
                return future
        inside = inside or frame.f_code is async_thread_executor.save_wrapper.__code__
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return None


class _InTurn:
    """Stands in for the thread pool of one PROCESS save: all of them run on the same thread, in the order of calls."""

    _thread: ThreadPoolExecutor | None = None
    _latest: Future[Any] | None = None
    on_end: ClassVar[Callable[[Future[Any]], None] | None] = None

    def submit(self, function: Callable[..., Any], **arguments: Any) -> Future[Any]:
        if _InTurn._thread is None:
            _InTurn._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="AsyncCheckpointExecutor")
        _InTurn._latest = _InTurn._thread.submit(function, **arguments)
        if _InTurn.on_end is not None:
            _InTurn._latest.add_done_callback(_InTurn.on_end)
        return _InTurn._latest

    def wait_for_process(self) -> None:
        """Wait while the first save starts the checkpoint process. To start it takes a collective step, which a second
        save would take part in again on those ranks only that do not see the process yet."""
        while (
            async_process_executor._CHECKPOINT_PROCESS is None
            and _InTurn._latest is not None
            and not _InTurn._latest.done()
        ):
            time.sleep(0.01)

    def shutdown(self, wait: bool = True) -> None:
        """Nothing: the thread goes on to the next save."""


def _use_one_thread(executor: Any) -> None:
    executor._executor = _InTurn()
    executor._executor.wait_for_process()


def save_in_turn(on_end: Callable[[Future[Any]], None]) -> None:
    """Make saves by `AsyncCheckpointerType.PROCESS` that overlap queue up; ``on_end`` is called with each that ended.

    torch 2.13 gives each a thread of its own, and all threads talk to the one checkpoint process through one pipe,
    unlocked: answers go to the wrong save or are cut up, two first saves start two processes, and ranks may send
    overlapping saves in different orders, which mixes up their collectives.
    """
    _InTurn.on_end = staticmethod(on_end)
    ProcessBasedAsyncCheckpointExecutor.__init__ = _use_one_thread  # type: ignore[assignment]
