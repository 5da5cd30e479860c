"""What the ranks of these tests run."""

from __future__ import annotations

import math
import os
import signal
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.core import CheckpointingException, check_is_distributed_checkpoint
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.serialization import (
    get_default_load_sharded_strategy,
    load_content_metadata,
    load_sharded_metadata,
)
from megatron.core.dist_checkpointing.strategies import async_utils
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.msc_utils import MultiStorageClientFeature
from torch.distributed.checkpoint.api import CheckpointException

from dcp_s3 import latest
from dcp_s3.integrations import megatron
from dcp_s3.save.save import Save
from tests.preload import MODULES

MODULES.append("megatron.core.dist_checkpointing")  # imported once, by the process that ranks are forked from

MODES = ("sync", "forked", "persistent")


# --- a state as tensor-parallel ranks hold it: every value follows from the step and the name -----------------

SHAPES: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "decoder.qkv.weight": ((24, 16), torch.bfloat16),
    "decoder.mlp.weight": ((16, 24), torch.float32),
    "decoder.bias": ((24,), torch.float32),
    "norm.weight": ((8,), torch.float64),
    "optimizer.exp_avg.decoder.qkv.weight": ((24, 16), torch.float32),
    "optimizer.exp_avg.decoder.mlp.weight": ((16, 24), torch.float32),
}
REPLICATED = {"norm.weight"}


def whole(name: str, step: int) -> torch.Tensor:
    """A tensor as a whole."""
    shape, dtype = SHAPES[name]
    generator = torch.Generator().manual_seed(1000 * step + list(SHAPES).index(name))
    return torch.randn(shape, generator=generator).to(dtype)


def splits(name: str, layout: str, world: int) -> tuple[int, ...]:
    """In how many pieces each axis of a tensor is cut."""
    dims = len(SHAPES[name][0])
    if name in REPLICATED:
        return (1,) * dims
    if layout == "rows" or dims == 1:
        return (world, *[1] * (dims - 1))
    if layout == "columns":
        return (1, world)
    return (2, world // 2) if world > 1 else (1, 1)


def sharded(step: int, layout: str = "rows", *, blank: bool = False) -> dict[str, Any]:
    """This rank's state for Megatron: what is sharded, and a common part."""
    rank, world = dist.get_rank(), dist.get_world_size()
    state: dict[str, Any] = {}
    for name in SHAPES:
        cut = splits(name, layout, world)
        piece = _piece(whole(name, step), cut, rank)
        if blank:
            piece = torch.zeros_like(piece)
        place = _place(cut, rank)
        state[name] = ShardedTensor.from_rank_offsets(
            name,
            piece,
            *((axis, at, count) for axis, (at, count) in enumerate(zip(place, cut, strict=True)) if count > 1),
            replica_id=rank if name in REPLICATED else 0,
        )
    state["rng"] = ShardedObject("rng", None if blank else {"seed": step}, (1,), (0,), replica_id=rank)
    if not blank:
        state["iteration"] = step
        state["args"] = {"lr": 0.5**step, "layers": [step, 2]}
    return state


def check(loaded: dict[str, Any], step: int, layout: str = "rows") -> None:
    """What a load gave this rank is, bit for bit, the state of ``step``."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for name in SHAPES:
        expected = _piece(whole(name, step), splits(name, layout, world), rank)
        assert loaded[name].dtype == expected.dtype, name
        assert torch.equal(loaded[name].view(torch.uint8), expected.view(torch.uint8)), name
    assert loaded["rng"] == {"seed": step}
    assert loaded["iteration"] == step
    assert loaded["args"] == {"lr": 0.5**step, "layers": [step, 2]}


def _place(cut: tuple[int, ...], rank: int) -> tuple[int, ...]:
    """Which piece of each axis a rank has."""
    return tuple(map(int, numpy.unravel_index(rank % math.prod(cut), cut)))


def _piece(tensor: torch.Tensor, cut: tuple[int, ...], rank: int) -> torch.Tensor:
    for axis, (at, count) in enumerate(zip(_place(cut, rank), cut, strict=True)):
        tensor = tensor.chunk(count, axis)[at]
    return tensor.contiguous()


# --- a machine without a GPU: what Megatron asks of CUDA without looking whether there is one -----------------


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


# --- ranks ----------------------------------------------------------------------------------------------


class Trainer:
    """One rank of Megatron, with the adapter, that saves and loads as Megatron's training loop does."""

    def __init__(self, mode: str = "sync", **options: Any) -> None:
        pretend()
        megatron.install()
        self.mode = mode
        self.queue = AsyncCallsQueue(persistent=mode == "persistent")
        self.strategy: Any = TorchDistSaveShardedStrategy("torch_dist", 1, **options)

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_: object) -> None:
        self.queue.close()

    def save(self, url: str, step: int, layout: str = "rows", **options: Any) -> None:
        self.save_state(url, sharded(step, layout), **options)

    def save_state(self, url: str, state: dict[str, Any], *, wait: bool = True, **options: Any) -> None:
        request = dist_checkpointing.save(state, url, self.strategy, async_sharded_save=self.mode != "sync", **options)
        if request is not None:
            self.queue.schedule_async_request(request)
        if wait:
            self.queue.maybe_finalize_async_calls(blocking=True)

    def load(self, url: str, step: int, layout: str = "rows", **options: Any) -> None:
        loaded = dist_checkpointing.load(sharded(step, layout, blank=True), url, **options)
        check(loaded, step, layout)


