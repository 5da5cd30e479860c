"""What :mod:`benchmarks.reshard` loads: states, how ranks hold them, and what each rank needs of them. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from benchmarks.llama import llama_shapes

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""First element and number of elements, in each dimension."""


@dataclass(frozen=True)
class TensorSpec:
    """A tensor of the state, as a whole."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


Spec = Mapping[str, TensorSpec]


def llama_spec(total_bytes: int, *, layers: int) -> dict[str, TensorSpec]:
    """About ``total_bytes`` of a Llama's bf16 parameters, and an fp32 moment of each."""
    # 2 and 4 bytes for each parameter, where llama_shapes counts 4.
    shapes = llama_shapes(total_bytes * 4 // 6, layers=layers)
    parameters = {name: TensorSpec(shape, torch.bfloat16) for name, shape in shapes.items()}
    return parameters | {f"optim.exp_avg.{name}": TensorSpec(shape, torch.float32) for name, shape in shapes.items()}


@dataclass(frozen=True)
class Layout:
    """How ranks hold the tensors of a state.

    A placement for each dimension of the mesh: the dimension of the tensor that is sharded, None for replicated.
    """

    name: str
    mesh: tuple[int, ...]
    matrices: tuple[int | None, ...]
    """Placements of tensors of two dimensions."""
    vectors: tuple[int | None, ...]
    """Placements of those of one."""
    plain: bool = False
    """Tensors are no DTensors (all are replicated)."""

    @property
    def ranks(self) -> int:
        """World size."""
        return math.prod(self.mesh)

    def placements(self, shape: Sequence[int]) -> tuple[int | None, ...]:
        """Those of a tensor of ``shape``."""
        return self.vectors if len(shape) == 1 else self.matrices

    def box(self, shape: Sequence[int], rank: int) -> Box:
        """What ``rank`` holds of a tensor of ``shape``; as DTensor divides it, the first ranks get the larger parts."""
        offsets, lengths = [0] * len(shape), list(shape)
        coordinates = _coordinates(rank, self.mesh)
        for dim, parts, part in zip(self.placements(shape), self.mesh, coordinates, strict=True):
            if dim is None:
                continue
            step = -(-lengths[dim] // parts)
            start = min(part * step, lengths[dim])
            offsets[dim] += start
            lengths[dim] = min(step, lengths[dim] - start)
        return tuple(offsets), tuple(lengths)


def _coordinates(rank: int, mesh: Sequence[int]) -> list[int]:
    coordinates = []
    for size in reversed(mesh):
        rank, coordinate = divmod(rank, size)
        coordinates.append(coordinate)
    return coordinates[::-1]


def needed_bytes(spec: Spec, layout: Layout) -> list[int]:
    """Bytes of the local tensors, by rank."""
    return [
        sum(math.prod(layout.box(t.shape, rank)[1]) * t.dtype.itemsize for t in spec.values())
        for rank in range(layout.ranks)
    ]


def unique_bytes(spec: Spec, layout: Layout) -> int:
    """Bytes of the local tensors of all ranks, what several ranks hold counted once.

    Two ranks hold the same box of a tensor, or boxes that do not overlap.
    """
    total = 0
    for tensor in spec.values():
        boxes = {layout.box(tensor.shape, rank) for rank in range(layout.ranks)}
        total += sum(math.prod(lengths) for _, lengths in boxes) * tensor.dtype.itemsize
    return total


def _fsdp(ranks: int) -> Layout:
    return Layout(f"FSDP {ranks}", (ranks,), (0,), (0,))


_DDP = Layout("DDP 4", (4,), (None,), (None,), plain=True)
_HSDP = Layout("HSDP 2x2", (2, 2), (None, 0), (None, 0))
#: As FSDP over tensors that are already divided: the norms are whole in the TP dimension.
_TP_ROWS = Layout("FSDP 2 x TP 2, rows", (2, 2), (0, 0), (0, None))
_TP_COLUMNS = Layout("TP 4, columns", (4,), (1,), (None,))


@dataclass(frozen=True)
class Case:
    """A checkpoint saved in one layout and loaded into another."""

    source: Layout
    target: Layout
    limit: float
    """Bytes fetched are to be at most this multiple."""
    of: Literal["needed", "unique"] = "needed"
    """Bytes that ``limit`` is a multiple of: summed over the ranks, or counted once."""

    @property
    def title(self) -> str:
        """For people."""
        return f"{self.source.name} -> {self.target.name}"


CASES: dict[str, Case] = {
    "same": Case(_fsdp(4), _fsdp(4), 1.02),
    "4to2": Case(_fsdp(4), _fsdp(2), 1.02),
    "2to4": Case(_fsdp(2), _fsdp(4), 1.02),
    "8to3": Case(_fsdp(8), _fsdp(3), 1.02),
    "tp-rows": Case(_fsdp(8), _TP_ROWS, 1.02),
    "tp-columns": Case(_fsdp(4), _TP_COLUMNS, 1.3),
    "replicated": Case(_DDP, _DDP, 1.05, "unique"),
    "hsdp": Case(_HSDP, _HSDP, 1.05, "unique"),
}
