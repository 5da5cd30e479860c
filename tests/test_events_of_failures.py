"""Events and counts of saves and loads that fail: one for each rank and save or load."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import dcp_s3
from dcp_s3 import (
    CheckpointManager,
    KeepLatest,
    S3LoadPlanner,
    S3Stager,
    S3StorageReader,
    S3StorageWriter,
    errors,
    events,
)
from tests.memory_s3 import Fault
from tests.ranks import run_ranks
from tests.servers import S3Server

pytestmark = pytest.mark.servers("memory")

PATIENCE = 60.0


def state(size: int = 1000) -> dict[str, Any]:
    return {"w": torch.ones(size)}


@pytest.fixture(autouse=True)
def _no_faults_are_left(server: S3Server) -> Iterator[None]:
    yield
    server.handle.fault = None


class Heard(list[events.Event]):
    """Keeps the events that it is called with."""

    def __call__(self, event: events.Event) -> None:
        self.append(event)

    def of(self, kind: type[Any]) -> list[Any]:
        return [event for event in self if type(event) is kind]

    def wait_for(self, kind: type[Any]) -> list[Any]:
        """The future of a save is done shortly before its failure is told."""
        end = time.monotonic() + PATIENCE
        while not self.of(kind) and time.monotonic() < end:
            time.sleep(0.01)
        return self.of(kind)


def refuse(operation: str, name: str) -> Callable[[Any], Fault | None]:
    def fault(request: Any) -> Fault | None:
        return Fault.error(403, "AccessDenied") if request.operation == operation and name in request.key else None

    return fault


@pytest.mark.parametrize("name", [".distcp", ".metadata"])
def test_a_save_that_fails_is_told_once(memory_server: S3Server, root: str, name: str) -> None:
    memory_server.handle.fault = refuse("PutObject", name)
    heard, before = Heard(), dcp_s3.stats().saves
    with pytest.raises(CheckpointException, match="PutObject"):
        dcp.save(state(), storage_writer=S3StorageWriter(f"{root}/step-3", on_event=heard))
    (failed,) = heard.of(events.SaveFailed)
    assert (failed.url, failed.step) == (f"{root}/step-3", 3)
    assert isinstance(failed.error, errors.AccessDeniedError)
    assert not heard.of(events.Committed)
    assert dcp_s3.stats().saves.failed - before.failed == 1


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_asynchronous_save_that_fails_is_told_once(memory_server: S3Server, root: str, asynchronous: bool) -> None:
    memory_server.handle.fault = refuse("PutObject", ".distcp")
    heard, before = Heard(), dcp_s3.stats().saves
    with S3Stager(asynchronous=asynchronous) as stager:
        saving: Any = dcp.async_save(
            state(), storage_writer=S3StorageWriter(f"{root}/step-3", on_event=heard), async_stager=stager
        )
        assert (saving.upload_completion if asynchronous else saving).exception(PATIENCE) is not None
    (failed,) = heard.wait_for(events.SaveFailed)
    assert (failed.url, failed.step) == (f"{root}/step-3", 3)
    assert dcp_s3.stats().saves.failed - before.failed == 1


def test_of_overlapping_saves_the_one_that_failed_is_told(memory_server: S3Server, root: str) -> None:
    reached, go_on = threading.Event(), threading.Event()

    def fault(request: Any) -> Fault | None:
        if "step-1/" in request.key and request.operation == "PutObject":
            reached.set()
            go_on.wait(PATIENCE)
            return Fault.error(403, "AccessDenied")
        return None

    memory_server.handle.fault = fault
    heard = Heard()
    writer = S3StorageWriter(on_event=heard)
    one: Any = dcp.async_save(state(), checkpoint_id=f"{root}/step-1", storage_writer=writer)
    assert reached.wait(PATIENCE)
    two: Any = dcp.async_save(state(), checkpoint_id=f"{root}/step-2", storage_writer=writer)
    assert two.exception(PATIENCE) is None
    go_on.set()
    assert one.exception(PATIENCE) is not None
    assert [(failed.url, failed.step) for failed in heard.wait_for(events.SaveFailed)] == [(f"{root}/step-1", 1)]


def test_a_save_without_a_url_is_told() -> None:
    heard = Heard()
    with pytest.raises(CheckpointException, match="no URL"):
        dcp.save(state(), storage_writer=S3StorageWriter(on_event=heard))
    assert [(failed.url, type(failed.error)) for failed in heard.of(events.SaveFailed)] == [
        (None, errors.InvalidURLError)
    ]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_state_that_cannot_be_staged_is_told(root: str, asynchronous: bool) -> None:
    heard = Heard()
    stager = S3Stager({"staging_limit": 2**20}, asynchronous=asynchronous, on_event=heard)
    with stager, contextlib.suppress(errors.StagingError):
        saving: Any = dcp.async_save(
            state(2**20), storage_writer=S3StorageWriter(f"{root}/step-3"), async_stager=stager
        )
        saving.upload_completion.exception(PATIENCE)
    assert len(heard.wait_for(events.SaveFailed)) == 1


def save_where_one_rank_fails(root: str) -> tuple[list[str], int]:
    heard = Heard()
    rank = dist.get_rank()
    url = f"{root}/step-1"
    writer = S3StorageWriter(url, on_event=heard)
    if rank == 1:
        writer.attach("x", b"1")
        writer.separate = None  # type: ignore[assignment]  # fails in write_data, on this rank alone
    saving: Any = dcp.async_save(state(), storage_writer=writer)
    assert saving.exception(PATIENCE) is not None
    heard.wait_for(events.SaveFailed)
    return [type(event).__name__ for event in heard], dcp_s3.stats().saves.failed


def test_the_rank_that_fails_and_the_first_one_tell_of_an_asynchronous_save(root: str) -> None:
    for kinds, failed in run_ranks(2, save_where_one_rank_fails, root):
        assert kinds.count("SaveFailed") == 1
        assert failed == 1


def test_loads_that_fail_are_told_once(memory_server: S3Server, root: str) -> None:
    url = f"{root}/step-3"
    dcp.save(state(), storage_writer=S3StorageWriter(url))
    before = dcp_s3.stats().loads
    for name, error in (("step-4", errors.CheckpointNotFoundError), ("step-3", errors.AccessDeniedError)):
        heard = Heard()
        memory_server.handle.fault = refuse("GetObject", ".distcp")
        reader = S3StorageReader(f"{root}/{name}", on_event=heard)
        for _ in range(2):  # a reader may be used again
            with pytest.raises(CheckpointException):
                dcp.load(state(), storage_reader=reader)
        assert [(each.url, type(each.error)) for each in heard.of(events.LoadFailed)] == [(f"{root}/{name}", error)] * 2
        assert not heard.of(events.Loaded)
    assert dcp_s3.stats().loads.failed - before.failed == 4


def test_a_load_that_cannot_be_planned_is_told_once(root: str) -> None:
    heard, url = Heard(), f"{root}/step-3"
    dcp.save(state(), storage_writer=S3StorageWriter(url))
    reader = S3StorageReader(url, on_event=heard)
    for wrong in (state(7), {"typo": torch.ones(1)}):
        with pytest.raises(CheckpointException):
            dcp.load(wrong, storage_reader=reader, planner=S3LoadPlanner())
    assert [type(event).__name__ for event in heard] == ["LoadStarted", "LoadFailed"] * 2
    assert {event.url for event in heard.of(events.LoadFailed)} == {url}


def test_a_save_without_collectives_is_no_failed_load(root: str) -> None:
    heard, url = Heard(), f"{root}/step-3"
    dcp.save(state(), storage_writer=S3StorageWriter(url), use_collectives=False)
    dcp.load(state(), storage_reader=S3StorageReader(url, on_event=heard))
    assert [type(event).__name__ for event in heard] == ["LoadStarted", "Loaded"]


def test_the_manager_tells_its_own_events(memory_server: S3Server, root: str) -> None:
    heard = Heard()
    with CheckpointManager(root, retention=KeepLatest(1), on_event=heard) as manager:
        manager.save(1, state())
        manager.save(2, state())
        manager.wait()
        manager.restore(state())
        with pytest.raises(errors.RestoreFailedError):
            manager.restore(state(1001))  # the planner finds out
        memory_server.handle.fault = refuse("PutObject", ".distcp")
        for blocking in (False, True):
            with contextlib.suppress(errors.SaveFailedError):
                manager.save(3, state(), blocking=blocking)
                manager.wait()
    kinds = [type(event).__name__ for event in heard]
    assert {kind: kinds.count(kind) for kind in ("Staged", "Committed", "Loaded", "LoadFailed", "SaveFailed")} == {
        "Staged": 3, "Committed": 2, "Loaded": 1, "LoadFailed": 1, "SaveFailed": 2,
    }  # fmt: skip
    assert "Pruned" in kinds
