"""What one process fetches for all of its host: once, whoever dies, and nothing of others is trusted."""

from __future__ import annotations

import os
import signal
import stat
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dcp_s3.load import host_files
from dcp_s3.load.host_files import KEPT_FILES, KEPT_SECONDS, fetch_for_host
from tests.killing import begin, new_process, read_lines, running, say

DATA = os.urandom(300_000)


@pytest.fixture(autouse=True)
def directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """That of this user, which need not be there yet."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"dcp_s3-{os.geteuid()}"


class Fetch:
    def __init__(self, data: bytes = DATA) -> None:
        self.data, self.calls = data, 0

    def __call__(self) -> bytes:
        self.calls += 1
        return self.data


def share(fetch: Callable[[], bytes], identity: str = "one", processes: int = 2) -> bytes:
    return fetch_for_host(identity, len(DATA), fetch, processes=processes)


def data_files(directory: Path) -> list[Path]:
    return [path for path in directory.iterdir() if not path.name.startswith("lock-")]


def as_process(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setattr(os, "getpid", lambda: number)


# --- one process -------------------------------------------------------------------------------------------


def test_the_file_goes_with_the_last_process(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    fetch = Fetch()
    left = []
    for process in (1, 2, 2, 3):
        as_process(monkeypatch, process)
        assert share(fetch, processes=3) == DATA
        left.append(len(data_files(directory)))
    assert (fetch.calls, left) == (1, [1, 1, 1, 0])


def test_another_identity_is_another_file(directory: Path) -> None:
    one, other = Fetch(), Fetch(DATA[::-1])
    assert (share(one), share(other, "other"), share(one)) == (DATA, DATA[::-1], DATA)
    assert (one.calls, other.calls) == (1, 1)


def test_only_this_user_can_look(directory: Path) -> None:
    share(Fetch())
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in directory.iterdir()} == {0o600}


@pytest.mark.parametrize("how", ["writable by others", "a link", "a file", "of another user", "no temporary directory"])
def test_what_may_be_of_others_is_not_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, directory: Path, how: str
) -> None:
    share(Fetch(b"x" * len(DATA)))
    if how == "writable by others":
        directory.chmod(0o770)
    elif how == "a link":
        directory.rename(tmp_path / "elsewhere")
        directory.symlink_to(tmp_path / "elsewhere")
    elif how == "a file":
        directory.rename(tmp_path / "elsewhere")
        directory.write_bytes(b"")
    elif how == "of another user":
        other = os.geteuid() + 1
        monkeypatch.setattr(os, "geteuid", lambda: other)
        directory.rename(tmp_path / f"dcp_s3-{other}")
    else:
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing" / "directory"))
    fetch = Fetch()
    assert share(fetch) == DATA
    assert fetch.calls == 1


@pytest.mark.parametrize("damage", ["a byte", "the end", "the header", "everything", "a link"])
def test_what_is_damaged_is_fetched_again(directory: Path, tmp_path: Path, damage: str) -> None:
    share(Fetch())
    (path,) = data_files(directory)
    content = bytearray(path.read_bytes())
    if damage == "a byte":
        content[1000] ^= 1
    elif damage == "the end":
        del content[-1000:]
    elif damage == "the header":
        content[3] ^= 1
    elif damage == "everything":
        content.clear()
    if damage == "a link":
        (tmp_path / "elsewhere").write_bytes(content)
        path.unlink()
        path.symlink_to(tmp_path / "elsewhere")
    else:
        path.write_bytes(content)
    fetch = Fetch()
    assert share(fetch) == DATA
    assert fetch.calls == 1


def test_files_do_not_accumulate(directory: Path) -> None:
    for number in range(10):
        assert share(Fetch(), str(number)) == DATA
    assert len(data_files(directory)) == KEPT_FILES
    again = Fetch()
    share(again, "9")
    assert again.calls == 0
    for path in data_files(directory):
        os.utime(path, times=(time.time() - KEPT_SECONDS - 60,) * 2)
    share(Fetch(), "new")
    assert len(data_files(directory)) == 1


def test_a_full_disk_only_costs_requests(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    fetch = Fetch()
    monkeypatch.setattr(os, "rename", refuse)
    assert (share(fetch), share(fetch)) == (DATA, DATA)
    assert fetch.calls == 2
    assert data_files(directory) == []


def test_a_failure_is_the_callers_and_the_next_one_tries(directory: Path) -> None:
    def fail() -> bytes:
        raise ValueError("no S3")

    with pytest.raises(ValueError, match="no S3"):
        share(fail)
    assert share(Fetch()) == DATA


def test_nobody_waits_for_ever(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    monkeypatch.setattr(host_files, "_PATIENCE", 0.05)
    inner = Fetch()

    def hang() -> bytes:
        assert share(inner) == DATA  # as another process would meanwhile
        return DATA

    assert share(hang) == DATA
    assert inner.calls == 1


# --- real processes ----------------------------------------------------------------------------------------


def _fetching_process(environment: dict[str, str], tmp_path: Path, name: str, hangs: bool) -> None:
    begin(environment, tmp_path / f"{name}.out")
    tempfile.tempdir = str(tmp_path)
    with open(tmp_path / f"{name}.report", "a") as report:

        def fetch() -> bytes:
            say(report, "fetches")
            while hangs:
                time.sleep(1)
            time.sleep(0.2)  # the others come meanwhile
            return (tmp_path / "data").read_bytes()

        data = fetch_for_host("one", len(DATA), fetch, processes=3)
        say(report, "has it" if data == (tmp_path / "data").read_bytes() else "has something else")


def _wait_for(what: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not what():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_one_of_three_processes_fetches_and_its_death_is_made_up_for(tmp_path: Path, directory: Path) -> None:
    (tmp_path / "data").write_bytes(DATA)
    environment = dict(os.environ)

    def reports(name: str) -> list[str]:
        return read_lines(tmp_path / f"{name}.report")

    with running([new_process(_fetching_process, environment, tmp_path, "dying", True)]) as (dying,):
        _wait_for(lambda: reports("dying") == ["fetches"])
        names = ["a", "b", "c"]
        others = [new_process(_fetching_process, environment, tmp_path, name, False) for name in names]
        with running(others):
            _wait_for(lambda: all((tmp_path / f"{name}.report").exists() for name in names))
            assert [reports(name) for name in names] == [[], [], []]  # they wait
            os.kill(dying.pid, signal.SIGKILL)
            for process in others:
                process.join(60)
            assert [process.exitcode for process in others] == [0, 0, 0]
    assert sorted(reports(name) for name in names) == [["fetches", "has it"], ["has it"], ["has it"]]
    assert data_files(directory) == []
