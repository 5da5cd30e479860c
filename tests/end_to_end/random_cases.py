"""Random states, how they are saved, and into what they are loaded.

A `Case` says all of it. It is a value, so that a failure can be run again.
"""

from __future__ import annotations

import datetime
import pathlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh

from dcp_s3.load.plan import READ_GAP
from tests.end_to_end.states import DTYPES, random_tensor

MIB = 2**20
LAYOUTS = ("contiguous", "transposed", "strided", "offset", "channels_last", "conj", "neg")
ONLY_SAVED = ("expanded",)
"""No tensor can be loaded into it."""
OBJECTS: dict[str, Any] = {
    "number": 7, "float": 0.1, "none": None, "text": "läuft\n", "bytes": b"\0\xff", "tuple": (1, ("a", 2.5)),
    "set": {1, 2}, "array": np.arange(5.0), "state": np.random.RandomState(1).get_state(),
    "date": datetime.date(2026, 1, 1), "path": pathlib.PurePosixPath("a/b"), "size": torch.Size([2, 3]),
    "dtype": torch.bfloat16, "tensors": (torch.ones(2), "x"), "long": "x" * 5000,
}  # fmt: skip
NUMBER = 3
"""A key that is no text: stock DCP loads objects under its text instead."""
_KEYS = (
    "w", "a.b", "", " ", "naïve/%+", "0", "\n", "x" * 200, "..", ".metadata", "__0_0.distcp", "🙂", "model", "-",
    "?#&=", NUMBER,
)  # fmt: skip


@dataclass(frozen=True)
class Leaf:
    """One entry: saved in its ``layout``, loaded ``into`` a dtype in the layout ``target``.

    A kind is ``plain``, ``parameter``, ``tied`` (a view of memory that all tied ones share), ``object``, or a DTensor:
    ``sharded`` or ``replicated``. What has a ``rank`` is on that one only.
    """

    kind: str
    dtype: torch.dtype = torch.float32
    shape: tuple[int, ...] = ()
    layout: str = "contiguous"
    target: str = "contiguous"
    into: torch.dtype = torch.float32
    sharded_by: int | None = None
    grad: bool = False
    rank: int | None = None
    value: str = ""
    seed: int = 0


@dataclass(frozen=True)
class Case:
    """Entries by the path of their keys (several become a list), how they are saved, and how they are loaded.

    Saves are ``sync``, ``async``, by a ``stager``, or in the ``background``, by one that copies later.
    """

    entries: tuple[tuple[tuple[str | int, ...], tuple[Leaf, ...]], ...]
    save: str = "sync"
    overwrite: bool = False
    writing: dict[str, Any] = field(default_factory=dict)
    max_objects: int = 4
    reading: dict[str, Any] = field(default_factory=dict)
    read_gap: int = READ_GAP
    load_sharing: bool = True
    inference: bool = False
    s3_planner: bool = False


_FLOATS = [dtype for dtype in DTYPES if dtype.is_floating_point and dtype.itemsize > 1]


@st.composite
def leaves(draw: st.DrawFn, ranks: int) -> Leaf:
    kinds = ["plain", "plain", "parameter", "tied", "object"] + ["sharded", "sharded", "replicated"] * (ranks > 0)
    kind = draw(st.sampled_from(kinds))
    rank = draw(st.sampled_from([None, None, None, ranks - 1])) if ranks > 1 else None
    seed = draw(st.integers(0, 99))
    if kind == "object":
        return Leaf(kind, value=draw(st.sampled_from(sorted(OBJECTS))), rank=rank, seed=seed)
    if kind == "tied":
        return Leaf(kind, shape=(draw(st.integers(1, 5)),), grad=draw(st.booleans()), seed=seed)
    dtype = draw(st.sampled_from(_FLOATS if kind == "parameter" else DTYPES))
    others = [each for each in DTYPES if each.is_complex == dtype.is_complex]
    into = draw(st.sampled_from([dtype, dtype, dtype, *(_FLOATS if kind == "parameter" else others)]))
    size = st.sampled_from([0, 1, 2, 3, 5, 8, 17])
    if kind in ("sharded", "replicated"):
        shape = draw(st.lists(size, min_size=1, max_size=3).map(tuple))
        by = draw(st.sampled_from([None, *range(len(shape))]))
        return Leaf(kind, dtype, shape, into=into, sharded_by=by, grad=draw(st.booleans()), seed=seed)
    large = [(1300, 1100), (70, 33, 5), (70, 33, 5), (2, 3, 4, 5), (2, 3, 4, 5)]
    shape = draw(st.one_of(st.lists(size, max_size=4).map(tuple), st.sampled_from(large)))
    layout = draw(st.sampled_from([*LAYOUTS, *ONLY_SAVED]))
    target = draw(st.sampled_from(["contiguous", layout if layout in LAYOUTS else "contiguous", *LAYOUTS]))
    return Leaf(kind, dtype, shape, layout, target, into, grad=draw(st.booleans()), rank=rank, seed=seed)


