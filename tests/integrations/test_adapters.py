"""What adapters share: the framework that they need, the parts of a training state; OpenTelemetry and Prometheus."""

from __future__ import annotations

import contextlib
import importlib
import logging
import random
import re
import sys
import urllib.request
from importlib import metadata
from typing import Any

import numpy
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
from torch import nn
from torch.distributed.checkpoint import load, save
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

import dcp_s3
from dcp_s3 import S3StorageReader, S3StorageWriter, events, integrations
from dcp_s3.errors import SaveProtocolError, SettingsError
from dcp_s3.events import Totals
from dcp_s3.integrations import otel, prometheus, require, training_parts
from dcp_s3.integrations.training_parts import (
    as_item,
    from_item,
    owner,
    rng_state,
    set_rng_state,
)
from tests.ranks import run_ranks

pytestmark = pytest.mark.servers("memory")


ADAPTERS = {
    "accelerate": "accelerate>=1.15,<2",
    "lightning": "lightning>=2.6,<2.7",
    "megatron": "megatron-core>=0.16,<0.17",
    "torchtitan": "torchtitan>=0.3,<0.4",
    "transformers": "transformers>=5.23,<6",
}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Versions of packages: what is not in here is not installed."""
    versions: dict[str, str] = {}

    def version(package: str) -> str:
        if package not in versions:
            raise metadata.PackageNotFoundError(package)
        return versions[package]

    monkeypatch.setattr(integrations.metadata, "version", version)
    for name in ADAPTERS:
        monkeypatch.delitem(sys.modules, f"dcp_s3.integrations.{name}", raising=False)
    return versions


@pytest.mark.parametrize("name", ADAPTERS)
def test_a_missing_framework_is_named_with_its_versions(installed: dict[str, str], name: str) -> None:
    wanted = re.escape(ADAPTERS[name])
    with pytest.raises(ImportError, match=rf"needs {wanted}, .*pip install '{wanted}'"):
        importlib.import_module(f"dcp_s3.integrations.{name}")


def test_transformers_needs_accelerate_too(installed: dict[str, str]) -> None:
    installed["transformers"] = "5.23.0"
    with pytest.raises(ImportError, match=r"needs accelerate>=1\.15,<2, which is missing"):
        importlib.import_module("dcp_s3.integrations.transformers")


def test_which_versions_are_supported(installed: dict[str, str]) -> None:
    for version in ("0.16", "0.16.1+cu128", "0.15.3", "0.17.0rc0", "unknown"):
        installed["megatron-core"] = version
        says = rf"supports megatron-core>=0\.16,<0\.17, and {re.escape(version)} is installed"
        with contextlib.nullcontext() if version.startswith("0.16") else pytest.raises(ImportError, match=says):
            require("megatron", "megatron-core", "0.16", "0.17")


# --- parts of a training state ---------------------------------------------------------------------------


CPU = torch.device("cpu")


def draw() -> list[float]:
    return [random.random(), float(numpy.random.rand()), torch.rand(()).item()]


def test_random_numbers_go_on_after_a_checkpoint(root: str) -> None:
    saved = {"rng": as_item([rng_state(CPU)])}
    save(saved, storage_writer=S3StorageWriter(f"{root}/step-1"))
    expected = draw()
    found = {"rng": as_item([])}
    load(found, storage_reader=S3StorageReader(f"{root}/step-1"))  # weights_only: nothing in it runs code
    set_rng_state(0, from_item(found["rng"]), CPU)
    assert draw() == expected


def states(*seeds: int) -> list[dict[str, Any]]:
    made = []
    for seed in seeds:
        random.seed(seed)
        numpy.random.seed(seed)
        torch.manual_seed(seed)
        made.append(rng_state(CPU))
    return made


@pytest.mark.parametrize(
    ("rank", "saved", "same_as", "warns"),
    [(0, (1, 2), 1, False), (1, (1, 2), 2, False), (2, (1, 1), 1, False), (2, (1, 2), 9, True)],
    ids=["first", "second", "new_where_all_were_alike", "new_where_they_were_not"],
)
def test_ranks_get_their_own_random_numbers(
    rank: int, saved: tuple[int, ...], same_as: int, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    states(same_as)
    expected = draw()
    before = states(*saved)
    states(9)
    with caplog.at_level(logging.WARNING, training_parts.__name__):
        set_rng_state(rank, before, CPU)
    assert draw() == expected
    assert bool(caplog.records) == warns


def test_the_owner_of_an_optimizer() -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(second.parameters())
    assert owner(optimizer, [first, second]) is second
    both = owner(torch.optim.SGD([*first.parameters(), *second.parameters()]), [first, second])
    assert list(both.children()) == [first, second]
    with pytest.raises(SaveProtocolError, match="belong to none of the 1 models"):
        owner(optimizer, [first])


def _items() -> tuple[Any, Any]:
    mesh = init_device_mesh("cpu", (2,))
    sharded = {"deep": [distribute_tensor(torch.arange(4), mesh, [Shard(0)])]}
    return as_item(sharded) is sharded, as_item({"tensor": torch.ones(2)})


def test_only_states_with_sharded_tensors_are_several_items() -> None:
    for sharded, whole in run_ranks(2, _items):
        assert sharded
        assert isinstance(whole, tuple)


# --- OpenTelemetry ---------------------------------------------------------------------------------------


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
        if data is None:
            return {}
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


EVENTS: list[tuple[events.Event, str, str]] = [
    (events.Spilled(url="s3://b/r", path="p", bytes=1, local=False, reason="r"), "", "spill.bytes"),
    (events.Drained(url="s3://b/r", bytes=1, seconds=1.0), "drain", ""),
    (events.Throttled(bucket="b", limit=1, decreases=1), "", "throttled"),
    (events.Pruned(root="s3://b/r", deleted=1, freed_bytes=1, seconds=1.0, ok=True), "prune", "prune.bytes"),
    (events.PruneFailed(root="s3://b/r", error=ValueError("x")), "prune", ""),
    (events.LoadFailed(url=None, step=None, rank=0, error=ValueError("x")), "load", "loads"),
]


@pytest.mark.parametrize(("event", "span", "metric"), EVENTS, ids=[type(event).__name__ for event, *_ in EVENTS])
def test_every_event_leaves_a_trace_until_the_subscription_ends(event: events.Event, span: str, metric: str) -> None:
    telemetry = Telemetry()
    with otel.instrument(**telemetry.providers):
        events.emit(event)
    events.emit(event)
    assert [each.name for each in telemetry.spans.get_finished_spans()] == [f"dcp_s3.{span}"] * bool(span)
    assert [(name, points[0].value) for name, points in telemetry.metrics().items()] == [
        (f"dcp_s3.{name}", 1) for name in [metric] if name
    ]


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
    monkeypatch.setattr("dcp_s3.events._totals", Totals())
    found = scrape(serving)
    assert "dcp_s3_saves_last_step" not in found  # there is none: 0 would be a lie
    assert [sample.value for sample in found["dcp_s3_saves_done_total"]] == [0]


def test_a_port_that_is_taken(serving: Any) -> None:
    with pytest.raises(SettingsError, match=rf"cannot be served at 127\.0\.0\.1:{serving.server_port}.*another port"):
        prometheus.serve(serving.server_port)
