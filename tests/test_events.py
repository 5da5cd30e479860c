"""Events, the lines in the log, and `dcp_s3.stats`, of real saves and loads: one for each that succeeds or fails."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import dcp_s3
from dcp_s3 import CheckpointManager, S3LoadPlanner, S3Stager, S3StorageReader, S3StorageWriter, errors, events
from dcp_s3.spill.drain import stop_draining
from tests.memory_s3 import Fault
from tests.ranks import run_ranks
from tests.s3.waiting import until
from tests.servers import S3Server

pytestmark = pytest.mark.servers("memory")

SIZE = 4 * 50_000
PATIENCE = 60.0


def state(size: int = 50_000) -> dict[str, torch.Tensor]:
    return {"w": torch.ones(size)}


@pytest.fixture(autouse=True)
def no_fault_is_left(memory_server: S3Server) -> Iterator[None]:
    yield
    memory_server.handle.fault = None


class Heard(list[events.Event]):
    """Keeps the events that it is called with."""

    def __call__(self, event: events.Event) -> None:
        self.append(event)

    def of(self, kind: type[Any]) -> list[Any]:
        return [event for event in self if type(event) is kind]

    def wait_for(self, kind: type[Any]) -> list[Any]:
        """The future of a save is done shortly before its failure is told."""
        until(lambda: bool(self.of(kind)))
        return self.of(kind)

    @property
    def kinds(self) -> list[str]:
        return [type(event).__name__ for event in self]


def refuse(operation: str, name: str = "") -> Callable[[Any], Fault | None]:
    def fault(request: Any) -> Fault | None:
        return Fault.error(403, "AccessDenied") if request.operation == operation and name in request.key else None

    return fault


def test_a_save_and_loads_by_one_reader(root: str) -> None:
    heard, own = Heard(), Heard()
    url = f"{root}/step-1000"
    reader = S3StorageReader(url, on_event=own)
    with events.subscribe(heard):
        dcp.save(state(), storage_writer=S3StorageWriter(url, on_event=own))
        dcp.load(state(), storage_reader=reader)
        dcp.load(state(), storage_reader=reader)
    dcp.load(state(), storage_reader=S3StorageReader(url))
    assert heard.kinds == own.kinds == ["SaveStarted", "Written", "Committed", *["LoadStarted", "Loaded"] * 2]
    (written,), (committed,), (loaded, again) = map(heard.of, (events.Written, events.Committed, events.Loaded))
    assert (written.url, written.step, written.rank) == (url, 1000, 0)
    assert SIZE < written.bytes < SIZE + 4096
    assert written.bytes == committed.bytes
    assert (committed.ranks, committed.throttled, committed.spilled_bytes) == (1, 0, 0)
    assert 0 < written.seconds < committed.seconds
    assert committed.seconds <= committed.stall_seconds  # a blocking save holds the training up to its end
    assert SIZE <= loaded.bytes == again.bytes < SIZE + 4096
    assert (loaded.disk_bytes, loaded.hedged, loaded.throttled, loaded.ranks) == (0, 0, 0, 1)


def test_throttling_is_told_and_counted(memory_server: S3Server, root: str) -> None:
    heard, refused = Heard(), threading.Event()

    def refuse_once(request: Any) -> Fault | None:
        if request.operation == "PutObject" and ".distcp" in request.key and not refused.is_set():
            refused.set()
            return Fault.error(503, "SlowDown")
        return None

    memory_server.handle.fault = refuse_once
    with events.subscribe(heard):
        dcp.save(state(), storage_writer=S3StorageWriter(f"{root}/step-1"))
    (throttled,), (committed,) = heard.of(events.Throttled), heard.of(events.Committed)
    assert throttled.bucket.startswith("http://127.0.0.1")
    assert throttled.limit >= 1
    assert committed.throttled == 1
    assert "1 throttled" in str(committed)


def test_spilling_and_draining(root: str, tmp_path: Path) -> None:
    heard, before = Heard(), dcp_s3.stats().spill
    settings = {"spill_dir": str(tmp_path), "durability": "local"}
    with events.subscribe(heard):
        writer = S3StorageWriter(f"{root}/step-7", settings=settings)
        dcp.save(state(), storage_writer=writer)
        writer.wait_committed(PATIENCE)
        stop_draining()
    (spilled,), (drained,), (committed,) = map(heard.of, (events.Spilled, events.Drained, events.Committed))
    assert spilled.local
    assert spilled.bytes == drained.bytes == committed.bytes
    assert (committed.step, committed.spilled_bytes, committed.stall_seconds) == (7, None, None)
    assert "from the spill directory" in str(committed)
    assert heard.of(events.Written)[0].spilled_bytes == spilled.bytes
    after = dcp_s3.stats().spill
    assert after.bytes - before.bytes == after.drained_bytes - before.drained_bytes == spilled.bytes
    assert after.refused_bytes == before.refused_bytes


@pytest.mark.parametrize("asynchronous", [False, True])
def test_staging_and_the_sums(root: str, asynchronous: bool) -> None:
    heard, before = Heard(), dcp_s3.stats()
    with S3Stager(asynchronous=asynchronous, on_event=heard) as stager:
        writer = S3StorageWriter(f"{root}/step-42", on_event=heard)
        saving: Any = dcp.async_save(state(), storage_writer=writer, async_stager=stager)
        (saving.upload_completion if asynchronous else saving).result(PATIENCE)
    dcp.load(state(), storage_reader=S3StorageReader(f"{root}/step-42"))
    (staged,), (committed,), after = heard.of(events.Staged), heard.of(events.Committed), dcp_s3.stats()
    assert (staged.bytes, staged.disk_bytes) == (SIZE, 0)
    assert min(staged.stall_seconds, committed.stall_seconds) > 0
    for name, count in {"done": 1, "committed": 1, "failed": 0}.items():
        assert getattr(after.saves, name) - getattr(before.saves, name) == count, name
    assert (after.saves.last_step, after.saves.last_commit) == (42, committed.time)
    assert after.loads.done - before.loads.done == 1
    assert json.loads(json.dumps(after.to_dict(), allow_nan=False)) == after.to_dict()


def save_on_ranks(root: str) -> list[Any]:
    heard, rank = Heard(), dist.get_rank()
    local = {"w": torch.full((50_000,), 1.0), f"own{rank}": torch.full((1000,), float(rank))}
    dcp.save(local, storage_writer=S3StorageWriter(f"{root}/step-5", on_event=heard))
    dcp.load(local, storage_reader=S3StorageReader(f"{root}/step-5", on_event=heard))
    return list(heard)


def test_one_commit_for_all_ranks(root: str) -> None:
    told = run_ranks(2, save_on_ranks, root)
    kinds = [[type(event).__name__ for event in each] for each in told]
    assert kinds[0] == ["SaveStarted", "Written", "Committed", "LoadStarted", "Loaded"]
    assert kinds[1] == ["SaveStarted", "Written", "LoadStarted", "Loaded"]
    committed = told[0][2]
    assert (committed.ranks, committed.bytes) == (2, told[0][1].bytes + told[1][1].bytes)
    assert (told[1][3].rank, told[1][3].ranks) == (1, 2)


def test_a_subscriber_that_raises_is_logged_once_and_harms_nothing(root: str, caplog: pytest.LogCaptureFixture) -> None:
    heard = Heard()

    def broken(event: events.Event) -> None:
        heard(event)
        raise ZeroDivisionError("in the subscriber")

    with events.subscribe(broken):
        dcp.save(state(), storage_writer=S3StorageWriter(f"{root}/step-1"))
    dcp.save(state(), storage_writer=S3StorageWriter(f"{root}/step-2"))
    assert heard.kinds == ["SaveStarted", "Written", "Committed"]
    assert caplog.text.count("ZeroDivisionError: in the subscriber") == 1


def test_a_prune_that_left_something_counts_as_failed() -> None:
    before = dcp_s3.stats().prunes
    for ok in (False, True):
        events.emit(events.Pruned(root="s3://bucket/run", deleted=2, freed_bytes=5, seconds=1.0, ok=ok, time=7.0 + ok))
        after = dcp_s3.stats().prunes
        assert (after.failed - before.failed, after.last_success == 8.0) == (1, ok)
    assert (after.deleted - before.deleted, after.freed_bytes - before.freed_bytes) == (4, 10)


@pytest.mark.parametrize(
    ("kind", "name"), [("blocking", ".metadata"), ("asynchronous", ".distcp"), ("staged", ".distcp")]
)
def test_a_save_that_fails_is_told_once(memory_server: S3Server, root: str, kind: str, name: str) -> None:
    memory_server.handle.fault = refuse("PutObject", name)
    heard, own, before = Heard(), Heard(), dcp_s3.stats().saves
    writer = S3StorageWriter(f"{root}/step-3", on_event=own)
    with events.subscribe(heard), S3Stager(asynchronous=kind == "staged") as stager:
        if kind == "blocking":
            with pytest.raises(CheckpointException, match="PutObject"):
                dcp.save(state(), storage_writer=writer)
        else:
            saving: Any = dcp.async_save(state(), storage_writer=writer, async_stager=stager)
            assert (saving.upload_completion if kind == "staged" else saving).exception(PATIENCE) is not None
        (failed,) = heard.wait_for(events.SaveFailed)
    assert own.wait_for(events.SaveFailed) == [failed]
    assert (failed.url, failed.step) == (f"{root}/step-3", 3)
    assert isinstance(failed.error, errors.AccessDeniedError) or "AccessDenied" in str(failed.error.failures)
    assert not heard.of(events.Committed)
    after = dcp_s3.stats().saves
    assert (after.failed - before.failed, after.committed - before.committed) == (1, 0)


def test_loads_that_fail_are_told_once_also_of_a_reader_that_is_used_again(memory_server: S3Server, root: str) -> None:
    dcp.save(state(), storage_writer=S3StorageWriter(f"{root}/step-3"))
    before = dcp_s3.stats().loads
    memory_server.handle.fault = refuse("GetObject", ".distcp")
    for step, wanted, planner, error in (
        (4, state(), None, errors.CheckpointNotFoundError),
        (3, state(), None, errors.AccessDeniedError),
        (3, state(7), S3LoadPlanner(), errors.TensorMismatchError),
        (3, {"typo": torch.ones(1)}, S3LoadPlanner(), errors.EntryNotFoundError),
    ):
        heard, own = Heard(), Heard()
        reader = S3StorageReader(f"{root}/step-{step}", on_event=own)
        with events.subscribe(heard):
            for _ in range(2):
                with pytest.raises(CheckpointException):
                    dcp.load(wanted, storage_reader=reader, planner=planner)
        assert heard == own
        assert heard.kinds in (["LoadFailed"] * 2, ["LoadStarted", "LoadFailed"] * 2)
        failed = [(each.url, each.step, each.rank) for each in heard.of(events.LoadFailed)]
        assert failed == [(f"{root}/step-{step}", step, 0)] * 2
        assert all(isinstance(each.error, error) for each in heard.of(events.LoadFailed))
    with pytest.raises(errors.CheckpointNotFoundError):
        S3StorageReader(f"{root}/step-4").read_metadata()  # which is no load
    assert dcp_s3.stats().loads.failed - before.failed == 8


def test_a_manager_tells_of_everything_that_it_does(memory_server: S3Server, root: str) -> None:
    heard = Heard()
    with CheckpointManager(root, retention="latest:1", on_event=heard) as manager:
        manager.save(1, state())
        manager.save(2, state())
        manager.wait()
        assert manager.restore(state()) == 2
        with pytest.raises(errors.RestoreFailedError):
            manager.restore(state(1001))  # the planner finds out
        until(lambda: any(event.deleted for event in heard.of(events.Pruned)))
        memory_server.handle.fault = refuse("PutObject", ".distcp")
        for blocking in (False, True):
            with contextlib.suppress(errors.SaveFailedError):
                manager.save(3, state(), blocking=blocking)
                manager.wait()
    kinds = ("Staged", "Committed", "Loaded", "LoadFailed", "SaveFailed")
    assert [heard.kinds.count(kind) for kind in kinds] == [3, 2, 1, 1, 2]
    assert sum(event.deleted for event in heard.of(events.Pruned)) == 1
    assert all(event.ok and event.root == root for event in heard.of(events.Pruned))
