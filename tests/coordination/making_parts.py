"""Parts as ranks would write them, for tests: random ones, and those of known cuts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import torch
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from dcp_s3.format.blocks import Blocks, make_storage_info
from dcp_s3.format.control_files import AttachmentEntry, ObjectEntry
from dcp_s3.format.layout import data_object
from dcp_s3.format.part import Part, WrittenItem

SAVE = "00c0ffee00c0ffee"
FLOAT = TensorProperties(torch.float32)
Box = tuple[Sequence[int], Sequence[int]]


def tensor(
    fqn: str, whole: Sequence[int], offsets: Sequence[int], sizes: Sequence[int], properties: TensorProperties = FLOAT
) -> WriteItem:
    """A shard of a tensor."""
    chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
    data = TensorWriteData(chunk, properties, torch.Size(whole))
    return WriteItem(MetadataIndex(fqn, offsets), WriteItemType.SHARD, tensor_data=data)


def plain(fqn: str, size: Sequence[int]) -> WriteItem:
    item = tensor(fqn, size, [0] * len(size), size)
    return dataclasses.replace(item, type=WriteItemType.TENSOR)


def other(fqn: str) -> WriteItem:
    """Something else."""
    return WriteItem(MetadataIndex(fqn), WriteItemType.BYTE_IO)


def part_of(
    rank: int, ranks: int, written: Iterable[WriteItem], *, paths: Mapping[str, tuple[str | int, ...]] | None = None
) -> Part:
    """The part of a rank that wrote these items and holds others too, all in one object."""
    written = tuple(written)
    path, items = data_object(rank, 0, "0123456789ab"), []
    for position, item in enumerate(written):
        blocks = None if item.tensor_data is None else Blocks(64, bytes(range(8)) * (position % 3), position)
        raw_offset = None if item.tensor_data is None else 448
        info = make_storage_info(path, 1000 * position, 900, raw_offset=raw_offset, crc64nvme=position, blocks=blocks)
        items.append(WrittenItem(item.index, item.tensor_data, info, item.type is WriteItemType.SHARD))
    objects = (ObjectEntry(path, 1000 * len(items), "0" * 16),)
    return Part(SAVE, rank, ranks, tuple(items), objects, paths, {"by": rank})


# --- random ones ----------------------------------------------------------------------------------

_NAMES = st.one_of(
    st.text(max_size=6), st.sampled_from(["model.w", "model.b", "optim.state.0.exp", "step", "a\ud800", "ü.ü"])
)
_DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool])
_LAYOUTS = st.sampled_from([torch.strided, torch.sparse_coo])
_FORMATS = st.sampled_from([torch.contiguous_format, torch.channels_last, torch.preserve_format])
_PROPERTIES = st.builds(TensorProperties, _DTYPES, _LAYOUTS, st.booleans(), _FORMATS, st.booleans())
_SIZES = st.lists(st.integers(0, 2**10), max_size=4)
_U64 = st.integers(0, 2**64 - 1)


@st.composite
def written_items(draw: st.DrawFn, objects: Sequence[ObjectEntry]) -> WrittenItem:
    """An item in one of the objects."""
    fqn, entry = draw(_NAMES), draw(st.sampled_from(objects))
    offset = draw(st.integers(0, entry.size))
    length = draw(st.integers(0, min(entry.size - offset, 2**44)))
    blocks = draw(
        st.none() | st.builds(Blocks, st.integers(0, 2**40), st.integers(0, 5).map(bytes(range(8)).__mul__), _U64)
    )
    info = make_storage_info(
        entry.path,
        offset,
        length,
        raw_offset=draw(st.none() | st.integers(0, length)),
        crc64nvme=draw(st.none() | _U64) if blocks is None else blocks.crc,
        blocks=blocks,
    )
    kind = draw(st.sampled_from(WriteItemType))
    data, index = None, MetadataIndex(fqn)
    if kind is not WriteItemType.BYTE_IO:
        chunk = ChunkStorageMetadata(torch.Size(draw(_SIZES)), torch.Size(draw(_SIZES)))
        data = TensorWriteData(chunk, draw(_PROPERTIES), torch.Size(draw(_SIZES)))
        index = MetadataIndex(fqn, draw(st.sampled_from([chunk.offsets, None])))
    return WrittenItem(index, data, info, kind is WriteItemType.SHARD)


@st.composite
def parts(draw: st.DrawFn) -> Part:
    """Any part that a rank may write, right or wrong."""
    ranks = draw(st.integers(1, 5000))
    rank = draw(st.integers(0, ranks - 1))
    sizes = draw(st.lists(st.integers(0, 2**45), min_size=1, max_size=3))
    crcs = st.none() | _U64.map("{:016x}".format)
    objects = [ObjectEntry(data_object(rank, n, "abcdef"), size, draw(crcs)) for n, size in enumerate(sizes)]
    attached = AttachmentEntry(data_object(rank, len(sizes), "abcdef"), 3, draw(crcs), "tokenizer/vocab.json")
    items = draw(st.lists(written_items(objects), max_size=8))
    names = [item.index.fqn for item in items]
    path = st.lists(st.one_of(st.text(max_size=4), st.integers(-5, 10**12)), max_size=3).map(tuple)
    paths = draw(st.none() | st.dictionaries(st.sampled_from([*names, "more"]), path))
    if paths is not None and draw(st.booleans()):
        paths |= {name: tuple(name.split(".")) for name in names}
    return Part(
        save=SAVE,
        rank=rank,
        world_size=ranks,
        written=tuple(items),
        objects=(*objects, attached) if draw(st.booleans()) else tuple(objects),
        paths=paths,
        facts=draw(st.dictionaries(st.text(max_size=3), st.none() | st.integers() | st.text(max_size=3), max_size=2)),
    )
