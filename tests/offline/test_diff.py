"""`diff`, and `describe` of one checkpoint: what they say, and what they read for that."""

from __future__ import annotations

import itertools
import json
import math
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

from dcp_s3 import S3StorageWriter, annotate, describe, errors
from dcp_s3.format.blocks import make_storage_info
from dcp_s3.memory import crc64nvme
from dcp_s3.offline.diff import compare, diff
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


# --- by checksums -------------------------------------------------------------------------------------


@st.composite
def _pairs(draw: st.DrawFn) -> tuple[Stored, Stored]:
    shape = draw(st.sampled_from([(), (1,), (100,), (8, 8), (2, 64), (4, 4, 8), (2, 3, 5, 7)]))
    tensor = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    changed = tensor.clone()
    for number in draw(st.lists(st.integers(0, tensor.numel() - 1), max_size=3)):
        changed.view(-1)[number] ^= draw(st.integers(1, 255))
    some = [st.lists(st.integers(1, max(1, size - 1)), max_size=3, unique=True) for size in shape]
    cuts = [[sorted(draw(each)) if size > 1 else [] for each, size in zip(some, shape, strict=True)] for _ in range(2)]
    if draw(st.booleans()):
        cuts[1] = cuts[0]
    found = []
    for each, how in zip((tensor, changed), cuts, strict=True):
        boxes = draw(st.permutations(grid(shape, how)))
        without = draw(st.sets(st.integers(0, len(boxes) - 1), max_size=2)) if draw(st.booleans()) else set()
        found.append(Stored(each, boxes, frozenset(without)))
    return found[0], found[1]


def _known(stored: Stored) -> dict[Box, bytes | None]:
    return {
        box: None if number in stored.without else bytes_of(stored.tensor, box)
        for number, box in enumerate(stored.boxes)
    }


@settings(max_examples=300)
@given(_pairs())
def test_the_verdict_is_right_and_unknown_only_where_chunks_or_checksums_differ(pair: tuple[Stored, Stored]) -> None:
    one, two = pair
    [found] = compare(metadata_of({"x": one}), metadata_of({"x": two}))
    assert found.status != ("changed" if torch.equal(one.tensor, two.tensor) else "same")
    a, b = map(_known, pair)
    both = [(a[box], b[box]) for box in a.keys() & b.keys()]
    if any(None not in each and each[0] != each[1] for each in both):
        assert (found.status, found.what) == ("changed", "values")
    elif a.keys() == b.keys() and not any(None in each for each in both):
        assert found.status == "same"
    else:
        assert found.status == "unknown"


def test_names_shapes_dtypes_and_objects() -> None:
    ones, wide, empty = torch.ones(4), torch.ones(2, 2), torch.empty(0, 4)
    a = metadata_of({
        "gone": ones, "shape": ones, "dtype": ones, "kind": ones, "scalar": torch.tensor(3.0), "empty": empty,
        "step": b"10", "config": b"same", "other": b"12",
    })  # fmt: skip
    b = metadata_of({
        "new": wide, "shape": wide, "dtype": ones.bfloat16(), "scalar": torch.tensor(4.0), "empty": empty,
        "step": b"11", "config": b"same", "other": b"123", "kind": b"",
    })  # fmt: skip
    assert [(each.fqn, each.kind, each.status, each.what, each.size) for each in compare(a, b)] == [
        ("gone", "tensor", "only in A", "", 80),  # framing included
        ("shape", "tensor", "changed", "shape 4 -> 2x2", 80),
        ("dtype", "tensor", "changed", "dtype float32 -> bfloat16", 80),
        ("kind", "tensor", "changed", "kind tensor -> bytes", 80),
        ("scalar", "tensor", "changed", "values", 68),
        ("empty", "tensor", "same", "", 64),
        ("step", "bytes", "changed", "bytes", 2),
        ("config", "bytes", "same", "", 4),
        ("other", "bytes", "changed", "bytes", 2),
        ("new", "tensor", "only in B", "", 80),
    ]
    assert [each.fqn for each in compare(a, b, ["st*", "new"])] == ["step", "new"]


