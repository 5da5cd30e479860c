"""Loads take what lies on this host's disk from there, if it is right."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed.checkpoint as dcp

from dcp_s3 import S3StorageReader, latest
from dcp_s3.errors import CheckpointNotFoundError
from dcp_s3.memory import ReadTarget
from dcp_s3.spill.local import LocalObjects
from dcp_s3.url import parse_url
from tests.end_to_end.states import assert_same, blank
from tests.spill.making import (
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
def both(spill: Spill) -> Spill:
    """step-1 is on S3, and its object on the disk, too: its drain has not removed it yet."""
    spill.save(spill.url("step-1"), small_state(1))
    path, aside = spill.data().path, spill.path / "aside"
    shutil.copytree(path, aside)
    spill.drain()
    aside.rename(path)
    return spill


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


def test_what_is_on_this_host_is_not_fetched(both: Spill) -> None:
    assert not fetched(both)


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_copy_is_not_used(both: Spill, how: str) -> None:
    [key] = both.list_data(both.url("step-1"))
    DAMAGES[how](both.data().path / "object-0")
    with contextlib.closing(LocalObjects(both.store, parse_url(both.url("step-1")))) as local:
        assert not local.read_into(key, 0, [ReadTarget(memoryview(bytearray(10)))]), "not even for a moment"
    assert fetched(both)


@pytest.mark.parametrize("call", ["pread", "preadv"])
def test_a_copy_that_the_disk_can_not_read_comes_from_s3(both: Spill, call: str) -> None:
    with mock.patch.object(os, call, side_effect=OSError(errno.EIO, "Input/output error")):
        assert fetched(both)


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
