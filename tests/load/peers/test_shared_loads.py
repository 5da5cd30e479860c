"""Loads of several ranks that need the same bytes: what is fetched, that it arrives, and what happens when it does not.

Starting processes costs more than a load: each test goes through many loads in one process group.
"""

from __future__ import annotations

import contextlib
import logging
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

from dcp_s3 import S3StorageReader, S3StorageWriter, errors
from dcp_s3.limit import Cancelled
from dcp_s3.load.engine import Engine
from dcp_s3.load.item_transfer import TensorTransfer
from dcp_s3.load.peers.agree import LoadGroup, join_load
from dcp_s3.load.peers.exchange import Exchange
from dcp_s3.load.peers.shared_pieces import OwnedPiece, ReceivedPiece
from dcp_s3.settings import Settings
from dcp_s3.torch_private import Caller
from dcp_s3.workers import Workers
from tests.end_to_end.states import random_tensor
from tests.faulty import BUCKET, FaultyServer, serve
from tests.memory_s3 import Fault
from tests.ranks import RankFailed, run_ranks

pytestmark = [pytest.mark.timeout(120)]

RUN = f"s3://{BUCKET}"
SMALL = {"part_size": "5MiB"}


class Recording(FaultyServer):
    """Knows the bytes of each GET, by the first part of its key."""

    def __init__(self) -> None:
        super().__init__()
        self.gets: dict[str, list[tuple[str, int]]] = {}
        self.rule = self._record

    def _record(self, request: Any) -> None:
        if request.operation == "GetObject":
            first, last = (request.range or "bytes=0-0").removeprefix("bytes=").split("-")
            run = request.key.split("/")[0]
            self.gets.setdefault(run, []).append((request.key, int(last) - int(first) + 1))

    def fetched(self, run: str) -> int:
        """Bytes of data objects."""
        return sum(size for key, size in self.gets[run] if key.endswith(".distcp"))

    def metadata_gets(self, run: str) -> int:
        return sum(key.endswith(".metadata") for key, _ in self.gets[run])

    def stored(self, run: str) -> int:
        return sum(size for key, size in self.s3.objects(BUCKET).items() if key.startswith(f"{run}/__"))


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recording]:
    with serve(monkeypatch, Recording()) as server:
        assert isinstance(server, Recording)
        yield server


