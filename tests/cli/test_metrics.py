"""``--metrics-port``, of real processes that are asked as Prometheus asks."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

from dcp_s3 import S3StorageWriter
from dcp_s3.cli.main import app
from tests.interpreter import Interpreter
from tests.s3.waiting import until

pytestmark = pytest.mark.servers("memory")


def scrape(url: str) -> dict[str, float]:
    with urllib.request.urlopen(url, timeout=30) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    return {sample.name: sample.value for family in families for sample in family.samples}


def test_a_prune_that_repeats_serves_what_it_has_done(root: str, interpreter: Interpreter) -> None:
    for step in (1, 2, 3):
        dcp.save({"w": torch.ones(10)}, storage_writer=S3StorageWriter(f"{root}/step-{step}"))
    command = [sys.executable, "-m", "dcp_s3.cli.main", "prune", root, "latest:1", "--yes", "--every", "1h"]
    process = interpreter.popen([*command, "--metrics-port", "0"], stderr=subprocess.PIPE)
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        found = re.search(r"http://127\.0\.0\.1:\d+/metrics", line)
        assert found, line
        until(lambda: scrape(found[0])["dcp_s3_prunes_deleted_total"] == 2)
        served = scrape(found[0])
        assert (served["dcp_s3_prunes_runs_total"], served["dcp_s3_prunes_failed_total"]) == (1, 0)
        assert served["dcp_s3_prunes_freed_bytes_total"] > 0
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


@pytest.mark.parametrize(
    ("command", "remedy"), [(["drain"], "--watch"), (["prune", "s3://bucket/run", "latest:1", "--yes"], "--every 10m")]
)
def test_it_is_for_processes_that_go_on(
    command: list[str], remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DCP_S3_SPILL_DIR", str(tmp_path))
    result = CliRunner().invoke(app, [*command, "--metrics-port", "0"])
    assert result.exit_code == 2
    assert f"Remedy: {remedy}" in result.stderr
