"""``dcp-s3 top``, while a save is held up on its way."""

from __future__ import annotations

import asyncio
import http.server
import io
import json
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from rich.console import Console
from typer.testing import CliRunner

from dcp_s3 import S3StorageWriter, Settings
from dcp_s3.cli import top
from dcp_s3.cli.app import stop_on_signals
from dcp_s3.cli.main import app
from dcp_s3.format.layout import deletion_object, lease_object
from dcp_s3.reporting.watch import Watcher
from dcp_s3.spill.background import stop_draining
from tests.faulty import BUCKET, FaultyServer, serve
from tests.interpreter import Interpreter
from tests.memory_s3 import Fault
from tests.retention.making import delete, put, save

ROOT = f"s3://{BUCKET}/run"
MIB = 2**20

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyServer]:
    with serve(monkeypatch) as server:
        yield server


@pytest.fixture
def client(faulty: FaultyServer) -> Any:
    import boto3

    return boto3.client("s3", endpoint_url=faulty.s3.endpoint_url)


def run(*arguments: object, status: int = 0) -> Any:
    result = CliRunner().invoke(app, ["top", ROOT, *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == status, result.output
    return result


def look(*arguments: object) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run("--json", *arguments).stdout)
    return found


def state() -> dict[str, Any]:
    return {"weight": torch.zeros(16 * MIB, dtype=torch.uint8)}


class HeldUp:
    """A rule that holds some requests back until it is told to let them go."""

    def __init__(self, operation: str, key: str = "", part: int | None = None) -> None:
        self._wanted = (operation, key, part)
        self.reached, self.go = threading.Event(), threading.Event()

    def __call__(self, request: Any) -> Fault | None:
        operation, key, part = self._wanted
        if request.operation == operation and key in request.key and part in (None, request.part_number):
            self.reached.set()
            assert self.go.wait(120)
        return None


@contextmanager
def save_under_way(faulty: FaultyServer, held: HeldUp, url: str) -> Iterator[None]:
    """A save in another thread that has reached what is held up."""
    faulty.rule = held
    settings = {"part_size": 5 * MIB}
    saving = threading.Thread(
        target=lambda: dcp.save(state(), storage_writer=S3StorageWriter(url, settings=settings), no_dist=True)
    )
    saving.start()
    try:
        assert held.reached.wait(60)
        yield
    finally:
        held.go.set()
        saving.join(120)


def test_a_save_whose_parts_are_on_their_way_is_seen(faulty: FaultyServer) -> None:
    dcp.save(state(), storage_writer=S3StorageWriter(f"{ROOT}/step-1"), no_dist=True)
    held = HeldUp("UploadPart", part=1)
    with save_under_way(faulty, held, f"{ROOT}/step-2"):
        deadline = time.monotonic() + 60
        while True:  # the other parts arrive beside the one that is held up
            found = look()
            [going_on] = found["saves"]
            if going_on["size"] > 5 * MIB:
                break
            assert time.monotonic() < deadline, found
        assert going_on["name"] == "step-2"
        assert going_on["uploads"] == 1
        assert going_on["objects"] == 0
        assert going_on["size"] < 16 * MIB
        assert going_on["expected"] >= 16 * MIB
        assert not going_on["estimated"]
        assert found["newest"]["name"] == "step-1"
        assert found["requests"] <= 88
        text = run("--once").stdout
        assert "step-2" in text
        assert "newest committed: step-1" in text
    assert look()["saves"] == []
    assert look()["newest"]["name"] == "step-2"


def test_a_save_whose_commit_is_on_its_way_is_seen_with_its_objects(faulty: FaultyServer) -> None:
    with save_under_way(faulty, HeldUp("PutObject", ".metadata"), f"{ROOT}/step-2"):
        found = look()
        [going_on] = found["saves"]
        assert going_on["objects"] == 1
        assert going_on["size"] >= 16 * MIB
        assert going_on["expected"] is None
        assert found["newest"] is None
        assert "none was seen" in run().stdout


def test_a_save_over_a_committed_checkpoint_is_seen(faulty: FaultyServer, client: Any) -> None:
    save(f"{ROOT}/step-1")
    where = f"run/step-1/__0_0-{'ab' * 6}.distcp"
    upload = client.create_multipart_upload(Bucket=BUCKET, Key=where)["UploadId"]
    client.upload_part(Bucket=BUCKET, Key=where, UploadId=upload, PartNumber=1, Body=b"x" * 1000)
    found = look()
    [going_on] = found["saves"]
    assert (going_on["name"], going_on["size"], going_on["uploads"]) == ("step-1", 1000, 1)
    assert found["newest"]["name"] == "step-1"
    # Without the permission to list parts.
    faulty.rule = lambda request: Fault.error(403, "AccessDenied") if request.operation == "ListParts" else None
    [going_on] = look()["saves"]
    assert (going_on["size"], going_on["estimated"]) == (0, True)


def test_readers_and_deletions_are_seen(faulty: FaultyServer, client: Any) -> None:
    for step in (1, 2, 3):
        save(f"{ROOT}/step-{step}")
    put(client, f"{ROOT}/step-1", lease_object("ab", 600))
    put(client, f"{ROOT}/step-1", lease_object("cd", 300))
    put(client, f"{ROOT}/step-2", deletion_object("ef"))
    delete(client, f"{ROOT}/step-2", ".metadata")
    found = look()
    assert [(each["name"], each["readers"]) for each in found["leases"]] == [("step-1", 2)]
    assert 500 < found["leases"][0]["until"] - found["now"] <= 601  # whole seconds
    [deletion] = found["deletions"]
    assert (deletion["name"], deletion["committed"]) == ("step-2", False)
    assert deletion["size"] > 0
    assert found["saves"] == []
    text = run().stdout
    assert "being read: step-1 by 2 readers" in text
    assert "being deleted: step-2" in text


def test_what_waits_on_this_host_is_seen(faulty: FaultyServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(f"{ROOT}/step-1")
    monkeypatch.setenv("DCP_S3_RETRY_ATTEMPTS", "1")
    monkeypatch.setenv("DCP_S3_SPILL_AFTER", "2s")
    faulty.rule = lambda request: Fault.error(503, "SlowDown") if request.method in ("PUT", "POST") else None
    settings = {"spill_dir": str(tmp_path), "durability": "local"}
    dcp.save({"weight": torch.ones(1000)}, storage_writer=S3StorageWriter(f"{ROOT}/step-2", settings=settings))
    stop_draining()
    faulty.rule = lambda _: None
    assert look()["waiting"] is None
    monkeypatch.setenv("DCP_S3_SPILL_DIR", str(tmp_path))
    assert {each["url"] for each in look()["waiting"]["saves"]} == {f"{ROOT}/step-2"}
    assert f"waits in {tmp_path}: step-2" in run().stdout


def test_the_numbers_of_an_endpoint_are_shown(faulty: FaultyServer) -> None:
    save(f"{ROOT}/step-1")

    class Endpoint(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = b'# HELP x y\ndcp_s3_throttled_requests_total{bucket="b"} 3\nother_total 4\n'
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Endpoint) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        url = f"http://127.0.0.1:{server.server_port}/metrics"
        try:
            text = run("--metrics", url).stdout
            assert "dcp_s3_throttled_requests_total (bucket=b) 3" in text
            assert "other_total" not in text
        finally:
            server.shutdown()
            serving.join()
    assert "does not answer" in run("--metrics", url).stdout
    assert "URL of an endpoint" in run("--metrics", "file:///etc/passwd", status=2).stderr


def test_many_checkpoints_take_as_many_requests_as_promised(faulty: FaultyServer, client: Any) -> None:
    for step in range(1, 60):
        put(client, f"{ROOT}/step-{step}", "__0_0-abcdef012345.distcp")  # saves that failed
    save(f"{ROOT}/step-41")
    found = look()
    assert found["directories"] == 59
    assert found["newest"]["name"] == "step-41"
    assert found["requests"] <= 88
    found = look("--look-into", "2")
    assert found["seen"] < 10
    assert found["newest"] is None


def test_an_empty_root_has_a_status_of_its_own(faulty: FaultyServer) -> None:
    assert "there is nothing under" in run(status=3).stderr
    assert json.loads(run("--json", status=3).stdout)["newest"] is None
    run("--interval", "0s", status=2)


def test_on_a_terminal_it_looks_again_until_ctrl_c(faulty: FaultyServer, interpreter: Interpreter) -> None:
    save(f"{ROOT}/step-1")
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "dcp_s3.cli.main", "top", ROOT, "--interval", "0.5s"]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120", "LINES": "40"}
    process = interpreter.popen(
        command, stdin=theirs, stdout=theirs, stderr=subprocess.PIPE, env=environment, text=False
    )
    os.close(theirs)
    shown = bytearray()

    def read() -> None:
        try:
            while chunk := os.read(ours, 65536):
                shown.extend(chunk)
        except OSError:
            pass  # the other side has gone

    reading = threading.Thread(target=read)
    reading.start()
    try:
        wait_for(shown, b"step-1")
        save(f"{ROOT}/step-2")
        wait_for(shown, b"step-2")
        process.send_signal(signal.SIGINT)
        _, messages = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
        reading.join(60)
        os.close(ours)
    assert process.returncode == 0
    assert messages == b""


def test_an_error_ends_it_on_a_terminal(faulty: FaultyServer, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = iter([Watcher.look])
    stops: list[threading.Event] = []
    waited = threading.Event()
    never = threading.Timer(30, lambda: (waited.set(), stops[0].set()))

    @contextmanager
    def watched() -> Iterator[threading.Event]:
        with stop_on_signals() as stop:
            stops.append(stop)
            yield stop

    async def fail_later(watcher: Watcher) -> Any:
        for each in looks:
            return await each(watcher)
        raise ZeroDivisionError

    monkeypatch.setattr(Watcher, "look", fail_later)
    monkeypatch.setattr(top, "stop_on_signals", watched)
    console = Console(file=io.StringIO(), force_terminal=True)
    never.start()
    try:
        with pytest.raises(ZeroDivisionError):
            asyncio.run(top._watch(f"s3://{BUCKET}/run", Settings(), 16, 0.5, [], console))
    finally:
        never.cancel()
    assert not waited.is_set(), "it would have gone on until Ctrl-C"


def wait_for(shown: bytearray, text: bytes) -> None:
    deadline = time.monotonic() + 60
    while text not in shown:
        assert time.monotonic() < deadline, bytes(shown)
        time.sleep(0.05)
