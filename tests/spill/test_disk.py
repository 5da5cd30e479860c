"""The disk refuses: full, over its limit, read-only, or no directory at all."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import subprocess
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_s3 import errors
from dcp_s3.spill.drain import Drainer
from dcp_s3.stage.buffers import HostBuffer
from tests.faulty import BUCKET
from tests.memory_s3 import Fault
from tests.spill.making import (
    MIB,
    Spill,
    allow_all,
    assert_complete,
    cause_of,
    refuse_all,
    small_state,
)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@pytest.fixture(autouse=True)
def _unmount(spill: Spill) -> Iterator[None]:
    yield
    if os.path.ismount(spill.path):
        subprocess.run(["umount", str(spill.path)], check=True)


def mount(path: Path, options: str) -> None:
    path.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(path)], capture_output=True, check=False)
    if done.returncode:
        pytest.skip(f"cannot mount: {done.stderr!r}")


def full_disk(*_: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def no_room_to_reserve(_: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "posix_fallocate", full_disk)


def fills_in_the_middle(_: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a file system does that promises room it does not have."""
    real, written = os.pwrite, [0]

    def pwrite(fd: int, data: Any, offset: int) -> int:
        if written[0] + len(data) > 4 * MIB:
            full_disk()
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


DISKS: dict[str, Callable[[Path, pytest.MonkeyPatch], object]] = {
    "small": lambda path, _: mount(path, "size=2m"),
    "read only": lambda path, _: mount(path, "size=64m,ro"),
    "quota": lambda _, patch: patch.setenv("DCP_S3_SPILL_LIMIT", "2MiB"),
    "a file in its place": lambda path, _: path.write_text("no directory"),
    "no room to reserve": no_room_to_reserve,
    "fills in the middle": fills_in_the_middle,
    "fails to flush": fails_to_flush,
}


