"""`diff` of saves without collectives: each rank has a copy of its own, and loads that one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from dcp_s3 import S3StorageWriter
from dcp_s3.offline.diff import diff
from tests.ranks import run_ranks
from tests.single_ranks import committing_alone

pytestmark = pytest.mark.servers("memory")


def _save(root: str, name: str, change: float, use_collectives: bool = False, checksum: str = "auto") -> None:
    rank = dist.get_rank()
    other = change if rank else 0.0  # only the second rank changes
    state: dict[str, Any] = {
        "own": torch.full((10,), rank + other),
        "object": {"count": rank * 10 + other},
        "alike": torch.ones(3),
        "only": {str(rank): torch.ones(2)},
    }
    writer = S3StorageWriter(f"{root}/{name}", settings={"checksum": checksum})
    with committing_alone():
        dcp.save(state, storage_writer=writer, use_collectives=use_collectives)


def _statuses(a: str, b: str, *, full: bool = False) -> dict[str, str]:
    return {each.fqn: f"{each.status} {each.what}".strip() for each in diff(a, b, full=full).entries}


@pytest.mark.parametrize("full", [False, True])
def test_what_another_rank_has_counts(root: str, full: bool) -> None:
    for name, change in (("a", 0.0), ("same", 0.0), ("other", 1.0)):
        run_ranks(2, _save, root, name, change)
    assert set(_statuses(f"{root}/a", f"{root}/same", full=full).values()) == {"same"}
    assert _statuses(f"{root}/a", f"{root}/other", full=full) == {
        "own": "changed values of another rank",
        "object.count": "changed bytes of another rank",
        "alike": "same",
        "only.0": "same",
        "only.1": "same",
    }
    assert not diff(f"{root}/a", f"{root}/other").same


def test_a_save_with_collectives_has_one_copy_for_all(root: str) -> None:
    run_ranks(2, _save, root, "ranks", 0.0)
    run_ranks(2, _save, root, "one", 0.0, True)
    found = _statuses(f"{root}/ranks", f"{root}/one")
    assert found["alike"] == "same"
    assert found["own"] == "changed values of another rank"  # the second rank would load other values


@pytest.mark.parametrize("full", [False, True])
def test_copies_without_checksums_are_unknown(root: str, full: bool) -> None:
    for name in ("a", "b"):
        run_ranks(2, _save, root, name, 0.0, False, "none")
    assert _statuses(f"{root}/a", f"{root}/b", full=full)["own"].startswith("unknown")
