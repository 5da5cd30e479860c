"""Arguments of a `CheckpointManager`, checked. Pure.

Messages name types rather than values: a state in place of a step would be printed whole.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner
from torch.distributed.checkpoint.stateful import Stateful

from dcp_s3 import errors
from dcp_s3.checkpoint.commit import check_metrics
from dcp_s3.format.layout import step_by_patterns
from dcp_s3.retention.parse import parse_policy, policy_from_settings
from dcp_s3.retention.policy import PolicyFunction
from dcp_s3.retention.prune import check_grace
from dcp_s3.settings import Settings, SettingsLike, compile_step_pattern, resolve_settings
from dcp_s3.url import CheckpointURL, parse_url


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
        raise errors.CheckpointError(f"step = {_show(step)}, expected a whole number of 0 or more")
    return step


def check_save(step: object, state: object, metrics: object, planner: object) -> None:
    """What `CheckpointManager.save` was given.

    Raises:
        CheckpointError: something is not what it should be.
        SaveProtocolError: a metric can not be stored.
    """
    if isinstance(step, Mapping) and not isinstance(state, Mapping):
        raise errors.CheckpointError(
            f"step is a {_kind(step)} and state a {_kind(state)}: the step comes first. Remedy: "
            "manager.save(step, state)"
        )
    check_step(step)
    check_state(state)
    _check_metrics(metrics)
    _check_planner(planner, SavePlanner)


def check_annotate(step: object, metrics: object) -> None:
    """What `CheckpointManager.annotate` was given.

    Raises:
        CheckpointError: something is not what it should be.
        SaveProtocolError: a metric can not be stored.
    """
    if isinstance(step, Mapping) and not isinstance(metrics, Mapping):
        raise errors.CheckpointError(
            f"step is a {_kind(step)} and metrics a {_kind(metrics)}: the step comes first. Remedy: "
            "manager.annotate(step, metrics)"
        )
    check_step(step)
    _check_metrics(metrics)


def _check_metrics(metrics: object) -> None:
    if metrics is None:
        return
    if not isinstance(metrics, Mapping):
        raise errors.CheckpointError(f"metrics is a {_kind(metrics)}, expected a dict like {{'val_loss': 0.5}}")
    for name, value in metrics.items():
        if not isinstance(value, (int, float, str, bool, type(None))):
            raise errors.SaveProtocolError(
                f"metric {_show(name)} is a {_kind(value)}, expected a number, text, a bool or None (of a tensor: "
                "tensor.item())"
            )
    check_metrics(metrics)


def check_restore(state: object, step: object, planner: object) -> None:
    """What `CheckpointManager.restore` was given, but for what best means.

    Raises:
        CheckpointError: something is not what it should be.
    """
    if isinstance(step, Mapping) and not isinstance(state, Mapping):
        raise errors.CheckpointError(
            f"state is a {_kind(state)} and step a {_kind(step)}: the state comes first. Remedy: "
            "manager.restore(state, step)"
        )
    check_state(state)
    if step is not None and not (isinstance(step, str) and step in ("best", "latest")):
        check_step(step)
    _check_planner(planner, LoadPlanner)


def _check_planner(planner: object, kind: type) -> None:
    if planner is not None and not isinstance(planner, kind):
        raise errors.CheckpointError(f"planner is a {_kind(planner)}, expected a {kind.__name__} or None")


def check_state(state: object) -> None:
    """A state, as `dcp.save` and `dcp.load` take it.

    Raises:
        CheckpointError: it is not.
    """
    if not isinstance(state, Mapping):
        raise errors.CheckpointError(
            f"state is a {_kind(state)}, expected a dict by name, like {{'model': model, 'step': step}}"
        )


def collect(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state with what the `state_dict` of each Stateful in it returns, as `dcp.save` makes it."""
    return {name: value.state_dict() if isinstance(value, Stateful) else value for name, value in state.items()}


def has_stateful(state: Mapping[str, Any]) -> bool:
    """Whether `collect` calls anything."""
    return any(isinstance(value, Stateful) for value in state.values())


def distribute(loaded: Mapping[str, Any], state: dict[str, Any]) -> None:
    """Give each Stateful of ``state`` what was loaded for it, and put everything else in its place."""
    for name in sorted(loaded, key=str):  # load_state_dict may talk to the other ranks: in the same order on all
        if isinstance(state[name], Stateful):
            state[name].load_state_dict(loaded[name])
        else:
            state[name] = loaded[name]


@dataclass(frozen=True)
class Configuration:
    """What a manager is made with.

    Attributes:
        root: of the run.
        settings: of all that it does.
        retention: the policy; None if nothing is deleted.
    """

    root: CheckpointURL
    settings: Settings
    retention: PolicyFunction | None


def configure(
    root: str | os.PathLike[str],
    retention: PolicyFunction | str | None,
    settings: SettingsLike,
    separate: object,
    timeouts: Mapping[str, object],
) -> Configuration:
    """Check what a manager was given.

    Raises:
        InvalidURLError, SettingsError
        PolicyError: ``retention`` is no policy, or the grace period is too short.
    """
    if not isinstance(root, (str, os.PathLike)):
        raise errors.InvalidURLError(f"root is a {_kind(root)}, expected text like 's3://bucket/run'")
    if isinstance(separate, str):
        raise errors.SettingsError(f"separate is text, expected a list of FQN prefixes. Remedy: [{_show(separate)}]")
    for name, seconds in timeouts.items():
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds >= 0:
            raise errors.SettingsError(f"{name} = {_show(seconds)}, expected seconds, 0 or more")
    resolved = resolve_settings(settings)
    policy = resolve_policy(retention, resolved)
    check_settings(resolved, prunes=policy is not None)
    return Configuration(parse_url(root), resolved, policy)


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
            f"retention = {_show(retention)}, expected a policy, for example KeepLatest(3), or text like 'latest:3'"
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


def _show(value: object) -> str:
    """The value if it is short and plain, else its type."""
    if isinstance(value, (int, float, str, bool, type(None))) and len(repr(value)) <= 100:
        return repr(value)
    return f"a {_kind(value)}"


def _kind(value: object) -> str:
    return type(value).__name__
