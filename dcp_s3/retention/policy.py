"""Policies: which checkpoints of a run to keep. Pure.

What no policy keeps may be deleted; `plan` lists what is kept regardless. Each policy is idempotent: applied to what it
kept, it keeps all of it. So a second prune right after is a no-op.
"""

from __future__ import annotations

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any, ClassVar, Literal

from dcp_s3.checkpoint.info import CheckpointInfo, age_order
from dcp_s3.errors import SettingsError
from dcp_s3.settings import Settings
from dcp_s3.units import parse_duration

Reasons = Mapping[str, Sequence[str]]
"""Reasons (a list of texts) to keep checkpoints, by name. Names that are left out are not kept."""
PolicyFunction = Callable[[Sequence[CheckpointInfo], float], Reasons]
"""A policy: any function of (checkpoints, now). It gets the committed checkpoints, oldest first (`age_order`), and the
seconds since the epoch on the clock of S3."""
Mode = Literal["min", "max"]


class Policy(ABC):
    """Base of the policies here. `|` makes one that keeps what either keeps; `parse_policy` reads its ``str()``.

    >>> str(KeepLatest(3) | KeepBest(2, "val_loss", "min"))
    'latest:3 best:2:val_loss:min'
    """

    @abstractmethod
    def __call__(self, checkpoints: Sequence[CheckpointInfo], now: float, /) -> Reasons:
        """Reasons to keep checkpoints, by name."""

    def __or__(self, other: PolicyFunction) -> AnyOf:
        parts = (part.policies if isinstance(part, AnyOf) else (part,) for part in (self, other))
        return AnyOf(tuple(each for part in parts for each in part))


@dataclass(frozen=True)
class AnyOf(Policy):
    """Keeps what any of several policies keeps, with the reasons of all of them."""

    policies: tuple[PolicyFunction, ...]

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.policies))

    def __call__(self, checkpoints: Sequence[CheckpointInfo], now: float, /) -> Reasons:
        reasons: dict[str, list[str]] = {}
        for policy in self.policies:
            for name, found in run_policy(policy, checkpoints, now).items():
                reasons.setdefault(name, []).extend(found)
        return reasons

    def __str__(self) -> str:
        return " ".join(policy_name(policy) for policy in self.policies)


class _Counted(Policy):
    """A policy whose first field is a whole number above 0. Its text is its word and that number."""

    word: ClassVar[str]

    def __post_init__(self) -> None:
        name, value = next(iter(vars(self).items()))
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise SettingsError(f"{type(self).__name__}: {name} = {value!r}, expected a whole number of 1 or more")

    def __str__(self) -> str:
        return f"{self.word}:{next(iter(vars(self).values()))}"


@dataclass(frozen=True)
class KeepLatest(_Counted):
    """Keeps the ``k`` newest: by highest step, then latest time, then last name. ``k`` is 1 or more (SettingsError).

    >>> [info.step for info in CheckpointCatalog("s3://bucket/run").scan().plan(KeepLatest(1), grace=86400).kept]
    [2000]
    """

    k: int
    word: ClassVar[str] = "latest"

    def __call__(self, checkpoints: Sequence[CheckpointInfo], now: float, /) -> Reasons:
        newest = checkpoints[: -self.k - 1 : -1]
        return {info.name: [f"{self}, number {number}"] for number, info in enumerate(newest, 1)}