def save(url: str, step: int, layout: str, mode: str = "sync", **options: Any) -> list[str]:
    """Save, and go on changing the state; returns the files that this left in the working directory."""
    with Trainer(mode, **options) as rank:
        state = sharded(step, layout)
        tensors = [state[name].data for name in SHAPES]
        rank.save_state(url, state, wait=False)
        if mode != "sync":
            for tensor in tensors:
                tensor.zero_()
        rank.queue.maybe_finalize_async_calls(blocking=True)
    return os.listdir()


def load(url: str, step: int, layout: str) -> None:
    with Trainer() as rank:
        rank.load(url, step, layout)


def save_twice_at_once(root: str) -> None:
    """Two saves under way: Megatron lets the later one end first."""
    with Trainer("forked") as rank:
        for step in (1, 2):
            rank.save(f"{root}/iter_{step}", step, wait=False)
        rank.queue.maybe_finalize_async_calls(blocking=True)
        for step in (1, 2):
            rank.load(f"{root}/iter_{step}", step)


def save_with_cached_structure(root: str, mode: str) -> list[bool]:
    """Several saves of one structure; returns whether each found the plans of the one before it reusable."""
    validated = []
    with Trainer(mode, cached_metadata=True) as rank:
        for step in range(1, 5):
            rank.save(f"{root}/iter_{step}", step, "columns")
            validated.append(bool(rank.strategy.validated_cache_reuse))
        for step in range(1, 5):
            rank.load(f"{root}/iter_{step}", step, "rows")
    return validated


def save_and_load_fully_parallel(url: str, mode: str) -> int:
    """Every tensor is replicated on all ranks; returns how many of them this rank wrote."""
    with Trainer(mode) as rank:
        rank.strategy = FullyParallelSaveStrategyWrapper(rank.strategy, do_cache_distribution=True)
        for step in (1, 2):
            state = _replicated(step)
            rank.save_state(f"{url}-{step}", state)
            written = [name for name in SHAPES if state[name].replica_id == 0]
        blank = _replicated(2)
        for name in SHAPES:
            blank[name].data.zero_()
        strategy = FullyParallelLoadStrategyWrapper(
            get_default_load_sharded_strategy(f"{url}-2"), exchange_algo="gather_object"
        )
        loaded = dist_checkpointing.load(blank, f"{url}-2", strategy)
        for name in SHAPES:
            assert torch.equal(loaded[name], whole(name, 2)), name
        return len(written)


def _replicated(step: int) -> dict[str, Any]:
    return {
        name: ShardedTensor.from_rank_offsets(name, whole(name, step), replica_id=dist.get_rank()) for name in SHAPES
    }


