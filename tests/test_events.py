"""Events, the lines in the log, and `dcp_s3.stats`, of real saves and loads."""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import dcp_s3
from dcp_s3 import CheckpointManager, KeepLatest, S3Stager, S3StorageReader, S3StorageWriter, events, prune
from dcp_s3.spill.background import stop_draining
from tests.memory_s3 import Fault
from tests.ranks import run_ranks
from tests.s3.waiting import until
from tests.servers import S3Server

pytestmark = pytest.mark.servers("memory")

SIZE = 4 * 50_000
PATIENCE = 60.0


def state(value: float = 1.0) -> dict[str, torch.Tensor]:
    return {"w": torch.full((50_000,), value)}


@pytest.fixture(autouse=True)
def no_fault_is_left(memory_server: S3Server) -> Iterator[None]:
    yield
    memory_server.handle.fault = None


class Heard:
    """Keeps the events that it is called with."""

    def __init__(self) -> None:
        self.events: list[events.Event] = []

    def __call__(self, event: events.Event) -> None:
        self.events.append(event)

    def of(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.events if type(event) is kind]

    @property
    def kinds(self) -> list[str]:
        return [type(event).__name__ for event in self.events]


def test_a_save_and_a_load(root: str) -> None:
    heard, own = Heard(), Heard()
    url = f"{root}/step-1000"
    with events.subscribe(heard):
        dcp.save(state(), storage_writer=S3StorageWriter(url, on_event=own))
        dcp.load(state(), storage_reader=S3StorageReader(url, on_event=own))
    dcp.load(state(), storage_reader=S3StorageReader(url))
    assert heard.kinds == own.kinds == ["SaveStarted", "Written", "Committed", "LoadStarted", "Loaded"]
    (written,), (committed,), (loaded,) = (
        heard.of(events.Written),
        heard.of(events.Committed),
        heard.of(events.Loaded),
    )
    assert (written.url, written.step, written.rank) == (url, 1000, 0)
    assert SIZE < written.bytes < SIZE + 4096
    assert written.bytes == committed.bytes
    assert (committed.ranks, committed.throttled, committed.spilled_bytes) == (1, 0, 0)
    assert 0 < written.seconds < committed.seconds
    assert committed.seconds <= committed.stall_seconds  # a blocking save holds the training up to its end
    assert SIZE <= loaded.bytes < SIZE + 4096
    assert (loaded.disk_bytes, loaded.hedged, loaded.throttled, loaded.ranks) == (0, 0, 0, 1)


def test_one_line_a_save_and_one_a_load(root: str, caplog: pytest.LogCaptureFixture) -> None:
    url = f"{root}/step-00001000"
    with caplog.at_level(logging.INFO, logger="dcp_s3"):
        dcp.async_save(state(), storage_writer=S3StorageWriter(url)).result(PATIENCE)
        dcp.load(state(), storage_reader=S3StorageReader(url))
    saved, loaded = (record.getMessage() for record in caplog.records if record.name.startswith("dcp_s3"))
    number, rate = r"\d+\.\d\d s", r"\d+\.\d [KMG]iB/s"
    assert re.fullmatch(
        rf"step 1000 committed: 19\d\.\d KiB, 1 rank, stall {number}, upload {number} \({rate}\), 0 throttled, "
        rf"0 B spilled \({re.escape(url)}\)",
        saved,
    )
    assert re.fullmatch(
        rf"step 1000 loaded: 19\d\.\d KiB in {number} \({rate}\), 0 hedged, 0 throttled \({re.escape(url)}\)", loaded
    )


def test_a_reader_may_load_again(root: str) -> None:
    heard = Heard()
    dcp.save(state(), storage_writer=S3StorageWriter(f"{root}/step-1"))
    reader = S3StorageReader(f"{root}/step-1", on_event=heard)
    began = time.monotonic()
    dcp.load(state(), storage_reader=reader)
    first = time.monotonic()
    dcp.load(state(), storage_reader=reader)
    assert heard.kinds == ["LoadStarted", "Loaded"] * 2
    one, two = heard.of(events.Loaded)
    assert one.seconds <= first - began
    assert two.seconds <= time.monotonic() - first
    assert one.bytes == two.bytes


