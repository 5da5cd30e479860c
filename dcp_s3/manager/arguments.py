"""Checks the arguments of a `CheckpointManager`: what is wrong is a CheckpointError, or a SettingsError. Pure.

Messages name types rather than values: a state passed as the step would be printed whole.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner
from torch.distributed.checkpoint.stateful import Stateful

from dcp_s3 import errors
from dcp_s3.checkpoint.commit import check_metrics as check_storable
from dcp_s3.format.layout import is_attachment_name, step_by_patterns, step_of
from dcp_s3.retention.parse import parse_policy, policy_from_settings
from dcp_s3.retention.policy import PolicyFunction
from dcp_s3.retention.prune import check_grace
from dcp_s3.settings import Settings, compile_step_pattern


def check_step(step: object) -> int:
    """The step, which must be a whole number of 0 or more."""
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise errors.CheckpointError(f"step = {_show(step)}, expected a whole number of 0 or more")
    return step


def check_save(step: object, state: object) -> None:
    _check_order("manager.save(step, state)", step=step, state=state)
    check_step(step)
    _check_state(state)


def check_metrics(metrics: object) -> None:
    """Check metrics. One that cannot be stored is a SaveProtocolError."""
    if metrics is not None and not isinstance(metrics, Mapping):
        raise errors.CheckpointError(f"metrics is a {_kind(metrics)}, expected a dict like {{'val_loss': 0.5}}")
    check_storable(metrics or {})


def check_annotate(step: object, metrics: object) -> None:
    _check_order("manager.annotate(step, metrics)", step=step, metrics=metrics)
    check_step(step)
    check_metrics(metrics)


def check_restore(state: object, step: object, planner: object, best: object = None, metric: object = None) -> None:
    """Check the arguments of `CheckpointManager.restore`, except ``mode``."""
    _check_order("manager.restore(state, step)", state=state, step=step)
    _check_state(state)
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
    check_planner(planner, LoadPlanner)


def check_planner(planner: object, kind: type[LoadPlanner] | type[SavePlanner]) -> None:
    if planner is not None and not isinstance(planner, kind):
        raise errors.CheckpointError(f"planner is a {_kind(planner)}, expected a {kind.__name__} or None")


def _check_order(call: str, **given: object) -> None:
    (first, one), (second, other) = given.items()
    step, mapping = (one, other) if first == "step" else (other, one)
    if isinstance(step, Mapping) and not isinstance(mapping, Mapping):
        kinds = f"{first} is a {_kind(one)} and {second} a {_kind(other)}"
        raise errors.CheckpointError(f"{kinds}: the {first} comes first. Remedy: {call}")


def _check_state(state: object) -> None:
    if not isinstance(state, Mapping):
        expected = "a dict by name, like {'model': model, 'step': step}"
        raise errors.CheckpointError(f"state is a {_kind(state)}, expected {expected}")


def _show(value: object) -> str:
    """The value if it is short and plain, otherwise its type."""
    plain = isinstance(value, (int, float, str, bool, type(None))) and len(repr(value)) <= 100
    return repr(value) if plain else f"a {_kind(value)}"


def _kind(value: object) -> str:
    return type(value).__name__


def to_state_dict(state: Mapping[str, Any]) -> dict[str, Any]:
    """Replace each Stateful in the state by what its `state_dict` returns, as `dcp.save` does."""
    return {name: value.state_dict() if isinstance(value, Stateful) else value for name, value in state.items()}


def load_into(loaded: Mapping[str, Any], state: dict[str, Any]) -> None:
    """Give each Stateful in ``state`` what was loaded for it, and put everything else in its place."""
    for name in sorted(loaded, key=str):  # the same order on all ranks: load_state_dict may use collectives
        if isinstance(state[name], Stateful):
            state[name].load_state_dict(loaded[name])
        else:
            state[name] = loaded[name]


StepFormat = str | Callable[[int], str]
"""A name with ``{step}`` in it, or a function of the step."""
DEFAULT_FORMAT = "step-{step:08d}"
_SAMPLES = (12, 0, 1, 2, 9, 100, 999, 12345, 10**6, 99_999_999, 10**8, 2**40 + 1)


def check_coordination(coordination: object, process_group: object) -> None:
    if coordination not in ("collectives", "s3"):
        raise errors.CheckpointError(f"coordination = {_show(coordination)}, expected 'collectives' or 's3'")
    if coordination == "s3" and process_group is not None:
        why = "a CheckpointManager with coordination='s3' uses no process group, and all ranks of the job save"
        raise errors.CheckpointError(f"{why}. Remedy: leave process_group out")


def check_separate(separate: object) -> None:
    if isinstance(separate, str):
        raise errors.SettingsError(f"separate is text, expected a list of FQN prefixes. Remedy: [{_show(separate)}]")


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


def step_name(step: int, step_format: StepFormat = DEFAULT_FORMAT) -> str:
    """The name of a step's checkpoint, for example ``step-00001000``."""
    return step_format.format(step=step) if isinstance(step_format, str) else step_format(step)


