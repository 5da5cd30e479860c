"""What doctor finds on real servers. docs/stores.md says the same: a new version of a server shows itself here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import tls
from dcp_s3.checkup.doctor import DoctorReport, doctor
from dcp_s3.s3.client import close_clients
from tests.s3.test_delete import versioned, versions
from tests.servers import S3Server

__all__ = ["versioned"]

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
    assert ": tidy" in doctor(root, read_only=True)["lifecycle"].found


@pytest.fixture
def behind_tls(
    s3_env: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[tuple[str, Path]]:  # fmt: skip
    """The same server behind nginx, with TLS: its URL, and the file of the authority that is to be trusted."""
    with tls.tls_in_front_of(s3_env.endpoint_url.removeprefix("http://")) as (port, authority):
        monkeypatch.setenv("DCP_S3_ENDPOINT_URL", f"https://127.0.0.1:{port}")
        yield f"https://127.0.0.1:{port}", authority
        close_clients()


@pytest.mark.skipif(tls.nginx() is None, reason="nginx is not installed")
@pytest.mark.servers("rgw")
def test_behind_nginx_with_tls(
    s3: Any, bucket: str, root: str, behind_tls: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, authority = behind_tls
    untrusted = doctor(root)
    assert [each.name for each in untrusted.failed] == ["endpoint"]
    assert "AWS_CA_BUNDLE" in untrusted["endpoint"].remedy
    monkeypatch.setenv("AWS_CA_BUNDLE", str(authority))
    close_clients()
    report = doctor(root)
    assert report.ok, str(report)
    assert url in report["endpoint"].found
    assert_found(report, "rgw")
    assert_as_before(s3, bucket)
