"""Single checks, and examinations of a server with faults: what each finds, and that the bucket is left as it was."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from dcp_s3 import errors
from dcp_s3.checkup import checks, probes
from dcp_s3.checkup.doctor import CHECKS, COLUMNS, PERMISSIONS, WORDS, doctor
from dcp_s3.checkup.probes import Examination
from dcp_s3.process import release
from dcp_s3.s3.diagnosis import permission_of
from dcp_s3.s3.store import S3Store
from dcp_s3.settings import Settings
from dcp_s3.url import parse_url
from tests.faulty import BUCKET, FaultyServer, close_clients, serve
from tests.memory_s3 import Fault
from tests.servers import S3Server
from tests.servers.process import free_port

_DOCS = Path(__file__).parents[2] / "docs"
PAGE, SECURITY = (_DOCS / "stores.md").read_text(), (_DOCS / "security.md").read_text()
URL = f"s3://{BUCKET}/run"
BEFORE = {"run/before": len(b"kept"), "run/step-1/.metadata": 0}
OPEN = "run/step-1/__0_0-ab.distcp"
DENIED = Fault.error(403, "AccessDenied")


def deny(server: FaultyServer, *operations: str) -> None:
    """Let the server refuse these operations."""
    server.rule = lambda request: DENIED if request.operation in operations else None


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyServer]:
    """With two objects and an open upload, which are there afterwards, and nothing else."""
    with serve(monkeypatch) as server:
        store = S3Store(BUCKET, Settings())
        store.put("run/before", b"kept")
        store.put("run/step-1/.metadata", b"")
        store.client.create_multipart_upload(Bucket=BUCKET, Key=OPEN)
        server.s3.reset_counters()
        yield server
        server.rule = lambda _: None
        assert server.s3.objects(BUCKET) == BEFORE
        assert server.s3.open_uploads(BUCKET) == [OPEN]


def test_a_good_store_has_nothing_that_failed_and_its_row_takes_at_most_25_requests(faulty: FaultyServer) -> None:
    with pytest.raises(errors.InvalidURLError):
        doctor("file:///tmp")
    asked, taken = 0, {}

    def count(result: Any) -> None:
        nonlocal asked
        before, asked = asked, sum(faulty.s3.counters.requests.values())
        taken[result.name] = asked - before

    report = doctor(URL, on_result=count)
    assert report.ok
    assert "warning" not in {each.status for each in report.checks}
    assert [each.name for each in report.checks] == [*(check.name for check in CHECKS), "clean-up"]
    for name, answer in (("If-None-Match", "412"), ("conditional delete", "412"), ("checksums", "BadDigest")):
        assert answer in report[name].found
    assert faulty.s3.counters.requests["CompleteMultipartUpload"] >= 1
    keys = {request.key for request in faulty.s3.request_log if request.key}
    assert {bool(re.match(r"run/doctor-probe-[a-z]+/", key)) for key in keys} == {True}, "a digit would be a step"
    names = {name for _, names in COLUMNS for name in names} | {"endpoint"}  # which asks for the clock
    assert 15 < sum(taken[name] for name in names) <= 25
    assert report.row == f"| MemoryS3 | {FOUND['memory']} |"
    assert str(report).endswith(f"docs/stores.md\n{report.row}")
    assert report.to_dict()["row"] == report.row


def test_the_docs_have_what_the_tests_find_on_real_servers_and_todays_checks() -> None:
    rows = dict(re.findall(r"^\| ([^|]+) \| (.*) \|$", PAGE, re.MULTILINE))
    names = {"moto 5.2": "moto", "`rclone serve s3` 1.75": "rclone", "Ceph RGW 16.2": "rgw",
             "Ceph RGW 16.2, bucket with versions": "rgw with versions"}  # fmt: skip
    assert {title: rows[title] for title in names} == {title: FOUND[name] for title, name in names.items()}
    assert f"| store | {' | '.join(title for title, _ in COLUMNS)} |" in PAGE
    (output,) = re.findall(r"^```text\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    for check in CHECKS:
        assert re.search(rf"^({'|'.join(WORDS.values())}) +{re.escape(check.name)} ", output, re.MULTILINE), check.name
    assert "saves and loads will work" in output.splitlines()[-3]
    assert output.splitlines()[-1].endswith(f"| {FOUND['rgw']} |")


@pytest.mark.parametrize(
    ("operation", "check", "consequence"),
    [
        ("ListObjectsV2", "ListObjectsV2", ""),
        ("GetObject", "ListObjectsV2", ""),  # which looks for an object that is missing
        ("PutObject", "PutObject", ""),
        ("CreateMultipartUpload", "multipart upload", ""),
        ("UploadPart", "multipart upload", ""),
        ("CompleteMultipartUpload", "multipart upload", ""),
        ("AbortMultipartUpload", "AbortMultipartUpload", "leaves its multipart upload open"),
        ("ListMultipartUploads", "ListMultipartUploads", "prune does not work"),
    ],
)
def test_what_every_save_needs_fails_and_what_saves_can_do_without_is_a_warning(
    faulty: FaultyServer, operation: str, check: str, consequence: str
) -> None:
    deny(faulty, operation)
    report = doctor(URL)
    assert (report.ok, report[check].status) == ((True, "warning") if consequence else (False, "failed"))
    assert (consequence or operation) in report[check].found
    assert permission_of(operation) in report[check].remedy
    if consequence:
        assert report["clean-up"].status == ("warning" if operation == "AbortMultipartUpload" else "ok")
    faulty.rule, store = lambda _: None, S3Store(BUCKET, Settings())
    for upload in store.uploads("run/doctor-probe-"):
        store.abort(upload)


def _elsewhere(request: Any) -> Fault:
    body = b"<Error><Code>PermanentRedirect</Code><Message>m</Message><Region>eu-central-1</Region></Error>"
    headers = {"x-amz-bucket-region": "eu-central-1", "Content-Type": "application/xml"}
    return Fault.forge(301, b"" if request.method == "HEAD" else body, headers)


@pytest.mark.parametrize(
    ("url", "rule", "environment", "failed", "found", "remedy"),
    [
        (URL, _elsewhere, {}, "ListObjectsV2", "", "set DCP_S3_REGION=eu-central-1"),
        (f"s3://{BUCKET}-not/run", None, {}, "ListObjectsV2", f"{BUCKET}-not", "create the bucket"),
        (
            URL, lambda _: Fault.error(403, "InvalidAccessKeyId"), {}, "ListObjectsV2", "InvalidAccessKeyId",
            "credentials",
        ),
        (URL, None, {"DCP_S3_PART_SIZE": "1MiB"}, "settings", "DCP_S3_PART_SIZE = '1MiB'", ""),
        (URL, None, {"DCP_S3_ENDPOINT_URL": "http://127.0.0.1:PORT"}, "endpoint", "", "DCP_S3_ENDPOINT_URL"),
    ],
    ids=["region", "bucket", "credentials", "settings", "endpoint"],
)  # fmt: skip
def test_what_stands_in_the_way_fails_alone_and_the_rest_is_skipped(
    faulty: FaultyServer, monkeypatch: pytest.MonkeyPatch, url: str, rule: Any, environment: dict[str, str],
    failed: str, found: str, remedy: str,
) -> None:  # fmt: skip
    faulty.rule = rule or faulty.rule
    for name, value in environment.items():
        monkeypatch.setenv(name, value.replace("PORT", str(free_port())))
    report = doctor(url)
    assert [each.name for each in report.failed] == [failed]
    assert found in report[failed].found
    assert remedy in report[failed].remedy
    assert report["PutObject"].status == "skipped"
    assert report["versions"].status == "ok"
    assert "clean-up" not in {each.name for each in report.checks}
    dependent = {"settings": "endpoint", "endpoint": "clock"}.get(failed, "PutObject")
    assert report[dependent].found == f"not checked: see {failed}"


def test_an_endpoint_that_connects_and_says_nothing(monkeypatch: pytest.MonkeyPatch, faulty: FaultyServer) -> None:
    monkeypatch.setattr(probes, "_LIMIT", probes.Limit(hang=0.2, attempts=3))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("DCP_S3_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        report = doctor(URL)
    assert [each.name for each in report.failed] == ["endpoint"]
    assert "read timeout" in report["endpoint"].found.lower()
    assert "AWS_CA_BUNDLE" in report["endpoint"].remedy
    assert {each.status for each in report.checks[4:-1]} == {"skipped"}  # all but what this host alone tells


def test_a_store_that_ignores_conditions_and_ranges(faulty: FaultyServer, monkeypatch: pytest.MonkeyPatch) -> None:
    operations = faulty.s3._operations
    handle = operations.handle

    def without(operation: str, call: Any) -> Any:
        for name in ("if-none-match", "if-match", "range"):
            call.headers.pop(name, None)
        return handle(operation, call)

    monkeypatch.setattr(operations, "handle", without)
    report = doctor(URL)
    assert [each.name for each in report.failed] == ["GetObject"]
    assert "ranges" in report["GetObject"].remedy
    found = [each.name for each in report.checks if each.status == "warning"]
    assert found == ["If-None-Match", "If-Match", "conditional delete"]
    assert "| ignored, ignored, ignored |" in report.row
    assert "one job only" in report["If-None-Match"].remedy


def test_a_store_that_refuses_checksums(faulty: FaultyServer) -> None:
    faulty.rule = lambda request: (
        Fault.error(400, "InvalidRequest")
        if {"x-amz-checksum-crc64nvme", "x-amz-checksum-algorithm"} & set(request.headers)
        else None
    )
    report = doctor(URL)
    assert report.ok
    assert "does not know CRC-64/NVME" in report["checksums"].found
    assert "| refused | refused |" in report.row
    close_clients()
    insisting = doctor(URL, {"checksum": "crc64nvme"})
    assert insisting["checksums"].status == "failed"
    assert "DCP_S3_CHECKSUM=auto" in insisting["checksums"].remedy


_EMPTY = Fault.forge(200, b"<ListMultipartUploadsResult/>", {"Content-Type": "application/xml"})
_NONE = Fault.error(501, "NotImplemented")


@pytest.mark.parametrize(
    ("operation", "answer", "check", "cell"),
    [
        ("ListMultipartUploads", _EMPTY, "ListMultipartUploads", "not what is open"),  # only by exact names, as AIStor
        ("ListMultipartUploads", _NONE, "ListMultipartUploads", "no"),
        ("CopyObject", _NONE, "copies", "no"),
        ("UploadPartCopy", _NONE, "copies", "objects"),
        ("DeleteObjects", _NONE, "DeleteObjects", ""),
    ],
)
def test_a_store_that_lacks_an_operation(
    faulty: FaultyServer, operation: str, answer: Fault, check: str, cell: str
) -> None:
    faulty.rule = lambda request: answer if request.operation == operation else None
    report = doctor(URL)
    assert (report[check].status, report[check].cell) == ("warning", cell)
    assert report.ok


EXPIRE: dict[str, Any] = {"Expiration": {"Days": 30}}


@pytest.mark.parametrize(
    ("harms", "rule"),
    [
        (True, EXPIRE),  # of the whole bucket
        (True, {"Filter": {"Prefix": "team/"}, **EXPIRE}),
        (True, {"Filter": {"Prefix": "team/run/step-1"}, **EXPIRE}),  # some of them
        (True, {"Filter": {"And": {"Prefix": "team/", "ObjectSizeGreaterThan": 10**6}}, **EXPIRE}),
        (True, {"Transitions": [{"StorageClass": "STANDARD_IA"}, {"StorageClass": "DEEP_ARCHIVE"}]}),
        (False, {"Filter": {"Prefix": "team/other/"}, **EXPIRE}),
        (False, {"Filter": {"And": {"Prefix": "team/", "Tags": [{"Key": "k", "Value": "v"}]}}, **EXPIRE}),
        (False, {"Expiration": {"ExpiredObjectDeleteMarker": True}}),
        (False, {"Transitions": [{"Days": 30, "StorageClass": "GLACIER_IR"}]}),  # read like any other
        (False, {"AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 7}}),
    ],
)
def test_lifecycle_rules_that_harm_checkpoints(harms: bool, rule: dict[str, Any]) -> None:
    rule = {"ID": "r", "Status": "Enabled", **rule}
    assert checks.does_harm(rule, "team/run/") == harms
    assert not checks.does_harm({**rule, "Status": "Disabled"}, "team/run/")


def test_without_deletes_the_probe_objects_stay_and_are_named(faulty: FaultyServer) -> None:
    deny(faulty, "DeleteObject", "DeleteObjects")
    report = doctor(URL)
    assert report.ok
    assert report["DeleteObject"].status == "warning"
    assert "prune does not" in report["DeleteObject"].found
    left = sorted(set(faulty.s3.objects(BUCKET)) - set(BEFORE))
    assert all(each in report["clean-up"].found for each in left)
    assert report["clean-up"].status == "warning"
    faulty.rule = lambda _: None
    S3Store(BUCKET, Settings()).delete(left)


@pytest.mark.parametrize("operation", ["PutObject", "CreateMultipartUpload", "CompleteMultipartUpload"])
def test_lost_answers_leave_nothing(faulty: FaultyServer, operation: str) -> None:
    """Every second time: the request was carried out, nobody knows."""
    seen: list[int] = []

    def rule(request: Any) -> Fault | None:
        if request.operation != operation:
            return None
        seen.append(request.number)
        return Fault.apply_then_reset() if len(seen) % 2 else None

    faulty.rule = rule
    doctor(URL)
    assert seen


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


@pytest.mark.servers("memory", "moto", "rclone", "rgw")
def test_what_is_found_and_nothing_is_left(s3: Any, bucket: str, root: str, server: S3Server) -> None:
    report = doctor(root)
    assert report.ok, str(report)
    assert report.row.partition(" | ")[2] == f"{FOUND[server.name]} |"
    for name in ("PutObject", "GetObject", "DeleteObjects", "ListMultipartUploads"):
        assert report[name].status == "ok", report[name]
    assert report["clean-up"].status == "ok"
    assert not s3.list_objects_v2(Bucket=bucket).get("Contents")


@pytest.mark.servers("moto", "rgw")
def test_with_versions_none_of_the_probes_is_left(s3: Any, bucket: str, versioned: str, server: S3Server) -> None:
    report = doctor(versioned)
    assert report.ok, str(report)
    assert report["versioning"].status == "warning"
    assert "stay as old versions" in report["versioning"].found
    assert report.row.partition(" | ")[2] == f"{FOUND[f'{server.name} with versions']} |"
    assert report["clean-up"].status == "ok"
    assert not versions(s3, bucket)


@pytest.mark.servers("moto", "rgw")
def test_a_rule_that_would_expire_checkpoints_is_named(s3: Any, bucket: str, root: str) -> None:
    rule = {"ID": "tidy", "Status": "Enabled", "Filter": {"Prefix": ""}, "Expiration": {"Days": 30}}
    s3.put_bucket_lifecycle_configuration(Bucket=bucket, LifecycleConfiguration={"Rules": [rule]})
    assert ": tidy" in doctor(root)["lifecycle"].found


def examination(**settings: Any) -> Examination:
    return Examination(parse_url("s3://bucket/run"), settings, Settings(**settings))


def test_a_spill_disk_is_tried_and_left_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = checks.check_spill(examination(spill_dir=str(tmp_path / "deep" / "spill")))
    assert (found.status in ("ok", "warning"), "free" in found.found) == (True, True)
    assert list(tmp_path.iterdir()) == []
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
    for newest, status in ((installed, "ok"), ("2.2", "warning")):
        monkeypatch.setattr(checks, "TESTED", ("2.1", newest))
        found = checks.check_versions(examination())
        assert (found.status, "never run with this torch" in found.found) == (status, status == "warning")
    assert "the newest was 2.2" in found.found


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


@pytest.mark.parametrize(
    ("skew", "status", "cell"),
    [(0.4, "ok", "agrees"), (-30, "ok", "30 s ahead"), (70, "warning", "70 s behind"),
     (-899, "warning", "899 s ahead"), (901, "failed", "901 s behind"), (None, "skipped", "not told")],
)  # fmt: skip
def test_clocks(skew: float | None, status: str, cell: str) -> None:
    exam = examination()
    exam.skew = skew
    found = checks.check_clock(exam)
    assert (found.status, found.cell) == (status, cell)
    assert ("NTP" in found.remedy) == (status in ("warning", "failed"))


def test_the_table_in_the_docs_has_these_permissions() -> None:
    table = SECURITY.partition("named below:")[2].partition("`s3:ListBucket` is needed")[0].strip().splitlines()
    rows = [
        f"| {', '.join(f'`{name}`' for name in each.operations)} | `{each.action}`"
        f"{' (on the bucket)' if each.operations[0].startswith('List') else ''} | {each.used_by} |"
        for each in PERMISSIONS
    ]
    assert table[2:] == rows
    assert PERMISSIONS[0].action == "s3:GetObject"
