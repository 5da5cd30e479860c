"""Single checks: settings, versions, spill disk, credentials, clocks; and what docs/security.md says of permissions."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from dcp_s3.checkup import checks
from dcp_s3.checkup.doctor import PERMISSIONS, doctor
from dcp_s3.checkup.probes import Examination
from dcp_s3.process import release
from dcp_s3.settings import Settings
from dcp_s3.url import parse_url
from tests.servers.process import free_port

DOCUMENT = (Path(__file__).parents[2] / "docs" / "security.md").read_text()


def examination(**settings: Any) -> Examination:
    return Examination(parse_url("s3://bucket/run"), settings, Settings(**settings))


# --- this host -------------------------------------------------------------------------------------------


def test_a_spill_disk_is_tried_and_left_as_it_was(tmp_path: Path) -> None:
    found = checks.check_spill(examination(spill_dir=str(tmp_path / "deep" / "spill")))
    assert found.status in ("ok", "warning")
    assert "free" in found.found
    assert list(tmp_path.iterdir()) == []


def test_a_spill_disk_that_cannot_be_written_or_flushed_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"")
    found = doctor("s3://bucket/run", {"spill_dir": str(tmp_path / "file" / "spill")})["spill disk"]
    assert (found.status, str(tmp_path / "file") in found.found) == ("failed", True)
    assert "DCP_S3_SPILL_DIR" in found.remedy

    def refuse(_: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("os.fsync", refuse)
    (tmp_path / "disk").mkdir()
    found = doctor("s3://bucket/run", {"spill_dir": str(tmp_path / "disk")})["spill disk"]
    assert (found.status, "Input/output error" in found.found) == ("failed", True)
    assert list((tmp_path / "disk").iterdir()) == []


def test_misspelled_settings_are_named_with_the_closest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DCP_S3_PARTSIZE", "64MiB")
    monkeypatch.setenv("DCP_S3_QQQQQQQQ", "1")
    found = checks.check_settings(examination())
    assert found.status == "warning"
    assert "DCP_S3_PARTSIZE: did you mean DCP_S3_PART_SIZE?" in found.remedy
    assert "DCP_S3_QQQQQQQQ: unset it" in found.remedy


def test_a_torch_newer_than_all_that_was_run_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = ".".join(map(str, release(metadata.version("torch"))[:2]))
    monkeypatch.setattr(checks, "TESTED", ("2.1", installed))
    assert checks.check_versions(examination()).status == "ok"
    monkeypatch.setattr(checks, "TESTED", ("2.1", "2.2"))
    found = checks.check_versions(examination())
    assert found.status == "warning"
    assert "never run with this torch, the newest was 2.2" in found.found


# --- credentials: where they come from and how long they hold, never what they are -----------------------


@pytest.mark.parametrize("token", [None, "a-session-token-EXAMPLE"])
def test_credentials_show_nothing_that_could_be_used(token: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = {"AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI"} | ({"AWS_SESSION_TOKEN": token} if token else {})
    for name, value in {"AWS_ACCESS_KEY_ID": "AKIAIOSFODNN7EXAMPLE", **secret}.items():
        monkeypatch.setenv(name, value)
    found = checks.check_credentials(examination(endpoint_url=f"http://127.0.0.1:{free_port()}"))
    assert found.found.startswith("AKIA... from env")
    assert not any(value in str(found) for value in (*secret.values(), "AKIAIOSFODNN7EXAMPLE"))
    assert (found.status, "temporary" in found.found) == (("warning", True) if token else ("ok", False))
    assert ("instance or pod role" in found.remedy) == bool(token)


# --- the endpoint ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("skew", "status", "cell"),
    [
        (0.4, "ok", "agrees"),
        (-30, "ok", "30 s ahead"),
        (70, "warning", "70 s behind"),
        (-899, "warning", "899 s ahead"),
        (901, "failed", "901 s behind"),
        (None, "skipped", "not told"),
    ],
)
def test_clocks(skew: float | None, status: str, cell: str) -> None:
    exam = examination()
    exam.skew = skew
    found = checks.check_clock(exam)
    assert (found.status, found.cell) == (status, cell)
    assert ("NTP" in found.remedy) == (status in ("warning", "failed"))


# --- permissions: docs/security.md and the code say the same ----------------------------------------------


def test_the_table_in_the_docs_has_these_permissions() -> None:
    table = DOCUMENT.partition("named below:")[2].partition("`s3:ListBucket` is needed")[0].strip().splitlines()
    rows = [
        f"| {', '.join(f'`{name}`' for name in each.operations)} | `{each.action}`"
        f"{' (on the bucket)' if each.operations[0].startswith('List') else ''} | {each.used_by} |"
        for each in PERMISSIONS
    ]
    assert table[2:] == rows
    assert PERMISSIONS[0].action == "s3:GetObject"
