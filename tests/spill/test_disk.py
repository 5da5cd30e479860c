"""The disk refuses: full, over its limit, read-only, or no directory at all."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from dcp_s3 import S3StorageWriter, errors
from dcp_s3.spill.drain import Drainer
from dcp_s3.spill.store import SpillStore
from tests.faulty import BUCKET, FaultyServer, serve
from tests.memory_s3 import Fault
from tests.spill.test_outage import allow_all, assert_complete, refuse_all

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

MIB = 2**20
URL = f"s3://{BUCKET}/run/step-2"
PREVIOUS = f"s3://{BUCKET}/run/step-1"

_Prepare = Callable[[Path, pytest.MonkeyPatch], None]


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyServer]:
    for name, value in {
        "PART_SIZE": "5MiB",
        "RETRY_ATTEMPTS": "2",
        "SPILL_AFTER": "2s",
    }.items():
        monkeypatch.setenv(f"DCP_S3_{name}", value)
    monkeypatch.setattr("dcp_s3.save.writer.OBJECTS_PER_RANK", 1)
    monkeypatch.setattr("dcp_s3.spill.saving.drain_in_background", lambda *_, **__: None)  # the test drains
    with serve(monkeypatch) as server:
        yield server


@pytest.fixture
def spill_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    path = tmp_path / "spill"
    monkeypatch.setenv("DCP_S3_SPILL_DIR", str(path))
    yield path
    if os.path.ismount(path):
        subprocess.run(["umount", str(path)], check=True)


def _mount(path: Path, options: str) -> None:
    path.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(path)], capture_output=True, check=False)
    if done.returncode:
        pytest.skip(f"cannot mount: {done.stderr!r}")


def small_disk(path: Path, _: pytest.MonkeyPatch) -> None:
    _mount(path, "size=2m")


def read_only_disk(path: Path, _: pytest.MonkeyPatch) -> None:
    _mount(path, "size=64m,ro")


def quota(_: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DCP_S3_SPILL_LIMIT", "2MiB")


def a_file_in_its_place(path: Path, _: pytest.MonkeyPatch) -> None:
    path.write_text("no directory")


def no_room_to_reserve(_: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)


def fills_in_the_middle(_: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a file system does that promises room it does not have."""
    real, written = os.pwrite, [0]

    def pwrite(fd: int, data: Any, offset: int) -> int:
        if written[0] + len(data) > 9 * MIB:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written[0] += len(data)
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)


