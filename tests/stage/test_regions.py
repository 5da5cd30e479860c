"""Which bytes are staged, and where: nothing is lost, nothing is copied twice, little is copied in vain."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import example, given

from dcp_s3.stage.regions import ALIGNMENT, Region, TensorSpan, place, plan_regions, split

_SLACK = 16  # a region starts on a multiple of this in its storage


@st.composite
def _spans(draw: st.DrawFn) -> list[TensorSpan]:
    """Strided, expanded, contiguous and empty tensors in a few storages; some of them alike."""
    found: list[TensorSpan] = []
    for _ in range(draw(st.integers(0, 14))):
        if found and draw(st.booleans()):
            found.append(draw(st.sampled_from(found)))
            continue
        start, length = draw(st.integers(0, 3000)), draw(st.integers(0, 600))
        kind = draw(st.sampled_from(("contiguous", "strided", "expanded")))
        nbytes = {
            "contiguous": length,
            "strided": max(1, length // draw(st.integers(1, 50))) if length else 0,
            "expanded": length * 3,
        }[kind]
        layout = None if kind == "contiguous" else (kind, draw(st.integers(0, 1)))
        found.append(TensorSpan(draw(st.sampled_from("ab")), start, start + length, nbytes, layout))
    return found


@given(_spans())
@example([TensorSpan("a", 0, 100, 100), TensorSpan("a", 299, 300, 1), TensorSpan("a", 0, 300, 3, 1)])
def test_what_every_plan_promises(spans: list[TensorSpan]) -> None:
    regions = plan_regions(spans)
    numbers = [number for region in regions for number in region.tensors]
    assert sorted(numbers) == [number for number, span in enumerate(spans) if span.nbytes], "each in one region"
    assert [region.tensors[0] for region in regions] == sorted(region.tensors[0] for region in regions)
    for region in regions:
        inside = [spans[number] for number in region.tensors]
        assert list(region.tensors) == sorted(region.tensors)
        assert len({span.storage for span in inside}) == 1
        hull = max(span.stop for span in inside) - min(span.start for span in inside)
        assert region.size < hull + _SLACK
        for span in inside:
            if region.gathered:
                assert (region.start, region.size) == (span.start, span.nbytes)
                assert span == inside[0]
            else:
                assert region.start % _SLACK == 0
                assert 0 <= region.start <= span.start
                assert span.stop <= region.start + region.size
    assert sum(region.size for region in regions) <= 2 * sum(span.nbytes for span in set(spans)) + _SLACK * len(regions)
    # Regions of one storage share no tensor's bytes. What a start was rounded down by belongs to no tensor.
    begins = [(min(spans[number].start for number in region.tensors), region) for region in regions]
    for begin_a, a in begins:
        for begin_b, b in begins:
            if a is b or a.gathered or b.gathered or spans[a.tensors[0]].storage != spans[b.tensors[0]].storage:
                continue
            assert a.start + a.size <= begin_b or b.start + b.size <= begin_a
    owner = {number: region for region in regions for number in region.tensors}
    for one in owner:
        for other in owner:
            first, second = spans[one], spans[other]
            dense = all(span.nbytes * 2 >= span.stop - span.start for span in (first, second))
            overlap = first.storage == second.storage and first.start < second.stop and second.start < first.stop
            if first == second or (dense and overlap):
                assert owner[one] is owner[other], "views stay aliased"


@given(_spans())
def test_the_plan_depends_on_nothing_but_the_spans(spans: list[TensorSpan]) -> None:
    assert plan_regions(spans) == plan_regions(list(spans))
    alone = {storage: [span for span in spans if span.storage == storage] for storage in "ab"}
    together = sorted((r.start, r.size, r.gathered) for r in plan_regions(spans))
    apart = sorted((r.start, r.size, r.gathered) for group in alone.values() for r in plan_regions(group))
    assert together == apart


def test_nothing_to_stage() -> None:
    assert plan_regions([]) == []
    assert plan_regions([TensorSpan("a", 5, 5, 0)]) == []


def test_a_small_view_of_a_huge_storage_costs_the_view_only() -> None:
    huge = 2**40
    (region,) = plan_regions([TensorSpan("a", huge // 2, huge // 2 + 400, 400)])
    assert region == Region((0,), huge // 2, 400)
    (region,) = plan_regions([TensorSpan("a", 0, huge, 400, "column")])
    assert region == Region((0,), 0, 400, gathered=True)
    regions = plan_regions([TensorSpan("a", 0, 4, 4), TensorSpan("a", huge - 4, huge, 4)])
    assert sum(region.size for region in regions) < 64


def test_views_with_small_gaps_are_one_region() -> None:
    spans = [TensorSpan("a", start, start + 60, 60) for start in range(0, 1000, 100)]
    assert plan_regions(spans) == [Region(tuple(range(10)), 0, 960)]
    touching = [TensorSpan("a", 0, 16, 16), TensorSpan("a", 16, 32, 16), TensorSpan("a", 2**20, 2**20 + 16, 16)]
    assert [region.tensors for region in plan_regions(touching)] == [(0, 1), (2,)]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (TensorSpan("a", 0, 1000, 1000), TensorSpan("a", 0, 990, 10, "column")),
        (TensorSpan("a", 0, 1000, 1000), TensorSpan("a", 4, 990, 10, "column")),
        (TensorSpan("a", 0, 990, 10, "column"), TensorSpan("a", 0, 1000, 1000)),
        (TensorSpan("a", 0, 990, 10, "column"), TensorSpan("a", 4, 1000, 996)),
    ],
)
def test_a_sparse_view_goes_with_the_whole_tensor(first: TensorSpan, second: TensorSpan) -> None:
    assert plan_regions([first, second]) == [Region((0, 1), 0, 1000)]


def test_the_same_span_in_two_storages_is_two_regions() -> None:
    assert [r.tensors for r in plan_regions([TensorSpan("a", 0, 9, 9), TensorSpan("b", 0, 9, 9)])] == [(0,), (1,)]


_sizes = st.lists(st.integers(1, 10_000), max_size=30)


@given(_sizes)
def test_places_are_aligned_and_do_not_overlap(sizes: list[int]) -> None:
    offsets, total = place(sizes)
    assert len(offsets) == len(sizes)
    ends = [0, *(offset + size for offset, size in zip(offsets, sizes, strict=True))]
    for offset, end in zip([*offsets, total], ends, strict=True):
        assert offset % ALIGNMENT == 0
        assert 0 <= offset - end < ALIGNMENT


@given(_sizes, st.integers(0, 40_000))
def test_what_goes_to_memory_fits_there(sizes: list[int], room: int) -> None:
    choice = split(sizes, room)
    assert len(choice) == len(sizes)
    _, used = place([size for size, chosen in zip(sizes, choice, strict=True) if chosen])
    assert used <= room
    for size, chosen in zip(sizes, choice, strict=True):
        if not chosen:  # and nothing is sent to disk that would have had room
            assert place([size])[1] > room - used
            assert all(size >= other for other, taken in zip(sizes, choice, strict=True) if taken)


@given(_sizes)
def test_without_a_limit_all_goes_to_memory(sizes: list[int]) -> None:
    assert split(sizes, None) == [True] * len(sizes)
    assert split(sizes, 0) == [False] * len(sizes)
    assert split(sizes, place(sizes)[1]) == [True] * len(sizes)
