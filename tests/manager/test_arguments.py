"""Arguments of a manager and of its calls that are refused, and names of steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dcp_s3 import CheckpointManager, errors

ROOT = "s3://bucket/run"
LARGE: Any = {"weight": torch.arange(10_000), "secret": "in the state"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"retention": "latest:x"}, "latest:x"),
        ({"retention": LARGE}, "retention = a dict"),
        ({"settings": {"step_pattern": r"iter-(\d+)"}}, r"iter-.* does not find step 12 in 'step-00000012'.*Remedy"),
        ({"retention": "latest:1", "settings": {"retention_grace": "1m"}}, "under 1 h"),
    ],
)
def test_arguments_that_are_none(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(errors.SettingsError, match=message):
        CheckpointManager(ROOT, **arguments)


@pytest.mark.parametrize("options", [{"coordination": "S3"}, {"coordination": "s3", "process_group": object()}])
def test_arguments_that_do_not_go_together_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(errors.CheckpointError, match=r"coordination.*(expected|Remedy)"):
        CheckpointManager(ROOT, **options)


def test_roots_and_the_policy_of_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for root in (str(tmp_path), LARGE):
        with pytest.raises(errors.InvalidURLError):
            CheckpointManager(root)
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
