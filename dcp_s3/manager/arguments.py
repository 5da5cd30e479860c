"""Arguments of a `CheckpointManager`, checked. Pure."""

from __future__ import annotations

from dcp_s3 import errors
from dcp_s3.format.layout import step_by_patterns
from dcp_s3.retention.parse import parse_policy, policy_from_settings
from dcp_s3.retention.policy import PolicyFunction
from dcp_s3.retention.prune import check_grace
from dcp_s3.settings import Settings, compile_step_pattern


def step_name(step: int) -> str:
    """The name of a step's checkpoint.

    Raises:
        CheckpointError: not a step.
    """
    return f"step-{check_step(step):08d}"


def check_step(step: object) -> int:
    """The step, if it is a whole number of 0 or more.

    Raises:
        CheckpointError: it is not.
    """
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise errors.CheckpointError(f"step = {step!r}, expected a whole number of 0 or more")
    return step


def resolve_policy(retention: PolicyFunction | str | None, settings: Settings) -> PolicyFunction | None:
    """The policy that was given, as an object or as text, or else that of the settings; None if nothing is deleted.

    Raises:
        PolicyError: not a policy.
        SettingsError: that of the settings is not one.
    """
    if retention is None:
        return policy_from_settings(settings)
    if isinstance(retention, str):
        return parse_policy(retention)
    if not callable(retention):
        raise errors.PolicyError(
            f"retention = {retention!r}, expected a policy, for example KeepLatest(3), or text like 'latest:3'"
        )
    return retention


def check_settings(settings: Settings, *, prunes: bool) -> None:
    """What would fail every retention, or hide every checkpoint of the manager's own, later.

    Raises:
        PolicyError: the grace period is too short.
        SettingsError: the setting ``step_pattern`` does not find the steps in the manager's names.
    """
    if prunes:
        check_grace(settings.retention_grace, force=False)
    pattern = settings.step_pattern
    if pattern is not None and step_by_patterns(step_name(12), [compile_step_pattern(pattern)]) != 12:
        raise errors.SettingsError(
            f"DCP_S3_STEP_PATTERN = {pattern!r} does not find the step in the names that CheckpointManager gives, like "
            f"{step_name(12)}. Remedy: unset it, or let it find that, too"
        )