def check_settings(settings: Settings, prunes: bool, step_format: Any = DEFAULT_FORMAT) -> Settings:
    """Refuse (SettingsError) settings that would make every retention run fail, and names below the root in which the
    step is not found. Returns the settings by which it is: with the ``step_pattern`` of the format if need be."""
    if prunes:
        check_grace(settings.retention_grace, force=False)
    if not isinstance(step_format, str) and not callable(step_format):
        raise errors.SettingsError(
            f"step_format is a {_kind(step_format)}, expected text like 'step-{{step:08d}}', or a function of the step"
        )
    what = f"step_format = {step_format!r}" if isinstance(step_format, str) else "step_format, a function,"
    names = {step: _checked_name(step, step_format, what) for step in _SAMPLES}
    lost = _lost(names, settings.step_pattern)
    if lost is None:
        return settings
    if settings.step_pattern is not None:
        raise errors.SettingsError(
            f"DCP_S3_STEP_PATTERN = {settings.step_pattern!r} does not find the step in the names that "
            f"CheckpointManager gives, like {names[lost]}. Remedy: unset it, or make it match these too"
        )
    before, _, after = names[_SAMPLES[-1]].partition(str(_SAMPLES[-1]))
    pattern = rf"^{re.escape(before.rstrip('0'))}(\d+){re.escape(after)}$"
    if _lost(names, pattern) is None:
        return settings.model_copy(update={"step_pattern": pattern})
    found = step_of(names[lost])
    raise errors.SettingsError(
        f"{what} names step {lost} {names[lost]!r}, in which {'no step' if found is None else f'step {found}'} is "
        "found. Remedy: the step in decimal digits after the word, like 'step-{step:08d}'; or set DCP_S3_STEP_PATTERN "
        "so that it finds the step"
    )


def _lost(names: dict[int, str], pattern: str | None) -> int | None:
    """The first step that is not found in its name."""
    patterns = None if pattern is None else [compile_step_pattern(pattern)]
    for step, name in names.items():
        if (step_of(name) if patterns is None else step_by_patterns(name, patterns)) != step:
            return step
    return None


def _checked_name(step: int, step_format: StepFormat, what: str) -> str:
    try:
        name = step_name(step, step_format)
    except Exception as error:
        raise errors.SettingsError(
            f"{what} cannot name step {step} ({type(error).__name__}: {error}). Remedy: a name with {{step}} in it, "
            "like 'step-{step:08d}'"
        ) from error
    if not isinstance(name, str) or "/" in name or not is_attachment_name(name):
        raise errors.SettingsError(
            f"{what} names step {step} {name!r}, which cannot be the name of a checkpoint. Remedy: a name without "
            "slashes of at most 90 bytes, like 'step-{step:08d}'"
        )
    return name
