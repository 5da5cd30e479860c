"""Saves, loads, spills and prunes as OpenTelemetry spans and metrics (``opentelemetry-api``).

    from dcp_s3.integrations import otel

    otel.instrument()  # once, in each process; goes to the providers that the process has set up

Spans, made when what they are about has ended: ``dcp_s3.stage``, ``dcp_s3.write`` (this rank's part of a save),
``dcp_s3.save`` (up to the commit, on the rank that commits), ``dcp_s3.load``, ``dcp_s3.drain`` and ``dcp_s3.prune``. A
span of what failed has the status ERROR and the exception.
"""

from __future__ import annotations

from typing import Any

from dcp_s3 import events
from dcp_s3.integrations import require
from dcp_s3.versions import __version__

require("otel", "opentelemetry-api", "1.25", "2")

from opentelemetry import metrics, trace  # noqa: E402 - what is missing was named
from opentelemetry.trace import Status, StatusCode  # noqa: E402

_SPANS: dict[type[events.Event], tuple[str, str]] = {
    events.Staged: ("stage", "bytes disk_bytes"),
    events.Written: ("write", "bytes rank url step"),
    events.Committed: ("save", "bytes ranks url step"),
    events.SaveFailed: ("save", "url step"),
    events.Loaded: ("load", "bytes rank url step"),
    events.LoadFailed: ("load", "url step"),
    events.Drained: ("drain", "bytes url"),
    events.Pruned: ("prune", "root deleted"),
    events.PruneFailed: ("prune", "root"),
}
"""Name of the span of an event, and the fields of it that are the span's attributes."""


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
        self._saves = meter.create_counter("dcp_s3.saves", "{save}", "Parts of saves that ended on this rank")
        self._loads = meter.create_counter("dcp_s3.loads", "{load}", "Loads that ended on this rank")
        self._written = meter.create_counter("dcp_s3.save.bytes", "By", "Bytes that this rank wrote")
        self._read = meter.create_counter("dcp_s3.load.bytes", "By", "Bytes that this rank fetched")
        self._spilled = meter.create_counter("dcp_s3.spill.bytes", "By", "Bytes that went to the spill directory")
        self._freed = meter.create_counter("dcp_s3.prune.bytes", "By", "Bytes that prunes deleted")
        self._throttled = meter.create_counter("dcp_s3.throttled", "{decrease}", "Times that S3 throttled a bucket")
        self._committing = meter.create_histogram("dcp_s3.commit.duration", "s", "From the beginning to the commit")
        self._stall = meter.create_histogram("dcp_s3.stall.duration", "s", "For which the training waited")
        self._loading = meter.create_histogram("dcp_s3.load.duration", "s", "Seconds of loads")
        self._last_step = meter.create_gauge("dcp_s3.last_step", "{step}", "Step of the last commit")

    def __call__(self, event: events.Event) -> None:
        match event:
            case events.Staged():
                self._stall.record(event.stall_seconds)
            case events.Written():
                self._saves.add(1, {"outcome": "done"})
                self._written.add(event.bytes)
            case events.Committed():
                self._committing.record(event.seconds)
                if event.step is not None:
                    self._last_step.set(event.step)
            case events.SaveFailed():
                self._saves.add(1, {"outcome": "failed"})
            case events.Loaded():
                self._loads.add(1, {"outcome": "done"})
                self._read.add(event.bytes)
                self._loading.record(event.seconds)
            case events.LoadFailed():
                self._loads.add(1, {"outcome": "failed"})
            case events.Spilled():
                self._spilled.add(event.bytes, {"refused": not event.local})
            case events.Throttled():
                self._throttled.add(1, {"bucket": event.bucket})
            case events.Pruned():
                self._freed.add(event.freed_bytes)
            case _:
                pass
        if type(event) in _SPANS:
            self._span(event, *_SPANS[type(event)])

    def _span(self, event: Any, name: str, fields: str) -> None:
        """A span that ended with the event."""
        seconds, error = getattr(event, "seconds", 0.0), getattr(event, "error", None)
        values = {f"dcp_s3.{field}": getattr(event, field) for field in fields.split()}
        end = int(event.time * 1e9)
        span = self._tracer.start_span(
            f"dcp_s3.{name}",
            start_time=end - int(seconds * 1e9),
            attributes={key: value for key, value in values.items() if value is not None},
        )
        if error is not None:
            span.record_exception(error, timestamp=end)
            span.set_status(Status(StatusCode.ERROR, f"{type(error).__name__}: {error}"))
        span.end(end)
