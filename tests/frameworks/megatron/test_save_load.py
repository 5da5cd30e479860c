"""Megatron-Core saves to S3 and loads from there, in every mode and across shardings; saves that fail, on every rank
alike, and saves that are killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from dcp_s3 import S3StorageReader, latest, list_checkpoints, verify
from dcp_s3.integrations.megatron import MegatronS3Writer
from tests.faulty import BUCKET, FaultyServer
from tests.frameworks.megatron import cpu, jobs, states
from tests.frameworks.ranks import files_in, kill_in_save, run_example, run_ranks
from tests.killing import AtRequest
from tests.memory_s3 import Fault

ROOT = f"s3://{BUCKET}/run"
URL = f"{ROOT}/iter_0000001"
in_memory = pytest.mark.servers("memory")


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@in_memory
@pytest.mark.parametrize("mode", jobs.MODES)
def test_a_save_loads_in_other_shardings_and_leaves_no_file_on_disk(root: str, mode: str) -> None:
    url = f"{root}/iter_0000003"
    assert run_ranks(2, jobs.save, url, 3, "rows", mode) == [[], []]
    assert latest(root).url == url
    assert verify(url).ok
    assert S3StorageReader(url).attachments() == ["common.pt", "metadata.json"]
    for world, layout in ((1, "rows"), (4, "grid"), (2, "columns")):
        run_ranks(world, jobs.load, url, 3, layout)


@in_memory
def test_two_saves_under_way_do_not_mix(root: str) -> None:
    run_ranks(2, jobs.save_twice_at_once, root)
    assert [info.name for info in list_checkpoints(root) if info.committed] == ["iter_1", "iter_2"]


@in_memory
@pytest.mark.parametrize("mode", ["sync", "persistent"])
def test_plans_are_reused_from_save_to_save(root: str, mode: str) -> None:
    assert run_ranks(2, jobs.save_with_cached_structure, root, mode) == [[False, True, True, True]] * 2


@in_memory
def test_fully_parallel_strategies_share_the_work(root: str) -> None:
    written = run_ranks(2, jobs.save_and_load_fully_parallel, f"{root}/iter", "forked")
    assert sum(written) == len(states.SHAPES)
    assert all(written)


@in_memory
def test_a_separation_hint_is_accepted(root: str) -> None:
    url = f"{root}/iter_5"
    options = {"separation_hint": "optim", "thread_count": 4, "content_metadata": {"layout": "new"}}
    run_ranks(2, jobs.save_with_options, url, 5, options)
    run_ranks(1, jobs.look, url)
    assert verify(url).ok
    assert MegatronS3Writer(f"{root}/a", separation_hint="optim", thread_count=6).max_objects == 6


def _example(arguments: list[str]) -> None:
    from examples import megatron

    cpu.pretend()
    megatron.main(arguments)


def _run(url: str, steps: int) -> list[str]:
    return run_example(_example, ["--url", url, "--steps", str(steps)], Path()).splitlines()


@in_memory
def test_the_example_goes_on_where_it_was_on_other_ranks(root: str, tmp_path: Path) -> None:
    whole = run_ranks(1, _run, f"{root}/whole", 15)[0]
    run_ranks(2, _run, f"{root}/cut", 10)
    rest = run_ranks(1, _run, f"{root}/cut", 15)[0]
    assert rest[0] == f"restored {root}/cut/iter_0000010 on 1 ranks"
    # Sums over ranks round otherwise than sums on one.
    assert [float(line.split()[-1]) for line in rest[1:]] == pytest.approx(
        [float(line.split()[-1]) for line in whole[10:]], abs=1e-4
    )
    assert [info.name for info in list_checkpoints(f"{root}/cut")] == ["iter_0000010", "iter_0000015"]
    assert list(tmp_path.iterdir()) == []


# --- failures and kills ---------------------------------------------------------------------------------


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
