"""What torch's DCP calls in a save and a load, in which order and from which frames, is still what we take it for.

Nothing here tests dcp_s3 alone: see `test_torch_private`.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    FileSystemReader,
    FileSystemWriter,
)
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.staging import AsyncStager

from dcp_s3.stage import handover
from tests.ranks import run_ranks
from tests.relying import moved

# --- the order of calls ----------------------------------------------------------------------------------


def _recording(cls: type, calls: list[str], names: list[str]) -> type:
    """A class that notes which of these of its methods are called."""

    def wrap(name: str) -> Callable[..., Any]:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return getattr(super(recorder, self), name)(*args, **kwargs)

        # torch looks for "kwargs" in the signature.
        method.__signature__ = inspect.signature(getattr(cls, name))  # type: ignore[attr-defined]
        return method

    recorder = type(f"Recording{cls.__name__}", (cls,), {name: wrap(name) for name in names if hasattr(cls, name)})
    return recorder


_LOAD = [
    "read_metadata",
    "set_up_planner",
    "set_up_storage_reader",
    "create_local_plan",
    "prepare_local_plan",
    "create_global_plan",
    "prepare_global_plan",
    "finish_plan",
    "read_data",
]
_SAVE = [
    "reset",
    "set_up_planner",
    "set_up_storage_writer",
    "create_local_plan",
    "prepare_local_plan",
    "create_global_plan",
    "prepare_global_plan",
    "finish_plan",
    "write_data",
    "finish",
]


def test_the_order_of_calls_in_a_save_and_a_load(tmp_path: Path) -> None:
    calls: list[str] = []
    writer, planner = (_recording(cls, calls, _SAVE) for cls in (FileSystemWriter, DefaultSavePlanner))
    dcp.save({"w": torch.ones(3)}, storage_writer=writer(tmp_path), planner=planner(), checkpoint_id=tmp_path)
    assert calls == _SAVE, moved("dcp.save calls in another order", "S3StorageWriter")
    calls.clear()
    reader, planner = (_recording(cls, calls, _LOAD) for cls in (FileSystemReader, DefaultLoadPlanner))
    dcp.load({"w": torch.zeros(3)}, storage_reader=reader(tmp_path), planner=planner())
    assert calls == _LOAD, moved("dcp.load calls in another order", "the order in which S3StorageReader is called")


def test_the_loader_asks_for_the_ranks_metadata_if_there_is_none_of_all() -> None:
    asked: list[dict[str, Any]] = []

    class Reader(FileSystemReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            asked.append(kwargs)
            raise FileNotFoundError

    with pytest.raises(CheckpointException) as caught:
        dcp.load({"w": torch.zeros(3)}, storage_reader=Reader("/nowhere"))
    assert asked == [{}, {"rank": 0}], moved(
        f"dcp.load asks for metadata with {asked}", "S3StorageReader.read_metadata(rank=...)"
    )
    assert isinstance(caught.value.failures[0][0], AssertionError), moved(
        "dcp.load no longer replaces the error of read_metadata",
        "UnreadableMetadata in load/metadata.py, which is then not needed",
    )


# --- the plans of a load ---------------------------------------------------------------------------------


class _Passing(FileSystemReader):
    """Passes values in the plans of a load, from each rank to the coordinator and back."""

    def set_up_storage_reader(self, metadata: Any, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self.is_coordinator, self.told = is_coordinator, kwargs
        super().set_up_storage_reader(metadata, is_coordinator)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return replace(plan, storage_data=dist.get_rank())

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        ranks = [plan.storage_data for plan in plans]
        return [replace(plan, storage_data=(ranks, number)) for number, plan in enumerate(plans)]

    def read_data(self, plan: LoadPlan, planner: Any) -> Any:
        self.passed = plan.storage_data
        return super().read_data(plan, planner)


def _pass(path: Path) -> None:
    relied_on = "what a load's ranks share: load/peers/assignment.py"
    dcp.save({"w": torch.ones(3)}, checkpoint_id=path)
    dist.barrier()
    rank, group = dist.get_rank(), dist.new_group([1, 2])
    for arguments, ranks in (({}, [0, 1, 2]), ({"process_group": group}, [1, 2]), ({"no_dist": True}, [rank])):
        if rank not in ranks:
            continue
        reader = _Passing(path)
        dcp.load({"w": torch.zeros(3)}, storage_reader=reader, **arguments)
        assert reader.passed == (ranks, ranks.index(rank)), moved("the plans of a load are of other ranks", relied_on)
        assert reader.is_coordinator == (rank == ranks[0]), moved("is_coordinator", relied_on)
        assert reader.told.get("use_collectives", True), moved(f"a reader is told {reader.told}", relied_on)


def test_what_a_reader_puts_into_plans_reaches_the_ranks_that_load(tmp_path: Path) -> None:
    plan = LoadPlan([])
    assert DefaultLoadPlanner().finish_plan(plan) is plan, moved(
        "DefaultLoadPlanner.finish_plan changes the plan", "loads that ranks share: plans must stay what they are"
    )
    run_ranks(3, _pass, tmp_path)


# --- asynchronous saves ----------------------------------------------------------------------------------


class _Noting(FileSystemWriter):
    """Notes in which thread it is used, and holds the save up until it may go on."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.thread: Any = None

    def storage_meta(self) -> Any:
        self.thread = threading.current_thread()
        return super().storage_meta()


class _State(dict[str, Any]):
    """Notes who asks for its items."""

    thread: Any = None

    def items(self) -> Any:
        self.thread = threading.current_thread()
        return super().items()


class _Stager(AsyncStager):
    _synchronize_after_execute = False

    def stage(self, state_dict: dict[str, Any]) -> _State:
        self.staged = _State(state_dict)
        return self.staged

    def close(self) -> None:
        """Nothing to close."""


@pytest.mark.parametrize("fails", [False, True])
def test_an_asynchronous_save_takes_its_state_up_in_a_thread_that_ends_with_it(tmp_path: Path, fails: bool) -> None:
    relied_on = "stage/handover.py, by which saves wait for each other, and failed ones are logged and let go of memory"
    stager, writer = _Stager(), _Noting(tmp_path)
    future: Any = dcp.async_save(
        {"w": torch.ones(3)},
        storage_writer=writer,
        async_stager=stager,
        planner=_Failing() if fails else None,
        use_collectives=False,
    )
    assert (future.exception(60) is not None) == fails
    assert stager.staged.thread is not threading.current_thread(), moved("the state is not asked for items", relied_on)
    assert stager.staged.thread is writer.thread, moved("the state is taken up elsewhere", relied_on)
    assert writer.thread.name.startswith(handover._EXECUTOR), moved("torch names its threads otherwise", relied_on)
    writer.thread.join(60)
    assert not writer.thread.is_alive(), moved("the thread of a save does not end with it", relied_on)


class _Failing(DefaultSavePlanner):
    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        raise ZeroDivisionError
