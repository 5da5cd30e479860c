"""Metrics after the save, pins, and what an overwriting save makes of them."""

from __future__ import annotations

import json
import math
import threading
from pathlib import Path
from typing import Any

import pytest

from dcp_s3 import CheckpointCatalog, CheckpointInfo, annotate, list_checkpoints, pin, unpin
from dcp_s3.errors import BucketNotFoundError, CheckpointNotFoundError, PreconditionFailedError, SettingsError
from dcp_s3.format.control_files import AddedMetrics
from dcp_s3.format.layout import METRICS, PIN
from dcp_s3.retention import marks
from dcp_s3.s3 import retry
from tests.retention.making import get, save
from tests.retention.runs import Run
from tests.servers import S3Server


def only(found: str | Run) -> CheckpointInfo:
    [info] = list_checkpoints(found) if isinstance(found, str) else found.catalog().checkpoints()
    return info


# --- on every server -----------------------------------------------------------------------------


def test_metrics_are_added_and_replaced_one_by_one(root: str) -> None:
    url = save(f"{root}/step-1", metrics={"loss": 3.0, "epoch": 1})
    assert annotate(url, {"val_loss": 1.5}) == {"val_loss": 1.5}
    assert annotate(url, {"loss": 2.0, "note": "ünï", "good": True}) == {
        "val_loss": 1.5, "loss": 2.0, "note": "ünï", "good": True,
    }  # fmt: skip
    assert only(root).metrics == {"loss": 2.0, "epoch": 1, "val_loss": 1.5, "note": "ünï", "good": True}
    best = CheckpointCatalog(root).best("val_loss")
    assert best is not None
    assert best.url == url


def test_pin_and_unpin(root: str, s3: Any) -> None:
    url = save(f"{root}/step-1")
    assert not only(root).pinned
    pin(url, "keep")
    pin(url, "paper")
    assert json.loads(get(s3, url, PIN))["reason"] == "paper"
    assert only(root).pinned
    assert unpin(url) is True
    assert unpin(url) is False
    assert not only(root).pinned


def test_an_overwriting_save_drops_old_metrics_and_keeps_the_pin(root: str) -> None:
    url = save(f"{root}/step-1", metrics={"loss": 1.0})
    annotate(url, {"val_loss": 0.5})
    pin(url, "the paper's baseline")
    save(url, metrics={"loss": 2.0}, overwrite=True)
    found = only(root)
    assert (found.metrics, found.pinned) == ({"loss": 2.0}, True)
    assert annotate(url, {"acc": 1}) == {"acc": 1}
    assert only(root).metrics == {"loss": 2.0, "acc": 1}


@pytest.mark.servers("memory", "moto")
def test_several_writers_lose_nothing(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "BACKOFF_BASE", 0.01)
    url = save(f"{root}/step-1")
    threads = [threading.Thread(target=annotate, args=(url, {f"m{number}": number})) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert only(root).metrics == {f"m{number}": number for number in range(6)}


def test_a_bucket_that_is_not_there_is_named(root: str, memory_server: S3Server) -> None:
    with pytest.raises(BucketNotFoundError):
        annotate("s3://no-such-bucket-here/run", {"loss": 1})


# --- in memory -----------------------------------------------------------------------------------


def test_nan_is_a_value(run: Run) -> None:
    run.save("step-1")
    run.annotate("step-1", {"val_loss": math.nan})
    assert math.isnan(only(run).metrics["val_loss"])
    assert run.catalog().best("val_loss") is None


@pytest.mark.parametrize(
    "metrics", [{}, {"loss": math.inf}, {"loss": None}, {"loss": [1]}, {"": 1}, {3: 1}, {"loss": 1j}, "loss=1"]
)
def test_what_can_not_be_stored_is_refused_before_any_request(run: Run, metrics: Any) -> None:
    with pytest.raises(SettingsError, match=r"expected a mapping|cannot be stored"):
        run.annotate("step-1", metrics)
    assert not run.calls


def test_marks_need_a_committed_checkpoint(run: Run) -> None:
    run.save("step-1")
    run.delete("step-1", ".metadata")
    before = run.objects()
    for name in ("step-1", "step-2"):
        with pytest.raises(CheckpointNotFoundError, match="no committed checkpoint"):
            run.annotate(name, {"loss": 1})
        with pytest.raises(CheckpointNotFoundError, match="no committed checkpoint"):
            run.pin(name)
    assert run.objects() == before


def test_metrics_of_a_foreign_checkpoint(run: Run, tmp_path: Path) -> None:
    run.save_foreign("step-1", tmp_path)
    run.annotate("step-1", {"loss": 1})
    assert only(run).metrics == {"loss": 1}
    run.put("step-1", ".metadata", run.get("step-1", ".metadata"))  # written anew: another checkpoint
    assert only(run).metrics == {}


def test_a_copy_that_lost_its_user_metadata_has_its_metrics(run: Run) -> None:
    run.save("step-1")
    run.annotate("step-1", {"loss": 1})
    run.put("step-1", ".metadata", run.get("step-1", ".metadata"))
    assert only(run).metrics == {"loss": 1}
    assert run.annotate("step-1", {"acc": 2}) == {"loss": 1, "acc": 2}


def test_a_damaged_file_of_metrics_is_replaced(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    run.save("step-1", metrics={"loss": 1})
    for data in (b"", b"[]", b"\xff", b'{"format_version": 9, "metrics": {}}', b'{"format_version": 1, "metrics": 3}'):
        run.put("step-1", METRICS, data)
        caplog.clear()
        assert only(run).metrics == {"loss": 1}
        assert "are not used" in caplog.text
        assert run.annotate("step-1", {"acc": 2}) == {"acc": 2}
        assert only(run).metrics == {"loss": 1, "acc": 2}


def test_metrics_round_trip() -> None:
    added = AddedMetrics("ab", {"a": 1, "b": 0.5, "c": math.inf, "d": "text", "e": False})
    assert AddedMetrics.from_json(added.to_json()) == added


def test_a_writer_that_meets_another_merges(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "BACKOFF_BASE", 0.001)
    run.save("step-1")
    others = [{"b": 2}, {"c": 3}]

    def meet() -> None:
        run.annotate("step-1", others.pop(0))
        if others:
            run.once("put", METRICS, meet)

    run.once("put", METRICS, meet)
    assert run.annotate("step-1", {"a": 1}) == {"a": 1, "b": 2, "c": 3}
    assert only(run).metrics == {"a": 1, "b": 2, "c": 3}


def test_endless_conflicts_are_an_error(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "BACKOFF_BASE", 0.0)
    monkeypatch.setattr(marks, "_CONFLICTS", 3)
    run.save("step-1")
    met: list[int] = []

    def meet() -> None:
        met.append(len(met))
        run.annotate("step-1", {"other": len(met)})
        run.once("put", METRICS, meet)

    run.once("put", METRICS, meet)
    with pytest.raises(PreconditionFailedError):
        run.annotate("step-1", {"a": 1})
    assert len(met) == 3