def fails_to_flush(_: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything but small files."""
    real = os.fsync

    def fsync(fd: int) -> None:
        if os.fstat(fd).st_size > MIB:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)


DISKS = [
    small_disk, read_only_disk, quota, a_file_in_its_place, no_room_to_reserve, fills_in_the_middle, fails_to_flush
]  # fmt: skip


def make_state(seed: int) -> dict[str, Any]:
    """Several tensors in one object of 16 MiB."""
    return {name: torch.arange(MIB, dtype=torch.float32) + seed + n for n, name in enumerate("abcd")}


def list_left(spill_dir: Path) -> list[str]:
    if not spill_dir.is_dir():
        return []
    return [str(path) for path in spill_dir.rglob("*") if path.is_file() and path.suffix != ".lock"]


def failure_of(save: Callable[[], Any]) -> BaseException:
    with pytest.raises(CheckpointException) as caught:
        save()
    cause: BaseException = caught.value.failures[0][0]
    return cause


def save_to(url: str, state: dict[str, Any], durability: str) -> None:
    dcp.save(state, storage_writer=S3StorageWriter(url, settings={"durability": durability}))


@pytest.mark.parametrize("prepare", DISKS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("durability", ["local", "s3"])
def test_a_save_that_the_disk_refuses_goes_to_s3(
    faulty: FaultyServer,
    spill_dir: Path,
    prepare: _Prepare,
    durability: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    state = make_state(1)
    prepare(spill_dir, monkeypatch)
    save_to(URL, state, durability)
    if durability == "local":
        assert any(record.levelname == "WARNING" and str(spill_dir) in record.getMessage() for record in caplog.records)
    assert_complete(URL, state)
    assert list_left(spill_dir) == []
    assert faulty.s3.open_uploads(BUCKET) == []


@pytest.mark.parametrize("prepare", DISKS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("durability", ["local", "s3"])
def test_a_save_that_both_refuse_fails_and_leaves_nothing_after_a_drain(
    faulty: FaultyServer, spill_dir: Path, prepare: _Prepare, durability: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = make_state(1)
    dcp.save(before, storage_writer=S3StorageWriter(PREVIOUS, settings={"spill_dir": None}))
    objects = faulty.s3.objects(BUCKET)
    with monkeypatch.context() as patch:
        prepare(spill_dir, patch)
        faulty.rule = refuse_all
        cause = failure_of(lambda: save_to(URL, make_state(2), durability))
    assert isinstance(cause, (errors.TransferError, errors.SpillError))
    # S3 may have created uploads and said nothing: what is left is the journal that lets a drain look for them.
    assert {Path(path).name for path in list_left(spill_dir)} <= {"journal"}
    faulty.rule = allow_all
    if list_left(spill_dir):
        report = Drainer(SpillStore(spill_dir)).run()
        assert (report.committed, report.waiting, report.refused) == ([], {}, {})
        assert list_left(spill_dir) == []
    assert faulty.s3.open_uploads(BUCKET) == []
    assert faulty.s3.objects(BUCKET) == objects
    assert_complete(PREVIOUS, before)


@pytest.mark.parametrize("prepare", DISKS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("durability", ["local", "s3"])
def test_the_error_of_a_save_that_both_refuse_names_both(
    faulty: FaultyServer, spill_dir: Path, prepare: _Prepare, durability: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        prepare(spill_dir, patch)
        faulty.rule = refuse_all
        cause = failure_of(lambda: save_to(URL, make_state(2), durability))
    text = "\n".join([str(cause), *getattr(cause, "__notes__", ())])
    assert "SlowDown" in text
    assert str(spill_dir) in text


def test_s3_that_fails_in_the_middle_and_a_full_disk_leave_no_upload_open(
    faulty: FaultyServer, spill_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[Any] = []

    def rule(request: Any) -> Fault | None:
        if request.operation == "UploadPart":
            sent.append(request)
            if len(sent) > 2:
                return Fault.error(503, "SlowDown")
        return None

    faulty.rule = rule
    with monkeypatch.context() as patch:
        no_room_to_reserve(spill_dir, patch)
        cause = failure_of(lambda: save_to(URL, make_state(2), "s3"))
    assert isinstance(cause, errors.TransferError)
    assert list_left(spill_dir) == []
    assert faulty.s3.open_uploads(BUCKET) == []
    assert faulty.s3.objects(BUCKET) == {}


def slow_parts(request: Any) -> Fault | None:
    """Slower than `spill_after`, but they get through."""
    return Fault.delay(0.5) if request.operation in ("UploadPart", "PutObject") else None


@pytest.mark.parametrize("prepare", [small_disk, a_file_in_its_place], ids=lambda f: f.__name__)
@pytest.mark.parametrize("durability", ["local", "s3"])
def test_a_save_that_the_disk_refuses_goes_to_an_s3_that_is_slower_than_spill_after(
    faulty: FaultyServer, spill_dir: Path, prepare: _Prepare, durability: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = make_state(1)
    prepare(spill_dir, monkeypatch)
    monkeypatch.setenv("DCP_S3_SPILL_AFTER", "0.2s")
    faulty.rule = slow_parts
    save_to(URL, state, durability)
    faulty.rule = allow_all
    assert_complete(URL, state)
    assert list_left(spill_dir) == []
    assert faulty.s3.open_uploads(BUCKET) == []


def test_parts_that_s3_has_are_not_sent_again_when_the_disk_is_full(
    faulty: FaultyServer, spill_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DCP_S3_CONCURRENCY", "1")
    taken: list[int] = []
    refused: list[int] = []

    def rule(request: Any) -> Fault | None:
        if request.operation == "UploadPart":
            if request.part_number == 3 and len(refused) < 2:
                refused.append(3)
                return Fault.error(503, "SlowDown")
            taken.append(request.part_number)
        return None

    faulty.rule = rule
    no_room_to_reserve(spill_dir, monkeypatch)
    state = make_state(1)
    save_to(URL, state, "s3")
    assert taken == [1, 2, 3, 4]
    assert_complete(URL, state)


@pytest.mark.parametrize("spilled", [True, False])
def test_a_commit_that_the_disk_refuses_waits_in_memory(
    faulty: FaultyServer, spill_dir: Path, monkeypatch: pytest.MonkeyPatch, spilled: bool
) -> None:
    def full(*_: Any, **__: Any) -> None:
        faulty.rule = allow_all
        raise errors.SpillError("the disk is full")

    monkeypatch.setattr("dcp_s3.spill.saving.spill_commit", full)
    monkeypatch.setattr("dcp_s3.spill.saving.drain_in_background", lambda store, **_: Drainer(store).run())
    if not spilled:
        faulty.rule = lambda request: refuse_all(request) if "manifest" in request.key else None
    state = make_state(1)
    save_to(URL, state, "local" if spilled else "s3")
    assert_complete(URL, state)
    assert list_left(spill_dir) == []


def test_a_save_whose_journal_can_not_be_sealed_goes_to_s3(
    faulty: FaultyServer, spill_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        faulty.rule = allow_all
        raise errors.SpillError("the disk is full")

    faulty.rule = refuse_all
    monkeypatch.setattr("dcp_s3.spill.store.SaveWriter.seal", full)
    state = make_state(2)
    save_to(URL, state, "s3")
    assert_complete(URL, state)
    assert list_left(spill_dir) == []
    assert faulty.s3.open_uploads(BUCKET) == []


def test_the_error_of_a_large_object_that_both_refuse_is_that_of_s3(
    faulty: FaultyServer, spill_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More parts than may be under way: the failure of the first stops the one who makes the others."""
    monkeypatch.setenv("DCP_S3_CONCURRENCY", "1")

    def rule(request: Any) -> Fault | None:
        return Fault.error(503, "SlowDown") if request.operation == "UploadPart" else None

    faulty.rule = rule
    with monkeypatch.context() as patch:
        no_room_to_reserve(spill_dir, patch)
        state = {name: torch.zeros(5 * MIB // 4) for name in "abcdefgh"}
        cause = failure_of(lambda: save_to(URL, state, "local"))
    assert isinstance(cause, errors.TransferError)
    assert faulty.s3.open_uploads(BUCKET) == []


def _fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


def test_a_disk_that_is_full_to_the_last_byte_is_emptied_by_the_drain(faulty: FaultyServer, spill_dir: Path) -> None:
    _mount(spill_dir, "size=20m")
    state = make_state(1)
    save_to(URL, state, "local")
    filler = spill_dir / "filler"
    _fill(filler)
    report = Drainer(SpillStore(spill_dir)).run()
    assert report.committed == [URL]
    assert_complete(URL, state)
    filler.unlink()
    assert list_left(spill_dir) == []
