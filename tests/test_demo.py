"""The demo as a newcomer runs it, and what its training relies on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dcp_s3.demo import DemoError, training


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_the_demo_interrupts_a_save_and_restores_every_bit_on_another_number_of_ranks() -> None:
    command = [sys.executable, "-m", "dcp_s3.cli.main", "demo"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        output, _ = process.communicate(timeout=280)
    finally:
        process.terminate()  # not SIGKILL: the demo then takes its workers along
        process.wait()
    assert process.returncode == 0, output
    passed = [line.strip() for line in output.splitlines() if line.strip().startswith("PASS")]
    assert len(passed) == 5, output
    assert "FAIL" not in output
    assert "restored on 3 ranks is bit-identical to the one saved on 2" in output
    assert "no policy keeps it" in output
    assert "Traceback" not in output


def test_a_rank_that_fails_is_reported_with_its_error_and_leaving_kills_the_others(tmp_path: Path) -> None:
    with (
        pytest.raises(DemoError, match=r"failed on rank [01]:\nprocess . terminated with exit code 2"),
        training(tmp_path, 2, steps=1, save_every="often") as ranks,  # type: ignore[arg-type]
    ):
        ranks.join()
    assert [process.is_alive() for process in ranks.processes] == [False, False]
