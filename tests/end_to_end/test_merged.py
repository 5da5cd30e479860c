"""Saves without collectives are what the same saves with collectives are, for torch's own reader and for any ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dcp_s3 import verify
from tests.end_to_end import foreign, merged, meshes
from tests.end_to_end.meshes import Mesh
from tests.end_to_end.states import assert_same
from tests.end_to_end.test_interchange import download, run_foreign
from tests.ranks import run_ranks
from tests.servers import S3Server

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

CASES = (
    Mesh("tp", (2, 2)),
    Mesh("hsdp", (2, 2)),
    Mesh("stages", (2, 2)),
    Mesh("hand", (2, 2)),
    Mesh("sharded", (1, 2)),
    Mesh("kinds", (1, 2)),
)
WITHOUT_GROUP = (Mesh("plain", (1, 2)), Mesh("stages", (2, 1)), Mesh("hand", (2, 2)))


def _check(server: S3Server, s3: Any, bucket: str, root: str, ways: dict[str, str], tmp_path: Path) -> None:
    """Each way stored the same, which is what the names say, for torch and for us."""
    urls = {way: merged.url_of(at, way) for way, at in ways.items()}
    stored = {way: merged.look(server, bucket, url) for way, url in urls.items()}
    reference = stored["together"]
    for way, each in stored.items():
        assert each == reference, way
        report = verify(urls[way], full=True)
        assert report.ok, report.problems

    directories = [str(download(s3, bucket, url.split("/", 3)[3], tmp_path / way)) for way, url in urls.items()]
    run_foreign(server, foreign.convert_directories, directories, str(tmp_path / "all.pt"))
    read = dict(zip(urls, torch.load(tmp_path / "all.pt", weights_only=False), strict=True))
    for way, state in read.items():
        assert_same(state, read["together"], way)
    for name, value in read["together"].items():
        if isinstance(value, torch.Tensor) and merged.is_known(name):
            assert torch.equal(meshes.bits(value), meshes.bits(meshes.full(name, value))), name

    known = sum(map(merged.is_known, reference.tensors))
    for compared in run_ranks(3, merged.load_resharded, list(urls.values())):
        assert len(compared) == known * len(urls) * 2 > 0


@pytest.mark.parametrize("mesh", CASES, ids=str)
def test_without_collectives_the_same_is_stored(
    root: str, bucket: str, s3: Any, memory_server: S3Server, tmp_path: Path, mesh: Mesh
) -> None:
    for called in run_ranks(mesh.ranks, merged.save_in, merged.WAYS, mesh, root):
        assert called["alone"] == (["barrier"], 1), "torch's own barrier, at its end"
        assert called["managed"] == ([], 0)
        assert mesh.ranks == 1 or called["together"][1] > 1
    _check(memory_server, s3, bucket, root, dict.fromkeys(merged.WAYS, root), tmp_path)


@pytest.mark.quick("hand-2x2")
@pytest.mark.parametrize("mesh", WITHOUT_GROUP, ids=str)
def test_without_a_process_group_the_same_is_stored(
    root: str, bucket: str, s3: Any, memory_server: S3Server, tmp_path: Path, mesh: Mesh
) -> None:
    run_ranks(mesh.ranks, merged.save_in, ["together"], mesh, root)
    ways = ("alone", "managed")
    run_ranks(mesh.ranks, merged.save_in, ways, mesh, root, group=False, env={"DCP_S3_RUN_ID": "a-run"})
    _check(memory_server, s3, bucket, root, dict.fromkeys(("together", *ways), root), tmp_path)
