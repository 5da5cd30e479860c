"""What happens in this process, as it happens: `subscribe` to it, for logs, monitoring and alerts.

    >>> from dcp_s3 import events
    >>> subscription = events.subscribe(lambda event: print(event))
    >>> subscription.close()

``on_event=`` of a writer, reader, stager or `CheckpointManager` gets only their own events. A subscriber is called in
the thread in which the thing happens, and should return soon. What it raises is logged, once for each subscriber, and
never fails a save or load. In an asynchronous save by ``AsyncCheckpointerType.PROCESS`` the other process does the
work: subscribe there. `dcp_s3.stats` has the sums.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from dcp_s3.process import reset_in_child
from dcp_s3.units import format_seconds, format_size, plural

logger = logging.getLogger(__name__)

__all__ = [
    "Committed", "Drained", "Event", "Listener", "LoadFailed", "LoadStarted", "Loaded", "PruneFailed", "Pruned",
    "SaveFailed", "SaveStarted", "Spilled", "Staged", "Subscription", "Throttled", "Written", "subscribe",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Event:
    """Base of all events."""

    time: float = field(default_factory=time.time)
    """Seconds since the epoch."""


@dataclass(frozen=True, kw_only=True)
class _OfRank(Event):
    url: str
    """URL of the checkpoint."""
    step: int | None
    """Number in its name; None if there is none."""
    rank: int


@dataclass(frozen=True, kw_only=True)
class SaveStarted(_OfRank):
    """A save began on this rank. Its staging, if any, is over."""


@dataclass(frozen=True, kw_only=True)
class Staged(Event):
    """A stager made a copy of the state."""

    bytes: int
    disk_bytes: int
    """Bytes of it that went to files, because of ``DCP_S3_STAGING_LIMIT``."""
    seconds: float
    """Seconds that the copy took."""
    stall_seconds: float
    """Seconds for which the training waited in `stage`."""


@dataclass(frozen=True, kw_only=True)
class Written(_OfRank):
    """This rank's part of a save is complete: on S3, or in its spill directory."""

    bytes: int
    """Bytes of this rank's objects."""
    objects: int
    spilled_bytes: int
    """Bytes of them that went to the spill directory."""
    copied_bytes: int = 0
    """Bytes of them that S3 copied from the save before, with ``incremental``."""
    seconds: float
    """Seconds since it began to write."""


@dataclass(frozen=True, kw_only=True)
class Committed(Event):
    """This process committed a checkpoint: it is whole, and `latest` finds it. One event for each save of a job;
    without collectives one on each rank. The drain commits spilled saves; only `subscribe` gets its events."""

    url: str
    step: int | None
    bytes: int
    """Bytes of all ranks' objects."""
    objects: int
    ranks: int
    seconds: float
    """Seconds from the beginning of the save (after staging) to the commit."""
    stall_seconds: float | None
    """Seconds for which this rank's training waited: all of it for `dcp.save`, the staging for `dcp.async_save`.
    None if something other than dcp_s3 staged, or if this was a spilled save."""
    throttled: int
    """Requests of all ranks that S3 throttled meanwhile."""
    spilled_bytes: int | None
    """Bytes of all ranks that went to a spill directory first. None, not known, if the commit itself waited there."""
    copied_bytes: int | None = 0
    """Bytes of all ranks that S3 copied from the save before, with ``incremental``. None: not known."""

    def __str__(self) -> str:
        """One line: ``step 1000 committed: 840.0 GiB, 512 ranks, stall 0.14 s, upload 47 s (17.9 GiB/s), ...``."""
        stall = "" if self.stall_seconds is None else f"stall {format_seconds(self.stall_seconds)}, "
        if self.spilled_bytes is None:
            how = f"{format_seconds(self.seconds)} after it began, from the spill directory"
        else:
            how = (
                f"{stall}upload {format_seconds(self.seconds)} ({_rate(self.bytes, self.seconds)}), "
                f"{self.throttled} throttled, {format_size(self.spilled_bytes)} spilled"
            )
            how += f", {format_size(self.copied_bytes)} copied" if self.copied_bytes else ""
        return f"{_name(self)} committed: {format_size(self.bytes)}, {plural(self.ranks, 'rank')}, {how} ({self.url})"


@dataclass(frozen=True, kw_only=True)
class SaveFailed(Event):
    """A save failed on this rank. The first rank also gets it if an asynchronous save failed on another rank."""

    url: str | None
    """URL of the checkpoint, if it is known."""
    step: int | None
    error: BaseException
    """What was, or will be, raised: an error of `dcp_s3.errors`, or torch's CheckpointException."""


