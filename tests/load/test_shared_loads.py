"""Loads of several ranks that need the same bytes: what is fetched, that it arrives, and what happens when one of them
fails, is interrupted, killed or too late.

Starting processes costs more than a load: each test goes through many loads in one process group.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import boto3
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from dcp_s3 import S3StorageReader, errors
from dcp_s3.load.exchange import Exchange
from dcp_s3.load.messages import PAYLOAD, Messages
from dcp_s3.load.pieces import Piece
from dcp_s3.offline.copy import copy
from tests.end_to_end.states import assert_same, blank, random_tensor, random_values
from tests.faulty import BUCKET, FaultyServer
from tests.interrupting import Interrupts
from tests.load.sources import RUN, assert_large, large_state, load_into, save
from tests.memory_s3 import Fault
from tests.ranks import RankFailed, run_ranks

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("faulty")]
ROWS, COLUMNS = 1200, 400


def _fetched(server: FaultyServer, run: str) -> int:
    """Bytes of data that were asked for."""
    keys = f"{run}/__"
    log = [each for each in server.s3.request_log if each.operation == "GetObject" and each.key.startswith(keys)]
    ranges = [(each.range or "").removeprefix("bytes=").split("-") for each in log]
    return sum(int(last) - int(first) + 1 for first, last in ranges)


def _metadata_gets(server: FaultyServer, run: str) -> int:
    return sum((each.operation, each.key) == ("GetObject", f"{run}/.metadata") for each in server.s3.request_log)


def _place_on(full: torch.Tensor, mesh: DeviceMesh, *placements: Placement) -> DTensor:
    # A copy: torch 2.9 takes the memory of a tensor that it need not cut.
    return distribute_tensor(full.clone(), mesh, list(placements), src_data_rank=None)


def _base_state() -> dict[str, Any]:
    return {
        **{f"norm{n}": random_values(n, 30 + n) for n in range(12)}, "large": random_values(50, ROWS, 900),
        "scalar": torch.tensor(3.5), "empty": torch.empty(0, 4), "step": 12, "text": "läuft",
    }  # fmt: skip


def _load_base(run: str, **options: Any) -> None:
    assert_same(load_into(f"{RUN}/{run}", blank(_base_state()), **options), _base_state())


class _ChangingPlanner(DefaultLoadPlanner):
    """Drops what the reader has put into the plan."""

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        return LoadPlan(list(reversed(new_plan.items)))


def _loads() -> None:
    line = init_device_mesh("cpu", (4,))
    square = init_device_mesh("cpu", (2, 2))
    full = {"sharded": random_values(60, ROWS, COLUMNS), "whole": random_values(61, ROWS, COLUMNS)}
    saved = save("saved", {**_base_state(), **full, "sharded": _place_on(full["sharded"], line, Shard(0))})
    rank = dist.get_rank()
    if rank == 0:  # so that their requests can be told apart
        for run in ("ddp", "hsdp", "tp", "off", "one_off", "changed", "strided", "urls_a", "urls_b"):
            copy(saved, f"{RUN}/{run}")
    dist.barrier()

    # DDP: everything on all ranks.
    everything = {**_base_state(), **full}
    assert_same(load_into(f"{RUN}/ddp", blank(everything)), everything)

    # HSDP: replicas of shards, of what one rank and of what four saved. TP: columns of rows that others saved.
    for run, mesh, placements in (("hsdp", square, (Replicate(), Shard(0))), ("tp", line, (Shard(1),))):
        state = {name: _place_on(blank(value), mesh, *placements) for name, value in full.items()}
        load_into(f"{RUN}/{run}", state)
        assert_same({name: value.full_tensor() for name, value in state.items()}, full, run)

    # Not shared: by the setting, on all ranks or on one; because a planner changes the plan.
    _load_base("off", load_sharing=False)
    _load_base("one_off", load_sharing=rank != 2)
    _load_base("changed", planner=_ChangingPlanner())

    # Into other dtypes and strides, and into memory that two entries share.
    target = torch.zeros(900, ROWS, dtype=torch.float64).t()
    both = torch.zeros(ROWS, COLUMNS)
    load_into(f"{RUN}/strided", {"large": target, "whole": both, "sharded": both})
    assert torch.equal(target, random_values(50, ROWS, 900).double())

    # Ranks that load from different URLs at once.
    _load_base(f"urls_{'a' if rank else 'b'}")


def test_each_byte_is_fetched_once(faulty: FaultyServer) -> None:
    run_ranks(4, _loads)
    stored = sum(size for key, size in faulty.s3.objects(BUCKET).items() if key.startswith("saved/__"))
    base = 4 * ROWS * 900
    whole = 4 * ROWS * COLUMNS
    most = {"ddp": stored, "hsdp": 2 * whole, "tp": 1.24 * 2 * whole, "strided": base + 2 * whole}
    for run, size in most.items():
        assert _fetched(faulty, run) <= 1.05 * size, run
    for run in ("off", "one_off", "changed"):
        assert _fetched(faulty, run) >= 4 * base, run
    assert {_metadata_gets(faulty, run) for run in (*most, "off", "one_off", "changed")} == {4}
    assert (_metadata_gets(faulty, "urls_a"), _metadata_gets(faulty, "urls_b")) == (3, 1)


def _foreign_loads(folder: Path) -> None:
    """Items that have to be decoded as a whole: small and needed as a whole, or not."""
    full = {"small": random_values(1, 300, 400), "sliced": random_values(2, 300, 40),
            "large": random_values(3, 1_500_000)}  # fmt: skip
    mesh = init_device_mesh("cpu", (3,))
    if dist.get_rank() == 0:
        dcp.save({**full, "text": "läuft"}, checkpoint_id=folder, no_dist=True)
        client = boto3.Session().client("s3", endpoint_url=os.environ["DCP_S3_ENDPOINT_URL"])
        for path in folder.iterdir():
            client.upload_file(str(path), BUCKET, f"foreign/{path.name}")
        client.close()
    dist.barrier()
    state = blank({**full, "text": "läuft"})
    state["sliced"] = _place_on(state["sliced"], mesh, Shard(1))
    load_into(f"{RUN}/foreign", state)
    state["sliced"] = state["sliced"].full_tensor()
    assert_same(state, {**full, "text": "läuft"})


def test_what_another_writer_stored_is_shared_where_it_is_small(faulty: FaultyServer, tmp_path: Path) -> None:
    run_ranks(3, _foreign_loads, tmp_path)
    small, sliced, large = 4 * 300 * 400, 4 * 300 * 40, 4 * 1_500_000
    assert 3 * large <= _fetched(faulty, "foreign") <= 3 * large + small + 3 * sliced + 100_000


def _random_loads(seed: int, count: int) -> None:
    """States and placements drawn from ``seed``, the same on all ranks; each rank's plan differs."""
    draw = random.Random(seed)
    meshes = [init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))]
    for number in range(count):
        shapes = [tuple(draw.randint(1, 70) for _ in range(draw.randint(1, 3))) for _ in range(8)]
        shapes.append((draw.randint(300, 500), draw.randint(300, 900)))
        dtypes = [draw.choice([torch.float32, torch.bfloat16, torch.uint8, torch.float64]) for _ in shapes]
        fulls = [random_tensor(shape, dtype, n) for n, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))]

        def placed(full: torch.Tensor) -> torch.Tensor:
            mesh = draw.choice(meshes)
            choices: list[Placement] = [Replicate(), *(Shard(dim) for dim in range(full.dim()))]
            placements = [draw.choice(choices) for _ in range(mesh.ndim)]
            return full.clone() if draw.random() < 0.2 else _place_on(full, mesh, *placements)

        url = save(f"random{seed}-{number}", {**{f"t{n}": placed(full) for n, full in enumerate(fulls)}, "n": number})
        state: dict[str, Any] = {f"t{n}": placed(torch.zeros_like(full)) for n, full in enumerate(fulls)}
        state["n"] = -1
        load_into(url, state, buffers=draw.choice([1, 10]) * 2**20)
        assert state["n"] == number
        for n, full in enumerate(fulls):
            found = state[f"t{n}"]
            found = found.full_tensor() if isinstance(found, DTensor) else found
            assert torch.equal(found.view(torch.uint8), full.view(torch.uint8)), (seed, number, n)


