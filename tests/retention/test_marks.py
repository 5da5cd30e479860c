"""Metrics after the save, pins, and what an overwriting save makes of them."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from dcp_s3 import unpin
from dcp_s3.errors import CheckpointNotFoundError, PreconditionFailedError, SettingsError
from dcp_s3.format.layout import METRICS, PIN
from dcp_s3.retention import marks
from dcp_s3.s3 import retry
from tests.retention.runs import Run


@pytest.fixture(autouse=True)
def _no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "BACKOFF_BASE", 0.0)


def test_metrics_are_added_and_replaced_one_by_one(run: Run) -> None:
    run.save("step-1", metrics={"loss": 3.0, "epoch": 1})
    assert run.annotate("step-1", {"val_loss": 1.5}) == {"val_loss": 1.5}
    assert run.annotate("step-1", {"loss": 2.0, "note": "ünï", "good": True}) == {
        "val_loss": 1.5, "loss": 2.0, "note": "ünï", "good": True,
    }  # fmt: skip
    assert run.only().metrics == {"loss": 2.0, "epoch": 1, "val_loss": 1.5, "note": "ünï", "good": True}


def test_pin_and_unpin(run: Run) -> None:
    run.steps(1)
    assert not run.only().pinned
    run.pin("step-1", "keep")
    run.pin("step-1", "paper")
    assert json.loads(run.get("step-1", PIN))["reason"] == "paper"
    assert run.only().pinned
    assert [unpin(str(run.url("step-1")), store=run.store) for _ in range(2)] == [True, False]
    assert not run.only().pinned


@pytest.mark.parametrize(
    "metrics", [{}, {"loss": math.inf}, {"loss": None}, {"loss": [1]}, {"": 1}, {3: 1}, {"loss": 1j}, "loss=1"]
)
def test_what_can_not_be_stored_is_refused_before_any_request(run: Run, metrics: Any) -> None:
    with pytest.raises(SettingsError, match=r"expected a mapping|cannot be stored"):
        run.annotate("step-1", metrics)
    assert not run.calls


def test_marks_need_a_committed_checkpoint(run: Run) -> None:
    run.steps(1)
    run.delete("step-1", ".metadata")
    before = run.objects()
    for name in ("step-1", "step-2"):
        with pytest.raises(CheckpointNotFoundError, match="no committed checkpoint"):
            run.annotate(name, {"loss": 1})
        with pytest.raises(CheckpointNotFoundError, match="no committed checkpoint"):
            run.pin(name)
    assert run.objects() == before


def test_metrics_belong_to_one_save_and_the_pin_to_the_url(run: Run) -> None:
    run.save("step-1", metrics={"loss": 1.0})
    run.annotate("step-1", {"val_loss": 0.5})
    run.pin("step-1")
    run.forget_metadata("step-1")  # as a copy does
    assert run.annotate("step-1", {"nan": math.nan}).keys() == {"val_loss", "nan"}
    run.save("step-1", metrics={"loss": 2.0}, overwrite=True)
    assert (run.only().metrics, run.only().pinned) == ({"loss": 2.0}, True)
    assert run.annotate("step-1", {"acc": 1}) == {"acc": 1}
    assert run.only().metrics == {"loss": 2.0, "acc": 1}


def test_a_damaged_file_of_metrics_is_replaced(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    run.save("step-1", metrics={"loss": 1})
    for data in (b"", b"[]", b'{"format_version": 9, "metrics": {}}', b'{"format_version": 1, "metrics": 3}'):
        run.put("step-1", METRICS, data)
        caplog.clear()
        assert run.only().metrics == {"loss": 1}
        assert "are not used" in caplog.text
        assert run.annotate("step-1", {"acc": 2}) == {"acc": 2}
        assert run.only().metrics == {"loss": 1, "acc": 2}


def test_a_writer_that_meets_others_merges_until_there_is_no_end_of_them(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.steps(1)
    run.once("put", METRICS, lambda: run.annotate("step-1", {"b": 2}))
    assert run.annotate("step-1", {"a": 1}) == {"a": 1, "b": 2} == run.only().metrics
    monkeypatch.setattr(marks, "_CONFLICTS", 3)
    run.rule = lambda method, key: PreconditionFailedError("met") if method == "put" else None
    with pytest.raises(PreconditionFailedError):
        run.annotate("step-1", {"a": 2})
