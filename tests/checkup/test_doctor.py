"""Whole examinations against a server with faults. Whatever goes wrong, the bucket is as it was before."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dcp_s3 import errors
from dcp_s3.checkup import examination
from dcp_s3.checkup.doctor import CHECKS, doctor, examine
from dcp_s3.checkup.result import DoctorReport
from dcp_s3.s3.client import close_clients
from dcp_s3.s3.diagnosis import permission_of
from dcp_s3.s3.store import S3Store
from dcp_s3.settings import Settings
from tests.faulty import BUCKET, FaultyServer, serve
from tests.memory_s3 import Fault, MemoryS3
from tests.servers.process import free_port

URL = f"s3://{BUCKET}/run"
BEFORE = {"run/before": len(b"kept"), "run/step-1/.metadata": 0}
_OPEN = "run/step-1/__0_0-ab.distcp"
DENIED = Fault.error(403, "AccessDenied")


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyServer]:
    """With two objects and an open upload, which are there afterwards, and nothing else."""
    with serve(monkeypatch) as server:
        fill(server.s3)
        yield server
        server.rule = lambda _: None
        assert server.s3.objects(BUCKET) == BEFORE
        assert server.s3.open_uploads(BUCKET) == [_OPEN]


def fill(s3: MemoryS3) -> None:
    store = S3Store(BUCKET, Settings())
    store.put("run/before", b"kept")
    store.put("run/step-1/.metadata", b"")
    store.client.create_multipart_upload(Bucket=BUCKET, Key=_OPEN)
    s3.reset_counters()


def deny(server: FaultyServer, *operations: str, key: str = "") -> None:
    server.rule = lambda request: DENIED if request.operation in operations and request.key.endswith(key) else None


def statuses(report: DoctorReport) -> dict[str, str]:
    return {each.name: each.status for each in report.checks}


def test_a_good_store_has_nothing_that_failed(faulty: FaultyServer) -> None:
    report = doctor(URL)
    assert report.ok
    assert not report.warnings
    assert [each.name for each in report.checks] == [*(check.name for check in CHECKS), "clean-up"]
    assert all(each.seconds >= 0 for each in report.checks)
    assert "412" in report["If-None-Match"].found
    assert "412" in report["conditional delete"].found
    assert "BadDigest" in report["checksums of objects"].found
    assert "BadDigest" in report["checksums of parts"].found
    assert "S3-only" in report["identity"].found
    assert report.policies["training"]["Statement"][0]["Resource"] == f"arn:aws:s3:::{BUCKET}/run/*"
    assert faulty.s3.counters.requests["CompleteMultipartUpload"] >= 2


def test_it_writes_only_below_a_name_without_a_step(faulty: FaultyServer) -> None:
    doctor(URL)
    for request in faulty.s3.request_log:
        if request.operation not in ("HeadBucket", "GetBucketVersioning", "NotImplemented") and request.key:
            name = request.key.removeprefix("run/").partition("/")[0]
            assert name.startswith("doctor-probe-")
            assert not any(letter.isdigit() for letter in name)


def test_read_only_writes_nothing(faulty: FaultyServer, tmp_path: Path) -> None:
    report = doctor(URL, {"spill_dir": str(tmp_path / "spill")}, read_only=True)
    assert report.ok
    written = ("PutObject", "DeleteObject", "DeleteObjects", "CreateMultipartUpload", "CopyObject")
    assert not set(written) & set(faulty.s3.counters.requests)
    assert not {check.name for check in CHECKS if check.writes} & set(statuses(report))
    assert not (tmp_path / "spill").exists()


@pytest.mark.parametrize(
    "operation", ["GetObject", "PutObject", "CreateMultipartUpload", "UploadPart", "CompleteMultipartUpload"]
)
def test_what_every_save_needs_fails(faulty: FaultyServer, operation: str) -> None:
    deny(faulty, operation)
    report = doctor(URL)
    found = report["missing object"] if operation == "GetObject" else report[operation]
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
        ("CopyObject", "copies go through this host"),
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
    assert (report["bucket"].status, report["missing object"].status) == ("warning", "failed")
    assert "s3:ListBucket" in report["missing object"].remedy
    assert "s3:ListBucket" in report["ListObjectsV2"].remedy
    assert report["clean-up"].status == "ok"


def test_without_deletes_one_probe_object_stays_and_is_named(
    monkeypatch: pytest.MonkeyPatch, faulty: FaultyServer
) -> None:
    deny(faulty, "DeleteObject", "DeleteObjects")
    report = doctor(URL)
    assert report.ok
    assert report["DeleteObject"].status == "warning"
    assert "prune does not" in report["DeleteObject"].found
    for name in ("DeleteObjects", ".metadata", ".dcp_s3/", "CopyObject", "conditional delete"):
        assert report[name].status == "skipped"
    (left,) = set(faulty.s3.objects(BUCKET)) - set(BEFORE)
    assert left in report["clean-up"].found
    assert report["clean-up"].status == "warning"
    faulty.rule = lambda _: None
    S3Store(BUCKET, Settings()).delete([left])


@pytest.mark.parametrize(("key", "check"), [("/.metadata", ".metadata"), (".json", ".dcp_s3/")])
def test_a_policy_that_denies_some_names_fails(faulty: FaultyServer, key: str, check: str) -> None:
    deny(faulty, "PutObject", key=key)
    report = doctor(URL)
    assert [each.name for each in report.failed] == [check]
    assert "fail to commit" in report[check].found
    assert "s3:PutObject" in report[check].remedy


def test_a_policy_that_denies_only_the_lists_of_deletions_is_a_warning(faulty: FaultyServer) -> None:
    faulty.rule = lambda request: DENIED if "/.dcp_s3/deletion-" in request.key else None
    report = doctor(URL)
    assert report.ok
    assert "prune cannot delete" in report[".dcp_s3/"].found


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
        "If-None-Match", "If-Match", "conditional delete", "conditional read",
    ]  # fmt: skip
    assert "ignored" in report["If-None-Match"].found
    assert "one job only" in report["If-None-Match"].remedy


def test_a_store_that_does_not_implement_conditions(faulty: FaultyServer) -> None:
    faulty.rule = lambda request: (
        Fault.error(501, "NotImplemented")
        if request.method in ("PUT", "DELETE") and {"if-match", "if-none-match"} & set(request.headers)
        else None
    )
    report = doctor(URL)
    assert report.ok
    for name in ("If-None-Match", "If-Match", "conditional delete"):
        assert "not implemented (501)" in report[name].found
    assert report["conditional read"].status == "ok"
    assert report[".metadata"].status == "ok"


def test_a_store_that_ignores_checksums(monkeypatch: pytest.MonkeyPatch) -> None:
    server = FaultyServer()
    server.s3 = MemoryS3(verify_checksums=False)
    with serve(monkeypatch, server):
        report = doctor(URL)
        assert report.ok
        for name in ("checksums of objects", "checksums of parts"):
            assert report[name].status == "warning"
            assert "accepted, but not compared" in report[name].found
        assert server.s3.objects(BUCKET) == {}


def test_a_store_that_refuses_checksums(faulty: FaultyServer) -> None:
    faulty.rule = lambda request: (
        Fault.error(400, "InvalidRequest") if "x-amz-checksum-crc64nvme" in request.headers else None
    )
    report = doctor(URL)
    assert report.ok
    assert "does not know CRC-64/NVME" in report["checksums of objects"].found
    close_clients()
    insisting = doctor(URL, {"checksum": "crc64nvme"})
    assert insisting["checksums of objects"].status == "failed"
    assert "DCP_S3_CHECKSUM=auto" in insisting["checksums of objects"].remedy


def test_crc32c_is_checked_where_it_is_set(faulty: FaultyServer) -> None:
    assert "CRC-32C is compared" in doctor(URL, {"checksum": "crc32c"})["checksums of parts"].found
    assert doctor(URL, {"checksum": "none"})["checksums of parts"].status == "skipped"


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
    assert [each.name for each in report.failed] == ["region"]
    assert report["region"].remedy == "set DCP_S3_REGION=eu-central-1"
    assert report["bucket"].status == report["PutObject"].status == "skipped"


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
    monkeypatch.setattr(examination, "_LIMIT", examination.Limit(hang=0.2, attempts=3))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("DCP_S3_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        report = doctor(URL)
    assert report["endpoint"].status == "ok"
    assert [each.name for each in report.failed] == ["latency"]
    assert "read timeout" in report["latency"].found.lower()
    online = [check.name for check in CHECKS if check.online and check.name not in ("endpoint", "latency")]
    assert {report[name].status for name in online} == {"skipped"}


def test_an_endpoint_that_goes_down_in_the_middle(faulty: FaultyServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examination, "_LIMIT", examination.Limit(hang=0.2, attempts=2))
    down = []

    def rule(request: Any) -> Fault | None:
        if request.operation == "ListParts":
            down.append(request)
        return Fault.reset() if down else None

    faulty.rule = rule
    report = doctor(URL)
    names = [each.name for each in report.checks]
    after = report.checks[names.index("ListParts") + 1 :]
    assert "stopped answering at ListParts" in report["CompleteMultipartUpload"].found
    assert all(each.status == "skipped" for each in after if not each.passed and each.name != "clean-up")
    assert len(down) <= 4
    assert report["clean-up"].status == "warning"
    assert "doctor-probe" in report["clean-up"].found
    faulty.rule = lambda _: None
    store = S3Store(BUCKET, Settings())
    for upload in store.uploads("run/doctor-probe-"):
        store.abort(upload)


def test_a_bucket_that_is_not_there(faulty: FaultyServer) -> None:
    report = doctor(f"s3://{BUCKET}-not/run")
    assert [each.name for each in report.failed] == ["bucket"]
    assert f"{BUCKET}-not" in report["bucket"].found
    assert "create the bucket" in report["bucket"].remedy
    assert report["PutObject"].found == "not checked: see bucket"


def test_credentials_that_s3_does_not_accept(faulty: FaultyServer) -> None:
    faulty.rule = lambda _: Fault.error(403, "InvalidAccessKeyId")
    report = doctor(URL)
    assert [each.name for each in report.failed] == ["bucket"]
    assert "InvalidAccessKeyId" in report["bucket"].found
    assert "check the credentials" in report["bucket"].remedy


def test_no_credentials(faulty: FaultyServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    close_clients()
    report = doctor(URL)
    assert [each.name for each in report.failed] == ["credentials"]
    assert report["endpoint"].status == "ok"
    assert report["bucket"].status == "skipped"


def test_a_setting_that_is_not_valid(faulty: FaultyServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DCP_S3_PART_SIZE", "1MiB")
    report = doctor(URL)
    assert [each.name for each in report.failed] == ["settings"]
    assert "DCP_S3_PART_SIZE = '1MiB'" in report["settings"].found
    assert report["versions"].status == "ok"
    assert report["endpoint"].found == "not checked: see settings"


def test_the_owner_of_the_bucket(faulty: FaultyServer, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = "123456789012"
    monkeypatch.setenv("DCP_S3_EXPECTED_BUCKET_OWNER", owner)
    assert doctor(URL)["bucket owner"].status == "warning"
    header = "x-amz-expected-bucket-owner"
    faulty.rule = lambda request: DENIED if request.headers.get(header) != owner else None
    report = doctor(URL)
    assert report.ok
    assert report["bucket owner"].status == "ok"


CONFIGURATIONS: dict[str, tuple[str, str, bytes, str, str]] = {
    "expires": (
        "lifecycle", "lifecycle",
        b"<LifecycleConfiguration><Rule><ID>tidy</ID><Status>Enabled</Status><Filter><Prefix>ru</Prefix></Filter>"
        b"<Expiration><Days>30</Days></Expiration></Rule></LifecycleConfiguration>",
        "warning", "rule 'tidy' deletes objects after 30 days",
    ),
    "aborts": (
        "lifecycle", "incomplete uploads",
        b"<LifecycleConfiguration><Rule><ID>a</ID><Status>Enabled</Status><Filter><Prefix></Prefix></Filter>"
        b"<AbortIncompleteMultipartUpload><DaysAfterInitiation>7</DaysAfterInitiation>"
        b"</AbortIncompleteMultipartUpload></Rule></LifecycleConfiguration>",
        "ok", "after 7 days",
    ),
    "does not abort": (
        "lifecycle", "incomplete uploads", b"<LifecycleConfiguration></LifecycleConfiguration>",
        "warning", "killed processes",
    ),
    "versions": (
        "versioning", "versioning",
        b"<VersioningConfiguration><Status>Enabled</Status></VersioningConfiguration>",
        "warning", "stay as old versions",
    ),
    "versions that may not be listed": (
        "versioning", "ListObjectVersions",
        b"<VersioningConfiguration><Status>Enabled</Status></VersioningConfiguration>",
        "warning", "prune --all-versions does not work",
    ),
    "locks": (
        "object-lock", "object lock",
        b"<ObjectLockConfiguration><ObjectLockEnabled>Enabled</ObjectLockEnabled><Rule><DefaultRetention>"
        b"<Mode>COMPLIANCE</Mode><Days>90</Days></DefaultRetention></Rule></ObjectLockConfiguration>",
        "warning", "locked for 90 days (COMPLIANCE)",
    ),
    "KMS": (
        "encryption", "encryption",
        b"<ServerSideEncryptionConfiguration><Rule><ApplyServerSideEncryptionByDefault><SSEAlgorithm>aws:kms"
        b"</SSEAlgorithm><KMSMasterKeyID>arn:aws:kms:eu-west-1:1:key/k</KMSMasterKeyID>"
        b"</ApplyServerSideEncryptionByDefault></Rule></ServerSideEncryptionConfiguration>",
        "warning", "without a bucket key",
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
    if case == "KMS":
        assert report.policies["training"]["Statement"][2]["Resource"] == "arn:aws:kms:eu-west-1:1:key/k"
    if case == "does not abort":
        assert '"Prefix": "run/"' in report[check].remedy


def test_a_configuration_that_may_not_be_read_is_skipped(faulty: FaultyServer) -> None:
    hidden = {"lifecycle", "versioning", "object-lock", "encryption"}
    faulty.rule = lambda request: DENIED if hidden & set(request.query) else None
    report = doctor(URL)
    assert report.ok
    assert not report.warnings
    for name, action in {
        "lifecycle": "s3:GetLifecycleConfiguration",
        "versioning": "s3:GetBucketVersioning",
        "object lock": "s3:GetBucketObjectLockConfiguration",
        "encryption": "s3:GetEncryptionConfiguration",
    }.items():
        assert report[name].status == "skipped"
        assert action in report[name].found


def test_ranges_that_are_ignored_fail(faulty: FaultyServer, monkeypatch: pytest.MonkeyPatch) -> None:
    ignore(faulty, monkeypatch, "range")
    report = doctor(URL)
    assert report["GetObject"].status == "failed"
    assert "ranges" in report["GetObject"].remedy


@pytest.mark.parametrize("operation", ["PutObject", "CreateMultipartUpload", "CompleteMultipartUpload", "CopyObject"])
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


@pytest.mark.parametrize("check", [each.name for each in CHECKS if each.writes] + ["clean-up"])
def test_interrupted_after_any_check_nothing_is_left(faulty: FaultyServer, check: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(examination, "_LATE_SECONDS", 0.0)

    def interrupt(result: Any) -> None:
        if result.name == check:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        examine(URL, None, read_only=False, on_result=interrupt)


@pytest.mark.parametrize("operation", ["UploadPart", "CopyObject", "DeleteObjects"])
def test_interrupted_within_a_request_nothing_is_left(
    faulty: FaultyServer, operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(examination, "_LATE_SECONDS", 0.0)
    ask: Callable[..., Any] = examination.Examination.ask
    done = []

    def interrupted(self: Any, name: str, *arguments: Any, **more: Any) -> Any:
        answer = ask(self, name, *arguments, **more)
        if name == operation and not done:
            done.append(name)
            raise KeyboardInterrupt
        return answer

    monkeypatch.setattr(examination.Examination, "ask", interrupted)
    with pytest.raises(KeyboardInterrupt):
        doctor(URL)
    assert done


def test_urls_that_are_none_of_s3_are_refused() -> None:
    with pytest.raises(errors.InvalidURLError):
        doctor("file:///tmp")


def test_the_report_is_short_to_look_at_and_whole_in_print(faulty: FaultyServer) -> None:
    report = doctor(URL, read_only=True)
    assert repr(report).startswith(f"DoctorReport('{URL}', ")
    text = str(report)
    assert "ok       settings" in text
    assert f"arn:aws:s3:::{BUCKET}/run/*" in text
    with pytest.raises(KeyError, match="no check 'nothing' was made; there are: settings"):
        report["nothing"]