@pytest.mark.quick("1")
@pytest.mark.parametrize("seed", [1, 2])
def test_random_states_on_random_placements(seed: int) -> None:
    run_ranks(4, _random_loads, seed, 6)


def _groups() -> dict[str, list[str]]:
    url = save("good", large_state())
    group, pair = dist.new_group([0, 1, 2]), dist.new_group([0, 2])
    names = {dist.group.WORLD: "default", group: "given", pair: "pair"}
    found: dict[str, list[str]] = {}
    init = Exchange.__init__

    def load(name: str, readers_group: Any = None, **arguments: Any) -> None:
        state, used = large_state(True), found.setdefault(name, [])

        def note(exchange: Exchange, group: Any, *others: Any, **more: Any) -> None:
            used.append(names[group])
            init(exchange, group, *others, **more)

        with mock.patch.object(Exchange, "__init__", note):
            dcp.load(state, storage_reader=S3StorageReader(url, process_group=readers_group), **arguments)
        assert_large(state)

    load("none")
    load("given", group)
    load("no_dist", group, no_dist=True)
    with mock.patch.object(dist, "get_backend_config", return_value="cuda:nccl"):
        load("no gloo")
    dist.barrier()
    if dist.get_rank() != 1:
        load("part", process_group=pair)
        load("part, given", pair, process_group=pair)
    return found