@dataclass(frozen=True, kw_only=True)
class Spilled(Event):
    """An object of a save went to the spill directory."""

    url: str
    path: str
    """Path of the object, relative to the checkpoint."""
    bytes: int
    local: bool
    """Whether that was asked for (``DCP_S3_DURABILITY=local``). Otherwise S3 did not take it."""
    reason: str


@dataclass(frozen=True, kw_only=True)
class Drained(Event):
    """What one save had spilled on one rank was uploaded."""

    url: str
    bytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class LoadStarted(_OfRank):
    """A load began on this rank."""


@dataclass(frozen=True, kw_only=True)
class Loaded(_OfRank):
    """A load ended well on this rank."""

    ranks: int
    """Ranks that load together."""
    bytes: int
    """Bytes that this rank fetched; what other ranks sent it is not among them."""
    disk_bytes: int
    """Bytes of them that came from this host's spill directory instead of S3."""
    seconds: float
    """Seconds since it began to read the metadata."""
    hedged: int
    """GETs that straggled and were raced by a second one."""
    throttled: int
    """Requests that S3 throttled meanwhile."""

    def __str__(self) -> str:
        """One line: ``step 1000 loaded: 1.6 GiB on rank 0 of 512 in 2.1 s (780 MiB/s), 3 hedged, 0 throttled``."""
        where = f" on rank {self.rank} of {self.ranks}" if self.ranks > 1 else ""
        disk = f", {format_size(self.disk_bytes)} of it from this host's spill directory" if self.disk_bytes else ""
        return (
            f"{_name(self)} loaded: {format_size(self.bytes)}{where} in {format_seconds(self.seconds)} "
            f"({_rate(self.bytes, self.seconds)}){disk}, {self.hedged} hedged, {self.throttled} throttled ({self.url})"
        )


@dataclass(frozen=True, kw_only=True)
class LoadFailed(Event):
    """A load failed on this rank."""

    url: str | None
    step: int | None
    rank: int
    error: BaseException
    """What was, or will be, raised."""


@dataclass(frozen=True, kw_only=True)
class Throttled(Event):
    """S3 throttled, and fewer data requests go to the bucket from now on."""

    bucket: str
    """``{endpoint}/{bucket}``."""
    limit: int
    """Data requests that may be in flight now."""
    decreases: int
    """Times that the limit fell, since the process began."""


@dataclass(frozen=True, kw_only=True)
class Pruned(Event):
    """A prune ended."""

    root: str
    deleted: int
    """Checkpoints that were deleted."""
    freed_bytes: int
    seconds: float
    ok: bool
    """Whether everything was deleted that should have been."""


@dataclass(frozen=True, kw_only=True)
class PruneFailed(Event):
    """A prune raised, or was stopped. The next one finishes what it had begun."""

    root: str
    error: BaseException


Listener = Callable[[Event], object]


Subscription = contextlib.ExitStack
"""Ends with `close`, or at the end of a ``with`` block."""

_listeners: dict[Subscription, Listener] = {}
_complained: set[int] = set()  # ids of the listeners that have raised


def subscribe(listener: Listener) -> Subscription:
    """Call ``listener`` with every `Event` of this process, from now on, until `close` of what is returned."""
    subscription = Subscription()
    _listeners[subscription] = listener
    subscription.callback(_listeners.pop, subscription)
    return subscription


def emit(event: Event, listener: Listener | None = None) -> None:
    """Count an event, and tell ``listener`` and all subscribers. Raises nothing."""
    global _totals
    if type(event) in _SUMS:
        group, new = _SUMS[type(event)](event)
        with _lock:
            totals = getattr(_totals, group)
            new = {name: each if name in _LATEST else getattr(totals, name) + each for name, each in new.items()}
            _totals = replace(_totals, **{group: replace(totals, **new)})
    for each in [*([] if listener is None else [listener]), *_listeners.values()]:
        try:
            each(event)
        except Exception:
            if id(each) not in _complained:
                _complained.add(id(each))
                logger.exception("a subscriber to events failed; it is called again for later ones: %r", each)


def _name(event: Committed | Loaded) -> str:
    return event.url if event.step is None else f"step {event.step}"


def _rate(size: int, seconds: float) -> str:
    return f"{format_size(size / seconds)}/s" if seconds > 0 else "at once"


# --- sums -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SaveTotals:
    """Saves of this process, since it began."""

    done: int = 0
    """Saves of which this rank's part is written."""
    failed: int = 0
    """Saves that failed on this rank, or on another one as far as this rank was told."""
    committed: int = 0
    """Commits that this process made: as the coordinator, or of its spilled saves."""
    bytes: int = 0
    """Bytes that this rank wrote, to S3 or to its spill directory."""
    seconds: float = 0.0
    """Seconds in which it wrote them."""
    stall_seconds: float = 0.0
    """Seconds for which stagers held the training up."""
    last_step: int | None = None
    """Step of the last commit that this process knows of; None before the first, or if it has no number."""
    last_commit: float = 0.0
    """Seconds since the epoch of that commit; 0 before the first."""


