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

_EVENTS: Mapping[type[events.Event], tuple[str, str, Mapping[str, str]]] = {
    events.Staged: ("stage", "", {"stall.duration": "stall_seconds"}),
    events.Written: ("write", "saves", {"save.bytes": "bytes"}),
    events.Committed: ("save", "", {"commit.duration": "seconds", "last_step": "step"}),
    events.SaveFailed: ("save", "saves", {}),
    events.Loaded: ("load", "loads", {"load.bytes": "bytes", "load.duration": "seconds"}),
    events.LoadFailed: ("load", "loads", {}),
    events.Spilled: ("", "", {"spill.bytes": "bytes"}),
    events.Drained: ("drain", "", {}),
    events.Throttled: ("", "throttled", {}),
    events.Pruned: ("prune", "", {"prune.bytes": "freed_bytes"}),
    events.PruneFailed: ("prune", "", {}),
}
"""Of an event: name of its span, name of the metric that counts it, and other metrics with the field that each takes.
Durations are histograms, bytes are added up."""


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
        self._record: dict[str, Callable[..., None]] = {}
        for _, counted, values in _EVENTS.values():
            for name in (counted, *values):
                if name.endswith(".duration"):
                    self._record[name] = meter.create_histogram(f"dcp_s3.{name}", "s").record
                elif name == "last_step":
                    self._record[name] = meter.create_gauge(f"dcp_s3.{name}").set
                elif name:
                    unit = "By" if name.endswith(".bytes") else ""
                    self._record[name] = meter.create_counter(f"dcp_s3.{name}", unit).add

    def __call__(self, event: events.Event) -> None:
        span, counted, values = _EVENTS.get(type(event), ("", "", {}))
        if counted:
            self._record[counted](1, {"outcome": "failed" if hasattr(event, "error") else "done"})
        for name, field in values.items():
            if (value := getattr(event, field)) is not None:
                self._record[name](value)
        if span:
            self._span(event, f"dcp_s3.{span}")

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
