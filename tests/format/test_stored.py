"""What is stored, byte by byte: `.metadata`, written once for all ranks and read by an allow-list; parts, which survive
their way through the bucket; and tensors, whose frame is what torch.save writes, whose blocks have checksums, and which
are found by the beginning of what anybody wrote."""

from __future__ import annotations

import collections
import dataclasses
import enum
import io
import itertools
import json
import math
import os
import pathlib
import pickle
import random
import sys
import types
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import astuple
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import _StoragePrefix
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import BytesIOWriteData, SavePlan, TensorWriteData, WriteItem, WriteItemType

from dcp_s3.errors import CorruptCheckpointError
from dcp_s3.format.archive import MAX_HEAD, compute_frame, parse_head
from dcp_s3.format.blocks import (
    MAX_BLOCK,
    MIN_BLOCK,
    Blocks,
    block_size,
    crcs_of_beginnings,
    cuts_between,
    make_storage_info,
    pack_crcs,
    widen,
)
from dcp_s3.format.control_files import AttachmentEntry
from dcp_s3.format.metadata import dump_metadata, load_metadata, seal
from dcp_s3.format.part import MAGIC, Part, encode, path_code, path_from, unpack
from dcp_s3.format.saved_entries import find_flaw
from dcp_s3.memory import Piece, crc64nvme
from tests import hostile
from tests.archives import old, oldest, rewritten, saved, zipped
from tests.coordination.making_parts import other, part_of, parts
from tests.coordination.making_parts import tensor as shard
from tests.end_to_end.states import DTYPES, bits, random_tensor
from tests.hostile import URL, archive, make_metadata, plain, storage, stream, tensor, was_tripped
from tests.mutations import mutated


def test_what_many_ranks_sent_is_pickled_once() -> None:
    def sent(rank: int) -> tuple[MetadataIndex, ChunkStorageMetadata]:
        """With a name and shapes of its own, as if it had come from another process."""
        offset, sizes = torch.Size([4 * rank, 0]), torch.Size([4, 8])
        return MetadataIndex("".join(["layer", ".w"]), [4 * rank, 0], rank), ChunkStorageMetadata(offset, sizes)

    indices, chunks = zip(*map(sent, range(3)), strict=True)
    entry = TensorStorageMetadata(TensorProperties(), torch.Size([12, 8]), list(chunks))
    storage = {index: make_storage_info(f"__{n}_0.distcp", 0, 200) for n, index in enumerate(indices)}
    metadata = Metadata({"layer.w": entry}, storage_data=storage)
    found = pickle.loads(dump_metadata(metadata))
    assert found == metadata
    assert [vars(index) for index in found.storage_data] == list(map(vars, indices)), "with the hints"
    assert len({id(index.fqn) for index in found.storage_data}) == 1
    (saved,) = found.state_dict_metadata.values()
    assert len({id(chunk.sizes) for chunk in saved.chunks}) == 1
    for index, chunk in zip(found.storage_data, saved.chunks, strict=True):
        assert index.offset is chunk.offsets
    assert indices[0].offset is not chunks[0].offsets, "what DCP keeps is as it was"
    assert not any("transform_descriptors" in vars(info) for info in found.storage_data.values())


def _megatron_plans() -> list[SavePlan]:
    """What Megatron-Core puts into ``Metadata.all_local_plans``: the plans of all ranks."""
    chunk = ChunkStorageMetadata(torch.Size([0]), torch.Size([4]))
    data = TensorWriteData(chunk, TensorProperties(dtype=torch.bfloat16), torch.Size([4]))
    items = [
        WriteItem(MetadataIndex("w", [0], 0), WriteItemType.SHARD, tensor_data=data),
        WriteItem(MetadataIndex("x"), WriteItemType.BYTE_IO, bytes_io_data=BytesIOWriteData(10)),
    ]
    return [SavePlan(items, storage_data=_StoragePrefix(f"__{rank}_"), planner_data={}) for rank in range(2)]


