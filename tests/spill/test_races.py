"""Requests that come late, directories that lack something, saves that meet at one URL: what S3 shows stays whole."""

from __future__ import annotations

import errno
import gc
import os
import threading
import weakref
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from dcp_s3 import S3StorageReader, S3StorageWriter, latest
from dcp_s3.checkpoint.commit import Commit, publish
from dcp_s3.checkpoint.commit_state import Previous
from dcp_s3.errors import CheckpointError, CheckpointExistsError, SpillError, TransferError
from dcp_s3.save import save as save_module
from dcp_s3.spill import background
from dcp_s3.spill import drain as drain_module
from dcp_s3.spill import saving as saving_module
from dcp_s3.spill.background import drain_in_background, stop_draining, wait_until_drained
from dcp_s3.stage.buffers import HostBuffer
from tests.faulty import FaultyServer
from tests.memory_s3 import Fault
from tests.spill.making import MIB, Spill, large_state
from tests.spill.test_outage import assert_complete, refuse_all

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def cause_of(operation: Any) -> BaseException:
    with pytest.raises(CheckpointException) as caught:
        operation()
    cause: BaseException = caught.value.failures[0][0]
    return cause


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor)


# --- the commit ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_commit_that_s3_carries_out_late_is_ours_and_keeps_its_objects(faulty_spill: Spill, overwrite: bool) -> None:
    """The writer gave up on its PUT of ``.metadata``; S3 did not, and applies it while the drain looks."""
    spill, url, state = faulty_spill, faulty_spill.url("step-1"), large_state(1)
    spill.save(url, state, overwrite=overwrite)
    save = spill.commit()
    spilled = save.journal.commit
    assert spilled is not None
    really = drain_module.is_committed
    late = [*save.read_commit(spilled)]

    def look(bucket: Any, identity: Any) -> bool:
        found = really(bucket, identity)
        if late:
            publish(bucket, Commit(identity, *late, spilled.objects), Previous())
            late.clear()
        return found

    with mock.patch.object(drain_module, "is_committed", look):
        report = spill.drain()
    assert (report.committed, report.refused) == ([url], {})
    assert_complete(url, state)
    spill.assert_empty()


