"""Random states, saved and loaded by dcp_s3 and by torch's own storage, compared in all that a load may touch.

A `Case` says what a state is, how it is saved, and into what it is loaded; it is a value, so that a failure can be run
again. DCP_S3_TEST_STATES says how many states there are without ranks (9); with 1 to 3 ranks a third of it each.
"""

from __future__ import annotations

import contextlib
import datetime
import io
import os
import pathlib
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import boto3
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh

from dcp_s3 import S3LoadPlanner, S3Stager, S3StorageReader, S3StorageWriter
from dcp_s3.load.plan import READ_GAP
from dcp_s3.url import parse_url
from tests.end_to_end.states import DTYPES, bits, local, random_tensor
from tests.end_to_end.test_interchange import download, upload
from tests.ranks import run_ranks

STATES = int(os.environ.get("DCP_S3_TEST_STATES", "9"))
_SECONDS = 20
"""For a state; on an idle machine it takes one."""

pytestmark = [
    pytest.mark.servers("memory"),
    pytest.mark.filterwarnings("ignore:.*TypedStorage is deprecated:UserWarning"),
    pytest.mark.timeout(120 + _SECONDS * STATES),
]

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
    part_sizes = st.sampled_from([5 * MIB, 64 * MIB])
    path = st.lists(st.sampled_from(_KEYS), min_size=1, max_size=3).map(tuple)
    entry = st.tuples(path, st.lists(leaves(ranks), min_size=1, max_size=3).map(tuple))
    return Case(
        tuple(draw(st.lists(entry, min_size=1, max_size=8))),
        save=draw(st.sampled_from(["sync", "async", "stager", "background"])),
        overwrite=draw(st.booleans()),
        writing={
            "part_size": draw(part_sizes),
            "checksum": draw(st.sampled_from(["auto", "crc64nvme", "none"])),
            "concurrency": draw(st.integers(1, 8)),
        },
        max_objects=draw(st.integers(1, 4)),
        reading={"part_size": draw(part_sizes), "concurrency": draw(st.integers(1, 8))},
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
        wide = torch.complex64 if dtype == torch.float32 else torch.complex128
        return make(*shape, 2).nan_to_num().view(wide)[..., 0].conj().imag
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
            tensor.register_hook(lambda gradient: None)
            if not isinstance(tensor, DTensor):
                tensor.grad = torch.ones(tensor.shape, dtype=tensor.dtype)
        return tensor

    def _make_tensor(self, leaf: Leaf) -> torch.Tensor:
        if leaf.kind == "tied":
            return self._tied[leaf.seed % 30 :][: leaf.shape[0]]
        dtype, seed = (leaf.into, None) if self.blank else (leaf.dtype, leaf.seed)
        if leaf.kind in ("sharded", "replicated"):
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            by = leaf.sharded_by if self._resharded else (0 if leaf.kind == "sharded" else None)
            whole = _laid_out(leaf.shape, dtype, "", seed)
            return distribute_tensor(whole, mesh, [Replicate() if by is None else Shard(by)], src_data_rank=None)
        return _laid_out(leaf.shape, dtype, leaf.target if self.blank else leaf.layout, seed)


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


# --- what a load may touch ------------------------------------------------------------------------------


def describe(value: Any) -> Any:
    """All of a value that must be the same whoever has loaded it."""
    if not isinstance(value, torch.Tensor):
        buffer = io.BytesIO()
        torch.save(value, buffer)
        return type(value), repr(value), len(buffer.getvalue())
    mine = local(value)
    memory = torch.empty(0, dtype=torch.uint8).set_(mine.untyped_storage()).numpy().tobytes()
    return {
        "type": type(value), "dtype": value.dtype, "shape": tuple(value.shape), "strides": mine.stride(),
        "offset": mine.storage_offset(), "bits": bits(mine), "memory": memory,
        "requires_grad": value.requires_grad, "is_leaf": value.is_leaf, "inference": value.is_inference(),
        "conj": value.is_conj(), "neg": value.is_neg(), "grad": None if value.grad is None else value.grad.tolist(),
        "hooks": len(value._backward_hooks or ()), "attributes": sorted(vars(value)),
        "placements": value.placements if isinstance(value, DTensor) else None,
    }  # fmt: skip


def counters(state: Any) -> dict[tuple[Any, ...], tuple[int, int]]:
    return {
        path: (value._version, local(value)._version)
        for path, value in leaves_of(state)
        if isinstance(value, torch.Tensor) and not value.is_inference()
    }


def load(case: Case, reader: Any, *, s3_planner: bool) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """What a load makes of a blank state, and which of its counters moved."""
    planner: Any = S3LoadPlanner() if s3_planner else DefaultLoadPlanner()
    planned: list[str] = []
    loaded: list[str] = []
    finish, load_bytes = planner.finish_plan, planner.load_bytes

    def finish_plan(plan: LoadPlan) -> LoadPlan:
        found: LoadPlan = finish(plan)
        planned[:] = [item.dest_index.fqn for item in found.items if item.type == LoadItemType.BYTE_IO]
        return found

    def note(item: Any, value: io.BytesIO) -> None:
        loaded.append(item.dest_index.fqn)
        load_bytes(item, value)

    planner.finish_plan, planner.load_bytes = finish_plan, note
    with torch.inference_mode(case.inference):
        state = make_state(case, Maker(blank=True))
        before, targets = counters(state), dict(leaves_of(state))
        dcp.load(state, storage_reader=reader, planner=planner)
    assert not isinstance(reader, S3StorageReader) or planned == loaded, "the order of load_bytes"
    after = counters(state)
    moved = {path: tuple(b > a for a, b in zip(before[path], after[path], strict=True)) for path in before}
    for path, value in leaves_of(state):
        assert not isinstance(value, torch.Tensor) or value is targets[path], f"{path} was replaced"
    return state, moved


# --- a case ---------------------------------------------------------------------------------------------


def run(case: Case, root: str) -> None:
    """Save a state by both, load each by both, and compare."""
    with _shared_directory() as directory:
        _save(case, f"{root}/ours")
        client, where = boto3.client("s3", endpoint_url=os.environ["DCP_S3_ENDPOINT_URL"]), parse_url(root)
        _on_first_rank(lambda: download(client, where.bucket, where.key("ours"), directory / "ours"))
        writer = dcp.FileSystemWriter(directory / "torch", sync_files=False)
        dcp.save(make_state(case, Maker(blank=False)), storage_writer=writer)
        _on_first_rank(lambda: upload(client, where.bucket, where.key("torch"), directory / "torch"))
        for name in ("ours", "torch"):
            _compare(case, f"{root}/{name}", directory / name, name)


def _save(case: Case, url: str) -> None:
    """Save by dcp_s3, and go on with the state as soon as that is allowed."""
    if case.overwrite:
        dcp.save({"old": torch.ones(5), "step": 0}, storage_writer=S3StorageWriter(url, settings=case.writing))
    state = make_state(case, Maker(blank=False))
    writer = S3StorageWriter(url, overwrite=case.overwrite, max_objects=case.max_objects, settings=case.writing)
    if case.save == "sync":
        dcp.save(state, storage_writer=writer)
        return
    later = case.save == "background"
    with contextlib.nullcontext() if case.save == "async" else S3Stager(asynchronous=later) as stager:
        future: Any = dcp.async_save(state, storage_writer=writer, async_stager=stager)
        if later:
            future.staging_completion.result(120)
            future = future.upload_completion
        with torch.no_grad():
            for _, value in leaves_of(state):
                if isinstance(value, torch.Tensor) and 0 not in value.stride():
                    local(value).zero_()
        future.result(120)


def _compare(case: Case, url: str, directory: pathlib.Path, writer: str) -> None:
    theirs, their_moves = load(case, dcp.FileSystemReader(directory), s3_planner=False)
    reader, gap = S3StorageReader(url, load_sharing=case.load_sharing, settings=case.reading), case.read_gap
    with mock.patch("dcp_s3.load.read.READ_GAP", gap), mock.patch("dcp_s3.load.reader.READ_GAP", gap):
        ours, our_moves = load(case, reader, s3_planner=case.s3_planner)
    found, expected = list(leaves_of(ours)), list(leaves_of(theirs))
    assert [path for path, _ in found] == [path for path, _ in expected], f"{writer}: keys and their order"
    for (path, value), (_, other) in zip(found, expected, strict=True):
        assert describe(value) == describe(other), f"{writer}: {path}"
    for path, moves in their_moves.items():
        for mine, its in zip(our_moves[path], moves, strict=True):
            assert mine >= its, f"{writer}: {path}: torch counts up its version, dcp_s3 does not"
    # torch's reader may be fooled by what dcp_s3 wrote: compare with what was meant.
    saved = dict(leaves_of(make_state(case, Maker(blank=False, resharded=True))))
    for path, value in found:
        message = f"{writer}: {path} is not what was saved"
        if not isinstance(value, torch.Tensor):
            assert {NUMBER, str(NUMBER)} & set(path) or repr(value) == repr(saved[path]), message
        elif value.dtype == saved[path].dtype:
            assert bits(local(value)) == bits(local(saved[path])), message


def _on_first_rank(action: Callable[[], object]) -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        action()
    if dist.is_initialized():
        dist.barrier()


@contextlib.contextmanager
def _shared_directory() -> Iterator[pathlib.Path]:
    with tempfile.TemporaryDirectory(prefix="dcp-s3-") as name:
        names = [name]
        if dist.is_initialized():
            dist.broadcast_object_list(names)
        yield pathlib.Path(names[0])
        _on_first_rank(lambda: None)


def run_all(found: list[Case], root: str) -> None:
    for number, case in enumerate(found):
        try:
            run(case, f"{root}/{number}")
        except BaseException as error:
            raise AssertionError(f"{error}\nof number {number}: {case}") from error


def test_states_of_one_process(root: str) -> None:
    run_all(drawn(0, STATES), root)


@pytest.mark.quick("2")
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_states_of_ranks(root: str, ranks: int) -> None:
    found = drawn(ranks, max(3, STATES // 3))
    run_ranks(ranks, run_all, found, root, timeout=100 + _SECONDS * len(found))


def drawn(ranks: int, count: int) -> list[Case]:
    """Cases, the same for each run. Drawn at once, not tried one by one: to make a failing one smaller would start the
    ranks a hundred times."""
    found: list[Case] = []

    @settings(max_examples=count, phases=[Phase.generate], suppress_health_check=[HealthCheck.too_slow])
    @given(case=cases(ranks))
    def collect(case: Case) -> None:
        found.append(case)

    collect()
    return found
