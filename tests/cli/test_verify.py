"""``dcp-s3 verify``: what it prints, and by which status a script knows."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest
from rich.console import Console

from tests.cli import looking
from tests.memory_s3 import Fault
from tests.retention.making import delete, get, keys, put, save

pytestmark = pytest.mark.servers("memory")


run = partial(looking.run, "verify")


def damage(s3: Any, url: str) -> str:
    """Flip a bit of a tensor; the path of the object."""
    path = next(path for path in keys(s3, url) if path.endswith(".distcp"))
    data = bytearray(get(s3, url, path))
    position = data.index(b"\x00\x00\xe0\x40")  # weight[1, 3] = 7.0
    data[position] ^= 1
    put(s3, url, path, bytes(data))
    return path


def test_a_good_checkpoint_is_one_line(root: str) -> None:
    url = save(f"{root}/step-1")
    (line,) = run(url).stdout.splitlines()
    assert line.startswith(f"{url}: good (fast: 1 object, 3 items, ")
    (line,) = run(url, "--full").stdout.splitlines()
    assert line.startswith(f"{url}: good (full: 1 object, 3 items, ")
    assert "without checksum" not in line
    url = save(f"{root}/step-2", settings={"checksum": "none"})
    assert "without checksum: 1 object, 3 items" in run(url, "--full").stdout


def test_damage_is_status_4_and_named(root: str, s3: Any) -> None:
    url = save(f"{root}/step-1")
    path = damage(s3, url)
    run(url, status=0)
    first, problem, last = run(url, "--full", status=4).stdout.splitlines()
    assert first == f"{url}: damaged"
    assert problem.startswith(f"  {path}: 'weight' has CRC-64/NVME ")
    assert "1 problem" in last
    report = json.loads(run(url, "--full", "--json", status=4).stdout)
    assert (report["ok"], report["url"], report["mode"]) == (False, url, "full")
    assert [(found["path"], found["fqn"]) for found in report["problems"]] == [(path, "weight")]
    assert json.loads(run(url, "--json").stdout)["ok"] is True


def test_every_checkpoint_under_a_root(root: str, s3: Any) -> None:
    assert "no committed checkpoints" in run(root, "--root", status=3).stderr
    assert json.loads(run(root, "--root", "--json", status=3).stdout) == []
    for step in (9, 10):
        save(f"{root}/step-{step}")
    delete(s3, save(f"{root}/step-11"), ".metadata")
    lines = run(root, "--root", "--full").stdout.splitlines()
    assert [line.partition(" ")[0] for line in lines] == [f"{root}/step-9:", f"{root}/step-10:"]
    assert all(": good (full: " in line for line in lines)

    path = damage(s3, f"{root}/step-9")
    first, second = run(root, "--root", "--full", status=4).stdout.splitlines()
    assert first.startswith(f"{root}/step-9: damaged: {path}: 'weight' has ")
    assert ": good " in second
    found = json.loads(run(root, "--root", "--full", "--json", status=4).stdout)
    assert [report["ok"] for report in found] == [False, True]


def test_a_root_goes_on_after_one_that_can_not_be_read(root: str, s3: Any, memory_server: Any) -> None:
    for step in (1, 2, 3):
        save(f"{root}/step-{step}")
    data = next(path for path in keys(s3, f"{root}/step-1") if path.endswith(".distcp"))
    refused = Fault.error(403, "AccessDenied")
    memory_server.handle.fault = lambda request: refused if request.key.endswith(data) else None
    try:
        first, *rest = run(root, "--root", "--full", status=1).stdout.splitlines()
        assert first.startswith(f"{root}/step-1: could not be verified: ")
        assert [": good " in line for line in rest] == [True, True]
        damage(s3, f"{root}/step-3")
        found = json.loads(run(root, "--root", "--full", "--json", status=4).stdout)
        assert [report["ok"] for report in found] == [None, True, False]
        assert "AccessDenied" in found[0]["error"]
    finally:
        memory_server.handle.fault = None


def test_the_progress_bar_takes_nothing_that_goes_into_a_pipe(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors on a terminal, output into a file: rich would send all to the terminal."""
    save(f"{root}/step-1")
    monkeypatch.setattr(Console, "is_terminal", property(lambda self: bool(self.stderr)))
    result = run(root, "--root", "--full")
    assert f"{root}/step-1: good" in result.stdout
    assert "good" not in result.stderr
