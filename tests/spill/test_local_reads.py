"""Loads take what lies on this host's disk from there, if it is right."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from dcp_s3 import S3StorageReader, S3StorageWriter, latest
from dcp_s3.spill.background import stop_draining
from dcp_s3.spill.store import SpillStore
from tests.end_to_end.states import assert_same, blank
from tests.faulty import FaultyServer
from tests.spill.test_outage import (
    BUCKET,
    PREVIOUS,
    URL,
    allow_all,
    assert_complete,
    faulty,
    make_state,
    refuse_all,
    spill_dir,
)

__all__ = ["faulty", "spill_dir"]  # fixtures

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

ROOT = f"s3://{BUCKET}/run"


@pytest.fixture
def fetched(faulty: FaultyServer) -> Iterator[list[Any]]:
    """The GETs of data objects, as they come."""
    seen: list[Any] = []

    def note(request: Any) -> None:
        if request.operation == "GetObject" and request.key.endswith(".distcp"):
            seen.append(request)

    faulty.rule = note
    yield seen
    faulty.rule = allow_all


def save_and_keep(state: dict[str, Any]) -> None:
    writer = S3StorageWriter(URL, settings={"durability": "local", "spill_keep": "1GiB"})
    dcp.save(state, storage_writer=writer)
    writer.wait_committed(60)


def kept_files(spill_dir: Path) -> list[Path]:
    return [path for path in (spill_dir / "cache").iterdir() if path.suffix != ".json"]


def test_drained_objects_that_were_kept_are_not_fetched(fetched: list[Any], spill_dir: Path) -> None:
    state = make_state(1)
    save_and_keep(state)
    assert_complete(URL, state)
    assert not fetched


@pytest.mark.parametrize("damage", ["flipped byte", "cut off", "longer", "gone"])
def test_a_damaged_copy_is_not_used(fetched: list[Any], spill_dir: Path, damage: str) -> None:
    state = make_state(2)
    save_and_keep(state)
    for path in kept_files(spill_dir):
        data = bytearray(path.read_bytes())
        if damage == "flipped byte":
            data[len(data) // 2] ^= 1
        elif damage == "cut off":
            del data[-1:]
        elif damage == "longer":
            data += b"x"
        path.write_bytes(data)
        if damage == "gone":
            path.unlink()
    assert_complete(URL, state)
    assert fetched


def test_what_is_kept_stays_below_the_limit(faulty: FaultyServer, spill_dir: Path) -> None:
    for step in range(4):
        writer = S3StorageWriter(f"{ROOT}/step-{step}", settings={"durability": "local", "spill_keep": "40MiB"})
        dcp.save({"large": torch.randn(4 * 2**20)}, storage_writer=writer)
        writer.wait_committed(60)
    assert 0 < sum(path.stat().st_size for path in kept_files(spill_dir)) <= 40 * 2**20
    assert_kept_newest(spill_dir)


def assert_kept_newest(spill_dir: Path) -> None:
    facts = "".join(path.read_text() for path in (spill_dir / "cache").glob("*.json"))
    assert "step-3" in facts
    assert "step-0" not in facts


def test_a_checkpoint_that_waits_on_this_host_can_be_resumed_from_if_asked(
    faulty: FaultyServer, spill_dir: Path
) -> None:
    before, after = make_state(3), make_state(4)
    dcp.save(before, storage_writer=S3StorageWriter(PREVIOUS))
    faulty.rule = refuse_all
    dcp.save(after, storage_writer=S3StorageWriter(URL, settings={"durability": "local"}))

    found = latest(ROOT, include_uncommitted=True)  # S3 is still away
    assert found is not None
    assert (found.url, found.state) == (URL, "local")
    loaded = blank(after)
    dcp.load(loaded, storage_reader=S3StorageReader(URL, include_uncommitted=True))
    assert_same(loaded, after)

    def only_reads(request: Any) -> Any:
        return refuse_all(request) if request.operation.startswith(("Put", "Create", "Upload", "Complete")) else None

    faulty.rule = only_reads
    committed = latest(ROOT)
    assert committed is not None
    assert committed.url == PREVIOUS
    found = latest(ROOT, include_uncommitted=True)
    assert found is not None
    assert found.url == URL
    with pytest.raises(CheckpointException):
        dcp.load(blank(after), storage_reader=S3StorageReader(URL))
    faulty.rule = allow_all


def test_a_commit_that_is_damaged_on_disk_is_not_resumed_from(faulty: FaultyServer, spill_dir: Path) -> None:
    before = make_state(3)
    dcp.save(before, storage_writer=S3StorageWriter(PREVIOUS))
    with SpillStore(spill_dir).drainer():  # nothing drains it meanwhile
        dcp.save(make_state(4), storage_writer=S3StorageWriter(URL, settings={"durability": "local"}))
        (metadata,) = spill_dir.glob("saves/*-commit-*/metadata")
        data = bytearray(metadata.read_bytes())
        data[len(data) // 2] ^= 1
        metadata.write_bytes(data)
        found = latest(ROOT, include_uncommitted=True)
        assert found is not None
        assert found.url == PREVIOUS
        with pytest.raises(CheckpointException, match="no checkpoint"):
            dcp.load(blank(before), storage_reader=S3StorageReader(URL, include_uncommitted=True))
        stop_draining()
