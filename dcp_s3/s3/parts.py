"""Parts of a multipart upload: their sizes, and the pieces of memory they are made of. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from dcp_s3 import errors
from dcp_s3.checksum import crc64nvme
from dcp_s3.settings import MAX_PART_SIZE

MAX_PARTS = 10_000
# Sizes of objects are estimates until the last item is framed: leave room for a tenth of the parts.
_PLANNED_PARTS = 9_000
_PART_SIZE_STEP = 2**20


def choose_part_size(object_size: int, part_size: int) -> int:
    """Part size for an object of about ``object_size`` bytes: ``part_size``, or more where S3's limit of 10,000
    parts requires it (rounded up to whole MiB).

    Raises:
        errors.SettingsError: the object is larger than S3 can hold (parts of at most 5 GiB).
    """
    if object_size <= part_size * _PLANNED_PARTS:
        return part_size
    needed = -(-object_size // _PLANNED_PARTS)
    size = -(-needed // _PART_SIZE_STEP) * _PART_SIZE_STEP
    if size > MAX_PART_SIZE:
        raise errors.SettingsError(
            f"an object of {object_size} bytes does not fit into 10,000 parts of at most 5 GiB: raise "
            "DCP_S3_BUCKETS_PER_RANK, or shard the state over more ranks"
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
        """Make a piece of a bytes-like object."""
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
