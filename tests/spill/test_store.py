"""The spill directory: what is durable stays, what is not goes, processes keep apart, and the disk may refuse."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_s3 import errors
from dcp_s3.errors import SpillError
from dcp_s3.format.control_files import AttachmentEntry, ObjectEntry
from dcp_s3.memory import Piece, crc64nvme, crc_hex
from dcp_s3.settings import Settings
from dcp_s3.spill.drain import Drainer, DrainReport
from dcp_s3.spill.journal import Journal, JournalError, SpilledCommit, SpilledObject, State
from dcp_s3.spill.store import SpilledSave, SpillStore
from tests.end_to_end.loads import failure
from tests.faulty import BUCKET
from tests.memory_s3 import Fault
from tests.spill.making import MIB, Spill, allow_all, assert_complete, list_files, refuse_all, small_state


def make_journal(**changes: Any) -> Journal:
    return replace(Journal(f"s3://{BUCKET}/run/step-1", "abc", 1700000000.0, Settings().model_dump()), **changes)


def seal(store: SpillStore, **changes: Any) -> SpilledSave:
    """A save with one file."""
    with store.begin(make_journal(**changes), "0") as writer:
        writer.seal(writer.journal, {"object-0": b"abc"})
    return writer


def fill(writer: SpilledSave, name: str) -> None:
    writer.write_object(name, MIB, [Piece.of(memoryview(bytes(MIB)))])


@pytest.fixture
def store(tmp_path: Path) -> SpillStore:
    return SpillStore(tmp_path / "spill")


class Crash(Exception):
    """The machine stops here."""


def test_a_crash_leaves_the_old_journal_or_the_new(store: SpillStore, monkeypatch: pytest.MonkeyPatch) -> None:
    save, calls, crash_at = seal(store), list[str](), 0

    def call(name: str, real: Any, *arguments: Any) -> Any:
        calls.append(name)
        if len(calls) == crash_at:
            raise Crash
        return real(*arguments)

    for name in ("fsync", "replace", "rename"):
        monkeypatch.setattr(os, name, functools.partial(call, name, getattr(os, name)))
    old, new = save.journal, replace(save.journal, keys=("a", "b"))
    for crash_at in (1, 2, 3):
        calls.clear()
        with pytest.raises(Crash):
            save.update(new)
        (found,) = store.scan()
        assert (found.journal, save.journal) == (new if crash_at == 3 else old, old)
    crash_at = 0
    calls.clear()
    save.seal(new)
    assert calls == ["fsync", "fsync", "replace", "fsync"], "files' directory, journal, its name, the directory"


def test_a_sealed_save_is_there_with_its_files_and_another_leaves_nothing(store: SpillStore) -> None:
    with store.begin(make_journal(), "0") as writer:
        fill(writer, "object-0")
        assert store.size() > MIB
    assert (list_files(store.path), store.scan(), store.size()) == ([], [], 0)
    seal(store, keys=("x",))
    (save,) = store.scan()
    assert save.journal == make_journal(keys=("x",), state=State.SEALED)
    assert (save.path / "object-0").read_bytes() == b"abc"
    assert not save.is_being_written()
    save.remove()
    assert list_files(store.path) == []


def test_what_is_left_of_a_save_that_was_being_removed_or_never_began_goes(store: SpillStore) -> None:
    save = seal(store)
    (save.path / "journal").unlink()
    old, young = store.path / "new" / "old", store.path / "new" / "young"
    old.mkdir()
    young.mkdir()
    os.utime(old, (0, 0))
    assert store.scan() == []
    assert save.path.exists(), "looking changes nothing"
    store.tidy()
    assert not save.path.exists()
    assert not old.exists()
    assert young.exists(), "its process may be about to begin"


def test_who_reserve_at_once_never_exceed_the_limit(store: SpillStore) -> None:
    limit = 10 * MIB + MIB // 2
    limited = SpillStore(store.path, limit=limit)

    def reserve(rank: int) -> int:
        made = 0
        with limited.begin(make_journal(), str(rank)) as writer:
            for number in range(8):
                with contextlib.suppress(SpillError):
                    fill(writer, f"object-{number}")
                    made += 1
                assert store.size() <= limit
            writer.seal(writer.journal)
        return made

    with ThreadPoolExecutor(4) as pool:  # the locks are of open files, as between processes
        assert sum(pool.map(reserve, range(4))) == 10
    assert 10 * MIB <= store.size() <= limit


def test_the_limit_counts_what_is_there_and_is_free_again_when_it_has_gone(store: SpillStore) -> None:
    limited = SpillStore(store.path, limit=2 * MIB)
    with limited.begin(make_journal(), "0") as writer:
        fill(writer, "object-0")
        (writer.path / "journal.1234.tmp").symlink_to("gone")  # listed, and then not there
        assert limited.size() > MIB
        with pytest.raises(SpillError, match=r"DCP_S3_SPILL_LIMIT.*Remedy"):
            fill(writer, "object-1")
        assert not (writer.path / "object-1").exists()
    with limited.begin(make_journal(), "0") as writer:
        fill(writer, "object-0")


@contextlib.contextmanager
def forked() -> Iterator[None]:
    """A child, as a DataLoader makes for its workers, that has what this process has open until the end."""
    inside, outside = os.pipe()
    child = os.fork()
    if not child:
        os.close(outside)
        os.read(inside, 1)
        os._exit(0)
    try:
        yield
    finally:
        os.close(outside)
        os.close(inside)
        os.waitpid(child, 0)


def test_a_child_that_was_forked_meanwhile_does_not_keep_the_locks(store: SpillStore) -> None:
    limited = SpillStore(store.path, limit=100 * MIB)
    with contextlib.ExitStack() as stack:
        with limited.drainer(), limited.begin(make_journal(), "0") as writer, limited.reservation(1):
            assert isinstance(writer, SpilledSave)
            stack.enter_context(forked())
            writer.seal(writer.journal)
        with store.drainer() as alone, store.drainer() as too:
            assert (alone, too) == (True, False)
            assert Drainer(store).run() == DrainReport(busy=True)
        with open(store.path / "limit.lock") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        (save,) = store.scan()
        assert not save.is_being_written()


# --- the journal is read as it was written, or known to be damaged -------------------------------------

EXAMPLE = Journal(
    "s3://bucket/run/step-1",
    "0123456789abcdef",
    1700000000.25,
    Settings().model_dump(),
    State.SEALED,
    ("run/step-1/__0_0-abc.distcp",),
    (SpilledObject(ObjectEntry("__0_0-abc.distcp", 12, "00000000000000ff"), "object-0", 5, "00000000000000ff"),),
    SpilledCommit((AttachmentEntry("__0_0-abc.distcp", 12, attachment="a.pt"),), True, 3, {"metadata": "ff"}),
)


def sign(body: bytes) -> bytes:
    """A body behind a first line that is right."""
    return f"dcp_s3 journal {crc_hex(crc64nvme(body))}\n".encode() + body


@pytest.mark.parametrize("journal", [EXAMPLE, Journal("s3://b/x", "1", 0.0, {})], ids=["full", "small"])
def test_a_journal_that_is_cut_off_or_longer_or_has_any_byte_changed_is_refused(journal: Journal) -> None:
    data = journal.to_bytes()
    assert Journal.from_bytes(data) == journal
    wrong = [data[:length] for length in range(len(data))] + [data + more for more in (b"x", b"\n", data)]
    for flip in (0x01, 0x80):
        flipped = (data[:at] + bytes([data[at] ^ flip]) + data[at + 1 :] for at in range(len(data)))
        wrong.extend(flipped)
    for each in (*wrong, sign(b""), sign(b"anything else")):
        with pytest.raises(JournalError):
            Journal.from_bytes(each)


NAMES = ("../../../secret.txt", "/etc/passwd", "journal", "object-0/../x", "object-0\n", "")
ENTRY = {"path": "x", "size": 1}
WRONG: list[dict[str, Any]] = [
    {"state": "half"}, {"settings": 7}, {"keys": None}, {"commit": [1]}, {"format_version": 2},
    {"objects": [{"entry": {"wrong": 1}, "file": "object-0", "part_size": 1, "crc64nvme": ""}]},
    *({"objects": [{"entry": ENTRY, "file": each, "part_size": 1, "crc64nvme": ""}]} for each in NAMES),
    *({"commit": {"objects": [], file: each}} for each in NAMES for file in ("manifest", "metadata")),
]  # fmt: skip


def test_a_field_that_makes_no_sense_or_leads_elsewhere_is_refused() -> None:
    fields = json.loads(EXAMPLE.to_bytes().partition(b"\n")[2])
    for change in WRONG:
        with pytest.raises(JournalError, match="not a journal"):
            Journal.from_bytes(sign(json.dumps({**fields, **change}).encode()))


# --- a disk that is full, over its limit, read-only, or no directory at all ----------------------------


@pytest.fixture
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


@pytest.mark.usefixtures("_unmount")
@pytest.mark.parametrize("disk", DISKS)
@pytest.mark.parametrize("durability", ["local", "s3"])
def test_a_save_that_the_disk_refuses_goes_to_s3(
    spill: Spill, disk: str, durability: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    state = make_state(1)
    DISKS[disk](spill.path, monkeypatch)
    if disk == "a file in its place":  # then S3 may be slower than that
        monkeypatch.setenv("DCP_S3_SPILL_AFTER", "0.1s")
        slow = ("UploadPart", "PutObject")
        spill.server.rule = lambda request: Fault.delay(0.3) if request.operation in slow else None
    save_to(spill, "step-2", state, durability)
    spill.server.rule = allow_all
    if durability == "local":
        assert any(each.levelname == "WARNING" and str(spill.path) in each.getMessage() for each in caplog.records)
    assert_complete(spill.url("step-2"), state)
    assert spill.files() == []
    assert spill.server.s3.open_uploads(BUCKET) == []


@pytest.mark.usefixtures("_unmount")
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
        cause = failure(lambda: save_to(spill, "step-2", make_state(2), durability))
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


@pytest.mark.parametrize(
    ("what", "durability"),
    [
        ("spill.saving.spill_commit", "local"),
        ("spill.store.SpilledSave.seal", "local"),
        ("spill.saving.spill_commit", "s3"),
    ],
)
def test_a_save_whose_end_the_disk_does_not_take_fails_and_leaves_no_checkpoint(
    spill: Spill, monkeypatch: pytest.MonkeyPatch, what: str, durability: str
) -> None:
    spill.server.rule = lambda request: refuse_all(request) if "manifest" in request.key else None
    with monkeypatch.context() as patch:
        patch.setattr(f"dcp_s3.{what}", mock.Mock(side_effect=errors.SpillError("the disk is full")))
        kind = errors.SpillError if durability == "local" else errors.TransferError
        cause = failure(lambda: save_to(spill, "step-2", small_state(1), durability), kind)
    assert "the disk is full" in str(cause)
    assert durability == "local" or "SlowDown" in str(cause), "it names both"
    spill.server.rule = allow_all
    spill.drain()
    assert not spill.is_visible(spill.url("step-2"))
    assert spill.files() == []
    assert spill.server.s3.open_uploads(BUCKET) == []


@pytest.mark.usefixtures("_unmount")
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
