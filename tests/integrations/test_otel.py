"""Spans and metrics of real saves and loads, in OpenTelemetry's own exporters."""

from __future__ import annotations

import urllib.request
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from prometheus_client.parser import text_string_to_metric_families

import dcp_s3
from dcp_s3 import S3StorageReader, S3StorageWriter, events
from dcp_s3.errors import SettingsError
from dcp_s3.integrations import otel, prometheus
from dcp_s3.totals import Totals

pytestmark = pytest.mark.servers("memory")


class Telemetry:
    def __init__(self) -> None:
        self.spans, self.reader = InMemorySpanExporter(), InMemoryMetricReader()
        tracers = TracerProvider()
        tracers.add_span_processor(SimpleSpanProcessor(self.spans))
        self.providers: dict[str, Any] = {
            "tracer_provider": tracers,
            "meter_provider": MeterProvider(metric_readers=[self.reader]),
        }

    def span(self, name: str) -> ReadableSpan:
        (found,) = [span for span in self.spans.get_finished_spans() if span.name == name]
        return found

    def metrics(self) -> dict[str, list[Any]]:
        data = self.reader.get_metrics_data()
        assert data is not None
        found = [metric for each in data.resource_metrics for scope in each.scope_metrics for metric in scope.metrics]
        return {metric.name: list(metric.data.data_points) for metric in found}


def test_a_save_and_a_load(root: str) -> None:
    telemetry = Telemetry()
    state = {"w": torch.ones(1000)}
    with otel.instrument(**telemetry.providers):
        saving = dcp.async_save(state, storage_writer=S3StorageWriter(f"{root}/step-12"))
        saving.result(60)  # type: ignore[union-attr]
        dcp.load(state, storage_reader=S3StorageReader(f"{root}/step-12"))
    save = telemetry.span("dcp_s3.save")
    assert save.attributes is not None
    assert save.attributes["dcp_s3.url"] == f"{root}/step-12"
    assert save.attributes["dcp_s3.step"] == 12
    assert save.attributes["dcp_s3.ranks"] == 1
    for name in ("stage", "write", "save", "load"):
        span = telemetry.span(f"dcp_s3.{name}")
        assert span.status.status_code is StatusCode.UNSET
        assert span.start_time is not None
        assert span.end_time is not None
        assert span.start_time < span.end_time
    found = telemetry.metrics()
    assert [(point.value, dict(point.attributes)) for point in found["dcp_s3.saves"]] == [(1, {"outcome": "done"})]
    assert [point.value for point in found["dcp_s3.last_step"]] == [12]
    assert found["dcp_s3.save.bytes"][0].value > 4000
    assert found["dcp_s3.stall.duration"][0].count == 1
    assert found["dcp_s3.commit.duration"][0].sum > 0


def test_a_failure_is_a_span_with_the_error() -> None:
    telemetry = Telemetry()
    with otel.instrument(**telemetry.providers):
        events.emit(events.SaveFailed(url="s3://bucket/run/step-1", step=1, error=ValueError("no room")))
    span = telemetry.span("dcp_s3.save")
    assert span.status.status_code is StatusCode.ERROR
    assert span.status.description == "ValueError: no room"
    assert [event.name for event in span.events] == ["exception"]
    points = telemetry.metrics()["dcp_s3.saves"]
    assert [(point.value, dict(point.attributes)) for point in points] == [(1, {"outcome": "failed"})]


def test_nothing_more_after_close() -> None:
    telemetry = Telemetry()
    otel.instrument(**telemetry.providers).close()
    events.emit(events.Pruned(root="s3://bucket/run", deleted=1, freed_bytes=1, seconds=1.0, ok=True))
    assert not telemetry.spans.get_finished_spans()


@pytest.mark.parametrize(
    "event",
    [
        events.Spilled(url="s3://b/r", path="p", bytes=1, local=False, reason="r"),
        events.Drained(url="s3://b/r", bytes=1, seconds=1.0),
        events.Throttled(bucket="b", limit=1, decreases=1),
        events.Pruned(root="s3://b/r", deleted=1, freed_bytes=1, seconds=1.0, ok=True),
        events.PruneFailed(root="s3://b/r", error=ValueError("x")),
        events.LoadFailed(url=None, step=None, rank=0, error=ValueError("x")),
    ],
    ids=lambda event: type(event).__name__,
)
def test_every_event_leaves_a_trace(event: events.Event) -> None:
    telemetry = Telemetry()
    with otel.instrument(**telemetry.providers):
        events.emit(event)
    assert telemetry.spans.get_finished_spans() or telemetry.metrics()


# --- Prometheus -----------------------------------------------------------------------------------------


def scrape(server: Any) -> dict[str, list[Any]]:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    found: dict[str, list[Any]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample)
    return found


@pytest.fixture
def serving() -> Any:
    server = prometheus.serve(0)
    yield server
    server.shutdown()
    server.server_close()


def test_it_serves_what_stats_says(serving: Any, root: str) -> None:
    dcp.save({"w": torch.ones(1000)}, storage_writer=S3StorageWriter(f"{root}/step-33"))
    dcp.load({"w": torch.ones(1000)}, storage_reader=S3StorageReader(f"{root}/step-33"))
    found, stats = scrape(serving), dcp_s3.stats()
    assert [sample.value for sample in found["dcp_s3_saves_done_total"]] == [stats.saves.done]
    assert [sample.value for sample in found["dcp_s3_saves_bytes_total"]] == [stats.saves.bytes]
    assert [sample.value for sample in found["dcp_s3_saves_last_step"]] == [33]
    assert [sample.value for sample in found["dcp_s3_saves_last_commit_timestamp_seconds"]] == [stats.saves.last_commit]
    throttled = {sample.labels["bucket"]: sample.value for sample in found["dcp_s3_throttled_requests_total"]}
    assert throttled == {name: state.throttled for name, state in stats.throttle.items()}


def test_a_process_that_has_done_nothing(serving: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dcp_s3.totals._totals", Totals())
    found = scrape(serving)
    assert "dcp_s3_saves_last_step" not in found  # there is none: 0 would be a lie
    assert [sample.value for sample in found["dcp_s3_saves_done_total"]] == [0]


def test_a_port_that_is_taken(serving: Any) -> None:
    with pytest.raises(SettingsError, match=rf"cannot be served at 127\.0\.0\.1:{serving.server_port}.*another port"):
        prometheus.serve(serving.server_port)
