"""`diff` and `inspect` of real checkpoints: what they say, and what they read for that."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from dcp_s3 import S3StorageWriter, annotate, errors
from dcp_s3.offline import boxes
from dcp_s3.offline.diff import CheckpointDiff, diff
from dcp_s3.offline.inspect import inspect
from tests.ranks import run_ranks
from tests.retention.making import save, save_foreign, save_on_ranks
from tests.servers import S3Server
from tests.single_ranks import committing_alone

pytestmark = pytest.mark.servers("memory")


def _save(url: str, state: Any, **arguments: Any) -> str:
    dcp.save(state, storage_writer=S3StorageWriter(url, **arguments), no_dist=True)
    return url


def _statuses(found: CheckpointDiff) -> dict[str, tuple[str, str]]:
    return {each.fqn: (each.status, each.what) for each in found.entries}


class _Requests:
    """The requests to the in-memory server while it was entered."""

    def __init__(self, server: S3Server) -> None:
        self._server = server.handle

    def __enter__(self) -> _Requests:
        self._server.reset_counters()
        return self

    def __exit__(self, *_: object) -> None:
        log = self._server.request_log
        self.operations = Counter(each.operation for each in log)
        self.data = {each.key.split("/", 1)[1] for each in log if each.key.endswith(".distcp")}
        self.bytes_out = self._server.counters.bytes_out


# --- without data -------------------------------------------------------------------------------------


def test_ten_thousand_tensors_in_six_requests(root: str, memory_server: S3Server) -> None:
    state: dict[str, Any] = {f"layers.{number}.weight": torch.full((4,), float(number)) for number in range(10_000)}
    state["step"] = 1
    _save(f"{root}/a", state)
    state["layers.77.weight"][3] = 0
    state["layers.123.weight"][0] = 0
    _save(f"{root}/b", state | {"step": 2})
    with _Requests(memory_server) as requests:
        found = diff(f"{root}/a", f"{root}/b")
    assert not requests.data
    assert requests.operations == {"ListObjectsV2": 2, "GetObject": 4}
    assert {name: how for name, how in _statuses(found).items() if how[0] != "same"} == {
        "layers.77.weight": ("changed", "values"),
        "layers.123.weight": ("changed", "values"),
        "step": ("changed", "bytes"),
    }
    assert found.counts == {"same": 9_998, "changed": 3}
    assert found.summary == "3 of 10001 entries differ (3 changed), 9998 same"
    assert (found.status, found.same) == ("changed", False)
    assert repr(found) == f"CheckpointDiff('a', 'b', {found.summary})"
    with _Requests(memory_server) as requests:
        assert diff(f"{root}/a", f"{root}/a", full=True).same
    assert not requests.data


def _save_sharded(url: str, dim: int, changed: bool = False) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    full = torch.arange(64 * 64, dtype=torch.float32).view(64, 64)
    state = {
        name: distribute_tensor(full + n, mesh, [Shard(d)]) for n, (name, d) in enumerate({"x": dim, "y": 0}.items())
    }
    if changed and dist.get_rank() == 1:
        state["x"].to_local()[-1, -1] += 1
    dcp.save(state, storage_writer=S3StorageWriter(url))


def test_what_other_ranks_cut_otherwise_is_read_only_with_full(root: str, memory_server: S3Server) -> None:
    run_ranks(2, _save_sharded, f"{root}/rows", 0)
    run_ranks(2, _save_sharded, f"{root}/columns", 1)
    with _Requests(memory_server) as requests:
        found = diff(f"{root}/rows", f"{root}/columns")
    assert not requests.data
    assert _statuses(found) == {"x": ("unknown", "its chunks are cut differently"), "y": ("same", "")}
    assert (found.status, found.same) == ("unknown", False)
    assert found.summary == "0 of 2 entries differ, 1 unknown, 1 same"
    seen: list[int] = []
    with _Requests(memory_server) as requests:
        full = diff(f"{root}/rows", f"{root}/columns", full=True, on_total=seen.append, on_progress=seen.append)
    assert full.same
    assert requests.data
    assert full.bytes_read == seen[0] == sum(seen[1:]) == 2 * 64 * 64 * 4  # not y

    run_ranks(2, _save_sharded, f"{root}/changed", 0, True)
    run_ranks(3, _save_sharded, f"{root}/three", 0)
    assert _statuses(diff(f"{root}/rows", f"{root}/changed")) == {"x": ("changed", "values"), "y": ("same", "")}
    assert diff(f"{root}/rows", f"{root}/three").status == "unknown"
    assert diff(f"{root}/rows", f"{root}/three", full=True).same
    assert diff(f"{root}/three", f"{root}/changed", full=True).counts == {"same": 1, "changed": 1}


# --- with data ----------------------------------------------------------------------------------------


def test_what_has_no_checksum_is_read_piece_by_piece(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boxes, "BATCH", 4096)
    monkeypatch.setattr(boxes, "_PIECE", 1024)
    monkeypatch.setenv("DCP_S3_CHECKSUM", "none")
    kinds = [torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.int64]
    state: dict[str, Any] = {str(kind): torch.ones(33, 7).to(kind) for kind in kinds}
    state |= {
        "large": torch.zeros(50_000),
        "scalar": torch.tensor(1.5),
        "empty": torch.zeros(0, 3),
        "zero": torch.zeros(9),
    }
    _save(f"{root}/a", state)
    state["large"][20_000] = math.nan
    state["zero"][0] = -0.0
    _save(f"{root}/b", state)
    found = diff(f"{root}/a", f"{root}/b")
    assert {status for status, _ in _statuses(found).values()} == {"unknown", "same"}
    assert _statuses(found)["empty"] == ("same", "")
    full = diff(f"{root}/a", f"{root}/b", full=True)
    assert {name for name, how in _statuses(full).items() if how == ("changed", "values")} == {"large", "zero"}
    assert full.counts == {"changed": 2, "same": 8}
    assert full.bytes_read < 2 * 100_000  # the rest of `large` was not read
    assert diff(f"{root}/b", f"{root}/b", full=True).same


def test_foreign_checkpoints_and_those_without_collectives(root: str, s3: Any, tmp_path: Path) -> None:
    ours = save_on_ranks(f"{root}/ranks", 2)
    foreign = save_foreign(s3, f"{root}/foreign", tmp_path)
    found = diff(foreign, save(f"{root}/ours", metrics={"loss": 0.5}))
    assert _statuses(found) == dict.fromkeys(("weight", "half", "step"), ("unknown", "no checksum in A"))
    assert diff(foreign, f"{root}/ours", full=True).same
    assert found.metrics == {"loss": (None, 0.5)}
    assert diff(foreign, ours).counts == {"unknown": 3}


def test_objects_are_compared_by_their_stored_bytes(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    value: dict[str, Any] = {"same": [1, "text"], "changed": (1, 2)}
    one, two = _save(f"{root}/a", value), _save(f"{root}/b", value | {"changed": (1, 3)})
    assert _statuses(diff(one, two, full=True)) == {"same": ("same", ""), "changed": ("changed", "bytes")}
    monkeypatch.setenv("DCP_S3_CHECKSUM", "none")
    two = _save(f"{root}/c", value | {"changed": (1, 3)})
    assert _statuses(diff(one, two)) == dict.fromkeys(value, ("unknown", "no checksum in B"))
    full = diff(one, two, full=True)
    assert _statuses(full) == {"same": ("same", ""), "changed": ("changed", "bytes")}
    assert full.bytes_read > 0


# --- beside the values ----------------------------------------------------------------------------------


def test_attachments_and_metrics(root: str) -> None:
    for name, prefix, files, loss in (
        ("a", "model", {"same": b"1", "changed": b"1", "gone": b"1"}, math.nan),
        ("b", "train.model", {"same": b"1", "changed": b"2", "new": b"1"}, 0.5),
    ):
        writer = S3StorageWriter(f"{root}/{name}", metrics={"loss": loss, "nan": math.nan, "tokens": 10})
        for file, data in files.items():
            writer.attach(file, data)
        state = {f"{prefix}.{n}.weight": torch.full((2,), float(n)) for n in range(3)}
        dcp.save(state | {"step": 1}, storage_writer=writer, no_dist=True)
    annotate(f"{root}/b", {"accuracy": 0.9})
    found = diff(f"{root}/a", f"{root}/b")
    assert found.attachments == {"changed": "changed", "gone": "only in A", "new": "only in B", "same": "same"}
    assert list(found.metrics) == ["loss", "accuracy"]
    assert found.counts == {"only in A": 3, "only in B": 3, "same": 1}
    assert "3 of 4 attachments differ" in found.summary
    assert [each["fqn"] for each in found.to_dict()["entries"]] == [
        f"{prefix}.{n}.weight" for prefix in ("model", "train.model") for n in range(3)
    ]
    assert len(found.to_dict(everything=True)["entries"]) == 7
    json.dumps(found.to_dict())
    step = diff(f"{root}/a", f"{root}/b", filter="step")
    assert step.same  # without attachments, and metrics do not count
    with pytest.raises(errors.EntryNotFoundError, match=r"neither .* has an entry that matches 'modle"):
        diff(f"{root}/a", f"{root}/b", filter="modle.*")
    with pytest.raises(errors.CheckpointNotFoundError, match=f"{root}/c"):
        diff(f"{root}/a", f"{root}/c")


# --- single ranks ----------------------------------------------------------------------------------------


def _save_alone(url: str) -> None:
    state = {"own": torch.full((10,), dist.get_rank()), "only": {str(dist.get_rank()): torch.ones(2)}}
    with committing_alone():
        dcp.save(state, storage_writer=S3StorageWriter(url), use_collectives=False)


def test_what_several_ranks_saved_is_not_compared(root: str) -> None:
    for name in ("a", "b"):
        run_ranks(2, _save_alone, f"{root}/{name}")
    for full in (False, True):
        found = _statuses(diff(f"{root}/a", f"{root}/b", full=full))
        assert found["own"] == ("unknown", "several ranks wrote it, without collectives")
        assert found["only.0"] == found["only.1"] == ("same", "")


# --- inspect ---------------------------------------------------------------------------------------------


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


def test_the_entries_of_foreign_checkpoints_and_of_single_ranks(root: str, s3: Any, tmp_path: Path) -> None:
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