def _full(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _place(full: torch.Tensor, mesh: DeviceMesh, *placements: Placement) -> DTensor:
    return distribute_tensor(full, mesh, list(placements), src_data_rank=None)


def _load(url: str, state: dict[str, Any], **options: Any) -> dict[str, Any]:
    """``state`` with what was loaded into it; ``group``, ``planner``, others are settings."""
    group, planner = options.pop("group", None), options.pop("planner", None)
    reader = S3StorageReader(url, settings={**SMALL, **options})
    dcp.load(state, storage_reader=reader, process_group=group, planner=planner)
    return state


def _copy(source: str, *runs: str) -> None:
    """The checkpoint at ``source`` under other names, so that their requests can be told apart."""
    if dist.get_rank() == 0:
        client = boto3.Session().client("s3", endpoint_url=os.environ["DCP_S3_ENDPOINT_URL"])
        for found in client.list_objects_v2(Bucket=BUCKET, Prefix=f"{source}/")["Contents"]:
            body = client.get_object(Bucket=BUCKET, Key=found["Key"])
            data, metadata = body["Body"].read(), body["Metadata"]
            for run in runs:
                key = run + found["Key"].removeprefix(source)
                client.put_object(Bucket=BUCKET, Key=key, Body=data, Metadata=metadata)
        client.close()
    dist.barrier()


# --- what is fetched ---------------------------------------------------------------------------------

ROWS, COLUMNS = 1200, 400


def _base_state(blank: bool) -> dict[str, Any]:
    """Replicated: tensors large and small, scalars, objects."""
    state: dict[str, Any] = {f"norm{n}": _full(n, 30 + n) * (not blank) for n in range(12)}
    state["large"] = torch.zeros(ROWS, 900) if blank else _full(50, ROWS, 900)
    state["scalar"] = torch.tensor(0.0 if blank else 3.5)
    state["empty"] = torch.empty(0, 4)
    state["step"] = 0 if blank else 12
    state["text"] = "" if blank else "läuft"
    return state


def _assert_base(state: dict[str, Any]) -> None:
    expected = _base_state(False)
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(state[name], value), name
        else:
            assert state[name] == value, name


def _save_all(mesh: DeviceMesh) -> None:
    state = _base_state(False)
    state["sharded"] = _place(_full(60, ROWS, COLUMNS), mesh, Shard(0))
    state["whole"] = _full(61, ROWS, COLUMNS)
    dcp.save(state, storage_writer=S3StorageWriter(f"{RUN}/saved", settings=SMALL))


class _ChangingPlanner(DefaultLoadPlanner):
    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        return LoadPlan(list(reversed(new_plan.items)))


def _loads() -> None:
    line = init_device_mesh("cpu", (4,))
    square = init_device_mesh("cpu", (2, 2))
    _save_all(line)
    _copy("saved", "ddp", "hsdp", "tp", "off", "one_off", "changed", "cast", "strided", "urls_a", "urls_b", "part")
    rank = dist.get_rank()

    # DDP: everything on all ranks.
    state = _load(
        f"{RUN}/ddp", {**_base_state(True), "sharded": torch.zeros(ROWS, COLUMNS), "whole": torch.zeros(ROWS, COLUMNS)}
    )
    _assert_base(state)
    assert torch.equal(state["sharded"], _full(60, ROWS, COLUMNS))
    assert torch.equal(state["whole"], _full(61, ROWS, COLUMNS))

    # HSDP: replicas of shards, of what one rank and of what four saved.
    blank = torch.zeros(ROWS, COLUMNS)
    state = {name: _place(blank, square, Replicate(), Shard(0)) for name in ("sharded", "whole")}
    _load(f"{RUN}/hsdp", state)
    for seed, name in ((60, "sharded"), (61, "whole")):
        assert torch.equal(state[name].full_tensor(), _full(seed, ROWS, COLUMNS)), name

    # TP: columns of rows that others saved.
    state = {name: _place(blank, line, Shard(1)) for name in ("sharded", "whole")}
    _load(f"{RUN}/tp", state)
    for seed, name in ((60, "sharded"), (61, "whole")):
        assert torch.equal(state[name].full_tensor(), _full(seed, ROWS, COLUMNS)), name

    # Not shared: by the setting, on all ranks or on one; because a planner changes the plan.
    _assert_base(_load(f"{RUN}/off", _base_state(True), load_sharing=False))
    _assert_base(_load(f"{RUN}/one_off", _base_state(True), load_sharing=rank != 2))
    _assert_base(_load(f"{RUN}/changed", _base_state(True), planner=_ChangingPlanner()))

    # Into other dtypes and strides, and into memory that two entries share.
    state = {"large": torch.zeros(ROWS, 900, dtype=torch.float64), "whole": _place(blank.double(), line, Shard(1))}
    _load(f"{RUN}/cast", state, allow_dtype_cast=True)
    assert torch.equal(state["large"], _full(50, ROWS, 900).double())
    assert torch.equal(state["whole"].full_tensor(), _full(61, ROWS, COLUMNS).double())
    target = torch.zeros(900, ROWS).t()
    both = torch.zeros(ROWS, COLUMNS)
    _load(f"{RUN}/strided", {"large": target, "whole": both, "sharded": both})
    assert torch.equal(target, _full(50, ROWS, 900))

    # Ranks that load from different URLs at once.
    _assert_base(_load(f"{RUN}/urls_{'a' if rank else 'b'}", _base_state(True)))

    # A group that is not all ranks, in another order of its own, while the others do something else.
    group = dist.new_group([1, 2, 3])
    if rank:
        state = _load(f"{RUN}/part", _base_state(True), group=group)
        _assert_base(state)
    dist.barrier()


def test_each_byte_is_fetched_once(recording: Recording) -> None:
    run_ranks(4, _loads)
    stored = recording.stored("saved")
    base = 4 * ROWS * 900
    whole = 4 * ROWS * COLUMNS
    assert recording.fetched("ddp") <= 1.05 * stored
    assert recording.fetched("hsdp") <= 1.05 * 2 * whole
    assert recording.fetched("tp") <= 1.3 * 2 * whole
    for run in ("ddp", "hsdp", "tp", "part", "cast", "changed"):
        assert recording.metadata_gets(run) == 1, run
    assert recording.fetched("part") <= 1.05 * base + 100_000
    assert recording.fetched("cast") <= 1.05 * (base + whole)
    for run in ("off", "one_off"):
        assert recording.metadata_gets(run) == 4, run
        assert recording.fetched(run) >= 4 * base, run
    assert recording.fetched("changed") >= 4 * base
    assert (recording.metadata_gets("urls_a"), recording.metadata_gets("urls_b")) == (3, 1)


def _foreign_loads(folder: Path) -> None:
    """Items that have to be decoded as a whole: small and needed as a whole, or not."""
    full = {"small": _full(1, 300, 400), "sliced": _full(2, 300, 40), "large": _full(3, 1_500_000)}
    mesh = init_device_mesh("cpu", (3,))
    if dist.get_rank() == 0:
        dcp.save({**full, "text": "läuft"}, checkpoint_id=folder, no_dist=True)
        client = boto3.Session().client("s3", endpoint_url=os.environ["DCP_S3_ENDPOINT_URL"])
        for path in folder.iterdir():
            client.upload_file(str(path), BUCKET, f"foreign/{path.name}")
        client.close()
    dist.barrier()
    state = {name: torch.zeros_like(value) for name, value in full.items()}
    state["sliced"] = _place(state["sliced"], mesh, Shard(1))
    _load(f"{RUN}/foreign", state | {"text": ""})
    for name in ("small", "large"):
        assert torch.equal(state[name], full[name]), name
    assert isinstance(state["sliced"], DTensor)
    assert torch.equal(state["sliced"].full_tensor(), full["sliced"])


def test_what_another_writer_stored_is_shared_where_it_is_small(recording: Recording, tmp_path: Path) -> None:
    run_ranks(3, _foreign_loads, tmp_path)
    assert recording.metadata_gets("foreign") == 1
    small, sliced, large = 4 * 300 * 400, 4 * 300 * 40, 4 * 1_500_000
    assert 3 * large <= recording.fetched("foreign") <= 3 * large + small + 3 * sliced + 100_000


def _random_loads(seed: int, count: int) -> None:
    """States and placements drawn from ``seed``, the same on all ranks; each rank's plan differs."""
    draw = random.Random(seed)
    meshes = [init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))]
    for number in range(count):
        url = f"{RUN}/random{seed}-{number}"
        shapes = [tuple(draw.randint(1, 70) for _ in range(draw.randint(1, 3))) for _ in range(8)]
        shapes.append((draw.randint(300, 500), draw.randint(300, 900)))
        dtypes = [draw.choice([torch.float32, torch.bfloat16, torch.uint8, torch.float64]) for _ in shapes]
        fulls = [random_tensor(shape, dtype, n) for n, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))]

        def placed(full: torch.Tensor) -> torch.Tensor:
            mesh = draw.choice(meshes)
            choices: list[Placement] = [Replicate(), *(Shard(dim) for dim in range(full.dim()))]
            placements = [draw.choice(choices) for _ in range(mesh.ndim)]
            return full.clone() if draw.random() < 0.2 else _place(full, mesh, *placements)

        saved = {f"t{n}": placed(full) for n, full in enumerate(fulls)}
        dcp.save({**saved, "n": number}, storage_writer=S3StorageWriter(url, settings=SMALL))
        state: dict[str, Any] = {f"t{n}": placed(torch.zeros_like(full)) for n, full in enumerate(fulls)}
        state["n"] = -1
        _load(url, state, load_buffers=draw.choice(["1MiB", "10MiB"]))
        assert state["n"] == number
        for n, full in enumerate(fulls):
            found = state[f"t{n}"]
            found = found.full_tensor() if isinstance(found, DTensor) else found
            assert torch.equal(found.view(torch.uint8), full.view(torch.uint8)), (seed, number, n)


