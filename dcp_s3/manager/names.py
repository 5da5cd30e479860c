"""How the checkpoints of a run are named below its root, and how their steps are found again. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable
from string import Formatter
from typing import Any

from dcp_s3.errors import SettingsError
from dcp_s3.format.layout import is_attachment_name, step_by_patterns, step_of
from dcp_s3.settings import Settings, compile_step_pattern

DEFAULT_FORMAT = "step-{step:08d}"

StepFormat = str | Callable[[int], str]
"""A name with ``{step}`` in it, or a function of the step."""

_SAMPLES = (12, 0, 1, 2, 9, 100, 999, 12345, 10**6, 99_999_999, 10**8, 2**40 + 1)


def step_name(step: int, step_format: StepFormat = DEFAULT_FORMAT) -> str:
    """The name of a step's checkpoint, for example ``step-00001000``."""
    return step_format.format(step=step) if isinstance(step_format, str) else step_format(step)


def check_step_format(step_format: Any, settings: Settings) -> Settings:
    """The settings by which everything finds the steps in the names that ``step_format`` gives: those given, unless
    `step_of` does not find it. Then their ``step_pattern`` is that of the format. A name that is none, or in which the
    step cannot be found, is a SettingsError."""
    if not isinstance(step_format, str) and not callable(step_format):
        kind = type(step_format).__name__
        raise SettingsError(
            f"step_format is a {kind}, expected text like 'step-{{step:08d}}', or a function of the step"
        )
    names = {step: _checked_name(step, step_format) for step in _SAMPLES}
    if settings.step_pattern is not None:
        if (lost := _lost(names, settings.step_pattern)) is not None:
            raise SettingsError(
                f"DCP_S3_STEP_PATTERN = {settings.step_pattern!r} does not find the step in the names that "
                f"CheckpointManager gives, like {names[lost]}. Remedy: unset it, or make it match these too"
            )
        return settings
    lost = _lost(names, None)
    if lost is None:
        return settings
    pattern = _pattern_of(step_format) if isinstance(step_format, str) else _pattern_in(names)
    if pattern is not None and _lost(names, pattern) is None:
        return settings.model_copy(update={"step_pattern": pattern})
    found = step_of(names[lost])
    raise SettingsError(
        f"{_describe(step_format)} names step {lost} {names[lost]!r}, in which {_found(found)}. Remedy: the step in "
        "decimal digits after the word, like 'step-{step:08d}'"
        + ("" if isinstance(step_format, str) else "; or set DCP_S3_STEP_PATTERN so that it finds the step")
    )


def _found(step: int | None) -> str:
    return "no step is found" if step is None else f"step {step} is found"


def _describe(step_format: StepFormat) -> str:
    return f"step_format = {step_format!r}" if isinstance(step_format, str) else "step_format, a function,"


def _lost(names: dict[int, str], pattern: str | None) -> int | None:
    """The first step that is not found in its name."""
    patterns = None if pattern is None else [compile_step_pattern(pattern)]
    for step, name in names.items():
        if (step_of(name) if patterns is None else step_by_patterns(name, patterns)) != step:
            return step
    return None


def _checked_name(step: int, step_format: StepFormat) -> str:
    try:
        name = step_name(step, step_format)
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        raise SettingsError(
            f"{_describe(step_format)} cannot name step {step} ({why}). Remedy: a name with {{step}} in it, like "
            "'step-{step:08d}'"
        ) from error
    if not isinstance(name, str) or "/" in name or not is_attachment_name(name):
        raise SettingsError(
            f"{_describe(step_format)} names step {step} {name!r}, which cannot be the name of a checkpoint. Remedy: a "
            "name without slashes of at most 90 bytes, like 'step-{step:08d}'"
        )
    return name


def _pattern_of(step_format: str) -> str | None:
    """A regular expression for exactly the names of a format, with the step as its group; None if it has no step."""
    pieces = ["^"]
    fields = 0
    for literal, field, _, _ in Formatter().parse(step_format):
        pieces.append(re.escape(literal))
        if field is not None:
            pieces.append(r"\d+" if fields else r"(\d+)")
            fields += 1
    return "".join([*pieces, "$"]) if fields else None


def _pattern_in(names: dict[int, str]) -> str | None:
    """A regular expression for names that differ in nothing but the step; None if they differ otherwise."""
    around = {
        (before.rstrip("0"), after) for step, name in names.items() for before, _, after in [name.rpartition(str(step))]
    }
    [(before, after), *more] = around
    return None if more else rf"^{re.escape(before)}(\d+){re.escape(after)}$"