def test_what_megatron_called_its_own_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    """They load without Megatron, as torch's, with what they had more."""
    name = "megatron.core.dist_checkpointing.strategies.torch"
    module = types.ModuleType(name)
    plan_class = dataclasses.make_dataclass(
        "MCoreSavePlan", [("mcore_data", object, None)], bases=(SavePlan,), frozen=True
    )
    metadata_class = dataclasses.make_dataclass("MCoreMetadata", [("mcore_data", object, None)], bases=(Metadata,))
    metadata_class.__module__ = plan_class.__module__ = name
    module.MCoreSavePlan, module.MCoreMetadata = plan_class, metadata_class  # type: ignore[attr-defined]
    with monkeypatch.context() as patch:
        for end in range(1, name.count(".") + 1):
            patch.setitem(sys.modules, name.rsplit(".", end)[0], types.ModuleType("parent"))
        patch.setitem(sys.modules, name, module)
        metadata = metadata_class(
            **vars(make_metadata()), mcore_data={"w": {"nd_reformulated_orig_global_shape": (2, 2)}}
        )
        metadata.all_local_plans = [*_megatron_plans(), plan_class(_megatron_plans()[0].items, mcore_data={"w": {}})]
        data = dump_metadata(metadata)
    found = load_metadata(data, url=URL)
    assert type(found) is Metadata
    assert found.state_dict_metadata == metadata.state_dict_metadata
    assert found.mcore_data == metadata.mcore_data  # type: ignore[attr-defined]
    assert not hasattr(found, "all_local_plans"), "which only make its next save faster"
    assert not pickle.loads(pickle.dumps(found)).storage_meta.modules


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_protocol(protocol: int) -> None:
    metadata = make_metadata()
    metadata.planner_data = {
        "w": ("w", 1, -1, 2**40, 1.5, True, None, b"bytes", b"", "text" * 100, bytearray(b"x"), frozenset({"a"}), {1}),
        "torch": [torch.sparse_coo, torch.device("cuda", 1), torch.Size([2, 3]), torch.int8],
        "path": pathlib.PosixPath("/a/b"),
        "others": [collections.OrderedDict(a={1, 2}), 1j, torch.float8_e4m3fn, 1 << 5000, "x" * 70_000],
        "more": [collections.defaultdict(list, a=[1]), {i: str(i) for i in range(300)}],
    }
    if protocol >= 4:  # a memory format cannot be pickled before
        metadata.planner_data["format"] = torch.channels_last
    found = load_metadata(seal(io.BytesIO(pickle.dumps(metadata, protocol))), url=URL)
    metadata.planner_data["path"] = "/a/b"
    assert found == metadata
    assert pickle.loads(pickle.dumps(found)) == metadata