@st.composite
def cases(draw: st.DrawFn, ranks: int) -> Case:
    path = st.lists(st.sampled_from(_KEYS), min_size=1, max_size=3).map(tuple)
    entry = st.tuples(path, st.lists(leaves(ranks), min_size=1, max_size=3).map(tuple))
    return Case(
        tuple(draw(st.lists(entry, min_size=1, max_size=8))),
        save=draw(st.sampled_from(["sync", "async", "stager", "background"])),
        overwrite=draw(st.booleans()),
        writing={
            "part_size": draw(st.sampled_from([5 * MIB, 64 * MIB])),
            "checksum": draw(st.sampled_from(["auto", "crc64nvme", "none"])),
            "concurrency": draw(st.integers(1, 8)),
        },
        max_objects=draw(st.integers(1, 4)),
        reading={
            "part_size": draw(st.sampled_from([5 * MIB, 64 * MIB])),
            "concurrency": draw(st.integers(1, 8)),
        },
        read_gap=draw(st.sampled_from([0, READ_GAP])),
        load_sharing=draw(st.booleans()),
        inference=draw(st.sampled_from([False, False, True])),
        s3_planner=draw(st.booleans()),
    )


# --- states ---------------------------------------------------------------------------------------------


def _laid_out(shape: tuple[int, ...], dtype: torch.dtype, layout: str, seed: int | None) -> torch.Tensor:
    def make(*sizes: int) -> torch.Tensor:
        return torch.zeros(sizes, dtype=dtype) if seed is None else random_tensor(sizes, dtype, seed)

    if layout == "transposed" and len(shape) > 1:
        return make(*shape[:-2], shape[-1], shape[-2]).transpose(-1, -2)
    if layout == "strided" and shape:
        return make(shape[0] * 2, *shape[1:])[::2]
    if layout == "offset" and shape:
        return make(shape[0] + 3, *shape[1:])[2:-1]
    if layout == "channels_last" and len(shape) == 4:
        return make(*shape).to(memory_format=torch.channels_last)
    if layout == "expanded" and shape:
        return make(1, *shape[1:]).expand(shape)
    if layout == "conj" and dtype.is_complex:
        return make(*shape).nan_to_num().conj()
    if layout == "neg" and dtype in (torch.float32, torch.float64):
        return (
            make(*shape, 2)
            .nan_to_num()
            .view(torch.complex64 if dtype == torch.float32 else torch.complex128)[..., 0]
            .conj()
            .imag
        )
    return make(*shape)


class Maker:
    """Makes the entries of a state that is loaded into (``blank``) or saved, or that as it is sharded when loaded."""

    def __init__(self, *, blank: bool, resharded: bool = False) -> None:
        self.blank = blank
        self._resharded = blank or resharded
        self._tied = torch.zeros(40) if blank else random_tensor((40,), torch.float32, 1)

    def make(self, leaf: Leaf) -> Any:
        if leaf.kind == "object":
            return None if self.blank else OBJECTS[leaf.value]
        tensor = self._make_tensor(leaf)
        if leaf.kind == "parameter":
            tensor = torch.nn.Parameter(tensor, requires_grad=leaf.grad)
        if not self.blank or torch.is_inference_mode_enabled():
            return tensor
        if leaf.grad and leaf.kind not in ("parameter", "tied") and tensor.dtype in _FLOATS:
            tensor.requires_grad_()
        if tensor.requires_grad:
            tensor.register_hook(_hook)
            if not isinstance(tensor, DTensor):
                tensor.grad = torch.ones(tensor.shape, dtype=tensor.dtype)
        return tensor

    def _make_tensor(self, leaf: Leaf) -> torch.Tensor:
        if leaf.kind == "tied":
            return self._tied[leaf.seed % 30 :][: leaf.shape[0]]
        if leaf.kind in ("sharded", "replicated"):
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            by = leaf.sharded_by if self._resharded else (0 if leaf.kind == "sharded" else None)
            whole = _laid_out(
                leaf.shape, leaf.into if self.blank else leaf.dtype, "", None if self.blank else leaf.seed
            )
            return distribute_tensor(whole, mesh, [Replicate() if by is None else Shard(by)], src_data_rank=None)
        if self.blank:
            return _laid_out(leaf.shape, leaf.into, leaf.target, None)
        return _laid_out(leaf.shape, leaf.dtype, leaf.layout, leaf.seed)


def _hook(gradient: torch.Tensor) -> None:
    """Does nothing."""


def placed(case: Case) -> Iterator[tuple[tuple[str | int, ...], tuple[Leaf, ...]]]:
    """The entries, without those that DCP would call by one name."""
    names: set[str] = set()
    inner: set[str] = set()
    for path, found in case.entries:
        parts = [str(part) for part in path]
        prefixes = {".".join(parts[:end]) for end in range(1, len(parts) + 1)}
        flat = {".".join([*parts, str(i)]) for i in range(len(found))} if len(found) > 1 else {".".join(parts)}
        if (prefixes | flat) & names or flat & inner or ".".join(parts) in inner:
            continue
        names |= flat | {".".join(parts)}
        inner |= prefixes - {".".join(parts)}
        yield path, found


def make_state(case: Case, maker: Maker) -> dict[Any, Any]:
    rank = dist.get_rank() if dist.is_initialized() else 0
    state: dict[Any, Any] = {"step": None if maker.blank else 1}
    for path, found in placed(case):
        everywhere = any(leaf.kind in ("sharded", "replicated") for leaf in found)
        if not everywhere and any(leaf.rank not in (None, rank) for leaf in found):
            continue
        into = state.setdefault("state", {})
        for part in path[:-1]:
            into = into.setdefault(part, {})
        values = [maker.make(leaf) for leaf in found]
        into[path[-1]] = values if len(values) > 1 else values[0]
    return state


def leaves_of(state: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if isinstance(state, (dict, list)):
        for key, value in state.items() if isinstance(state, dict) else enumerate(state):
            yield from leaves_of(value, (*path, key))
    else:
        yield path, state