@pytest.mark.parametrize("asynchronous", [False, True])
def test_staging_and_the_stall(root: str, asynchronous: bool) -> None:
    heard = Heard()
    with S3Stager(asynchronous=asynchronous, on_event=heard) as stager:
        saving = dcp.async_save(
            state(), storage_writer=S3StorageWriter(f"{root}/step-1", on_event=heard), async_stager=stager
        )
        (saving.upload_completion if asynchronous else saving).result(PATIENCE)  # type: ignore[union-attr]
    (staged,), (committed,) = heard.of(events.Staged), heard.of(events.Committed)
    assert (staged.bytes, staged.disk_bytes) == (SIZE, 0)
    assert staged.stall_seconds > 0
    assert committed.stall_seconds > 0
    if not asynchronous:
        assert staged.stall_seconds <= committed.stall_seconds


def test_a_foreign_stager_has_no_known_stall(root: str) -> None:
    heard = Heard()

    class Writer(S3StorageWriter):
        def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
            return {name: tensor.clone() for name, tensor in state_dict.items()}

    dcp.async_save(state(), storage_writer=Writer(f"{root}/step-1", on_event=heard)).result(PATIENCE)
    assert [event.stall_seconds for event in heard.of(events.Committed)] == [None]


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


def test_spilling_and_draining(memory_server: S3Server, root: str, tmp_path: Path) -> None:
    heard = Heard()
    before = dcp_s3.stats().spill
    settings = {"spill_dir": str(tmp_path), "durability": "local"}
    with events.subscribe(heard):
        writer = S3StorageWriter(f"{root}/step-7", settings=settings)
        dcp.save(state(), storage_writer=writer)
        writer.wait_committed(PATIENCE)
        stop_draining()
    (spilled,), (drained,), (committed,) = (
        heard.of(events.Spilled),
        heard.of(events.Drained),
        heard.of(events.Committed),
    )
    assert spilled.local
    assert spilled.bytes == drained.bytes == committed.bytes
    assert (committed.step, committed.spilled_bytes, committed.stall_seconds) == (7, None, None)
    assert "from the spill directory" in str(committed)
    assert heard.of(events.Written)[0].spilled_bytes == spilled.bytes
    after = dcp_s3.stats().spill
    assert after.bytes - before.bytes == after.drained_bytes - before.drained_bytes == spilled.bytes
    assert after.refused_bytes == before.refused_bytes


def test_stats_add_up(root: str) -> None:
    before = dcp_s3.stats()
    dcp.save(state(), storage_writer=S3StorageWriter(f"{root}/step-41"))
    dcp.async_save(state(), storage_writer=S3StorageWriter(f"{root}/step-42")).result(PATIENCE)
    dcp.load(state(), storage_reader=S3StorageReader(f"{root}/step-42"))
    after = dcp_s3.stats()
    assert after.saves.done - before.saves.done == after.saves.committed - before.saves.committed == 2
    assert after.saves.last_step == 42
    assert after.saves.last_commit > before.saves.last_commit
    assert after.saves.staged_bytes - before.saves.staged_bytes == SIZE
    assert after.loads.done - before.loads.done == 1
    assert json.loads(json.dumps(after.to_dict(), allow_nan=False)) == after.to_dict()
    assert "last_step=42" in repr(after)


def test_a_prune_is_told(root: str) -> None:
    heard = Heard()
    for step in (1, 2):
        dcp.save(state(), storage_writer=S3StorageWriter(f"{root}/step-{step}"))
    with events.subscribe(heard), CheckpointManager(root, retention=KeepLatest(1)) as manager:
        manager.save(3, state())
    assert sum(event.deleted for event in heard.of(events.Pruned)) == 2
    assert all(event.ok and event.root == root for event in heard.of(events.Pruned))
    assert [info.step for info in dcp_s3.list_checkpoints(root)] == [3]
    assert prune(root, KeepLatest(1)).ok


def test_a_subscriber_that_raises_is_logged_once_and_harms_nothing(root: str, caplog: pytest.LogCaptureFixture) -> None:
    calls: list[events.Event] = []

    def broken(event: events.Event) -> None:
        calls.append(event)
        raise ZeroDivisionError("in the subscriber")

    with events.subscribe(broken):
        dcp.save(state(), storage_writer=S3StorageWriter(f"{root}/step-1"))
    dcp.save(state(), storage_writer=S3StorageWriter(f"{root}/step-2"))
    assert [type(event).__name__ for event in calls] == ["SaveStarted", "Written", "Committed"]
    assert caplog.text.count("ZeroDivisionError: in the subscriber") == 1


def test_a_subscription_may_be_closed_twice() -> None:
    heard = Heard()
    subscription = events.subscribe(heard)
    subscription.close()
    subscription.close()
    events.emit(events.PruneFailed(root="s3://bucket/run", error=ValueError()))
    assert not heard.events