def test_the_drain_of_an_earlier_save_does_not_make_the_next_one_fail(
    faulty_spill: Spill, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a restart: the new save looks at what it overwrites, then the old one is committed, then the new one is."""
    spill, url = faulty_spill, faulty_spill.url("last")
    spill.save_to_s3(url, large_state(0), overwrite=True)
    spill.save(url, large_state(1), overwrite=True)
    write = save_module.write_buckets

    def write_after_the_drain(*arguments: Any, **options: Any) -> Any:
        assert spill.drain().committed == [url]
        return write(*arguments, **options)

    monkeypatch.setattr(save_module, "write_buckets", write_after_the_drain)
    writer = S3StorageWriter(url, overwrite=True)
    dcp.save(large_state(2), storage_writer=writer)
    writer.wait_committed(10)
    assert_complete(url, large_state(2))
    assert len([key for key in spill.list(url) if key.endswith(".distcp")]) == 1


def test_a_save_to_a_url_for_which_one_waits_is_refused(faulty_spill: Spill) -> None:
    spill, url, state = faulty_spill, faulty_spill.url("step-1"), large_state(1)
    spill.save(url, state)
    cause = cause_of(lambda: spill.save(url, large_state(2)))
    assert isinstance(cause, CheckpointExistsError)
    assert str(spill.path) in str(cause)
    assert spill.drain().committed == [url]
    assert_complete(url, state)


def test_a_commit_that_neither_s3_nor_the_disk_takes_names_both(faulty_spill: Spill, faulty: FaultyServer) -> None:
    url = faulty_spill.url("step-1")
    faulty.rule = lambda request: refuse_all(request) if "manifest" in request.key else None
    full = SpillError("No space left")
    with mock.patch.object(saving_module, "spill_commit", side_effect=full):
        cause = cause_of(lambda: dcp.save(large_state(1), storage_writer=S3StorageWriter(url)))
    assert isinstance(cause, TransferError)
    assert "SlowDown" in str(cause)
    assert "No space left" in str(cause)


# --- S3 says no ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("answer", [(403, "AccessDenied"), (501, "NotImplemented")])
def test_without_a_list_of_multipart_uploads_everything_is_drained(
    faulty_spill: Spill, faulty: FaultyServer, answer: tuple[int, str]
) -> None:
    spill, url, state = faulty_spill, faulty_spill.url("step-1"), large_state(1)
    spill.save(url, state)
    refused = ("ListMultipartUploads", "ListParts")
    faulty.rule = lambda request: Fault.error(*answer) if request.operation in refused else None
    assert spill.drain().committed == [url]
    assert_complete(url, state)
    spill.assert_empty()


def test_an_object_that_came_out_otherwise_the_second_time_is_sent_again(
    faulty_spill: Spill, faulty: FaultyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S3 applied the PUT of the first, but said nothing; what is on disk has other bytes of the same number."""
    monkeypatch.setattr(saving_module, "wait_until_drained", lambda *_, **__: None)
    spill, url = faulty_spill, faulty_spill.url("step-1")
    state = {"counter": Counter()}
    faulty.rule = lambda request: Fault.apply_then_reset() if request.operation == "PutObject" else None
    dcp.save(state, storage_writer=S3StorageWriter(url))
    faulty.rule = lambda _: None
    assert spill.drain().committed == [url]
    loaded: dict[str, Any] = {"counter": None}
    dcp.load(loaded, storage_reader=S3StorageReader(url, weights_only=False))
    assert loaded["counter"].number > 1000


class Counter:
    """Is pickled to other bytes each time."""

    number = 1000

    def __getstate__(self) -> int:
        Counter.number += 1
        return Counter.number

    def __setstate__(self, number: int) -> None:
        self.number = number


def test_who_waits_hears_why(faulty_spill: Spill, faulty: FaultyServer) -> None:
    spill, url = faulty_spill, faulty_spill.url("step-1")
    spill.save(url, large_state(1))
    faulty.rule = lambda _: Fault.error(403, "AccessDenied")
    looked = threading.Event()
    run = drain_module.Drainer.run

    def run_and_say(self: Any) -> Any:
        report = run(self)
        looked.set()
        return report

    with mock.patch.object(background.Drainer, "run", run_and_say):
        drain_in_background(spill.store, patience=1)
        try:
            assert looked.wait(30)
            with pytest.raises(TimeoutError, match="s3:GetObject"):
                wait_until_drained(spill.store, spill.data(), timeout=1)
        finally:
            stop_draining()


# --- the directory ---------------------------------------------------------------------------------------


def test_a_journal_that_can_not_be_read_now_waits(faulty_spill: Spill) -> None:
    spill, url, state = faulty_spill, faulty_spill.url("step-1"), large_state(1)
    spill.save(url, state)
    data = spill.data()
    read = type(data.path).read_bytes

    def fail(path: Any) -> bytes:
        if path == data.path / "journal":
            raise OSError(errno.EMFILE, "Too many open files")
        return bytes(read(path))

    with mock.patch.object(type(data.path), "read_bytes", fail):
        report = spill.drain()
    assert report.refused == {}
    assert "Too many open files" in report.waiting[data.name]
    assert spill.drain().committed == [url]
    assert_complete(url, state)


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
def test_a_drain_that_fails_leaves_no_file_open(faulty_spill: Spill, faulty: FaultyServer) -> None:
    spill, url = faulty_spill, faulty_spill.url("step-1")
    spill.save(url, large_state(1))
    faulty.rule = lambda request: refuse_all(request) if request.operation == "UploadPart" else None
    for _ in range(2):
        assert spill.drain(patience=0.05).waiting
    with open("/proc/self/maps") as maps:
        assert not [line for line in maps if "object-0" in line]
    names = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    assert not [name for name in names if "object-0" in name]


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("operation", ["CreateMultipartUpload", "UploadPart", "CompleteMultipartUpload"])
def test_a_state_that_was_spilled_is_let_go_of(
    faulty_spill: Spill, faulty: FaultyServer, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    monkeypatch.setattr(saving_module, "wait_until_drained", lambda *_, **__: None)
    lease = HostBuffer(12 * MIB, "private").lease()
    alive = weakref.ref(lease)
    state = {"large": torch.frombuffer(lease, dtype=torch.float32).fill_(1)}
    del lease
    faulty.rule = lambda request: refuse_all(request) if request.operation == operation else None
    dcp.save(state, storage_writer=S3StorageWriter(faulty_spill.url("step-1")))
    assert faulty_spill.data().journal.objects
    del state
    assert alive() is None


def test_a_forked_child_can_drain_though_the_lock_was_held(faulty_spill: Spill) -> None:
    with background._lock:
        child = os.fork()
        if not child:
            drain_in_background(faulty_spill.store, patience=1)
            os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status == 0


# --- who waits, and who reads ----------------------------------------------------------------------------


def test_a_save_that_was_replaced_is_not_waited_for(faulty_spill: Spill) -> None:
    spill, url = faulty_spill, faulty_spill.url("last")
    writer = S3StorageWriter(url, overwrite=True)
    dcp.save(large_state(1), storage_writer=writer)
    spill.save_to_s3(url, large_state(2), overwrite=True)
    with pytest.raises(CheckpointError, match="was replaced"):
        writer.wait_committed()


def test_who_waits_goes_on_while_s3_refuses(faulty_spill: Spill, faulty: FaultyServer) -> None:
    url = faulty_spill.url("step-1")
    writer = S3StorageWriter(url)
    dcp.save(large_state(1), storage_writer=writer)
    faulty.once("HeadObject", Fault.error(503, "SlowDown"))
    writer.wait_committed(60)
    faulty.rule = refuse_all
    with pytest.raises(TimeoutError, match="HeadObject"):
        writer.wait_committed(0.2)


def test_the_newer_of_a_waiting_checkpoint_and_that_on_s3_is_loaded(faulty_spill: Spill, faulty: FaultyServer) -> None:
    spill, url, older, newer = faulty_spill, faulty_spill.url("last"), large_state(1), large_state(2)
    spill.save(url, older, overwrite=True)
    spill.save_to_s3(url, newer, overwrite=True)
    found = latest(spill.root, include_uncommitted=True)
    assert found is not None
    assert found.state == "committed"
    loaded = large_state(0)
    dcp.load(loaded, storage_reader=S3StorageReader(url, include_uncommitted=True))
    assert_same(loaded, newer)
    faulty.rule = refuse_all  # then the older one is all there is
    dcp.load(loaded, storage_reader=S3StorageReader(url, include_uncommitted=True))
    assert_same(loaded, older)


def test_a_copy_that_the_disk_can_not_read_comes_from_s3(faulty_spill: Spill, monkeypatch: pytest.MonkeyPatch) -> None:
    spill, url, state = faulty_spill, faulty_spill.url("step-1"), large_state(1)
    monkeypatch.setenv("DCP_S3_SPILL_KEEP", "1GiB")
    spill.save(url, state)
    assert spill.drain().committed == [url]
    for name in ("pread", "preadv"):
        with mock.patch.object(os, name, side_effect=OSError(errno.EIO, "Input/output error")):
            loaded = {"large": torch.zeros(3 * MIB)}
            dcp.load(loaded, storage_reader=S3StorageReader(url))
            assert_same(loaded, state)