def test_ranks_share_in_a_group_that_is_exactly_theirs() -> None:
    for rank, found in enumerate(run_ranks(3, _groups, timeout=60)):
        assert found == {
            "none": ["default"], "given": ["given"], "no_dist": [], "no gloo": [],
            **({} if rank == 1 else {"part": [], "part, given": ["pair"]}),
        }  # fmt: skip


# --- failures ------------------------------------------------------------------------------------------


Failures = dict[int, tuple[str, str]]
"""Kind and text of the error, by rank."""


def _failing(url: str, **options: Any) -> Failures:
    try:
        load_into(url, large_state(True), **options)
    except CheckpointException as error:
        return {rank: (type(cause).__name__, str(cause)) for rank, (cause, _) in error.failures.items()}
    return {}


@contextlib.contextmanager
def _on_rank(rank: int, patch: Any) -> Iterator[None]:
    with patch if dist.get_rank() == rank else contextlib.nullcontext():
        yield


def _raising(error: BaseException, after: int = 0, method: Any = lambda *_, **__: 0) -> Callable[..., Any]:
    """``method``, but that raises from the call number ``after`` on."""
    calls: list[None] = []

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        if len(calls) > after:
            raise error
        return method(*args, **kwargs)

    return wrapper


_PLANNER = "torch.distributed.checkpoint.default_planner.DefaultLoadPlanner"
_DOWN = errors.TransferError("S3 is down", bucket=BUCKET, key="k", operation="GetObject", attempts=3)
_SITES: dict[str, tuple[int, str, BaseException, int]] = {
    "down": (1, "dcp_s3.s3.store.S3Store.read", _DOWN, 0),
    "sending": (2, "dcp_s3.load.pieces.Piece.message", MemoryError("no memory"), 0),
    "receiving": (0, "dcp_s3.load.pieces.Piece._memory", KeyError("place"), 0),
    "planner": (1, f"{_PLANNER}.commit_tensor", ValueError("mine"), 2),
    "interrupt": (0, f"{_PLANNER}.commit_tensor", KeyboardInterrupt(), 1),
    "preparing": (1, f"{_PLANNER}.resolve_tensor", ValueError("no tensor"), 0),
    "threads": (1, "dcp_s3.load.exchange.Workers.submit", errors.DcpS3Error("no threads"), 0),
    "before": (2, "dcp_s3.load.reader.check_filled", OSError("no metadata"), 0),
}
"""On which rank which function fails, how, and after how many calls."""


