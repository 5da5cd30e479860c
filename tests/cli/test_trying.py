"""``dcp-s3 doctor`` and ``bench``, as somebody uses them on a bucket where other things lie."""

from __future__ import annotations

import itertools
import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from dcp_s3 import bench
from dcp_s3.checkup.doctor import CHECKS
from dcp_s3.errors import CorruptCheckpointError
from dcp_s3.s3.store import S3Store
from dcp_s3.settings import MIN_PART_SIZE, Settings
from tests.cli.looking import run
from tests.faulty import BUCKET, FaultyServer, serve
from tests.interpreter import Interpreter
from tests.memory_s3 import Fault

URL = f"s3://{BUCKET}/run"
_DENIED = Fault.error(403, "AccessDenied")
_DOCTOR = [sys.executable, "-m", "dcp_s3.cli.main", "doctor", URL]
_BENCH = [sys.executable, "-m", "dcp_s3.cli.main", "bench", URL, "--size", "32MiB"]


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyServer]:
    """With one object, which may be all that is there afterwards."""
    monkeypatch.setenv("DCP_S3_PART_SIZE", str(MIN_PART_SIZE))
    with serve(monkeypatch) as server:
        S3Store(BUCKET, Settings()).put("run/before", b"kept")
        server.s3.reset_counters()
        yield server
        server.rule = lambda _: None
        assert server.s3.objects(BUCKET) == {"run/before": len(b"kept")}
        assert not S3Store(BUCKET, Settings()).uploads("")


def test_a_failure_is_status_1_and_names_the_remedy(faulty: FaultyServer) -> None:
    faulty.rule = lambda request: _DENIED if request.operation == "PutObject" else None
    output = run("doctor", URL, status=1).stdout
    assert re.search(r"^ +Remedy: the credentials need s3:PutObject here", output, re.MULTILINE)
    summary = output[output.index("saves or loads will not work") :]
    assert re.search(r"^FAIL +PutObject +PutObject on s3://bucket/run/doctor-probe-\w+/", summary, re.MULTILINE)


def test_json_is_strict_and_neither_it_nor_the_text_shows_a_secret(
    faulty: FaultyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
    for name in names:
        monkeypatch.setenv(name, f"nobody-may-see-{name}")
    result = run("doctor", URL, "--json")
    found = json.loads(result.stdout, parse_constant=pytest.fail)
    assert (found["url"], found["ok"]) == (URL, True)
    assert [each["name"] for each in found["checks"]] == [*(check.name for check in CHECKS), "clean-up"]
    assert set(found["checks"][0]) == {"name", "status", "found", "remedy", "cell"}
    text = run("doctor", URL).stdout
    assert f"\n{URL}: saves and loads will work: " in text
    assert "\x1b" not in text
    assert not any(name in result.output + text for name in names)


@pytest.mark.parametrize(("number", "operation"), [(signal.SIGINT, "PutObject"), (signal.SIGTERM, "UploadPart")])
def test_an_interrupted_examination_leaves_the_bucket_as_it_was(
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
    process = interpreter.popen(_DOCTOR, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        output, messages = process.communicate(timeout=120)
    finally:
        process.kill()
    assert sent
    assert process.returncode != 0
    assert "will work" not in output
    assert "not removed" not in messages
    assert "Traceback" not in messages


@pytest.mark.docs
def test_two_ranks_save_and_load_and_the_bucket_is_as_before(faulty: FaultyServer) -> None:
    result = run("bench", URL, "--size", "12MiB", "--ranks", "2", "--rounds", "1")
    first, titles, *rows = [line.split("\t") for line in result.stdout.splitlines()]
    assert first == ["2 ranks; what was loaded is what was saved, bit by bit"]
    assert titles == ["round", "direction", "seconds", "GiB/s", "CPU s/GiB"]
    assert [row[:2] for row in rows] == [["1", "save"], ["1", "load"]]
    assert all(float(each) > 0 for row in rows for each in row[2:])
    assert faulty.s3.counters.requests["UploadPart"] >= 4


def test_without_permission_to_delete_nothing_large_is_written_and_the_prefix_is_named(faulty: FaultyServer) -> None:
    faulty.rule = lambda request: _DENIED if request.operation.startswith("DeleteObject") else None
    result = run("bench", URL, status=1)
    prefixes = {key.rpartition("/")[0] for key in faulty.s3.objects(BUCKET)} - {"run"}
    assert len(prefixes) == 1
    assert f"removing s3://{BUCKET}/{prefixes.pop()}; if that fails" in result.stderr
    assert sum(faulty.s3.objects(BUCKET).values()) == len(b"kept")
    faulty.rule = lambda _: None
    S3Store(BUCKET, Settings()).delete([key for key in faulty.s3.objects(BUCKET) if key.endswith("/probe")])


@pytest.mark.docs
def test_a_save_that_fails_is_the_message_of_its_rank(faulty: FaultyServer) -> None:
    faulty.rule = lambda request: _DENIED if request.operation == "UploadPart" else None
    result = run("bench", URL, "--size", "12MiB", "--ranks", "2", status=1)
    assert "dcp-s3: it failed: rank" in result.stderr
    assert "UploadPart" in result.stderr


def test_one_bit_that_differs_is_found_and_so_is_another_round_or_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "_TENSOR_BYTES", 1024)
    state, again = bench.make_state(0, 5000, 1), bench.make_state(0, 5000, 1)
    assert sum(each.nbytes for each in state.values()) == 5000
    bench.check(state, again)
    again["rank-0/tensor-4"][-1] ^= 1
    theirs = dict(zip(state, bench.make_state(1, 5000, 1).values(), strict=True))
    for other in (again, bench.make_state(0, 5000, 2), theirs):
        with pytest.raises(CorruptCheckpointError, match="rank-0/tensor-"):
            bench.check(state, other)


@pytest.mark.docs
def test_interrupted_in_the_middle_of_a_save_it_leaves_the_bucket_as_it_was(
    faulty: FaultyServer, interpreter: Interpreter
) -> None:
    over, held = threading.Event(), threading.Event()
    parts = itertools.count(1)

    def hold(request: Any) -> Fault | None:
        if request.operation == "UploadPart" and next(parts) > 2:
            held.set()
            over.wait(120)
            return Fault.reset()
        return None

    faulty.rule = hold
    process = interpreter.popen(_BENCH, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert held.wait(90)
        process.send_signal(signal.SIGTERM)
        output, messages = process.communicate(timeout=90)
    finally:
        over.set()
        process.kill()
    assert process.returncode != 0
    assert output == ""
    assert "Traceback" not in messages
