"""The comparison of two checkpoints by the checksums of their chunks is right about the bytes."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
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

from dcp_s3.checksum import crc64nvme
from dcp_s3.format.blocks import make_storage_info
from dcp_s3.offline.diff import EntryDiff, compare

Box = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class Cut:
    """How one side stores a tensor."""

    boxes: Sequence[Box]
    """The chunks."""
    without: frozenset[int] = frozenset()
    """Numbers of the chunks that have no checksum."""


def grid(shape: Sequence[int], cuts: Sequence[Sequence[int]]) -> list[Box]:
    """The boxes between cuts in each dimension, in row-major order."""
    edges = [[0, *dim, size] for dim, size in zip(cuts, shape, strict=True)]
    spans = [list(itertools.pairwise(edge)) for edge in edges]
    return [(tuple(a for a, _ in box), tuple(b - a for a, b in box)) for box in itertools.product(*spans)]


def split(shape: Sequence[int], dim: int, count: int) -> list[Box]:
    """Chunks of ``count`` ranks, as torch cuts a dimension."""
    size = -(-shape[dim] // count)
    cuts: list[list[int]] = [[] for _ in shape]
    cuts[dim] = list(range(size, shape[dim], size))
    return grid(shape, cuts)


def bytes_of(tensor: torch.Tensor, box: Box) -> bytes:
    """The bytes of a chunk."""
    part = tensor
    for dim, (start, length) in enumerate(zip(*box, strict=True)):
        part = part.narrow(dim, start, length)
    return part.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def metadata_of(tensors: dict[str, tuple[torch.Tensor, Cut]], objects: dict[str, bytes] | None = None) -> Metadata:
    """The metadata of a checkpoint with these tensors and objects."""
    entries: dict[str, Any] = {}
    storage: dict[MetadataIndex, Any] = {}
    for fqn, (tensor, cut) in tensors.items():
        chunks = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in cut.boxes]
        entries[fqn] = TensorStorageMetadata(TensorProperties(dtype=tensor.dtype), tensor.shape, chunks)
        for number, (box, chunk) in enumerate(zip(cut.boxes, chunks, strict=True)):
            data = bytes_of(tensor, box)
            storage[MetadataIndex(fqn, chunk.offsets, number)] = make_storage_info(
                "__0_0.distcp",
                0,
                len(data) + 64,
                raw_offset=64,
                crc64nvme=None if number in cut.without else crc64nvme(data),
            )
    for fqn, data in (objects or {}).items():
        entries[fqn] = BytesStorageMetadata()
        storage[MetadataIndex(fqn)] = make_storage_info("__0_0.distcp", 0, len(data), crc64nvme=crc64nvme(data))
    return Metadata(state_dict_metadata=entries, storage_data=storage)


def _compare(tensor: torch.Tensor, cut: Cut, other: torch.Tensor, other_cut: Cut) -> EntryDiff:
    [found] = compare(metadata_of({"x": (tensor, cut)}), metadata_of({"x": (other, other_cut)}))
    return found


# --- any chunks ---------------------------------------------------------------------------------------


@st.composite
def _cuts(draw: st.DrawFn, shape: tuple[int, ...]) -> Cut:
    some = [st.lists(st.integers(1, max(1, size - 1)), max_size=3, unique=True) for size in shape]
    boxes = grid(shape, [sorted(draw(each)) if size > 1 else [] for each, size in zip(some, shape, strict=True)])
    without = draw(st.sets(st.integers(0, len(boxes) - 1), max_size=2)) if draw(st.booleans()) else set()
    return Cut(draw(st.permutations(boxes)), frozenset(without))


@st.composite
def _pairs(draw: st.DrawFn) -> tuple[torch.Tensor, Cut, torch.Tensor, Cut]:
    shape = draw(st.sampled_from([(), (1,), (100,), (8, 8), (2, 64), (4, 4, 8), (2, 3, 5, 7)]))
    tensor = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    changed = tensor.clone()
    for number in draw(st.lists(st.integers(0, tensor.numel() - 1), max_size=3)):
        changed.view(-1)[number] ^= draw(st.integers(1, 255))
    cut = draw(_cuts(shape))
    other = draw(_cuts(shape)) if draw(st.booleans()) else Cut(draw(st.permutations(cut.boxes)))
    return tensor, cut, changed, other


def _known(tensor: torch.Tensor, cut: Cut) -> dict[Box, bytes | None]:
    """The bytes of the chunks that have a checksum; None for others."""
    return {
        box: None if number in cut.without else bytes_of(tensor, box) for number, box in enumerate(cut.boxes)
    }  # fmt: skip


@settings(max_examples=300)
@given(_pairs())
def test_the_verdict_is_right_and_unknown_only_where_chunks_or_checksums_differ(
    pair: tuple[torch.Tensor, Cut, torch.Tensor, Cut],
) -> None:
    tensor, cut, other, other_cut = pair
    status = _compare(tensor, cut, other, other_cut).status
    assert status != ("changed" if torch.equal(tensor, other) else "same")
    one, two = _known(tensor, cut), _known(other, other_cut)
    both = [(one[box], two[box]) for box in one.keys() & two.keys()]
    if any(None not in each and each[0] != each[1] for each in both):
        assert status == "changed"
    elif one.keys() == two.keys() and not any(None in each for each in both):
        assert status == "same"
    else:
        assert status == "unknown"


# --- chunks as they occur -----------------------------------------------------------------------------

_BF16 = torch.bfloat16


def _random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def _with_one_change(tensor: torch.Tensor) -> torch.Tensor:
    changed = tensor.clone()
    changed.view(-1)[tensor.numel() // 2] += 1
    return changed


def _replace_infos(metadata: Metadata, **fields: object) -> Metadata:
    for info in metadata.storage_data.values():
        vars(info).update(fields)
    return metadata


def test_encoded_chunks_are_the_same_only_if_their_stored_bytes_are() -> None:
    tensor, changed = _random(8, 8), _with_one_change(_random(8, 8))
    encoded = [
        _replace_infos(
            metadata_of({"x": (each, Cut(split((8, 8), 0, n)))}), raw_offset=None, transform_descriptors=["z"]
        )
        for each, n in ((tensor, 2), (tensor, 2), (changed, 2), (tensor, 4))
    ]
    assert [compare(encoded[0], other)[0].status for other in encoded] == ["same", "same", "unknown", "unknown"]
    assert compare(encoded[0], encoded[2])[0].what == "it was encoded before it was stored"
    plain = metadata_of({"x": (tensor, Cut(split((8, 8), 0, 2)))})
    assert compare(encoded[0], plain)[0].status == "unknown"


def test_chunks_that_contradict_each_other_prove_nothing() -> None:
    tensor = torch.zeros(8)
    whole = [((0,), (8,))]
    for wrong in ([((0,), (4,)), ((2,), (4,))], [((0,), (4,))], [((0,), (4,)), ((4,), (2,))]):
        assert _compare(tensor, Cut(wrong), tensor, Cut(whole)).status == "unknown"
    for boxes in ([((0, 0), (8, 1))], [((-4,), (8,))], [((4,), (8,))], [((0,), (-8,)), ((0,), (16,))]):
        hostile, honest = (metadata_of({"x": (tensor, Cut(whole))}) for _ in range(2))
        saved: Any = hostile.state_dict_metadata["x"]
        saved.chunks = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in boxes]
        for pair in ((hostile, honest), (honest, hostile)):
            assert [each.status for each in compare(*pair)] == ["unknown"]


def test_a_scalar_an_empty_tensor_and_a_foreign_index() -> None:
    scalar, empty = torch.tensor(3.0), torch.empty(0, 4)
    assert _compare(scalar, Cut([((), ())]), scalar, Cut([((), ())])).status == "same"
    assert _compare(scalar, Cut([((), ())]), scalar + 1, Cut([((), ())])).status == "changed"
    assert _compare(empty, Cut([((0, 0), (0, 4))]), empty, Cut([])).status == "same"
    one, two = (metadata_of({"x": (torch.ones(4), Cut([((0,), (4,))]))}) for _ in range(2))
    two.storage_data = {dataclasses.replace(index, offset=None): info for index, info in two.storage_data.items()}
    assert compare(one, two)[0].status == "same"


# --- entries ------------------------------------------------------------------------------------------


def test_names_shapes_dtypes_and_objects() -> None:
    def cut(tensor: torch.Tensor) -> tuple[torch.Tensor, Cut]:
        return tensor, Cut(split(tensor.shape, 0, 1))

    a = metadata_of(
        {
            "gone": cut(torch.ones(4)),
            "shape": cut(torch.ones(4)),
            "dtype": cut(torch.ones(4)),
            "kind": cut(torch.ones(2)),
        },
        {"step": b"10", "config": b"same", "other": b"12"},
    )
    b = metadata_of(
        {"new": cut(torch.ones(2, 2)), "shape": cut(torch.ones(2, 2)), "dtype": cut(torch.ones(4, dtype=_BF16))},
        {"step": b"11", "config": b"same", "other": b"123", "kind": b""},
    )
    assert [(each.fqn, each.status, each.what, each.size) for each in compare(a, b)] == [
        ("gone", "only in A", "", 16),
        ("shape", "changed", "shape 4 -> 2x2", 16),
        ("dtype", "changed", "dtype float32 -> bfloat16", 16),
        ("kind", "changed", "kind tensor -> bytes", 8),
        ("step", "changed", "bytes", 2),
        ("config", "same", "", 4),
        ("other", "changed", "bytes", 2),
        ("new", "only in B", "", 16),
    ]
    assert [each.fqn for each in compare(a, b, lambda name: name in ("step", "new"))] == ["step", "new"]


def test_an_object_without_checksum_is_changed_only_if_its_length_is() -> None:
    one, two, longer = (metadata_of({}, {"x": data}) for data in (b"12", b"13", b"123"))
    _replace_infos(one, crc64nvme=None)
    assert compare(one, two)[0].what == "no checksum in A"
    assert compare(one, longer)[0].status == "changed"
