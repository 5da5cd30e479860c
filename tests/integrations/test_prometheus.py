"""What Prometheus gets, over HTTP."""

from __future__ import annotations

import urllib.request
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from prometheus_client.parser import text_string_to_metric_families

import dcp_s3
from dcp_s3 import S3StorageReader, S3StorageWriter
from dcp_s3.errors import SettingsError
from dcp_s3.integrations import prometheus
from dcp_s3.totals import Totals

pytestmark = pytest.mark.servers("memory")


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