@pytest.mark.parametrize("seed", [1, 2])
def test_random_states_on_random_placements(recording: Recording, seed: int) -> None:
    run_ranks(4, _random_loads, seed, 6)


# --- failures ----------------------------------------------------------------------------------------


def _large(blank: bool) -> dict[str, Any]:
    return {f"t{n}": torch.zeros(300_000 + n) if blank else _full(n, 300_000 + n) for n in range(8)}


def _failing(url: str, **options: Any) -> tuple[dict[int, tuple[str, str]], float]:
    """What each rank failed with, and how long it took."""
    began = time.monotonic()
    try:
        _load(url, _large(True), **options)
    except CheckpointException as error:
        failures = {rank: (type(cause).__name__, str(cause)) for rank, (cause, _) in error.failures.items()}
        return failures, time.monotonic() - began
    return {}, time.monotonic() - began


@contextlib.contextmanager
def _on_rank(rank: int, patch: Any) -> Iterator[None]:
    with patch if dist.get_rank() == rank else contextlib.nullcontext():
        yield


def _raising(error: BaseException, after: int = 0) -> Callable[..., Any]:
    """A `TensorTransfer` or `OwnedPiece` method that raises from the call number ``after`` on."""
    calls: list[None] = []

    def method(*_: Any, **__: Any) -> Any:
        calls.append(None)
        if len(calls) > after:
            raise error
        return 0

    return method


