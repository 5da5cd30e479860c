"""The comparison of what other writers stored with what dcp_s3 stored."""

from __future__ import annotations

import pytest
from rich.console import Console
from rich.table import Table

from benchmarks.foreign import WRITERS, add_rows, large_state, run, small_state
from benchmarks.units import MIB
from tests.memory_s3 import MemoryS3


def test_every_writer_is_loaded_in_every_round(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"ACCESS_KEY_ID": "a", "SECRET_ACCESS_KEY": "b", "DEFAULT_REGION": "us-east-1"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    with MemoryS3() as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint_url)
        samples = run(large_state(MIB) | small_state(3), server.endpoint_url, 2)
    assert {name: len(found) for name, found in samples.items()} == dict.fromkeys(WRITERS, 2)
    table = Table("state", "written by", "seconds", "GiB/s", "CPU s/GiB", "time")
    add_rows(table, "few", samples, MIB)
    console = Console(record=True, width=100)
    console.print(table)
    text = console.export_text()
    assert "FsspecWriter" in text
    assert "1.00 x" in text
