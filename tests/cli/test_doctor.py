"""``dcp-s3 doctor``, as somebody types it, and as a program reads it."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from dcp_s3.checkup.doctor import CHECKS
from dcp_s3.s3.store import S3Store
from dcp_s3.settings import Settings
from tests.cli import looking
from tests.faulty import BUCKET, FaultyServer, serve
from tests.interpreter import Interpreter
from tests.memory_s3 import Fault

URL = f"s3://{BUCKET}/run"
_DENIED = Fault.error(403, "AccessDenied")
_COMMAND = [sys.executable, "-m", "dcp_s3.cli.main", "doctor", URL]


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyServer]:
    """With one object, which alone is there afterwards."""
    with serve(monkeypatch) as server:
        S3Store(BUCKET, Settings()).put("run/before", b"kept")
        server.s3.reset_counters()
        yield server
        server.rule = lambda _: None
        assert server.s3.objects(BUCKET) == {"run/before": len(b"kept")}
        assert not server.s3.open_uploads(BUCKET)


run = partial(looking.run, "doctor")


def test_a_line_for_each_check_and_a_summary(faulty: FaultyServer) -> None:
    text = run(URL).stdout
    for check in CHECKS:
        assert re.search(rf"^(ok|skipped) +{re.escape(check.name)} ", text, re.MULTILINE), check.name
    (summary,) = (line for line in text.splitlines() if line.startswith(f"{URL}: "))
    assert summary.startswith(f"{URL}: saves and loads will work: ")
    assert "\x1b" not in text


def test_a_failure_is_status_1_and_names_the_remedy(faulty: FaultyServer) -> None:
    faulty.rule = lambda request: _DENIED if request.operation == "PutObject" else None
    output = run(URL, status=1).stdout
    assert re.search(
        r"^FAIL +PutObject +PutObject on s3://bucket/run/doctor-probe-\w+/.* no save works$", output, re.MULTILINE
    )
    assert re.search(r"^ +Remedy: the credentials need s3:PutObject here", output, re.MULTILINE)
    assert "saves or loads will not work" in output
    summary = output[output.index("saves or loads will not work") :]
    assert re.search(r"^FAIL +PutObject ", summary, re.MULTILINE), "what failed comes last"


def test_json_is_strict_and_whole(faulty: FaultyServer) -> None:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    result = run(URL, "--json")
    found = json.loads(result.stdout, parse_constant=refuse)
    assert (found["url"], found["ok"], found["read_only"]) == (URL, True, False)
    assert [each["name"] for each in found["checks"]] == [*(check.name for check in CHECKS), "clean-up"]
    assert set(found["checks"][0]) == {"name", "status", "found", "remedy", "cell"}


@pytest.mark.parametrize("url", ["file:///tmp", "s3://b//c", "s3:bucket"])
def test_wrong_usage_is_status_2(url: str) -> None:
    run(url, status=2)


def test_no_secret_is_shown(faulty: FaultyServer, monkeypatch: pytest.MonkeyPatch) -> None:
    secret, token = "a-secret-that-nobody-may-see", "a-token-that-nobody-may-see"
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAIOSFODNN7EXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    monkeypatch.setenv("AWS_SESSION_TOKEN", token)
    for arguments in ([URL], [URL, "--json"]):
        output = run(*arguments).output
        assert "AKIA...MPLE" in output
        assert not any(each in output for each in (secret, token, "AKIAIOSFODNN7EXAMPLE"))


@pytest.mark.parametrize(("number", "operation"), [(signal.SIGINT, "PutObject"), (signal.SIGTERM, "UploadPart")])
def test_interrupted_it_leaves_the_bucket_as_it_was(
    faulty: FaultyServer, interpreter: Interpreter, operation: str, number: signal.Signals
) -> None:
    sent: list[float] = []

    def interrupt(request: Any) -> Fault | None:
        if request.operation != operation or sent:
            return None
        sent.append(time.monotonic())
        process.send_signal(number)
        return Fault.delay(0.5)  # it is carried out all the same

    faulty.rule = interrupt
    process = interpreter.popen(_COMMAND, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        output, messages = process.communicate(timeout=120)
    finally:
        process.kill()
    assert sent
    assert process.returncode != 0
    assert "will work" not in output
    assert "not removed" not in messages
    assert "Traceback" not in messages
