"""Checks one object that is read in ranges: where to cut its bytes, and how their checksums compare. Pure."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

from dcp_s3.checksum import combine_crc64nvme, crc64nvme_between, crc_hex
from dcp_s3.format.blocks import Range
from dcp_s3.offline.verify_plan import StoredData, StoredItem


@dataclass(frozen=True)
class Mismatch:
    """The checksums that do not match, each with the CRC-64/NVME that was found."""

    items: dict[int, int]
    """CRC of each mismatching item, by its number among the object's checked items."""
    whole: str | None
    """CRC of the whole object, None if it matches or is not recorded."""

    @property
    def any(self) -> bool:
        """Whether anything does not match."""
        return bool(self.items) or self.whole is not None

    def confirmed_by(self, second: Mismatch) -> Mismatch:
        """The mismatches that a second reading found again."""
        items = {number: crc for number, crc in second.items.items() if number in self.items}
        return Mismatch(items, None if self.whole is None else second.whole)


class ObjectScan:
    """The checksums of an object that arrives in ranges, in any order.

    Args:
        data: the object to check.
    """

    def __init__(self, data: StoredData) -> None:
        self.data = data
        self._items = data.checked
        cuts = {0, data.size}
        for item in self._items:
            cuts |= {item.checked_start, item.checked_start + item.checked_length}
        self._cuts, self._cut_set = sorted(cuts), cuts
        self._runs: list[Range] = []
        self._missing = data.size

    def segments(self, start: int, length: int, block: int) -> list[int]:
        """Lengths of a range's segments: it is cut at both ends of every checked item, and after ``block`` bytes."""
        stop = start + length
        inner = self._cuts[bisect_right(self._cuts, start) : bisect_left(self._cuts, stop)]
        lengths = []
        for end in [*inner, stop] if length else []:
            lengths += [min(block, end - at) for at in range(start, end, block)]
            start = end
        return lengths

    def join(self, start: int, crcs: Iterable[tuple[int, int]]) -> list[Range]:
        """Join the (CRC, length) pairs of a range's `segments` into runs without an item's end inside."""
        runs: list[Range] = []
        pending: list[tuple[int, int]] = []
        begin = at = start
        for pair in crcs:
            pending.append(pair)
            at += pair[1]
            if at in self._cut_set:
                runs.append(Range(begin, at, combine_crc64nvme(pending)))
                pending, begin = [], at
        if pending:
            runs.append(Range(begin, at, combine_crc64nvme(pending)))
        return runs

    def arrived(self, runs: Iterable[Range]) -> bool:
        """Take the runs of a range; returns True for the last bytes."""
        for run in runs:
            self._runs.append(run)
            self._missing -= run.stop - run.start
        return self._missing == 0

    def mismatch(self) -> Mismatch:
        """Compare the checksums. Call it when all bytes have arrived."""
        crc, at = 0, 0
        before = {0: 0}  # CRC of all bytes before a cut
        for run in sorted(self._runs, key=lambda run: run.start):
            crc = combine_crc64nvme([(crc, at), (run.crc or 0, run.stop - run.start)])
            at = run.stop
            before[at] = crc
        items = {}
        for number, item in enumerate(self._items):
            found = self._crc(item, before)
            if found != item.crc:
                items[number] = found
        return Mismatch(items, crc_hex(crc) if self.data.crc not in (None, crc_hex(crc)) else None)

    def _crc(self, item: StoredItem, before: dict[int, int]) -> int:
        stop = item.checked_start + item.checked_length
        return crc64nvme_between(before[item.checked_start], before[stop], item.checked_length)
