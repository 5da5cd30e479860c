"""The step in a checkpoint's name."""

from __future__ import annotations

from dcp_s3.format.layout import step_by_patterns, step_of
from dcp_s3.setting_values import compile_step_pattern
from dcp_s3.settings import Settings


def find_step(name: str, settings: Settings) -> int | None:
    """The step that ``DCP_S3_STEP_PATTERN``, or else the usual rule, finds in a name; None if there is none."""
    pattern = settings.step_pattern
    return step_of(name) if pattern is None else step_by_patterns(name, [compile_step_pattern(pattern)])
