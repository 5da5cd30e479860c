"""Where bodies live: blocks of memory that are touched before they are needed.

The first write to a fresh page costs a page fault (about 1 s of CPU per GiB), which a benchmark
would charge to the client's transfer. A :class:`Pool` therefore maps and touches its memory up
front and recycles it: a body's blocks go back when the last object, upload or response that uses
them lets go.
"""

from __future__ import annotations

import itertools
import mmap
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from awscrt.checksums import combine_crc64nvme, crc64nvme

#: Large enough that the cost of one ``recv`` or ``send`` in Python vanishes (a few microseconds
#: against some hundred), small enough that the unused tail of a body's last block does not matter.
BLOCK_SIZE = 1 << 20

#: Bodies up to this size get memory of their own; a whole block would be a waste.
SMALL_BODY = BLOCK_SIZE // 4


class Pool:
    """Blocks of :data:`BLOCK_SIZE` bytes; falls back to ordinary memory when they run out."""

    def __init__(self, size: int = 0) -> None:
        """Map and touch ``size`` bytes, rounded up to whole blocks (0: no blocks at all)."""
        # Reentrant: garbage collection inside allocate() may end a lease.
        self._lock = threading.RLock()
        self._free: list[memoryview] = []
        count = -(-size // BLOCK_SIZE)
        if count:
            memory = _mapped(count * BLOCK_SIZE)
            zeros = bytes(BLOCK_SIZE)
            for start in range(0, len(memory), BLOCK_SIZE):
                memory[start : start + BLOCK_SIZE] = zeros
                self._free.append(memory[start : start + BLOCK_SIZE])
            self._free.reverse()

    def allocate(self, size: int) -> Body:
        count = -(-size // BLOCK_SIZE)
        blocks: list[memoryview] = []
        if size > SMALL_BODY:
            with self._lock:
                if len(self._free) >= count:
                    blocks = [self._free.pop() for _ in range(count)]
        if not blocks:
            return Body((memoryview(bytearray(size)),) if size else ())
        tail = size - (count - 1) * BLOCK_SIZE
        return Body((*blocks[:-1], blocks[-1][:tail]), (_Lease(self, blocks),))

    def _give_back(self, blocks: list[memoryview]) -> None:
        with self._lock:
            self._free.extend(reversed(blocks))


class _Lease:
    """Holds blocks out of the pool for as long as anything refers to the lease."""

    __slots__ = ("_blocks", "_pool")

    def __init__(self, pool: Pool, blocks: list[memoryview]) -> None:
        self._pool = pool
        self._blocks = blocks

    def __del__(self) -> None:
        self._pool._give_back(self._blocks)


@dataclass(frozen=True)
class Body:
    """Bytes in pieces that need not be adjacent. Slicing and joining share the memory."""

    pieces: tuple[memoryview, ...] = ()
    leases: tuple[_Lease, ...] = ()
    runs: tuple[tuple[int, int], ...] = ()
    """(CRC-64/NVME, length) of runs that make up the whole, where they are known: no byte is read again for them."""

    def __len__(self) -> int:
        return sum(len(piece) for piece in self.pieces)

    def known(self) -> Body:
        """The same, with its CRC-64/NVME."""
        return self if self.runs or not self.pieces else replace(self, runs=((self.crc(), len(self)),))

    def crc(self) -> int:
        """Its CRC-64/NVME."""
        crc = 0
        if self.runs:
            for run, length in self.runs:
                crc = combine_crc64nvme(crc, run, length)
            return crc
        for piece in self.pieces:
            crc = crc64nvme(piece, crc)
        return crc

    def __bytes__(self) -> bytes:
        return b"".join(self.pieces)

    def slice(self, start: int, stop: int) -> Body:
        places = itertools.accumulate((length for _, length in self.runs), initial=0)
        ends = dict(zip(places, (*self.runs, None), strict=True))
        aligned = {start, stop} <= ends.keys()
        runs = tuple(run for place, run in ends.items() if run and start <= place < stop) if aligned else ()
        return Body(tuple(_cut(self.pieces, start, stop)), self.leases, runs)

    @staticmethod
    def of(data: bytes) -> Body:
        return Body((memoryview(data),) if data else ())

    @staticmethod
    def join(bodies: Iterable[Body]) -> Body:
        bodies = list(bodies)
        return Body(
            tuple(piece for body in bodies for piece in body.pieces),
            tuple(lease for body in bodies for lease in body.leases),
            tuple(run for body in bodies for run in body.runs) if all(body.runs for body in bodies) else (),
        )


def _cut(pieces: Iterable[memoryview], start: int, stop: int) -> Iterator[memoryview]:
    position = 0
    for piece in pieces:
        if position >= stop:
            return
        first, last = max(start - position, 0), min(stop - position, len(piece))
        if first < last:
            yield piece[first:last]
        position += len(piece)


def _mapped(size: int) -> memoryview:
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)
