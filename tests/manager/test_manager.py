"""CheckpointManager in one process."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import dcp_s3
from dcp_s3 import CheckpointManager, KeepBest, KeepLatest, S3StorageReader, SaveContinuously, SaveEvery, errors
from dcp_s3.events import Event, LoadStarted
from dcp_s3.manager.select_checkpoint import look_at_disk
from dcp_s3.spill.saving import spill_commit
from dcp_s3.spill.store import SpillStore
from tests.faulty import BUCKET, FaultyServer
from tests.interpreter import Interpreter
from tests.manager.conftest import blank, is_of, state
from tests.memory_s3 import Fault
from tests.retention.making import delete, keys, put
from tests.retention.runs import Run

pytestmark = pytest.mark.servers("memory")

ROOT = f"s3://{BUCKET}/run"
EXTRA = {"tokens": 10**12, "data": {"shard": 3, "seen": [1, 2.5, None, True]}, "commit": "a1b2"}


def names(root: str) -> list[str]:
    return [info.name for info in dcp_s3.list_checkpoints(root) if info.committed]


def refuse_saves(request: Any) -> Fault | None:
    return Fault.error(403, "AccessDenied") if request.operation == "PutObject" else None


@pytest.mark.servers("memory", "moto")
def test_a_run_is_saved_restored_and_thinned_out(root: str, s3: Any) -> None:
    retention = KeepLatest(2) | KeepBest(1, "loss", "min")
    with CheckpointManager(root, retention=retention) as manager:
        assert manager.restore(blank()) is None
        assert manager.latest_step() is None
        assert manager.best_step() is None
        current = state(0)
        for step, loss in ((100, 0.5), (200, 0.25), (300, 0.75), (400, 1.0), (500, 2.0)):
            current["weight"].fill_(step)
            current["step"] = step
            manager.save(step, current, {"loss": loss})
        current["weight"].fill_(-1)  # the copy is what is saved
        manager.wait()
        assert manager.latest_step() == 500
        assert manager.best_step() == 200
        assert manager.best_step("loss", "max") == 500
        loaded = blank()
        assert manager.restore(loaded) == 500
        assert is_of(loaded, 500)
        assert manager.restore(loaded, "best") == 200
        assert is_of(loaded, 200)
        assert manager.restore(loaded, 400) == 400
        assert is_of(loaded, 400)
    assert names(root) == ["step-00000200", "step-00000400", "step-00000500"]


def test_a_step_that_is_there_is_an_error_unless_overwritten(root: str) -> None:
    with CheckpointManager(root) as manager:
        manager.save(5, state(5))
        manager.save(5, state(55))
        with pytest.raises(errors.SaveFailedError, match=r"step 5 to .*step-00000005 failed on rank 0") as caught:
            manager.wait()
        assert caught.value.step == 5
        assert isinstance(caught.value.failures[0], errors.CheckpointExistsError)
        manager.wait()  # said once
        loaded = blank()
        assert manager.restore(loaded) == 5
        assert is_of(loaded, 5)
    with CheckpointManager(root, overwrite=True) as manager:
        manager.save(5, state(55))
        loaded = blank()
        assert manager.restore(loaded) == 5  # waits for the save
        assert is_of(loaded, 55)


def test_a_failed_save_is_raised_by_the_next_one_and_by_close(
    faulty: FaultyServer, caplog: pytest.LogCaptureFixture
) -> None:
    manager = CheckpointManager(ROOT, retention="latest:1")
    manager.save(1, state(1), blocking=True)
    faulty.rule = refuse_saves
    manager.save(2, state(2))
    with pytest.raises(errors.SaveFailedError, match=r"(?s)step 2 .* Cause: AccessDeniedError"):
        manager.save(3, state(3))
    assert "the save of step 2" in caplog.text
    with pytest.raises(errors.SaveFailedError, match="step 4"):
        manager.save(4, state(4), blocking=True)
    manager.save(5, state(5))
    with pytest.raises(errors.SaveFailedError, match="step 5"):
        manager.close()
    manager.close()
    with pytest.raises(errors.CheckpointError, match="was closed"):
        manager.save(6, state(6))
    faulty.rule = lambda _: None
    assert names(ROOT) == ["step-00000001"]


def test_an_error_in_the_with_block_is_not_masked_by_a_failed_save(
    faulty: FaultyServer, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ZeroDivisionError), CheckpointManager(ROOT) as manager:  # noqa: PT012
        faulty.rule = refuse_saves
        manager.save(1, state(1))
        raise ZeroDivisionError
    assert "while ZeroDivisionError went through the manager: the save of step 1" in caplog.text


def test_retention_that_fails_is_counted_and_saves_go_on(
    faulty: FaultyServer, caplog: pytest.LogCaptureFixture
) -> None:
    before = dcp_s3.stats().prunes
    with CheckpointManager(ROOT, retention=lambda *_: {}[7]) as manager:
        manager.save(1, state(1))
        manager.save(2, state(2))
    assert names(ROOT) == ["step-00000001", "step-00000002"]
    after = dcp_s3.stats().prunes
    assert after.failed - before.failed == after.runs - before.runs > 0
    assert "KeyError: 7" in caplog.text


def test_the_latest_that_is_damaged_or_vanishes_is_passed_over(
    root: str, s3: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def vanish(event: Event) -> None:
        if isinstance(event, LoadStarted) and event.url.endswith("3"):
            delete(s3, event.url, ".metadata")

    with CheckpointManager(root, on_event=vanish) as manager:
        for step in (0, 1, 2, 3, 4):
            manager.save(step, state(step))
        manager.wait()
        url = manager.url(4)
        delete(s3, url, next(path for path in keys(s3, url) if path.endswith(".distcp")))
        loaded = blank()
        # 4 is found to be damaged when it is chosen, 3 goes away between that and the load.
        assert manager.restore(loaded) == 2
        assert is_of(loaded, 2)
        assert "step-00000004 cannot be loaded" in caplog.text
        assert "step-00000003 could not be restored" in caplog.text
        assert "Looking for another one" in caplog.text
        url = manager.url(2)
        path, size = next((path, size) for path, size in keys(s3, url).items() if path.endswith(".distcp"))
        put(s3, url, path, b"\0" * size)
        with pytest.raises(errors.CorruptCheckpointError, match="step-00000002"):
            manager.restore(loaded, 2)
        assert manager.restore(loaded) == 1
        assert is_of(loaded, 1)
        for step in (0, 1):
            delete(s3, manager.url(step), ".metadata")
        with pytest.raises(errors.CorruptCheckpointError, match="none of those asked for can be loaded"):
            manager.restore(loaded)  # never None: that would begin the run anew


def test_what_a_restore_can_not_do_is_said(root: str, s3: Any) -> None:
    with CheckpointManager(root, retention=KeepLatest(3)) as manager:
        manager.save(1, state(1))
        manager.wait()
        with pytest.raises(errors.CheckpointNotFoundError, match=r"1 committed .*steps 1 to 1"):
            manager.restore(blank(), 2)
        with pytest.raises(errors.SettingsError, match=r"no KeepBest .*metric='val_loss'"):
            manager.restore(blank(), "best")
        with pytest.raises(errors.CheckpointNotFoundError):
            manager.best_step("loss")
        wrong = blank() | {"other": blank()["weight"]}
        with pytest.raises(errors.RestoreFailedError, match="on rank 0") as caught:
            manager.restore(wrong)
        assert caught.value.step == 1
        assert list(caught.value.failures) == [0]


def test_retention_waits_for_a_save_that_is_only_on_local_disk(
    faulty: FaultyServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DCP_S3_SPILL_AFTER", "2s")
    settings = {"spill_dir": str(tmp_path / "spill"), "durability": "local"}
    before = dcp_s3.stats().prunes.runs
    manager = CheckpointManager(ROOT, retention="latest:1", settings=settings)
    manager.save(1, state(1))
    manager.wait()
    dcp_s3.S3StorageWriter(manager.url(1), settings=settings).wait_committed(30)
    faulty.rule = lambda request: Fault.error(503, "SlowDown") if request.key.startswith("run/") else None
    manager.save(2, state(2))
    manager.wait()
    during = dcp_s3.stats().prunes.runs
    faulty.rule = lambda _: None
    manager.close()
    assert during <= before + 1  # that of the first save at most
    assert dcp_s3.stats().prunes.runs > during
    assert names(ROOT) == ["step-00000002"]


def test_of_the_saves_of_a_url_that_wait_on_disk_the_last_one_counts_and_no_rank_alone(tmp_path: Path) -> None:
    run, spill = Run(), SpillStore(tmp_path)
    commits = [run.begin("step-1", overwrite=True, **options)[1] for options in ({}, {}, {"rank": 0, "ranks": 2})]
    for number, commit in enumerate(commits):
        spill_commit(spill, commit, dcp_s3.Settings(), created_at=1e9 + number, overwrite=True)
    [waiting] = look_at_disk(run.catalog(settings={"spill_dir": str(tmp_path)})).commits
    assert [each.path for each in waiting.objects] == [each.path for each in commits[1].objects]


@pytest.mark.parametrize("coordination", ["collectives", "s3"])
def test_what_is_saved_with_a_step_is_read_back(root: str, coordination: Any) -> None:
    with CheckpointManager(root, coordination=coordination) as manager:
        manager.save(1, state(1), {"loss": 1.0}, extra=EXTRA, attachments={"config.json": b"{}"})
        assert manager.extra(1) == EXTRA  # waits for the save
        assert S3StorageReader(manager.url(1)).attachment("config.json") == b"{}"
        manager.save(2, state(2), blocking=True)
        assert manager.extra(2) == {}
        with pytest.raises(errors.CheckpointNotFoundError, match="step-00000009"):
            manager.extra(9)
        manager.save(3, state(3), {"loss": 0.75})
        manager.annotate(3, {"loss": 0.25, "note": "evaluated"})  # waits for its save
        assert manager.best_step("loss") == 3
        manager.annotate(1, {"loss": 0.125})
        assert manager.best_step("loss") == 1
        with pytest.raises(errors.CheckpointNotFoundError, match="step-00000009"):
            manager.annotate(9, {"loss": 0.0})
    [first, *_] = dcp_s3.list_checkpoints(root)
    assert (first.extra, first.metrics) == (EXTRA, {"loss": 0.125})
    assert S3StorageReader(first.url).extra() == EXTRA


def _only_reads(request: Any) -> Fault | None:
    reads = request.operation.startswith(("Get", "Head", "List"))
    return None if reads else Fault.error(403, "AccessDenied")


def test_read_only_needs_permission_to_read_only(faulty: FaultyServer, caplog: pytest.LogCaptureFixture) -> None:
    with CheckpointManager(ROOT) as manager:
        for step, loss in ((1, 0.1), (2, 0.2), (3, 0.3)):
            manager.save(step, state(step), {"loss": loss}, extra={"step": step})
    faulty.s3.reset_counters()
    faulty.rule = _only_reads
    with CheckpointManager(ROOT, read_only=True, retention="latest:1", should_save=SaveEvery(steps=1)) as manager:
        assert manager.latest_step() == 3
        assert manager.best_step("loss") == 1
        loaded = blank()
        assert manager.restore(loaded) == 3
        assert is_of(loaded, 3)
        assert manager.restore(loaded, "best", metric="loss") == 1
        assert manager.extra(2) == {"step": 2}
        assert not manager.should_save(4)
        with pytest.raises(errors.CheckpointError, match=r"step 4 is not saved: .*read_only=True.*make one without"):
            manager.save(4, state(4), force=True)
        with pytest.raises(errors.CheckpointError, match=r"nothing is annotated: .*read_only=True"):
            manager.annotate(3, {"loss": 0.0})
        manager.wait()
    assert not any(_only_reads(request) for request in faulty.s3.request_log)
    assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]
    assert len(names(ROOT)) == 3


def test_read_only_drains_nothing(faulty: FaultyServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DCP_S3_SPILL_DIR", str(tmp_path))
    with CheckpointManager(ROOT) as manager:
        manager.save(1, state(1))
    faulty.rule = _only_reads
    with CheckpointManager(ROOT, settings={"durability": "local", "spill_after": 0.2}) as manager:
        manager.save(2, state(2))
        manager.wait()
        waiting = sorted(path for path in tmp_path.rglob("*") if path.is_file())
        with CheckpointManager(ROOT, read_only=True) as reader:
            assert reader.latest_step() == 1
            assert reader.restore(blank()) == 1
        assert manager.latest_step() == 2
        assert waiting
        assert sorted(path for path in tmp_path.rglob("*") if path.is_file()) == waiting
        faulty.rule = lambda _: None
        assert manager.restore(blank()) == 2


def test_save_asks_the_policy_and_can_be_forced(root: str) -> None:
    with CheckpointManager(root, should_save=SaveEvery(steps=4)) as manager:
        saved = [step for step in range(1, 10) if manager.save(step, state(step))]
        assert saved == [4, 8]
        assert not manager.should_save(10)
        assert manager.save(10, state(10), force=True, blocking=True)
        assert manager.should_save(12)
        assert manager.should_save(12)  # asking changes nothing
    with CheckpointManager(root, should_save=SaveEvery(steps=5)) as manager:
        assert manager.restore(blank()) == 10
        assert [step for step in range(10, 21) if manager.save(step, state(step))] == [15, 20]
    assert len(names(root)) == 5
    with CheckpointManager(root, overwrite=True) as manager:  # as before
        assert manager.should_save(20)
        assert manager.save(20, state(20)) is True
        assert not manager.preempted


def test_continuous_saves_begin_when_the_last_one_is_committed(faulty: FaultyServer) -> None:
    opened = threading.Event()
    faulty.rule = lambda request: Fault.delay(0.0) if request.method != "PUT" or opened.wait(60) else None
    with CheckpointManager(ROOT, should_save=SaveContinuously()) as manager:
        assert [step for step in range(1, 50) if manager.save(step, state(step))] == [1]
        opened.set()
        manager.wait()
        assert manager.save(50, state(50))
    assert names(ROOT) == ["step-00000001", "step-00000050"]


_NOT_CLOSED = """
import sys, torch
from dcp_s3 import CheckpointManager
manager = CheckpointManager(sys.argv[1], retention="latest:1")
manager.save(1, {"weight": torch.full((1000,), 1.0)})
open(sys.argv[2], "w").close()
"""


def test_a_process_that_does_not_close_its_manager_completes_its_save(
    faulty: FaultyServer, tmp_path: Path, interpreter: Interpreter
) -> None:
    ended = tmp_path / "ended"

    def wait(request: Any) -> None:
        while request.method == "PUT" and not ended.exists():
            time.sleep(0.02)

    faulty.rule = wait
    command = [sys.executable, "-W", "ignore", "-c", _NOT_CLOSED, ROOT, str(ended)]
    done = interpreter.run(command, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "Fatal" not in done.stderr
    assert names(ROOT) == ["step-00000001"]


LARGE: Any = {"weight": torch.arange(10_000), "secret": "in the state"}


def test_arguments_that_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    refused: list[tuple[dict[str, Any], str, type[errors.DcpS3Error]]] = [
        ({"retention": "latest:x"}, "latest:x", errors.SettingsError),
        ({"retention": LARGE}, "retention = a dict", errors.SettingsError),
        ({"retention": "latest:1", "settings": {"retention_grace": "1m"}}, "under 1 h", errors.SettingsError),
        ({"coordination": "S3"}, "coordination.*expected", errors.CheckpointError),
        ({"coordination": "s3", "process_group": object()}, "coordination.*Remedy", errors.CheckpointError),
        ({"root": str(tmp_path)}, "expected s3://", errors.InvalidURLError),
        ({"root": LARGE}, "expected s3://", errors.InvalidURLError),
    ]
    for arguments, message, error in refused:
        with pytest.raises(error, match=message):
            CheckpointManager(**{"root": ROOT, **arguments})
    monkeypatch.setenv("DCP_S3_RETENTION", "latest:3")
    assert str(CheckpointManager(ROOT).retention) == "latest:3"
    assert CheckpointManager(ROOT, retention="").retention is None
    monkeypatch.setenv("DCP_S3_RETENTION", "latest")
    with pytest.raises(errors.SettingsError, match="DCP_S3_RETENTION"):
        CheckpointManager(ROOT)


def test_arguments_of_calls_are_told_by_their_types() -> None:
    with CheckpointManager(ROOT) as manager:
        wrong: list[tuple[Any, str]] = [
            (lambda: manager.save(LARGE, 7), r"step = a dict, .*Remedy: manager\.save\(step, state\)"),  # type: ignore[arg-type]
            (lambda: manager.save(-1, LARGE), "step = -1"),
            (lambda: manager.save(1, [LARGE]), "state is a list, expected a dict"),  # type: ignore[arg-type]
            (lambda: manager.save(1, LARGE, 0.5), "metrics is a float, expected a dict"),  # type: ignore[arg-type]
            (lambda: manager.save(1, LARGE, {"loss": LARGE}), "metric 'loss' is a dict"),
            (lambda: manager.save(1, LARGE, planner=LARGE), "planner is a dict"),
            (lambda: manager.restore([LARGE]), "state is a list"),  # type: ignore[arg-type]
            (lambda: manager.restore(LARGE, LARGE), "step = a dict"),
            (lambda: manager.restore(LARGE, "bset"), "step = 'bset'"),  # type: ignore[arg-type]
            (lambda: manager.restore(LARGE, planner=LARGE), "planner is a dict"),
            (lambda: manager.annotate(LARGE, 7), r"step = a dict, .*manager\.annotate\(step, metrics\)"),  # type: ignore[arg-type]
            (lambda: manager.annotate(7, LARGE), "metric 'weight' is a Tensor"),
        ]
        for call, words in wrong:
            with pytest.raises(errors.CheckpointError, match=words) as caught:
                call()
            assert "in the state" not in str(caught.value)
