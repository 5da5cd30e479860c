"""Loads of several ranks that share reads, when one of them fails, is interrupted, killed or too late.

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

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadPlan

from dcp_s3 import errors
from dcp_s3.load.messages import PAYLOAD, Messages
from dcp_s3.load.pieces import Piece
from tests.faulty import BUCKET, FaultyServer
from tests.interrupting import Interrupts
from tests.load.sources import RUN, assert_large, large_state, load_into, save
from tests.memory_s3 import Fault
from tests.ranks import RankFailed, run_ranks

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("faulty")]

Failures = dict[int, tuple[str, str]]
"""Kind and text of the error, by rank."""


# --- failures ------------------------------------------------------------------------------------------


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
