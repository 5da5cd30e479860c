"""Random states, saved and loaded by dcp_s3 and by torch's own storage, compared in all that a load may touch.

A `Case` says all: what is saved and how, and into what it is loaded. It is a value, so that a failure can be run again.
"""

from __future__ import annotations

import contextlib
import datetime
import io
import os
import pathlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import boto3
import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import strategies as st
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh

from dcp_s3 import S3LoadPlanner, S3Stager, S3StorageReader, S3StorageWriter
from dcp_s3.url import parse_url
from tests.checkpoint.states import DTYPES, bits, random_tensor

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
_NUMBER = 3
"""A key that is no text: stock DCP loads objects under its text instead."""
_KEYS = (
    "w", "a.b", "", " ", "naïve/%+", "0", "\n", "x" * 200, "..", ".metadata", "__0_0.distcp", "🙂", "model", "-",
    "?#&=", _NUMBER,
)  # fmt: skip


@dataclass(frozen=True)
class Leaf:
    """One entry.

    Attributes:
        kind: ``plain``, ``parameter``, ``tied`` (a view of memory that all tied ones share), ``object``, or a DTensor:
            ``sharded`` or ``replicated``.
        layout: of what is saved.
        target: layout of what it is loaded into.
        into: its dtype.
        sharded_by: dimension of the DTensor that is loaded into; None for a replicated one.
        grad: whether what is loaded into requires gradients, and has hooks.
        rank: the only one that has it; None: all have it.
        value: name of an object.
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
    """A state, how it is saved, and how it is loaded.

    Attributes:
        entries: path of keys -> leaves; several become a list.
        save: ``sync``, ``async``, ``stager`` or ``background`` (a stager that copies behind the caller's back).
        overwrite: whether another checkpoint is there before.
        inference: whether the state to load into was made, and is loaded, in inference mode.
        s3_planner: whether S3LoadPlanner loads.
    """

    entries: tuple[tuple[tuple[str | int, ...], tuple[Leaf, ...]], ...]
    save: str = "sync"
    overwrite: bool = False
    separate: tuple[str, ...] = ()
    writing: dict[str, Any] = field(default_factory=dict)
    reading: dict[str, Any] = field(default_factory=dict)
    inference: bool = False
    s3_planner: bool = False


# --- random cases ---------------------------------------------------------------------------------------

_FLOATS = [dtype for dtype in DTYPES if dtype.is_floating_point and dtype.itemsize > 1]


@st.composite
def leaves(draw: st.DrawFn, ranks: int) -> Leaf:
    """One entry."""
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
    """A case for that many ranks; 0: without a process group."""
    path = st.lists(st.sampled_from(_KEYS), min_size=1, max_size=3).map(tuple)
    entry = st.tuples(path, st.lists(leaves(ranks), min_size=1, max_size=3).map(tuple))
    return Case(
        tuple(draw(st.lists(entry, min_size=1, max_size=8))),
        save=draw(st.sampled_from(["sync", "async", "stager", "background"])),
        overwrite=draw(st.booleans()),
        separate=draw(st.sampled_from([(), ("model", "w"), ("a",)])),
        writing={
            "part_size": draw(st.sampled_from([5 * MIB, 64 * MIB])),
            "checksum": draw(st.sampled_from(["auto", "crc64nvme", "crc32c", "none"])),
            "buckets_per_rank": draw(st.integers(1, 4)),
            "prefix_spread": draw(st.integers(0, 1)),
            "concurrency": draw(st.integers(1, 8)),
        },
        reading={
            "part_size": draw(st.sampled_from([5 * MIB, 64 * MIB])),
            "concurrency": draw(st.integers(1, 8)),
            "read_gap": draw(st.sampled_from([0, 256 * 2**10])),
            "load_sharing": draw(st.booleans()),
        },
        inference=draw(st.sampled_from([False, False, True])),
        s3_planner=draw(st.booleans()),
    )


# --- states ---------------------------------------------------------------------------------------------


def _laid_out(shape: tuple[int, ...], dtype: torch.dtype, layout: str, seed: int | None) -> torch.Tensor:
    """A tensor in memory of its own, of random bits or of zeros."""

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
    """Makes the entries of a state.

    Args:
        blank: those that are loaded into; otherwise, those that are saved.
        resharded: those that are saved, sharded as those that are loaded into.
    """

    def __init__(self, *, blank: bool, resharded: bool = False) -> None:
        self.blank = blank
        self._resharded = blank or resharded
        self._tied = torch.zeros(40) if blank else random_tensor((40,), torch.float32, 1)

    def make(self, leaf: Leaf) -> Any:
        """The value of an entry."""
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
    """The state dict of a case on this rank."""
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
    """Every entry, in order."""
    if isinstance(state, (dict, list)):
        for key, value in state.items() if isinstance(state, dict) else enumerate(state):
            yield from leaves_of(value, (*path, key))
    else:
        yield path, state


# --- what a load may touch ------------------------------------------------------------------------------


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _whole_memory(tensor: torch.Tensor) -> bytes:
    """Of the tensor and of its neighbours."""
    storage = _local(tensor).detach().untyped_storage()
    return torch.empty(0, dtype=torch.uint8).set_(storage).numpy().tobytes()


def describe(value: Any) -> Any:
    """All of a value that must be the same whoever has loaded it."""
    if not isinstance(value, torch.Tensor):
        buffer = io.BytesIO()
        torch.save(value, buffer)
        return type(value), repr(value), len(buffer.getvalue())
    local = _local(value).detach()
    return {
        "type": type(value), "dtype": value.dtype, "shape": tuple(value.shape), "strides": local.stride(),
        "offset": local.storage_offset(), "bits": bits(local), "memory": _whole_memory(value),
        "requires_grad": value.requires_grad, "is_leaf": value.is_leaf, "inference": value.is_inference(),
        "conj": value.is_conj(), "neg": value.is_neg(), "grad": None if value.grad is None else value.grad.tolist(),
        "hooks": len(value._backward_hooks or ()), "attributes": sorted(vars(value)),
        "placements": value.placements if isinstance(value, DTensor) else None,
    }  # fmt: skip


def counters(state: Any) -> dict[tuple[Any, ...], tuple[int, int]]:
    """Version counters of the tensors of a state, and of those in DTensors."""
    return {
        path: (value._version, _local(value)._version)
        for path, value in leaves_of(state)
        if isinstance(value, torch.Tensor) and not value.is_inference()
    }


class _Recorder:
    """Of a planner: in which order it was asked to load objects, and in which order they stood in its plan."""

    planned: list[str]
    loaded: list[str]

    def finish_plan(self, plan: LoadPlan) -> LoadPlan:
        found: LoadPlan = super().finish_plan(plan)  # type: ignore[misc]
        self.planned = [item.dest_index.fqn for item in found.items if item.type == LoadItemType.BYTE_IO]
        self.loaded = []
        return found

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        self.loaded.append(read_item.dest_index.fqn)
        super().load_bytes(read_item, value)  # type: ignore[misc]


class _Planner(_Recorder, DefaultLoadPlanner):
    pass


class _S3Planner(_Recorder, S3LoadPlanner):
    pass


def load(case: Case, reader: Any, *, s3_planner: bool) -> tuple[dict[Any, Any], dict[Any, Any], Any]:
    """What a load makes of a blank state, which of its counters moved, and the planner."""
    with torch.inference_mode(case.inference):
        state = make_state(case, Maker(blank=True))
        before, targets = counters(state), dict(leaves_of(state))
        planner = _S3Planner() if s3_planner else _Planner()
        dcp.load(state, storage_reader=reader, planner=planner)
    after = counters(state)
    moved = {path: tuple(b > a for a, b in zip(before[path], after[path], strict=True)) for path in before}
    for path, value in leaves_of(state):
        if isinstance(value, torch.Tensor):
            assert value is targets[path], f"{path} was replaced"
    return state, moved, planner


# --- a case ---------------------------------------------------------------------------------------------


def run(case: Case, root: str) -> None:
    """Save a state by both, load each by both, and compare.

    Args:
        root: under which it is saved; of this case alone.
    """
    with _shared_directory() as directory:
        _save(case, f"{root}/ours")
        _on_first_rank(lambda: _download(f"{root}/ours", directory / "ours"))
        dcp.save(
            make_state(case, Maker(blank=False)),
            storage_writer=dcp.FileSystemWriter(directory / "torch", sync_files=False),
        )
        _on_first_rank(lambda: _upload(directory / "torch", f"{root}/torch"))
        for writer in ("ours", "torch"):
            _compare(case, f"{root}/{writer}", directory / writer, writer)


def _save(case: Case, url: str) -> None:
    """Save by dcp_s3, and go on with the state as soon as that is allowed."""
    if case.overwrite:
        dcp.save({"old": torch.ones(5), "step": 0}, storage_writer=S3StorageWriter(url, settings=case.writing))
    state = make_state(case, Maker(blank=False))
    writer = S3StorageWriter(url, overwrite=case.overwrite, separate=case.separate, settings=case.writing)
    if case.save == "sync":
        dcp.save(state, storage_writer=writer)
        return
    with contextlib.ExitStack() as stack:
        stager = None
        if case.save != "async":
            stager = stack.enter_context(S3Stager(asynchronous=case.save == "background"))
        future: Any = dcp.async_save(state, storage_writer=writer, async_stager=stager)
        if case.save == "background":
            future.staging_completion.result(120)
            future = future.upload_completion
        with torch.no_grad():
            for _, value in leaves_of(state):
                if isinstance(value, torch.Tensor) and 0 not in value.stride():
                    _local(value).zero_()
        future.result(120)


def _compare(case: Case, url: str, directory: pathlib.Path, writer: str) -> None:
    theirs, their_moves, _ = load(case, dcp.FileSystemReader(directory), s3_planner=False)
    reader = S3StorageReader(url, settings=case.reading)
    ours, our_moves, planner = load(case, reader, s3_planner=case.s3_planner)
    found, expected = list(leaves_of(ours)), list(leaves_of(theirs))
    assert [path for path, _ in found] == [path for path, _ in expected], f"{writer}: keys and their order"
    for (path, value), (_, other) in zip(found, expected, strict=True):
        ours_said, theirs_said = describe(value), describe(other)
        if isinstance(value, torch.Tensor):
            for what, said in theirs_said.items():
                assert ours_said[what] == said, f"{writer}: {path}: {what}"
        else:
            assert ours_said == theirs_said, f"{writer}: {path}"
    for path, moves in their_moves.items():
        for mine, its in zip(our_moves[path], moves, strict=True):
            assert mine >= its, f"{writer}: {path}: torch counts up its version, dcp_s3 does not"
    assert planner.loaded == planner.planned, f"{writer}: the order of load_bytes"
    _compare_with_saved(case, found, writer)


def _compare_with_saved(case: Case, found: list[tuple[tuple[Any, ...], Any]], writer: str) -> None:
    """torch's reader may be fooled by what dcp_s3 wrote: compare with what was meant."""
    saved = dict(leaves_of(make_state(case, Maker(blank=False, resharded=True))))
    for path, value in found:
        if isinstance(value, torch.Tensor):
            if value.dtype == saved[path].dtype:
                same = bits(_local(value)) == bits(_local(saved[path]))
                assert same, f"{writer}: {path} is not what was saved"
        elif not {_NUMBER, str(_NUMBER)} & set(path):
            assert repr(value) == repr(saved[path]), f"{writer}: {path} is not what was saved"


# --- between the ranks ----------------------------------------------------------------------------------


def _on_first_rank(action: Any) -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        action()
    if dist.is_initialized():
        dist.barrier()


@contextlib.contextmanager
def _shared_directory() -> Iterator[pathlib.Path]:
    """A temporary directory that all ranks know."""
    if not dist.is_initialized():
        with tempfile.TemporaryDirectory(prefix="dcp-s3-") as name:
            yield pathlib.Path(name)
        return
    with tempfile.TemporaryDirectory(prefix="dcp-s3-") as name:
        names = [name]
        dist.broadcast_object_list(names)
        yield pathlib.Path(names[0])
        dist.barrier()


def _client() -> Any:
    return boto3.client("s3", endpoint_url=os.environ["DCP_S3_ENDPOINT_URL"])


def _download(url: str, directory: pathlib.Path) -> None:
    place, client = parse_url(url), _client()
    prefix = place.key("")
    for found in client.list_objects_v2(Bucket=place.bucket, Prefix=prefix)["Contents"]:
        path = directory / found["Key"].removeprefix(prefix)
        path.parent.mkdir(parents=True, exist_ok=True)
        client.download_file(place.bucket, found["Key"], str(path))


def _upload(directory: pathlib.Path, url: str) -> None:
    place, client = parse_url(url), _client()
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            client.upload_file(str(path), place.bucket, place.key(str(path.relative_to(directory))))


def run_all(found: list[Case], root: str) -> None:
    """`run` each; a failure says which it was."""
    for number, case in enumerate(found):
        try:
            run(case, f"{root}/{number}")
        except BaseException as error:
            raise AssertionError(f"{error}\nof number {number}: {case}") from error
