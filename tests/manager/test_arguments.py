"""Arguments of a manager and of its calls that are refused, and names of steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dcp_s3 import CheckpointManager, errors
from dcp_s3.format.layout import step_by_patterns, step_of
from dcp_s3.manager.arguments import DEFAULT_FORMAT, check_settings, step_name
from dcp_s3.setting_values import compile_step_pattern
from dcp_s3.settings import Settings

ROOT = "s3://bucket/run"


def test_arguments_that_are_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for bad in ("latest:x", 3):
        with pytest.raises(errors.SettingsError):
            CheckpointManager(ROOT, retention=bad)  # type: ignore[arg-type]
    with pytest.raises(errors.InvalidURLError):
        CheckpointManager(str(tmp_path))
    with pytest.raises(errors.SettingsError, match=r"iter-.* does not find the step .*step-00000012"):
        CheckpointManager(ROOT, settings={"step_pattern": r"iter-(\d+)"})
    with pytest.raises(errors.SettingsError, match="under 1 h"):
        CheckpointManager(ROOT, retention="latest:1", settings={"retention_grace": "1m"})
    monkeypatch.setenv("DCP_S3_RETENTION", "latest:3")
    assert str(CheckpointManager(ROOT).retention) == "latest:3"
    assert CheckpointManager(ROOT, retention="").retention is None
    monkeypatch.setenv("DCP_S3_RETENTION", "latest")
    with pytest.raises(errors.SettingsError, match="DCP_S3_RETENTION"):
        CheckpointManager(ROOT)


@pytest.mark.servers("memory")
def test_arguments_in_the_wrong_order_are_told_by_their_types(root: str) -> None:
    large = {"weight": torch.arange(10_000), "secret": "in the state"}
    with CheckpointManager(root) as manager:
        wrong: list[tuple[Any, str]] = [
            (lambda: manager.save(large, 7), r"step is a dict and state a int.*manager\.save\(step, state\)"),  # type: ignore[arg-type]
            (lambda: manager.save(large, large), "step = a dict, expected a whole number"),  # type: ignore[arg-type]
            (lambda: manager.save(torch.arange(9), large), "step = a Tensor"),  # type: ignore[arg-type]
            (lambda: manager.save(1, [large]), "state is a list, expected a dict"),  # type: ignore[arg-type]
            (lambda: manager.save(1, large, 0.5), "metrics is a float, expected a dict"),  # type: ignore[arg-type]
            (lambda: manager.save(1, large, {"loss": large}), "metric 'loss' is a dict"),
            (lambda: manager.save(1, large, planner=large), "planner is a dict"),  # type: ignore[arg-type]
            (lambda: manager.restore(7, large), r"state is a int and step a dict.*manager\.restore\(state, step\)"),  # type: ignore[arg-type]
            (lambda: manager.restore([large]), "state is a list"),  # type: ignore[arg-type]
            (lambda: manager.restore(large, large), "step = a dict"),  # type: ignore[arg-type]
            (lambda: manager.restore(large, planner=large), "planner is a dict"),  # type: ignore[arg-type]
            (lambda: manager.annotate(large, 7), r"manager\.annotate\(step, metrics\)"),  # type: ignore[arg-type]
            (lambda: manager.annotate(7, large), "metric 'weight' is a Tensor"),
            (lambda: manager.url(large), "step = a dict"),  # type: ignore[arg-type]
        ]
        for call, words in wrong:
            with pytest.raises(errors.CheckpointError, match=words) as caught:
                call()
            assert "in the state" not in str(caught.value)
            assert len(str(caught.value)) < 300
        manager.save(1, large, blocking=True)
    with pytest.raises(errors.InvalidURLError, match="URL is a dict"):
        CheckpointManager(large)  # type: ignore[arg-type]
    with pytest.raises(errors.SettingsError, match="retention = a dict"):
        CheckpointManager(root, retention=large)  # type: ignore[arg-type]
    with pytest.raises(errors.SettingsError, match="separate is text"):
        CheckpointManager(root, separate="model")


# --- names of steps ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step_format", "name", "has_pattern"),
    [
        (DEFAULT_FORMAT, "step-00001000", False),
        ("{step}", "1000", False),
        ("step_{step:06d}", "step_001000", False),
        ("run2-{step}", "run2-1000", True),
        ("{step}.v2", "1000.v2", True),
        ("{step:09d}-of-90000", "000001000-of-90000", True),
        ("checkpoint-{step}({step})", "checkpoint-1000(1000)", False),
        (lambda step: f"global_step{step}", "global_step1000", False),
        (lambda step: f"run2-{step:06d}x", "run2-001000x", True),
        (lambda step: f"epoch{step // 100}-step{step}", "epoch10-step1000", False),
    ],
)
def test_a_step_is_found_in_its_name(step_format: Any, name: str, has_pattern: bool) -> None:
    pattern = check_settings(Settings(), prunes=False, step_format=step_format).step_pattern
    assert step_name(1000, step_format) == name
    assert (pattern is not None) == has_pattern
    found = step_of(name) if pattern is None else step_by_patterns(name, [compile_step_pattern(pattern)])
    assert found == 1000


@pytest.mark.parametrize(
    ("step_format", "message"),
    [
        ("step-{step:x}", "'step-{step:x}' names step 12 'step-c', in which no step is found"),
        ("{step:,}", r"names step 12345 '12,345', in which no step is found"),
        ("checkpoint", "names step 12 'checkpoint', in which no step is found"),
        ("v2", "names step 12 'v2', in which no step is found"),
        ("run/{step}", "'run/12', which cannot be the name of a checkpoint"),
        ("{step}.metadata", "cannot be the name"),
        ("", "cannot be the name"),
        (".dcp_s3", "cannot be the name"),
        ("{step:0100d}", "at most 90 bytes"),
        ("{epoch}-{step}", r"cannot name step 12 \(KeyError: 'epoch'\)"),
        ("step-{step", "cannot name step 12"),
        (lambda step: step, "a function, names step 12 12, which cannot be"),
        (lambda step: f"{step % 1000}-v2", r"in which no step is found.*DCP_S3_STEP_PATTERN"),
        (5, "step_format is a int, expected text"),
    ],
)
def test_what_does_not_round_trip_is_refused(step_format: Any, message: str) -> None:
    with pytest.raises(errors.SettingsError, match=message):
        check_settings(Settings(), prunes=False, step_format=step_format)


def test_a_pattern_that_is_set_must_find_the_steps() -> None:
    settings = Settings(step_pattern=r"^(\d+)-v\d+$")
    assert check_settings(settings, prunes=False, step_format=lambda step: f"{step}-v2") is settings
    with pytest.raises(errors.SettingsError, match=r"does not find the step in .* like step-00000012"):
        check_settings(settings, prunes=False)
