"""Random states, saved and loaded by dcp_s3 and by torch's own storage, compared in all that a load may touch.

DCP_S3_TEST_STATES says how many states there are without ranks (9); with 1 to 3 ranks a third of it each.
"""

from __future__ import annotations

import contextlib
import io
import os
import pathlib
import tempfile
from collections.abc import Iterator
from typing import Any
from unittest import mock

import boto3
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, Phase, given, settings
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan
from torch.distributed.tensor import DTensor

from dcp_s3 import S3LoadPlanner, S3Stager, S3StorageReader, S3StorageWriter
from dcp_s3.url import parse_url
from tests.end_to_end.random_cases import NUMBER, Case, Maker, cases, leaves_of, make_state
from tests.end_to_end.states import bits
from tests.end_to_end.test_interchange import download, upload
from tests.ranks import run_ranks

# --- what a load may touch ------------------------------------------------------------------------------


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _whole_memory(tensor: torch.Tensor) -> bytes:
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
    return {
        path: (value._version, _local(value)._version)
        for path, value in leaves_of(state)
        if isinstance(value, torch.Tensor) and not value.is_inference()
    }


def _record(planner: Any) -> tuple[list[str], list[str]]:
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
    return planned, loaded


def load(case: Case, reader: Any, *, s3_planner: bool) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """What a load makes of a blank state, and which of its counters moved."""
    with torch.inference_mode(case.inference):
        state = make_state(case, Maker(blank=True))
        before, targets = counters(state), dict(leaves_of(state))
        planner = S3LoadPlanner() if s3_planner else DefaultLoadPlanner()
        planned, loaded = _record(planner)
        dcp.load(state, storage_reader=reader, planner=planner)
    assert not isinstance(reader, S3StorageReader) or planned == loaded, "the order of load_bytes"
    after = counters(state)
    moved = {path: tuple(b > a for a, b in zip(before[path], after[path], strict=True)) for path in before}
    for path, value in leaves_of(state):
        if isinstance(value, torch.Tensor):
            assert value is targets[path], f"{path} was replaced"
    return state, moved


# --- a case ---------------------------------------------------------------------------------------------


def run(case: Case, root: str) -> None:
    """Save a state by both, load each by both, and compare."""
    with _shared_directory() as directory:
        _save(case, f"{root}/ours")
        client, bucket = boto3.client("s3", endpoint_url=os.environ["DCP_S3_ENDPOINT_URL"]), parse_url(root).bucket
        prefix = parse_url(root).key("").rstrip("/")
        _on_first_rank(lambda: download(client, bucket, f"{prefix}/ours", directory / "ours"))
        dcp.save(
            make_state(case, Maker(blank=False)),
            storage_writer=dcp.FileSystemWriter(directory / "torch", sync_files=False),
        )
        _on_first_rank(lambda: upload(client, bucket, f"{prefix}/torch", directory / "torch"))
        for writer in ("ours", "torch"):
            _compare(case, f"{root}/{writer}", directory / writer, writer)


def _save(case: Case, url: str) -> None:
    """Save by dcp_s3, and go on with the state as soon as that is allowed."""
    if case.overwrite:
        dcp.save({"old": torch.ones(5), "step": 0}, storage_writer=S3StorageWriter(url, settings=case.writing))
    state = make_state(case, Maker(blank=False))
    writer = S3StorageWriter(url, overwrite=case.overwrite, max_objects=case.max_objects, settings=case.writing)
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
    theirs, their_moves = load(case, dcp.FileSystemReader(directory), s3_planner=False)
    reader = S3StorageReader(url, load_sharing=case.load_sharing, settings=case.reading)
    with contextlib.ExitStack() as stack:
        for module in ("read", "reader"):
            stack.enter_context(mock.patch(f"dcp_s3.load.{module}.READ_GAP", case.read_gap))
        ours, our_moves = load(case, reader, s3_planner=case.s3_planner)
    found, expected = list(leaves_of(ours)), list(leaves_of(theirs))
    assert [path for path, _ in found] == [path for path, _ in expected], f"{writer}: keys and their order"
    for (path, value), (_, other) in zip(found, expected, strict=True):
        assert describe(value) == describe(other), f"{writer}: {path}"
    for path, moves in their_moves.items():
        for mine, its in zip(our_moves[path], moves, strict=True):
            assert mine >= its, f"{writer}: {path}: torch counts up its version, dcp_s3 does not"
    _compare_with_saved(case, found, writer)


def _compare_with_saved(case: Case, found: list[tuple[tuple[Any, ...], Any]], writer: str) -> None:
    """torch's reader may be fooled by what dcp_s3 wrote: compare with what was meant."""
    saved = dict(leaves_of(make_state(case, Maker(blank=False, resharded=True))))
    for path, value in found:
        if isinstance(value, torch.Tensor):
            if value.dtype == saved[path].dtype:
                same = bits(_local(value)) == bits(_local(saved[path]))
                assert same, f"{writer}: {path} is not what was saved"
        elif not {NUMBER, str(NUMBER)} & set(path):
            assert repr(value) == repr(saved[path]), f"{writer}: {path} is not what was saved"


def _on_first_rank(action: Any) -> None:
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


STATES = int(os.environ.get("DCP_S3_TEST_STATES", "9"))
_SECONDS = 20
"""For a state; on an idle machine it takes one."""

pytestmark = [
    pytest.mark.servers("memory"),
    pytest.mark.filterwarnings("ignore:.*TypedStorage is deprecated:UserWarning"),
    pytest.mark.timeout(120 + _SECONDS * STATES),
]


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