def _failures() -> dict[str, Failures]:
    url, told = save("good", large_state(), max_objects=1), {}
    for name, (rank, place, error, after) in _SITES.items():
        with _on_rank(rank, mock.patch(place, _raising(error, after))):
            told[name] = _failing(url)
    assert_large(load_into(url, large_state(True)))
    return told


def test_every_rank_is_told_what_went_wrong() -> None:
    for told in run_ranks(3, _failures):
        assert set(told["down"]) == {0, 1, 2}
        for name, failures in told.items():
            owner, _, error, _ = _SITES[name]
            cause, text = type(error).__name__, str(error).strip("'")
            assert [rank for rank, (kind, _) in failures.items() if kind == cause] == [owner]
            assert text in failures.pop(owner)[1]
            for kind, message in failures.values():
                assert kind == "PeerReadError", (name, failures)
                for part in (f"rank {owner}", RUN, cause, text):
                    assert part in message


def _failing_at_random(seed: int, count: int) -> None:
    url, draw = save("random", large_state()), random.Random(seed)
    places = [
        (Piece, "fetch"), (Piece, "message"), (Piece, "sent"), (Piece, "buffer"),
        (Piece, "received"), (DefaultLoadPlanner, "commit_tensor"),
    ]  # fmt: skip
    for number in range(count):
        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch("dcp_s3.load.reader.MAX_PIECE", 2**18))
            for failing in draw.sample(range(4), draw.choice([1, 2])):
                (owner, name), after = draw.choice(places), draw.randint(0, 12)
                method = _raising(ValueError(f"rank {failing}"), after, getattr(owner, name))
                stack.enter_context(_on_rank(failing, mock.patch.object(owner, name, method)))
            failures = _failing(url, buffers=draw.choice([1, 4]) * 2**20)
        for kind, text in failures.values():
            assert kind in ("ValueError", "PeerReadError"), (seed, number, failures)
            assert "rank" in text
    assert_large(load_into(url, large_state(True)))


def test_ranks_that_fail_anywhere_let_no_other_hang() -> None:
    run_ranks(4, _failing_at_random, 1, 12, timeout=60)


# --- interrupts ----------------------------------------------------------------------------------------


def _interrupted() -> Failures:
    url, interrupts, received = save("good", large_state()), Interrupts(), Piece.received
    first, returned, early = threading.Event(), threading.Event(), []

    def interrupt_twice(piece: Piece, crc: int) -> None:
        if not first.is_set():
            first.set()
            interrupts.send()
            interrupts.send()
            early.append(returned.wait(0.3))
        received(piece, crc)

    with _on_rank(0, mock.patch.object(Piece, "received", interrupt_twice)):
        try:
            failures = _failing(url)
        finally:
            returned.set()
    assert early == ([False] if dist.get_rank() == 0 else []), "nothing is written any more when the load has failed"
    assert_large(load_into(url, large_state(True)))
    return failures


def test_an_interrupt_lets_no_other_hang() -> None:
    for failures in run_ranks(2, _interrupted, timeout=60):
        assert failures[0][0] == "KeyboardInterrupt"
        # The other may have got all it needs by then.
        assert failures.get(1, ("PeerReadError",))[0] == "PeerReadError"


def _begin_badly() -> dict[str, Failures]:
    url, told = save("good", large_state()), {}
    for name, finish_plan in {
        "failed": _raising(ValueError("no plan")),
        "dropped": lambda _, plan: LoadPlan(plan.items),
        "late": lambda _, plan: (time.sleep(3), plan)[1],
    }.items():
        patch = mock.patch.object(DefaultLoadPlanner, "finish_plan", finish_plan)
        with mock.patch("dcp_s3.load.messages.PATIENCE", 1.0), _on_rank(1, patch):
            told[name] = _failing(url)
    assert_large(load_into(url, large_state(True)))
    return told