def test_members_of_enumerations_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first releases of Python 3.11 pickle ``getattr(class, name)``."""
    metadata = make_metadata()
    metadata.all_local_plans = _megatron_plans()  # type: ignore[attr-defined]
    with monkeypatch.context() as patch:
        patch.setattr(enum.Enum, "__reduce_ex__", lambda self, _: (getattr, (type(self), self.name)))
        data = dump_metadata(metadata)
    assert b"getattr" in data
    del metadata.all_local_plans  # type: ignore[attr-defined]
    assert load_metadata(data, url=URL) == metadata


@pytest.mark.parametrize(
    "change",
    [
        *(lambda data, cut=cut: data[:cut] for cut in (0, 1, 10, 100, -1, -10)), lambda data: data[: len(data) // 2],
        lambda data: b"not a pickle", lambda data: b"\x80\x05", lambda data: pickle.dumps({"a": 1}),
        lambda data: pickle.dumps(None), lambda data: os.urandom(1000), lambda data: b"PK\x03\x04",
    ],
)  # fmt: skip
def test_what_is_cut_off_or_something_else_is_damage_of_the_checkpoint_named(change: Callable[[bytes], bytes]) -> None:
    with pytest.raises(CorruptCheckpointError, match="step-1"):
        load_metadata(change(dump_metadata(make_metadata())), url=URL)


# --- parts: what one rank wrote, on its way through the bucket -----------------------------------------


@settings(max_examples=40)
@given(parts(), st.data())
def test_a_part_that_is_damaged_or_cut_off_is_refused(part: Part, data: st.DataObject) -> None:
    packed = encode(part)
    place = data.draw(st.integers(0, len(packed) - 1))
    damaged = bytearray(packed)
    damaged[place] ^= 1 << data.draw(st.integers(0, 7))
    for wrong in (bytes(damaged), packed[:place]):
        with pytest.raises(ValueError, match="part"):
            unpack(wrong)


@given(st.binary(max_size=200))
def test_what_is_no_part_is_refused_even_with_its_magic_and_crc(body: bytes) -> None:
    for data in (body, MAGIC + body):
        with pytest.raises(ValueError, match="part"):
            unpack(data + crc64nvme(data).to_bytes(8, "big"))


PART = part_of(1, 2, [shard("w", [4], [2], [2]), other("step")], paths={"w": ("w",), "step": ("step",)})
WRONG: list[tuple[str, Any]] = [
    ("rank", 2), ("world_size", -1), ("names", ["w"]), ("paths", ["1"]), ("properties", []), ("shapes", [[4], [-2]]),
    ("items", 1),
    *(("objects", [{"path": path, "size": size, "crc64nvme": None}])  # outside, or too short
      for path, size in (("s3://other/__0_0-ab.distcp", 2000), ("../__1_0-ab.distcp", 2000), (".metadata", 2000),
                         ("__1_0-0123456789ab.distcp", 1899), ("__1_0-0123456789ab.distcp", -1))),
]  # fmt: skip


def _with(field: str, value: Any) -> bytes:
    """`PART` with another value in its head, and a CRC that fits."""
    data = encode(PART)
    length = int.from_bytes(data[8:12], "little")
    head = json.loads(data[12 : 12 + length])
    head[field] = value
    text = json.dumps(head).encode()
    text += b" " * (-(12 + len(text)) % 8)
    changed = data[:8] + len(text).to_bytes(4, "little") + text + data[12 + length : -8]
    return changed + crc64nvme(changed).to_bytes(8, "big")


def test_a_wrong_head_and_a_later_version_are_refused() -> None:
    assert unpack(_with("facts", {"throttled": 3})).facts == {"throttled": 3}
    for field, value in WRONG:
        with pytest.raises(ValueError, match="not a part that dcp_s3 writes"):
            unpack(_with(field, value))
    data = bytearray(encode(PART))
    data[len(MAGIC) - 1] = 9
    with pytest.raises(ValueError, match="not a part of a save that this dcp_s3 reads"):
        unpack(bytes(data))


def test_what_a_part_cannot_hold_is_refused_where_it_is_made() -> None:
    with pytest.raises(ValueError, match="no object of the part"):
        encode(dataclasses.replace(PART, objects=()))
    attached = AttachmentEntry(PART.objects[0].path, 2000, None, "/etc/passwd")
    with pytest.raises(ValueError, match="attachment"):
        encode(dataclasses.replace(PART, objects=(attached,)))
    transformed = dataclasses.replace(PART.written[0].storage, transform_descriptors=["zstd"])
    with pytest.raises(ValueError, match="cannot hold: transform_descriptors"):
        encode(dataclasses.replace(PART, written=(dataclasses.replace(PART.written[0], storage=transformed),)))
    with pytest.raises(ValueError, match="text and numbers"):
        encode(dataclasses.replace(PART, paths={"w": (1.5,)}))  # type: ignore[dict-item]


@given(st.lists(st.one_of(st.text("ab.1 i[", max_size=4), st.integers(-10, 100)), max_size=4))
def test_a_path_is_short_where_the_name_says_it(path: list[str | int]) -> None:
    name = ".".join(map(str, path))
    for each in (name, "another"):
        assert path_from(each, path_code(each, path)) == tuple(path)


# --- tensors -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*DTYPES, torch.uint16, torch.uint32, torch.uint64], ids=str)
def test_torch_load_reads_it_and_only_checksums_differ_from_torch_save(dtype: torch.dtype) -> None:
    for shape in [(), (0,), (3, 0, 2), (1,), (7, 9), (129, 33)]:
        tensor = random_tensor(shape, dtype)
        frame = compute_frame(dtype, torch.Size(shape))
        item = frame.header + bits(tensor) + frame.trailer
        assert len(item) == frame.length
        loaded = torch.load(io.BytesIO(item), weights_only=True)
        assert (loaded.dtype, loaded.shape, bits(loaded)) == (dtype, torch.Size(shape), bits(tensor))
        saved = io.BytesIO()
        torch.save(tensor, saved)
        differing = [i for i, (a, b) in enumerate(zip(item, saved.getvalue(), strict=True)) if a != b]
        # The zip CRC-32 of the data, in two places, and of the id record that is made from it.
        assert len(differing) <= 64
        assert not [i for i in differing if len(frame.header) <= i < len(frame.header) + frame.nbytes]


# --- blocks --------------------------------------------------------------------------------------------


_BLOCK = 64  # the smallest that is allowed: the pure functions know no other limit


def _record(data: bytes, ends: Sequence[int], block: int) -> Blocks:
    bounds = [0, *sorted(ends), len(data)]
    pieces = []
    for start, stop in itertools.pairwise(bounds):
        piece = Piece.of(data[start:stop], cuts=cuts_between(start, stop, block))
        pieces.append((piece.size, piece.checksum(), piece.cuts, piece.marks))
    return Blocks(block, pack_crcs(crcs_of_beginnings(pieces, block)), crc64nvme(data))


@st.composite
def _chunks(draw: st.DrawFn) -> tuple[bytes, list[int]]:
    data = random.Random(draw(st.integers(0, 9))).randbytes(draw(st.integers(1, 6 * _BLOCK)))
    ends = st.one_of(st.integers(0, len(data)), st.sampled_from(range(0, len(data) + 1, _BLOCK)))
    return data, draw(st.lists(ends, max_size=4))


@given(_chunks(), st.data())
def test_every_range_can_be_widened_to_one_with_a_checksum(chunk: tuple[bytes, list[int]], draw: st.DataObject) -> None:
    data, ends = chunk
    start = draw.draw(st.integers(0, len(data) - 1))
    stop = draw.draw(st.integers(start + 1, len(data)))
    checked = widen(start, stop, len(data), _record(data, ends, _BLOCK))
    assert checked.start <= start < stop <= checked.stop <= len(data)
    assert start - checked.start < _BLOCK
    assert checked.stop - stop < _BLOCK
    assert checked.crc == crc64nvme(data[checked.start : checked.stop])


@given(st.integers(1, 2**45))
@example(50_000_000)  # halves of it are aligned, and too large
def test_there_are_few_blocks_of_some_size(nbytes: int) -> None:
    size = block_size(nbytes)
    assert MIN_BLOCK <= size <= MAX_BLOCK
    assert size % 64 == 0
    assert size == MAX_BLOCK or -(-nbytes // size) <= 64


_PLACE = st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(0, 4), st.integers(0, 4))


@given(st.lists(_PLACE, max_size=5), st.booleans())
def test_any_boxes(boxes: list[tuple[int, int, int, int]], filled: bool) -> None:
    counts = np.zeros((4, 4), int)
    chunks = []
    for a, b, rows, columns in boxes:
        rows, columns = min(rows, 4 - a), min(columns, 4 - b)
        counts[a : a + rows, b : b + columns] += 1
        chunks.append(((a, b), (rows, columns)))
    is_right = bool((counts == 1).all() if filled else (counts <= 1).all())
    assert (find_flaw((4, 4), chunks, filled=filled) is None) == is_right


def test_scalars_and_empty_tensors() -> None:
    assert find_flaw((), [((), ())]) is None
    assert find_flaw((), []) == "has 1 elements, its chunks have 0"
    assert find_flaw((), [((), ()), ((), ())]) == "has 1 elements, its chunks have 2"
    assert find_flaw((0, 3), []) is None
    assert find_flaw((0, 3), [((0, 0), (0, 3)), ((0, 0), (0, 3))]) is None


WRITERS: dict[str, Callable[[bytes], bytes]] = {
    "this torch": bytes, "old": old, "oldest": oldest, "zipfile": zipped,
    "aligned to pages": lambda data: rewritten(data, alignment=4096),
}  # fmt: skip


@pytest.mark.parametrize("shape", [(2, 3), (2**31,)], ids=["small", "8 GiB"])
def test_frames_of_our_own(shape: tuple[int, ...]) -> None:
    frame = compute_frame(torch.float32, torch.Size(shape))
    start = len(frame.header)
    head = parse_head(frame.header)
    assert head is not None
    assert astuple(head) == (start, start, frame.nbytes, torch.float32, shape)


@pytest.mark.parametrize("writer", WRITERS)
def test_the_head_is_enough_and_less_is_not(writer: str) -> None:
    data = WRITERS[writer](saved(torch.ones(3, 2)))
    head = parse_head(data)
    assert head is not None
    assert parse_head(data[: head.length]) == head
    step = 1 if head.length < 2000 else 37
    for length in range(0, head.length, step):
        assert parse_head(data[:length]) is None


_OTHER_ORDER = b"big" if sys.byteorder == "little" else b"little"


class Subclass(torch.Tensor):
    pass


REFUSED: dict[str, bytes] = {
    "nothing": b"",
    "old format": saved(torch.ones(3), _use_new_zipfile_serialization=False),
    "safetensors": b"\x30" + bytes(400),
    "a dict": saved({"a": 1}),
    "a sparse tensor": saved(torch.eye(3).to_sparse()),
    "a subclass": saved(torch.ones(3).as_subclass(Subclass)),
    "a lazy conjugate": saved(torch.ones(3, dtype=torch.complex64).conj()),
    "a strided view": saved(torch.ones(4, 4)[:, :2]),
    "compressed": zipped(saved(torch.ones(3)), zipfile.ZIP_DEFLATED),
    "another byte order": rewritten(saved(torch.ones(3)), changed={"byteorder": _OTHER_ORDER}),
    "no storage": rewritten(saved(torch.ones(3)), without=("data/0",)),
    "another storage": rewritten(saved(torch.ones(3)), changed={"data/1": b"abcd"}),
    "too many records": rewritten(saved(torch.ones(3)), changed={f"r{i}": b"x" for i in range(20)}),
    "no pickle first": zipped(rewritten(saved(torch.ones(3)))).replace(b"data.pkl", b"dota.pkl"),
    "code": archive(stream(hostile.call("tests.hostile", "trip", b"K\x01")), ("data/0", b"")),
    "beyond its storage": archive(stream(tensor(4, 0, plain((5,)), plain((1,)))), ("data/0", bytes(16))),
    "a short storage": archive(stream(tensor(4, 0, plain((4,)), plain((1,)))), ("data/0", bytes(12))),
    "before its storage": archive(stream(tensor(4, -1, plain((2,)), plain((1,)))), ("data/0", bytes(16))),
    "huge": archive(stream(tensor(4, 0, plain((2**40, 2**40)), plain((2**40, 1)))), ("data/0", bytes(16))),
    "a negative size": archive(stream(tensor(4, 0, plain((-2,)), plain((1,)))), ("data/0", bytes(16))),
    "a bool for a size": archive(stream(tensor(4, 0, plain((True,)), plain((1,)))), ("data/0", bytes(16))),
    "a storage alone": archive(stream(storage(4))),
}  # fmt: skip


def test_the_rest_is_refused() -> None:
    for label, data in REFUSED.items():
        assert parse_head(data) is None, label
        assert not was_tripped(), label
    assert not any(map(parse_head, hostile.ITEM_BOMBS.values()))


@given(st.sampled_from(list(WRITERS)).flatmap(lambda name: mutated(_SAMPLES[name], _SNIPPETS)))
def test_damaged_heads_are_refused_or_stay_within_bounds(data: bytes) -> None:
    head = parse_head(data)
    if head is None:
        return
    assert 0 < head.length <= min(len(data), MAX_HEAD)
    assert head.length <= head.raw_offset
    assert head.nbytes == math.prod(head.shape) * head.dtype.itemsize >= 0


_SNIPPETS = [
    b"PK\x03\x04", b"PK\x07\x08", b"PK\x01\x02", b"archive/data/0", b"K\x00", b"\xff\xff", b"\x8a\x01", b"tR", b"q\x00",
    b"ctorch\nFloatStorage\n", b"ctests.hostile\ntrip\n",
]  # fmt: skip
_SAMPLES = {name: write(saved(torch.ones(3, 2)))[:1200] for name, write in WRITERS.items() if "pages" not in name} | {
    "aligned to pages": bytes(WRITERS["aligned to pages"](saved(torch.ones(3, 2))))
}
