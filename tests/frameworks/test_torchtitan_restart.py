"""torchtitan is killed in a save and started again on another number of ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from dcp_s3 import latest, verify
from tests import preload
from tests.faulty import FaultyServer, serve
from tests.frameworks.titan import ROOT, Job, Run, held_back, steps_on_s3, train, train_until_killed
from tests.killing import kill_all, new_process, running, wait_until_quiet
from tests.ranks import run_ranks

preload.MODULES.append("tests.frameworks.titan")  # torchtitan takes seconds to import

STEPS = 8


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyServer]:
    for name, value in {"GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    with serve(monkeypatch) as server:
        yield server


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


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("mode", "suffix", "ranks", "kept"),
    [
        ("disabled", ".distcp", 3, [6, 8]),
        # The data of the killed save could be that of a save in progress: for the grace period it keeps step 4.
        ("async", "/.metadata", 1, [4, 6, 8]),
        ("async_with_pinned_mem", ".distcp", 3, [6, 8]),
    ],
)
def test_a_run_killed_in_a_save_goes_on_bit_for_bit(
    faulty: FaultyServer,
    tmp_path: Path,
    uninterrupted: str,
    mode: str,
    suffix: str,
    ranks: int,
    kept: list[int],
) -> None:
    options = {"async_mode": mode, "retention": "latest:2"}
    jobs = [Job(tmp_path, dict(os.environ), rank, 2, STEPS, options) for rank in range(2)]
    with running([new_process(train_until_killed, job) for job in jobs]) as processes:
        with held_back(faulty, "step-4/", suffix) as reached:
            came = reached.wait(180)
            kill_all(processes)
        output = "".join(path.read_text() for path in tmp_path.glob("output-*.log"))
        assert came, output
        assert {process.exitcode for process in processes} == {-9}, output
    wait_until_quiet(faulty)
    assert steps_on_s3() == [2]
    assert list(jobs[0].cwd.iterdir()) == []

    runs = run_ranks(ranks, train_to_the_end, tmp_path / "second", mode)
    assert runs == [Run(2, uninterrupted, ())] * ranks
    assert steps_on_s3() == kept
    newest = latest(ROOT)
    assert newest is not None
    assert newest.step == STEPS
    assert verify(newest.url, full=True).ok
