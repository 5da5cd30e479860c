"""Parts of a multipart upload: their sizes, and the pieces of memory they are made of. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from dcp_s3 import errors
from dcp_s3.checksum import crc64nvme
from dcp_s3.setting_values import MAX_PART_SIZE

MAX_PARTS = 10_000
# Sizes of objects are estimates until the last item is framed: leave room for a tenth of the parts.
_PLANNED_PARTS = 9_000
_PART_SIZE_STEP = 2**20


# S3 takes so many of these per second and partition of its keys.
# https://docs.aws.amazon.com/AmazonS3/latest/userguide/optimizing-performance.html
PUTS_PER_SECOND = 3500
GETS_PER_SECOND = 5500
_CONNECTION_RATE = 90e6  # bytes per second
_SMALL_PART, _GOOD_PART = 8 * 2**20, 32 * 2**20


def plan_part_size(total: int, *, connections: int, ranks: int, most: int, requests_per_second: int) -> int:
    """Bytes of a part or ranged GET, if one of ``ranks`` ranks moves ``total`` bytes.

    Every connection gets two, so that none has much to do when the others are done, or one if two would be small,
    because each costs a millisecond of CPU. Larger ones where otherwise all ranks together would make more requests
    than S3 takes: as many connections as have a part send it in its bytes over 90 MB/s.
    """
    share = -(-total // connections)
    size = min(most, max(_SMALL_PART, min(share, _GOOD_PART), share // 2))
    all_send = ranks * connections * _CONNECTION_RATE / requests_per_second
    some_send = math.sqrt(ranks * total * _CONNECTION_RATE / requests_per_second)
    size = max(size, min(math.ceil(min(all_send, some_send)), MAX_PART_SIZE))
    return -(-size // _PART_SIZE_STEP) * _PART_SIZE_STEP


def choose_part_size(object_size: int, part_size: int) -> int:
    """Part size for an object of about ``object_size`` bytes: ``part_size``, or more where S3's limit of 10,000
    parts requires it (rounded up to whole MiB).
    """
    if object_size <= part_size * _PLANNED_PARTS:
        return part_size
    needed = -(-object_size // _PLANNED_PARTS)
    size = -(-needed // _PART_SIZE_STEP) * _PART_SIZE_STEP
    if size > MAX_PART_SIZE:
        raise errors.SettingsError(
            f"an object of {object_size} bytes does not fit into 10,000 parts of at most 5 GiB: shard the "
            "state over more ranks, or raise S3StorageWriter(max_objects=...)"
        )
    return size


class Piece:
    """A buffer to upload, and its checksum once it has been sent.

    Attributes:
        view: memory of the bytes; dropped after they are sent, so that it can be freed.
        size: number of bytes.
        crc: CRC-64/NVME, None until known.
        cuts: offsets at which the CRC so far is wanted, too; ascending, inside the piece.
        marks: CRCs at the cuts, once ``crc`` is known.
    """

    __slots__ = ("crc", "cuts", "marks", "size", "view")

    def __init__(self, view: memoryview | None, size: int, crc: int | None = None, cuts: Sequence[int] = ()) -> None:
        self.view = view
        self.size = size
        self.crc = crc
        self.cuts = cuts
        self.marks: Sequence[int] = ()

    @classmethod
    def of(cls, data: bytes | bytearray | memoryview, crc: int | None = None, cuts: Sequence[int] = ()) -> Piece:
        view = memoryview(data).cast("B")
        return cls(view, view.nbytes, crc, cuts)

    def part(self, start: int, stop: int) -> Piece:
        """A piece of the bytes from ``start`` to ``stop``, with the cuts strictly inside."""
        assert self.view is not None  # noqa: S101 - a piece has its view until it is sent
        cuts = [cut - start for cut in self.cuts if start < cut < stop]
        return Piece(self.view[start:stop], stop - start, cuts=cuts)

    def checksum(self) -> int:
        """Return ``crc``; compute it and ``marks`` if that has not been done."""
        if self.crc is None:
            view = self.view
            assert view is not None  # noqa: S101 - a piece has its view until it is sent
            crc, start, marks = 0, 0, []
            for cut in self.cuts:
                crc = crc64nvme(view[start:cut], crc)
                marks.append(crc)
                start = cut
            self.marks = marks
            self.crc = crc64nvme(view[start:], crc)
        return self.crc


def views_of(pieces: Sequence[Piece]) -> list[memoryview]:
    """The memory of the pieces that still have it."""
    return [piece.view for piece in pieces if piece.view is not None]
