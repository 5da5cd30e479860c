"""Whole examinations against a server with faults: permissions, credentials, the way to it."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import Any

import pytest

from dcp_s3 import errors
from dcp_s3.checkup import probes
from dcp_s3.checkup.doctor import CHECKS, doctor
from dcp_s3.s3.diagnosis import permission_of
from tests.checkup.examining import DENIED, URL, deny, statuses
from tests.faulty import BUCKET, FaultyServer, serve
from tests.memory_s3 import Fault, MemoryS3
from tests.servers.process import free_port


def test_a_good_store_has_nothing_that_failed(faulty: FaultyServer) -> None:
    report = doctor(URL)
    assert report.ok
    assert not report.warnings
    assert [each.name for each in report.checks] == [*(check.name for check in CHECKS), "clean-up"]
    assert all(each.seconds >= 0 for each in report.checks)
    assert "412" in report["If-None-Match"].found
    assert "412" in report["conditional delete"].found
    assert "BadDigest" in report["checksums"].found
    assert "S3-only" in report["identity"].found
    assert faulty.s3.counters.requests["CompleteMultipartUpload"] >= 1


def test_read_only_writes_nothing(faulty: FaultyServer, tmp_path: Path) -> None:
    report = doctor(URL, {"spill_dir": str(tmp_path / "spill")}, read_only=True)
    assert report.ok
    written = ("PutObject", "DeleteObject", "DeleteObjects", "CreateMultipartUpload")
    assert not set(written) & set(faulty.s3.counters.requests)
    assert not {check.name for check in CHECKS if check.writes} & set(statuses(report))
    assert not (tmp_path / "spill").exists()


@pytest.mark.parametrize(
    "operation", ["GetObject", "PutObject", "CreateMultipartUpload", "UploadPart", "CompleteMultipartUpload"]
)
def test_what_every_save_needs_fails(faulty: FaultyServer, operation: str) -> None:
    deny(faulty, operation)
    report = doctor(URL)
    names = {"PutObject": "PutObject", "GetObject": "ListObjectsV2"}  # which looks for an object that is missing
    found = report[names.get(operation, "multipart upload")]
    assert found.status == "failed"
    assert operation in found.found
    assert permission_of(operation) in found.remedy
    assert not report.ok


@pytest.mark.parametrize(
    ("operation", "consequence"),
    [
        ("AbortMultipartUpload", "leaves its multipart upload open"),
        ("ListMultipartUploads", "prune does not work"),
        ("ListParts", "sends objects whose upload was begun anew"),
    ],
)
def test_what_saves_can_do_without_is_a_warning(faulty: FaultyServer, operation: str, consequence: str) -> None:
    deny(faulty, operation)
    report = doctor(URL)
    assert report.ok
    assert report[operation].status == "warning"
    assert consequence in report[operation].found
    assert permission_of(operation) in report[operation].remedy
    assert report["clean-up"].status == "ok"


def test_without_listings_missing_checkpoints_read_as_forbidden(faulty: FaultyServer) -> None:
    """As S3 does: without s3:ListBucket a 404 becomes a 403."""
    there: set[str] = set()

    def rule(request: Any) -> Fault | None:
        if request.operation == "PutObject":
            there.add(request.key)
        missing = request.operation == "GetObject" and request.key not in there
        return DENIED if missing or request.operation in ("ListObjectsV2", "HeadBucket") else None

    faulty.rule = rule
    report = doctor(URL)
    assert (report["bucket"].status, report["ListObjectsV2"].status) == ("warning", "failed")
    assert "s3:ListBucket" in report["ListObjectsV2"].remedy
    assert report["clean-up"].status == "ok"


@pytest.mark.parametrize("key", ["/.metadata", ".json"])
def test_a_policy_that_denies_some_names_fails(faulty: FaultyServer, key: str) -> None:
    deny(faulty, "PutObject", key=key)
    report = doctor(URL)
    assert [each.name for each in report.failed] == ["commit"]
    assert "fail to commit" in report["commit"].found
    assert "s3:PutObject" in report["commit"].remedy


def test_a_policy_that_denies_only_the_lists_of_deletions_is_a_warning(faulty: FaultyServer) -> None:
    faulty.rule = lambda request: DENIED if "/.dcp_s3/deletion-" in request.key else None
    report = doctor(URL)
    assert report.ok
    assert "prune cannot delete" in report["commit"].found


@pytest.mark.parametrize(("seconds", "status"), [(120.0, "warning"), (-3600.0, "failed")])
def test_a_clock_that_is_wrong(monkeypatch: pytest.MonkeyPatch, seconds: float, status: str) -> None:
    server = FaultyServer()
    server.s3 = MemoryS3(clock=lambda: time.time() + seconds)
    with serve(monkeypatch, server):
        found = doctor(URL)["clock"]
    assert found.status == status
    assert ("behind" if seconds > 0 else "ahead") in found.found
    assert "NTP" in found.remedy


def test_a_bucket_in_another_region(faulty: FaultyServer) -> None:
    body = (
        b"<?xml version='1.0'?><Error><Code>PermanentRedirect</Code><Message>elsewhere</Message>"
        b"<Region>eu-central-1</Region></Error>"
    )

    def rule(request: Any) -> Fault:
        headers = {"x-amz-bucket-region": "eu-central-1", "Content-Type": "application/xml"}
        return Fault.forge(301, b"" if request.method == "HEAD" else body, headers)

    faulty.rule = rule
    report = doctor(URL)
    assert [each.name for each in report.failed] == ["bucket"]
    assert "set DCP_S3_REGION=eu-central-1" in report["bucket"].remedy
    assert report["PutObject"].status == "skipped"


def test_an_endpoint_that_is_down_is_told_at_once(faulty: FaultyServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DCP_S3_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")
    began = time.monotonic()
    report = doctor(URL)
    assert time.monotonic() - began < 60  # with all retries of all checks it would be minutes
    assert [each.name for each in report.failed] == ["endpoint"]
    offline = {check.name for check in CHECKS if not check.online}
    assert {each.name for each in report.checks if each.passed} <= offline
    assert "clean-up" not in statuses(report)


def test_an_endpoint_that_connects_and_says_nothing(monkeypatch: pytest.MonkeyPatch, faulty: FaultyServer) -> None:
    monkeypatch.setattr(probes, "_LIMIT", probes.Limit(hang=0.2, attempts=3))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("DCP_S3_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        report = doctor(URL)
    assert [each.name for each in report.failed] == ["endpoint"]
    assert "read timeout" in report["endpoint"].found.lower()
    online = [check.name for check in CHECKS if check.online and check.name != "endpoint"]
    assert {report[name].status for name in online} == {"skipped"}


def test_a_bucket_that_is_not_there(faulty: FaultyServer) -> None:
    report = doctor(f"s3://{BUCKET}-not/run")
    assert [each.name for each in report.failed] == ["bucket"]
    assert f"{BUCKET}-not" in report["bucket"].found
    assert "create the bucket" in report["bucket"].remedy
    assert report["PutObject"].found == "not checked: see bucket"


def test_credentials_that_s3_does_not_accept(faulty: FaultyServer) -> None:
    faulty.rule = lambda _: Fault.error(403, "InvalidAccessKeyId")
    report = doctor(URL)
    assert [each.name for each in report.failed] == ["credentials"]
    assert "InvalidAccessKeyId" in report["credentials"].found
    assert "check the credentials" in report["credentials"].remedy


def test_a_setting_that_is_not_valid(faulty: FaultyServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DCP_S3_PART_SIZE", "1MiB")
    report = doctor(URL)
    assert [each.name for each in report.failed] == ["settings"]
    assert "DCP_S3_PART_SIZE = '1MiB'" in report["settings"].found
    assert report["versions"].status == "ok"
    assert report["endpoint"].found == "not checked: see settings"


def test_urls_that_are_none_of_s3_are_refused() -> None:
    with pytest.raises(errors.InvalidURLError):
        doctor("file:///tmp")


def test_the_report_is_short_to_look_at_and_whole_in_print(faulty: FaultyServer) -> None:
    report = doctor(URL, read_only=True)
    assert repr(report).startswith(f"DoctorReport('{URL}', ")
    text = str(report)
    assert "ok       settings" in text
    with pytest.raises(KeyError, match="no check 'nothing' was made; there are: settings"):
        report["nothing"]


def test_an_endpoint_that_changes_in_the_environment_is_the_one_that_is_asked(
    faulty: FaultyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", faulty.s3.endpoint_url)
    monkeypatch.delenv("DCP_S3_ENDPOINT_URL")
    assert doctor(URL, read_only=True).ok
    with MemoryS3() as other:
        other.create_bucket(BUCKET)
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", other.endpoint_url)
        asked = sum(faulty.s3.counters.requests.values())
        assert doctor(URL, read_only=True).ok
        assert sum(faulty.s3.counters.requests.values()) == asked
        assert sum(other.counters.requests.values()) > 0
