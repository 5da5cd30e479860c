"""A server with faults, in whose bucket other things lie."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dcp_s3.s3.store import S3Store
from dcp_s3.settings import Settings
from tests.checkup.examining import BEFORE, OPEN
from tests.faulty import BUCKET, FaultyServer, serve


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyServer]:
    """With two objects and an open upload, which are there afterwards, and nothing else."""
    with serve(monkeypatch) as server:
        store = S3Store(BUCKET, Settings())
        store.put("run/before", b"kept")
        store.put("run/step-1/.metadata", b"")
        store.client.create_multipart_upload(Bucket=BUCKET, Key=OPEN)
        server.s3.reset_counters()
        yield server
        server.rule = lambda _: None
        assert server.s3.objects(BUCKET) == BEFORE
        assert server.s3.open_uploads(BUCKET) == [OPEN]
