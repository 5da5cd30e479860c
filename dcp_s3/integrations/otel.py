"""Saves, loads, spills and prunes as OpenTelemetry spans and metrics (``opentelemetry-api``).

    from dcp_s3.integrations import otel

    otel.instrument()  # once, in each process; goes to the providers that the process has set up

Spans, made when what they are about has ended: ``dcp_s3.stage``, ``dcp_s3.write`` (this rank's part of a save),
``dcp_s3.save`` (up to the commit, on the rank that commits), ``dcp_s3.load``, ``dcp_s3.drain`` and ``dcp_s3.prune``. A
span of what failed has the status ERROR and the exception. Attributes are the event's fields.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from dcp_s3 import events
from dcp_s3.integrations import require
from dcp_s3.versions import __version__

require("otel", "opentelemetry-api", "1.25", "2")

from opentelemetry import metrics, trace  # noqa: E402 - what is missing was named
from opentelemetry.trace import Status, StatusCode  # noqa: E402

_SPANS: Mapping[type[events.Event], str] = {
    events.Staged: "stage",
    events.Written: "write",
    events.Committed: "save",
    events.SaveFailed: "save",
    events.Loaded: "load",
    events.LoadFailed: "load",
    events.Drained: "drain",
    events.Pruned: "prune",
    events.PruneFailed: "prune",
}
_COUNTED: Mapping[type[events.Event], tuple[str, dict[str, str]]] = {
    events.Written: ("saves", {"outcome": "done"}),
    events.SaveFailed: ("saves", {"outcome": "failed"}),
    events.Loaded: ("loads", {"outcome": "done"}),
    events.LoadFailed: ("loads", {"outcome": "failed"}),
    events.Throttled: ("throttled", {}),
}
_VALUES: Mapping[type[events.Event], Mapping[str, str]] = {
    events.Staged: {"stall.duration": "stall_seconds"},
    events.Written: {"save.bytes": "bytes"},
    events.Committed: {"commit.duration": "seconds", "last_step": "step"},
    events.Loaded: {"load.bytes": "bytes", "load.duration": "seconds"},
    events.Spilled: {"spill.bytes": "bytes"},
    events.Pruned: {"prune.bytes": "freed_bytes"},
}
"""Metrics of an event, and the field that each takes: durations are histograms, bytes are added up."""


def instrument(
    *, tracer_provider: trace.TracerProvider | None = None, meter_provider: metrics.MeterProvider | None = None
) -> events.Subscription:
    """Make spans and metrics of all events of this process from now on.

    Args:
        tracer_provider: makes the spans. None: the process's global one.
        meter_provider: makes the metrics. None: the process's global one.

    Returns:
        A subscription; its ``close()`` ends it.
    """
    tracer = trace.get_tracer("dcp_s3", __version__, tracer_provider=tracer_provider)
    return events.subscribe(_Telemetry(tracer, metrics.get_meter("dcp_s3", __version__, meter_provider=meter_provider)))


class _Telemetry:
    def __init__(self, tracer: trace.Tracer, meter: metrics.Meter) -> None:
        self._tracer = tracer
        self._counters = {name: meter.create_counter(f"dcp_s3.{name}") for name, _ in _COUNTED.values()}
        self._record: dict[str, Callable[[float], None]] = {}
        for name in (name for values in _VALUES.values() for name in values):
            if name.endswith(".duration"):
                self._record[name] = meter.create_histogram(f"dcp_s3.{name}", "s").record
            elif name.endswith(".bytes"):
                self._record[name] = meter.create_counter(f"dcp_s3.{name}", "By").add
            else:
                self._record[name] = meter.create_gauge(f"dcp_s3.{name}").set

    def __call__(self, event: events.Event) -> None:
        kind = type(event)
        if kind in _COUNTED:
            name, attributes = _COUNTED[kind]
            self._counters[name].add(1, attributes)
        for name, field in _VALUES.get(kind, {}).items():
            if (value := getattr(event, field)) is not None:
                self._record[name](value)
        if kind in _SPANS:
            self._span(event, f"dcp_s3.{_SPANS[kind]}")

    def _span(self, event: Any, name: str) -> None:
        """A span that ended with the event."""
        seconds, error = getattr(event, "seconds", 0.0), getattr(event, "error", None)
        values = {f"dcp_s3.{each.name}": getattr(event, each.name) for each in fields(event)}
        attributes = {key: value for key, value in values.items() if isinstance(value, (str, int, float))}
        end = int(event.time * 1e9)
        span = self._tracer.start_span(name, start_time=end - int(seconds * 1e9), attributes=attributes)
        if error is not None:
            span.record_exception(error, timestamp=end)
            span.set_status(Status(StatusCode.ERROR, f"{type(error).__name__}: {error}"))
        span.end(end)
