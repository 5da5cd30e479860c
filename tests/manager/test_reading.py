"""What a manager reads: extra, the best, names of steps; and one that only reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import dcp_s3
from dcp_s3 import CheckpointManager, KeepBest, KeepLatest, S3StorageReader, S3StorageWriter, SaveEvery, errors
from tests.faulty import BUCKET, FaultyServer
from tests.manager.making import blank, is_of, state
from tests.memory_s3 import Fault

ROOT = f"s3://{BUCKET}/run"
EXTRA = {"tokens": 10**12, "data": {"shard": 3, "seen": [1, 2.5, None, True]}, "commit": "a1b2"}


def names(root: str) -> list[str]:
    return [info.name for info in dcp_s3.list_checkpoints(root) if info.committed]


# --- extra -----------------------------------------------------------------------------------------


@pytest.mark.servers("memory")
@pytest.mark.parametrize("coordination", ["collectives", "s3"])
def test_files_are_attached_to_their_step(root: str, coordination: Any) -> None:
    with CheckpointManager(root, coordination=coordination) as manager:
        manager.save(1, state(1), attachments={"config.json": b"{}"})
        manager.save(2, state(2))
        manager.wait()
        assert S3StorageReader(manager.url(1)).attachment("config.json") == b"{}"
        assert S3StorageReader(manager.url(2)).attachments() == []


@pytest.mark.servers("memory")
def test_what_is_saved_with_a_step_is_read_back(root: str) -> None:
    with CheckpointManager(root) as manager:
        manager.save(1, state(1), {"loss": 1.0}, extra=EXTRA)
        assert manager.extra(1) == EXTRA  # waits for the save
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


@pytest.mark.servers("memory")
def test_it_spills_and_drains_with_its_checkpoint(
    memory_server: Any, root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DCP_S3_SPILL_DIR", str(tmp_path))
    monkeypatch.setenv("DCP_S3_DURABILITY", "local")
    with CheckpointManager(root) as manager:
        manager.save(1, state(1), extra=EXTRA)
        manager.wait()
        assert manager.extra(1) == EXTRA  # on S3 or not yet
    writer = S3StorageWriter(f"{root}/step-00000001")
    writer.wait_committed(60)
    assert S3StorageReader(f"{root}/step-00000001", settings={"durability": "s3"}).extra() == EXTRA


# --- best ------------------------------------------------------------------------------------------


@pytest.mark.servers("memory")
def test_best_names_a_metric_and_takes_its_direction_from_retention(root: str) -> None:
    with CheckpointManager(root) as manager:
        for step, loss, accuracy in ((1, 0.5, 0.9), (2, 0.25, 0.5), (3, 0.75, 0.1)):
            manager.save(step, state(step), {"loss": loss, "accuracy": accuracy})
        loaded = blank()
        assert manager.restore(loaded, "best", metric="loss") == 2
        assert is_of(loaded, 2)
        assert manager.restore(loaded, "best", metric="accuracy") == 3  # nobody said otherwise
        assert manager.restore(loaded, "best", metric="accuracy", mode="max") == 1
        with pytest.raises(errors.CheckpointNotFoundError, match="none of the 3"):
            manager.restore(loaded, "best", metric="perplexity")
    retention = KeepLatest(9) | KeepBest(1, "accuracy", "max")
    with CheckpointManager(root, retention=retention, read_only=True) as manager:
        assert manager.restore(loaded, "best") == 1
        assert manager.best_step("accuracy") == 1
        assert manager.best_step("accuracy", "min") == 3
        assert manager.best_step("loss") == 2


# --- names -----------------------------------------------------------------------------------------


@pytest.mark.servers("memory")
@pytest.mark.parametrize("step_format", ["{step}", "step_{step:06d}"])
def test_steps_are_found_by_their_names(root: str, step_format: str) -> None:
    with CheckpointManager(root, step_format=step_format) as manager:
        assert manager.restore(blank()) is None
        for step in (1, 9, 10):
            manager.save(step, state(step), {"loss": float(step)})
        manager.wait()
        assert manager.latest_step() == 10
        assert manager.restore(blank(), 9) == 9
        assert manager.best_step("loss") == 1
    with CheckpointManager(root, retention="steps:1,9", step_format=step_format) as manager:
        manager.save(100, state(100))  # after which 10 goes
        kept = {url.rpartition("/")[2] for url in map(manager.url, (1, 9, 100))}
    assert set(names(root)) == kept


# --- read_only ---------------------------------------------------------------------------------------


def _only_reads(request: Any) -> Fault | None:
    reads = request.operation.startswith(("Get", "Head", "List"))
    return None if reads else Fault.error(403, "AccessDenied")


def test_read_only_needs_permission_to_read_only(faulty: FaultyServer, caplog: pytest.LogCaptureFixture) -> None:
    with CheckpointManager(ROOT) as manager:
        for step, loss in ((1, 0.1), (2, 0.2), (3, 0.3)):
            manager.save(step, state(step), {"loss": loss}, extra={"step": step})
    denied: list[str] = []

    def rule(request: Any) -> Fault | None:
        fault = _only_reads(request)
        if fault is not None:
            denied.append(request.operation)
        return fault

    faulty.rule = rule
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
    assert denied == []
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


# --- should_save -------------------------------------------------------------------------------------


@pytest.mark.servers("memory")
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
    with pytest.raises(errors.CheckpointError, match="was closed"):
        manager.save(3, state(3))
