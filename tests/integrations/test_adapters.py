"""What adapters share: the framework that they need; and Prometheus."""

from __future__ import annotations

import contextlib
import importlib
import re
import sys
import urllib.request
from importlib import metadata
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from prometheus_client.parser import text_string_to_metric_families

import dcp_s3
from dcp_s3 import S3StorageReader, S3StorageWriter, integrations
from dcp_s3.errors import SettingsError
from dcp_s3.events import Stats
from dcp_s3.integrations import prometheus, require

pytestmark = pytest.mark.servers("memory")


ADAPTERS = {
    "accelerate": "accelerate>=1.15,<2",
    "lightning": "lightning>=2.6,<2.7",
    "megatron": "megatron-core>=0.16,<0.17",
    "torchtitan": "torchtitan>=0.3,<0.4",
    "transformers": "transformers>=5.23,<6",
}


@pytest.mark.parametrize("name", ADAPTERS)
def test_a_missing_framework_is_named_with_its_versions(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def version(package: str) -> str:
        raise metadata.PackageNotFoundError(package)

    monkeypatch.setattr(integrations.metadata, "version", version)
    monkeypatch.delitem(sys.modules, f"dcp_s3.integrations.{name}", raising=False)
    wanted = re.escape(ADAPTERS[name])
    with pytest.raises(ImportError, match=rf"not installed, and {wanted} .*pip install '{wanted}'"):
        importlib.import_module(f"dcp_s3.integrations.{name}")


@pytest.mark.parametrize("version", ["0.16", "0.16.1+cu128", "0.15.3", "0.17.0rc0", "unknown"])
def test_which_versions_are_supported(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(integrations.metadata, "version", lambda _: version)
    says = rf"megatron-core is {re.escape(version)}, and megatron-core>=0\.16,<0\.17 is needed"
    with contextlib.nullcontext() if version.startswith("0.16") else pytest.raises(ImportError, match=says):
        require("megatron-core", "0.16", "0.17")


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
    monkeypatch.setattr("dcp_s3.events._totals", Stats())
    found = scrape(serving)
    assert "dcp_s3_saves_last_step" not in found  # there is none: 0 would be a lie
    assert [sample.value for sample in found["dcp_s3_saves_done_total"]] == [0]


def test_a_port_that_is_taken(serving: Any) -> None:
    with pytest.raises(SettingsError, match=rf"cannot be served at 127\.0\.0\.1:{serving.server_port}.*another port"):
        prometheus.serve(serving.server_port)
