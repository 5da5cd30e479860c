"""From the spill directory to S3: what is complete becomes a checkpoint, whatever S3 does meanwhile."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from dcp_s3 import S3StorageWriter
from dcp_s3.checkpoint.commit import Commit, publish
from dcp_s3.checkpoint.commit_state import Previous
from dcp_s3.errors import CheckpointError
from dcp_s3.memory import Piece
from dcp_s3.s3.store import S3Store
from dcp_s3.settings import Settings, resolve_settings, stored_settings
from dcp_s3.spill import drain as drain_module
from dcp_s3.spill import saving as saving_module
from dcp_s3.spill.drain import Drainer, DrainReport, wait_until_drained
from dcp_s3.spill.journal import Journal, State
from dcp_s3.spill.store import SpillStore
from tests.faulty import BUCKET
from tests.memory_s3 import Fault
from tests.objects import separate_objects
from tests.ranks import run_ranks
from tests.spill.making import (
    MIB,
    PART,
    Spill,
    allow_all,
    assert_complete,
    begin_multipart,
    damage,
    large_state,
    make_state,
    small_state,
)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def test_settings_that_another_version_stored_are_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DCP_S3_CHECKSUM", "crc32c")  # as the process that stored them had it
    changed = resolve_settings({"requester_pays": True, "max_bandwidth": "100MiB", "checksum": "auto"})
    other = {"connect_timeout": 5.0, "of_a_later_version": 1, "checksum": "crc32c"}
    assert stored_settings({**changed.model_dump(), **other}) == changed


def test_a_drain_that_is_stopped_ends_before_the_next_object(spill: Spill) -> None:
    url, state = spill.url("step-1"), {"a": torch.randn(1000), "b": torch.randn(1000)}
    with separate_objects("a"):
        spill.save(url, state)
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


@pytest.mark.parametrize("checksum", ["auto", "none"])
def test_a_drained_checkpoint_is_bit_identical_and_open_uploads_are_aborted(anywhere: Spill, checksum: str) -> None:
    spill, url, state = anywhere, anywhere.url("step-1"), make_state(1)
    dcp.save(state, storage_writer=spill.writer(url, {"durability": "local", "checksum": checksum}))
    assert spill.list(url) == []
    key, data = spill.key(), (spill.data().path / "object-0").read_bytes()
    for size in (PART, 2 * PART):
        begin_multipart(S3Store(spill.bucket_name, Settings(checksum=checksum)), key, data[:size])
    assert spill.drain() == DrainReport(uploaded=len(data), committed=[url])
    assert_complete(url, state)
    assert list(spill.bucket.uploads(key)) == []
    spill.assert_empty()
    assert spill.drain() == DrainReport()


@pytest.mark.parametrize("what", ["the same", "other bytes", "gone from the disk"])
def test_an_object_that_is_on_s3_is_sent_again_if_its_bytes_are_others(spill: Spill, what: str) -> None:
    """S3 applied the PUT of the save, but said nothing; what is on disk may have other bytes of the same number."""
    url, state = spill.url("step-1"), large_state(1)
    spill.save(url, state)
    path = spill.data().path / "object-0"
    data, is_same = path.read_bytes(), what != "other bytes"
    data = data if is_same else bytes(len(data))
    spill.bucket.put_stream(spill.key(), len(data), [Piece.of(data)])
    if what == "gone from the disk":
        path.unlink()  # so it goes when a drain dies between the upload and its journal
    spill.server.s3.reset_counters()
    spill.drained(url, state)
    counted = spill.server.s3.counters.requests
    assert ("UploadPart" in counted, "CreateMultipartUpload" in counted) == (not is_same, not is_same)
    assert counted["PutObject"] == 2, "the manifest and .metadata"


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


def test_without_an_object_or_with_another_one_it_waits_unseen(spill: Spill, tmp_path: Path) -> None:
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


@pytest.mark.parametrize(
    ("overwrite", "order", "stays", "said"),
    [
        (True, "spilled s3", 2, "newer"),
        (False, "spilled s3", 2, "a committed checkpoint is at"),
        (True, "s3 spilled", 2, None),
        (True, "spilled spilled", 2, None),
    ],
)
def test_of_two_saves_to_one_url_the_newer_or_without_overwrite_the_first_wins(
    anywhere: Spill, overwrite: bool, order: str, stays: int, said: str | None
) -> None:
    spill, url = anywhere, anywhere.url("step-1")
    for number, how in enumerate(order.split(), 1):
        save = spill.save if how == "spilled" else spill.save_to_s3
        save(url, small_state(number), overwrite=overwrite)
    report = spill.drain()
    assert_complete(url, small_state(stays))
    if said is None:
        assert report.committed == [url] * order.count("spilled")
        assert len(spill.list_data(url)) == 1, "the older one's is gone"
        spill.assert_empty()
    else:
        assert report.committed == []
        [reason] = report.refused.values()
        assert said in reason
        assert len(spill.list_data(url)) == 2, "ours stays until it is pruned"


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


# --- saves that end while the drain runs -----------------------------------------------------------------


@pytest.mark.parametrize("how", ["is sealed", "ends on S3"])
def test_a_save_that_ends_after_the_scan_is_not_given_up(spill: Spill, how: str) -> None:
    """Between the scan and what the drain does with it, as if an upload had taken long."""
    url, read = spill.url("step-1"), SpillStore.read
    spill.bucket.put("run/step-1/x", b"another object of the save")
    with spill.store.begin(Journal(url, "1", 1.0, Settings().model_dump(), keys=("run/step-1/x",)), "0") as writer:

        def end_after(store: SpillStore) -> Any:
            found = read(store)
            if how == "is sealed":
                writer.seal(writer.journal)
            writer.__exit__()
            return found

        with mock.patch.object(SpillStore, "read", end_after):
            assert spill.drain() == DrainReport()
    assert spill.list(url) == ["run/step-1/x"]


def test_a_journal_that_comes_back_after_a_power_failure_costs_no_committed_checkpoint(spill: Spill) -> None:
    """Its removal was not flushed when the save ended on S3."""
    url = spill.url("step-1")
    spill.save_to_s3(url, small_state(1))
    keys = tuple(spill.list_data(url))
    with spill.store.begin(Journal(url, "1", 1.0, Settings().model_dump(), keys=keys), "0") as writer:
        (writer.path / "writer.lock").unlink()
        spill.drain()
    assert_complete(url, small_state(1))


def test_the_save_of_a_live_process_stays_and_that_of_a_dead_one_goes(spill: Spill) -> None:
    url, key = spill.url("step-1"), "run/step-1/__0_0-ab.distcp"
    spill.bucket.put("run/step-1/__0_1-ab.distcp", b"x")
    begin_multipart(spill.bucket, key, bytes(MIB))
    keys = (key, "run/step-1/__0_1-ab.distcp")
    with spill.store.begin(Journal(url, "1", 1.0, Settings().model_dump(), keys=keys), "0") as writer:
        (writer.path / "object-0").write_bytes(b"abc")
        assert writer.is_being_written()
        assert spill.drain() == DrainReport(waiting={writer.name: "it is being written"})
        assert (writer.path / "object-0").read_bytes() == b"abc"
        writer.close()  # the kernel does that when a process dies
        assert not writer.is_being_written()
        assert spill.drain() == DrainReport(discarded=[writer.name])
    assert not writer.path.exists()
    assert spill.list(url) == []
    assert spill.server.s3.open_uploads(BUCKET) == []


# --- what is damaged is set aside, and never becomes a checkpoint ---------------------------------------


def rewrite(change: Callable[[Journal], dict[str, Any]]) -> Callable[[Path], object]:
    def rewritten(path: Path) -> None:
        journal = Journal.from_bytes(path.read_bytes())
        path.write_bytes(replace(journal, **change(journal)).to_bytes())

    return rewritten


SPOILED: list[tuple[str, Callable[[Path], object], str]] = [
    ("object-0", damage, "the disk damaged it"),
    ("object-0", lambda path: os.truncate(path, 100), "has 100 bytes"),
    ("object-0", Path.unlink, "is gone"),
    *((name, lambda path: damage(path, 100), "is damaged") for name in ("journal", "metadata", "manifest.json")),
    *((name, Path.unlink, "is gone") for name in ("metadata", "manifest.json")),
    ("journal", rewrite(lambda journal: {"settings": {**journal.settings, "part_size": "1"}}), "part_size"),
    (
        "journal",
        rewrite(lambda journal: {"settings": {**journal.settings, "endpoint_url": "nonsense"}}),
        "endpoint_url",
    ),
    ("journal", rewrite(lambda _: {"url": "/not/s3"}), "/not/s3"),
]


@pytest.mark.parametrize(("file", "spoil", "reason"), SPOILED)
def test_what_is_damaged_or_makes_no_sense_is_set_aside_and_the_rest_drains(
    spill: Spill, file: str, spoil: Callable[[Path], object], reason: str
) -> None:
    bad, good = spill.url("step-1"), spill.url("step-2")
    spill.save(bad, small_state(1))
    commit = spill.commit()
    save = spill.data() if file in ("journal", "object-0") else commit
    spoil(save.path / file)
    (spill.store.saves / "README").write_text("a stray file does no harm")
    spill.save(good, small_state(2))
    report = spill.drain()
    assert report.committed == [good]
    assert reason in report.refused[save.name].lower()
    assert (spill.store.refused / save.name).is_dir()
    assert {each.path.name: each.reason for each in spill.store.list_refused()} == report.refused
    assert spill.drain().committed == []
    assert not spill.is_visible(bad)
    assert_complete(good, small_state(2))
    if reason in ("the disk damaged it", "has 100 bytes"):  # its commit waits for nothing any more, and says why
        assert report.waiting == {}
        with pytest.raises(CheckpointError, match=reason):
            wait_until_drained(spill.store, commit, timeout=1)


def test_a_link_is_neither_followed_nor_deleted(spill: Spill, tmp_path: Path) -> None:
    spill.save(spill.url("step-1"), small_state(1))
    secret, file = tmp_path / "secret.txt", spill.data().path / "object-0"
    file.rename(secret)
    file.symlink_to(secret)
    assert spill.drain().committed == []
    assert secret.exists()
    assert spill.list(spill.url("step-1")) == []


def test_a_journal_that_names_keys_elsewhere_deletes_nothing(spill: Spill) -> None:
    url = spill.url("step-1")
    spill.save_to_s3(url, small_state(1))
    before = spill.list(url)
    spill.save(spill.url("step-2"), small_state(2))
    wrong = spill.data()
    wrong.update(replace(wrong.journal, state=State.WRITING, keys=tuple(before)))
    assert wrong.name in spill.drain().refused
    assert spill.list(url) == before


def test_a_journal_that_can_not_be_read_now_waits(spill: Spill) -> None:
    url = spill.url("step-1")
    spill.save(url, small_state(1))
    data, read = spill.data(), Path.read_bytes

    def fail(path: Path) -> bytes:
        if path == data.path / "journal":
            raise OSError(errno.EMFILE, "Too many open files")
        return read(path)

    with mock.patch.object(Path, "read_bytes", fail):
        report = spill.drain()
    assert report.refused == {}
    assert "Too many open files" in report.waiting[data.name]
    spill.drained(url, small_state(1))


def test_only_the_owner_reads_what_waits_and_what_is_set_aside(spill: Spill) -> None:
    spill.path.mkdir(mode=0o755)  # its owner's choice
    for name in ("saves", "new", "refused"):  # as an earlier version made them
        (spill.path / name).mkdir(mode=0o755)
    previous = os.umask(0)
    try:
        spill.save(spill.url("step-1"), small_state(1))
        spill.drain()
        spill.save(spill.url("step-2"), small_state(2))
        damage(spill.data().path / "object-0")
        spill.drain()
        spill.save(spill.url("step-3"), small_state(3))
    finally:
        os.umask(previous)
    found = list(spill.path.rglob("*"))
    assert {path.name for path in found} >= {"journal", "object-0", "metadata", "manifest.json", "reason.txt"}
    wrong = [str(path) for path in found if path.stat().st_mode & 0o777 != (0o700 if path.is_dir() else 0o600)]
    assert wrong == []
    assert spill.path.stat().st_mode & 0o777 == 0o755


# --- several ranks, with a spill directory each or one for all -----------------------------------------

URL = f"s3://{BUCKET}/run/step-1"


def _shard(seed: int) -> dict[str, DTensor]:
    mesh, full = init_device_mesh("cpu", (dist.get_world_size(),)), full_state(seed)["a"]
    return {"a": distribute_tensor(full, mesh, [Shard(0)], src_data_rank=None)}


def full_state(seed: int) -> dict[str, torch.Tensor]:
    return {"a": torch.arange(3 * 2**20, dtype=torch.float32).view(2, -1) + seed}


def _overwrite_and_wait(directories: list[str]) -> None:
    for name in ("drain_in_background", "wait_until_drained"):  # the test drains
        setattr(saving_module, name, lambda *_, **__: None)
    dcp.save(_shard(0), storage_writer=S3StorageWriter(URL))
    os.environ["DCP_S3_SPILL_DIR"] = directories[dist.get_rank()]
    writer = S3StorageWriter(URL, settings={"durability": "local"}, overwrite=True)
    dcp.save(_shard(1), storage_writer=writer)
    with pytest.raises(TimeoutError):
        writer.wait_committed(timeout=0.5)
    dist.barrier()
    if dist.get_rank() == 0:
        for path, committed in ((0, []), (1, []), (0, [URL])):  # the commit waits for the objects of both
            assert Drainer(SpillStore(directories[path])).run().committed == committed
    dist.barrier()
    writer.wait_committed(timeout=20)


@pytest.mark.usefixtures("spill")
def test_the_commit_waits_for_all_and_no_rank_takes_the_old_one_for_its_own(tmp_path: Path) -> None:
    paths = [str(tmp_path / str(number)) for number in range(2)]
    run_ranks(2, _overwrite_and_wait, paths)
    assert_complete(URL, full_state(1))
    assert [SpillStore(path).scan() for path in paths] == [[], []]
