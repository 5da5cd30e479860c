"""What counts as a checkpoint and as its own: nothing that may be one is deleted."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from dcp_s3 import prune
from dcp_s3.checkpoint.directory import Directory
from dcp_s3.checkpoint.info import CheckpointInfo, from_rank_manifests, with_marks
from dcp_s3.format.control_files import Manifest
from dcp_s3.format.layout import data_object, new_nonce, spread
from dcp_s3.retention.plan import make_plan
from dcp_s3.store import ListedObject
from dcp_s3.url import CheckpointURL
from tests.retention.making import save_locally
from tests.retention.runs import DAY, Run

URL = CheckpointURL("bucket", "run/step-20")


def _ranks(paths: list[str], worlds: dict[int, int]) -> CheckpointInfo:
    directory = Directory.of(URL, [ListedObject(URL.key(path), 10, 50.0) for path in paths])
    manifests = {rank: Manifest(f"a{rank}", 1.0 + rank, 20, world, (), 5) for rank, world in worlds.items()}
    return with_marks(from_rank_manifests(URL, directory, manifests), directory)


@pytest.mark.parametrize(
    ("paths", "worlds", "state", "kept"),
    [
        (["__0.metadata", "__1.metadata", "__0_0.distcp", "__1_0.distcp"], {}, "committed", True),
        (["__0.metadata", "__0_0.distcp", "__1_0.distcp"], {}, "incomplete", True),
        (["__1.metadata"], {}, "incomplete", True),
        (["__0.metadata", ".dcp_s3/manifest-ab.0.json"], {}, "incomplete", True),
        (["__0.metadata", "__1.metadata"], {0: 2}, "incomplete", True),
        (["__0.metadata", "__1.metadata", "__2.metadata"], {0: 2, 1: 2, 2: 4}, "incomplete", True),
        (["__0.metadata", "__1.metadata"], {0: 2, 1: 4}, "incomplete", False),
        (["__0.metadata"], {0: 2}, "incomplete", False),
    ],
)
def test_ranks_are_left_over_only_if_some_are_certainly_missing(
    paths: list[str], worlds: dict[int, int], state: str, kept: bool
) -> None:
    info = _ranks(paths, worlds)
    assert info.state == state
    plan = make_plan([info], None, now=1e9, grace=DAY)
    assert (plan.deleted == ()) is kept


@pytest.mark.parametrize("kind", ["foreign", "lost manifests", "newer manifest"])
def test_ranks_without_manifests_that_can_be_read_stay(run: Run, tmp_path: Path, kind: str) -> None:
    if kind == "foreign":
        for file in save_locally(tmp_path).iterdir():
            run.put("step-1", file.name.replace(".metadata", "__0.metadata"), file.read_bytes())
    else:
        run.save_on_ranks("step-1", 1)
        [path] = run.manifests("step-1")
        if kind == "lost manifests":
            run.delete("step-1", path)
        else:
            newer = json.loads(run.get("step-1", path)) | {"format_version": 2}
            run.put("step-1", path, json.dumps(newer).encode())
    run.steps(2)
    before = run.objects("step-1")
    run.clock.now += 2 * DAY
    run.prune()
    assert run.objects("step-1") == before


def _named(directory: str) -> str:
    """A data object whose spread hash is ``directory``."""
    while True:
        name = data_object(0, 0, new_nonce())
        if hashlib.blake2b(name.encode(), digest_size=8).hexdigest().startswith(directory):
            return name


def _own(paths: list[str], needed: list[str] | None = None) -> set[str]:
    return Directory.of_sizes(dict.fromkeys(paths, 1)).own_data(needed or ())


def test_spread_data_that_is_not_the_checkpoints_own() -> None:
    near, other = f"5/{_named('5')}", f"7/{_named('7')}"
    wide = spread(data_object(0, 0, "ab"), 2)
    assert _own([near, other, "__0_0-ab.distcp"], [other]) == {near, other, "__0_0-ab.distcp"}
    assert _own([near, other], ["__0_0-ab.distcp"]) == set()
    assert _own([wide, other], [other]) == {other}
    for marks in ("5/.metadata", "5/.dcp_s3/pin", "5/__0.metadata"):
        assert _own([near, other, marks], [other]) == {other}
        assert _own([near, other, marks]) == set()
    assert _own([near, other]) == {near, other}  # of a save that was not committed
    assert _own([near, other, wide]) == set()
    assert _own([near, "6/__0_0.distcp"]) == set()
    assert _own([near, "__0_0.distcp"]) == {"__0_0.distcp"}


@pytest.mark.parametrize("committed", [True, False])
def test_a_nested_checkpoint_named_like_a_hash_is_not_taken(run: Run, committed: bool) -> None:
    if committed:
        run.save("")
    else:
        run.put("", "__0_0.distcp")
    nested = [f"5/{_named('5')}", f"10/{_named('10')}"]
    for path in [*nested, "10/.metadata"]:
        run.put("", path)
    run.clock.now += 2 * DAY
    prune("s3://bucket", store=run.store)
    assert {f"run/{path}" for path in nested} <= run.objects().keys()
    assert "run/__0_0.distcp" not in run.objects()
