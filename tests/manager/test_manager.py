"""CheckpointManager in one process."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

import dcp_s3
from dcp_s3 import CheckpointManager, KeepBest, KeepLatest, errors
from dcp_s3.events import Event, LoadStarted
from tests.faulty import BUCKET, FaultyServer
from tests.manager.making import blank, is_of, state
from tests.memory_s3 import Fault
from tests.retention.making import delete, keys, put

ROOT = f"s3://{BUCKET}/run"


def names(root: str) -> list[str]:
    return [info.name for info in dcp_s3.list_checkpoints(root) if info.committed]


def refuse_saves(request: Any) -> Fault | None:
    return Fault.error(403, "AccessDenied") if request.operation == "PutObject" else None


# --- saves and restores --------------------------------------------------------------------------


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


@pytest.mark.servers("memory")
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


# --- what goes wrong -----------------------------------------------------------------------------


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

    def broken(*_: Any) -> Any:
        raise ZeroDivisionError("in the policy")

    with CheckpointManager(ROOT, retention=broken) as manager:
        manager.save(1, state(1))
        manager.save(2, state(2))
    assert names(ROOT) == ["step-00000001", "step-00000002"]
    after = dcp_s3.stats().prunes
    assert after.failed > before.failed
    assert after.failed - before.failed == after.runs - before.runs
    assert "in the policy" in caplog.text


@pytest.mark.servers("memory")
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


@pytest.mark.servers("memory")
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


# --- local durability ----------------------------------------------------------------------------


def test_retention_waits_for_a_save_that_is_only_on_local_disk(
    faulty: FaultyServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
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
    with caplog.at_level(logging.ERROR):
        during = dcp_s3.stats().prunes.runs
    faulty.rule = lambda _: None
    manager.close()
    assert during <= before + 1  # that of the first save at most
    assert dcp_s3.stats().prunes.runs > during
    assert names(ROOT) == ["step-00000002"]