def test_what_was_encoded_is_the_same_only_if_its_stored_bytes_are() -> None:
    tensor = torch.arange(8.0)
    encoded = [
        metadata_of({"x": each}, raw_offset=None, transform_descriptors=["z"]) for each in (tensor, tensor, tensor + 1)
    ]
    found = [compare(encoded[0], each)[0] for each in (*encoded, metadata_of({"x": tensor}))]
    assert [each.status for each in found] == ["same", "same", "unknown", "unknown"]
    assert {each.what for each in found[2:]} == {"it was encoded before it was stored"}
    assert compare(metadata_of({"x": tensor}), encoded[0])[0].status == "unknown"
    objects = [metadata_of({"x": data}, transform_descriptors=["z"]) for data in (b"12", b"13")]
    assert compare(*objects)[0].status == "unknown"


# --- of real checkpoints --------------------------------------------------------------------------------


def _operations(server: S3Server) -> dict[str, int]:
    """The requests since it was last asked, none of them for data."""
    log = list(server.handle.request_log)
    assert not [each.key for each in log if each.key.endswith(".distcp")]
    server.handle.reset_counters()
    return Counter(each.operation for each in log)


def test_a_thousand_tensors_in_six_requests(root: str, memory_server: S3Server) -> None:
    state: dict[str, Any] = {f"layers.{number}.weight": torch.full((4,), float(number)) for number in range(1000)}
    dcp.save(state | {"step": 1}, storage_writer=S3StorageWriter(f"{root}/a"), no_dist=True)
    state["layers.77.weight"][3] = 0
    dcp.save(state | {"step": 2}, storage_writer=S3StorageWriter(f"{root}/b"), no_dist=True)
    memory_server.handle.reset_counters()
    found = diff(f"{root}/a", f"{root}/b")
    assert _operations(memory_server) == {"ListObjectsV2": 2, "GetObject": 4}
    assert {each.fqn: (each.status, each.what) for each in found.entries if each.status != "same"} == {
        "layers.77.weight": ("changed", "values"),
        "step": ("changed", "bytes"),
    }
    assert found.counts == {"same": 999, "changed": 2}
    assert found.summary == "2 of 1001 entries differ (2 changed), 999 same"
    assert (found.status, found.same) == ("changed", False)
    assert repr(found) == f"CheckpointDiff('a', 'b', {found.summary})"
    assert diff(f"{root}/a", f"{root}/a").same


def test_attachments_and_metrics(root: str) -> None:
    for name, prefix, files, loss in (
        ("a", "model", {"same": b"1", "changed": b"1", "gone": b"1"}, math.nan),
        ("b", "train.model", {"same": b"1", "changed": b"2", "new": b"1"}, 0.5),
    ):
        writer = S3StorageWriter(f"{root}/{name}", metrics={"loss": loss, "nan": math.nan, "tokens": 10})
        for file, data in files.items():
            writer.attach(file, data)
        dcp.save({prefix: torch.ones(2), "step": 1}, storage_writer=writer, no_dist=True)
    annotate(f"{root}/b", {"accuracy": 0.9})
    found = diff(f"{root}/a", f"{root}/b")
    assert found.attachments == {"changed": "changed", "gone": "only in A", "new": "only in B", "same": "same"}
    assert list(found.metrics) == ["loss", "accuracy"]
    assert found.counts == {"only in A": 1, "only in B": 1, "same": 1}
    assert "3 of 4 attachments differ" in found.summary
    assert [each["fqn"] for each in found.to_dict()["entries"]] == ["model", "train.model"]
    assert len(json.loads(json.dumps(found.to_dict(everything=True)))["entries"]) == 3
    assert diff(f"{root}/a", f"{root}/b", filter="step").same  # without attachments, and metrics do not count
    with pytest.raises(errors.EntryNotFoundError, match=r"neither .* has an entry that matches 'modle"):
        diff(f"{root}/a", f"{root}/b", filter="modle.*")
    with pytest.raises(errors.CheckpointNotFoundError, match=f"{root}/c"):
        diff(f"{root}/a", f"{root}/c")


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


def test_foreign_checkpoints_and_those_that_each_rank_commits(root: str, s3: Any, tmp_path: Path) -> None:
    foreign, ranks = save_foreign(s3, f"{root}/foreign", tmp_path), save_on_ranks(f"{root}/ranks", 2)
    found = describe(foreign)
    assert {entry.fqn: entry.shape for entry in found.entries} == {"weight": (3, 4), "half": (5,), "step": None}
    assert (found.info.foreign, found.writer) == (True, {})
    assert diff(foreign, foreign).counts == {"unknown": 3}
    with pytest.raises(errors.CheckpointNotFoundError, match="each rank has committed its own part"):
        diff(foreign, ranks)
