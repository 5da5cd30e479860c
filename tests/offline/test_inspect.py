"""What `inspect` shows of real checkpoints, and what it fetches for that."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_s3 import S3StorageWriter, errors
from dcp_s3.offline.inspect import inspect
from tests.retention.making import delete, save, save_foreign, save_on_ranks
from tests.servers import S3Server


def _names(url: str) -> dict[str, tuple[int, ...] | None]:
    return {entry.fqn: entry.shape for entry in inspect(url).entries}


def test_a_checkpoint_of_layers(root: str, memory_server: S3Server) -> None:
    layers = {str(number): {"w": torch.ones(4, 4), "b": torch.ones(4, dtype=torch.bfloat16)} for number in range(8)}
    writer = S3StorageWriter(f"{root}/step-7", metrics={"loss": 0.5})
    writer.attach("config.json", b"{}")
    dcp.save({"model": {"layers": layers, "head": torch.ones(100)}, "epoch": 3}, storage_writer=writer, no_dist=True)
    memory_server.handle.reset_counters()
    contents = inspect(f"{root}/step-7")
    log = memory_server.handle.request_log
    assert sorted(each.operation for each in log) == ["GetObject", "GetObject", "ListObjectsV2"]
    assert not [each.key for each in log if each.key.endswith(".distcp")]

    assert (contents.info.step, contents.info.world_size, contents.info.metrics) == (7, 1, {"loss": 0.5})
    assert contents.attachments == ("config.json",)
    assert contents.writer["torch"] == torch.__version__
    assert (contents.tensors, contents.parameters) == (17, 8 * 20 + 100)
    assert [(entry.dtype, entry.parameters) for entry in contents.entries[-2:]] == [("float32", 100), (None, 0)]
    assert [entry.fqn for entry in contents.largest(1)] == ["model.head"]
    assert repr(contents).startswith(f"CheckpointEntries('{root}/step-7', 17 tensors, 260 parameters, ")
    found = json.loads(json.dumps(contents.to_dict()))
    assert (found["parameters"], len(found["entries"]), found["entries"][-2]["shape"]) == (260, 18, [100])

    filtered = inspect(f"{root}/step-7", ["model.layers.*.w", "epoch"])
    assert (len(filtered.entries), filtered.parameters) == (9, 128)
    with pytest.raises(
        errors.EntryNotFoundError, match=r"no entry that matches 'model.heads'. The closest of 18: 'mod"
    ):
        inspect(f"{root}/step-7", "model.heads")


@pytest.mark.servers("memory")
def test_foreign_checkpoints_and_those_without_collectives(root: str, s3: Any, tmp_path: Path) -> None:
    expected = {"weight": (3, 4), "half": (5,), "step": None}
    save_foreign(s3, f"{root}/foreign", tmp_path)
    assert _names(f"{root}/foreign") == expected
    foreign = inspect(f"{root}/foreign")
    assert foreign.info.foreign
    assert not foreign.writer
    save_on_ranks(f"{root}/ranks", 2)
    assert _names(f"{root}/ranks") == expected
    ranks = inspect(f"{root}/ranks")
    assert (ranks.info.world_size, ranks.info.metrics) == (2, {"loss": 0.5})
    assert {entry.chunks for entry in ranks.entries} == {1}  # each rank wrote it, and one of them counts


@pytest.mark.servers("memory")
def test_what_is_no_committed_checkpoint_is_not_found(root: str, s3: Any) -> None:
    with pytest.raises(errors.CheckpointNotFoundError, match="no committed checkpoint"):
        inspect(f"{root}/nothing")
    delete(s3, save(f"{root}/step-1"), ".metadata")
    with pytest.raises(errors.CheckpointNotFoundError, match="no committed checkpoint"):
        inspect(f"{root}/step-1")
