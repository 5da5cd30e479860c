"""From the spill directory to S3: what is complete becomes a checkpoint, and nothing else ever does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from benchmarks.memory_s3 import Fault
from dcp_s3 import S3StorageWriter
from dcp_s3.errors import CheckpointError
from dcp_s3.settings import Settings
from dcp_s3.spill.background import wait_until_drained
from dcp_s3.spill.drain import Drainer, DrainReport
from dcp_s3.spill.journal import Journal
from dcp_s3.spill.store import SpilledSave, SpillStore
from dcp_s3.transport import multipart
from dcp_s3.transport.bucket import Bucket
from dcp_s3.transport.client import close_clients
from dcp_s3.transport.parts import Piece
from dcp_s3.transport.upload import Uploader
from dcp_s3.url import parse_url
from tests.faulty import BUCKET, FaultyServer, serve
from tests.servers import S3Server
from tests.spill.test_outage import assert_complete, make_state, refuse_all

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

MIB = 2**20
PART = 5 * MIB


class Spill:
    """A spill directory, and what a test does with it."""

    def __init__(self, root: str, path: Path) -> None:
        self.root = root
        self.bucket_name = parse_url(root).bucket
        self.path = path
        self.store = SpillStore(path)

    @property
    def bucket(self) -> Bucket:
        return Bucket(self.bucket_name, Settings())

    def url(self, name: str) -> str:
        return f"{self.root}/{name}"

    def save(self, url: str, state: dict[str, Any], **options: Any) -> None:
        """To disk only."""
        dcp.save(state, storage_writer=S3StorageWriter(url, settings={"durability": "local"}, **options))

    def save_to_s3(self, url: str, state: dict[str, Any], **options: Any) -> None:
        """Without a spill directory."""
        dcp.save(state, storage_writer=S3StorageWriter(url, settings={"spill_dir": None}, **options))

    def drain(self, **options: Any) -> DrainReport:
        return Drainer(self.store, **options).run()

    def data(self) -> SpilledSave:
        """The one save with data that waits."""
        (save,) = [save for save in self.store.scan() if save.journal.commit is None]
        return save

    def commit(self) -> SpilledSave:
        """The one commit that waits."""
        (save,) = [save for save in self.store.scan() if save.journal.commit is not None]
        return save

    def key(self) -> str:
        """Of the one object that waits."""
        save = self.data()
        return parse_url(save.journal.url).key(save.journal.objects[0].entry.path)

    def is_visible(self, url: str) -> bool:
        return self.bucket.exists(parse_url(url).key(".metadata"))

    def list(self, url: str) -> list[str]:
        return [key for key, _ in self.bucket.list(parse_url(url).key(""))]

    def assert_empty(self) -> None:
        assert list((self.path / "saves").iterdir()) == []
        assert not (self.path / "refused").exists()


def _configure(root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Spill:
    path = tmp_path / "spill"
    for name, value in {
        "SPILL_DIR": str(path),
        "PART_SIZE": "5MiB",
        "BUCKETS_PER_RANK": "1",
        "RETRY_ATTEMPTS": "2",
        "SPILL_AFTER": "5s",
    }.items():
        monkeypatch.setenv(f"DCP_S3_{name}", value)
    monkeypatch.setattr("dcp_s3.checkpoint.writer.drain_in_background", lambda *_, **__: None)  # the test drains
    return Spill(root, path)


@pytest.fixture
def spill(root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Spill:
    """On every server; nothing drains by itself."""
    return _configure(root, tmp_path, monkeypatch)


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyServer]:
    with serve(monkeypatch) as server:
        yield server


@pytest.fixture
def faulty_spill(faulty: FaultyServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Spill:
    """On a server of its own whose faults the test sets."""
    return _configure(f"s3://{BUCKET}/run", tmp_path, monkeypatch)


def large_state(seed: int = 0) -> dict[str, torch.Tensor]:
    """One object of 12 MiB: three parts."""
    return {"large": torch.arange(3 * MIB, dtype=torch.float32) + seed}


def begin_multipart(bucket: Bucket, key: str, data: bytes) -> None:
    """What a process leaves that dies in the middle of an upload: whole parts, not completed."""
    algorithm = {"none": {}, "crc32c": {"ChecksumAlgorithm": "CRC32C", "ChecksumType": "FULL_OBJECT"}}.get(
        bucket.wire_checksum, {"ChecksumAlgorithm": "CRC64NVME", "ChecksumType": "FULL_OBJECT"}
    )
    where = {"Bucket": bucket.name, "Key": key}
    upload_id = bucket.client.create_multipart_upload(**where, **algorithm)["UploadId"]
    for number, start in enumerate(range(0, len(data), PART), start=1):
        part = data[start : start + PART]
        bucket.client.upload_part(
            **where, UploadId=upload_id, PartNumber=number, Body=part, **bucket.checksum_arguments(part)
        )


def damage(path: Path, position: int = 1000) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)
        file.seek(position)
        file.write(bytes([byte[0] ^ 1]))


# --- complete --------------------------------------------------------------------------------------------


def test_a_drained_checkpoint_is_bit_identical(spill: Spill) -> None:
    url, state = spill.url("step-1"), make_state(1)
    spill.save(url, state)
    assert spill.list(url) == []
    size = spill.data().journal.size
    report = spill.drain()
    assert report == DrainReport(uploaded=size, committed=[url])
    assert_complete(url, state)
    spill.assert_empty()
    assert spill.drain() == DrainReport()


@pytest.mark.parametrize("checksum", ["none", "crc32c"])
def test_a_checkpoint_with_another_checksum_is_drained_too(spill: Spill, checksum: str) -> None:
    url, state = spill.url("step-1"), large_state(1)
    dcp.save(state, storage_writer=S3StorageWriter(url, settings={"durability": "local", "checksum": checksum}))
    begin_multipart(
        Bucket(spill.bucket_name, Settings(checksum=checksum)),
        spill.key(),
        (spill.data().path / "object-0").read_bytes()[:PART],
    )
    assert spill.drain().committed == [url]
    assert_complete(url, state)
    spill.assert_empty()


def test_several_checkpoints_are_drained_in_one_pass_oldest_first(spill: Spill) -> None:
    states = {spill.url(f"step-{n}"): large_state(n) for n in range(3)}
    for url, state in states.items():
        spill.save(url, state)
    assert spill.drain().committed == list(states)
    for url, state in states.items():
        assert_complete(url, state)
    spill.assert_empty()


# --- multipart uploads of earlier processes --------------------------------------------------------------


def test_a_multipart_upload_of_an_earlier_process_is_gone_on_with(spill: Spill, server: S3Server) -> None:
    url, state = spill.url("step-1"), large_state(1)
    spill.save(url, state)
    data = (spill.data().path / "object-0").read_bytes()
    begin_multipart(spill.bucket, spill.key(), data[: 2 * PART])
    if server.name == "memory":
        server.handle.reset_counters()
    assert spill.drain().committed == [url]
    if server.name == "memory":
        assert server.handle.counters.requests["UploadPart"] == 1
        assert "CreateMultipartUpload" not in server.handle.counters.requests
    assert_complete(url, state)


@pytest.mark.servers("memory", "moto", "rgw")  # rclone never takes a part with other bytes
def test_parts_with_other_bytes_are_sent_again(spill: Spill, server: S3Server) -> None:
    url, state = spill.url("step-1"), large_state(1)
    spill.save(url, state)
    data = (spill.data().path / "object-0").read_bytes()
    begin_multipart(spill.bucket, spill.key(), data[:PART] + bytes(PART))
    if server.name == "memory":
        server.handle.reset_counters()
    assert spill.drain().committed == [url]
    if server.name == "memory":
        assert server.handle.counters.requests["UploadPart"] == 2
    assert_complete(url, state)


def test_of_two_multipart_uploads_the_fuller_one_is_used_and_the_other_aborted(spill: Spill, server: S3Server) -> None:
    url, state = spill.url("step-1"), large_state(1)
    spill.save(url, state)
    key, data = spill.key(), (spill.data().path / "object-0").read_bytes()
    begin_multipart(spill.bucket, key, data[:PART])
    begin_multipart(spill.bucket, key, data[: 2 * PART])
    if server.name == "memory":
        server.handle.reset_counters()
    assert spill.drain().committed == [url]
    if server.name == "memory":
        assert server.handle.counters.requests["UploadPart"] == 1
    assert_complete(url, state)
    assert multipart.list_uploads(spill.bucket, key) == []


def test_an_upload_that_is_aborted_meanwhile_starts_anew(
    faulty_spill: Spill, faulty: FaultyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    spill, url, state = faulty_spill, faulty_spill.url("step-1"), large_state(1)
    spill.save(url, state)
    key = spill.key()
    begin_multipart(spill.bucket, key, (spill.data().path / "object-0").read_bytes()[:PART])
    list_parts = multipart.list_parts

    def then_abort(bucket: Bucket, key: str, upload_id: str) -> dict[int, multipart.KnownPart]:
        found = list_parts(bucket, key, upload_id)
        multipart.abort(bucket, key, upload_id)
        return found

    monkeypatch.setattr(multipart, "list_parts", then_abort)
    report = spill.drain()
    assert len(report.waiting) == 2
    assert report.committed == []
    assert any("NoSuchUpload" in reason for reason in report.waiting.values())
    monkeypatch.undo()
    monkeypatch.setenv("DCP_S3_ENDPOINT_URL", faulty.s3.endpoint_url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    assert spill.drain().committed == [url]
    assert_complete(url, state)
    spill.assert_empty()


def test_an_object_that_is_complete_already_is_not_sent_again(memory_server: S3Server, spill: Spill) -> None:
    url, state = spill.url("step-1"), large_state(1)
    spill.save(url, state)
    path = spill.data().path / "object-0"
    with Uploader(spill.bucket) as uploader:
        upload = uploader.start(spill.key(), path.stat().st_size)
        upload.write(Piece.of(path.read_bytes()))
        upload.finish()
    path.unlink()  # so it goes when a drain dies between the upload and its journal
    memory_server.handle.reset_counters()
    assert spill.drain().committed == [url]
    counted = memory_server.handle.counters.requests
    assert not {"UploadPart", "CreateMultipartUpload"} & set(counted)
    assert counted["PutObject"] == 2, "the manifest and .metadata"
    assert_complete(url, state)


def test_a_commit_whose_drain_died_before_it_could_say_so_is_not_done_twice(spill: Spill) -> None:
    url, state = spill.url("step-1"), large_state(1)
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


# --- damage ----------------------------------------------------------------------------------------------


def truncate(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(MIB)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [(damage, "the disk damaged it"), (truncate, "has 1048576 bytes"), (Path.unlink, "is gone")],
    ids=["flipped", "truncated", "missing"],
)
def test_a_damaged_file_is_refused_and_never_becomes_a_checkpoint(
    spill: Spill, spoil: Callable[[Path], None], reason: str
) -> None:
    bad, good, state = spill.url("step-1"), spill.url("step-2"), large_state(1)
    spill.save(bad, state)
    damaged = spill.data()
    spoil(damaged.path / "object-0")
    spill.save(good, state)
    report = spill.drain()
    assert report.committed == [good]
    # Its commit waits for nothing any more, and says why.
    assert len(report.refused) == 2
    assert damaged.name in report.refused
    assert all(reason in text for text in report.refused.values())
    assert report.waiting == {}
    assert {refused.path.name: refused.reason for refused in spill.store.list_refused()} == report.refused
    assert spill.drain().committed == []
    assert not spill.is_visible(bad)
    assert_complete(good, state)


def test_a_damaged_journal_is_set_aside_and_the_rest_drains(spill: Spill) -> None:
    bad, good, state = spill.url("step-1"), spill.url("step-2"), large_state(1)
    spill.save(bad, state)
    damaged = spill.data()
    damage(damaged.path / "journal", 100)
    spill.save(good, state)
    report = spill.drain()
    assert report.committed == [good]
    (refused,) = spill.store.list_refused()
    assert refused.path.name == damaged.name
    assert report.refused == {damaged.name: refused.reason}
    assert "journal can not be read" in refused.reason
    assert (refused.path / "object-0").stat().st_size >= 12 * MIB, "kept for a person"
    assert not spill.is_visible(bad)
    assert_complete(good, state)


@pytest.mark.parametrize("name", ["metadata", "manifest.json"])
def test_a_damaged_commit_never_becomes_a_checkpoint(faulty_spill: Spill, name: str) -> None:
    spill, url = faulty_spill, faulty_spill.url("step-1")
    spill.save(url, large_state(1))
    commit = spill.commit()
    path = commit.path / name
    damage(path, path.stat().st_size // 2)
    report = spill.drain()
    assert report.committed == []
    assert not spill.is_visible(url)
    assert list(report.refused) == [commit.name]


@pytest.mark.parametrize("name", ["metadata", "manifest.json"])
def test_a_commit_without_its_files_never_becomes_a_checkpoint(faulty_spill: Spill, name: str) -> None:
    spill, url = faulty_spill, faulty_spill.url("step-1")
    spill.save(url, large_state(1))
    (spill.commit().path / name).unlink()
    assert spill.drain().committed == []
    assert not spill.is_visible(url)


@pytest.mark.parametrize(
    "settings", [{"part_size": "1"}, {"no_such_setting": 1}, {"endpoint_url": "nonsense"}], ids=lambda s: next(iter(s))
)
def test_settings_that_are_not_allowed_are_refused(faulty_spill: Spill, settings: dict[str, Any]) -> None:
    spill, bad, good = faulty_spill, faulty_spill.url("step-1"), faulty_spill.url("step-2")
    spill.save(bad, large_state(1))
    wrong = spill.data()
    wrong.update(replace(wrong.journal, settings={**wrong.journal.settings, **settings}))
    spill.save(good, large_state(2))
    report = spill.drain()
    assert report.committed == [good]
    assert next(iter(settings)) in report.refused[wrong.name].lower()
    assert not spill.is_visible(bad)


def test_a_journal_with_a_url_that_is_none_is_refused(faulty_spill: Spill) -> None:
    faulty_spill.save(faulty_spill.url("step-1"), large_state(1))
    wrong = faulty_spill.data()
    wrong.update(replace(wrong.journal, url="/not/s3"))
    assert list(faulty_spill.drain().refused) == [wrong.name]


# --- S3 changes meanwhile --------------------------------------------------------------------------------


def test_a_checkpoint_that_is_pruned_meanwhile_waits_and_is_never_visible(spill: Spill, tmp_path: Path) -> None:
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


def test_an_object_of_another_size_is_no_object_of_the_checkpoint(spill: Spill, tmp_path: Path) -> None:
    url = spill.url("step-1")
    spill.save(url, large_state(1))
    commit, key, aside = spill.commit(), spill.key(), tmp_path / "aside"
    spill.data().path.rename(aside)
    spill.bucket.write(key, b"short")
    assert list(spill.drain().waiting) == [commit.name]
    assert not spill.is_visible(url)


def test_an_older_spilled_save_does_not_replace_a_newer_one(spill: Spill) -> None:
    url, older, newer = spill.url("step-1"), large_state(1), large_state(2)
    spill.save(url, older, overwrite=True)
    late = spill.commit()
    spill.save_to_s3(url, newer, overwrite=True)
    report = spill.drain()
    assert report.committed == []
    assert "newer" in report.refused[late.name]
    assert_complete(url, newer)


def test_of_two_spilled_saves_to_one_url_the_newer_wins(spill: Spill) -> None:
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
    assert len([key for key in spill.list(url) if key.endswith(".distcp")]) == 1, "ours are gone"


# --- S3 refuses ------------------------------------------------------------------------------------------


@pytest.mark.servers("memory", "moto", "rgw")
def test_with_a_bucket_that_is_missing_all_waits_and_nothing_is_lost(spill: Spill) -> None:
    url, state = spill.url("step-1"), large_state(1)
    spill.save(url, state)
    saves = spill.store.scan()
    for save in saves:
        save.update(replace(save.journal, url=f"s3://no-such-bucket-{spill.bucket_name[-8:]}/step-1"))
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


# --- the directory ---------------------------------------------------------------------------------------


def test_a_directory_of_several_runs_and_buckets_is_drained_by_whoever_comes(
    faulty_spill: Spill, s3_other: str
) -> None:
    spill = faulty_spill
    mine, other = spill.url("step-1"), f"s3://{s3_other}/another-run/step-7"
    spill.save(mine, large_state(1))
    spill.save(other, large_state(2))
    assert spill.drain().committed == [mine, other]
    assert_complete(mine, large_state(1))
    assert_complete(other, large_state(2))


@pytest.fixture
def s3_other(faulty: FaultyServer) -> str:
    faulty.s3.create_bucket("other-bucket")
    return "other-bucket"


def test_a_directory_that_does_not_exist_has_nothing_to_drain(tmp_path: Path) -> None:
    assert Drainer(SpillStore(tmp_path / "none")).run() == DrainReport()


def test_a_drain_that_is_stopped_before_it_begins_does_nothing(faulty_spill: Spill, faulty: FaultyServer) -> None:
    spill, url = faulty_spill, faulty_spill.url("step-1")
    spill.save(url, large_state(1))
    stop = threading.Event()
    stop.set()
    faulty.s3.reset_counters()
    report = spill.drain(stop=stop)
    assert sorted(report.waiting.values()) == ["the drain was stopped"] * 2
    assert not faulty.s3.counters.requests
    assert spill.drain().committed == [url]


def test_a_drain_that_is_stopped_ends_after_the_object_under_way(
    faulty_spill: Spill, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DCP_S3_BUCKETS_PER_RANK", "2")
    spill, url = faulty_spill, faulty_spill.url("step-1")
    state = {"a": torch.randn(3 * MIB), "b": torch.randn(3 * MIB)}
    spill.save(url, state)
    assert len(spill.data().journal.objects) == 2
    stop = threading.Event()
    report = spill.drain(stop=stop, on_progress=lambda _: stop.set())
    assert report.uploaded == spill.data().journal.size
    assert len(spill.data().journal.objects) == 1
    assert set(report.waiting.values()) == {"the drain was stopped"}
    assert spill.drain().committed == [url]
    assert_complete(url, state)


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
    spill.bucket.write("run/step-1/x", b"another object of the save")
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
