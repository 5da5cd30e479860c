"""What is compared with the save before, and what is copied of it. Pure, but for the memory of tensors."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from dcp_s3 import CheckpointManager, S3StorageWriter, errors
from dcp_s3.format.archive import compute_frame
from dcp_s3.format.blocks import Blocks, block_size, get_facts, make_storage_info, moved_info, pack_crcs
from dcp_s3.format.control_files import ObjectEntry
from dcp_s3.format.layout import data_object
from dcp_s3.memory import combine_crc64nvme, crc64nvme, crc_hex
from dcp_s3.save import incremental
from dcp_s3.save.incremental import SavedItem, SavedObject, find_unchanged, plan_changes, recall, remember
from dcp_s3.save.objects import ItemWriteResult
from dcp_s3.save.plan import WriteBucket
from dcp_s3.settings import MIN_PART_SIZE, Settings
from dcp_s3.url import parse_url

MIB = 2**20


def item(fqn: str, *shape: int, dtype: torch.dtype = torch.uint8) -> WriteItem:
    size = torch.Size(shape)
    chunk = ChunkStorageMetadata(torch.Size([0] * len(shape)), size)
    data = TensorWriteData(chunk, TensorProperties(dtype=dtype), size)
    return WriteItem(MetadataIndex(fqn, torch.Size([0])), WriteItemType.SHARD, tensor_data=data)


class Model:
    """The saves of one rank, and what lies at each key: which version of which item, of how many bytes."""

    def __init__(self, sizes: Mapping[str, int], max_buckets: int = 4) -> None:
        self.groups = {"max_buckets": max_buckets, "min_bucket_size": 8 * MIB}
        self.items = [item(fqn, size) for fqn, size in sizes.items()]
        self.versions = dict.fromkeys(sizes, 0)
        self.saved: dict[MetadataIndex, SavedItem] = {}
        self.objects: dict[str, list[tuple[str, int, int]]] = {}
        self.numbers = itertools.count()
        self.buckets: list[WriteBucket] = []

    def crc(self, fqn: str, version: int) -> int:
        return crc64nvme(f"{fqn} {version}".encode())

    def framed(self, fqn: str, version: int, each: WriteItem) -> list[tuple[int, int]]:
        assert each.tensor_data is not None
        frame = compute_frame(torch.uint8, each.tensor_data.chunk.sizes)
        around = [(crc64nvme(part), len(part)) for part in (frame.header, frame.trailer)]
        return [around[0], (self.crc(fqn, version), frame.nbytes), around[1]]

    def save(self, *changed: str) -> tuple[int, int]:
        for fqn in changed:
            self.versions[fqn] += 1
        url = parse_url(f"s3://bucket/run/step-{next(self.numbers)}")
        unchanged = {
            each.index
            for each in self.items
            if (old := self.saved.get(each.index))
            and get_facts(old.info)[1] == self.crc(each.index.fqn, self.versions[each.index.fqn])
        }
        self.buckets = plan_changes(self.items, unchanged, self.saved, **self.groups)
        planned = [each.index.fqn for bucket in self.buckets for each in bucket.items]
        assert sorted(planned) == sorted(self.versions), "each item once"
        results: list[ItemWriteResult] = []
        sent = copied = 0
        for number, bucket in enumerate(self.buckets):
            path = data_object(0, number, "abcdef")
            content = self._copy(bucket) if bucket.copied else self._send(bucket)
            size = sum(length for _, _, length in content)
            crc = combine_crc64nvme(
                part for fqn, version, _ in content for part in self.framed(fqn, version, self._item(fqn))
            )
            if bucket.copied is None:
                infos = self._infos(bucket, path)
                sent += size
            else:
                assert bucket.copied.crc == crc
                infos = [moved_info(info, path, offset) for info, offset in bucket.copied.places]
                copied += size
            self.objects[url.key(path)] = content
            entry = ObjectEntry(path, size, crc_hex(crc))
            offset = 0
            for place, (each, info) in enumerate(zip(bucket.items, infos, strict=True)):
                fqn = each.index.fqn
                assert content[place][:2] == (fqn, self.versions[fqn]), "the bytes are those of the state"
                assert (info.offset, info.length, get_facts(info)[1]) == (
                    offset, content[place][2], self.crc(fqn, self.versions[fqn])
                )  # fmt: skip
                offset += info.length
                results.append(ItemWriteResult(each.index, info.length, info, entry if place == 0 else None))
        remember(url, 0, self.items, results)
        self.saved = dict(recall(url, 0))
        assert set(self.saved) == {each.index for each in self.items}
        return sent, copied

    def _item(self, fqn: str) -> WriteItem:
        return next(each for each in self.items if each.index.fqn == fqn)

    def _send(self, bucket: WriteBucket) -> list[tuple[str, int, int]]:
        names = [each.index.fqn for each in bucket.items]
        return [(fqn, self.versions[fqn], sum(n for _, n in self.framed(fqn, 0, self._item(fqn)))) for fqn in names]

    def _infos(self, bucket: WriteBucket, path: str) -> list[Any]:
        infos, offset = [], 0
        for fqn, version, length in self._send(bucket):
            header = self.framed(fqn, version, self._item(fqn))[0][1]
            infos.append(make_storage_info(path, offset, length, raw_offset=header, crc64nvme=self.crc(fqn, version)))
            offset += length
        return infos

    def _copy(self, bucket: WriteBucket) -> list[tuple[str, int, int]]:
        """What S3 would make of the ranges."""
        assert bucket.copied is not None
        ranges, found = bucket.copied.ranges, []
        whole = len(ranges) == 1 and ranges[0].start == 0 and ranges[0].stop == ranges[0].size
        assert whole or all(each.stop - each.start >= MIN_PART_SIZE for each in ranges), "S3 takes no smaller part"
        for each in ranges:
            offset, inside = 0, []
            for part in self.objects[each.key]:
                if each.start <= offset < each.stop:
                    inside.append(part)
                offset += part[2]
            assert each.size == offset
            assert sum(part[2] for part in inside) == each.stop - each.start, "it begins and ends with items"
            found += inside
        return found


SIZES = {f"layer{number}.{name}": size for number in range(6) for name, size in (("w", 6 * MIB), ("lora", 1000))}


def test_what_is_frozen_among_what_is_not_is_copied_at_once_and_later_as_whole_objects() -> None:
    model = Model(SIZES)
    changed = [fqn for fqn in SIZES if fqn.endswith("lora")]
    assert model.save()[1] == 0
    for turn in range(3):
        sent, copied = model.save(*changed)
        assert sent < 20_000
        assert copied > 36 * MIB
        ranges = [each for bucket in model.buckets if bucket.copied for each in bucket.copied.ranges]
        assert turn == 0 or all(each.stop - each.start == each.size for each in ranges)


def test_what_is_too_small_to_be_copied_is_sent_once_more_in_an_object_of_its_own() -> None:
    sizes = {f"layer{number}.{name}": 4 * MIB for number in range(4) for name in ("w", "lora")}
    model = Model(sizes, max_buckets=1)
    changed = [fqn for fqn in sizes if fqn.endswith("lora")]
    model.save()
    assert model.save(*changed)[1] == 0
    sent, copied = model.save(*changed)
    assert sent // MIB == copied // MIB == 16


def test_all_changed_is_planned_like_a_save_that_is_not_incremental() -> None:
    model = Model(SIZES)
    model.save()
    first = model.buckets
    assert model.save(*SIZES)[1] == 0
    assert model.buckets == first


def test_copies_do_not_become_ever_more_objects() -> None:
    """Layer after layer is frozen."""
    sizes = {f"layer{number}": 6 * MIB if number % 2 else 10_000 for number in range(100)}
    model = Model(sizes)
    for number in range(100):
        model.save(*list(sizes)[number:])
        copies = [bucket for bucket in model.buckets if bucket.copied]
        assert len(copies) <= incremental.MOST_COPIES
        assert len(model.buckets) <= incremental.MOST_COPIES + 8
    model.save()
    assert model.save()[0] == 0


@given(
    st.dictionaries(
        st.text("abc", min_size=1, max_size=6), st.sampled_from([0, 100, 300_000, 2 * MIB, 6 * MIB, 11 * MIB]),
        min_size=1, max_size=25,
    ),
    st.lists(st.integers(0, 2**25 - 1), min_size=1, max_size=8),
)  # fmt: skip
def test_any_changes(sizes: dict[str, int], changes: list[int]) -> None:
    model = Model(sizes)
    model.save()
    for bits in changes:
        changed = {fqn for number, fqn in enumerate(sizes) if bits >> number & 1}
        sent, copied = model.save(*changed)
        assert sent + copied == sum(length for bucket in model.buckets for _, _, length in model._send(bucket))
    assert model.save()[1] >= copied, "what was copied is copied again"


# --- what has changed ---------------------------------------------------------------------------------------


def saved(tensor: torch.Tensor) -> SavedItem:
    data = bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist())
    block = block_size(len(data)) if data else 64
    crcs = [crc64nvme(data[:end]) for end in range(block, len(data), block)]
    info = make_storage_info(
        "p", 0, len(data), raw_offset=0, crc64nvme=crc64nvme(data),
        blocks=Blocks(block, pack_crcs(crcs), crc64nvme(data)) if len(data) > block else None,
    )  # fmt: skip
    return SavedItem(SavedObject("k", len(data), 0), info, tensor.dtype, tensor.shape)


def unchanged(before: torch.Tensor, after: Any, planned: torch.Tensor | None = None) -> bool:
    planned = before if planned is None else planned
    each = item("t", *planned.shape, dtype=planned.dtype)
    planner: Any = SimpleNamespace(resolve_data=lambda _: after)
    return bool(find_unchanged([each], {each.index: saved(before)}, planner))


@pytest.mark.parametrize("size", [0, 1, 2000, 50_000])
def test_a_tensor_has_not_changed_if_its_bytes_have_not(size: int) -> None:
    tensor = torch.randn(size, generator=torch.manual_seed(size))
    assert unchanged(tensor, tensor.clone())
    for place in {0, size // 2, size - 1} if size else ():
        other = tensor.clone()
        other[place] += 1
        assert not unchanged(tensor, other)


_ZEROS = torch.zeros(8)


@pytest.mark.parametrize(
    ("after", "planned"),
    [
        (torch.zeros(8, dtype=torch.int32), _ZEROS), (torch.zeros(4, 2), _ZEROS), (torch.zeros(9), _ZEROS),
        (_ZEROS.to_sparse(), _ZEROS),
        # Its item is no raw bytes of what the metadata say.
        (_ZEROS, torch.zeros(8, dtype=torch.bfloat16)), (_ZEROS, torch.zeros(4, 2)),
    ],
    ids=["dtype", "shape", "size", "sparse", "planned dtype", "planned shape"],
)  # fmt: skip
def test_another_dtype_shape_or_layout_is_a_change(after: Any, planned: torch.Tensor) -> None:
    assert not unchanged(_ZEROS, after, planned)


def test_strided_and_conjugated_tensors_are_compared_by_what_is_saved_of_them() -> None:
    tensor = torch.randn(300, 70)
    assert unchanged(tensor.t(), tensor.t())
    assert not unchanged(tensor.t(), tensor.reshape(70, 300))
    complex_ = torch.randn(300, dtype=torch.complex64)
    assert unchanged(complex_.conj().resolve_conj(), complex_.conj())
    assert unchanged(torch.full((9,), torch.nan), torch.full((9,), torch.nan))
    assert not unchanged(torch.zeros(9), -torch.zeros(9)), "bits are compared"


def test_of_what_has_changed_mostly_the_first_block_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []

    def counted(data: Any, previous: int = 0) -> int:
        read.append(len(data))
        return int(crc64nvme(data, previous))

    before = torch.zeros(4 * MIB, dtype=torch.uint8)
    state = saved(before)
    monkeypatch.setattr(incremental, "crc64nvme", counted)
    planner: Any = SimpleNamespace(resolve_data=lambda _: before + 1)
    each = item("t", 4 * MIB)
    assert not find_unchanged([each], {each.index: state}, planner)
    assert sum(read) == 4 * MIB // 64


# --- what is remembered ---------------------------------------------------------------------------------------


def note(url: str, fqn: str, rank: int = 0, spilled: bool = False, crc: str | None = "0" * 16) -> None:
    each = item(fqn, 10)
    info = make_storage_info("p", 0, 10, raw_offset=0, crc64nvme=None if crc is None else 0)
    result = ItemWriteResult(each.index, 10, info, ObjectEntry("p", 10, crc), spilled)
    remember(parse_url(url), rank, [each], [result])


def recalled(url: str, rank: int = 0) -> set[str]:
    return {index.fqn for index in recall(parse_url(url), rank)}


@pytest.fixture(autouse=True)
def _forget() -> None:
    incremental._memories.clear()


def test_the_last_save_of_the_same_kind_is_found() -> None:
    note("s3://bucket/run/model-1", "model")
    note("s3://bucket/run/optim-1", "optim")
    assert recalled("s3://bucket/run/model-2") == {"model"}
    assert recalled("s3://bucket/run/optim-200") == {"optim"}
    assert recalled("s3://bucket/run/best") == {"optim"}, "the last one beside it"
    assert recalled("s3://bucket/other/model-2") == recalled("s3://other/run/model-2") == set()
    assert recalled("s3://bucket/run/model-2", rank=1) == set()
    note("s3://bucket/checkpoint-10/optimizer_0", "optim")
    assert recalled("s3://bucket/checkpoint-20/optimizer_0") == {"optim"}


def test_few_kinds_are_remembered() -> None:
    for letter in "abcdef":
        note(f"s3://bucket/{letter}/x", letter)
    assert [recalled(f"s3://bucket/{letter}/x") for letter in "abcdef"] == [set(), set(), {"c"}, {"d"}, {"e"}, {"f"}]


def test_what_waits_on_a_disk_or_has_no_checksum_is_not_remembered() -> None:
    note("s3://bucket/run/1", "t", spilled=True)
    assert recalled("s3://bucket/run/2") == set()
    note("s3://bucket/run/1", "t", crc=None)
    assert recalled("s3://bucket/run/2") == set()


def test_without_checksums_nothing_is_incremental() -> None:
    for make in (
        lambda: Settings(incremental=True, checksum="none"),
        lambda: S3StorageWriter("s3://bucket/run/1", incremental=True, settings={"checksum": "none"}),
        lambda: CheckpointManager("s3://bucket/run", incremental=True, settings={"checksum": "none"}),
    ):
        with pytest.raises(errors.SettingsError, match=r"(?s)incremental.*DCP_S3_CHECKSUM.*Remedy"):
            make()