def test_a_subscriber_may_ask_for_the_stats(root: str) -> None:
    """Events are told without a lock that `stats` needs."""
    found: list[dcp_s3.Stats] = []
    with events.subscribe(lambda _: found.append(dcp_s3.stats())):
        dcp.save(state(), storage_writer=S3StorageWriter(f"{root}/step-1"))
        events.emit(events.Throttled(bucket="b", limit=1, decreases=1))
    assert len(found) == 4


def refuse_data(request: Any) -> Fault | None:
    return Fault.error(403, "AccessDenied") if request.operation == "PutObject" else None


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_save_that_fails_is_told_once(memory_server: S3Server, root: str, asynchronous: bool) -> None:
    heard, own = Heard(), Heard()
    before = dcp_s3.stats().saves
    memory_server.handle.fault = refuse_data
    writer = S3StorageWriter(f"{root}/step-3", on_event=own)

    def save() -> None:
        if asynchronous:
            dcp.async_save(state(), storage_writer=writer).result(PATIENCE)  # type: ignore[union-attr]
        else:
            dcp.save(state(), storage_writer=writer)

    with events.subscribe(heard), pytest.raises(CheckpointException):
        save()
    (failed,) = heard.of(events.SaveFailed)
    assert own.of(events.SaveFailed) == [failed]
    assert (failed.url, failed.step) == (f"{root}/step-3", 3)
    assert "AccessDenied" in str(failed.error) or "AccessDenied" in str(failed.error.failures)
    after = dcp_s3.stats().saves
    assert (after.failed - before.failed, after.done - before.done) == (1, 0)


def test_a_manager_tells_of_everything_that_it_does(memory_server: S3Server, root: str) -> None:
    heard = Heard()
    with CheckpointManager(root, retention=KeepLatest(1), on_event=heard) as manager:
        manager.save(1, state())
        manager.save(2, state())
        manager.wait()
        assert manager.restore(state()) == 2
        until(lambda: any(event.deleted for event in heard.of(events.Pruned)))
        memory_server.handle.fault = refuse_data
        manager.save(3, state())
        with pytest.raises(dcp_s3.errors.SaveFailedError):
            manager.wait()
    assert heard.kinds.count("Committed") == 2
    assert heard.kinds.count("SaveFailed") == heard.kinds.count("Loaded") == 1
    assert heard.kinds.count("Staged") == 3
    assert sum(event.deleted for event in heard.of(events.Pruned)) == 1


def test_a_load_that_fails_is_told_once(root: str) -> None:
    heard, own = Heard(), Heard()
    before = dcp_s3.stats().loads
    with events.subscribe(heard), pytest.raises(CheckpointException):
        dcp.load(state(), storage_reader=S3StorageReader(f"{root}/step-8", on_event=own))
    (failed,) = heard.of(events.LoadFailed)
    assert own.of(events.LoadFailed) == [failed]
    assert (failed.url, failed.step, failed.rank) == (f"{root}/step-8", 8, 0)
    assert dcp_s3.stats().loads.failed - before.failed == 1
    assert not heard.of(events.Loaded)


def test_a_checkpoint_of_single_ranks_is_no_failed_load(root: str) -> None:
    """DCP asks for its global metadata first, which is not there."""
    heard = Heard()
    dcp.save(state(), storage_writer=S3StorageWriter(f"{root}/step-8"), use_collectives=False)
    with events.subscribe(heard):
        dcp.load(state(), storage_reader=S3StorageReader(f"{root}/step-8"))
    assert heard.kinds == ["LoadStarted", "Loaded"]


def save_on_ranks(root: str) -> list[Any]:
    heard, rank = Heard(), dist.get_rank()
    local = {"w": torch.full((50_000,), 1.0), f"own{rank}": torch.full((1000,), float(rank))}
    dcp.save(local, storage_writer=S3StorageWriter(f"{root}/step-5", on_event=heard))
    dcp.load(local, storage_reader=S3StorageReader(f"{root}/step-5", on_event=heard))
    return heard.events


def test_one_commit_for_all_ranks(root: str) -> None:
    told = run_ranks(2, save_on_ranks, root)
    kinds = [[type(event).__name__ for event in each] for each in told]
    assert kinds[0] == ["SaveStarted", "Written", "Committed", "LoadStarted", "Loaded"]
    assert kinds[1] == ["SaveStarted", "Written", "LoadStarted", "Loaded"]
    committed = told[0][2]
    assert (committed.ranks, committed.bytes) == (2, told[0][1].bytes + told[1][1].bytes)
    assert (told[1][3].rank, told[1][3].ranks) == (1, 2)
