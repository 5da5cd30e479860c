"""Memory that objects are sent from and received into, without copies, and the checksums of its bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dcp_s3.checksum import combine_crc64nvme, crc64nvme


class Piece:
    """A buffer to send, and its checksum once it has been sent.

    Attributes:
        view: memory of the bytes; dropped after they are sent, so that it can be freed.
        size: number of bytes.
        crc: CRC-64/NVME, None until known.
        cuts: offsets at which the CRC so far is wanted, too; ascending, inside the piece.
        marks: CRCs at the cuts, once ``crc`` is known.
        parts: the pieces that it was split into, which are sent in its place; none if it is sent as it is.
    """

    __slots__ = ("crc", "cuts", "marks", "parts", "size", "view")

    def __init__(self, view: memoryview | None, size: int, crc: int | None = None, cuts: Sequence[int] = ()) -> None:
        self.view = view
        self.size = size
        self.crc = crc
        self.cuts = cuts
        self.marks: Sequence[int] = ()
        self.parts: Sequence[Piece] = ()

    @classmethod
    def of(cls, data: bytes | bytearray | memoryview, crc: int | None = None, cuts: Sequence[int] = ()) -> Piece:
        view = memoryview(data).cast("B")
        return cls(view, view.nbytes, crc, cuts)

    def split(self, first: int, size: int) -> Sequence[Piece]:
        """Split it after ``first`` bytes, and then each ``size`` bytes. The parts have its memory from now on."""
        view = self.view
        assert view is not None  # noqa: S101 - a piece has its view until it is sent
        ends = [*range(first, self.size, size), self.size]
        starts = [0, *ends[:-1]]
        self.parts = [
            Piece(view[start:end], end - start, cuts=[cut - start for cut in self.cuts if start < cut < end])
            for start, end in zip(starts, ends, strict=True)
            if start < end
        ]
        self.view = None
        return self.parts

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


def sent_pieces(pieces: Iterable[Piece]) -> list[Piece]:
    """What the pieces were sent as: those that were split, in their parts."""
    return [part for piece in pieces for part in (piece.parts or (piece,))]


def crc_of(pieces: Sequence[Piece]) -> int:
    """CRC-64/NVME of the bytes of pieces that were sent, together."""
    return combine_crc64nvme((piece.checksum(), piece.size) for piece in pieces)


def views_of(pieces: Sequence[Piece]) -> list[memoryview]:
    """The memory of the pieces that still have it."""
    return [piece.view for piece in pieces if piece.view is not None]


class ReadTarget:
    """Memory to receive a run of bytes into, and the CRC-64/NVME of those that have arrived.

    Attributes:
        view: the memory.
        crc: CRC of the bytes so far; None if it was not asked for.
    """

    __slots__ = ("crc", "view")

    def __init__(self, view: memoryview, *, checksum: bool = False) -> None:
        self.view = view.cast("B") if view.format != "B" else view
        self.crc: int | None = 0 if checksum else None

    def start_again(self) -> None:
        """Start over: nothing received so far counts."""
        self.crc = None if self.crc is None else 0

    def received(self, start: int, count: int) -> None:
        """Note that ``count`` more bytes have arrived from ``start`` on, and all bytes before them."""
        if self.crc is not None:
            self.crc = crc64nvme(self.view[start : start + count], self.crc)


def targets_of(into: memoryview | Sequence[ReadTarget]) -> Sequence[ReadTarget]:
    return [ReadTarget(into)] if isinstance(into, memoryview) else into
