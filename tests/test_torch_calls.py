"""What torch's DCP calls in a save and a load, in which order and from which frames, is still what we take it for.

Nothing here tests dcp_s3 alone: see `test_torch_private`.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
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
    default_planner,
)
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.staging import AsyncStager

from dcp_s3 import torch_private
from tests.ranks import run_ranks
from tests.relying import moved

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


# --- the order of calls ----------------------------------------------------------------------------------


def _recording(cls: type, calls: list[str], names: list[str]) -> type:
    def wrap(name: str) -> Callable[..., Any]:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return getattr(super(recorder, self), name)(*args, **kwargs)

        # torch looks for "kwargs" in the signature.
        method.__signature__ = inspect.signature(getattr(cls, name))  # type: ignore[attr-defined]
        return method

    recorder = type(f"Recording{cls.__name__}", (cls,), {name: wrap(name) for name in names})
    return recorder


def test_the_order_of_calls_in_a_load(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path)
    calls: list[str] = []
    reader = _recording(
        FileSystemReader,
        calls,
        ["read_metadata", "set_up_storage_reader", "prepare_local_plan", "prepare_global_plan", "read_data"],
    )
    planner = _recording(
        DefaultLoadPlanner, calls, ["set_up_planner", "create_local_plan", "create_global_plan", "finish_plan"]
    )
    dcp.load({"w": torch.zeros(3)}, storage_reader=reader(tmp_path), planner=planner())
    assert calls == [
        "read_metadata",
        "set_up_planner",
        "set_up_storage_reader",
        "create_local_plan",
        "prepare_local_plan",
        "create_global_plan",
        "prepare_global_plan",
        "finish_plan",
        "read_data",
    ], moved(
        "dcp.load calls in another order",
        "the order in which S3StorageReader is called",
    )


def test_the_order_of_calls_in_a_save(tmp_path: Path) -> None:
    calls: list[str] = []
    writer = _recording(
        FileSystemWriter,
        calls,
        ["reset", "set_up_storage_writer", "prepare_local_plan", "prepare_global_plan", "write_data", "finish"],
    )
    planner = _recording(
        default_planner.DefaultSavePlanner,
        calls,
        ["set_up_planner", "create_local_plan", "create_global_plan", "finish_plan"],
    )
    dcp.save({"w": torch.ones(3)}, storage_writer=writer(tmp_path), planner=planner(), checkpoint_id=tmp_path)
    assert calls == [
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
    ], moved("dcp.save calls in another order", "S3StorageWriter")


@pytest.mark.parametrize("use_collectives", [True, False])
def test_the_writer_is_told_rank_and_collectives(tmp_path: Path, use_collectives: bool) -> None:
    told: list[dict[str, Any]] = []

    class Writer(FileSystemWriter):
        def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
            told.append(kwargs)
            super().set_up_storage_writer(is_coordinator, *args, **kwargs)

    # Without a process group only the arguments matter, not whether the save then succeeds.
    dcp.save({"w": torch.ones(3)}, storage_writer=Writer(tmp_path), use_collectives=use_collectives)
    assert told == [{"rank": 0, "use_collectives": use_collectives}], moved(
        f"set_up_storage_writer is given {told}", "saves without collectives"
    )


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
        "UnreadableMetadata in load/unreadable.py, which is then not needed",
    )


# --- the process group of a load -------------------------------------------------------------------------


class _Asking(FileSystemReader):
    """Notes what `find_load_group` says, in the places where somebody might ask."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.asked: list[torch_private.Caller | None] = []

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        self.asked.append(torch_private.find_load_group())
        if len(self.asked) == 1 and self.missing:
            raise FileNotFoundError
        return super().read_metadata()

    missing = False


class _Curious(DefaultLoadPlanner):
    def __init__(self, reader: _Asking) -> None:
        super().__init__()
        self.reader = reader

    def set_up_planner(self, *args: Any, **kwargs: Any) -> None:
        self.reader.read_metadata()
        super().set_up_planner(*args, **kwargs)

    def finish_plan(self, new_plan: Any) -> Any:
        return new_plan


