"""S3 refuses, or changes, while the spill directory is drained: nothing is lost, and nothing half done is visible."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp

from dcp_s3 import S3StorageWriter
from dcp_s3.errors import CheckpointError
from dcp_s3.s3.client import close_clients
from dcp_s3.settings import Settings
from dcp_s3.spill.background import wait_until_drained
from dcp_s3.spill.drain import Drainer, DrainReport
from dcp_s3.spill.journal import Journal
from dcp_s3.spill.store import SpilledSave, SpillStore
from tests.faulty import BUCKET, FaultyServer
from tests.memory_s3 import Fault
from tests.spill.making import Spill, damage, large_state
from tests.spill.test_outage import assert_complete, refuse_all

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

# --- S3 changes meanwhile --------------------------------------------------------------------------------


def test_a_checkpoint_that_is_pruned_meanwhile_waits_and_is_never_visible(faulty_spill: Spill, tmp_path: Path) -> None:
    spill = faulty_spill
    url = spill.url("step-1")
    spill.save(url, large_state(1))
    commit, aside = spill.commit(), tmp_path / "aside"
    commit.path.rename(aside)
    spill.drain()
    (key,) = spill.list(url)
    spill.bucket.delete([key])
    aside.rename(commit.path)
    for _ in range(2):
        report = spill.drain()
        assert report.committed == []
        assert "1 of 1 objects are not on S3" in report.waiting[commit.name]
        assert not spill.is_visible(url)


def test_an_object_of_another_size_is_no_object_of_the_checkpoint(faulty_spill: Spill, tmp_path: Path) -> None:
    spill = faulty_spill
    url = spill.url("step-1")
    spill.save(url, large_state(1))
    commit, key, aside = spill.commit(), spill.key(), tmp_path / "aside"
    spill.data().path.rename(aside)
    spill.bucket.put(key, b"short")
    assert list(spill.drain().waiting) == [commit.name]
    assert not spill.is_visible(url)


def test_an_older_spilled_save_does_not_replace_a_newer_one(faulty_spill: Spill) -> None:
    spill = faulty_spill
    url, older, newer = spill.url("step-1"), large_state(1), large_state(2)
    spill.save(url, older, overwrite=True)
    late = spill.commit()
    spill.save_to_s3(url, newer, overwrite=True)
    report = spill.drain()
    assert report.committed == []
    assert "newer" in report.refused[late.name]
    assert_complete(url, newer)


def test_of_two_spilled_saves_to_one_url_the_newer_wins(faulty_spill: Spill) -> None:
    spill = faulty_spill
    url, older, newer = spill.url("step-1"), large_state(1), large_state(2)
    spill.save(url, older, overwrite=True)
    spill.save(url, newer, overwrite=True)
    assert spill.drain().committed == [url, url]
    assert_complete(url, newer)
    data = [key for key in spill.list(url) if key.endswith(".distcp")]
    assert len(data) == 1, "the older one's is gone"
    spill.assert_empty()


def test_a_spilled_save_replaces_the_older_checkpoint_that_it_is_to_overwrite(spill: Spill) -> None:
    url, older, newer = spill.url("step-1"), large_state(1), large_state(2)
    spill.save_to_s3(url, older)
    spill.save(url, newer, overwrite=True)
    assert_complete(url, older)
    assert spill.drain().committed == [url]
    assert_complete(url, newer)
    assert len([key for key in spill.list(url) if key.endswith(".distcp")]) == 1
    spill.assert_empty()


def test_a_checkpoint_of_somebody_else_stays(spill: Spill) -> None:
    url, ours, theirs = spill.url("step-1"), large_state(1), large_state(2)
    spill.save(url, ours)
    late = spill.commit()
    spill.save_to_s3(url, theirs)
    report = spill.drain()
    assert report.committed == []
    assert "a committed checkpoint is at" in report.refused[late.name]
    assert_complete(url, theirs)
    assert len([key for key in spill.list(url) if key.endswith(".distcp")]) == 2, "ours stay until they are pruned"


# --- S3 refuses ------------------------------------------------------------------------------------------


@pytest.mark.servers("memory", "moto", "rgw")
def test_with_a_bucket_that_is_missing_all_waits_and_nothing_is_lost(spill: Spill) -> None:
    url, state = spill.url("step-1"), large_state(1)
    spill.save(url, state)
    saves = spill.store.scan()
    missing = url.replace(spill.bucket_name, f"no-such-bucket-{spill.bucket_name[-8:]}")
    for save in saves:
        save.update(replace(save.journal, url=missing))
    report = spill.drain()
    assert set(report.waiting) == {save.name for save in saves}
    assert all("NoSuchBucket" in reason for reason in report.waiting.values())
    for save in spill.store.scan():
        save.update(replace(save.journal, url=url))
    assert spill.drain().committed == [url]
    assert_complete(url, state)


@pytest.mark.servers("rclone", "rgw")
def test_with_wrong_credentials_all_waits_and_nothing_is_lost(spill: Spill, monkeypatch: pytest.MonkeyPatch) -> None:
    url, state = spill.url("step-1"), large_state(1)
    spill.save(url, state)
    with monkeypatch.context() as wrong:
        wrong.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
        close_clients()
        report = spill.drain()
    assert len(report.waiting) == 2
    assert not report.refused
    assert all("credentials" in reason for reason in report.waiting.values())
    close_clients()
    assert spill.drain().committed == [url]
    assert_complete(url, state)


@pytest.mark.parametrize("code", [(403, "AccessDenied"), (403, "ExpiredToken"), (503, "SlowDown"), (501, "NotImpl")])
def test_whatever_s3_answers_nothing_is_lost(
    faulty_spill: Spill, faulty: FaultyServer, code: tuple[int, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    spill, url, state = faulty_spill, faulty_spill.url("step-1"), large_state(1)
    spill.save(url, state)
    faulty.rule = lambda _: Fault.error(*code)
    report = spill.drain(patience=0.1)
    assert len(report.waiting) == 2
    assert report == DrainReport(waiting=report.waiting)
    faulty.rule = lambda _: None
    assert spill.drain().committed == [url]
    assert_complete(url, state)


@pytest.mark.parametrize(
    ("operation", "key"),
    [
        ("CreateMultipartUpload", ""),
        ("UploadPart", ""),
        ("CompleteMultipartUpload", ""),
        ("PutObject", "manifest"),
        ("PutObject", ".metadata"),
        ("ListObjectsV2", ""),
    ],
)
@pytest.mark.parametrize("applied", [False, True])
def test_a_drain_goes_on_where_a_request_failed(
    faulty_spill: Spill, faulty: FaultyServer, operation: str, key: str, applied: bool
) -> None:
    spill, url, state = faulty_spill, faulty_spill.url("step-1"), large_state(1)
    spill.save(url, state)
    fault = Fault.apply_then_reset() if applied else Fault.error(400, "InvalidRequest")
    seen = faulty.once(operation, fault, key=key)
    spill.drain(patience=0)
    spill.drain()
    assert seen
    assert_complete(url, state)
    spill.assert_empty()
    assert faulty.s3.open_uploads(BUCKET) == []


# --- saves that end while the drain runs -----------------------------------------------------------------


class ScannedBefore(SpillStore):
    """Something happens between the scan and what the drain does with it, as if an upload had taken long."""

    then: Callable[[], None] = staticmethod(lambda: None)

    def scan(self) -> list[SpilledSave]:
        found = super().scan()
        self.then()
        return found


def test_a_save_that_is_sealed_after_the_scan_is_not_given_up(faulty_spill: Spill) -> None:
    spill, store = faulty_spill, ScannedBefore(faulty_spill.path)
    url = spill.url("step-1")
    spill.bucket.put("run/step-1/x", b"another object of the save")
    with store.begin(Journal(url, "1", 1.0, Settings().model_dump(), keys=("run/step-1/x",)), "0") as writer:

        def seal() -> None:
            writer.seal(writer.save.journal)
            writer.__exit__()

        store.then = seal
        report = Drainer(store).run()
    assert report == DrainReport()
    assert spill.list(url) == ["run/step-1/x"]


def test_a_save_that_ends_on_s3_after_the_scan_stays_there(faulty_spill: Spill, faulty: FaultyServer) -> None:
    spill, store = faulty_spill, ScannedBefore(faulty_spill.path)
    url, state = spill.url("step-1"), large_state(1)
    under_way, go = threading.Event(), threading.Event()

    def hold(request: Any) -> None:
        if request.operation == "UploadPart":
            under_way.set()
            go.wait(60)

    faulty.rule = hold
    future: Any = dcp.async_save(state, storage_writer=S3StorageWriter(url))
    assert under_way.wait(60)

    def finish() -> None:
        go.set()
        future.result(60)

    store.then = finish
    report = Drainer(store).run()
    assert_complete(url, state)
    assert report.discarded == []


def test_a_journal_that_comes_back_after_a_power_failure_costs_no_committed_checkpoint(faulty_spill: Spill) -> None:
    """Its removal was not flushed when the save ended on S3."""
    spill, url, state = faulty_spill, faulty_spill.url("step-1"), large_state(1)
    spill.save_to_s3(url, state)
    keys = tuple(key for key in spill.list(url) if key.endswith(".distcp"))
    with spill.store.begin(Journal(url, "1", 1.0, Settings().model_dump(), keys=keys), "0") as writer:
        (writer.save.path / "writer.lock").unlink()
        spill.drain()
    assert_complete(url, state)


def test_who_waits_for_a_commit_hears_that_its_data_was_refused(faulty_spill: Spill) -> None:
    spill, url = faulty_spill, faulty_spill.url("step-1")
    spill.save(url, large_state(1))
    commit = spill.commit()
    damage(spill.data().path / "object-0")
    spill.drain()
    with pytest.raises(CheckpointError, match="disk damaged it"):
        wait_until_drained(spill.store, commit, timeout=1)


def test_the_metadata_of_a_save_that_s3_refused_is_not_written_before_its_data(
    faulty_spill: Spill, faulty: FaultyServer
) -> None:
    spill, url, state = faulty_spill, faulty_spill.url("step-1"), large_state(1)
    faulty.rule = refuse_all
    spill.save(url, state)
    order: list[str] = []

    def note(request: Any) -> None:
        if request.method in ("PUT", "POST"):
            order.append(request.key)

    faulty.rule = note
    assert spill.drain().committed == [url]
    assert order[-1].endswith("/.metadata")
    assert "manifest" in order[-2]
    assert_complete(url, state)


def test_a_refusal_of_the_commit_that_does_not_hold_sets_nothing_aside(
    faulty: FaultyServer, faulty_spill: Spill
) -> None:
    """A proxy says 412, and no checkpoint is there: once, and whenever it is asked."""
    spill, state = faulty_spill, large_state(1)
    refusal = Fault.error(412, "PreconditionFailed")
    spill.save(spill.url("step-1"), state)
    seen = faulty.once("PutObject", refusal, key=".metadata")
    assert spill.drain().committed == [spill.url("step-1")]
    assert seen
    assert_complete(spill.url("step-1"), state)
    spill.save(spill.url("step-2"), state)
    commit = spill.commit()
    faulty.rule = lambda request: refusal if ".metadata" in request.key and request.method == "PUT" else None
    report = spill.drain()
    assert report.refused == {}
    assert "a proxy" in report.waiting[commit.name]
    faulty.rule = lambda _: None
    assert spill.drain().committed == [spill.url("step-2")]
    assert_complete(spill.url("step-2"), state)
    spill.assert_empty()
