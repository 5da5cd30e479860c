"""verify: items that no checksum covers, by other writers and with stream extensions, are decoded."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._extension import ZStandard

from tests.end_to_end import foreign
from tests.end_to_end.test_extensions import Xor
from tests.flipping import flip_in_flight
from tests.offline.damaging import NeedsCode, Saved, small_state
from tests.ranks import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@pytest.fixture
def foreign_saved(memory_server: Any, s3: Any, root: str, tmp_path: Path) -> Saved:
    """Written by torch, uploaded as it is."""
    state = {**small_state(), "object": NeedsCode(), "text": "something"}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path, thread_count=2), no_dist=True)
    saved = Saved(s3, root)
    for file in tmp_path.iterdir():
        saved.put(file.name, file.read_bytes(), {})
    return saved


def test_a_checkpoint_of_torch(memory_server: Any, foreign_saved: Saved) -> None:
    fast = foreign_saved.verify(full=False)
    assert fast.ok
    memory_server.handle.reset_counters()
    report = foreign_saved.verify()
    assert report.ok, report.problems
    assert (report.objects, report.items, report.items_not_decoded) == (2, 6, 0)
    assert (report.objects_without_checksum, report.items_without_checksum) == (2, 6)
    assert report.bytes_read == sum(foreign_saved.sizes.values())
    assert memory_server.handle.counters.requests["GetObject"] == 1 + 2, "neighbours share a request"
    assert not NeedsCode.ran


@pytest.mark.parametrize("fqn", ["weight", "half", "step", "object", "text"])
def test_flipped_bits_in_what_torch_wrote(foreign_saved: Saved, fqn: str) -> None:
    """By the CRC-32 of the zip records; bytes between them have none."""
    info = foreign_saved.info(fqn)
    original = foreign_saved.get(info.relative_path)
    item = original[info.offset : info.offset + info.length]
    with zipfile.ZipFile(io.BytesIO(item)) as archive:
        records = {record.filename: archive.read(record) for record in archive.infolist()}
    for name, content in records.items():
        position = info.offset + item.index(content) + len(content) // 2
        foreign_saved.flip(info.relative_path, position)
        problem = foreign_saved.only_problem()
        assert (problem.path, problem.fqn) == (info.relative_path, fqn), name
        assert "cannot be decoded" in problem.what
        foreign_saved.put(info.relative_path, original)
    assert not NeedsCode.ran


def test_other_damage_to_what_torch_wrote(foreign_saved: Saved) -> None:
    info = foreign_saved.info("weight")
    data = foreign_saved.get(info.relative_path)
    foreign_saved.put(info.relative_path, bytes(len(data)))
    assert "weight" in {problem.fqn for problem in foreign_saved.verify().problems}
    foreign_saved.put(info.relative_path, data[: info.offset + info.length - 1])
    assert "weight" in {problem.fqn for problem in foreign_saved.verify(full=False).problems}
    foreign_saved.delete(info.relative_path)
    assert "is missing" in foreign_saved.only_problem(full=False).what


def test_damage_in_flight_to_what_torch_wrote(foreign_saved: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    value = small_state()["twin"].view(torch.uint8).flatten()[:12].numpy().tobytes()
    seen = flip_in_flight(monkeypatch, value, times=1)
    report = foreign_saved.verify()
    assert report.ok, report.problems
    assert len(seen) == 1
    assert report.bytes_read == sum(foreign_saved.sizes.values()) + foreign_saved.info("twin").length


@pytest.mark.parametrize("client", ["fsspec", "s3torchconnector"])
def test_checkpoints_of_other_s3_clients(memory_server: Any, s3: Any, root: str, client: str) -> None:
    env = {"AWS_ENDPOINT_URL": memory_server.endpoint_url}
    run_ranks(1, foreign.write, client, root, {"thread_count": 2}, env=env, forget="dcp_s3")
    saved = Saved(s3, root)
    report = saved.verify()
    assert report.ok, report.problems
    assert report.items_without_checksum == report.items > 40
    path = max(saved.sizes, key=saved.sizes.__getitem__)
    saved.flip(path, saved.sizes[path] // 2)
    assert not saved.verify().ok


def test_framing_of_what_was_saved_without_checksums(memory_server: Any, s3: Any, root: str) -> None:
    saved = Saved(s3, root).save(small_state(), checksum="none")
    info = saved.info("weight")
    saved.flip(info.relative_path, info.offset)
    assert saved.only_problem().fqn == "weight"
    saved.flip(info.relative_path, info.offset)
    step = saved.info("step")
    saved.flip(step.relative_path, step.offset + step.length // 2)
    assert saved.only_problem().fqn == "step"


@pytest.mark.parametrize("checksum", ["auto", "none"])
def test_what_went_through_stream_extensions(memory_server: Any, s3: Any, root: str, checksum: str) -> None:
    saved = Saved(s3, f"{root}/xor").save(small_state(), writer={"_extensions": [Xor()]}, checksum=checksum)
    report = saved.verify()
    assert report.ok, report.problems
    assert report.items_not_decoded == (4 if checksum == "none" else 0)
    if not ZStandard.is_available():
        return
    saved = Saved(s3, f"{root}/zstd").save(small_state(), writer={"_extensions": [ZStandard()]}, checksum=checksum)
    report = saved.verify()
    assert report.ok, report.problems
    assert report.items_not_decoded == 0
    info = saved.info("weight")
    saved.flip(info.relative_path, info.offset)
    assert saved.only_problem().fqn == "weight"
