"""``.metadata`` for the ranks of one host: one version of it, and few requests."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from dcp_s3 import errors
from dcp_s3.load import host_metadata
from dcp_s3.load.host_metadata import fetch_metadata_for_host
from dcp_s3.store import ObjectStart, StoredObject
from dcp_s3.url import parse_url
from tests.faulty_store import FaultyStore
from tests.memory_store import MemoryStore

URL = parse_url("s3://bucket/run/step-1")
KEY = URL.key(".metadata")
OLD, NEW = os.urandom(5000), os.urandom(7000)


class RangeStore(FaultyStore):
    """Reads the start of an object as S3 does; ``calls`` are the requests."""

    def __init__(self, data: bytes = OLD) -> None:
        super().__init__(MemoryStore())
        self.calls: list[str] = []
        self.before_read: Callable[[], None] = lambda: None
        self.save(data)

    def save(self, data: bytes) -> None:
        self.store.put(KEY, data, metadata={"crc": str(len(data))})

    def get(self, key: str) -> StoredObject:
        self.calls.append("whole")
        return super().get(key)

    def get_start(self, key: str, most: int) -> ObjectStart:
        self.calls.append("start")
        found = super().get(key)
        return ObjectStart(StoredObject(found.data[:most], found.metadata, found.etag), len(found.data))

    def read(self, key: str, start: int, into: memoryview, etag: str | None = None) -> None:
        self.calls.append("rest")
        self.before_read()
        super().read(key, start, into, etag)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(host_metadata, "SHARED_FROM", 1000)


def fetch(store: RangeStore, ranks: int = 3, origin: str = "here") -> StoredObject:
    return fetch_metadata_for_host(store, URL, origin, ranks=ranks)


def test_one_rank_fetches_the_rest() -> None:
    store = RangeStore()
    found = [fetch(store), fetch(store)]
    assert found[0] == found[1] == store.store.get(KEY)
    assert store.calls == ["start", "rest", "start"]


def test_much_is_fetched_over_several_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_metadata, "_PIECE", 999)
    store = RangeStore()
    assert (fetch(store).data, fetch(store).data) == (OLD, OLD)
    assert store.calls == ["start", *["rest"] * 5, "start"]


def test_alone_it_is_one_request() -> None:
    store = RangeStore()
    assert fetch(store, ranks=1).data == OLD
    assert store.calls == ["whole"]


def test_small_metadata_is_one_request() -> None:
    store = RangeStore(b"x" * 1000)
    assert fetch(store).data == fetch(store).data == b"x" * 1000
    assert store.calls == ["start", "start"]


def test_the_same_key_elsewhere_is_something_else() -> None:
    store, other = RangeStore(), RangeStore()
    fetch(store)
    fetch(other, origin="there")
    assert other.calls == ["start", "rest"]


def test_after_an_overwrite_nobody_gets_the_old_one() -> None:
    store = RangeStore()
    assert fetch(store).data == OLD
    store.save(NEW)
    assert fetch(store) == store.store.get(KEY)
    assert fetch(store).data == NEW


@pytest.mark.parametrize("size", [500, 2000, 7000])
@pytest.mark.parametrize("piece", [999, 10_000])
def test_an_overwrite_between_the_requests_gives_one_version(
    monkeypatch: pytest.MonkeyPatch, size: int, piece: int
) -> None:
    monkeypatch.setattr(host_metadata, "_PIECE", piece)
    store = RangeStore()

    def overwrite() -> None:
        store.before_read = lambda: None
        store.save(NEW[:size])

    store.before_read = overwrite
    assert fetch(store) == store.store.get(KEY)
    assert fetch(store).data == NEW[:size]


def test_overwritten_again_and_again_it_is_one_version() -> None:
    store = RangeStore()
    versions = iter(range(1, 1000))
    store.before_read = lambda: store.save(NEW[: 2000 + next(versions)])
    found = fetch(store)
    assert found == store.store.get(KEY)
    assert store.calls[-1] == "whole"


def test_deleted_meanwhile_it_is_missing() -> None:
    store = RangeStore()
    store.before_read = lambda: store.store.delete([KEY]) and None
    with pytest.raises(errors.CheckpointNotFoundError, match=str(URL)):
        fetch(store)


def test_whoever_may_not_read_gets_nothing_from_the_disk() -> None:
    store = RangeStore()
    fetch(store)

    def get_start(key: str, most: int) -> ObjectStart:
        raise errors.AccessDeniedError("403")

    store.get_start = get_start  # type: ignore[method-assign]
    with pytest.raises(errors.AccessDeniedError):
        fetch(store)
