"""``dcp-s3 cp``, ``export`` and ``drain``; ``doctor`` and ``bench`` on a bucket where other things lie."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import dcp_s3
from dcp_s3 import bench
from dcp_s3.checkup.doctor import CHECKS
from dcp_s3.errors import CorruptCheckpointError
from dcp_s3.format.layout import deletion_object, lease_object
from dcp_s3.offline import copy as copying
from dcp_s3.s3.store import S3Store
from dcp_s3.settings import MIN_PART_SIZE, Settings
from dcp_s3.spill.drain import stop_draining
from dcp_s3.spill.store import SpillStore
from dcp_s3.stores.directory import HIDDEN
from tests.cli.looking import run
from tests.end_to_end.states import assert_same
from tests.faulty import BUCKET, FaultyServer, serve
from tests.interpreter import Interpreter
from tests.memory_s3 import Fault
from tests.objects import separate_objects
from tests.offline import conftest as weights
from tests.retention.making import get, keys, put, save, save_locally, state, zeros
from tests.spill.making import allow_all, assert_complete, make_state, refuse_all
from tests.spread import spread_out

pytestmark = [
    pytest.mark.servers("memory"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
]


def files_of(directory: Path) -> set[str]:
    return {path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()}


def assert_loads(where: Path | str) -> None:
    """Load by torch's own reader from a directory, by ours from a URL."""
    loaded: dict[str, Any] = zeros()
    reader = dcp.FileSystemReader(where) if isinstance(where, Path) else dcp_s3.S3StorageReader(where)
    dcp.load(loaded, storage_reader=reader, no_dist=True)
    assert_same(loaded, state())


def test_cp_copies_and_goes_on(root: str, s3: Any) -> None:
    url = save(f"{root}/step-1", metrics={"loss": float("nan")})
    assert f"{len(keys(s3, url))} objects, " in run("cp", url, f"{root}-copy/step-1").stderr
    assert keys(s3, f"{root}-copy/step-1") == keys(s3, url)
    assert "(0 B copied)" in run("cp", url, f"{root}-copy/step-1").stderr
    other = save(f"{root}/step-2")
    assert "--overwrite" in run("cp", other, f"{root}-copy/step-1", status=1).stderr
    run("cp", other, f"{root}-copy/step-1", "--overwrite")
    assert keys(s3, f"{root}-copy/step-1") == keys(s3, other)
    assert "the same" in run("cp", url, url, status=2).stderr
    assert "gs://bucket/run" in run("cp", url, "gs://bucket/run", status=2).stderr


@pytest.mark.servers("memory", "rgw")
def test_torch_reads_what_was_downloaded_and_we_what_was_uploaded_again(root: str, s3: Any, tmp_path: Path) -> None:
    url = spread_out(s3, save(f"{root}/step 7+%é", metrics={"loss": 0.25}), 1)
    put(s3, url, "tokenizer/vocab.json", b"{}")
    put(s3, url, "__0_9-abcdef.distcp", b"left over")
    others = [".dcp_s3/pin", lease_object("ab", 3600), deletion_object("ab"), "500/.metadata", "500/__0_0.distcp"]
    for path in others:
        put(s3, url, path)
    run("cp", url, tmp_path / "a" / "b")
    assert_loads(tmp_path / "a" / "b")
    run("cp", tmp_path / "a" / "b", f"{root}/copy")
    assert_loads(f"{root}/copy")
    expected = {path: size for path, size in keys(s3, url).items() if "_9-" not in path and path not in others}
    assert keys(s3, f"{root}/copy") == expected
    copied = {info["name"]: info for info in json.loads(run("ls", root, "--json").stdout)}["copy"]
    assert (copied["foreign"], copied["metrics"], copied["world_size"]) == (False, {"loss": 0.25}, 1)


def test_a_download_that_was_cut_off_is_no_checkpoint_and_goes_on(root: str, s3: Any, tmp_path: Path) -> None:
    with separate_objects("weight", "half"):
        url = save(f"{root}/1")
    first, second, *_ = sorted(path for path in keys(s3, url) if path.endswith(".distcp"))
    data = get(s3, url, second)
    put(s3, url, second, bytes(len(data)))  # the CRC in the manifest finds it
    assert "is damaged" in run("cp", url, tmp_path, status=4).stderr
    assert not (tmp_path / ".metadata").exists()
    assert not (tmp_path / second).exists()
    rest = set(keys(s3, url)) - {second, ".metadata"}
    while not all((tmp_path / path).exists() for path in rest):  # copied in parallel: the damage may be found first
        run("cp", url, tmp_path, status=4)
    before = (tmp_path / first).stat().st_mtime_ns
    (tmp_path / f"{HIDDEN}1a2b").write_text("of a download that was killed")
    put(s3, url, second, data)
    assert f"({len(data) / 1024:.1f} KiB copied)" in run("cp", url, tmp_path).stderr
    assert (tmp_path / first).stat().st_mtime_ns == before
    assert_loads(tmp_path)
    assert files_of(tmp_path) == keys(s3, url).keys()