def make_state(seed: int) -> dict[str, Any]:
    """Several tensors in one object of 6 MiB."""
    return {name: torch.arange(3 * MIB // 8, dtype=torch.float32) + seed + n for n, name in enumerate("abcd")}


def save_to(spill: Spill, name: str, state: dict[str, Any], durability: str) -> None:
    dcp.save(state, storage_writer=spill.writer(spill.url(name), {"durability": durability}))


@pytest.mark.parametrize("disk", DISKS)
@pytest.mark.parametrize("durability", ["local", "s3"])
def test_a_save_that_the_disk_refuses_goes_to_s3(
    spill: Spill, disk: str, durability: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    state = make_state(1)
    DISKS[disk](spill.path, monkeypatch)
    save_to(spill, "step-2", state, durability)
    if durability == "local":
        assert any(each.levelname == "WARNING" and str(spill.path) in each.getMessage() for each in caplog.records)
    assert_complete(spill.url("step-2"), state)
    assert spill.files() == []
    assert spill.server.s3.open_uploads(BUCKET) == []


@pytest.mark.parametrize("disk", ["no room to reserve", "fills in the middle", "fails to flush"])
def test_a_state_that_the_disk_refused_is_let_go_of(spill: Spill, disk: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lease = HostBuffer(12 * MIB, "private").lease()
    alive = weakref.ref(lease)
    state = {"large": torch.frombuffer(lease, dtype=torch.float32).fill_(1)}
    del lease
    DISKS[disk](spill.path, monkeypatch)
    gc.collect()
    gc.disable()
    try:
        save_to(spill, "step-1", state, "local")
        del state
        assert alive() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("disk", DISKS)
@pytest.mark.parametrize("durability", ["local", "s3"])
def test_a_save_that_both_refuse_fails_names_both_and_leaves_nothing_after_a_drain(
    spill: Spill, disk: str, durability: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = small_state(1)
    spill.save_to_s3(spill.url("step-1"), before)
    objects = spill.server.s3.objects(BUCKET)
    with monkeypatch.context() as patch:
        DISKS[disk](spill.path, patch)
        spill.server.rule = refuse_all
        cause = cause_of(lambda: save_to(spill, "step-2", make_state(2), durability))
    assert isinstance(cause, (errors.TransferError, errors.SpillError))
    text = "\n".join([str(cause), *getattr(cause, "__notes__", ())])
    assert "SlowDown" in text
    assert str(spill.path) in text
    # S3 may have created uploads and said nothing: what is left is the journal that lets a drain look for them.
    assert {Path(path).name for path in spill.files()} <= {"journal"}
    spill.server.rule = allow_all
    if spill.files():
        report = spill.drain()
        assert (report.committed, report.waiting, report.refused) == ([], {}, {})
        assert spill.files() == []
    assert spill.server.s3.open_uploads(BUCKET) == []
    assert spill.server.s3.objects(BUCKET) == objects
    assert_complete(spill.url("step-1"), before)


@pytest.mark.parametrize("most", [0, 2])
def test_s3_that_fails_on_the_way_and_a_full_disk_leave_no_upload_open(
    spill: Spill, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """Also with more parts than may be under way: the failure of the first stops the one who makes the others."""
    monkeypatch.setenv("DCP_S3_CONCURRENCY", "1")
    sent: list[Any] = []

    def rule(request: Any) -> Fault | None:
        if request.operation == "UploadPart":
            sent.append(request)
            return refuse_all(request) if len(sent) > most else None
        return None

    spill.server.rule = rule
    state = {name: torch.zeros(5 * MIB // 4) for name in "abcdefgh"}
    with monkeypatch.context() as patch:
        no_room_to_reserve(spill.path, patch)
        cause = cause_of(lambda: save_to(spill, "step-2", state, "s3" if most else "local"))
    assert isinstance(cause, errors.TransferError)
    assert spill.files() == []
    assert spill.server.s3.open_uploads(BUCKET) == []
    assert spill.server.s3.objects(BUCKET) == {}


@pytest.mark.parametrize("durability", ["local", "s3"])
def test_a_save_that_the_disk_refuses_goes_to_an_s3_that_is_slower_than_spill_after(
    spill: Spill, durability: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = make_state(1)
    spill.path.write_text("no directory")
    monkeypatch.setenv("DCP_S3_SPILL_AFTER", "0.1s")
    spill.server.rule = lambda request: Fault.delay(0.3) if request.operation in ("UploadPart", "PutObject") else None
    save_to(spill, "step-2", state, durability)
    spill.server.rule = allow_all
    assert_complete(spill.url("step-2"), state)
    assert spill.server.s3.open_uploads(BUCKET) == []


@pytest.mark.parametrize("what", ["a commit", "a commit of what is on S3", "the journal"])
def test_what_the_disk_does_not_take_at_the_end_waits_in_memory(
    spill: Spill, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    def full(*_: Any, **__: Any) -> None:
        spill.server.rule = allow_all
        raise errors.SpillError("the disk is full")

    if what == "the journal":
        monkeypatch.setattr("dcp_s3.spill.store.SaveWriter.seal", full)
        spill.server.rule = refuse_all
    else:
        monkeypatch.setattr("dcp_s3.spill.saving.spill_commit", full)
        monkeypatch.setattr("dcp_s3.spill.saving.drain_in_background", lambda store, **_: Drainer(store).run())
    if what == "a commit of what is on S3":
        spill.server.rule = lambda request: refuse_all(request) if "manifest" in request.key else None
    state = small_state(1)
    save_to(spill, "step-2", state, "local" if what == "a commit" else "s3")
    assert_complete(spill.url("step-2"), state)
    assert spill.files() == []
    assert spill.server.s3.open_uploads(BUCKET) == []


def test_a_disk_that_is_full_to_the_last_byte_is_emptied_by_the_drain(spill: Spill) -> None:
    mount(spill.path, "size=8m")
    state = make_state(1)
    save_to(spill, "step-2", state, "local")
    filler = spill.path / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    assert spill.drain().committed == [spill.url("step-2")]
    assert_complete(spill.url("step-2"), state)
    filler.unlink()
    assert spill.files() == []
