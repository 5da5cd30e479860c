"""read_tensor and read_tensors: what they return, and which objects and bytes they touch; boxes and names."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

import dcp_s3
from dcp_s3 import errors
from dcp_s3.format.metadata import load_metadata
from dcp_s3.offline.names import new_names
from tests.end_to_end.states import assert_same, every_kind, random_tensor
from tests.objects import separate_objects
from tests.offline.conftest import save, save_sharded
from tests.ranks import run_ranks
from tests.servers import S3Server


class Traffic:
    """The data that was fetched from the in-memory server while it was entered."""

    def __init__(self, server: S3Server) -> None:
        self._server = server.handle

    def __enter__(self) -> Traffic:
        self._server.reset_counters()
        return self

    def __exit__(self, *_: object) -> None:
        requests = [request for request in self._server.request_log if request.operation == "GetObject"]
        self.metadata = sum(request.key.endswith(".metadata") for request in requests)
        self.requests = len(requests) - self.metadata
        self.objects = {request.key for request in requests} - {"run/.metadata"}
        others = [r for r in self._server.request_log if r.operation != "GetObject"]
        assert not others
        stored = len(self._server.read(requests[0].bucket, "run/.metadata")) if self.metadata else 0
        self.bytes = self._server.counters.bytes_out - stored * self.metadata


# --- what is returned -------------------------------------------------------------------------------------


def test_every_kind(root: str) -> None:
    state = every_kind()
    save(state, root)
    found, (expected, _) = dcp_s3.read_tensors(root), flatten_state_dict(state)
    assert_same(found, expected)
    for name in ("transposed", "dtypes.torch.bfloat16", "scalars.torch.bool", "empty.1", "naïve/key %+"):
        assert_same(dcp_s3.read_tensor(root, name), expected[name])
    assert all(not tensor.requires_grad for tensor in found.values() if isinstance(tensor, torch.Tensor))


def test_slices_of_sharded_tensors(root: str, memory_server: S3Server) -> None:
    run_ranks(4, save_sharded, root, 13)
    full = torch.arange(13 * 22 * 3).view(13, 22, 3)
    indices = [
        None, ..., 5, -1, (3, 7), (12, 21, 2), (slice(2, 11), slice(-9, None)), (..., 1), (slice(None), 4),
        (slice(4, 4),), (slice(100, None), ..., 0), np.s_[3:9, ..., 1:],
    ]  # fmt: skip
    for name in ("rows", "columns", "replicated", "grid", "hybrid"):
        for index in indices:
            found = dcp_s3.read_tensor(root, name, index)
            assert_same(found, full[... if index is None else index].contiguous())
            assert found.is_contiguous()


def test_names_and_patterns(root: str, memory_server: S3Server) -> None:
    state = {"model": {"a": torch.ones(1), "b": torch.ones(2)}, "optim": {"a": torch.ones(3), "step": 4}, "x[y]": 5}
    save(state, root)
    read = dcp_s3.read_tensors
    assert list(read(root)) == ["model.a", "model.b", "optim.a", "optim.step", "x[y]"]
    assert list(read(root, "model.b")) == ["model.b"]
    assert list(read(root, ["optim.step", "model.*"])) == ["optim.step", "model.a", "model.b"]
    assert list(read(root, ["*.a", "model.a", "*"])) == ["model.a", "optim.a", "model.b", "optim.step", "x[y]"]
    assert read(root, ["x[y]"]) == {"x[y]": 5}
    assert read(root, "o*.s???") == {"optim.step": 4}
    assert read(root, []) == {}


def _megabytes(count: int) -> dict[str, torch.Tensor]:
    return {f"t{i}": random_tensor((2**18,), torch.float32, i) for i in range(count)}


def test_only_the_objects_and_bytes_of_what_is_asked_for(root: str, memory_server: S3Server) -> None:
    state = {"model": _megabytes(4), "optim": _megabytes(8), "step": 7}
    with separate_objects("model", "optim"):
        save(state, root)
    metadata = load_metadata(memory_server.handle.read(root.split("/")[2], "run/.metadata"), url=root)
    model = {f"run/{info.relative_path}" for index, info in metadata.storage_data.items() if "model." in index.fqn}
    others = {f"run/{info.relative_path}" for index, info in metadata.storage_data.items() if "model." not in index.fqn}
    assert not model & others

    with Traffic(memory_server) as traffic:
        assert_same(dcp_s3.read_tensors(root, "model.*"), {f"model.{k}": v for k, v in state["model"].items()})
    assert traffic.metadata == 1
    assert traffic.objects == model
    assert 4 * 2**20 <= traffic.bytes < 4 * 2**20 + 8 * 4096  # framing between neighbours

    with Traffic(memory_server) as traffic:
        assert_same(dcp_s3.read_tensor(root, "optim.t3"), state["optim"]["t3"])
    assert (traffic.metadata, traffic.requests, traffic.bytes) == (1, 1, 2**20)

    with Traffic(memory_server) as traffic:
        assert dcp_s3.read_tensors(root, ["step"]) == {"step": 7}
    assert (traffic.metadata, traffic.requests) == (1, 1)
    assert traffic.bytes < 4096


def test_unknown_names(root: str, memory_server: S3Server) -> None:
    save({"model": {"layers": {"weight": torch.ones(1), "bias": torch.ones(1)}}, "step": 1}, root)
    with pytest.raises(
        errors.EntryNotFoundError, match=r"no entry 'model\.layer\.weight'.*'model\.layers\.weight'"
    ) as e:
        dcp_s3.read_tensor(root, "model.layer.weight")
    assert (e.value.fqn, e.value.url) == ("model.layer.weight", root)
    assert isinstance(e.value, LookupError)
    with pytest.raises(errors.EntryNotFoundError, match=r"'bias'.*closest of 3: 'model\.layers\.bias'"):
        dcp_s3.read_tensors(root, ["step", "bias"])
    with pytest.raises(errors.EntryNotFoundError, match=r"no entry 'optim\.\*'"):
        dcp_s3.read_tensors(root, ["model.*", "optim.*"])
    with pytest.raises(errors.EntryNotFoundError, match=r"no tensor 'step'.* Remedy: read_tensors"):
        dcp_s3.read_tensor(root, "step")
    with pytest.raises(errors.CheckpointNotFoundError):
        dcp_s3.read_tensor(f"{root}/none", "x")


def test_objects_that_need_more_than_weights_only(root: str, memory_server: S3Server) -> None:
    save({"x": math.gcd, "y": 5}, root)
    with pytest.raises(errors.UnsafeItemError, match=r"math\.gcd"):
        dcp_s3.read_tensors(root)
    assert dcp_s3.read_tensors(root, "y") == {"y": 5}
    assert dcp_s3.read_tensors(root, weights_only=False) == {"x": math.gcd, "y": 5}


@pytest.mark.parametrize(
    ("size", "chunks"), [(5, [(0, 4)]), (4, [(0, 2), (1, 2)]), (4, [(0, 2), (2, 1)])], ids=["larger", "overlap", "gap"]
)
def test_chunks_that_do_not_cover_the_tensor(
    root: str, memory_server: S3Server, monkeypatch: pytest.MonkeyPatch, size: int, chunks: list[tuple[int, int]]
) -> None:
    """Nothing of uninitialised memory comes out."""
    save({"x": torch.ones(4)}, root)
    check = dcp_s3.load.weights.check_metadata

    def cut(*arguments: Any) -> Any:
        metadata = check(*arguments)
        saved = metadata.state_dict_metadata["x"]
        saved.size = torch.Size([size])
        saved.chunks = [ChunkStorageMetadata(torch.Size([start]), torch.Size([n])) for start, n in chunks]
        return metadata

    monkeypatch.setattr(dcp_s3.load.weights, "check_metadata", cut)
    with pytest.raises(errors.CorruptCheckpointError, match="'x': its chunks do not cover it"):
        dcp_s3.read_tensor(root, "x")
    if len(chunks) == 1:
        assert dcp_s3.read_tensor(root, "x", slice(0, 4)).tolist() == [1, 1, 1, 1]


def test_rules_that_cannot_be_meant() -> None:
    for rules, message in (
        ({"modle": ""}, r"'modle' matches no name. The closest of 2: 'model.[ab]'"),
        ({"[ab]$": "x"}, "'model.a' and 'model.b' would both be called 'model.x'"),
        ({"(": ""}, "cannot rename: missing"),
        ({"a": r"\2"}, "cannot rename: invalid group reference"),
    ):
        with pytest.raises(ValueError, match=message):
            new_names(["model.a", "model.b"], rules)
