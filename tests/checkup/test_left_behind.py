"""Whatever goes wrong, an examination leaves the bucket as it was before, or says what is left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dcp_s3.checkup import probes
from dcp_s3.checkup.doctor import CHECKS, doctor, examine
from dcp_s3.s3.store import S3Store
from dcp_s3.settings import Settings
from tests.checkup.examining import BEFORE, URL, deny
from tests.faulty import BUCKET, FaultyServer
from tests.memory_s3 import Fault


def test_it_writes_only_below_a_name_without_a_step(faulty: FaultyServer) -> None:
    doctor(URL)
    for request in faulty.s3.request_log:
        if request.operation not in ("HeadBucket", "GetBucketVersioning", "NotImplemented") and request.key:
            name = request.key.removeprefix("run/").partition("/")[0]
            assert name.startswith("doctor-probe-")
            assert not any(letter.isdigit() for letter in name)


def test_without_deletes_one_probe_object_stays_and_is_named(
    monkeypatch: pytest.MonkeyPatch, faulty: FaultyServer
) -> None:
    deny(faulty, "DeleteObject", "DeleteObjects")
    report = doctor(URL)
    assert report.ok
    assert report["DeleteObject"].status == "warning"
    assert "prune does not" in report["DeleteObject"].found
    for name in ("DeleteObjects", "commit", "conditional delete"):
        assert report[name].status == "skipped"
    (left,) = set(faulty.s3.objects(BUCKET)) - set(BEFORE)
    assert left in report["clean-up"].found
    assert report["clean-up"].status == "warning"
    faulty.rule = lambda _: None
    S3Store(BUCKET, Settings()).delete([left])


def test_an_endpoint_that_goes_down_in_the_middle(faulty: FaultyServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "_LIMIT", probes.Limit(hang=0.2, attempts=2))
    down = []

    def rule(request: Any) -> Fault | None:
        if request.operation == "ListParts":
            down.append(request)
        return Fault.reset() if down else None

    faulty.rule = rule
    report = doctor(URL)
    names = [each.name for each in report.checks]
    after = report.checks[names.index("ListParts") + 1 :]
    assert "stopped answering at ListParts" in report["AbortMultipartUpload"].found
    assert all(each.status == "skipped" for each in after if not each.passed and each.name != "clean-up")
    assert len(down) <= 4
    assert report["clean-up"].status == "warning"
    assert "doctor-probe" in report["clean-up"].found
    faulty.rule = lambda _: None
    store = S3Store(BUCKET, Settings())
    for upload in store.uploads("run/doctor-probe-"):
        store.abort(upload)
    store.delete([each.key for each in store.list("run/doctor-probe-").objects])


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


@pytest.mark.parametrize("check", [each.name for each in CHECKS if each.writes] + ["clean-up"])
def test_interrupted_after_any_check_nothing_is_left(faulty: FaultyServer, check: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(probes, "_LATE_SECONDS", 0.0)

    def interrupt(result: Any) -> None:
        if result.name == check:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        examine(URL, None, read_only=False, on_result=interrupt)


@pytest.mark.parametrize("operation", ["UploadPart", "DeleteObjects"])
def test_interrupted_within_a_request_nothing_is_left(
    faulty: FaultyServer, operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probes, "_LATE_SECONDS", 0.0)
    ask: Callable[..., Any] = probes.Examination.ask
    done = []

    def interrupted(self: Any, name: str, *arguments: Any, **more: Any) -> Any:
        answer = ask(self, name, *arguments, **more)
        if name == operation and not done:
            done.append(name)
            raise KeyboardInterrupt
        return answer

    monkeypatch.setattr(probes.Examination, "ask", interrupted)
    with pytest.raises(KeyboardInterrupt):
        doctor(URL)
    assert done
