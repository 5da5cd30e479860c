"""The store that spills, by itself: where objects go, and what a batch says of it."""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from dcp_s3.checkpoint.commit_state import Beginning, SaveIdentity
from dcp_s3.checksum import crc64nvme
from dcp_s3.errors import SpillError, TransferError
from dcp_s3.limit import Deadline, Limit
from dcp_s3.memory import Piece
from dcp_s3.s3.store import S3Store
from dcp_s3.settings import Settings
from dcp_s3.spill import saving as saving_module
from dcp_s3.spill.drain import Drainer
from dcp_s3.spill.journal import State
from dcp_s3.spill.saving import SpillingStore, open_for_save
from dcp_s3.spill.store import SpillStore
from dcp_s3.url import parse_url
from tests.faulty import BUCKET, FaultyServer
from tests.memory_s3 import Fault

MIB = 2**20
KEYS = ["run/a", "run/b", "run/c"]
DATA = {key: random.Random(key).randbytes(MIB + len(key)) for key in KEYS}


class Object:
    """Bytes in pieces, which can be had again."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def __iter__(self) -> Iterator[Piece]:
        for start in range(0, len(self._data), 300_000):
            yield Piece.of(memoryview(self._data)[start : start + 300_000])


@pytest.fixture(autouse=True)
def _no_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving_module, "drain_in_background", lambda *_, **__: None)


@pytest.fixture
def disk(tmp_path: Path) -> SpillStore:
    return SpillStore(tmp_path / "spill")


def make_store(disk: SpillStore, **settings: Any) -> SpillingStore:
    values = {"spill_dir": str(disk.path), "retry_attempts": 2, "spill_after": 1.0, **settings}
    return SpillingStore(S3Store(BUCKET, Settings(**values)), disk, f"s3://{BUCKET}/run", "save", 0)


def put_all(store: SpillingStore) -> list[bool]:
    """Put the objects; whether each was spilled."""
    with store.batch(total=3 * MIB, keys=KEYS) as batch, ThreadPoolExecutor(3) as pool:
        stored = dict(zip(KEYS, pool.map(lambda key: batch.put_stream(key, MIB, Object(DATA[key])), KEYS), strict=True))
        while again := batch.settle():
            stored |= {key: batch.put_stream(key, MIB, Object(DATA[key])) for key in again}
    assert {key: each.crc64nvme for key, each in stored.items()} == {k: crc64nvme(each) for k, each in DATA.items()}
    return [each.spilled for each in stored.values()]


def assert_all_there(faulty: FaultyServer) -> None:
    assert {key: faulty.s3.read(BUCKET, key) for key in KEYS} == DATA
    assert faulty.s3.open_uploads(BUCKET) == []


def test_what_s3_takes_does_not_touch_the_disk(faulty: FaultyServer, disk: SpillStore) -> None:
    assert put_all(make_store(disk)) == [False] * 3
    assert disk.scan() == []
    assert_all_there(faulty)


def test_what_s3_refuses_is_spilled_and_drained(faulty: FaultyServer, disk: SpillStore) -> None:
    faulty.rule = lambda request: Fault.error(503, "SlowDown") if request.key == "run/b" else None
    assert put_all(make_store(disk)) == [False, True, False]
    (save,) = disk.scan()
    assert save.journal.state is State.SEALED
    assert save.journal.keys == tuple(KEYS)
    assert [each.entry.path for each in save.journal.objects] == ["b"]
    faulty.rule = lambda _: None
    Drainer(disk).run()
    assert_all_there(faulty)


def test_with_local_durability_everything_is_spilled(faulty: FaultyServer, disk: SpillStore) -> None:
    assert put_all(make_store(disk, durability="local")) == [True] * 3
    assert faulty.s3.objects(BUCKET) == {}
    Drainer(disk).run()
    assert_all_there(faulty)


def test_what_the_disk_cannot_keep_is_put_again(
    faulty: FaultyServer, disk: SpillStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise SpillError("No space left for the journal")

    monkeypatch.setattr("dcp_s3.spill.store.SaveWriter.seal", full)
    assert put_all(make_store(disk, durability="local")) == [False] * 3
    assert disk.scan() == []
    assert_all_there(faulty)


def test_a_disk_that_takes_nothing_makes_the_store_patient(faulty: FaultyServer, disk: SpillStore) -> None:
    disk.path.write_text("a file where the directory should be")
    store = make_store(disk, durability="local")
    assert store.within(Limit()).store.limit.patience == 1.0
    assert put_all(store) == [False] * 3
    assert store.within(Limit()).store.limit.patience is None
    assert_all_there(faulty)
    faulty.rule = lambda request: Fault.error(503, "SlowDown")
    with pytest.raises(TransferError, match="Nor can it be spilled"):
        put_all(store)


def test_a_batch_that_fails_leaves_neither_objects_nor_files(faulty: FaultyServer, disk: SpillStore) -> None:
    faulty.rule = lambda request: Fault.error(503, "SlowDown") if request.key == "run/b" else None

    def fail() -> None:
        with make_store(disk).batch(total=3 * MIB, keys=KEYS) as batch:
            for key in KEYS:
                batch.put_stream(key, MIB, Object(DATA[key]))
            raise RuntimeError("another rank failed")

    with pytest.raises(RuntimeError):
        fail()
    assert disk.scan() == []
    assert faulty.s3.objects(BUCKET) == {}


def test_the_limit_of_the_save_stays_beside_the_patience(disk: SpillStore) -> None:
    deadline = Deadline.start("DCP_S3_SAVE_TIMEOUT", 100.0)
    limited = make_store(disk).within(Limit(deadline=deadline).within(50.0)).store.limit
    assert (limited.deadline, limited.patience, limited.hang) == (deadline, 1.0, 1.0)


def test_a_save_goes_on_in_another_process(faulty: FaultyServer, disk: SpillStore) -> None:
    """As in the checkpoint process of a framework: who listens to events stays behind."""
    s3 = S3Store(BUCKET, Settings(spill_dir=str(disk.path), durability="local"))
    identity = SaveIdentity(parse_url(f"s3://{BUCKET}/run"), "save")
    options: dict[str, Any] = {"rank": 0, "overwrite": False, "spills": True, "on_event": lambda _: None}
    opened = open_for_save(s3, identity, Beginning(), **options)
    store, committer = pickle.loads(pickle.dumps(opened))
    assert isinstance(store, SpillingStore)
    assert put_all(store) == [True] * 3
    committer.check_url(store)
    Drainer(disk).run()
    assert_all_there(faulty)
