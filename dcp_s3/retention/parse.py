"""Policies written in one line: ``latest:3 best:2:val_loss:min every:10000 within:48h daily:7``. Pure."""

from __future__ import annotations

from collections.abc import Callable

from dcp_s3.errors import SettingsError
from dcp_s3.retention.policy import (
    AnyOf,
    KeepBest,
    KeepDaily,
    KeepEvery,
    KeepHourly,
    KeepLatest,
    KeepSteps,
    KeepWeekly,
    KeepWithin,
    Policy,
)
from dcp_s3.settings import Settings


def parse_policy(text: str) -> Policy | None:
    """The policy that keeps whatever any of the words keeps; None for empty text, which keeps all.

    Words, in any order: ``latest:K``, ``best:K:METRIC:min|max[:keep|drop]``, ``every:STEPS``, ``steps:S[,S...]``,
    ``within:DURATION``, ``hourly:N``, ``daily:N``, ``weekly:N``.

    >>> parse_policy("latest:3 best:2:val_loss:min every:10000")
    KeepLatest(k=3) | KeepBest(k=2, metric='val_loss', mode='min', missing='keep') | KeepEvery(steps=10000)

    Raises:
        SettingsError: a word is not a policy. The error names it and what is allowed.
    """
    policies = [_parse_word(word) for word in text.split()]
    return policies[0] if len(policies) == 1 else AnyOf(tuple(policies)) if policies else None


def policy_from_settings(settings: Settings) -> Policy | None:
    """The policy of the setting ``retention``; None if it is unset."""
    try:
        return parse_policy(settings.retention or "")
    except SettingsError as error:
        raise SettingsError(f"DCP_S3_RETENTION = {settings.retention!r} is not allowed: {error}") from None


def _parse_word(word: str) -> Policy:
    kind, colon, rest = word.partition(":")
    usage, parse = _WORDS.get(kind, ("", None))
    if parse is None:
        allowed = ", ".join(each for each, _ in _WORDS.values())
        raise SettingsError(f"{word!r} is not a policy. Remedy: one of {allowed}")
    try:
        if not colon:
            raise ValueError
        return parse(rest)
    except SettingsError as error:
        raise SettingsError(f"{word!r} is not a policy: expected {usage} ({error})") from None
    except ValueError:
        raise SettingsError(f"{word!r} is not a policy: expected {usage}") from None


def _number(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise ValueError
    return int(text)


def _parse_best(text: str) -> Policy:
    count, _, rest = text.partition(":")
    missing = "keep"
    if rest.endswith((":keep", ":drop")):
        rest, _, missing = rest.rpartition(":")
    metric, colon, mode = rest.rpartition(":")
    if not colon and rest not in ("", "min", "max"):
        raise SettingsError(f"min or max is missing, for example best:{count}:{rest}:min")
    if not metric:
        raise SettingsError(f"the metric is missing, for example best:{count}:val_loss:min")
    return KeepBest(_number(count), metric, mode, missing)  # type: ignore[arg-type]  # checked there


def _parse_within(text: str) -> Policy:
    if text[-1:].isdigit() or text.endswith("."):
        raise SettingsError("without a unit nobody knows whether seconds or hours are meant")
    return KeepWithin(text)


_WORDS: dict[str, tuple[str, Callable[[str], Policy]]] = {
    "latest": ("latest:K", lambda text: KeepLatest(_number(text))),
    "best": ("best:K:METRIC:min|max[:keep|drop]", _parse_best),
    "every": ("every:STEPS", lambda text: KeepEvery(_number(text))),
    "steps": ("steps:STEP[,STEP...]", lambda text: KeepSteps([_number(step) for step in text.split(",")])),
    "within": ("within:DURATION (for example 48h)", _parse_within),
    "hourly": ("hourly:N", lambda text: KeepHourly(_number(text))),
    "daily": ("daily:N", lambda text: KeepDaily(_number(text))),
    "weekly": ("weekly:N", lambda text: KeepWeekly(_number(text))),
}
