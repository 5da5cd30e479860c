"""What is damaged in the spill directory is set aside, and never becomes a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dcp_s3.checksum import crc64nvme, crc_hex
from dcp_s3.spill.journal import State
from tests.spill.making import MIB, Spill, damage, large_state
from tests.spill.test_outage import assert_complete

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

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
    faulty_spill: Spill, spoil: Callable[[Path], None], reason: str
) -> None:
    spill = faulty_spill
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


def test_a_damaged_journal_is_set_aside_and_the_rest_drains(faulty_spill: Spill) -> None:
    spill = faulty_spill
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
    assert "journal is damaged" in refused.reason
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


def test_a_journal_that_names_a_file_elsewhere_uploads_and_deletes_nothing(faulty_spill: Spill, tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_bytes(b"secret")
    faulty_spill.save(faulty_spill.url("step-1"), large_state(1))
    wrong = faulty_spill.data()
    spilled = replace(wrong.journal.objects[0], file="../../../secret.txt", crc64nvme=crc_hex(crc64nvme(b"secret")))
    wrong.update(replace(wrong.journal, objects=(replace(spilled, entry=replace(spilled.entry, size=6)),)))
    assert (wrong.path / spilled.file).read_bytes() == b"secret", "the name leads there"
    assert wrong.name in faulty_spill.drain().refused
    assert secret.read_bytes() == b"secret"
    assert faulty_spill.list(faulty_spill.url("step-1")) == []


def test_a_link_in_place_of_a_file_is_not_followed(faulty_spill: Spill, tmp_path: Path) -> None:
    faulty_spill.save(faulty_spill.url("step-1"), large_state(1))
    file = faulty_spill.data().path / "object-0"
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    assert faulty_spill.drain().committed == []
    assert (tmp_path / "elsewhere").exists()
    assert not faulty_spill.list(faulty_spill.url("step-1"))


def test_a_journal_that_names_keys_elsewhere_deletes_nothing(faulty_spill: Spill) -> None:
    url = faulty_spill.url("step-1")
    faulty_spill.save_to_s3(url, large_state(1))
    before = faulty_spill.list(url)
    faulty_spill.save(faulty_spill.url("step-2"), large_state(2))
    wrong = faulty_spill.data()
    wrong.update(replace(wrong.journal, state=State.WRITING, keys=tuple(before)))
    assert wrong.name in faulty_spill.drain().refused
    assert faulty_spill.list(url) == before


def test_only_the_owner_reads_what_waits_what_is_kept_and_what_is_set_aside(
    faulty_spill: Spill, monkeypatch: pytest.MonkeyPatch
) -> None:
    spill = faulty_spill
    spill.path.mkdir(mode=0o755)  # its owner's choice
    for name in ("saves", "new", "refused", "cache"):  # as an earlier version made them
        (spill.path / name).mkdir(mode=0o755)
    monkeypatch.setenv("DCP_S3_SPILL_KEEP", "1GiB")
    previous = os.umask(0)
    try:
        spill.save(spill.url("step-1"), large_state(1))
        spill.drain()
        spill.save(spill.url("step-2"), large_state(2))
        damage(spill.data().path / "object-0")
        spill.drain()
        spill.save(spill.url("step-3"), large_state(3))
    finally:
        os.umask(previous)
    found = list(spill.path.rglob("*"))
    assert {path.name for path in found} >= {"journal", "object-0", "metadata", "manifest.json", "reason.txt", "cache"}
    wrong = [str(path) for path in found if path.stat().st_mode & 0o777 != (0o700 if path.is_dir() else 0o600)]
    assert wrong == []
    assert spill.path.stat().st_mode & 0o777 == 0o755