@dataclass(frozen=True)
class KeepBest(_Counted):
    """Keeps the ``k`` with the lowest (``min``) or highest (``max``) value of a metric; the newest of equal values.

    A value that is not a finite number (NaN, infinity, text) counts as missing.

    >>> sorted(KeepBest(1, "val_loss", "min")(list_checkpoints("s3://bucket/run"), time.time()))
    ['step-00001000']

    Raises:
        SettingsError: an argument is invalid.
    """

    k: int
    metric: str
    mode: Mode
    missing: Literal["keep", "drop"] = "keep"
    """Whether those without a value are kept in addition: the metric may come later (`annotate`)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.metric, str) or not self.metric or any(letter.isspace() for letter in self.metric):
            raise SettingsError(f"KeepBest: metric = {self.metric!r}, expected the name of a metric, without spaces")
        best_first((), self.metric, self.mode)  # checks the mode
        if self.missing not in ("keep", "drop"):
            raise SettingsError(f"KeepBest: missing = {self.missing!r}, expected 'keep' or 'drop'")

    def __call__(self, checkpoints: Sequence[CheckpointInfo], now: float, /) -> Reasons:
        ranked = best_first(checkpoints, self.metric, self.mode)
        reasons = {info.name: [f"{self}, {self.metric} = {info.metrics[self.metric]:g}"] for info in ranked[: self.k]}
        if self.missing == "keep":
            having = {info.name for info in ranked}
            reasons |= {info.name: [f"{self}, has no {self.metric}"] for info in checkpoints if info.name not in having}
        return reasons

    def __str__(self) -> str:
        return f"best:{self.k}:{self.metric}:{self.mode}" + (":drop" if self.missing == "drop" else "")


@dataclass(frozen=True)
class KeepEvery(_Counted):
    """Keeps, for each multiple of ``steps`` (1 or more), the first checkpoint at or after it and before the next; and
    step 0. Checkpoints of the same step are kept together.

    >>> sorted(KeepEvery(2000)(list_checkpoints("s3://bucket/run"), time.time()))
    ['step-00002000']
    """

    steps: int
    word: ClassVar[str] = "every"

    def __call__(self, checkpoints: Sequence[CheckpointInfo], now: float, /) -> Reasons:
        first: dict[int, int] = {}
        for info in checkpoints:
            if info.step is not None:
                number = info.step // self.steps
                first[number] = min(info.step, first.get(number, info.step))
        kept = {step for number, step in first.items() if number or step == 0}
        return {
            info.name: [f"{self}, first from {info.step // self.steps * self.steps} on"]
            for info in checkpoints
            if info.step is not None and info.step in kept
        }


@dataclass(frozen=True)
class KeepWithin(Policy):
    """Keeps the checkpoints not older than ``duration``: seconds, a timedelta, or text like ``48h`` (SettingsError).

    The later of two times counts: of the commit, by the saving job's clock, and of ``.metadata``, by the clock of S3.
    Unknown times do not count as old.

    >>> sorted(KeepWithin("48h")(list_checkpoints("s3://bucket/run"), time.time()))
    ['step-00001000', 'step-00002000']
    """

    duration: float | str | timedelta

    def __post_init__(self) -> None:
        given, seconds = self.duration, -1.0
        with contextlib.suppress(ValueError):
            seconds = given.total_seconds() if isinstance(given, timedelta) else parse_duration(given)
        if not 0 <= seconds < math.inf:
            raise SettingsError(f"KeepWithin: duration = {given!r}, expected seconds, a timedelta, or text like 48h")
        object.__setattr__(self, "duration", seconds)

    def __call__(self, checkpoints: Sequence[CheckpointInfo], now: float, /) -> Reasons:
        oldest, reasons = now - float(self.duration), {}  # type: ignore[arg-type]
        for info in checkpoints:
            times = [time for time in (info.created_at, info.modified_at) if time is not None and not math.isnan(time)]
            if max(times, default=math.inf) >= oldest:
                reasons[info.name] = [str(self)]
        return reasons

    def __str__(self) -> str:
        seconds = float(self.duration)  # type: ignore[arg-type]
        for unit, length in (("h", 3600), ("m", 60)):
            if seconds and seconds % length == 0:
                return f"within:{seconds / length:.0f}{unit}"
        return f"within:{f'{seconds:f}'.rstrip('0').rstrip('.')}s"


@dataclass(frozen=True)
class KeepDaily(_Counted):
    """Keeps the newest checkpoint, by time of commit, of each of the last ``n`` (1 or more) days in UTC that have any.
    A time in the future counts as now. Checkpoints whose time is not known are kept.

    >>> prune("s3://bucket/run", KeepLatest(3) | KeepDaily(7)).deleted
    ()
    """

    n: int
    word: ClassVar[str] = "daily"

    def __call__(self, checkpoints: Sequence[CheckpointInfo], now: float, /) -> Reasons:
        newest: dict[str, CheckpointInfo] = {}
        reasons: dict[str, list[str]] = {}
        dated: list[tuple[float, CheckpointInfo]] = []
        for info in checkpoints:
            time = info.modified_at if info.created_at is None else info.created_at
            if time is None or not math.isfinite(time):
                reasons[info.name] = [f"{self}, its time is not known"]
            else:
                dated.append((time, info))
        for time, info in sorted(dated, key=lambda pair: pair[0]):  # stable: of one time by age
            newest[datetime.fromtimestamp(max(0.0, min(time, now)), timezone.utc).strftime("%Y-%m-%d")] = info
        for day in sorted(newest, reverse=True)[: self.n]:
            reasons[newest[day].name] = [f"{self}, last of {day}"]
        return reasons


# --- running -------------------------------------------------------------------------------------


def run_policy(policy: PolicyFunction, checkpoints: Sequence[CheckpointInfo], now: float) -> dict[str, list[str]]:
    """Run ``policy``. A SettingsError if it fails or answers nonsense, so that nothing is deleted."""
    if not callable(policy):
        raise SettingsError(
            f"{policy!r} is not a policy: expected a function of (checkpoints, now). Remedy: see Policy"
        )
    try:
        found: Any = policy(checkpoints, now)
    except SettingsError:
        raise
    except Exception as error:
        raise SettingsError(f"the policy {policy_name(policy)} failed, nothing is deleted: {error!r}") from error
    names = {info.name for info in checkpoints}
    if not (
        isinstance(found, Mapping)
        and found.keys() <= names
        and all(isinstance(texts, (list, tuple)) for texts in found.values())
        and all(isinstance(text, str) for texts in found.values() for text in texts)
    ):
        raise SettingsError(
            f"the policy {policy_name(policy)} returned nonsense, nothing is deleted: expected a mapping of names of "
            f"checkpoints to lists of reasons, found {found!r:.200}"
        )
    return {name: [*texts] or [policy_name(policy)] for name, texts in found.items()}


def policy_name(policy: PolicyFunction) -> str:
    """Name of a policy in messages: its line of text, or the name of the function."""
    return str(policy) if isinstance(policy, Policy) else str(getattr(policy, "__name__", repr(policy)))


def best_first(checkpoints: Sequence[CheckpointInfo], metric: str, mode: Mode) -> list[CheckpointInfo]:
    """The checkpoints whose metric is a finite number, best value first; the newest first among equal values."""
    if mode not in ("min", "max"):
        raise SettingsError(f"mode = {mode!r}, expected 'min' or 'max': whether low or high values are better")
    found: list[tuple[float, CheckpointInfo]] = []
    for info in sorted(checkpoints, key=age_order, reverse=True):
        value = info.metrics.get(metric)
        with contextlib.suppress(OverflowError):  # an int beyond the floats
            if isinstance(value, (int, float)) and math.isfinite(value):
                found.append((float(value) if mode == "min" else -float(value), info))
    return [info for _, info in sorted(found, key=lambda pair: pair[0])]


# --- policies in one line: latest:3 best:2:val_loss:min every:10000 within:48h daily:7 --------------------


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise ValueError
    return int(text)


def _best(text: str) -> KeepBest:
    missing: Any = "drop" if text.endswith(":drop") else "keep"
    count, _, rest = text.removesuffix(":drop").partition(":")
    metric, _, mode = rest.rpartition(":")
    return KeepBest(_count(count), metric, mode, missing)  # type: ignore[arg-type]  # checked there


def _within(text: str) -> KeepWithin:
    if text[-1:].isdigit() or text.endswith("."):
        raise SettingsError("without a unit nobody knows whether seconds or hours are meant")
    return KeepWithin(text)


# How each word is written, and what reads the text after its first colon.
_WORDS: dict[str, tuple[str, Callable[[str], Policy]]] = {
    "latest": ("latest:K", lambda text: KeepLatest(_count(text))),
    "best": ("best:K:METRIC:min|max[:drop], for example best:2:val_loss:min", _best),
    "every": ("every:STEPS", lambda text: KeepEvery(_count(text))),
    "within": ("within:DURATION (for example 48h)", _within),
    "daily": ("daily:N", lambda text: KeepDaily(_count(text))),
}


def parse_policy(text: str) -> Policy | None:
    """The policy that keeps whatever any of the words keeps; None for empty text, which keeps all. The words are
    ``latest:K``, ``best:K:METRIC:min|max[:drop]``, ``every:STEPS``, ``within:DURATION``, ``daily:N``.

    >>> parse_policy("latest:3 best:2:val_loss:min every:10000")
    KeepLatest(k=3) | KeepBest(k=2, metric='val_loss', mode='min', missing='keep') | KeepEvery(steps=10000)

    Raises:
        SettingsError: a word is not a policy. The error names it and what is allowed.
    """
    policies: list[Policy] = []
    for word in text.split():
        kind, _, rest = word.partition(":")
        if kind not in _WORDS:
            raise SettingsError(
                f"{word!r} is not a policy. Remedy: one of {', '.join(form for form, _ in _WORDS.values())}"
            )
        form, read = _WORDS[kind]
        try:
            policies.append(read(rest))
        except (SettingsError, ValueError) as error:
            why = f" ({error})" if isinstance(error, SettingsError) else ""
            raise SettingsError(f"{word!r} is not a policy: expected {form}{why}") from None
    return policies[0] if len(policies) == 1 else AnyOf(tuple(policies)) if policies else None


def policy_from_settings(settings: Settings) -> Policy | None:
    """The policy of the setting ``retention``; None if it is unset."""
    try:
        return parse_policy(settings.retention or "")
    except SettingsError as error:
        raise SettingsError(f"DCP_S3_RETENTION = {settings.retention!r} is not allowed: {error}") from None
