"""read_tensor, read_tensors and describe: what they return, which objects and bytes they touch for that; boxes, names
and checksums."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

import dcp_s3
from dcp_s3 import describe, errors
from dcp_s3.format.blocks import make_storage_info
from dcp_s3.format.metadata import load_metadata
from dcp_s3.format.saved_entries import saved_entries
from dcp_s3.memory import crc64nvme
from tests.end_to_end.states import assert_same, bits, every_kind, random_tensor
from tests.objects import separate_objects
from tests.offline.conftest import save, save_sharded
from tests.ranks import run_ranks
from tests.retention.making import save_foreign, save_on_ranks
from tests.servers import S3Server


class Traffic(NamedTuple):
    value: Any
    objects: set[str]
    requests: int
    size: int
    """Bytes of data; those of the metadata, which is read once, are not counted."""


def traffic(server: S3Server, read: Callable[[], Any]) -> Traffic:
    """What is fetched to read something, and what that is."""
    handle = server.handle
    handle.reset_counters()
    value, log = read(), handle.request_log
    assert {request.operation for request in log} == {"GetObject"}
    metadata, data = ([each.key for each in log if (each.key == "run/.metadata") == it] for it in (True, False))
    assert len(metadata) == 1
    size = handle.counters.bytes_out - len(handle.read(log[0].bucket, "run/.metadata"))
    return Traffic(value, set(data), len(data), size)


# --- what is returned ----------------------------------------------------------------------------------


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
    found = traffic(memory_server, lambda: dcp_s3.read_tensors(root, "model.*"))
    assert_same(found.value, {f"model.{k}": v for k, v in state["model"].items()})
    assert found.objects == model
    assert 4 * 2**20 <= found.size < 4 * 2**20 + 8 * 4096  # framing between neighbours

    found = traffic(memory_server, lambda: dcp_s3.read_tensor(root, "optim.t3"))
    assert_same(found.value, state["optim"]["t3"])
    assert (found.requests, found.size) == (1, 2**20)

    found = traffic(memory_server, lambda: dcp_s3.read_tensors(root, ["step"]))
    assert (found.value, found.requests) == ({"step": 7}, 1)
    assert found.size < 4096


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


# --- describe ------------------------------------------------------------------------------------------


Box = tuple[tuple[int, ...], tuple[int, ...]]


class Stored(NamedTuple):
    tensor: torch.Tensor
    boxes: Sequence[Box]
    """The chunks."""
    without: frozenset[int] = frozenset()
    """Numbers of the chunks that have no checksum."""


def cut(shape: Sequence[int], cuts: Sequence[Sequence[int]]) -> list[Box]:
    edges = [[0, *dim, size] for dim, size in zip(cuts, shape, strict=True)]
    spans = [list(itertools.pairwise(edge)) for edge in edges]
    return [(tuple(a for a, _ in box), tuple(b - a for a, b in box)) for box in itertools.product(*spans)]


def metadata_of(values: dict[str, Stored | torch.Tensor | bytes], **fields: Any) -> Metadata:
    """The metadata of a checkpoint with these tensors (in one chunk) and objects; ``fields`` of all that is stored."""
    metadata = Metadata({}, storage_data={})
    for fqn, value in values.items():
        if isinstance(value, torch.Tensor):
            value = Stored(value, cut(value.shape, [[] for _ in value.shape]))
        if isinstance(value, bytes):
            metadata.state_dict_metadata[fqn] = BytesStorageMetadata()
            info = make_storage_info("__0_0.distcp", 0, len(value), crc64nvme=crc64nvme(value))
            metadata.storage_data[MetadataIndex(fqn)] = info
            continue
        chunks = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in value.boxes]
        properties = TensorProperties(dtype=value.tensor.dtype)
        metadata.state_dict_metadata[fqn] = TensorStorageMetadata(properties, value.tensor.shape, chunks)
        for number, (box, chunk) in enumerate(zip(value.boxes, chunks, strict=True)):
            data = bits(value.tensor[tuple(slice(at, at + length) for at, length in zip(*box, strict=True))])
            crc = None if number in value.without else crc64nvme(data)
            info = make_storage_info("__0_0.distcp", 0, len(data) + 64, raw_offset=64, crc64nvme=crc)
            metadata.storage_data[MetadataIndex(fqn, chunk.offsets, number)] = info
    for info in metadata.storage_data.values():
        vars(info).update(fields)
    return metadata


# --- describe: checksums -------------------------------------------------------------------------------


@st.composite
def _pairs(draw: st.DrawFn) -> tuple[Stored, Stored]:
    shape = draw(st.sampled_from([(), (1,), (100,), (8, 8), (2, 64), (4, 4, 8), (0, 4)]))
    tensor = torch.randint(0, 2, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    other = tensor.clone()
    for number in draw(st.lists(st.integers(0, max(0, tensor.numel() - 1)), max_size=3 if tensor.numel() else 0)):
        other.view(-1)[number] ^= draw(st.integers(1, 255))
    found = []
    for each in (tensor, other):
        dims = 1 if draw(st.booleans()) else len(shape)
        some = [st.sets(st.integers(1, size - 1), max_size=3) if size > 1 else st.just(set()) for size in shape[:dims]]
        cuts = [sorted(draw(where)) for where in some] + [[]] * (len(shape) - len(some))
        found.append(Stored(each, draw(st.permutations(cut(shape, cuts)))))
    return found[0], found[1]


def checksum_of(stored: Stored | torch.Tensor | bytes, **fields: Any) -> str | None:
    return saved_entries(metadata_of({"x": stored}, **fields))[0].checksum


@settings(max_examples=300)
@given(_pairs())
def test_checksums_are_equal_of_equal_tensors_cut_alike_or_into_rows_only(pair: tuple[Stored, Stored]) -> None:
    rows = [all(sizes[1:] == each.tensor.shape[1:] for _, sizes in each.boxes) for each in pair]
    alike = all(rows) or not pair[0].tensor.numel() or set(pair[0].boxes) == set(pair[1].boxes)
    one, two = map(checksum_of, pair)
    assert (one == two) == (alike and torch.equal(pair[0].tensor, pair[1].tensor))
    if rows[0]:
        assert one == f"{crc64nvme(pair[0].tensor.numpy().tobytes()):016x}"
        assert checksum_of(pair[0]._replace(without=frozenset({0}))) == (None if pair[0].tensor.numel() else one)


def test_columns_in_a_row_are_not_the_tensor_that_has_these_bytes() -> None:
    tensor = torch.arange(16.0).view(4, 4)
    columns = Stored(tensor, cut((4, 4), [[], [2]]))
    same_bytes = torch.cat([tensor[:, :2].reshape(-1), tensor[:, 2:].reshape(-1)]).view(4, 4)
    assert checksum_of(columns) != checksum_of(same_bytes)


def test_checksums_of_objects_and_of_what_was_encoded_are_those_of_the_stored_bytes() -> None:
    assert checksum_of(b"12") == f"{crc64nvme(b'12'):016x}" != checksum_of(b"13")
    rows = Stored(torch.arange(8.0), cut((8,), [[4]]))
    encoded = [checksum_of(rows, transform_descriptors=["z"], **more) for more in ({}, {"raw_offset": None})]
    assert encoded[0] == encoded[1] != checksum_of(rows)


# --- describe: of real checkpoints ---------------------------------------------------------------------


def test_a_checkpoint_of_layers(root: str, memory_server: S3Server) -> None:
    layers = {str(number): {"w": torch.ones(4, 4), "b": torch.ones(4, dtype=torch.bfloat16)} for number in range(8)}
    state = {"model": {"layers": layers, "head": torch.ones(100)}, "epoch": 3}
    save(state, f"{root}/step-7", {"config.json": b"{}"}, metrics={"loss": 0.5})
    memory_server.handle.reset_counters()
    found = describe(f"{root}/step-7")
    assert memory_server.handle.counters.requests == {"ListObjectsV2": 1, "GetObject": 2}
    assert not [each.key for each in memory_server.handle.request_log if each.key.endswith(".distcp")]
    assert (found.info.step, found.info.world_size, found.info.metrics) == (7, 1, {"loss": 0.5})
    assert [each.attachment for each in found.objects] == [None, "config.json"]
    assert found.writer["torch"] == torch.__version__
    assert sum(entry.parameters for entry in found.entries) == 8 * 20 + 100
    assert [(entry.dtype, entry.parameters) for entry in found.entries[-2:]] == [("float32", 100), (None, 0)]
    assert len(json.loads(json.dumps(found.to_dict()))["entries"]) == 18
    layers["3"]["w"][1, 2] = 7
    save(state, f"{root}/step-8")
    one, two = ({each.fqn: each.checksum for each in describe(f"{root}/step-{n}").entries} for n in (7, 8))
    assert {name for name, checksum in one.items() if checksum != two[name]} == {"model.layers.3.w"}


@pytest.mark.servers("memory")
def test_foreign_checkpoints_and_those_that_each_rank_commits(root: str, s3: Any, tmp_path: Path) -> None:
    foreign, ranks = save_foreign(s3, f"{root}/foreign", tmp_path), save_on_ranks(f"{root}/ranks", 2)
    found = describe(foreign)
    assert {entry.fqn: entry.shape for entry in found.entries} == {"weight": (3, 4), "half": (5,), "step": None}
    assert (found.info.foreign, found.writer) == (True, {})
    for each in (foreign, ranks):
        assert {entry.checksum for entry in describe(each).entries} == {None}
