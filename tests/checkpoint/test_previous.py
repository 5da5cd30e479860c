"""The last good checkpoint beside one that failed: looked for shortly, and never at the cost of the message."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from dcp_s3 import S3StorageWriter, Settings
from dcp_s3.checkpoint import previous
from dcp_s3.s3 import listing
from dcp_s3.s3.store import S3Store
from dcp_s3.url import parse_url
from tests.faulty import BUCKET, FaultyServer, serve
from tests.memory_s3 import Fault

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

_ROOT = f"s3://{BUCKET}/run"


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyServer]:
    with serve(monkeypatch) as server:
        yield server


def _look(step: int) -> str:
    return previous.look_for_previous(Settings(), parse_url(f"{_ROOT}/step-{step}"))


def _save(step: int) -> None:
    dcp.save({"w": torch.ones(3)}, storage_writer=S3StorageWriter(f"{_ROOT}/step-{step}"))


def test_it_is_the_committed_one_with_the_highest_step_beside_the_failed_one(faulty: FaultyServer) -> None:
    assert _look(20) == ""
    _save(9)
    _save(10)
    faulty.rule = lambda r: (
        Fault.error(403, "AccessDenied") if r.key.endswith(".metadata") and r.method == "PUT" else None
    )
    with pytest.raises(CheckpointException):
        _save(15)  # leaves objects, and no checkpoint
    assert _look(20) == f"{_ROOT}/step-10"
    assert _look(10) == f"{_ROOT}/step-9"


def test_it_is_one_whose_metadata_can_be_read(faulty: FaultyServer) -> None:
    for step in range(5, 9):
        _save(step)
    for step in (7, 8):
        key = f"run/step-{step}/.metadata"
        S3Store(BUCKET, Settings()).put(key, faulty.s3.read(BUCKET, key)[:-20])
    assert _look(9) == f"{_ROOT}/step-6"


def test_a_store_that_refuses_or_does_not_answer_leaves_it_out(
    faulty: FaultyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    _save(9)
    faulty.rule = lambda _: Fault.error(403, "AccessDenied")
    assert _look(20) == ""
    monkeypatch.setattr(previous, "_LOOK_SECONDS", 0.2)
    faulty.rule = lambda _: Fault.straggle(30)
    assert _look(20) == ""


def test_the_highest_step_is_found_on_later_pages_or_none_is_named(
    faulty: FaultyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listing, "PAGE_SIZE", 2)
    for step in (1, 2, 3):
        _save(step)
    assert _look(9) == f"{_ROOT}/step-3"
    monkeypatch.setattr(previous, "_MOST_PAGES", 1)
    assert _look(9) == "", "better none than an old one"
