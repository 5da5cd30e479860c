"""Policies written in one line: ``latest:3 best:2:val_loss:min every:10000 within:48h daily:7``. Pure."""

from __future__ import annotations

from collections.abc import Callable

from dcp_s3.errors import SettingsError
from dcp_s3.retention.policy import (
    AnyOf,
    KeepBest,
    KeepDaily,
    KeepEvery,
    KeepLatest,
    KeepWithin,
    Policy,
)
from dcp_s3.settings import Settings


def parse_policy(text: str) -> Policy | None:
    """The policy that keeps whatever any of the words keeps; None for empty text, which keeps all.

    Words, in any order: ``latest:K``, ``best:K:METRIC:min|max[:drop]``, ``every:STEPS``, ``within:DURATION``,
    ``daily:N``.

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
    kind, _, rest = word.partition(":")
    usage, parse = _WORDS.get(kind, ("", None))
    if parse is None:
        allowed = ", ".join(each for each, _ in _WORDS.values())
        raise SettingsError(f"{word!r} is not a policy. Remedy: one of {allowed}")
    try:
        return parse(rest)
    except (SettingsError, ValueError) as error:
        why = f" ({error})" if isinstance(error, SettingsError) else ""
        raise SettingsError(f"{word!r} is not a policy: expected {usage}{why}") from None


def _number(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise ValueError
    return int(text)


def _parse_best(text: str) -> Policy:
    drop = text.endswith(":drop")
    count, _, rest = text.removesuffix(":drop").partition(":")
    metric, _, mode = rest.rpartition(":")
    return KeepBest(_number(count), metric, mode, "drop" if drop else "keep")  # type: ignore[arg-type]  # checked there


def _parse_within(text: str) -> Policy:
    if text[-1:].isdigit() or text.endswith("."):
        raise SettingsError("without a unit nobody knows whether seconds or hours are meant")
    return KeepWithin(text)


_WORDS: dict[str, tuple[str, Callable[[str], Policy]]] = {
    "latest": ("latest:K", lambda text: KeepLatest(_number(text))),
    "best": ("best:K:METRIC:min|max[:drop], for example best:2:val_loss:min", _parse_best),
    "every": ("every:STEPS", lambda text: KeepEvery(_number(text))),
    "within": ("within:DURATION (for example 48h)", _parse_within),
    "daily": ("daily:N", lambda text: KeepDaily(_number(text))),
}
