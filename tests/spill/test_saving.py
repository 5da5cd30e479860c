"""Saves with a spill directory: S3 refuses, is slow or gone, and the save is not lost; and who waits for its commit."""

from __future__ import annotations

import errno
import itertools
import os
import random
import shutil
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_s3 import errors, latest
from dcp_s3.checkpoint.commit import Beginning
from dcp_s3.events import Event, Spilled
from dcp_s3.limit import Limit
from dcp_s3.memory import Piece, crc64nvme
from dcp_s3.s3.store import S3Store
from dcp_s3.settings import Settings
from dcp_s3.spill import drain
from dcp_s3.spill import saving as saving_module
from dcp_s3.spill import store as spill_store
from dcp_s3.spill.drain import drain_in_background, wait_until_drained
from dcp_s3.spill.journal import State
from dcp_s3.spill.local import LocalObjects
from dcp_s3.spill.saving import SpillingStore
from dcp_s3.stage.memory import HostBuffer
from dcp_s3.url import parse_url
from tests.end_to_end.loads import assert_loads, failure, load
from tests.faulty import BUCKET
from tests.memory_s3 import Fault
from tests.memory_store import MemoryStore
from tests.s3.waiting import LONG, until
from tests.spill.making import (
    MIB,
    Spill,
    allow_all,
    assert_complete,
    damage,
    large_state,
    refuse_all,
    refuse_writes,
    small_state,
)
from tests.stage.making import no_collector

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

KEYS = ["run/a", "run/b", "run/c"]
DATA = {key: random.Random(key).randbytes(MIB + len(key)) for key in KEYS}


# --- the store, by itself --------------------------------------------------------------------------------


