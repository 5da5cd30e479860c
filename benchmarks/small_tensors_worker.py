"""The measuring process of :mod:`benchmarks.small_tensors`: prints each load, as it comes, as a line of JSON."""

from __future__ import annotations

import functools
import io
import json
import logging
import os
import pickle
import sys
import time
import uuid
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import boto3
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from benchmarks.cases import CASES, Target
from benchmarks.measure import measure

#: The reader without I/O.
ITSELF = "DCP itself"
_SAVED_BY = "dcp_s3"

State = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Sample:
    """One load."""

    reader: str
    round: int
    """Readers are compared within a round."""
    tensors: int
    seconds: float
    cpu_seconds: float
    phases: dict[str, float]
    """Seconds by phase: ``read_metadata``, ``planning``, ``read_data``, which add up to ``seconds``."""


class NoReader(StorageReader):
    """Reads nothing: metadata as torch's FileSystemReader does from bytes in memory, data not at all.

    Args:
        pickled: the checkpoint's ``.metadata``.
    """

    def __init__(self, pickled: bytes) -> None:
        super().__init__()
        self._pickled = pickled

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing to do."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Unpickle it, as torch does."""
        metadata: Metadata = pickle.loads(self._pickled)
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to do."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Nothing to add."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Nothing to coordinate."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Call the planner for each item, and leave the tensors as they are."""
        nothing = io.BytesIO()
        torch.save(0, nothing)
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                nothing.seek(0)
                planner.load_bytes(item, nothing)
            else:
                planner.commit_tensor(item, planner.resolve_tensor(item).detach())
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Any will do."""
        return True


def make_state(tensors: int, tensor_bytes: int) -> State:
    """That many fp32 tensors; each element of a tensor is the tensor's number."""
    return {f"layer.{n // 10}.weight.{n % 10}": torch.full((tensor_bytes // 4,), float(n)) for n in range(tensors)}


def timed(reader: StorageReader) -> dict[str, float]:
    """Make ``reader`` note, in what is returned, the seconds spent in its methods, by name."""
    seconds: dict[str, float] = defaultdict(float)

    def wrap(name: str) -> None:
        method = getattr(reader, name)

        @functools.wraps(method)  # DCP looks at the signature
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                seconds[name] += time.perf_counter() - start

        setattr(reader, name, wrapped)

    for name in ("read_metadata", "read_data"):
        wrap(name)
    return seconds


def load(name: str, number: int, reader: StorageReader, loaded: State, saved: State) -> Sample:
    """Load by one reader and compare.

    Raises:
        RuntimeError: what was loaded is not what was saved.
    """
    for tensor in loaded.values():
        tensor.fill_(-1.0)
    phases = timed(reader)
    cost = measure(lambda: dcp.load(loaded, storage_reader=reader, no_dist=True))
    if name != ITSELF:
        for key, tensor in saved.items():
            if not torch.equal(tensor, loaded[key]):
                raise RuntimeError(f"{key} was not loaded as it was saved")
    planning = cost.wall_seconds - sum(phases.values())
    return Sample(name, number, len(saved), cost.wall_seconds, cost.cpu_seconds, {**phases, "planning": planning})


def compare(names: Sequence[str], target: Target, tensors: int, tensor_bytes: int, rounds: int) -> Iterator[Sample]:
    """Save a state by dcp_s3; load it by each reader in every round, after one round that is not counted."""
    saved = make_state(tensors, tensor_bytes)
    loaded = {key: torch.empty_like(tensor) for key, tensor in saved.items()}
    checkpoint = uuid.uuid4().hex[:8]
    dcp.save(saved, storage_writer=CASES[_SAVED_BY](target).writer(checkpoint), no_dist=True)
    client = boto3.client("s3", endpoint_url=target.endpoint_url, region_name=target.region)
    answer = client.get_object(Bucket=target.bucket, Key=f"{target.prefix}/{checkpoint}/.metadata")
    pickled = answer["Body"].read()
    for number in range(rounds + 1):
        for name in names:
            reader = NoReader(pickled) if name == ITSELF else CASES[name](target).reader(checkpoint)
            sample = load(name, number, reader, loaded, saved)
            if number:
                yield sample


def main() -> None:
    """Compare groups of readers, each with a state of so many tensors, as the first argument (JSON) says."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    request = json.loads(sys.argv[1])
    target = Target(**request["target"])
    for names, tensors in request["groups"]:
        for sample in compare(names, target, tensors, request["tensor_bytes"], request["rounds"]):
            print(json.dumps(asdict(sample)), flush=True)


if __name__ == "__main__":
    main()
