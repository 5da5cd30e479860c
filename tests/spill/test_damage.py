"""What is damaged in the spill directory is set aside, and never becomes a checkpoint."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from dcp_s3.errors import CheckpointError
from dcp_s3.format.control_files import AttachmentEntry, ObjectEntry
from dcp_s3.memory import crc64nvme, crc_hex
from dcp_s3.settings import Settings
from dcp_s3.spill.drain import wait_until_drained
from dcp_s3.spill.journal import Journal, JournalError, SpilledCommit, SpilledObject, State
from dcp_s3.spill.store import SpilledSave
from tests.spill.making import Spill, assert_complete, damage, small_state

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def spoil_journal(of: Callable[[Journal], dict[str, Any]]) -> Callable[[Spill], SpilledSave]:
    def change(spill: Spill) -> SpilledSave:
        save = spill.data()
        save.update(replace(save.journal, **of(save.journal)))
        return save

    return change


def spoil(name: str, how: Callable[[Path], object]) -> Callable[[Spill], SpilledSave]:
    """A file of a save, or of a commit."""

    def change(spill: Spill) -> SpilledSave:
        save = spill.data() if name in ("journal", "object-0") else spill.commit()
        how(save.path / name)
        return save

    return change


SPOILED: list[tuple[Callable[[Spill], SpilledSave], str]] = [
    (spoil("object-0", damage), "the disk damaged it"),
    (spoil("object-0", lambda path: os.truncate(path, 100)), "has 100 bytes"),
    (spoil("object-0", Path.unlink), "is gone"),
    (spoil("journal", lambda path: damage(path, 100)), "journal is damaged"),
    (spoil("metadata", lambda path: damage(path, 100)), "is damaged"),
    (spoil("manifest.json", lambda path: damage(path, 100)), "is damaged"),
    (spoil("metadata", Path.unlink), "is gone"),
    (spoil("manifest.json", Path.unlink), "is gone"),
    (spoil_journal(lambda journal: {"settings": {**journal.settings, "part_size": "1"}}), "part_size"),
    (spoil_journal(lambda journal: {"settings": {**journal.settings, "endpoint_url": "nonsense"}}), "endpoint_url"),
    (spoil_journal(lambda _: {"url": "/not/s3"}), "/not/s3"),
]


@pytest.mark.parametrize(("change", "reason"), SPOILED)
def test_what_is_damaged_or_makes_no_sense_is_set_aside_and_the_rest_drains(
    spill: Spill, change: Callable[[Spill], SpilledSave], reason: str
) -> None:
    bad, good = spill.url("step-1"), spill.url("step-2")
    spill.save(bad, small_state(1))
    commit, save = spill.commit(), change(spill)
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
