"""The comparison of an export with a download."""

from __future__ import annotations

import pytest
from rich.console import Console
from rich.table import Table

from benchmarks.export import add_rows, make_state, run
from benchmarks.units import MIB
from tests.memory_s3 import MemoryS3


def test_every_way_is_measured_in_every_round(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"ACCESS_KEY_ID": "a", "SECRET_ACCESS_KEY": "b", "DEFAULT_REGION": "us-east-1"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    with MemoryS3() as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint_url)
        samples = run(make_state(MIB), 2)
    assert {len(found) for found in samples.values()} == {2}
    table = Table("", "seconds", "GiB/s", "of a download", "CPU s/GiB", "peak MiB")
    add_rows(table, samples, MIB)
    console = Console(record=True, width=120)
    console.print(table)
    text = console.export_text()
    assert "export to S3" in text
    assert "1.00 x" in text
