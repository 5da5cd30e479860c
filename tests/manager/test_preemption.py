"""SIGTERM on any rank: all save the same step and end with status 0, or nothing new is there and they end with 143."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dcp_s3
from dcp_s3 import CheckpointManager, SaveEvery, errors
from dcp_s3.coordination.board import Board, GroupBoard, StoredBoard
from dcp_s3.coordination.identity import Attempt
from dcp_s3.manager import preemption
from dcp_s3.manager.preemption import MeetingTelling, NoteTelling, Preemption, SignalPipe, Telling, steps_ahead
from dcp_s3.manager.ranks import Ranks
from dcp_s3.manager.saving import Saving
from dcp_s3.settings import Settings
from dcp_s3.url import parse_url
from tests.faulty import BUCKET, serve
from tests.killing import begin, new_process, running
from tests.manager.making import blank, is_of, state
from tests.memory_s3 import Fault
from tests.memory_store import MemoryStore
from tests.ranks import run_ranks


def _terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def _train(
    manager: CheckpointManager, *, at: int, last: int = 1000, boundary: Callable[[int], object] | None = None
) -> Any:
    """Train until the process would end. Returns its exit status, and how many steps were trained."""
    step = 0
    try:
        for step in range(1, last + 1):
            if step == at:
                _terminate()
            if boundary is not None:
                boundary(step)
            manager.save(step, state(step))
    except SystemExit as ended:
        return ended.code, step
    return None, step


# --- one process ---------------------------------------------------------------------------------


@pytest.mark.parametrize("coordination", ["collectives", "s3"])
@pytest.mark.servers("memory")
def test_a_process_saves_the_step_at_which_it_is_and_ends(memory_server: Any, root: str, coordination: Any) -> None:
    before = signal.getsignal(signal.SIGTERM)
    manager = CheckpointManager(
        root, coordination=coordination, should_save=SaveEvery(steps=10), save_on_sigterm=True
    )  # fmt: skip
    assert signal.getsignal(signal.SIGTERM) != before
    assert _train(manager, at=15) == (0, 15)
    assert signal.getsignal(signal.SIGTERM) == before
    assert [info.step for info in dcp_s3.list_checkpoints(root)] == [10, 15]
    with pytest.raises(errors.CheckpointError, match="closed"):
        manager.save(16, state(16))
    with CheckpointManager(root) as again:
        loaded = blank()
        assert again.restore(loaded) == 15
        assert is_of(loaded, 15)


@pytest.mark.servers("memory")
def test_should_save_says_that_the_step_is_the_last_one(memory_server: Any, root: str) -> None:
    with CheckpointManager(root, should_save=SaveEvery(steps=10), save_on_sigterm=True) as manager:
        assert not manager.should_save(1)
        _terminate()
        assert manager.should_save(2)
        assert manager.should_save(2)
        with pytest.raises(SystemExit) as ended:
            manager.save(2, state(2))
    assert ended.value.code == 0


@pytest.mark.servers("memory")
def test_without_a_signal_nothing_is_different(memory_server: Any, root: str) -> None:
    with CheckpointManager(root, should_save=SaveEvery(steps=2), save_on_sigterm=True) as manager:
        assert _train(manager, at=0, last=5) == (None, 5)
    assert [info.step for info in dcp_s3.list_checkpoints(root)] == [2, 4]


@pytest.mark.parametrize("fault", [Fault.error(403, "AccessDenied"), Fault.error(503, "SlowDown")], ids=["no", "late"])
def test_a_step_that_is_not_committed_in_time_is_not_there(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fault: Fault
) -> None:
    root = f"s3://{BUCKET}/run"
    with serve(monkeypatch) as server:
        manager = CheckpointManager(root, should_save=SaveEvery(steps=10), save_on_sigterm=True, grace=2.0)

        def fail(step: int) -> None:
            if step == 15:
                manager.wait()
                server.rule = lambda request: fault if request.key.endswith("15/.metadata") else None

        assert _train(manager, at=15, boundary=fail) == (143, 15)
        server.rule = lambda _: None
        assert "step 15 was not committed within grace = 2 s" in caplog.text
        assert "Remedy" in caplog.text
        found = dcp_s3.latest(root)
        assert found is not None
        assert found.step == 10
        assert not [key for key in server.s3.objects(BUCKET) if "15/__" in key], "half a checkpoint is left"


@pytest.mark.servers("memory")
def test_an_earlier_save_that_failed_does_not_keep_the_last_one_from_being_saved(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    root = f"s3://{BUCKET}/run"
    with serve(monkeypatch) as server:
        denied = Fault.error(403, "AccessDenied")
        server.rule = lambda request: denied if request.key.endswith("10/.metadata") else None
        manager = CheckpointManager(root, should_save=SaveEvery(steps=10), save_on_sigterm=True)
        assert _train(manager, at=11) == (0, 11)
        assert [info.step for info in dcp_s3.list_checkpoints(root) if info.committed] == [11]


@pytest.mark.servers("memory")
def test_it_needs_the_main_thread_and_a_grace_period(memory_server: Any, root: str) -> None:
    found: list[BaseException] = []

    def make() -> None:
        try:
            CheckpointManager(root, save_on_sigterm=True)
        except errors.SettingsError as error:
            found.append(error)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    assert "main thread" in str(found[0])
    with pytest.raises(errors.SettingsError, match="grace"):
        CheckpointManager(root, save_on_sigterm=True, grace=-1.0)


# --- the end of the grace period -----------------------------------------------------------------


class _Told(Telling):
    """Says at once that SIGTERM has come."""

    came_at = None

    def is_due(self, step: int) -> bool:
        return True

    def close(self, *, committed: bool = False) -> None:
        pass


def _hang(output: Path, environment: dict[str, str], committed: bool) -> None:
    begin(environment, output)
    last = Preemption(_Told(), 1.0, is_first=True)
    for_ever = threading.Event()

    def hang() -> None:
        for_ever.wait(600)

    last.is_due(7)
    last.end(7, Saving(0), (lambda: None) if committed else hang, hang)


def _terminate_me() -> None:
    # To this thread, as the kernel may choose: it does not wake the main one.
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)


def _hang_in_a_step(output: Path, environment: dict[str, str], _: bool) -> None:
    begin(environment, output)
    watching = MeetingTelling(Ranks(None))
    last = Preemption(watching, 1.0, is_first=True)
    last.is_due(7)
    other = threading.Thread(target=_terminate_me)
    other.start()
    # Like a collective of the training, or a save to which S3 does not answer. No handler of Python runs meanwhile.
    ctypes.CDLL(None).sleep(60)


def test_a_training_that_hangs_ends_when_the_time_is_over(tmp_path: Path) -> None:
    output = tmp_path / "output"
    with running([new_process(_hang_in_a_step, output, dict(os.environ), False)]) as [process]:
        process.join(60)
        assert process.exitcode == 143
    assert "step 7 was not committed within grace = 1 s" in output.read_text()


def test_a_forked_process_keeps_its_signals_for_itself() -> None:
    pipe = SignalPipe()
    try:
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGTERM, lambda *_: None)
            _terminate()
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        pipe.wait(0.2)
        assert pipe.came_at is None
    finally:
        pipe.close()
    assert signal.set_wakeup_fd(-1) == -1


def test_somebody_elses_pipe_stays() -> None:
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    signal.set_wakeup_fd(writes)
    try:
        SignalPipe().close()
    finally:
        assert signal.set_wakeup_fd(-1) == writes
        os.close(reads)
        os.close(writes)


@pytest.mark.parametrize(("committed", "status"), [(False, 143), (True, 0)])
def test_a_rank_that_waits_for_a_dead_one_ends_when_the_time_is_over(
    tmp_path: Path, committed: bool, status: int
) -> None:
    output = tmp_path / "output"
    with running([new_process(_hang, output, dict(os.environ), committed)]) as [process]:
        process.join(60)
        assert process.exitcode == status
    assert ("the time is over" in output.read_text()) == (not committed)


class _Stuck(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        threading.Event().wait(600)


def _hang_with_a_log(output: Path, environment: dict[str, str], stuck: bool) -> None:
    begin(environment, output)
    if stuck:
        logging.getLogger("dcp_s3").addHandler(_Stuck())
    else:
        sys.stdout.close()
    last = Preemption(_Told(), 1.0, is_first=False)
    last.is_due(7)
    last.end(7, Saving(1), lambda: threading.Event().wait(600), lambda: None)


@pytest.mark.parametrize("stuck", [False, True], ids=["stdout is closed", "the log is stuck"])
def test_what_cannot_be_written_does_not_keep_the_process_from_ending(tmp_path: Path, stuck: bool) -> None:
    with running([new_process(_hang_with_a_log, tmp_path / "output", dict(os.environ), stuck)]) as [process]:
        process.join(60)
        assert process.exitcode == 143


def test_the_last_save_is_bounded_by_what_is_left() -> None:
    last = Preemption(_Told(), 30.0, is_first=True)
    settings = Settings(save_timeout=600)
    assert last.bound(settings) is settings
    seen: list[float | None] = []
    with pytest.raises(SystemExit):
        last.end(1, Saving(0), lambda: seen.append(last.bound(settings).save_timeout), lambda: None)
    assert seen[0] is not None
    assert 0 < seen[0] <= 25
    assert last.bound(Settings(save_timeout=3)).save_timeout == 3


# --- notes on S3 ---------------------------------------------------------------------------------


@pytest.mark.parametrize("nearby", [False, True])
def test_a_note_names_a_step_that_no_rank_has_done(monkeypatch: pytest.MonkeyPatch, nearby: bool) -> None:
    monkeypatch.setattr(preemption, "_MARGIN", 0.0)
    clock = [0.0]
    store, attempt = MemoryStore(), Attempt("run", (), "", None, 3, 0)
    shared = dist.HashStore()
    boards: list[Board] = [
        GroupBoard(shared, attempt) if nearby else StoredBoard(store, parse_url("s3://bucket/run"), attempt)
        for _ in range(3)
    ]
    ranks = [NoteTelling(board, 0.01, now=lambda: clock[0]) for board in boards]
    try:
        for step in range(1, 4):
            clock[0] += 0.5
            assert [each.is_due(step) for each in ranks] == [False] * 3
        ranks[1]._watch.seen = True
        clock[0] += 0.5
        assert not ranks[1].is_due(4)
        assert boards[0].look(NoteTelling.KEY) == "7", "a rank may be 1 s ahead"
        ranks[2]._watch.seen = True
        assert not ranks[2].is_due(4), "a second signal says the same"
        deadline = time.monotonic() + 30
        while not nearby and ranks[0]._stop is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        for step in (5, 6):
            assert [each.is_due(step) for each in ranks] == [False] * 3
        assert [each.is_due(7) for each in ranks] == [True] * 3
    finally:
        for each in reversed(ranks):
            each.close(committed=True)
    assert not store.list("").objects
    assert boards[0].look(NoteTelling.KEY) is None


def test_how_far_a_rank_may_be_ahead() -> None:
    assert [steps_ahead(seconds) for seconds in (0.0, 0.01, 0.1, 0.3, 0.5, 1.0, 1.9, 2.0, 60.0)] == [
        11, 11, 11, 5, 3, 2, 2, 1, 1,
    ]  # fmt: skip


def test_a_board_that_does_not_answer_is_tried_again_before_the_rank_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Down(MemoryStore):
        lost = 3

        def put(self, *args: Any, **kwargs: Any) -> Any:
            written = super().put(*args, **kwargs)
            if self.lost:
                self.lost -= 1
                raise errors.TransferError("the answer is lost")
            return written

        def get(self, key: str) -> Any:
            if 0 < self.lost < 3:
                self.lost -= 1
                raise errors.TransferError("it does not answer")
            return super().get(key)

    store = Down()
    monkeypatch.setattr(preemption, "_MARGIN", 0.0)
    telling = NoteTelling(StoredBoard(store, parse_url("s3://bucket/run"), Attempt("run", (), "", None, 2, 0)), 0.01)
    telling._closed.set()  # the thread that looks would find it, too
    assert telling._thread is not None
    telling._thread.join()
    telling._closed.clear()
    try:
        telling._watch.seen = True
        assert not telling.is_due(1), "a margin needs a step's time"
        assert not telling.is_due(2)
        assert store.lost == 0
        assert [record.levelname for record in caplog.records if "could not be told yet" in record.message] == [
            "WARNING"
        ]
        assert telling._stop == 2 + steps_ahead(0.0), "the step that it said first"
    finally:
        telling.close()


# --- ranks ---------------------------------------------------------------------------------------


def _ranks_train(root: str, coordination: Any, who: int) -> tuple[Any, int]:
    manager = CheckpointManager(
        root, coordination=coordination, should_save=SaveEvery(steps=1000), save_on_sigterm=True, grace=60.0
    )  # fmt: skip
    at = 5 if dist.get_rank() == who else 0
    return _train(manager, at=at, boundary=lambda _: dist.all_reduce(torch.zeros(1)))


@pytest.mark.parametrize("coordination", ["collectives", "s3"])
@pytest.mark.servers("memory")
def test_a_signal_on_one_rank_ends_all_at_the_same_step(memory_server: Any, root: str, coordination: Any) -> None:
    first, second = run_ranks(2, _ranks_train, root, coordination, 1)
    assert first == second
    assert first[0] == 0
    found = dcp_s3.latest(root)
    assert found is not None
    assert found.step == first[1] >= 5
    assert found.world_size == 2


def _train_without_group(root: str, meeting: str) -> tuple[Any, int]:
    rank = int(os.environ["RANK"])
    store = dist.FileStore(meeting, 2)
    store.set_timeout(timedelta(seconds=60))

    def meet(step: int) -> None:
        """What a step of ranks in lockstep has."""
        time.sleep(0.2)
        store.set(f"{step}-{rank}", "1")
        store.wait([f"{step}-{1 - rank}"])

    manager = CheckpointManager(
        root, coordination="s3", should_save=SaveEvery(steps=1000), save_on_sigterm=True, grace=60.0
    )  # fmt: skip
    return _train(manager, at=3 if rank == 0 else 0, boundary=meet)


@pytest.mark.servers("memory")
def test_ranks_without_a_group_are_told_through_s3(memory_server: Any, root: str, tmp_path: Path) -> None:
    found = run_ranks(
        2, _train_without_group, root, str(tmp_path / "meeting"), env={"DCP_S3_RUN_ID": "mine"}, group=False
    )  # fmt: skip
    assert found[0] == found[1]
    assert found[0][0] == 0
    newest = dcp_s3.latest(root)
    assert newest is not None
    assert newest.step == found[0][1] > 3
    assert not [key for key in memory_server.handle.objects(parse_url(root).bucket) if "board" in key]
