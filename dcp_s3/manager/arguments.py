"""Checks the arguments of a `CheckpointManager`: what is wrong is a CheckpointError, or a SettingsError. Pure.

Messages name types rather than values: a state passed as the step would be printed whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.distributed.checkpoint.stateful import Stateful

from dcp_s3 import errors
from dcp_s3.checkpoint.commit import check_metrics as check_storable
from dcp_s3.retention.policy import PolicyFunction, parse_policy, policy_from_settings
from dcp_s3.settings import Settings


def check_step(step: object) -> int:
    """The step, which must be a whole number of 0 or more."""
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise errors.CheckpointError(
            f"step = {_show(step)}, expected a whole number of 0 or more. Remedy: manager.save(step, state), "
            "manager.restore(state, step), manager.annotate(step, metrics)"
        )
    return step


def check_state(state: object) -> None:
    check_type("state", state, Mapping, "a dict by name, like {'model': model, 'step': step}")


def check_metrics(metrics: Any) -> None:
    """Check metrics. One that cannot be stored is a SaveProtocolError."""
    check_type("metrics", {} if metrics is None else metrics, Mapping, "a dict like {'val_loss': 0.5}")
    check_storable(metrics or {})


def check_type(name: str, value: object, kind: type | tuple[type, ...], expected: str) -> None:
    if not isinstance(value, kind):
        raise errors.CheckpointError(f"{name} is a {type(value).__name__}, expected {expected}")


def _show(value: object) -> str:
    """The value if it is short and plain, otherwise its type."""
    plain = isinstance(value, (int, float, str, bool, type(None))) and len(repr(value)) <= 100
    return repr(value) if plain else f"a {type(value).__name__}"


def to_state_dict(state: Mapping[str, Any]) -> dict[str, Any]:
    """Replace each Stateful in the state by what its `state_dict` returns, as `dcp.save` does."""
    return {name: value.state_dict() if isinstance(value, Stateful) else value for name, value in state.items()}


def resolve_policy(retention: PolicyFunction | str | None, settings: Settings) -> PolicyFunction | None:
    """None: nothing is deleted."""
    if retention is None:
        return policy_from_settings(settings)
    if isinstance(retention, str):
        return parse_policy(retention)
    if not callable(retention):
        raise errors.SettingsError(
            f"retention = {_show(retention)}, expected a policy, for example KeepLatest(3), or text like 'latest:3'"
        )
    return retention
