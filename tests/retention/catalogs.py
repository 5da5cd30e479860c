"""A small catalog with something of everything that a prune deletes, put back as often as a test wants."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import boto3
import pytest

from dcp_s3 import annotate
from dcp_s3.format.layout import CLAIM, joint_object
from tests.faulty import BUCKET, FaultyServer, serve
from tests.memory_s3 import MemoryS3
from tests.retention.making import delete, put, save, save_foreign
from tests.retention.runs import DAY, ROOT, Clock


@dataclass
class Catalog:
    """Committed: step-1 of ours with metrics, step-2 of another writer, step-9 to stay. Left over: step-5, objects in
    step-9, an upload, a board.

    Attributes:
        server: that has it.
        start: its objects, by key.
        keep: keys of those that a prune with ``latest:1`` leaves.
        commits: of each committed checkpoint, by the key of its ``.metadata``, the keys of what it needs.
    """

    server: FaultyServer
    clock: Clock
    start: dict[str, Any] = field(default_factory=dict)
    keep: set[str] = field(default_factory=set)
    commits: dict[str, set[str]] = field(default_factory=dict)
    uploads: dict[str, Any] = field(default_factory=dict)

    @property
    def _bucket(self) -> Any:
        return self.server.s3._store._buckets[BUCKET]

    @property
    def keys(self) -> set[str]:
        return set(self._bucket.objects)

    def put_back(self) -> None:
        with self.server.s3._store._lock:
            self._bucket.objects = dict(self.start)
            self._bucket.uploads = dict(self.uploads)
            self._bucket._sorted = None

    def check_committed(self) -> None:
        """No checkpoint that reads as committed has lost an object."""
        with self.server.s3._store._lock:
            there = self.keys
        for metadata, needed in self.commits.items():
            assert metadata not in there or needed <= there, f"{metadata} lost {needed - there}"

    def check_done(self) -> None:
        assert self.keys == self.keep
        assert self.server.s3.open_uploads(BUCKET) == []


@contextlib.contextmanager
def serve_catalog(monkeypatch: pytest.MonkeyPatch, directory: Path) -> Iterator[Catalog]:
    clock = Clock()
    server = FaultyServer()
    server.s3 = MemoryS3(fault=lambda request: server.rule(request), clock=clock)
    with serve(monkeypatch, server):
        client = boto3.Session().client("s3", endpoint_url=server.s3.endpoint_url)
        catalog = Catalog(server, clock)
        annotate(save(f"{ROOT}/step-1"), {"loss": 1})
        save_foreign(client, f"{ROOT}/step-2", directory)
        save(f"{ROOT}/step-9")
        for key in catalog.keys:
            if not key.endswith((".metadata", "metrics.json")):
                catalog.commits.setdefault(f"run/{key.split('/')[1]}/.metadata", set()).add(key)
        catalog.keep = {key for key in catalog.keys if key.startswith("run/step-9/")}
        delete(client, save(f"{ROOT}/step-5"), ".metadata")
        put(client, f"{ROOT}/step-9", "__0_0-abcdef.distcp")
        clock.now += 60  # a claim that is no newer than the commit is of the save that committed
        for name in ("step-5", "step-9"):  # of saves without collectives
            for path in (
                CLAIM,
                joint_object("ab", "part", 1),
                joint_object("ab", "intent", 2),
                joint_object("ab", "roll", "ef"),
            ):
                put(client, f"{ROOT}/{name}", path)
        put(client, ROOT, ".dcp_s3/board-ab-queue")
        client.create_multipart_upload(Bucket=BUCKET, Key="run/step-9/__0_1-abcdef.distcp")
        client.close()
        clock.now += 2 * DAY
        catalog.start, catalog.uploads = dict(catalog._bucket.objects), dict(catalog._bucket.uploads)
        yield catalog
