"""Saves that fail, on every rank alike, and saves that are killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from dcp_s3 import latest, list_checkpoints, verify
from tests.faulty import BUCKET, FaultyServer
from tests.frameworks.megatron import jobs
from tests.frameworks.ranks import files_in, kill_in_save, run_ranks
from tests.killing import AtRequest
from tests.memory_s3 import Fault

ROOT = f"s3://{BUCKET}/run"
URL = f"{ROOT}/iter_0000001"


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("mode", "key", "operation", "failed"),
    [
        ("sync", "/__1_", "PutObject", 1),
        ("forked", "/__1_", "PutObject", 1),
        ("persistent", "/__1_", "PutObject", 1),
        ("forked", "/.metadata", "PutObject", 0),  # the commit
        ("forked", "/.metadata", "GetObject", 0),  # the look at what is there, while planning
    ],
)
def test_every_rank_raises_the_cause(faulty: FaultyServer, mode: str, key: str, operation: str, failed: int) -> None:
    faulty.rule = lambda request: (
        Fault.error(403, "AccessDenied") if request.operation == operation and key in request.key else None
    )
    for failures in run_ranks(2, jobs.fail_to_save, URL, mode):
        assert failures.keys() == {failed}
        assert "AccessDenied" in failures[failed]
    faulty.rule = lambda _: None
    assert latest(ROOT) is None


def test_a_process_that_is_killed_while_it_saves(faulty: FaultyServer) -> None:
    for failures in run_ranks(2, jobs.lose_the_process, URL):
        assert failures.keys() == {1}
        assert "ended without a result on rank 1" in failures[1]
    assert latest(ROOT) is None


def test_ranks_that_save_to_different_urls_are_told_so(faulty: FaultyServer) -> None:
    for failures in run_ranks(2, jobs.save_apart, ROOT):
        assert failures.keys() == {0}
        assert "rank 1 saves to" in failures[0]
    assert latest(ROOT) is None


@pytest.mark.parametrize(
    ("mode", "moment"),
    [
        ("forked", AtRequest("PutObject", 10, applied=True)),  # of the second checkpoint's data
        ("sync", AtRequest("PutObject", 16, applied=False)),  # around its commit
    ],
    ids=str,
)
def test_training_that_is_killed_goes_on_with_other_ranks(
    faulty: FaultyServer, tmp_path: Path, mode: str, moment: AtRequest
) -> None:
    kill_in_save(faulty, moment, 2, tmp_path, jobs.train, ROOT, 1000, mode)
    newest = latest(ROOT)
    assert newest is not None
    assert newest.step in (2, 4)

    run_ranks(1, jobs.train, ROOT, 6, mode)
    run_ranks(4, jobs.train, ROOT, 8, mode)
    assert [info.step for info in list_checkpoints(ROOT) if info.committed] == [2, 4, 6, 8]
    assert all(verify(info.url).ok for info in list_checkpoints(ROOT))
    assert [each for each in files_in(tmp_path) if not each.startswith(("output-", "rendezvous"))] == ["cwd"]