def _ask(path: Path) -> None:
    relied_on = "find_load_group, by which ranks read what several of them need once"
    dcp.save({"w": torch.ones(3)}, checkpoint_id=path)
    rank = dist.get_rank()

    reader = _Asking(path)
    dcp.load({"w": torch.zeros(3)}, storage_reader=reader)
    assert reader.asked == [(dist.group.WORLD, rank, 2, True)], moved("dcp.load hides its group", relied_on)

    group = dist.new_group([1, 0])
    reader = _Asking(path)
    dcp.load({"w": torch.zeros(3)}, storage_reader=reader, process_group=group, planner=_Curious(reader))
    first, second = reader.asked
    assert first == (group, dist.get_rank(group), 2, False), moved("the group is another", relied_on)
    assert second is None, moved("a planner's own call looks like the load's", relied_on)

    reader = _Asking(path)
    reader.missing = True
    dcp.load({"w": torch.zeros(3)}, storage_reader=reader)
    assert reader.asked[0] is not None, moved("dcp.load hides its group", relied_on)
    assert reader.asked[1] is None, moved("the metadata of one rank is asked for by all at once", relied_on)

    reader = _Asking(path)
    dcp.load({"w": torch.zeros(3)}, storage_reader=reader, no_dist=True)
    reader.read_metadata()
    assert reader.asked == [None, None], moved("a load without a group has one", relied_on)


def _ask_without_group(path: Path) -> None:
    relied_on = "is_load_without_group, by which a rank gets its own checkpoint of a save without collectives"
    asked: list[tuple[bool, int | None]] = []

    class Reader(FileSystemReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            asked.append((torch_private.is_load_without_group(), kwargs.get("rank")))
            if len(asked) == 1:
                raise FileNotFoundError
            return super().read_metadata()

    dcp.save({"w": torch.ones(3)}, checkpoint_id=path)
    for no_dist, rank in ((True, 0), (False, dist.get_rank())):
        asked.clear()
        reader: Any = Reader(path)
        dcp.load({"w": torch.zeros(3)}, storage_reader=reader, no_dist=no_dist)
        assert asked == [(no_dist, None), (no_dist, rank)], moved(
            "dcp.load has another rank without a group", relied_on
        )
    reader.read_metadata()
    assert asked[2:] == [(False, None)], moved("other callers look like dcp.load", relied_on)


def test_a_load_without_a_group_can_be_told(tmp_path: Path) -> None:
    run_ranks(2, _ask_without_group, tmp_path)


def test_the_group_of_a_load_is_where_it_was(tmp_path: Path) -> None:
    run_ranks(2, _ask, tmp_path)


def test_torchs_finish_plan_returns_what_it_was_given() -> None:
    plan = LoadPlan([])
    assert DefaultLoadPlanner().finish_plan(plan) is plan, moved(
        "DefaultLoadPlanner.finish_plan changes the plan", "plain_finish: plans that are shared out stay what they are"
    )


def test_a_load_can_be_told_from_its_callers(tmp_path: Path) -> None:
    found: list[bool] = []

    class Reader(FileSystemReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            found.append(torch_private.is_loading())
            return super().read_metadata()

    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path)
    reader = Reader(tmp_path)
    dcp.load({"w": torch.zeros(3)}, storage_reader=reader)
    reader.read_metadata()
    assert found == [True, False], moved("dcp.load lies elsewhere", "S3StorageReader(process_group=...)")


def _first_looks(path: Path, *, missing: bool, planner: bool) -> list[bool]:
    asked: list[bool] = []

    class Reader(FileSystemReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            asked.append(torch_private.is_first_look())
            if missing and len(asked) == 1:
                raise FileNotFoundError
            return super().read_metadata()

    reader: Any = Reader(path)
    dcp.load({"w": torch.zeros(3)}, storage_reader=reader, planner=_Curious(reader) if planner else None)
    reader.read_metadata()
    return asked


def test_the_first_look_of_a_load_can_be_told_from_others(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path)
    relied_on = "S3StorageReader.read_metadata, which raises except to dcp.load"
    for missing, planner in ((False, False), (False, True), (True, False)):
        first, *others = _first_looks(tmp_path, missing=missing, planner=planner)
        assert first, moved("dcp.load asks for metadata from elsewhere", relied_on)
        assert not any(others), moved("other callers look like dcp.load", relied_on)


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
    relied_on = "stage/turns.py, by which saves take turns, and failed ones are logged and let go of memory"
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
    writer.thread.join(60)
    assert not writer.thread.is_alive(), moved("the thread of a save does not end with it", relied_on)


class _Failing(DefaultSavePlanner):
    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        raise ZeroDivisionError