def _failures() -> dict[str, tuple[dict[int, tuple[str, str]], float]]:
    dcp.save(_large(False), storage_writer=S3StorageWriter(f"{RUN}/good", settings={**SMALL, "buckets_per_rank": 1}))
    _copy("good", "deleted", "damaged", "metadata")
    if dist.get_rank() == 0:
        client = boto3.Session().client("s3", endpoint_url=os.environ["DCP_S3_ENDPOINT_URL"])
        keys = [f["Key"] for f in client.list_objects_v2(Bucket=BUCKET, Prefix="deleted/__")["Contents"]]
        client.delete_object(Bucket=BUCKET, Key=keys[0])
        key = client.list_objects_v2(Bucket=BUCKET, Prefix="damaged/__")["Contents"][0]["Key"]
        data = bytearray(client.get_object(Bucket=BUCKET, Key=key)["Body"].read())
        data[len(data) // 2] ^= 4
        client.put_object(Bucket=BUCKET, Key=key, Body=bytes(data))
        client.put_object(Bucket=BUCKET, Key="metadata/.metadata", Body=b"nothing")
        client.close()
    dist.barrier()
    told = {run: _failing(f"{RUN}/{run}") for run in ("deleted", "damaged", "metadata", "absent")}
    down = errors.TransferError("S3 is down", bucket=BUCKET, key="k", operation="GetObject", attempts=3)
    with _on_rank(1, mock.patch("dcp_s3.load.engine.fetch_into", _raising(down))):
        told["down"] = _failing(f"{RUN}/good")
    with _on_rank(2, mock.patch.object(OwnedPiece, "message", _raising(MemoryError("no memory")))):
        told["sending"] = _failing(f"{RUN}/good")
    with _on_rank(0, mock.patch.object(TensorTransfer, "section_memory", _raising(KeyError("place")))):
        told["receiving"] = _failing(f"{RUN}/good")
    with _on_rank(1, mock.patch.object(DefaultLoadPlanner, "commit_tensor", _raising(ValueError("mine"), 2))):
        told["planner"] = _failing(f"{RUN}/good")
    with _on_rank(0, mock.patch.object(DefaultLoadPlanner, "commit_tensor", _raising(KeyboardInterrupt(), 1))):
        told["interrupt"] = _failing(f"{RUN}/good")
    with _on_rank(1, mock.patch.object(DefaultLoadPlanner, "resolve_tensor", _raising(ValueError("no tensor")))):
        told["preparing"] = _failing(f"{RUN}/good")
    with _on_rank(0, mock.patch("dcp_s3.load.reader.fetch_metadata", _raising(KeyboardInterrupt()))):
        told["metadata_interrupt"] = _failing(f"{RUN}/good")
    # After all that the group is as good as new.
    state = _load(f"{RUN}/good", _large(True))
    for name, value in _large(False).items():
        assert torch.equal(state[name], value), name
    return told


def test_every_rank_is_told_what_went_wrong(recording: Recording) -> None:
    outcome = run_ranks(3, _failures)
    for told in outcome:
        for name, (failures, seconds) in told.items():
            assert failures, name
            assert seconds < 60, name
        for run, cause, text in (
            ("deleted", "CorruptCheckpointError", "does not exist"),
            ("damaged", "CorruptCheckpointError", "twice"),
            ("down", "TransferError", "S3 is down"),
            ("sending", "MemoryError", "no memory"),
            ("receiving", "KeyError", "place"),
            ("planner", "ValueError", "mine"),
            ("interrupt", "KeyboardInterrupt", ""),
            ("metadata_interrupt", "KeyboardInterrupt", ""),
        ):
            failures, _ = told[run]
            owners = [rank for rank, (kind, _) in failures.items() if kind == cause]
            assert len(owners) == 1, (run, failures)
            assert text in failures[owners[0]][1]
            for rank, (kind, message) in failures.items():
                if rank != owners[0]:
                    assert kind == "PeerReadError", (run, failures)
                    assert f"rank {owners[0]}" in message
                    assert RUN in message
                    assert cause in message
                    assert text in message
        assert set(told["deleted"][0]) == set(told["down"][0]) == {0, 1, 2}
        assert {kind for kind, _ in told["metadata"][0].values()} == {"CorruptMetadataError"}
        assert {kind for kind, _ in told["absent"][0].values()} == {"CheckpointNotFoundError"}
        assert {rank: kind for rank, (kind, _) in told["preparing"][0].items()} == {1: "ValueError"}
    assert recording.metadata_gets("metadata") == 1


def _failing_at_random(seed: int, count: int) -> None:
    """Many small pieces, little memory, and one or two ranks that fail somewhere: it always ends."""
    url = f"{RUN}/random"
    dcp.save(_large(False), storage_writer=S3StorageWriter(url, settings=SMALL))
    draw = random.Random(seed)
    places = [
        (OwnedPiece, "fetch"), (OwnedPiece, "message"), (OwnedPiece, "sent"), (ReceivedPiece, "buffer"),
        (ReceivedPiece, "received"), (DefaultLoadPlanner, "commit_tensor"),
    ]  # fmt: skip
    for number in range(count):
        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch("dcp_s3.load.reader.MAX_PIECE", 2**18))
            for failing in draw.sample(range(4), draw.choice([1, 2])):
                (owner, name), after = draw.choice(places), draw.randint(0, 12)
                method = _raising_later(getattr(owner, name), ValueError(f"rank {failing}"), after)
                stack.enter_context(_on_rank(failing, mock.patch.object(owner, name, method)))
            failures, _ = _failing(url, load_buffers=draw.choice(["1MiB", "4MiB"]))
        for kind, text in failures.values():
            assert kind in ("ValueError", "PeerReadError"), (seed, number, failures)
            assert "rank" in text
    state = _load(url, _large(True))
    for name, value in _large(False).items():
        assert torch.equal(state[name], value), name


