"""Memory: CRC-64/NVME of bytes, the buffers that are sent and received into, and tensors as such, without copies.

Importing it imports no torch.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from awscrt import checksums

if TYPE_CHECKING:
    from torch import Tensor

# --- checksums ---------------------------------------------------------------------------------------------


crc64nvme: Callable[..., int] = checksums.crc64nvme
"""The CRC of bytes or a memoryview, continuing from a CRC, if one is given."""


def combine_crc64nvme(parts: Iterable[tuple[int, int]]) -> int:
    """The CRC-64/NVME of ranges laid end to end, from their (crc, length) pairs; 0 for none."""
    crc = 0
    for part_crc, length in parts:
        crc = int(checksums.combine_crc64nvme(crc, part_crc, length))
    return crc


def crc64nvme_between(before: int, through: int, length: int) -> int:
    """The CRC-64/NVME of the last ``length`` bytes of a run, from those of the bytes before them and of the run."""
    return int(checksums.combine_crc64nvme(before, 0, length)) ^ through


def encode_crc(crc: int) -> str:
    """A CRC-64 as S3's headers have it: base64 of its big-endian bytes."""
    return base64.b64encode(crc.to_bytes(8, "big")).decode()


def crc_hex(crc: int) -> str:
    """A CRC-64 as 16 hex digits, for manifests and messages."""
    return f"{crc:016x}"


# --- what objects are sent from and received into ----------------------------------------------------------


@dataclass(eq=False, slots=True)
class Piece:
    """A buffer to send, and its checksum once it has been sent."""

    view: memoryview | None
    """Memory of the bytes; dropped after they are sent, so that it can be freed."""
    size: int
    """Number of bytes."""
    crc: int | None = None
    """CRC-64/NVME, None until known."""
    cuts: Sequence[int] = ()
    """Offsets at which the CRC so far is wanted, too; ascending, inside the piece."""
    marks: Sequence[int] = ()
    """CRCs at the cuts, once ``crc`` is known."""
    parts: Sequence[Piece] = ()
    """The pieces that it was split into, which are sent in its place; none if it is sent as it is."""

    @staticmethod
    def of(data: bytes | bytearray | memoryview, crc: int | None = None, cuts: Sequence[int] = ()) -> Piece:
        """The bytes of any buffer."""
        view = memoryview(data).cast("B")
        return Piece(view, view.nbytes, crc, cuts)

    def split(self, first: int, size: int) -> Sequence[Piece]:
        """Split it after ``first`` bytes, and then each ``size`` bytes. The parts have its memory from now on."""
        view = self.view
        assert view is not None  # noqa: S101 - a piece has its view until it is sent
        starts = [0, *range(first, self.size, size)]
        self.parts = [
            Piece(view[start:end], end - start, cuts=[cut - start for cut in self.cuts if start < cut < end])
            for start, end in zip(starts, [*starts[1:], self.size], strict=True)
            if start < end
        ]
        self.view = None
        return self.parts

    def checksum(self) -> int:
        """Return ``crc``; compute it and ``marks`` if that has not been done."""
        if self.crc is None:
            view = self.view
            assert view is not None  # noqa: S101 - a piece has its view until it is sent
            crc, start, crcs = 0, 0, []
            for cut in (*self.cuts, self.size):
                crc = crc64nvme(view[start:cut], crc)
                crcs.append(crc)
                start = cut
            *self.marks, self.crc = crcs
        return self.crc


class ReadTarget:
    """Memory (``view``) to receive a run of bytes into, and the CRC-64/NVME (``crc``) of those that have arrived; None
    if it was not asked for."""

    __slots__ = ("crc", "view")

    def __init__(self, view: memoryview, *, checksum: bool = False) -> None:
        self.view = view.cast("B") if view.format != "B" else view
        self.crc: int | None = 0 if checksum else None

    def received(self, start: int, count: int) -> None:
        """Note that ``count`` more bytes have arrived from ``start`` on, and all bytes before them."""
        if self.crc is not None:
            self.crc = crc64nvme(self.view[start : start + count], self.crc)


def targets_of(into: memoryview | Sequence[ReadTarget]) -> Sequence[ReadTarget]:
    return [ReadTarget(into)] if isinstance(into, memoryview) else into


# --- tensors -----------------------------------------------------------------------------------------------


def is_plain(tensor: Tensor) -> bool:
    """Whether the tensor is dense strided memory of its own dtype (not sparse, quantized or a wrapper)."""
    import torch

    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout == torch.strided
        and not tensor.is_quantized
        and tensor.device.type != "meta"
    )


def is_direct(tensor: Tensor) -> bool:
    """Whether the tensor's bytes are one run of CPU memory in row-major order, with no lazy conjugation or negation."""
    on_host = is_plain(tensor) and tensor.device.type == "cpu"
    return on_host and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def view_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor for which `is_direct` holds, as a writable memoryview that keeps the tensor alive.

    Made with ctypes, not numpy: torch works without numpy, and numpy has neither bfloat16 nor float8.
    """
    size = tensor.nbytes
    if size == 0:
        return memoryview(b"")
    array = (ctypes.c_ubyte * size).from_address(tensor.data_ptr())
    array._tensor = tensor  # type: ignore[attr-defined]
    return memoryview(array).cast("B")


@contextlib.contextmanager
def counted_as_change(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Increment the versions of ``tensors`` on entry and on exit, for a block that writes to their memory.

    Autograd and staging would not notice otherwise: wrong gradients, and copies that are half old and half new.
    """
    from torch.autograd.graph import increment_version

    increment_version(tensors)
    try:
        yield
    finally:
        increment_version(tensors)


def synchronize_accelerator(tensors: Iterable[Tensor | None]) -> None:
    """Wait for the accelerator if one of ``tensors`` is on it: the threads that copy have streams of their own."""
    if any(tensor is not None and tensor.device.type not in ("cpu", "meta") for tensor in tensors):
        import torch

        torch.accelerator.synchronize()


def copy_to_host(tensor: Tensor) -> memoryview:
    """The bytes of any plain tensor in row-major order, in CPU memory."""
    return view_bytes(tensor.resolve_conj().resolve_neg().cpu().contiguous())


def iterate_bytes(
    tensor: Tensor, chunk_size: int, copy: Callable[[Tensor], memoryview] = copy_to_host
) -> Iterator[memoryview]:
    """The bytes of any plain tensor in row-major order: one view without a copy if `is_direct` holds; otherwise copies,
    made with ``copy`` as the caller iterates, of about ``chunk_size`` bytes."""
    if is_direct(tensor):
        yield view_bytes(tensor)
        return
    if tensor.nbytes <= chunk_size or tensor.dim() == 0:
        yield copy(tensor)
        return
    rows = tensor.view(-1) if tensor.is_contiguous() else tensor
    step = max(1, len(rows) * chunk_size // tensor.nbytes)
    for start in range(0, len(rows), step):
        part = rows[start : start + step]
        if part.dim() > 1 and step == 1:  # one row alone may be too much
            yield from iterate_bytes(part[0], chunk_size, copy)
        else:
            yield copy(part)
