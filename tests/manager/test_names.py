"""How steps are named, and found again."""

from __future__ import annotations

from typing import Any

import pytest

from dcp_s3.errors import SettingsError
from dcp_s3.format.layout import step_by_patterns, step_of
from dcp_s3.manager.names import DEFAULT_FORMAT, check_step_format, step_name
from dcp_s3.settings import Settings, compile_step_pattern


def _found(name: str, settings: Settings) -> int | None:
    pattern = settings.step_pattern
    return step_of(name) if pattern is None else step_by_patterns(name, [compile_step_pattern(pattern)])


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
    settings = check_step_format(step_format, Settings())
    assert step_name(1000, step_format) == name
    assert _found(name, settings) == 1000
    assert (settings.step_pattern is not None) == has_pattern


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
        (lambda step: f"{step}-v2", r"in which no step is found.*DCP_S3_STEP_PATTERN"),
        (5, "step_format is a int, expected text"),
    ],
)
def test_what_does_not_round_trip_is_refused(step_format: Any, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        check_step_format(step_format, Settings())


def test_a_pattern_that_is_set_must_find_the_steps() -> None:
    settings = Settings(step_pattern=r"^(\d+)-v\d+$")
    assert check_step_format(lambda step: f"{step}-v2", settings) is settings
    with pytest.raises(SettingsError, match=r"does not find the step in .* like step-00000012"):
        check_step_format(DEFAULT_FORMAT, settings)