def test_a_rank_that_does_not_come_to_the_exchange_is_named() -> None:
    for told in run_ranks(3, _begin_badly, timeout=60):
        for name, failures in told.items():
            for rank in (0, 2):
                kind, text = failures[rank]
                assert kind == "PeerReadError", name
                for part in ("rank 1", "did not begin to read within 1 s", f"{RUN}/good"):
                    assert part in text, name
        assert told["failed"][1] == ("ValueError", "no plan")
        assert 1 not in told["dropped"]
        kind, text = told["late"][1]
        assert kind == "PeerReadError"
        assert "rank 0" in text or "rank 2" in text


def _die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _killed(folder: Path, before: bool) -> None:
    url = save("good", large_state())
    where: Any = (DefaultLoadPlanner, "finish_plan") if before else (Piece, "fetch")
    with _on_rank(2, mock.patch.object(*where, _die)):
        try:
            load_into(url, large_state(True))
        except BaseException as error:  # noqa: BLE001 - CheckpointException is none, nor what gloo raises a subclass
            (folder / str(dist.get_rank())).write_text(repr(error))


@pytest.mark.parametrize("before", [False, True])
def test_a_rank_that_is_killed_lets_no_other_hang(tmp_path: Path, before: bool) -> None:
    with pytest.raises(RankFailed, match="exit code -9"):
        run_ranks(3, _killed, tmp_path, before, timeout=90, grace=30)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


def _cut_off(number: int, folder: Path) -> None:
    tensors = [torch.zeros(2**23, dtype=torch.uint8) for _ in range(8)]
    messages = Messages(dist.group.WORLD, [1 - dist.get_rank()], "s3://b/run", 1 << 29)  # type: ignore[arg-type]
    peer, works = 1 - messages.rank, []
    for index, tensor in enumerate(tensors if messages.rank == 0 else tensors[:-2]):  # it cannot end before the kill
        operation = dist.irecv if index % 2 == messages.rank else dist.isend
        works.append(messages.post(operation, tensor, peer, PAYLOAD))
    if messages.rank == 1:
        time.sleep(number * 0.002)
        _die()
    for work, tensor in zip(works, tensors, strict=True):
        messages.wait(work, peer, tensor)
    messages.end()
    assert messages.failure is not None
    assert isinstance(messages.failure[0], errors.PeerReadError)
    assert "the connection to rank 1 was lost" in str(messages.failure[0])
    (folder / str(number)).touch()


@pytest.mark.timeout(500)  # four times two processes that import torch
def test_messages_that_a_killed_rank_cuts_off_end(tmp_path: Path) -> None:
    """gloo forgets the one that was under way, and waits for it."""
    for number in range(4):
        with pytest.raises(RankFailed, match="exit code -9"):
            run_ranks(2, _cut_off, number, tmp_path, timeout=120, grace=20)
        assert (tmp_path / str(number)).exists()


def _stalled() -> Failures:
    slow, good = (save(run, large_state()) for run in ("slow", "good"))
    failures = _failing(slow, settings={"stall_timeout": 1.5})
    dist.barrier()
    assert_large(load_into(good, large_state(True)))
    return failures


def test_a_load_in_which_nothing_moves_ends_on_all_ranks(faulty: FaultyServer) -> None:
    released = threading.Event()

    def rule(request: Any) -> Fault | None:
        if request.operation == "GetObject" and request.key.startswith("slow/__1_"):
            released.wait(30)
            return Fault.reset()
        return None

    faulty.rule = rule
    outcome = run_ranks(3, _stalled)
    released.set()
    for failures in outcome:
        assert set(failures) == {0, 1, 2}
        kinds = {kind for kind, _ in failures.values()}
        assert {"DeadlineExceededError"} <= kinds <= {"DeadlineExceededError", "PeerReadError"}
        assert all("DCP_S3_STALL_TIMEOUT = 1.5 s" in message for _, message in failures.values())
