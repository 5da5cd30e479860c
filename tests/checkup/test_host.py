"""Checks of the host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dcp_s3 import versions
from dcp_s3.checkup import host
from dcp_s3.checkup.doctor import doctor
from dcp_s3.checkup.host import filesystem_of
from dcp_s3.checkup.probes import CheckResult, Examination
from dcp_s3.settings import Settings
from dcp_s3.url import parse_url

MOUNTS = """\
overlay / overlay rw 0 0
tmpfs /dev/shm tmpfs rw 0 0
/dev/nvme0n1 /nvme ext4 rw 0 0
/dev/nvme1n1 /nvme/with\\040space xfs rw 0 0
"""


def examination(read_only: bool = False, **settings: Any) -> Examination:
    return Examination(parse_url("s3://bucket/run"), read_only, settings, Settings(**settings))


def spill(directory: Path, *, read_only: bool = False, **settings: Any) -> CheckResult:
    return host.check_spill(examination(read_only, spill_dir=str(directory), **settings))


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/nvme/spill", "ext4"),
        ("/nvme", "ext4"),
        ("/nvme2/spill", "overlay"),
        ("/dev/shm/spill", "tmpfs"),
        ("/nvme/with space/spill", "xfs"),
    ],
)
def test_the_filesystem_of_a_path(path: str, kind: str) -> None:
    assert filesystem_of(Path(path), MOUNTS) == kind


def test_a_spill_disk_is_tried_and_left_as_it_was(tmp_path: Path) -> None:
    directory = tmp_path / "deep" / "spill"
    found = spill(directory)
    assert found.passed
    assert "free" in found.found
    assert list(tmp_path.iterdir()) == []


def test_read_only_neither_makes_nor_tries_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert spill(tmp_path / "spill", read_only=True).status == "skipped"
    monkeypatch.setattr(host, "_try_disk", None)
    assert spill(tmp_path, read_only=True).passed
    assert list(tmp_path.iterdir()) == []


def test_a_spill_disk_in_memory_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text("tmpfs / tmpfs rw 0 0\n")
    monkeypatch.setattr(host, "_MOUNTS", mounts)
    found = spill(tmp_path / "spill")
    assert found.status == "warning"
    assert "tmpfs is memory" in found.found
    assert "DCP_S3_SPILL_DIR" in found.remedy


def test_a_spill_disk_that_cannot_be_written_fails_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    found = doctor("s3://bucket/run", {"spill_dir": str(tmp_path / "file" / "spill")})["spill disk"]
    assert found.status == "failed"
    assert str(tmp_path / "file") in found.found
    assert "DCP_S3_SPILL_DIR" in found.remedy


def test_a_disk_that_does_not_flush_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("os.fsync", refuse)
    found = doctor("s3://bucket/run", {"spill_dir": str(tmp_path)})["spill disk"]
    assert found.status == "failed"
    assert "Input/output error" in found.found
    assert list(tmp_path.iterdir()) == []


def test_misspelled_settings_are_named_with_the_closest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DCP_S3_PARTSIZE", "64MiB")
    monkeypatch.setenv("DCP_S3_QQQQQQQQ", "1")
    found = host.check_settings(examination())
    assert found.status == "warning"
    assert "DCP_S3_PARTSIZE: did you mean DCP_S3_PART_SIZE?" in found.remedy
    assert "DCP_S3_QQQQQQQQ: unset it" in found.remedy


def test_a_torch_newer_than_all_that_was_run_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "TESTED", ("2.9", "2.10"))
    assert not versions.is_newer_than_tested(f"{versions.TESTED[-1]}.7+cu130")
    assert versions.is_newer_than_tested("99.0.0")
    monkeypatch.setattr(host, "is_newer_than_tested", lambda _: True)
    found = host.check_versions(Examination(parse_url("s3://bucket/run"), True, None))
    assert found.status == "warning"
    assert "never run with this torch, the newest was 2.10" in found.found
