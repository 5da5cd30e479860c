"""Checks the arguments of a `CheckpointManager`: what is wrong is a CheckpointError, or a SettingsError. Pure.

Messages name types rather than values: a state passed as the step would be printed whole.
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
from dcp_s3.format.control_files import check_extra
from dcp_s3.manager.deciding import check_save_policy
from dcp_s3.manager.names import DEFAULT_FORMAT, StepFormat, check_step_format
from dcp_s3.retention.parse import parse_policy, policy_from_settings
from dcp_s3.retention.policy import PolicyFunction
from dcp_s3.retention.prune import check_grace
from dcp_s3.settings import Settings, SettingsLike, resolve_settings
from dcp_s3.url import CheckpointURL, parse_url


def check_step(step: object) -> int:
    """The step, which must be a whole number of 0 or more."""
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise errors.CheckpointError(f"step = {_show(step)}, expected a whole number of 0 or more")
    return step


def check_save(step: object, state: object) -> None:
    """Check what is to be saved."""
    if isinstance(step, Mapping) and not isinstance(state, Mapping):
        raise errors.CheckpointError(
            f"step is a {_kind(step)} and state a {_kind(state)}: the step comes first. Remedy: "
            "manager.save(step, state)"
        )
    check_step(step)
    check_state(state)


def check_beside(metrics: object, planner: object, extra: object) -> None:
    """Check the other arguments of `CheckpointManager.save`. A metric that cannot be stored is a SaveProtocolError."""
    _check_metrics(metrics)
    check_extra(extra)  # type: ignore[arg-type]
    _check_planner(planner, SavePlanner)


def check_annotate(step: object, metrics: object) -> None:
    """Check the arguments of `CheckpointManager.annotate`. A metric that cannot be stored is a SaveProtocolError."""
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
                f"metric {_show(name)} is a {_kind(value)}, expected a number, text, a bool or None (for a tensor: "
                "tensor.item())"
            )
    check_metrics(metrics)


def check_restore(state: object, step: object, planner: object, best: object = None, metric: object = None) -> None:
    """Check the arguments of `CheckpointManager.restore`, except ``mode``."""
    if isinstance(step, Mapping) and not isinstance(state, Mapping):
        raise errors.CheckpointError(
            f"state is a {_kind(state)} and step a {_kind(step)}: the state comes first. Remedy: "
            "manager.restore(state, step)"
        )
    check_state(state)
    if step is not None and not (isinstance(step, str) and step in ("best", "latest")):
        check_step(step)
    if best is not None:
        if not isinstance(best, str) or not best:
            raise errors.CheckpointError(f"best = {_show(best)}, expected the name of a metric, like 'val_loss'")
        if step not in (None, "best") or metric not in (None, best):
            raise errors.CheckpointError(
                f"best = {best!r} says which checkpoint to restore, and so do step = {_show(step)} and metric = "
                f"{_show(metric)}. Remedy: manager.restore(state, best={best!r})"
            )
    _check_planner(planner, LoadPlanner)


def _check_planner(planner: object, kind: type) -> None:
    if planner is not None and not isinstance(planner, kind):
        raise errors.CheckpointError(f"planner is a {_kind(planner)}, expected a {kind.__name__} or None")


def check_state(state: object) -> None:
    """Check that a state is a dict, as for `dcp.save` and `dcp.load`."""
    if not isinstance(state, Mapping):
        raise errors.CheckpointError(
            f"state is a {_kind(state)}, expected a dict by name, like {{'model': model, 'step': step}}"
        )


def to_state_dict(state: Mapping[str, Any]) -> dict[str, Any]:
    """Replace each Stateful in the state by what its `state_dict` returns, as `dcp.save` does."""
    return {name: value.state_dict() if isinstance(value, Stateful) else value for name, value in state.items()}


def has_stateful(state: Mapping[str, Any]) -> bool:
    """Whether `to_state_dict` calls anything."""
    return any(isinstance(value, Stateful) for value in state.values())


def load_into(loaded: Mapping[str, Any], state: dict[str, Any]) -> None:
    """Give each Stateful in ``state`` what was loaded for it, and put everything else in its place."""
    for name in sorted(loaded, key=str):  # the same order on all ranks: load_state_dict may use collectives
        if isinstance(state[name], Stateful):
            state[name].load_state_dict(loaded[name])
        else:
            state[name] = loaded[name]


def check_coordination(coordination: object, process_group: object) -> None:
    """Check how the ranks of a manager come together."""
    if coordination not in ("collectives", "s3"):
        raise errors.CheckpointError(f"coordination = {_show(coordination)}, expected 'collectives' or 's3'")
    if coordination == "s3" and process_group is not None:
        raise errors.CheckpointError(
            "a CheckpointManager with coordination='s3' uses no process group, and all ranks of the job save. Remedy: "
            "leave process_group out"
        )


def read_only_error(what: str, root: CheckpointURL) -> errors.CheckpointError:
    """The error of a manager that only reads; ``what`` it was to do."""
    return errors.CheckpointError(
        f"{what}: the CheckpointManager of {root} was made with read_only=True. Remedy: make one without, for the root "
        "of this run",
        url=str(root),
    )


def closed_error(root: CheckpointURL) -> errors.CheckpointError:
    """The error of a manager that was closed."""
    return errors.CheckpointError(
        f"the CheckpointManager of {root} was closed. Remedy: close it after the last save, or make a new one",
        url=str(root),
    )


@dataclass(frozen=True)
class Configuration:
    """The checked arguments of a manager."""

    root: CheckpointURL
    """URL of the run."""
    settings: Settings
    """Settings of everything that the manager does."""
    retention: PolicyFunction | None
    """The retention policy. None: nothing is deleted."""
    step_format: StepFormat
    """How steps are named."""


def configure(
    root: str | os.PathLike[str],
    retention: PolicyFunction | str | None,
    settings: SettingsLike,
    separate: object,
    timeouts: Mapping[str, object],
    step_format: StepFormat = DEFAULT_FORMAT,
    should_save: object = None,
) -> Configuration:
    """Check the arguments of a manager. A root that is no URL is an InvalidURLError."""
    if not isinstance(root, (str, os.PathLike)):
        raise errors.InvalidURLError(f"root is a {_kind(root)}, expected text like 's3://bucket/run'")
    if isinstance(separate, str):
        raise errors.SettingsError(f"separate is text, expected a list of FQN prefixes. Remedy: [{_show(separate)}]")
    for name, seconds in timeouts.items():
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds >= 0:
            raise errors.SettingsError(f"{name} = {_show(seconds)}, expected seconds, 0 or more")
    resolved = resolve_settings(settings)
    policy = resolve_policy(retention, resolved)
    check_save_policy(should_save)
    resolved = check_settings(resolved, prunes=policy is not None, step_format=step_format)
    return Configuration(parse_url(root), resolved, policy, step_format)


def resolve_policy(retention: PolicyFunction | str | None, settings: Settings) -> PolicyFunction | None:
    """The given policy (an object or text), or else the policy in the settings. None: nothing is deleted."""
    if retention is None:
        return policy_from_settings(settings)
    if isinstance(retention, str):
        return parse_policy(retention)
    if not callable(retention):
        raise errors.SettingsError(
            f"retention = {_show(retention)}, expected a policy, for example KeepLatest(3), or text like 'latest:3'"
        )
    return retention


def check_settings(settings: Settings, *, prunes: bool, step_format: StepFormat = DEFAULT_FORMAT) -> Settings:
    """Refuse settings that would make every retention run fail, or hide every checkpoint of the manager. Returns those
    that find the steps (`check_step_format`)."""
    if prunes:
        check_grace(settings.retention_grace, force=False)
    return check_step_format(step_format, settings)


def _show(value: object) -> str:
    """The value if it is short and plain, otherwise its type."""
    if isinstance(value, (int, float, str, bool, type(None))) and len(repr(value)) <= 100:
        return repr(value)
    return f"a {_kind(value)}"


def _kind(value: object) -> str:
    return type(value).__name__
