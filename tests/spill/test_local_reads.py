"""Loads take what lies on this host's disk from there, if it is right."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_s3 import S3StorageReader, latest
from dcp_s3.errors import CheckpointNotFoundError
from dcp_s3.memory import ReadTarget
from dcp_s3.spill.local import LocalObjects
from dcp_s3.url import parse_url
from tests.end_to_end.states import assert_same, blank
from tests.spill.making import (
    MIB,
    Spill,
    allow_all,
    assert_complete,
    cause_of,
    damage,
    refuse_all,
    refuse_writes,
    small_state,
)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@pytest.fixture
def kept(spill: Spill, monkeypatch: pytest.MonkeyPatch) -> Spill:
    """step-1 was drained, and its file is kept."""
    monkeypatch.setenv("DCP_S3_SPILL_KEEP", "1GiB")
    spill.save(spill.url("step-1"), small_state(1))
    spill.drain()
    return spill


def kept_files(spill: Spill) -> list[Path]:
    return [path for path in (spill.path / "cache").iterdir() if path.suffix != ".json"]


def fetched(spill: Spill) -> bool:
    """Whether a load of step-1, which is right, takes data from S3."""
    seen: list[str] = []

    def note(request: Any) -> None:
        if request.operation == "GetObject" and request.key.endswith(".distcp"):
            seen.append(request.key)

    spill.server.rule = note
    assert_complete(spill.url("step-1"), small_state(1))
    spill.server.rule = allow_all
    return bool(seen)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "flipped byte": damage,
    "cut off": lambda path: os.truncate(path, path.stat().st_size - 1),
    "longer": lambda path: os.truncate(path, path.stat().st_size + 1),
    "gone": Path.unlink,
}


def test_drained_objects_that_were_kept_are_not_fetched(kept: Spill) -> None:
    assert not fetched(kept)


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_copy_is_not_used(kept: Spill, how: str) -> None:
    [path] = kept_files(kept)
    [key] = kept.list_data(kept.url("step-1"))
    DAMAGES[how](path)
    with contextlib.closing(LocalObjects(kept.store, parse_url(kept.url("step-1")))) as local:
        assert not local.read_into(key, 0, [ReadTarget(memoryview(bytearray(10)))]), "not even for a moment"
    assert fetched(kept)


@pytest.mark.parametrize("call", ["pread", "preadv"])
def test_a_copy_that_the_disk_can_not_read_comes_from_s3(kept: Spill, call: str) -> None:
    with mock.patch.object(os, call, side_effect=OSError(errno.EIO, "Input/output error")):
        assert fetched(kept)


def test_what_is_kept_stays_below_the_limit(spill: Spill, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DCP_S3_SPILL_KEEP", "5MiB")
    for step in range(4):
        spill.save(spill.url(f"step-{step}"), {"large": torch.randn(MIB // 2)})
        spill.drain()
        for path in kept_files(spill):  # mtimes decide, which may be equal
            os.utime(path, ns=(0, path.stat().st_mtime_ns - 10**9))
    spill.save(spill.url("too-large"), {"large": torch.randn(2 * MIB)})
    spill.drain()
    assert sum(path.stat().st_size for path in kept_files(spill)) <= 5 * MIB
    facts = "".join(path.read_text() for path in (spill.path / "cache").glob("*.json"))
    assert [step for step in range(4) if f"step-{step}" in facts] == [2, 3]
    assert "too-large" not in facts


def names(spill: Spill, **options: Any) -> tuple[str, str] | None:
    found = latest(spill.root, **options)
    return None if found is None else (found.name, found.state)


def test_a_checkpoint_that_waits_on_this_host_can_be_resumed_from_if_asked(spill: Spill) -> None:
    before, after = small_state(3), small_state(4)
    spill.save_to_s3(spill.url("step-1"), before)
    spill.server.rule = refuse_all
    spill.save(spill.url("step-2"), after)
    assert names(spill, include_uncommitted=True) == ("step-2", "local")  # S3 is still away
    loaded = blank(after)
    dcp.load(loaded, storage_reader=S3StorageReader(spill.url("step-2"), include_uncommitted=True))
    assert_same(loaded, after)
    spill.server.rule = refuse_writes
    assert names(spill) == ("step-1", "committed")
    assert names(spill, include_uncommitted=True) == ("step-2", "local")
    cause = cause_of(lambda: dcp.load(blank(after), storage_reader=S3StorageReader(spill.url("step-2"))))
    assert isinstance(cause, CheckpointNotFoundError)


def test_a_commit_that_is_damaged_on_disk_is_not_resumed_from(spill: Spill) -> None:
    spill.save_to_s3(spill.url("step-1"), small_state(3))
    spill.save(spill.url("step-2"), small_state(4))
    damage(spill.commit().path / "metadata", 100)
    assert names(spill, include_uncommitted=True) == ("step-1", "committed")
    reader = S3StorageReader(spill.url("step-2"), include_uncommitted=True)
    assert "no checkpoint" in str(cause_of(lambda: dcp.load(small_state(0), storage_reader=reader)))


def test_the_newer_of_a_waiting_checkpoint_and_that_on_s3_is_loaded(spill: Spill) -> None:
    url = spill.url("last")
    spill.save(url, small_state(1), overwrite=True)
    spill.save_to_s3(url, small_state(2), overwrite=True)
    assert names(spill, include_uncommitted=True) == ("last", "committed")
    for rule, expected in ((allow_all, 2), (refuse_all, 1)):  # with S3 away the older one is all there is
        spill.server.rule = rule
        loaded = small_state(0)
        dcp.load(loaded, storage_reader=S3StorageReader(url, include_uncommitted=True))
        assert_same(loaded, small_state(expected))
