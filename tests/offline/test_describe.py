"""`describe`: what it says, its checksums, and what it reads for that."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from dcp_s3 import S3StorageWriter, describe
from dcp_s3.format.blocks import make_storage_info
from dcp_s3.format.saved_entries import saved_entries
from dcp_s3.memory import crc64nvme
from tests.retention.making import save_foreign, save_on_ranks
from tests.servers import S3Server

pytestmark = pytest.mark.servers("memory")

Box = tuple[tuple[int, ...], tuple[int, ...]]


class Stored(NamedTuple):
    tensor: torch.Tensor
    boxes: Sequence[Box]
    """The chunks."""
    without: frozenset[int] = frozenset()
    """Numbers of the chunks that have no checksum."""


def grid(shape: Sequence[int], cuts: Sequence[Sequence[int]]) -> list[Box]:
    edges = [[0, *dim, size] for dim, size in zip(cuts, shape, strict=True)]
    spans = [list(itertools.pairwise(edge)) for edge in edges]
    return [(tuple(a for a, _ in box), tuple(b - a for a, b in box)) for box in itertools.product(*spans)]


def bytes_of(tensor: torch.Tensor, box: Box) -> bytes:
    part = tensor[tuple(slice(start, start + length) for start, length in zip(*box, strict=True))]
    return part.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def metadata_of(values: dict[str, Stored | torch.Tensor | bytes], **fields: Any) -> Metadata:
    """The metadata of a checkpoint with these tensors (in one chunk) and objects; ``fields`` of all that is stored."""
    metadata = Metadata({}, storage_data={})
    for fqn, value in values.items():
        if isinstance(value, torch.Tensor):
            value = Stored(value, grid(value.shape, [[] for _ in value.shape]))
        if isinstance(value, bytes):
            metadata.state_dict_metadata[fqn] = BytesStorageMetadata()
            info = make_storage_info("__0_0.distcp", 0, len(value), crc64nvme=crc64nvme(value))
            metadata.storage_data[MetadataIndex(fqn)] = info
            continue
        chunks = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in value.boxes]
        properties = TensorProperties(dtype=value.tensor.dtype)
        metadata.state_dict_metadata[fqn] = TensorStorageMetadata(properties, value.tensor.shape, chunks)
        for number, (box, chunk) in enumerate(zip(value.boxes, chunks, strict=True)):
            data = bytes_of(value.tensor, box)
            crc = None if number in value.without else crc64nvme(data)
            info = make_storage_info("__0_0.distcp", 0, len(data) + 64, raw_offset=64, crc64nvme=crc)
            metadata.storage_data[MetadataIndex(fqn, chunk.offsets, number)] = info
    for info in metadata.storage_data.values():
        vars(info).update(fields)
    return metadata


# --- checksums ------------------------------------------------------------------------------------------


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
        found.append(Stored(each, draw(st.permutations(grid(shape, cuts)))))
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
    columns = Stored(tensor, grid((4, 4), [[], [2]]))
    same_bytes = torch.cat([tensor[:, :2].reshape(-1), tensor[:, 2:].reshape(-1)]).view(4, 4)
    assert checksum_of(columns) != checksum_of(same_bytes)


def test_checksums_of_objects_and_of_what_was_encoded_are_those_of_the_stored_bytes() -> None:
    assert checksum_of(b"12") == f"{crc64nvme(b'12'):016x}" != checksum_of(b"13")
    rows = Stored(torch.arange(8.0), grid((8,), [[4]]))
    encoded = [checksum_of(rows, transform_descriptors=["z"], **more) for more in ({}, {"raw_offset": None})]
    assert encoded[0] == encoded[1] != checksum_of(rows)


# --- of real checkpoints --------------------------------------------------------------------------------


def _operations(server: S3Server) -> dict[str, int]:
    """The requests since it was last asked, none of them for data."""
    log = list(server.handle.request_log)
    assert not [each.key for each in log if each.key.endswith(".distcp")]
    server.handle.reset_counters()
    return Counter(each.operation for each in log)


def test_a_checkpoint_of_layers(root: str, memory_server: S3Server) -> None:
    layers = {str(number): {"w": torch.ones(4, 4), "b": torch.ones(4, dtype=torch.bfloat16)} for number in range(8)}
    writer = S3StorageWriter(f"{root}/step-7", metrics={"loss": 0.5})
    writer.attach("config.json", b"{}")
    dcp.save({"model": {"layers": layers, "head": torch.ones(100)}, "epoch": 3}, storage_writer=writer, no_dist=True)
    memory_server.handle.reset_counters()
    found = describe(f"{root}/step-7")
    assert _operations(memory_server) == {"ListObjectsV2": 1, "GetObject": 2}
    assert (found.info.step, found.info.world_size, found.info.metrics) == (7, 1, {"loss": 0.5})
    assert [each.attachment for each in found.objects] == [None, "config.json"]
    assert found.writer["torch"] == torch.__version__
    assert sum(entry.parameters for entry in found.entries) == 8 * 20 + 100
    assert [(entry.dtype, entry.parameters) for entry in found.entries[-2:]] == [("float32", 100), (None, 0)]
    assert len(json.loads(json.dumps(found.to_dict()))["entries"]) == 18
    layers["3"]["w"][1, 2] = 7
    writer = S3StorageWriter(f"{root}/step-8")
    dcp.save({"model": {"layers": layers, "head": torch.ones(100)}, "epoch": 3}, storage_writer=writer, no_dist=True)
    one, two = ({each.fqn: each.checksum for each in describe(f"{root}/step-{n}").entries} for n in (7, 8))
    assert {name for name, checksum in one.items() if checksum != two[name]} == {"model.layers.3.w"}


def test_foreign_checkpoints_and_those_that_each_rank_commits(root: str, s3: Any, tmp_path: Path) -> None:
    foreign, ranks = save_foreign(s3, f"{root}/foreign", tmp_path), save_on_ranks(f"{root}/ranks", 2)
    found = describe(foreign)
    assert {entry.fqn: entry.shape for entry in found.entries} == {"weight": (3, 4), "half": (5,), "step": None}
    assert (found.info.foreign, found.writer) == (True, {})
    for each in (foreign, ranks):
        assert {entry.checksum for entry in describe(each).entries} == {None}
