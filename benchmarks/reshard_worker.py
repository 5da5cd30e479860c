"""What each rank of :mod:`benchmarks.reshard` does; every function here runs on all ranks at once."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
import traceback
import warnings
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from benchmarks.cases import CASES as STORAGE_CASES
from benchmarks.cases import Target
from benchmarks.reshard_cases import Box, Layout, Spec, TensorSpec
from dcp_s3.s3 import hedge
from tests.memory_s3 import Counters, fetch_counters, reset_counters

State = dict[str, Any]

WARM_UP = "warm-up"
#: What a state has besides its tensors, the same on all ranks.
OBJECTS: Mapping[str, Any] = {"optim.lr": 3e-4, "optim.betas": [0.9, 0.95], "train.name": "llama"}
STEP = "train.step"
STEP_VALUE = 1234


BACKENDS = {"dcp_s3": "dcp_s3", "dcp_s3-unshared": "dcp_s3", "s3torchconnector": "s3torchconnector", "fsspec": "fsspec"}
"""Ways to load, and whose reader each is, of :data:`benchmarks.cases.CASES`."""


@dataclass(frozen=True)
class Cost:
    """A load as one rank saw it."""

    seconds: float
    cpu_seconds: float
    counters: Counters | None
    """The server's, of all ranks; None but for rank 0."""
    failure: str = ""
    """The end of a traceback."""


def access_key(rank: int) -> str:
    """In whose name a rank signs its requests."""
    return f"rank-{rank}"


def values(name: str, tensor: TensorSpec, box: Box) -> torch.Tensor:
    """A box of tensor ``name``: its name and the index of an element in the whole tensor determine the element."""
    index = torch.zeros((), dtype=torch.int32)
    for offset, length, size in zip(*box, tensor.shape, strict=True):
        index = index.unsqueeze(-1) * size + torch.arange(offset, offset + length, dtype=torch.int32)
    bits = index * 0x1E3779B1 + (zlib.crc32(name.encode()) >> 1)
    if tensor.dtype == torch.float32:
        return (bits & 0x3FFF_FFFF).view(torch.float32)  # finite: the highest bit of the exponent is not set
    return ((bits >> 8) & 0x3FFF).to(torch.int16).view(tensor.dtype)


def make_state(spec: Spec, layout: Layout, rank: int, *, filled: bool) -> State:
    """What ``rank`` holds: with its values to save, or with others, to load into."""
    mesh = None if layout.plain else init_device_mesh("cpu", layout.mesh)
    state: State = {}
    for name, tensor in spec.items():
        box = layout.box(tensor.shape, rank)
        local = values(name, tensor, box) if filled else torch.full(box[1], -1.0, dtype=tensor.dtype)
        if mesh is None:
            state[name] = local
            continue
        placements = [Replicate() if dim is None else Shard(dim) for dim in layout.placements(tensor.shape)]
        stride = torch.empty(tensor.shape, device="meta").stride()
        state[name] = DTensor.from_local(
            local, mesh, placements, run_check=False, shape=torch.Size(tensor.shape), stride=stride
        )
    state[STEP] = torch.tensor(STEP_VALUE if filled else 0)
    return state | {name: value if filled else None for name, value in OBJECTS.items()}


def check_state(state: State, spec: Spec, layout: Layout, rank: int) -> None:
    """Compare what was loaded, bit by bit.

    Raises:
        RuntimeError: it is not what `make_state` fills a state with.
    """
    for name, tensor in spec.items():
        local = state[name] if layout.plain else state[name].to_local()
        expected = values(name, tensor, layout.box(tensor.shape, rank))
        bits = torch.int32 if tensor.dtype == torch.float32 else torch.int16
        if not torch.equal(local.view(bits), expected.view(bits)):
            raise RuntimeError(f"{name} was not loaded as it was saved")
    found = {name: state[name] for name in OBJECTS} | {STEP: int(state[STEP])}
    if found != {**OBJECTS, STEP: STEP_VALUE}:
        raise RuntimeError(f"loaded {found}")


def work(
    spec: Spec, saves: Mapping[str, Layout], loads: Sequence[tuple[str, Layout, str]], target: Target
) -> list[Cost]:
    """Save the state in the layouts ``saves``, by dcp_s3, as checkpoints of these names; then carry out ``loads``.

    A load (checkpoint, layout, backend) is measured; what came is compared, outside of the measured time. Each backend
    first loads ``WARM_UP``, which is saved with the others, so that imports, clients and threads are there. A failure
    of one load, which DCP reports on all ranks, does not stop the others. All layouts are of as many ranks as there
    are.
    """
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    # How much hedging fetches twice depends on how busy the machine is: benchmarks.hedging counts that.
    hedge._MIN_DELAY = math.inf
    rank, costs = dist.get_rank(), []
    os.environ["AWS_ACCESS_KEY_ID"] = access_key(rank)
    for name, layout in saves.items():
        state = make_state({} if name == WARM_UP else spec, layout, rank, filled=True)
        dcp.save(state, storage_writer=STORAGE_CASES["dcp_s3"](target).writer(name))
    for backend in dict.fromkeys(backend for _, _, backend in loads):
        with contextlib.suppress(Exception, CheckpointException):
            dcp.load({STEP: torch.tensor(0)}, storage_reader=_reader(backend, target, WARM_UP))
    for checkpoint, layout, backend in loads:
        state = make_state(spec, layout, rank, filled=False)
        try:
            cost = _measure(state, backend, target, checkpoint)
        except (Exception, CheckpointException):  # noqa: BLE001 - whatever a backend raises
            costs.append(Cost(0.0, 0.0, None, traceback.format_exc()[-2000:]))
            continue
        check_state(state, spec, layout, rank)
        costs.append(cost)
    return costs


def _reader(backend: str, target: Target, checkpoint: str) -> Any:
    reader = STORAGE_CASES[BACKENDS[backend]](target).reader(checkpoint)
    if backend == "dcp_s3-unshared":
        reader.load_sharing = False
    return reader


def _measure(state: State, backend: str, target: Target, checkpoint: str) -> Cost:
    first = dist.get_rank() == 0
    dist.barrier()
    if first:
        reset_counters(target.endpoint_url)
    dist.barrier()
    start, cpu = time.perf_counter(), time.process_time()
    dcp.load(state, storage_reader=_reader(backend, target, checkpoint))
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    dist.barrier()
    counters = fetch_counters(target.endpoint_url) if first else None
    dist.barrier()
    return Cost(seconds, cpu, counters)
