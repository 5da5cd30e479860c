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
from tests.faulty import BUCKET, FaultyServer, serve
from tests.retention.making import delete, get, keys, put, save, save_foreign
from tests.servers import S3Server


def only(root: str) -> CheckpointInfo:
    [found] = list_checkpoints(root)
    return found


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


def test_nan_is_a_value(root: str, memory_server: S3Server) -> None:
    url = save(f"{root}/step-1")
    annotate(url, {"val_loss": math.nan})
    assert math.isnan(only(root).metrics["val_loss"])
    assert CheckpointCatalog(root).best("val_loss") is None


@pytest.mark.parametrize(
    "metrics", [{}, {"loss": math.inf}, {"loss": None}, {"loss": [1]}, {"": 1}, {3: 1}, {"loss": 1j}, "loss=1"]
)
def test_what_can_not_be_stored_is_refused_before_any_request(metrics: Any) -> None:
    with pytest.raises(SettingsError, match=r"expected a mapping|cannot be stored"):
        annotate("s3://bucket/run/step-1", metrics)


def test_marks_need_a_committed_checkpoint(root: str, s3: Any, memory_server: S3Server) -> None:
    torn = save(f"{root}/step-1")
    delete(s3, torn, ".metadata")
    before = keys(s3, torn)
    for url in (torn, f"{root}/step-2"):
        with pytest.raises(CheckpointNotFoundError, match="no committed checkpoint"):
            annotate(url, {"loss": 1})
        with pytest.raises(CheckpointNotFoundError, match="no committed checkpoint"):
            pin(url)
        assert unpin(url) is False
    assert keys(s3, torn) == before
    with pytest.raises(BucketNotFoundError):
        annotate("s3://no-such-bucket-here/run", {"loss": 1})


def test_an_overwriting_save_drops_old_metrics_and_keeps_the_pin(root: str) -> None:
    url = save(f"{root}/step-1", metrics={"loss": 1.0})
    annotate(url, {"val_loss": 0.5})
    pin(url, "the paper's baseline")
    save(url, metrics={"loss": 2.0}, overwrite=True)
    found = only(root)
    assert (found.metrics, found.pinned) == ({"loss": 2.0}, True)
    assert annotate(url, {"acc": 1}) == {"acc": 1}
    assert only(root).metrics == {"loss": 2.0, "acc": 1}


def test_metrics_of_a_foreign_checkpoint(root: str, s3: Any, tmp_path: Path, memory_server: S3Server) -> None:
    url = save_foreign(s3, f"{root}/step-1", tmp_path)
    annotate(url, {"loss": 1})
    assert only(root).metrics == {"loss": 1}
    put(s3, url, ".metadata", get(s3, url, ".metadata"))  # written anew: another checkpoint
    assert only(root).metrics == {}


def test_a_copy_that_lost_its_user_metadata_has_its_metrics(root: str, s3: Any, memory_server: S3Server) -> None:
    url = save(f"{root}/step-1")
    annotate(url, {"loss": 1})
    put(s3, url, ".metadata", get(s3, url, ".metadata"))
    assert only(root).metrics == {"loss": 1}
    assert annotate(url, {"acc": 2}) == {"loss": 1, "acc": 2}


def test_a_damaged_file_of_metrics_is_replaced(
    root: str, s3: Any, caplog: pytest.LogCaptureFixture, memory_server: S3Server
) -> None:
    url = save(f"{root}/step-1", metrics={"loss": 1})
    for data in (b"", b"[]", b"\xff", b'{"format_version": 9, "metrics": {}}', b'{"format_version": 1, "metrics": 3}'):
        put(s3, url, METRICS, data)
        caplog.clear()
        assert only(root).metrics == {"loss": 1}
        assert "are not used" in caplog.text
        assert annotate(url, {"acc": 2}) == {"acc": 2}
        assert only(root).metrics == {"loss": 1, "acc": 2}


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


def test_metrics_round_trip() -> None:
    added = AddedMetrics("ab", {"a": 1, "b": 0.5, "c": math.inf, "d": "text", "e": False})
    assert AddedMetrics.from_json(added.to_json()) == added


# --- several at a time ---------------------------------------------------------------------------


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


def test_a_writer_that_meets_another_merges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "BACKOFF_BASE", 0.001)
    with serve(monkeypatch) as faulty:
        url = save(f"s3://{BUCKET}/run/step-1")
        others = iter([{"b": 2}, {"c": 3}])

        def between(request: Any) -> None:
            if request.operation == "PutObject" and request.key.endswith(METRICS):
                faulty.rule = lambda _: None
                other = next(others, None)
                if other is not None:
                    annotate(url, other)
                    faulty.rule = between

        faulty.rule = between
        assert annotate(url, {"a": 1}) == {"a": 1, "b": 2, "c": 3}
        assert only(f"s3://{BUCKET}/run").metrics == {"a": 1, "b": 2, "c": 3}


def test_endless_conflicts_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "BACKOFF_BASE", 0.0)
    monkeypatch.setattr(marks, "_CONFLICTS", 3)
    server = FaultyServer()
    with serve(monkeypatch, server) as faulty:
        url = save(f"s3://{BUCKET}/run/step-1")
        count = 0

        def rule(request: Any) -> None:
            nonlocal count
            if request.operation == "PutObject" and request.key.endswith(METRICS):
                count += 1
                faulty.rule = lambda _: None
                annotate(url, {"other": count})
                faulty.rule = rule

        faulty.rule = rule
        with pytest.raises(PreconditionFailedError):
            annotate(url, {"a": 1})
    assert count == 3
