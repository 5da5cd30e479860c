"""``--metrics-port``, of real processes that are asked as Prometheus asks."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

from dcp_s3.cli.main import app
from tests.interpreter import Interpreter

pytestmark = pytest.mark.servers("memory")


def scrape(url: str) -> dict[str, float]:
    with urllib.request.urlopen(url, timeout=30) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    return {sample.name: sample.value for family in families for sample in family.samples}


def test_a_drain_that_goes_on_serves_what_this_process_has_done(tmp_path: Path, interpreter: Interpreter) -> None:
    command = [sys.executable, "-m", "dcp_s3.cli.main", "drain", str(tmp_path), "--watch", "--metrics-port", "0"]
    process = interpreter.popen(command, stderr=subprocess.PIPE)
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        found = re.search(r"http://127\.0\.0\.1:\d+/metrics", line)
        assert found, line
        served = scrape(found[0])
        assert (served["dcp_s3_saves_done_total"], served["dcp_s3_spill_drained_bytes_total"]) == (0, 0)
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def test_it_is_for_processes_that_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DCP_S3_SPILL_DIR", str(tmp_path))
    result = CliRunner().invoke(app, ["drain", "--metrics-port", "0"])
    assert result.exit_code == 2
    assert "Remedy: --watch" in result.stderr