def test_what_is_incomplete_is_not_uploaded(root: str, s3: Any, tmp_path: Path) -> None:
    file = save_locally(tmp_path) / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-1])
    assert "__0_0.distcp" in run("cp", tmp_path, f"{root}/2", status=4).stderr
    assert keys(s3, f"{root}/2") == {}


@pytest.mark.servers("memory", "rgw")
def test_an_upload_does_not_replace_what_another_committed_meanwhile(
    root: str, s3: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"{root}/1"
    commit = copying._Copy._commit

    def commit_second(*arguments: Any) -> Any:
        put(s3, url, ".metadata", b"theirs")
        return commit(*arguments)

    monkeypatch.setattr(copying._Copy, "_commit", commit_second)
    assert "already" in run("cp", save_locally(tmp_path), url, status=1).stderr
    assert get(s3, url, ".metadata") == b"theirs"


def test_keys_that_are_no_file_names_stay_where_they_are(root: str, s3: Any, tmp_path: Path) -> None:
    url = save(f"{root}/1")
    expected = keys(s3, url).keys()
    for path in ("folder/", "../outside", "./.metadata", "a//b", "/absolute"):
        put(s3, url, path, b"bad")
    run("cp", url, tmp_path / "in" / "d")
    assert files_of(tmp_path / "in") == {f"d/{path}" for path in expected}
    assert_loads(tmp_path / "in" / "d")


WEIGHTS = {"model": {"a": torch.arange(4.0), "b": torch.arange(5.0)}, "optim": {"a": torch.zeros(2)}, "step": 7}


def test_export(root: str, tmp_path: Path) -> None:
    weights.save(WEIGHTS, f"{root}/x")
    rename = ("--include", "model.*", "--rename", "^model[.]=", "--rename", "^b$=c")
    result = run("export", f"{root}/x", tmp_path, *rename, "--dtype", "bf16")
    assert f"{tmp_path}: 2 tensors, 1 file, " in result.stderr
    assert "left out" not in result.stderr
    expected = {"a": torch.arange(4).bfloat16(), "c": torch.arange(5).bfloat16()}
    assert_same(weights.read((tmp_path / "model.safetensors").read_bytes()), expected)
    assert "is not empty" in run("export", f"{root}/x", tmp_path, status=1).stderr
    run("export", f"{root}/none", tmp_path / "none", status=3)


URL = f"s3://{BUCKET}/run/step-1"
drain = partial(run, "drain")


@pytest.fixture
def directory(faulty: FaultyServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """With one save that S3 refused; S3 is back. The command sets handlers of signals in this process."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    path = tmp_path / "spill"
    monkeypatch.setenv("DCP_S3_RETRY_ATTEMPTS", "1")
    monkeypatch.setenv("DCP_S3_SPILL_AFTER", "2s")
    faulty.rule = refuse_all
    settings = {"spill_dir": str(path), "durability": "local"}
    dcp.save(make_state(1), storage_writer=dcp_s3.S3StorageWriter(URL, settings=settings))
    stop_draining()
    faulty.rule = allow_all
    yield path
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_drain_shows_what_waits_and_why_then_commits_it(directory: Path, faulty: FaultyServer) -> None:
    titles, *rows = [line.split("\t") for line in drain(directory, "--status").stdout.splitlines()]
    assert titles == ["checkpoint", "what", "state", "size", "age"]
    assert sorted(row[:3] for row in rows) == [[URL, "commit", "sealed"], [URL, "data", "sealed"]]
    store = SpillStore(directory)
    with store.drainer():
        assert "another process drains" in drain(directory, status=1).stderr
    faulty.rule = refuse_all
    result = drain(directory, status=1)
    assert result.stderr.count("waits: ") == 2
    assert "HeadObject on s3://bucket/run/step-1/__0_0" in result.stderr
    assert len(store.scan()) == 2
    faulty.rule = allow_all
    result = drain(directory)
    assert f"committed {URL}" in result.stderr
    assert "1 committed, 0 given up, 0 waiting, 0 set aside" in result.stderr
    assert_complete(URL, make_state(1))
    assert "0 committed" in drain(directory).stderr  # nothing is left, and that is no failure


def test_a_damaged_journal_is_set_aside_and_reported(directory: Path) -> None:
    commit, data = sorted(SpillStore(directory).scan(), key=lambda save: save.journal.commit is None)
    journal = data.path / "journal"
    journal.write_bytes(journal.read_bytes()[:-10])
    result = drain(directory, status=1)
    assert "cut off or damaged" in result.stderr
    assert "1 waiting, 1 set aside" in result.stderr
    shown = drain(directory, "--status").stdout
    assert f"{data.name}: " in shown
    assert "cut off or damaged" in shown
    shutil.rmtree(commit.path)
    assert "0 waiting" in drain(directory, status=1).stderr  # what is set aside is still to be looked at


STORE = f"s3://{BUCKET}/run"
_DENIED = Fault.error(403, "AccessDenied")
_DOCTOR = [sys.executable, "-m", "dcp_s3.cli.main", "doctor", STORE]
_BENCH = [sys.executable, "-m", "dcp_s3.cli.main", "bench", STORE, "--size", "32MiB"]


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyServer]:
    """With one object, which may be all that is there afterwards."""
    monkeypatch.setenv("DCP_S3_PART_SIZE", str(MIN_PART_SIZE))
    with serve(monkeypatch) as server:
        S3Store(BUCKET, Settings()).put("run/before", b"kept")
        server.s3.reset_counters()
        yield server
        server.rule = lambda _: None
        assert server.s3.objects(BUCKET) == {"run/before": len(b"kept")}
        assert not S3Store(BUCKET, Settings()).uploads("")


def test_a_failure_is_status_1_and_names_the_remedy(used: FaultyServer) -> None:
    used.rule = lambda request: _DENIED if request.operation == "PutObject" else None
    output = run("doctor", STORE, status=1).stdout
    assert re.search(r"^ +Remedy: the credentials need s3:PutObject here", output, re.MULTILINE)
    summary = output[output.index("saves or loads will not work") :]
    assert re.search(r"^FAIL +PutObject +PutObject on s3://bucket/run/doctor-probe-\w+/", summary, re.MULTILINE)


def test_json_is_strict_and_neither_it_nor_the_text_shows_a_secret(
    used: FaultyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
    for name in names:
        monkeypatch.setenv(name, f"nobody-may-see-{name}")
    result = run("doctor", STORE, "--json")
    found = json.loads(result.stdout, parse_constant=pytest.fail)
    assert (found["url"], found["ok"]) == (STORE, True)
    assert [each["name"] for each in found["checks"]] == [*(check.name for check in CHECKS), "clean-up"]
    assert set(found["checks"][0]) == {"name", "status", "found", "remedy", "cell"}
    text = run("doctor", STORE).stdout
    assert f"\n{STORE}: saves and loads will work: " in text
    assert "\x1b" not in text
    assert not any(name in result.output + text for name in names)


@pytest.mark.parametrize(("number", "operation"), [(signal.SIGINT, "PutObject"), (signal.SIGTERM, "UploadPart")])
def test_an_interrupted_examination_leaves_the_bucket_as_it_was(
    used: FaultyServer, interpreter: Interpreter, operation: str, number: signal.Signals
) -> None:
    sent: list[float] = []

    def interrupt(request: Any) -> Fault | None:
        if request.operation != operation or sent:
            return None
        sent.append(time.monotonic())
        process.send_signal(number)
        return Fault.delay(0.5)  # it is carried out all the same

    used.rule = interrupt
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
def test_two_ranks_save_and_load_and_the_bucket_is_as_before(used: FaultyServer) -> None:
    result = run("bench", STORE, "--size", "12MiB", "--ranks", "2", "--rounds", "1")
    first, titles, *rows = [line.split("\t") for line in result.stdout.splitlines()]
    assert first == ["2 ranks; what was loaded is what was saved, bit by bit"]
    assert titles == ["round", "direction", "seconds", "GiB/s", "CPU s/GiB"]
    assert [row[:2] for row in rows] == [["1", "save"], ["1", "load"]]
    assert all(float(each) > 0 for row in rows for each in row[2:])
    assert used.s3.counters.requests["UploadPart"] >= 4


def test_without_permission_to_delete_nothing_large_is_written_and_the_prefix_is_named(used: FaultyServer) -> None:
    used.rule = lambda request: _DENIED if request.operation.startswith("DeleteObject") else None
    result = run("bench", STORE, status=1)
    prefixes = {key.rpartition("/")[0] for key in used.s3.objects(BUCKET)} - {"run"}
    assert len(prefixes) == 1
    assert f"removing s3://{BUCKET}/{prefixes.pop()}; if that fails" in result.stderr
    assert sum(used.s3.objects(BUCKET).values()) == len(b"kept")
    used.rule = lambda _: None
    S3Store(BUCKET, Settings()).delete([key for key in used.s3.objects(BUCKET) if key.endswith("/probe")])


@pytest.mark.docs
def test_a_save_that_fails_is_the_message_of_its_rank(used: FaultyServer) -> None:
    used.rule = lambda request: _DENIED if request.operation == "UploadPart" else None
    result = run("bench", STORE, "--size", "12MiB", "--ranks", "2", status=1)
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
    used: FaultyServer, interpreter: Interpreter
) -> None:
    over, held = threading.Event(), threading.Event()
    parts = itertools.count(1)

    def hold(request: Any) -> Fault | None:
        if request.operation == "UploadPart" and next(parts) > 2:
            held.set()
            over.wait(120)
            return Fault.reset()
        return None

    used.rule = hold
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