def _raising_later(method: Callable[..., Any], error: BaseException, after: int) -> Callable[..., Any]:
    calls: list[None] = []

    def wrapper(*args: Any) -> Any:
        calls.append(None)
        if len(calls) > after:
            raise error
        return method(*args)

    return wrapper


def test_ranks_that_fail_anywhere_let_no_other_hang(recording: Recording) -> None:
    run_ranks(4, _failing_at_random, 1, 12, timeout=60)


# --- interrupts ---------------------------------------------------------------------------------------


class _Interrupts:
    """Raises KeyboardInterrupt on the main thread, from any."""

    def __init__(self) -> None:
        self._raised = threading.Semaphore(0)
        signal.signal(signal.SIGUSR1, self._handle)

    def _handle(self, *_: object) -> None:
        self._raised.release()
        raise KeyboardInterrupt

    def send(self) -> None:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
        assert self._raised.acquire(timeout=60)


def _interrupted() -> dict[str, dict[int, tuple[str, str]]]:
    url = f"{RUN}/good"
    dcp.save(_large(False), storage_writer=S3StorageWriter(url, settings=SMALL))
    interrupts, told = _Interrupts(), {}
    agree, received = LoadGroup.agree, ReceivedPiece.received

    def interrupt_after(number: int) -> Any:
        calls: list[None] = []

        def method(group: LoadGroup, *values: int) -> Any:
            found = agree(group, *values)
            calls.append(None)
            if len(calls) == number:
                interrupts.send()
            return found

        return mock.patch.object(LoadGroup, "agree", method)

    for rank in (0, 1):
        for number, name in enumerate(("metadata", "data"), 1):
            with _on_rank(rank, interrupt_after(number)):
                told[f"{name}{rank}"], _ = _failing(url)

    first, returned, early = threading.Event(), threading.Event(), []

    def interrupt_twice(piece: ReceivedPiece, crc: int) -> None:
        if not first.is_set():
            first.set()
            interrupts.send()
            interrupts.send()
            early.append(returned.wait(0.3))
        received(piece, crc)

    with _on_rank(0, mock.patch.object(ReceivedPiece, "received", interrupt_twice)):
        try:
            told["twice"], _ = _failing(url)
        finally:
            returned.set()
    assert early == ([False] if dist.get_rank() == 0 else []), "nothing is written any more when the load has failed"
    state = _load(url, _large(True))
    for name, value in _large(False).items():
        assert torch.equal(state[name], value), name
    return told


