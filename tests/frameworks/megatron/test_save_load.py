"""Megatron-Core saves to S3 and loads from there, in every mode and across shardings."""

from __future__ import annotations

from pathlib import Path

import pytest

from dcp_s3 import S3StorageReader, latest, list_checkpoints, verify
from dcp_s3.integrations.megatron import MegatronS3Writer
from tests.frameworks.megatron import jobs, states
from tests.frameworks.ranks import run_ranks

pytestmark = pytest.mark.servers("memory")


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("mode", jobs.MODES)
def test_a_save_loads_in_other_shardings_and_leaves_no_file_on_disk(root: str, mode: str) -> None:
    url = f"{root}/iter_0000003"
    assert run_ranks(2, jobs.save, url, 3, "rows", mode) == [[], []]
    assert latest(root).url == url
    assert verify(url).ok
    assert S3StorageReader(url).attachments() == ["common.pt", "metadata.json"]
    for world, layout in ((1, "rows"), (4, "grid"), (2, "columns")):
        run_ranks(world, jobs.load, url, 3, layout)


def test_two_saves_under_way_do_not_mix(root: str) -> None:
    run_ranks(2, jobs.save_twice_at_once, root)
    assert [info.name for info in list_checkpoints(root) if info.committed] == ["iter_1", "iter_2"]


@pytest.mark.parametrize("mode", ["sync", "persistent"])
def test_plans_are_reused_from_save_to_save(root: str, mode: str) -> None:
    assert run_ranks(2, jobs.save_with_cached_structure, root, mode) == [[False, True, True, True]] * 2


def test_plans_are_reused_here_and_on_a_disk(root: str, tmp_path: Path) -> None:
    (tmp_path / "local").mkdir()
    run_ranks(2, jobs.save_cached_here_and_there, root, str(tmp_path / "local"))


def test_fully_parallel_strategies_share_the_work(root: str) -> None:
    written = run_ranks(2, jobs.save_and_load_fully_parallel, f"{root}/iter", "forked")
    assert sum(written) == len(states.SHAPES)
    assert all(written)


def test_a_separation_hint_is_plain_text(root: str) -> None:
    url = f"{root}/iter_5"
    options = {"separation_hint": "optim", "thread_count": 4, "content_metadata": {"layout": "new"}}
    run_ranks(2, jobs.save_with_options, url, 5, options)
    objects = jobs.names_by_object(url)
    optimizer = {path for path, names in objects.items() if any(name.startswith("optim") for name in names)}
    assert all(name.startswith("optim") for path in optimizer for name in objects[path])
    assert 0 < len(optimizer) < len(objects)
    run_ranks(1, jobs.look, url)
    assert verify(url).ok


@pytest.mark.parametrize(("hint", "most"), [(None, 6), ("optim", 3)])
def test_the_thread_count_is_the_most_objects_of_a_rank(root: str, hint: str | None, most: int) -> None:
    writer = MegatronS3Writer(f"{root}/a", separation_hint=hint, thread_count=6)
    assert writer.max_objects == most
