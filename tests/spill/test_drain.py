"""From the spill directory to S3: what is complete becomes a checkpoint, whatever S3 does meanwhile."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_s3.checkpoint.commit import Commit, publish
from dcp_s3.checkpoint.commit_state import Previous
from dcp_s3.memory import Piece
from dcp_s3.s3.store import S3Store
from dcp_s3.settings import Settings, resolve_settings, stored_settings
from dcp_s3.spill import drain as drain_module
from dcp_s3.spill.drain import Drainer, DrainReport
from dcp_s3.spill.journal import Journal
from dcp_s3.spill.store import SpilledSave, SpillStore
from tests.faulty import BUCKET
from tests.memory_s3 import Fault
from tests.spill.making import (
    MIB,
    PART,
    Spill,
    allow_all,
    assert_complete,
    begin_multipart,
    large_state,
    make_state,
    refuse_all,
    small_state,
)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

# --- complete --------------------------------------------------------------------------------------------


def test_a_drained_checkpoint_is_bit_identical(anywhere: Spill) -> None:
    spill, url, state = anywhere, anywhere.url("step-1"), make_state(1)
    spill.save(url, state)
    assert spill.list(url) == []
    size = spill.data().journal.size
    assert spill.drain() == DrainReport(uploaded=size, committed=[url])
    assert_complete(url, state)
    spill.assert_empty()
    assert spill.drain() == DrainReport()


def test_what_an_earlier_version_spilled_is_drained(spill: Spill) -> None:
    """Its journals hold settings that are gone since, and ours none that it does not know."""
    spill.save(spill.url("step-1"), small_state(1))
    gone = {
        "buckets_per_rank": 4, "read_gap": 262144, "read_waste": 0.0025, "load_buffers": 536870912,
        "hedge_percentile": 95.0, "hedge_min_delay": 0.2, "prefix_spread": 0, "staging_generations": 2,
        "merge_ranks": True, "load_sharing": True, "allow_dtype_cast": True, "spill_keep": 2**30,
    }  # fmt: skip
    for save in (spill.data(), spill.commit()):
        save.update(replace(save.journal, settings={**save.journal.settings, **gone}))
    spill.drained(spill.url("step-1"), small_state(1))


def test_settings_that_another_version_stored_are_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DCP_S3_CHECKSUM", "crc32c")  # as the process that stored them had it
    changed = resolve_settings({"requester_pays": True, "max_bandwidth": "100MiB", "checksum": "auto"})
    other = {"connect_timeout": 5.0, "of_a_later_version": 1, "checksum": "crc32c"}
    assert stored_settings({**changed.model_dump(), **other}) == changed


def test_checkpoints_of_several_runs_and_buckets_are_drained_oldest_first(spill: Spill) -> None:
    spill.server.s3.create_bucket("other-bucket")
    urls = [spill.url("step-1"), "s3://other-bucket/another-run/step-7", spill.url("step-0")]
    for number, url in enumerate(urls):
        spill.save(url, small_state(number))
    assert spill.drain().committed == urls
    for number, url in enumerate(urls):
        assert_complete(url, small_state(number))
    spill.assert_empty()


def test_a_drain_that_is_stopped_ends_before_the_next_object(spill: Spill) -> None:
    url, state = spill.url("step-1"), {"a": torch.randn(1000), "b": torch.randn(1000)}
    spill.save(url, state, separate=["a"], max_objects=2)
    assert len(spill.data().journal.objects) == 2
    stop = threading.Event()
    report = spill.drain(stop=stop, on_progress=lambda _: stop.set())
    assert len(spill.data().journal.objects) == 1
    assert report.uploaded == spill.data().journal.size
    spill.server.s3.reset_counters()
    again = spill.drain(stop=stop)
    assert not spill.server.s3.counters.requests
    for each in (report, again):
        assert list(each.waiting.values()) == ["the drain was stopped"] * 2
    spill.drained(url, state)


# --- uploads of earlier processes ------------------------------------------------------------------------


def test_multipart_uploads_of_an_object_that_are_open_are_aborted(anywhere: Spill) -> None:
    spill, url, state = anywhere, anywhere.url("step-1"), large_state(1)
    spill.save(url, state)
    key, data = spill.key(), (spill.data().path / "object-0").read_bytes()
    for size in (PART, 2 * PART):
        begin_multipart(spill.bucket, key, data[:size])
    assert spill.drain().committed == [url]
    assert_complete(url, state)
    assert list(spill.bucket.uploads(key)) == []


@pytest.mark.servers("memory", "rgw")
@pytest.mark.parametrize("checksum", ["none", "crc64nvme"])
def test_a_checkpoint_with_another_checksum_is_drained_too(anywhere: Spill, checksum: str) -> None:
    spill, url, state = anywhere, anywhere.url("step-1"), large_state(1)
    dcp.save(state, storage_writer=spill.writer(url, {"durability": "local", "checksum": checksum}))
    store = S3Store(spill.bucket_name, Settings(checksum=checksum))
    begin_multipart(store, spill.key(), (spill.data().path / "object-0").read_bytes()[:PART])
    spill.drained(url, state)


def test_an_object_that_is_complete_already_is_not_sent_again(spill: Spill) -> None:
    url, state = spill.url("step-1"), large_state(1)
    spill.save(url, state)
    path = spill.data().path / "object-0"
    spill.bucket.put_stream(spill.key(), path.stat().st_size, [Piece.of(path.read_bytes())])
    path.unlink()  # so it goes when a drain dies between the upload and its journal
    spill.server.s3.reset_counters()
    spill.drained(url, state)
    counted = spill.server.s3.counters.requests
    assert not {"UploadPart", "CreateMultipartUpload"} & set(counted)
    assert counted["PutObject"] == 2, "the manifest and .metadata"


def test_an_object_of_other_bytes_is_sent_again(spill: Spill) -> None:
    """S3 applied the PUT of the save, but said nothing; what is on disk has other bytes of the same number."""
    url, state = spill.url("step-1"), small_state(1)
    spill.save(url, state)
    spill.bucket.put(spill.key(), bytes((spill.data().path / "object-0").stat().st_size))
    spill.drained(url, state)


def test_a_commit_whose_drain_died_before_it_could_say_so_is_not_done_twice(spill: Spill) -> None:
    url, state = spill.url("step-1"), small_state(1)
    spill.save(url, state)
    commit = spill.commit()
    kept = {path.name: path.read_bytes() for path in commit.path.iterdir()}
    assert spill.drain().committed == [url]
    commit.path.mkdir()
    for name, data in kept.items():
        (commit.path / name).write_bytes(data)
    assert spill.drain() == DrainReport()
    assert_complete(url, state)
    spill.assert_empty()


# --- S3 changes meanwhile --------------------------------------------------------------------------------


def test_without_an_object_or_with_one_of_another_size_it_waits_and_is_never_visible(
    spill: Spill, tmp_path: Path
) -> None:
    url = spill.url("step-1")
    spill.save(url, small_state(1))
    commit, data, key = spill.commit(), spill.data(), spill.key()
    data.path.rename(tmp_path / "aside")
    for data in (None, b"short", bytes(100_000)):
        if data is not None:
            spill.bucket.put(key, data)
        report = spill.drain()
        assert report.committed == []
        assert "1 of 1 objects are not on S3" in report.waiting[commit.name]
        assert not spill.is_visible(url)
    spill.bucket.delete([key])  # pruned
    assert list(spill.drain().waiting) == [commit.name]


def test_an_older_spilled_save_does_not_replace_a_newer_one(spill: Spill) -> None:
    url = spill.url("step-1")
    spill.save(url, small_state(1), overwrite=True)
    late = spill.commit()
    spill.save_to_s3(url, small_state(2), overwrite=True)
    report = spill.drain()
    assert report.committed == []
    assert "newer" in report.refused[late.name]
    assert_complete(url, small_state(2))


def test_of_two_spilled_saves_to_one_url_the_newer_wins(spill: Spill) -> None:
    url = spill.url("step-1")
    for number in (1, 2):
        spill.save(url, small_state(number), overwrite=True)
    assert spill.drain().committed == [url, url]
    assert_complete(url, small_state(2))
    assert len(spill.list_data(url)) == 1, "the older one's is gone"
    spill.assert_empty()


def test_a_spilled_save_replaces_the_older_checkpoint_that_it_is_to_overwrite(anywhere: Spill) -> None:
    url = anywhere.url("step-1")
    anywhere.save_to_s3(url, small_state(1))
    anywhere.save(url, small_state(2), overwrite=True)
    assert_complete(url, small_state(1))
    anywhere.drained(url, small_state(2))
    assert len(anywhere.list_data(url)) == 1


def test_a_checkpoint_of_somebody_else_stays(anywhere: Spill) -> None:
    url = anywhere.url("step-1")
    anywhere.save(url, small_state(1))
    late = anywhere.commit()
    anywhere.save_to_s3(url, small_state(2))
    report = anywhere.drain()
    assert report.committed == []
    assert "a committed checkpoint is at" in report.refused[late.name]
    assert_complete(url, small_state(2))
    assert len(anywhere.list_data(url)) == 2, "ours stay until they are pruned"


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_commit_that_s3_carries_out_late_is_ours_and_keeps_its_objects(spill: Spill, overwrite: bool) -> None:
    """The writer gave up on its PUT of ``.metadata``; S3 did not, and applies it while the drain looks."""
    url, state = spill.url("step-1"), small_state(1)
    spill.save(url, state, overwrite=overwrite)
    save = spill.commit()
    spilled = save.journal.commit
    assert spilled is not None
    really, late = drain_module.is_committed, [*save.read_commit(spilled)]

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


# --- S3 refuses ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "code",
    [(403, "AccessDenied"), (403, "SignatureDoesNotMatch"), (404, "NoSuchBucket"), (503, "SlowDown"), (501, "NotImpl")],
)
def test_whatever_s3_answers_nothing_is_lost(spill: Spill, code: tuple[int, str]) -> None:
    url = spill.url("step-1")
    spill.save(url, small_state(1))
    spill.server.rule = lambda _: Fault.error(*code)
    report = spill.drain(patience=0.1)
    assert len(report.waiting) == 2
    assert report == DrainReport(waiting=report.waiting)
    spill.server.rule = allow_all
    spill.drained(url, small_state(1))


REQUESTS = [
    ("CreateMultipartUpload", ""), ("UploadPart", ""), ("CompleteMultipartUpload", ""), ("PutObject", "manifest"),
    ("PutObject", ".metadata"), ("ListObjectsV2", ""),
]  # fmt: skip


@pytest.mark.parametrize(("operation", "key"), REQUESTS)
@pytest.mark.parametrize("applied", [False, True])
def test_a_drain_goes_on_where_a_request_failed(spill: Spill, operation: str, key: str, applied: bool) -> None:
    url, state = spill.url("step-1"), large_state(1)
    spill.save(url, state)
    fault = Fault.apply_then_reset() if applied else Fault.error(400, "InvalidRequest")
    seen = spill.server.once(operation, fault, key=key)
    spill.drain(patience=0)
    spill.drain()
    assert seen
    assert_complete(url, state)
    spill.assert_empty()


@pytest.mark.parametrize("answer", [(403, "AccessDenied"), (501, "NotImplemented")])
def test_without_a_list_of_multipart_uploads_everything_is_drained(spill: Spill, answer: tuple[int, str]) -> None:
    spill.save(spill.url("step-1"), large_state(1))
    spill.server.rule = lambda request: Fault.error(*answer) if request.operation == "ListMultipartUploads" else None
    assert spill.drain().committed == [spill.url("step-1")]
    assert_complete(spill.url("step-1"), large_state(1))


def test_a_refusal_of_the_commit_that_does_not_hold_sets_nothing_aside(spill: Spill) -> None:
    """A proxy says 412, and no checkpoint is there: once, and whenever it is asked."""
    state, refusal = small_state(1), Fault.error(412, "PreconditionFailed")
    spill.save(spill.url("step-1"), state)
    seen = spill.server.once("PutObject", refusal, key=".metadata")
    spill.drained(spill.url("step-1"), state)
    assert seen
    spill.save(spill.url("step-2"), state)
    commit = spill.commit()
    spill.server.rule = lambda request: refusal if ".metadata" in request.key and request.method == "PUT" else None
    report = spill.drain()
    assert report.refused == {}
    assert "a proxy" in report.waiting[commit.name]
    spill.server.rule = allow_all
    spill.drained(spill.url("step-2"), state)


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
def test_a_drain_that_fails_leaves_no_file_open(spill: Spill) -> None:
    spill.save(spill.url("step-1"), large_state(1))
    spill.server.rule = lambda request: refuse_all(request) if request.operation == "UploadPart" else None
    for _ in range(2):
        assert spill.drain(patience=0.05).waiting
    with open("/proc/self/maps") as maps:
        assert not [line for line in maps if "object-0" in line]
    names = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    assert not [name for name in names if "object-0" in name]


# --- saves that end while the drain runs -----------------------------------------------------------------


class ScannedBefore(SpillStore):
    """Something happens between the scan and what the drain does with it, as if an upload had taken long."""

    then: Callable[[], None] = staticmethod(lambda: None)

    def scan(self) -> list[SpilledSave]:
        found = super().scan()
        self.then()
        return found


@pytest.mark.parametrize("how", ["is sealed", "ends on S3"])
def test_a_save_that_ends_after_the_scan_is_not_given_up(spill: Spill, how: str) -> None:
    store, url = ScannedBefore(spill.path), spill.url("step-1")
    spill.bucket.put("run/step-1/x", b"another object of the save")
    with store.begin(Journal(url, "1", 1.0, Settings().model_dump(), keys=("run/step-1/x",)), "0") as writer:

        def end() -> None:
            if how == "is sealed":
                writer.seal(writer.save.journal)
            writer.__exit__()

        store.then = end
        assert Drainer(store).run() == DrainReport()
    assert spill.list(url) == ["run/step-1/x"]


def test_a_journal_that_comes_back_after_a_power_failure_costs_no_committed_checkpoint(spill: Spill) -> None:
    """Its removal was not flushed when the save ended on S3."""
    url = spill.url("step-1")
    spill.save_to_s3(url, small_state(1))
    keys = tuple(spill.list_data(url))
    with spill.store.begin(Journal(url, "1", 1.0, Settings().model_dump(), keys=keys), "0") as writer:
        (writer.save.path / "writer.lock").unlink()
        spill.drain()
    assert_complete(url, small_state(1))


def test_a_save_whose_process_died_leaves_neither_objects_nor_uploads(spill: Spill) -> None:
    url, key = spill.url("step-1"), "run/step-1/__0_0-ab.distcp"
    spill.bucket.put("run/step-1/__0_1-ab.distcp", b"x")
    begin_multipart(spill.bucket, key, bytes(MIB))
    keys = (key, "run/step-1/__0_1-ab.distcp")
    with spill.store.begin(Journal(url, "1", 1.0, Settings().model_dump(), keys=keys), "0") as writer:
        writer.close()
        assert spill.drain().discarded == [writer.save.name]
    assert spill.list(url) == []
    assert spill.server.s3.open_uploads(BUCKET) == []