def test_an_interrupt_lets_no_other_hang(recording: Recording) -> None:
    for told in run_ranks(2, _interrupted, timeout=40):
        kinds = {name: {rank: kind for rank, (kind, _) in failures.items()} for name, failures in told.items()}
        assert kinds.pop("twice")[0] == "KeyboardInterrupt"  # the other may have got all it needs by then
        assert kinds == {
            "metadata0": {0: "KeyboardInterrupt", 1: "PeerReadError"},
            "metadata1": {1: "KeyboardInterrupt"},
            "data0": {0: "KeyboardInterrupt", 1: "PeerReadError"},
            "data1": {0: "PeerReadError", 1: "KeyboardInterrupt"},
        }


def _unprepared() -> list[dict[int, tuple[str, str]]]:
    url = f"{RUN}/good"
    dcp.save(_large(False), storage_writer=S3StorageWriter(url, settings=SMALL))
    told = []
    for place in ("reader.open_store", "peers.exchange.Workers"):
        with _on_rank(1, mock.patch(f"dcp_s3.load.{place}", _raising(RuntimeError(place)))):
            told.append(_failing(url)[0])
    return told


def test_a_rank_that_can_not_begin_its_exchange_lets_no_other_hang(recording: Recording) -> None:
    for told in run_ranks(2, _unprepared, timeout=40):
        assert told == [{1: ("RuntimeError", place)} for place in ("reader.open_store", "peers.exchange.Workers")]


def _cancelled() -> dict[int, tuple[str, str]]:
    """Rank 1 fails with what it reads alone, and what it fetches for both is cancelled because of that."""
    url = f"{RUN}/both"
    mesh = init_device_mesh("cpu", (2,))
    own = _place(_full(20, 400, 300), mesh, Shard(0))
    dcp.save({**_large(False), "own": own}, storage_writer=S3StorageWriter(url, settings=SMALL))
    fetching, failed = threading.Event(), threading.Event()
    fail = Exchange._fail

    def fetch(*_: Any) -> Any:
        assert fetching.wait(10)
        raise ValueError("the cause")

    def fetch_alone(engine: Engine, *_: Any) -> None:
        fetching.set()
        assert engine._source._cancel.wait(10)
        raise Cancelled

    def note(exchange: Exchange, failure: Any) -> None:
        fail(exchange, failure)
        failed.set()

    class Slow(Workers):
        """The requests that are still under way when the first has failed take a while."""

        def close(self) -> None:
            assert failed.wait(10)
            super().close()

    with contextlib.ExitStack() as stack:
        for patch in (
            mock.patch.object(Engine, "_carry_out", fetch), mock.patch.object(Engine, "fetch_alone", fetch_alone),
            mock.patch.object(Exchange, "_fail", note), mock.patch("dcp_s3.load.engine.Workers", Slow),
        ):  # fmt: skip
            stack.enter_context(_on_rank(1, patch))
        try:
            _load(url, {**_large(True), "own": _place(torch.zeros(400, 300), mesh, Shard(0))})
        except CheckpointException as error:
            return {rank: (type(cause).__name__, str(cause)) for rank, (cause, _) in error.failures.items()}
    return {}


def test_what_is_cancelled_is_not_the_cause(recording: Recording) -> None:
    for failures in run_ranks(2, _cancelled, timeout=40):
        assert failures[1] == ("ValueError", "the cause")
        assert failures[0][0] == "PeerReadError"
        assert "ValueError: the cause" in failures[0][1]


def _die(_: OwnedPiece) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _killed(folder: Path) -> None:
    dcp.save(_large(False), storage_writer=S3StorageWriter(f"{RUN}/good", settings=SMALL))
    with _on_rank(2, mock.patch.object(OwnedPiece, "fetch", _die)):
        try:
            _load(f"{RUN}/good", _large(True))
        except BaseException as error:  # noqa: BLE001 - CheckpointException is none, nor what gloo raises a subclass
            (folder / str(dist.get_rank())).write_text(repr(error))


