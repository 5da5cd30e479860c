"""What is expected of other writers' items, and how it is found out."""

from __future__ import annotations

import pytest
import torch

from dcp_s3.format.archive import MAX_HEAD, HeadError, parse_head
from dcp_s3.format.blocks import make_storage_info
from dcp_s3.load import archives
from dcp_s3.load.archives import PROBE_SIZE, ArchiveHeads, ItemKind
from tests.archives import old, rewritten, saved
from tests.load.sources import MemoryFetcher

VALUE = torch.arange(3000.0).view(30, 100)
NEW, OLD, PAGES = saved(VALUE), old(saved(VALUE)), rewritten(saved(VALUE), alignment=4096)


def kind_of(data: bytes, shape: tuple[int, ...] = (30, 100), dtype: torch.dtype = torch.float32) -> ItemKind:
    return ItemKind(dtype, shape, len(data))


def test_what_this_torch_writes_is_expected_without_a_look() -> None:
    heads = ArchiveHeads()
    assert heads.expect(kind_of(NEW)) == parse_head(NEW)
    assert heads.expect(kind_of(OLD)) is None
    assert heads.expect(ItemKind(torch.float32, (2**60,), 2**62)) is None  # more than there is memory


def test_a_known_head_is_not_parsed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    heads = ArchiveHeads()
    first = heads.read(kind_of(OLD), memoryview(OLD))
    monkeypatch.setattr(archives, "parse_head", lambda data: pytest.fail("parsed"))
    assert heads.read(kind_of(OLD), memoryview(bytearray(OLD))) is first
    assert heads.read(kind_of(OLD), OLD[: first.length]) is first


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (kind_of(OLD, (100, 30)), "the metadata has"),
        (kind_of(OLD, dtype=torch.int32), "the metadata has"),
        (ItemKind(torch.float32, (30, 100), 12_000), "are not in"),
    ],
)
def test_heads_of_something_else(kind: ItemKind, message: str) -> None:
    with pytest.raises(HeadError, match=message):
        ArchiveHeads().read(kind, OLD)


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "_MAX_KNOWN", 5)
    heads = ArchiveHeads()
    for rows in range(1, 20):
        data = old(saved(torch.ones(rows)))
        for _ in range(2):
            assert heads.read(kind_of(data, (rows,)), data).shape == (rows,)
    assert sum(map(len, heads._known.values())) == 5


# --- looking --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "sizes"),
    [(OLD, [PROBE_SIZE]), (PAGES, [PROBE_SIZE, len(PAGES)]), (bytes(100_000), [PROBE_SIZE]), (OLD[:1000], [1000])],
    ids=["usual", "aligned to pages", "no archive", "short"],
)
def test_a_look_takes_as_little_as_it_can(data: bytes, sizes: list[int]) -> None:
    source, heads = MemoryFetcher({"a": b"xyz" + data}), ArchiveHeads()
    kind = kind_of(data) if len(data) != 1000 else ItemKind(torch.float32, (30, 100), 1000)
    heads.look(source, kind, make_storage_info("a", 3, kind.length))
    assert source.asked == [("a", 3, size) for size in sizes]
    try:
        expected = heads.read(kind, data)
    except HeadError:
        expected = None
    assert heads.expect(kind) == expected


def test_a_look_has_an_end() -> None:
    data = bytearray(saved(torch.ones(100_000)))
    data[64:] = b"\x80\x02" + b"N0" * (len(data) // 2)  # a pickle without end
    source, kind = MemoryFetcher({"a": bytes(data)}), ItemKind(torch.float32, (100_000,), len(data))
    ArchiveHeads().look(source, kind, make_storage_info("a", 0, kind.length))
    assert [size for _, _, size in source.asked] == [PROBE_SIZE, MAX_HEAD]
