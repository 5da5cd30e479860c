"""From the spill directory to S3: what is complete becomes a checkpoint."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_s3 import S3StorageWriter
from dcp_s3.memory import Piece
from dcp_s3.s3 import multipart
from dcp_s3.s3.client import close_clients
from dcp_s3.s3.operations import Operation
from dcp_s3.s3.store import S3Store
from dcp_s3.settings import Settings
from dcp_s3.spill.drain import Drainer, DrainReport
from dcp_s3.spill.store import SpillStore
from tests.faulty import FaultyServer
from tests.servers import S3Server
from tests.spill.making import MIB, PART, Spill, begin_multipart, large_state
from tests.spill.test_outage import assert_complete, make_state

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

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


@pytest.mark.servers("memory", "rgw")
@pytest.mark.parametrize("checksum", ["none", "crc32c"])
def test_a_checkpoint_with_another_checksum_is_drained_too(spill: Spill, checksum: str) -> None:
    url, state = spill.url("step-1"), large_state(1)
    dcp.save(state, storage_writer=S3StorageWriter(url, settings={"durability": "local", "checksum": checksum}))
    begin_multipart(
        S3Store(spill.bucket_name, Settings(checksum=checksum)),
        spill.key(),
        (spill.data().path / "object-0").read_bytes()[:PART],
    )
    assert spill.drain().committed == [url]
    assert_complete(url, state)
    spill.assert_empty()


def test_what_waits_is_not_to_blame_for_the_endpoint_of_the_profile(
    faulty_spill: Spill, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    spill, url = faulty_spill, faulty_spill.url("step-1")
    endpoint = os.environ["DCP_S3_ENDPOINT_URL"]
    monkeypatch.delenv("DCP_S3_ENDPOINT_URL")
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    spill.save(url, make_state(1))
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    close_clients()
    config = tmp_path / "config"
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    config.write_text("[default]\nendpoint_url = minio:9000\n")
    report = spill.drain()
    assert not report.refused
    assert all("profile 'default'" in reason for reason in report.waiting.values())
    assert len(report.waiting) == 2
    config.write_text(f"[default]\nendpoint_url = {endpoint}\n")
    close_clients()
    assert spill.drain().committed == [url]
    assert_complete(url, make_state(1))
    close_clients()


def test_what_an_earlier_version_spilled_is_drained(faulty_spill: Spill) -> None:
    """Its journals hold settings that are gone since."""
    spill, url = faulty_spill, faulty_spill.url("step-1")
    spill.save(url, make_state(1))
    gone = {
        "buckets_per_rank": 4, "read_gap": 262144, "read_waste": 0.0025, "load_buffers": 536870912,
        "hedge_percentile": 95.0, "hedge_min_delay": 0.2, "prefix_spread": 0, "staging_generations": 2,
        "merge_ranks": True, "load_sharing": True, "allow_dtype_cast": True,
    }  # fmt: skip
    for save in (spill.data(), spill.commit()):
        save.update(replace(save.journal, settings={**save.journal.settings, **gone}))
    assert spill.drain().committed == [url]
    assert_complete(url, make_state(1))


def test_several_checkpoints_are_drained_in_one_pass_oldest_first(faulty_spill: Spill) -> None:
    spill = faulty_spill
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
    assert list(spill.bucket.uploads(key)) == []


def test_an_upload_that_is_aborted_meanwhile_starts_anew(
    faulty_spill: Spill, faulty: FaultyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    spill, url, state = faulty_spill, faulty_spill.url("step-1"), large_state(1)
    spill.save(url, state)
    key = spill.key()
    begin_multipart(spill.bucket, key, (spill.data().path / "object-0").read_bytes()[:PART])
    list_parts = multipart.list_parts

    def then_abort(key: str, upload_id: str) -> Operation[dict[int, multipart.KnownPart]]:
        found = yield from list_parts(key, upload_id)
        yield from multipart.abort(key, upload_id)
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
    spill.bucket.put_stream(spill.key(), path.stat().st_size, [Piece.of(path.read_bytes())])
    path.unlink()  # so it goes when a drain dies between the upload and its journal
    memory_server.handle.reset_counters()
    assert spill.drain().committed == [url]
    counted = memory_server.handle.counters.requests
    assert not {"UploadPart", "CreateMultipartUpload"} & set(counted)
    assert counted["PutObject"] == 2, "the manifest and .metadata"
    assert_complete(url, state)


def test_a_commit_whose_drain_died_before_it_could_say_so_is_not_done_twice(faulty_spill: Spill) -> None:
    spill = faulty_spill
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
    monkeypatch.setattr("dcp_s3.save.writer.OBJECTS_PER_RANK", 2)
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