@dataclass(frozen=True)
class LoadTotals:
    """Loads of this process, since it began."""

    done: int = 0
    """Loads that ended well."""
    failed: int = 0
    """Loads that failed on this rank."""
    bytes: int = 0
    """Bytes that this rank fetched for them, from S3 or its spill directory."""
    seconds: float = 0.0


@dataclass(frozen=True)
class SpillTotals:
    """The spill tier of this process, since it began."""

    bytes: int = 0
    """Bytes that went to the spill directory."""
    refused_bytes: int = 0
    """Those of them that went there because S3 did not take them, not because of ``DCP_S3_DURABILITY=local``."""
    drained_bytes: int = 0
    """Bytes that this process uploaded from there."""


@dataclass(frozen=True)
class PruneTotals:
    """Prunes of this process, since it began."""

    runs: int = 0
    """Prunes that ended, well or not."""
    failed: int = 0
    """Prunes that raised, were stopped, or could not delete everything that they should."""
    deleted: int = 0
    """Checkpoints that were deleted."""
    freed_bytes: int = 0
    last_success: float = 0.0
    """Seconds since the epoch when a prune last succeeded; 0 before the first."""


@dataclass(frozen=True)
class Stats:
    """What this process has done since it began: for monitoring.

    >>> sorted(stats().to_dict())
    ['connections', 'hedges', 'loads', 'prunes', 'saves', 'spill', 'throttle']
    """

    saves: SaveTotals = SaveTotals()
    loads: LoadTotals = LoadTotals()
    spill: SpillTotals = SpillTotals()
    prunes: PruneTotals = PruneTotals()
    throttle: dict[str, Any] = field(default_factory=dict)
    """By ``{endpoint}/{bucket}``: ``throttled`` requests, the ``limit`` of those in flight that follows, and so on."""
    hedges: dict[str, Any] = field(default_factory=dict)
    """By ``{endpoint}/{bucket}`` the second GETs of ranges whose first GET straggled: ``started``, ``won`` and
    ``wasted`` bytes."""
    connections: dict[str, dict[str, float]] = field(default_factory=dict)
    """By ``{endpoint}/{bucket} {direction}`` (``upload``, ``download``): ``connections`` that a transfer begins with,
    as found by earlier ones, and ``bytes_per_second`` when that was last measured."""

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts of numbers, for JSON."""
        return asdict(self)


def stats() -> Stats:
    """What this process has done since it began.

    >>> with CheckpointManager("s3://bucket/run") as manager:
    ...     saved = manager.save(3000, state)
    >>> stats().saves.last_step
    3000
    """
    states: dict[str, Any] = {name: read() for name, read in _states.items()}
    return replace(_totals, **states)


def shown_by_stats(**states: Callable[[], Mapping[str, Any]]) -> None:
    """Have `stats` show what modules that stand above this one count themselves: functions by field of `Stats`."""
    _states.update(states)


# What an event adds to its group of `Stats`, by field; for those of _LATEST, what they are from now on.
_SUMS: dict[type[Event], Callable[[Any], tuple[str, dict[str, Any]]]] = {
    Staged: lambda event: ("saves", {"stall_seconds": event.stall_seconds}),
    Written: lambda event: ("saves", {"done": 1, "bytes": event.bytes, "seconds": event.seconds}),
    Committed: lambda event: ("saves", {"committed": 1, "last_step": event.step, "last_commit": event.time}),
    SaveFailed: lambda _: ("saves", {"failed": 1}),
    Loaded: lambda event: ("loads", {"done": 1, "bytes": event.bytes, "seconds": event.seconds}),
    LoadFailed: lambda _: ("loads", {"failed": 1}),
    Spilled: lambda event: ("spill", {"bytes": event.bytes, "refused_bytes": 0 if event.local else event.bytes}),
    Drained: lambda event: ("spill", {"drained_bytes": event.bytes}),
    Pruned: lambda event: (
        "prunes",
        {"runs": 1, "failed": not event.ok, "deleted": event.deleted, "freed_bytes": event.freed_bytes}
        | ({"last_success": event.time} if event.ok else {}),
    ),
    PruneFailed: lambda _: ("prunes", {"runs": 1, "failed": 1}),
}
_LATEST = ("last_step", "last_commit", "last_success")

_states: dict[str, Callable[[], Mapping[str, Any]]] = {}
_totals = Stats()
_lock = threading.Lock()


@reset_in_child
def _begin_anew() -> None:
    global _totals, _lock
    _totals, _lock = Stats(), threading.Lock()
