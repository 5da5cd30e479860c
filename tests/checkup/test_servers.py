"""What doctor finds on real servers. docs/stores.md says the same: a new version of a server shows itself here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from dcp_s3.checkup.doctor import DoctorReport, doctor
from tests.servers import S3Server

REST = "off | objects, parts | agrees"
NOT_COMPARED = "not compared (CRC-64/NVME)"
FOUND = {
    "memory": f"honoured, honoured, honoured | compared (CRC-64/NVME) | compared | yes | {REST}",
    "moto": f"honoured, honoured, honoured | {NOT_COMPARED} | kept | yes | {REST}",
    "moto with versions": f"honoured, honoured, honoured | {NOT_COMPARED} | kept | yes | on | objects, parts | agrees",
    "rclone": f"ignored, ignored, ignored | {NOT_COMPARED} | not kept | yes | off | objects | agrees",
    "rgw": f"honoured, refused always, ignored | {NOT_COMPARED} | not kept | yes | {REST}",
    "rgw with versions":
        f"ignored, refused always, ignored | {NOT_COMPARED} | not kept | yes | on | objects, parts | agrees",
}  # fmt: skip
"""The cells of a store's row, without its name."""


@pytest.fixture
def versioned(s3: Any, bucket: str, root: str) -> Iterator[str]:
    s3.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
    yield root
    for each in versions(s3, bucket):
        s3.delete_object(Bucket=bucket, Key=each["Key"], VersionId=each["VersionId"])


def versions(s3: Any, bucket: str) -> list[dict[str, Any]]:
    pages = list(s3.get_paginator("list_object_versions").paginate(Bucket=bucket))
    return [each for page in pages for name in ("Versions", "DeleteMarkers") for each in page.get(name, ())]


def assert_found(report: DoctorReport, store: str) -> None:
    assert report.row.partition(" | ")[2] == f"{FOUND[store]} |"


def assert_as_before(s3: Any, bucket: str) -> None:
    assert not s3.list_objects_v2(Bucket=bucket).get("Contents")


@pytest.mark.servers("memory", "moto", "rclone", "rgw")
def test_what_is_found_and_nothing_is_left(s3: Any, bucket: str, root: str, server: S3Server) -> None:
    report = doctor(root)
    assert report.ok, str(report)
    assert_found(report, server.name)
    for name in ("PutObject", "GetObject", "DeleteObjects", "ListMultipartUploads"):
        assert report[name].status == "ok", report[name]
    assert report["clean-up"].status == "ok"
    assert_as_before(s3, bucket)


@pytest.mark.servers("moto", "rgw")
def test_with_versions_none_of_the_probes_is_left(s3: Any, bucket: str, versioned: str, server: S3Server) -> None:
    report = doctor(versioned)
    assert report.ok, str(report)
    assert report["versioning"].status == "warning"
    assert "stay as old versions" in report["versioning"].found
    assert_found(report, f"{server.name} with versions")
    assert report["clean-up"].status == "ok"
    assert not versions(s3, bucket)


@pytest.mark.servers("moto", "rgw")
def test_a_rule_that_would_expire_checkpoints_is_named(s3: Any, bucket: str, root: str) -> None:
    rule = {"ID": "tidy", "Status": "Enabled", "Filter": {"Prefix": ""}, "Expiration": {"Days": 30}}
    s3.put_bucket_lifecycle_configuration(Bucket=bucket, LifecycleConfiguration={"Rules": [rule]})
    assert ": tidy" in doctor(root)["lifecycle"].found
