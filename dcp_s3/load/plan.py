"""Which bytes a load needs, and in which requests they are fetched. Pure: no I/O, no tensors.

Items -> ranges of a chunk -> segments of an object -> requests. Neighbouring segments share a request, long ones are
split over several, those that overlap are fetched once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from dcp_s3.format.blocks import Blocks, Range, widen
from dcp_s3.load.boxes import Box, runs_of_box


class Segment(NamedTuple):
    """A run of bytes of an object that one item needs."""

    start: int
    """First byte in the object."""
    stop: int
    """The one behind the last; there is at least one."""
    item: Any
    """That needs it; its ``path`` is the object, relative to the checkpoint."""


class ReadRequest(NamedTuple):
    """One ranged GET."""

    path: str
    """Object, relative to the checkpoint."""
    start: int
    """First byte."""
    length: int
    """Bytes fetched."""
    segments: tuple[Segment, ...]
    """Where they go, in order. They overlap only if ``shared``; bytes in none are thrown away."""
    shared: bool = False
    """Whether several items need the same bytes."""


def ranges_of_box(
    sizes: Sequence[int], box: Box, element_size: int, *, blocks: Blocks | None, max_gap: int
) -> list[Range]:
    """The runs of bytes of a chunk to fetch for a box of it.

    A box that is dense is one run. In others, what lies between two runs is fetched as well if it is at most
    ``max_gap``: asking around it would take longer. Runs are widened to what the recorded checksums can check.

    Args:
        sizes: shape of the chunk.
        box: in it.
        element_size: bytes.
        blocks: the chunk's checksums, None without.
        max_gap: bytes.

    Raises:
        ValueError: the box is not inside the chunk.
    """
    # Runs closer than a block are widened into each other anyway.
    gap = max_gap if blocks is None else max(max_gap, blocks.size)
    runs = [(start * element_size, stop * element_size) for start, stop in runs_of_box(sizes, box, gap // element_size)]
    if blocks is None:
        return [Range(start, stop, None) for start, stop in runs]
    nbytes = element_size
    for size in sizes:
        nbytes *= size
    merged: list[tuple[int, int]] = []
    for start, stop in runs:
        first = start // blocks.size * blocks.size
        if merged and first - merged[-1][1] <= max_gap:
            first = merged.pop()[0]
        merged.append((first, min(-(-stop // blocks.size) * blocks.size, nbytes)))
    return [widen(start, stop, nbytes, blocks) for start, stop in merged]


# The framing between the raw bytes of two neighbours is less; it is never asked around.
_FRAMING = 4 * 2**10


def plan_requests(
    segments: Iterable[Segment],
    *,
    max_request: int,
    max_gap: int,
    max_waste: float = math.inf,
    max_shared: int | None = None,
) -> list[ReadRequest]:
    """Requests that fetch every byte of every segment, none of them twice.

    Segments of one object that lie close to each other share a request of at most ``max_request`` bytes; longer ones
    are cut into equal pieces.

    Args:
        segments: in any order.
        max_request: bytes of one request at most.
        max_gap: bytes between two segments that are rather fetched and thrown away than asked for around.
        max_waste: bytes thrown away in all, as a share of those needed; the shortest gaps come first. Those that a
            stored tensor has around it anyway (4 KiB) are neither counted nor ever asked around.
        max_shared: bytes of one request at most where segments overlap; None: as ``max_request``.

    Returns:
        Requests, the largest first, so that the tail of the load is short.
    """
    by_path: dict[str, list[Segment]] = {}
    for segment in segments:
        by_path.setdefault(segment[2].path, []).append(segment)
    groups = {path: list(_groups(sorted(wanted, key=_PLACE))) for path, wanted in by_path.items()}
    longest_gap = min(max_gap, _affordable_gap(groups.values(), max_waste))

    requests: list[ReadRequest] = []
    for path, found in groups.items():
        together: list[Segment] = []
        start = end = 0
        shared = False
        for group, stop in found:
            first = group[0][0]
            limit = max_request if len(group) == 1 else min(max_request, max_shared or max_request)
            if together and (first - end > longest_gap or stop - start > limit):
                requests.append(ReadRequest(path, start, end - start, tuple(together), shared))
                together, shared = [], False
            if stop - first > limit:
                requests += _split(path, group, stop, limit)
                continue
            if not together:
                start = first
            together += group
            end = stop
            shared = shared or len(group) > 1
        if together:
            requests.append(ReadRequest(path, start, end - start, tuple(together), shared))
    requests.sort(key=lambda request: -request.length)
    return requests


_PLACE = itemgetter(0, 1)  # of a segment
_Group = tuple[list[Segment], int]


def _affordable_gap(by_path: Iterable[list[_Group]], max_waste: float) -> float:
    """Gaps up to this many bytes are together at most ``max_waste`` of what is needed."""
    if max_waste == math.inf:
        return math.inf
    needed = 0
    gaps: list[int] = []
    for groups in by_path:
        before = None
        for group, stop in groups:
            first = group[0][0]
            needed += stop - first
            if before is not None and first - before > _FRAMING:
                gaps.append(first - before)
            before = stop
    gaps.sort()
    left: float = max_waste * needed
    for index, gap in enumerate(gaps):
        left -= gap
        if left < 0:
            # Those of this length do not all fit: none of them.
            return next((shorter for shorter in reversed(gaps[:index]) if shorter < gap), _FRAMING)
    return math.inf


def _groups(segments: Sequence[Segment]) -> Iterable[_Group]:
    """Segments that overlap, directly or through others, and the byte behind them."""
    group: list[Segment] = []
    end = 0
    for segment in segments:
        start, stop, _ = segment
        if group and start >= end:
            yield group, end
            group = []
        end = max(end, stop) if group else stop
        group.append(segment)
    if group:
        yield group, end


# Cuts fall on multiples of this many bytes, so that no element of any dtype is divided between two requests.
_ALIGNMENT = 64


def _split(path: str, group: Sequence[Segment], stop: int, max_request: int) -> list[ReadRequest]:
    start = group[0].start
    count = -(-(stop - start) // max_request)
    size = -(-(stop - start) // count)
    size = min(max(1, max_request // _ALIGNMENT) * _ALIGNMENT, -(-size // _ALIGNMENT) * _ALIGNMENT)
    requests = []
    for at in range(start, stop, size):
        end = min(at + size, stop)
        clipped = tuple(_clip(group, at, end))
        requests.append(ReadRequest(path, at, end - at, clipped, len(clipped) > 1))
    return requests


def _clip(group: Iterable[Segment], start: int, stop: int) -> Iterable[Segment]:
    for first, last, item in group:
        low, high = max(first, start), min(last, stop)
        if low < high:
            yield Segment(low, high, item)
