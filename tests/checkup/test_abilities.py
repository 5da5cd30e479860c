"""Whole examinations: stores that lack something (conditions, checksums, ranges), and how the bucket is set up."""

from __future__ import annotations

from typing import Any

import pytest

from dcp_s3.checkup.doctor import doctor
from dcp_s3.s3.client import close_clients
from tests.checkup.examining import DENIED, URL
from tests.faulty import BUCKET, FaultyServer, serve
from tests.memory_s3 import Fault, MemoryS3


def ignore(server: FaultyServer, monkeypatch: pytest.MonkeyPatch, *headers: str) -> None:
    """Let the server not see these headers."""
    operations = server.s3._operations
    handle = operations.handle

    def without(operation: str, call: Any) -> Any:
        for name in headers:
            call.headers.pop(name, None)
        return handle(operation, call)

    monkeypatch.setattr(operations, "handle", without)


def test_a_store_that_ignores_conditions(faulty: FaultyServer, monkeypatch: pytest.MonkeyPatch) -> None:
    ignore(faulty, monkeypatch, "if-none-match", "if-match")
    report = doctor(URL)
    assert report.ok
    assert [each.name for each in report.warnings] == [
        "If-None-Match", "If-Match", "conditional delete",
    ]  # fmt: skip
    assert "ignored" in report["If-None-Match"].found
    assert "one job only" in report["If-None-Match"].remedy


def test_a_store_that_ignores_checksums(monkeypatch: pytest.MonkeyPatch) -> None:
    server = FaultyServer()
    server.s3 = MemoryS3(verify_checksums=False)
    with serve(monkeypatch, server):
        report = doctor(URL)
        assert report.ok
        assert report["checksums"].status == "warning"
        assert "accepted, but not compared" in report["checksums"].found
        assert server.s3.objects(BUCKET) == {}


def test_a_store_that_refuses_checksums(faulty: FaultyServer) -> None:
    faulty.rule = lambda request: (
        Fault.error(400, "InvalidRequest") if "x-amz-checksum-crc64nvme" in request.headers else None
    )
    report = doctor(URL)
    assert report.ok
    assert "does not know CRC-64/NVME" in report["checksums"].found
    close_clients()
    insisting = doctor(URL, {"checksum": "crc64nvme"})
    assert insisting["checksums"].status == "failed"
    assert "DCP_S3_CHECKSUM=auto" in insisting["checksums"].remedy


def test_crc32c_is_checked_where_it_is_set(faulty: FaultyServer) -> None:
    assert "CRC-32C is compared" in doctor(URL, {"checksum": "crc32c"})["checksums"].found
    assert doctor(URL, {"checksum": "none"})["checksums"].status == "skipped"


CONFIGURATIONS: dict[str, tuple[str, str, bytes, str, str]] = {
    "expires": (
        "lifecycle", "lifecycle",
        b"<LifecycleConfiguration><Rule><ID>tidy</ID><Status>Enabled</Status><Filter><Prefix>ru</Prefix></Filter>"
        b"<Expiration><Days>30</Days></Expiration></Rule></LifecycleConfiguration>",
        "warning", "rule 'tidy' deletes objects after 30 days",
    ),
    "versions that may not be listed": (
        "versioning", "ListObjectVersions",
        b"<VersioningConfiguration><Status>Enabled</Status></VersioningConfiguration>",
        "warning", "prune --all-versions does not work",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CONFIGURATIONS)
def test_the_configuration_of_the_bucket(faulty: FaultyServer, case: str) -> None:
    query, check, body, status, text = CONFIGURATIONS[case]
    xml = {"Content-Type": "application/xml"}
    faulty.rule = lambda request: Fault.forge(200, body, xml) if query in request.query else None
    report = doctor(URL)
    assert report[check].status == status
    assert text in report[check].found


def test_a_configuration_that_may_not_be_read_is_skipped(faulty: FaultyServer) -> None:
    hidden = {"lifecycle", "versioning"}
    faulty.rule = lambda request: DENIED if hidden & set(request.query) else None
    report = doctor(URL)
    assert report.ok
    assert not report.warnings
    needed = {"lifecycle": "s3:GetLifecycleConfiguration", "ListObjectVersions": "s3:GetBucketVersioning"}
    for name, action in needed.items():
        assert report[name].status == "skipped"
        assert action in report[name].found


def test_ranges_that_are_ignored_fail(faulty: FaultyServer, monkeypatch: pytest.MonkeyPatch) -> None:
    ignore(faulty, monkeypatch, "range")
    report = doctor(URL)
    assert report["GetObject"].status == "failed"
    assert "ranges" in report["GetObject"].remedy