def fail_to_save(url: str, mode: str) -> dict[int, str]:
    """A save that fails; returns what each rank is said to have failed with."""
    with Trainer(mode) as rank:
        try:
            rank.save(url, 1)
        except CheckpointException as error:
            return {number: f"{type(cause).__name__}: {cause}" for number, (cause, _) in error.failures.items()}
    raise AssertionError("it was saved")


def lose_the_process(url: str) -> dict[int, str]:
    """The process that saves is killed on rank 1."""
    if int(os.environ["RANK"]) == 1:
        Save.write_data = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
    return fail_to_save(url, "forked")


def save_with_options(url: str) -> None:
    with Trainer(separation_hint="optim", thread_count=4) as rank:
        rank.save(url, 5, content_metadata={"layout": "new"})


def look(url: str) -> None:
    """All other entry points of dist_checkpointing, with what `save_with_options` saved."""
    with Trainer():
        known = dist_checkpointing.load_tensors_metadata(url)
        assert {name: (tuple(t.global_shape), t.dtype) for name, t in known.items()} == SHAPES
        everything = load_sharded_metadata(url)
        assert everything.keys() - known.keys() == {"rng/shard_0_1"}
        plain = dist_checkpointing.load_plain_tensors(url)
        assert plain.keys() - {"iteration", "args", "content_metadata"} == SHAPES.keys()
        for name in SHAPES:
            assert torch.equal(plain[name], whole(name, 5)), name
        common = dist_checkpointing.load_common_state_dict(url)
        assert common["iteration"] == 5
        assert load_content_metadata(url) == {"layout": "new"}
        assert check_is_distributed_checkpoint(url)
        assert not check_is_distributed_checkpoint(f"{url}-missing")
        for missing in (f"{url}-missing", f"{url}/.dcp_s3"):
            with pytest.raises(CheckpointingException, match=missing):
                dist_checkpointing.load({}, missing)


def save_stock(directory: str, step: int, layout: str) -> None:
    """Megatron as it is, without the adapter."""
    pretend()
    MultiStorageClientFeature.disable()
    strategy = TorchDistSaveShardedStrategy("torch_dist", 1, separation_hint="optim")
    dist_checkpointing.save(sharded(step, layout), directory, strategy)


def load_stock(directory: str, step: int, layout: str) -> None:
    pretend()
    MultiStorageClientFeature.disable()
    check(dist_checkpointing.load(sharded(step, layout, blank=True), directory), step, layout)


def save_beside(url: str, directories: list[str], multistorageclient: bool) -> None:
    """With the adapter: to S3, and to paths that are not its business."""
    if not multistorageclient:
        MultiStorageClientFeature.disable()
    with Trainer() as rank:
        for path in (url, *directories):
            rank.save(path, 7)
            rank.load(path, 7, "columns")


def train(root: str, until: int, mode: str = "sync") -> None:
    """Train from the newest checkpoint on, with a checkpoint every two steps; at the end all values must be right."""
    layout = "grid" if dist.get_world_size() > 2 else "rows"
    with Trainer(mode) as rank:
        newest = latest(root)
        state, step = sharded(0, layout), 0
        if newest is not None:
            loaded = dist_checkpointing.load(sharded(0, layout, blank=True), newest.url)
            step = loaded["iteration"]
            for name in SHAPES:
                state[name].data.copy_(loaded[name])
        while step < until:
            step += 1
            for name in SHAPES:
                train_step(state[name].data, step)
            if step % 2 == 0:
                rank.queue.maybe_finalize_async_calls(blocking=True)
                rank.save_state(f"{root}/iter_{step:07d}", {**state, "iteration": step}, wait=mode == "sync")
        rank.queue.maybe_finalize_async_calls(blocking=True)
        for name, shard in sharded(0, layout).items():
            if name in SHAPES:
                for each in range(1, until + 1):
                    train_step(shard.data, each)
                assert torch.equal(shard.data, state[name].data), name


def train_step(tensor: torch.Tensor, step: int) -> None:
    """Each value depends on all steps before."""
    tensor.mul_(0.75).add_(step)