def test_a_rank_that_is_killed_lets_no_other_hang(recording: Recording, tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="exit code -9"):
        run_ranks(3, _killed, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


def _timed_out() -> list[tuple[dict[int, tuple[str, str]], float]]:
    for name in ("slow", "good"):
        dcp.save(_large(False), storage_writer=S3StorageWriter(f"{RUN}/{name}", settings=SMALL))
    told = [_failing(f"{RUN}/slow", load_timeout=1.5)]
    dist.barrier()
    state = _load(f"{RUN}/good", _large(True))  # the group is as good as new
    for name, value in _large(False).items():
        assert torch.equal(state[name], value), name
    return told


def test_a_load_ends_at_its_deadline_on_all_ranks(recording: Recording) -> None:
    released = threading.Event()
    record = recording.rule

    def rule(request: Any) -> Fault | None:
        if request.operation == "GetObject" and request.key.startswith("slow/__1_"):
            released.wait(30)
            return Fault.reset()
        return record(request)

    recording.rule = rule
    outcome = run_ranks(3, _timed_out)
    released.set()
    for ((failures, _),) in outcome:
        assert set(failures) == {0, 1, 2}
        kinds = {kind for kind, _ in failures.values()}
        assert "DeadlineExceededError" in kinds
        assert kinds <= {"DeadlineExceededError", "PeerReadError"}
        assert all("DCP_S3_LOAD_TIMEOUT = 1.5 s" in message for _, message in failures.values())


def test_without_gloo_every_rank_reads_by_itself(caplog: pytest.LogCaptureFixture) -> None:
    caller = Caller(mock.Mock(), 0, 2, True)
    with (
        mock.patch.object(dist, "get_backend_config", return_value="cuda:nccl"),
        caplog.at_level(logging.INFO, "dcp_s3.load.peers.agree"),
    ):
        assert join_load(caller, f"{RUN}/x", Settings(), willing=True) is None
    assert 'init_process_group("cpu:gloo,cuda:nccl")' in caplog.text


# --- the group that a reader is given ------------------------------------------------------------------


def _given() -> dict[str, Any]:
    """For each way: whether data is shared; None: not even the metadata."""
    url = f"{RUN}/good"
    dcp.save(_large(False), storage_writer=S3StorageWriter(url, settings=SMALL))
    group, alone = dist.new_group([0, 1]), [dist.new_group([rank]) for rank in (0, 1)][dist.get_rank()]
    found: dict[str, Any] = {}

    def load(name: str, reader: S3StorageReader, **arguments: Any) -> None:
        state = _large(True)
        dcp.load(state, storage_reader=reader, **arguments)
        found[name] = None if reader._group is None else reader._group.shares_data
        assert reader._group is None or reader._group.group is (reader._process_group or dist.group.WORLD)
        for key, value in _large(False).items():
            assert torch.equal(state[key], value), key

    load("none", S3StorageReader(url))
    load("given", S3StorageReader(url, process_group=group))
    load("given to both", S3StorageReader(url, process_group=group), process_group=group)
    load("no_dist", S3StorageReader(url, process_group=group), no_dist=True)
    with (
        mock.patch("dcp_s3.load.reader.find_load_group", return_value=None),
        mock.patch("dcp_s3.load.reader.is_first_look", return_value=False),
    ):
        load("hidden", S3StorageReader(url, process_group=group))
        load("hidden, none", S3StorageReader(url))
        if dist.get_rank() == 0:  # no load: nobody else takes part
            S3StorageReader(url, process_group=group).read_metadata()
    try:
        dcp.load(_large(True), storage_reader=S3StorageReader(url, process_group=alone))
    except CheckpointException as error:
        found["another"] = {type(cause).__name__ for cause, _ in error.failures.values()}
    return found


def test_a_reader_takes_the_group_that_it_is_given(recording: Recording) -> None:
    for found in run_ranks(2, _given, timeout=60):
        assert found == {
            "none": True, "given": True, "given to both": True, "no_dist": None, "hidden": False, "hidden, none": None,
            "another": {"SettingsError"},
        }  # fmt: skip
