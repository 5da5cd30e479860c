from __future__ import annotations

import pytest

from dcp_s3.checkpoint.directory import Directory
from dcp_s3.checkpoint.info import (
    CheckpointInfo,
    age_order,
    from_listing,
    from_manifest,
    from_rank_manifests,
    newest_first,
)
from dcp_s3.format.control_files import Manifest, ObjectEntry
from dcp_s3.format.layout import spread
from dcp_s3.store import ListedObject
from dcp_s3.url import CheckpointURL

URL = CheckpointURL("bucket", "run/step-20")


def _info(name: str, step: int | None, created_at: float | None, state: str = "committed") -> CheckpointInfo:
    return CheckpointInfo(f"s3://b/{name}", name, state, step, created_at, 1, 1, 1)  # type: ignore[arg-type]


def _manifest(
    rank: int | None = None, *, world_size: int = 2, step: int | None = 20, created_at: float = 100.0
) -> Manifest:
    objects = (ObjectEntry("__0_0-ab.distcp", 30), ObjectEntry("__0_1-ab.distcp", 12))
    return Manifest("ab", created_at, step, world_size, objects, 5, {"loss": 1.0}, rank)


def _listing(*paths: str, at: float = 50.0) -> list[ListedObject]:
    return [ListedObject(URL.key(path), 10, at + i) for i, path in enumerate(paths)]


def test_order_is_step_then_time_then_name_and_no_step_comes_first() -> None:
    infos = [
        _info("b", 10, 2.0),
        _info("a", 10, 2.0),
        _info("late", 9, 99.0),
        _info("early", 10, 1.0),
        _info("stepless", None, 1000.0),
        _info("zero", 0, None),
    ]
    names = [info.name for info in sorted(infos, key=age_order)]
    assert names == ["stepless", "zero", "late", "early", "a", "b"]


def test_newest_first_has_committed_ones_only() -> None:
    infos = [_info("1", 1, 5.0), _info("3", 3, 5.0, "incomplete"), _info("2", 2, 5.0)]
    assert [info.name for info in newest_first(infos)] == ["2", "1"]


def test_info_is_hashable_although_metrics_are_a_dict() -> None:
    assert len({from_manifest(URL, _manifest()), from_manifest(URL, _manifest())}) == 1


def test_a_manifest_says_everything() -> None:
    assert from_manifest(URL, _manifest(step=7)) == CheckpointInfo(
        "s3://bucket/run/step-20", "step-20", "committed", 20, 100.0, 2, 2, 42, {"loss": 1.0}, False, save_id="ab"
    )


def test_a_name_without_a_number_has_no_step() -> None:
    assert from_manifest(CheckpointURL("bucket", "run/final"), _manifest(step=7)).step is None


def test_objects_without_commit_are_incomplete_and_as_old_as_the_last_write() -> None:
    info = from_listing(URL, Directory.of(URL, _listing("__0_0-ab.distcp", "__1_0-cd.distcp")), committed_at=None)
    assert (info.state, info.step, info.objects, info.size, info.created_at) == ("incomplete", 20, 2, 20, 51.0)


@pytest.mark.parametrize(
    ("path", "foreign"), [("__0_0-ab.distcp", False), (spread("__0_0-ab.distcp", 2), False), ("__0_0.distcp", True)]
)
def test_torn_save_is_foreign_unless_the_names_are_ours(path: str, foreign: bool) -> None:
    assert from_listing(URL, Directory.of(URL, _listing(path)), committed_at=None).foreign is foreign


def _rank_state(commits: dict[int, float], worlds: dict[int, int]) -> str:
    """The state for ranks that committed at a time (commits) and say a world size (worlds)."""
    directory = Directory.of(URL, _listing(*(f"__{rank}.metadata" for rank in commits)))
    manifests = {
        rank: _manifest(rank, world_size=world, created_at=commits.get(rank, 0.0)) for rank, world in worlds.items()
    }
    return from_rank_manifests(URL, directory, manifests).state


@pytest.mark.parametrize(
    ("commits", "worlds", "state"),
    [
        pytest.param({0: 1, 1: 1}, {0: 2, 1: 2}, "committed", id="all"),
        pytest.param({0: 1}, {0: 2}, "incomplete", id="one of two"),
        pytest.param({1: 1}, {0: 2, 1: 2}, "incomplete", id="manifest without commit"),
        pytest.param({0: 1, 1: 1}, {0: 2}, "incomplete", id="commit without manifest"),
        pytest.param({0: 1, 1: 1}, {}, "committed", id="no manifests"),
        pytest.param({0: 9, 1: 9, 2: 1, 3: 1}, {0: 2, 1: 2, 2: 4, 3: 4}, "committed", id="overwritten by fewer"),
        pytest.param({0: 9, 1: 1, 2: 1, 3: 1}, {0: 2, 1: 4, 2: 4, 3: 4}, "incomplete", id="half overwritten by fewer"),
        pytest.param({0: 1, 1: 9}, {0: 2, 1: 4}, "incomplete", id="half overwritten by more"),
        pytest.param({0: 1, 1: 9, 2: 9, 3: 9}, {0: 2, 1: 4, 2: 4, 3: 4}, "incomplete", id="overwritten but for rank 0"),
    ],
)
def test_ranks_that_commit_for_themselves_must_all_have_done_so(
    commits: dict[int, float], worlds: dict[int, int], state: str
) -> None:
    assert _rank_state(commits, worlds) == state


def test_sizes_of_all_ranks_add_up() -> None:
    directory = Directory.of(URL, _listing("__0.metadata", "__1.metadata"))
    info = from_rank_manifests(URL, directory, {0: _manifest(0), 1: _manifest(1)})
    assert (info.world_size, info.objects, info.size, info.metrics) == (2, 4, 84, {"loss": 1.0})
