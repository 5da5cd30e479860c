"""Which bytes are staged, and where: nothing is lost, nothing is copied twice, little is copied in vain."""

from __future__ import annotations

import itertools

import hypothesis.strategies as st
import pytest
from hypothesis import example, given

from dcp_s3.stage.copier import Region, TensorSpan, plan_regions
from dcp_s3.stage.pool import ALIGNMENT, place, split

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
    owner = {spans[number]: region for region in regions for number in region.tensors}
    for whole, view in itertools.permutations(owner, 2):
        if _is_whole(whole, view):
            assert owner[whole] is owner[view], "a view stays aliased to the whole that it is of"


def _is_whole(whole: TensorSpan, view: TensorSpan) -> bool:
    has_all = whole.nbytes == whole.stop - whole.start
    return has_all and whole.storage == view.storage and whole.start <= view.start and view.stop <= whole.stop


@given(_spans())
def test_the_plan_depends_on_nothing_but_the_spans(spans: list[TensorSpan]) -> None:
    assert plan_regions(spans) == plan_regions(list(spans))
    alone = {storage: [span for span in spans if span.storage == storage] for storage in "ab"}
    together = sorted((r.start, r.size, r.gathered) for r in plan_regions(spans))
    apart = sorted((r.start, r.size, r.gathered) for group in alone.values() for r in plan_regions(group))
    assert together == apart


def _column(stop: int, start: int = 0, nbytes: int = 10) -> TensorSpan:
    return TensorSpan("a", start, stop, nbytes, "column")


_HUGE = 2**40
_GAPS = [TensorSpan("a", start, start + 60, 60) for start in range(0, 1000, 100)]
_TOUCHING = [TensorSpan("a", 0, 16, 16), TensorSpan("a", 16, 32, 16), TensorSpan("a", _HUGE, _HUGE + 16, 16)]
_WHOLE = TensorSpan("a", 0, 1000, 1000)


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ([], []),
        ([TensorSpan("a", 5, 5, 0)], []),
        ([TensorSpan("a", _HUGE // 2, _HUGE // 2 + 400, 400)], [Region((0,), _HUGE // 2, 400)]),
        ([_column(_HUGE, nbytes=400)], [Region((0,), 0, 400, gathered=True)]),
        (
            [TensorSpan("a", 0, 4, 4), TensorSpan("a", _HUGE - 4, _HUGE, 4)],
            [Region((0,), 0, 4), Region((1,), _HUGE - 16, 16)],
        ),
        (_GAPS, [Region((n,), 100 * n - 100 * n % 16, 60 + 100 * n % 16) for n in range(10)]),
        (_TOUCHING, [Region((0, 1), 0, 32), Region((2,), _HUGE, 16)]),
        ([TensorSpan("a", 0, 9, 9), TensorSpan("b", 0, 9, 9)], [Region((0,), 0, 9), Region((1,), 0, 9)]),
        ([_WHOLE, _column(990)], [Region((0, 1), 0, 1000)]),
        ([_WHOLE, _column(990, 4)], [Region((0, 1), 0, 1000)]),
        ([_column(990), _WHOLE], [Region((0, 1), 0, 1000)]),
        ([_column(990), TensorSpan("a", 4, 1000, 996)], [Region((0, 1), 0, 1000)]),
    ],
)  # fmt: skip
def test_plans(spans: list[TensorSpan], expected: list[Region]) -> None:
    """A small view of a huge storage costs the view only; a sparse one goes with the whole tensor."""
    assert plan_regions(spans) == expected


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
    for enough in (None, place(sizes)[1]):
        assert split(sizes, enough) == [True] * len(sizes)
