"""The demo as a newcomer runs it, and what its training relies on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dcp_s3.bench import RankProcesses
from dcp_s3.demo.run import Demo, DemoError


def _demo(*arguments: str) -> tuple[int, str]:
    """Exit status and output. Ended with SIGTERM, not SIGKILL: the demo then takes its workers along."""
    process = subprocess.Popen(
        [sys.executable, "-m", "dcp_s3.cli.main", "demo", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = process.communicate(timeout=280)
    finally:
        process.terminate()
        process.wait()
    return process.returncode, output


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_the_demo_interrupts_a_save_and_restores_every_bit_on_another_number_of_ranks() -> None:
    status, output = _demo()
    assert status == 0, output
    passed = [line.strip() for line in output.splitlines() if line.strip().startswith("PASS")]
    assert len(passed) == 5, output
    assert "FAIL" not in output
    assert "restored on 3 ranks is bit-identical to the one saved on 2" in output
    assert "no policy keeps it" in output
    assert "Traceback" not in output


def test_a_url_that_is_none_ends_the_demo_with_a_message_and_status_1() -> None:
    status, output = _demo("--url", "http://example.com/run")
    assert status == 1
    assert "is not an S3 URL" in output
    assert "Traceback" not in output


def test_a_worker_that_fails_is_reported_with_its_log_and_leaving_kills_the_others(tmp_path: Path) -> None:
    demo = Demo("s3://demo/run", tmp_path, limit=60.0)
    failing = RankProcesses("dcp_s3.demo.train", ["--no-such-option"], 1, tmp_path / "logs")
    with failing as workers, pytest.raises(DemoError, match=r"(?s)rank 0 .* status 2.*--url"):
        list(demo.watch(workers, interval=0.05))
    with RankProcesses("dcp_s3.demo.train", ["--url", "s3://bucket/run"], 2, tmp_path / "more") as workers:
        assert workers.statuses() == [None, None]
    assert workers.statuses() == [-9, -9]