class Object:
    """Bytes in pieces, which can be had again."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def __iter__(self) -> Iterator[Piece]:
        for start in range(0, len(self._data), 300_000):
            yield Piece.of(memoryview(self._data)[start : start + 300_000])


def make_store(spill: Spill, **settings: Any) -> SpillingStore:
    store = S3Store(BUCKET, Settings(**{"spill_after": 1.0, **settings}))
    return SpillingStore(store, spill.store, f"s3://{BUCKET}/run", "save", 0)


def refuse_b(request: Any) -> Fault | None:
    return refuse_all(request) if request.key == "run/b" else None


def stall_a(request: Any) -> Fault | None:
    return Fault.straggle(LONG) if request.key == "run/a" else None


@pytest.mark.parametrize(
    ("settings", "rule", "spilled"),
    [
        ({}, allow_all, ""), ({}, refuse_b, "b"), ({"stall_timeout": 0.5, "spill_after": 10.0}, stall_a, "a"),
        ({"durability": "local"}, allow_all, "abc"),
    ],
    ids=["nothing", "refused", "stalled", "local"],
)  # fmt: skip
def test_what_s3_does_not_take_is_spilled_and_drained(
    spill: Spill, settings: dict[str, Any], rule: Any, spilled: str
) -> None:
    spill.server.rule = rule
    with make_store(spill, **settings).batch(total=3 * MIB, keys=KEYS) as batch, ThreadPoolExecutor(3) as pool:
        stored = list(pool.map(lambda key: batch.put_stream(key, MIB, Object(DATA[key])), KEYS))
    assert [each.crc64nvme for each in stored] == [crc64nvme(DATA[key]) for key in KEYS]
    assert [each.spilled for each in stored] == [name in spilled for name in "abc"]
    saves = spill.store.scan()
    assert [(save.journal.state, save.journal.keys) for save in saves] == [(State.SEALED, tuple(KEYS))] * bool(spilled)
    assert {each.entry.path for save in saves for each in save.journal.objects} == set(spilled)
    assert {key[-1] for key in spill.server.s3.objects(BUCKET)} == set("abc") - set(spilled)
    spill.server.rule = allow_all
    spill.drain()
    assert {key: spill.server.s3.read(BUCKET, key) for key in KEYS} == DATA
    assert spill.server.s3.open_uploads(BUCKET) == []


def test_who_listens_to_a_writer_hears_what_it_spills(spill: Spill) -> None:
    seen: list[Event] = []
    spill.save(spill.url("step-1"), small_state(1), on_event=seen.append)
    assert [each.local for each in seen if isinstance(each, Spilled)] == [True]


def test_a_batch_that_fails_leaves_neither_objects_nor_files(spill: Spill) -> None:
    spill.server.rule = refuse_b

    def fail() -> None:
        with make_store(spill).batch(total=3 * MIB, keys=KEYS) as batch:
            for key in KEYS:
                batch.put_stream(key, MIB, Object(DATA[key]))
            raise RuntimeError("another rank failed")

    with pytest.raises(RuntimeError):
        fail()
    assert spill.store.scan() == []
    assert spill.server.s3.objects(BUCKET) == {}


def test_a_full_disk_fails_no_save_that_is_on_s3_but_for_an_upload(
    spill: Spill, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse_until_aborted(request: Any) -> Fault | None:
        if request.operation == "AbortMultipartUpload":
            spill.server.rule = allow_all  # S3 is back
            return Fault.error(403, "AccessDenied")
        return refuse_all(request) if request.operation == "UploadPart" else None

    def write_but_no_sealed_journal(path: Path, data: bytes) -> None:
        if path.parent.parent == spill.store.saves:
            raise OSError(errno.ENOSPC, "No space left on device")
        write_durably(path, data)

    url, write_durably = spill.url("step-1"), spill_store.write_durably
    monkeypatch.setattr(spill_store, "write_durably", write_but_no_sealed_journal)
    monkeypatch.setattr(os, "posix_fallocate", mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    spill.server.rule = refuse_until_aborted
    dcp.save(large_state(1), storage_writer=spill.writer(url))
    assert len(spill.server.s3.open_uploads(BUCKET)) == 1
    assert list(spill.store.saves.iterdir()) == []
    spill.drain()
    assert_complete(url, large_state(1))


@pytest.mark.parametrize(
    ("outage", "settings"),
    [
        ("refuses", {"spill_after": 0.5}), ("is silent", {"spill_after": 0.5}),
        ("stalls", {"spill_after": 5.0, "stall_timeout": 0.5}), ("refuses in the middle", {"spill_after": 2.0}),
    ],
)  # fmt: skip
def test_s3_durability_waits_for_s3(draining: Spill, outage: str, settings: dict[str, Any]) -> None:
    spill, url, state = draining, draining.url("step-1"), {"large": torch.randn(4 * MIB)}
    sent, back = itertools.count(), threading.Event()

    def rule(request: Any) -> Fault | None:
        is_part = request.operation == "UploadPart"
        if outage == "refuses" or (outage == "refuses in the middle" and is_part and next(sent) >= 2):
            return refuse_all(request)
        if outage == "stalls" or (outage == "is silent" and is_part):
            assert back.wait(LONG)
            return Fault.reset()
        return None

    spill.server.rule = rule
    future: Any = dcp.async_save(state, storage_writer=spill.writer(url, {"concurrency": 1, **settings}))
    until(lambda: bool(list(spill.path.glob("saves/*-commit-*"))))
    assert not future.done()
    spill.server.rule = allow_all
    back.set()
    future.result(LONG)
    assert_complete(url, state)
    spill.assert_empty()
    assert spill.server.s3.open_uploads(BUCKET) == []


def at_first_data(spill: Spill, action: Callable[[], object], before: Any = allow_all) -> None:
    """Something happens when the first data object is put; S3 answers by the rule ``before`` until then."""

    def rule(request: Any) -> Fault | None:
        if request.operation != "PutObject" or not request.key.endswith(".distcp"):
            found: Fault | None = before(request)
            return found
        spill.server.rule = allow_all
        action()
        return None

    spill.server.rule = rule


def test_the_drain_of_an_earlier_save_does_not_make_the_next_one_fail(spill: Spill) -> None:
    """After a restart: the new save looks at what it overwrites, then the old one is committed, then the new one is."""
    url, drained = spill.url("last"), list[str]()
    spill.save_to_s3(url, small_state(0), overwrite=True)
    spill.save(url, small_state(1), overwrite=True)
    at_first_data(spill, lambda: drained.extend(spill.drain().committed))
    writer = spill.writer(url, {"spill_after": 60}, overwrite=True)
    dcp.save(small_state(2), storage_writer=writer)
    writer.wait_committed(LONG)
    assert drained == [url]
    assert_complete(url, small_state(2))
    assert len(spill.list_data(url)) == 1


def save_that_began(spill: Spill, url: str, later: float, *, overwrite: bool) -> None:
    """Of `small_state(2)`, to S3."""
    with mock.patch("dcp_s3.save.save.Beginning", return_value=Beginning(time.time() + later)):
        spill.save_to_s3(url, small_state(2), overwrite=overwrite)


@pytest.mark.parametrize("overwrite", [False, True])
def test_what_another_save_commits_meanwhile_is_not_replaced(spill: Spill, overwrite: bool) -> None:
    """Without overwrite nothing is; with it, what began later stays."""
    url = spill.url("last")
    if overwrite:
        spill.save_to_s3(url, small_state(0))
    at_first_data(spill, lambda: save_that_began(spill, url, 100 if overwrite else -100, overwrite=overwrite))
    writer = spill.writer(url, {"spill_after": 60}, overwrite=overwrite)
    failure(lambda: dcp.save(small_state(1), storage_writer=writer), errors.CheckpointExistsError)
    assert_complete(url, small_state(2))
    assert len(spill.list_data(url)) == 1
    spill.assert_empty()


def test_a_save_to_a_url_for_which_one_waits_is_refused(spill: Spill) -> None:
    url = spill.url("step-1")
    spill.save(url, small_state(1))
    refused = failure(lambda: spill.save(url, small_state(2)), errors.CheckpointExistsError)
    assert str(spill.path) in str(refused)
    spill.drained(url, small_state(1))


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_url_that_could_not_be_looked_at_is_looked_at_before_the_commit(draining: Spill, overwrite: bool) -> None:
    """A checkpoint of single ranks is there, which no condition of the commit sees; or with overwrite a newer one."""
    url = draining.url("last")
    if overwrite:
        save_that_began(draining, url, 100, overwrite=True)
    else:
        draining.bucket.put("run/last/__0.metadata", b"x")
    at_first_data(draining, lambda: None, before=refuse_all)
    writer = draining.writer(url, overwrite=overwrite)
    cause = failure(lambda: dcp.save(small_state(1), storage_writer=writer), errors.CheckpointError)
    assert ("newer than this one" if overwrite else "a committed checkpoint is at") in str(cause)
    if overwrite:
        assert_complete(url, small_state(2))
    assert draining.is_visible(url) == overwrite


@pytest.mark.parametrize("seconds", [0, 0.3])  # late: all parts are under way before the first fails
@pytest.mark.parametrize("operation", ["CreateMultipartUpload", "UploadPart", "CompleteMultipartUpload"])
def test_a_state_that_was_spilled_is_let_go_of(
    spill: Spill, monkeypatch: pytest.MonkeyPatch, operation: str, seconds: float
) -> None:
    def refuse(request: Any) -> Fault | None:
        if request.operation != operation:
            return None
        time.sleep(seconds)
        return refuse_all(request)

    monkeypatch.setattr(saving_module, "wait_until_drained", lambda *_, **__: None)
    lease = HostBuffer(12 * MIB, "private").lease()
    alive = weakref.ref(lease)
    state = {"large": torch.frombuffer(lease, dtype=torch.float32).fill_(1)}
    del lease
    spill.server.rule = refuse
    with no_collector():
        dcp.save(state, storage_writer=spill.writer(spill.url("step-1")))
        assert spill.data().journal.objects
        del state
        assert alive() is None


def test_who_waits_hears_why(draining: Spill) -> None:
    draining.server.rule = refuse_all
    draining.save(draining.url("step-1"), small_state(1))
    draining.server.rule = lambda _: Fault.error(403, "AccessDenied")
    save = draining.data()
    until(lambda: any("s3:GetObject" in each.reasons.get(save.name, "") for each in drain._running.values()))
    with pytest.raises(TimeoutError, match="s3:GetObject"):
        wait_until_drained(draining.store, save, timeout=0.1)


def test_a_forked_child_can_drain_though_the_lock_was_held(spill: Spill) -> None:
    with drain._lock:
        child = os.fork()
        if not child:
            drain_in_background(spill.store, patience=1)
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def test_who_waits_goes_on_while_s3_refuses_but_not_when_the_save_was_replaced(spill: Spill) -> None:
    writer = spill.writer(spill.url("last"))
    dcp.save(large_state(1), storage_writer=writer)
    spill.server.once("HeadObject", Fault.error(503, "SlowDown"))
    writer.wait_committed(LONG)
    spill.server.rule = refuse_all
    with pytest.raises(TimeoutError, match="HeadObject"):
        writer.wait_committed(0.2)
    spill.server.rule = allow_all
    spill.save_to_s3(spill.url("last"), small_state(2), overwrite=True)
    with pytest.raises(errors.CheckpointError, match="was replaced"):
        writer.wait_committed()


# --- loads take what lies on this host's disk, if it is right ------------------------------------------


@pytest.fixture
def both(spill: Spill) -> Spill:
    """step-1 is on S3, and its object on the disk, too: its drain has not removed it yet."""
    spill.save(spill.url("step-1"), small_state(1))
    path, aside = spill.data().path, spill.path / "aside"
    shutil.copytree(path, aside)
    spill.drain()
    aside.rename(path)
    return spill


def fetched(spill: Spill) -> bool:
    """Whether a load of step-1, which is right, takes data from S3."""
    seen: list[str] = []

    def note(request: Any) -> None:
        if request.operation == "GetObject" and request.key.endswith(".distcp"):
            seen.append(request.key)

    spill.server.rule = note
    assert_complete(spill.url("step-1"), small_state(1))
    spill.server.rule = allow_all
    return bool(seen)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "flipped byte": damage,
    "unreadable": lambda path: (path.unlink(), path.mkdir()),
    "cut off": lambda path: os.truncate(path, path.stat().st_size - 1),
    "longer": lambda path: os.truncate(path, path.stat().st_size + 1),
    "gone": Path.unlink,
}


@pytest.mark.parametrize("how", DAMAGES)
def test_what_is_on_this_host_is_not_fetched_unless_it_is_damaged(both: Spill, how: str) -> None:
    assert not fetched(both)
    [key] = both.list_data(both.url("step-1"))
    DAMAGES[how](both.data().path / "object-0")
    local = LocalObjects(MemoryStore(), Settings(spill_dir=str(both.path)), parse_url(both.url("step-1")))
    with pytest.raises(errors.ObjectNotFoundError):  # from the store: not even for a moment
        local.read(key, 0, memoryview(bytearray(10)))
    assert sum(local.sizes) == 0
    assert fetched(both)


def test_a_copy_is_read_until_it_is_distrusted_unless_a_version_is_asked_for(both: Spill) -> None:
    [key] = both.list_data(both.url("step-1"))
    memory, far, near = bytearray(4), MemoryStore(), (both.data().path / "object-0").read_bytes()[1:5]
    far.put(key, b"01234")
    local = LocalObjects(far, Settings(spill_dir=str(both.path)), parse_url(both.url("step-1")))
    bounded = local.within(Limit())
    bounded.read(key, 1, memoryview(memory))
    assert (bytes(memory), sum(local.sizes)) == (near, 4)
    bounded.read(key, 1, memoryview(memory), far.head(key).etag)
    assert bytes(memory) == b"1234"
    bounded.distrust(key)
    bounded.read(key, 0, memoryview(memory))
    assert bytes(memory) == b"0123"


def names(spill: Spill, **options: Any) -> tuple[str, str] | None:
    found = latest(spill.root, **options)
    return None if found is None else (found.name, found.state)


def test_a_checkpoint_that_waits_on_this_host_can_be_resumed_from_if_asked_unless_it_is_damaged(spill: Spill) -> None:
    url = spill.url("step-2")
    spill.save_to_s3(spill.url("step-1"), small_state(3))
    spill.server.rule = refuse_all
    spill.save(url, small_state(4))
    assert names(spill, include_uncommitted=True) == ("step-2", "local")  # S3 is still away
    assert_loads(url, small_state(4), include_uncommitted=True)
    spill.server.rule = refuse_writes
    assert names(spill) == ("step-1", "committed")
    assert names(spill, include_uncommitted=True) == ("step-2", "local")
    failure(lambda: load(small_state(0), url), errors.CheckpointNotFoundError)
    damage(spill.commit().path / "metadata", 100)
    assert names(spill, include_uncommitted=True) == ("step-1", "committed")
    failure(lambda: load(small_state(0), url, include_uncommitted=True), match="no checkpoint")


def test_the_newer_of_a_waiting_checkpoint_and_that_on_s3_is_loaded(spill: Spill) -> None:
    url = spill.url("last")
    spill.save(url, small_state(1), overwrite=True)
    spill.save_to_s3(url, small_state(2), overwrite=True)
    assert names(spill, include_uncommitted=True) == ("last", "committed")
    assert_loads(url, small_state(2), include_uncommitted=True)
    spill.server.rule = refuse_all  # then the older one is all there is
    assert_loads(url, small_state(1), include_uncommitted=True)
