"""torchtitan is killed in a save and started again on another number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from dcp_s3 import latest, verify
from tests.faulty import FaultyServer
from tests.frameworks.ranks import AtWrite, files_in, kill_in_save, run_ranks
from tests.frameworks.titan import ROOT, Run, steps_on_s3, train

STEPS = 8


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What a run on one rank that saves nothing ends with."""
    (run,) = run_ranks(1, train_without_saving, tmp_path_factory.mktemp("uninterrupted"))
    assert run.loaded_step == 0
    return str(run.digest)


def train_without_saving(directory: Path) -> Run:
    return train(directory, STEPS, enable=False)


def train_to_the_end(directory: Path, mode: str) -> Run:
    return train(directory, STEPS, async_mode=mode, retention="latest:2")


@pytest.mark.parametrize(
    ("mode", "name", "ranks", "kept"),
    [
        ("disabled", ".*distcp$", 3, [6, 8]),
        # The data of the killed save could be that of a save in progress: for the grace period it keeps step 4.
        ("async", "[.]metadata$", 1, [4, 6, 8]),
        ("async_with_pinned_mem", ".*distcp$", 3, [6, 8]),
    ],
)
def test_a_run_killed_in_a_save_goes_on_bit_for_bit(
    faulty: FaultyServer,
    tmp_path: Path,
    uninterrupted: str,
    mode: str,
    name: str,
    ranks: int,
    kept: list[int],
) -> None:
    kill_in_save(faulty, AtWrite(f"step-4/{name}"), 2, tmp_path, train_to_the_end, tmp_path / "cwd", mode)
    assert steps_on_s3() == [2]
    assert files_in(tmp_path / "cwd") == []

    runs = run_ranks(ranks, train_to_the_end, tmp_path / "second", mode)
    assert runs == [Run(2, uninterrupted, ())] * ranks
    assert steps_on_s3() == kept
    newest = latest(ROOT)
    assert newest is not None
    assert newest.step == STEPS
    assert verify(newest.url, full=True).ok
