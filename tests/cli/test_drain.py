"""``dcp-s3 drain``, as somebody uses it after a crash."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp

from dcp_s3 import S3StorageWriter
from dcp_s3.spill.background import stop_draining
from dcp_s3.spill.store import SpillStore
from tests.cli import looking
from tests.faulty import BUCKET, FaultyServer
from tests.interpreter import Interpreter, Program
from tests.spill.making import allow_all, assert_complete, make_state, refuse_all

URL = f"s3://{BUCKET}/run/step-1"
_COMMAND = [sys.executable, "-m", "dcp_s3.cli.main", "drain"]

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@pytest.fixture
def directory(faulty: FaultyServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With one save that S3 refused; S3 is back."""
    path = tmp_path / "spill"
    monkeypatch.setenv("DCP_S3_RETRY_ATTEMPTS", "1")
    monkeypatch.setenv("DCP_S3_SPILL_AFTER", "2s")
    faulty.rule = refuse_all
    settings = {"spill_dir": str(path), "durability": "local"}
    dcp.save(make_state(1), storage_writer=S3StorageWriter(URL, settings=settings))
    stop_draining()
    faulty.rule = allow_all
    return path


run = partial(looking.run, "drain")


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    """The command sets handlers in this process."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_drain_commits_what_lies_there(directory: Path) -> None:
    result = run(directory)
    assert f"committed {URL}" in result.stderr
    assert "1 committed, 0 given up, 0 waiting, 0 set aside" in result.stderr
    assert_complete(URL, make_state(1))
    assert "0 committed" in run(directory).stderr  # nothing is left, and that is no failure


def test_drain_fails_while_s3_refuses_and_says_what_waits(directory: Path, faulty: FaultyServer) -> None:
    faulty.rule = refuse_all
    result = run(directory, "--json", status=1)
    report = json.loads(result.stdout)
    assert len(report["waiting"]) == 2
    assert report["committed"] == []
    assert result.stderr.count("waits: ") == 2
    assert "HeadObject on s3://bucket/run/step-1/__0_0" in result.stderr
    faulty.rule = allow_all
    report = json.loads(run(directory, "--json").stdout)
    assert report["committed"] == [URL]
    assert report["uploaded"] > 0
    assert not report["waiting"]


def test_status_shows_what_waits_and_changes_nothing(directory: Path) -> None:
    before = sorted(directory.rglob("*"))
    found = json.loads(run(directory, "--status", "--json").stdout)
    assert sorted((save["what"], save["state"]) for save in found["saves"]) == [
        ("commit", "sealed"),
        ("data", "sealed"),
    ]
    assert {save["url"] for save in found["saves"]} == {URL}
    assert max(save["size"] for save in found["saves"]) > make_state(1)["large"].nbytes
    lines = run(directory, "--status").stdout.splitlines()
    assert sum(URL in line for line in lines) == 2
    assert sorted(directory.rglob("*")) == before


def test_a_damaged_journal_is_set_aside_and_reported(directory: Path) -> None:
    commit, data = sorted(SpillStore(directory).scan(), key=lambda save: save.journal.commit is None)
    journal = data.path / "journal"
    journal.write_bytes(journal.read_bytes()[:-10])
    assert "cut off or damaged" in run(directory, "--status").stdout
    assert data.path.exists()
    result = run(directory, status=1)
    assert "cut off or damaged" in result.stderr
    assert "1 waiting, 1 set aside" in result.stderr
    (found,) = json.loads(run(directory, "--status", "--json").stdout)["refused"]
    assert found["path"].endswith(data.name)
    assert "cut off or damaged" in found["reason"]
    assert "cut off or damaged" in run(directory, "--status").stdout
    assert (directory / "saves" / commit.name).exists()


def test_a_directory_that_another_process_drains_is_left_to_it(directory: Path) -> None:
    store = SpillStore(directory)
    with store.drainer():
        assert "another process drains" in run(directory, status=1).stderr
    assert len(store.scan()) == 2


def test_watch_waits_for_s3_and_ends_with_sigterm(
    directory: Path, faulty: FaultyServer, tmp_path: Path, interpreter: Interpreter
) -> None:
    faulty.rule = refuse_all
    output = tmp_path / "output.json"
    with output.open("w") as out:
        process = interpreter.popen([*_COMMAND, str(directory), "--watch", "--json"], stdout=out)
        try:
            wait_for(lambda: faulty.s3.counters.requests.get("HeadObject", 0) > 2, process)
            faulty.rule = allow_all
            wait_for(lambda: any(key.endswith("/.metadata") for key in faulty.s3.objects(BUCKET)), process)
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0
        finally:
            process.kill()
    assert json.loads(output.read_text())["committed"] == [URL]
    assert_complete(URL, make_state(1))


def wait_for(condition: Any, process: Program) -> None:
    deadline = time.monotonic() + 40
    while not condition():
        assert process.poll() is None, "it ended by itself"
        assert time.monotonic() < deadline
        time.sleep(0.05)
