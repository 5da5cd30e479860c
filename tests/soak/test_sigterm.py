"""A training gets SIGTERM, and SIGKILL when the grace period is over: the newest step is there, or nothing new.

Real processes and signals. DCP_S3_TEST_SIGTERMS says how many times (20), DCP_S3_TEST_SEED the first seed (0).
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from dcp_s3 import CheckpointManager, latest, list_checkpoints
from tests.end_to_end.states import assert_same, blank
from tests.faulty import FaultyServer
from tests.killing import kill_all, new_process, read_lines, running, wait_until
from tests.memory_s3 import Fault
from tests.soak.workers import ROOT, Training, make_whole_state, train_for_ever

pytestmark = [
    pytest.mark.counted,
    pytest.mark.soak,
    pytest.mark.skipif(sys.platform != "linux", reason="relies on Linux's signals"),
]

SIGTERMS = int(os.environ.get("DCP_S3_TEST_SIGTERMS", "20"))
FIRST_SEED = int(os.environ.get("DCP_S3_TEST_SEED", "0"))
_MEETINGS = (("collectives", True), ("s3", True), ("s3", False))
_GRACE = 50.0  # this machine may be slow to end a process
_GRACE_DOWN = 6.0


@pytest.mark.parametrize("seed", range(FIRST_SEED, FIRST_SEED + SIGTERMS))
def test_after_sigterm_the_newest_step_is_there_or_nothing_new(faulty: FaultyServer, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    coordination, group = _MEETINGS[seed % len(_MEETINGS)]
    down = rng.random() < 0.2
    for life in range(2):  # the second one goes on from what the first one left
        every, step_seconds = rng.randint(3, 12), rng.uniform(0.01, 0.1)
        (tmp_path / str(life)).mkdir()
        trainings = [
            Training(
                directory=tmp_path / str(life), environment={**os.environ, "DCP_S3_RUN_ID": f"run-{seed}-{life}"},
                rank=rank, world_size=2, coordination=coordination, group=group, every=every, step_seconds=step_seconds,
            )
            for rank in range(2)
        ]  # fmt: skip
        with CheckpointManager(ROOT) as manager:  # commits what was decided, though S3 refused its `.metadata`
            before = manager.restore(blank(make_whole_state(trainings[0], 0))) or 0
        codes, told, kept = _preempt(faulty, trainings, rng, down=down)
        _check(trainings, codes, told, before, kept, down=down)


def _preempt(
    server: FaultyServer, trainings: Sequence[Training], rng: random.Random, *, down: bool
) -> tuple[list[int], list[int], int]:
    """Let the ranks train, send SIGTERM to some of them, and SIGKILL to all when the time is over. Exit statuses, who
    got SIGTERM, and the newest step right before that."""
    # With the fault of a whole window: whatever the last save has to write of its checkpoint.
    failing = rng.choice(["/.metadata", "", "manifest-"])
    with running([new_process(train_for_ever, training) for training in trainings]) as processes:
        wait_until(lambda: all(len(read_lines(training.report)) > 3 for training in trainings), processes)
        time.sleep(rng.uniform(0, 1.5))  # any instant will do
        fault = None
        if down:
            fault = Fault.error(503, "SlowDown")
        elif rng.random() < 0.5:
            fault, failing = Fault.delay(rng.uniform(0.05, 0.5)), ""
        server.rule = lambda request: fault if request.operation.startswith("Put") and failing in request.key else None
        newest = latest(ROOT)
        told = rng.sample(range(len(processes)), rng.randint(1, len(processes)))
        for rank in told:
            os.kill(processes[rank].pid, signal.SIGTERM)
        until = time.monotonic() + (_GRACE_DOWN if down else _GRACE)
        for process in processes:
            process.join(max(0.0, until - time.monotonic()))
        kill_all(processes)
        codes = [process.exitcode for process in processes]
    server.rule = lambda _: None
    return codes, told, 0 if newest is None else newest.step or 0


def _check(
    trainings: Sequence[Training], codes: Sequence[int], preempted: Sequence[int], before: int, kept: int, *, down: bool
) -> None:
    lines = [[line.split() for line in read_lines(training.report)] for training in trainings]
    told = [f"rank {rank}: {' '.join(found[-1])}, exit status {codes[rank]}" for rank, found in enumerate(lines)]
    assert {int(found[0][1]) for found in lines} == {before}, told
    # With S3 down the last save fails, or a rank that cannot tell the others ends with that error.
    assert {codes[rank] for rank in preempted} <= ({0, 1, 143, -signal.SIGKILL} if down else {0}), told
    last = [max(int(words[1]) for words in found if words[0] == "step") for found in lines]
    begun = {int(words[1]) for words in lines[0] if words[0] == "began"} | {last[0]}
    newest = latest(ROOT)
    step = 0 if newest is None else newest.step or 0
    if not down:  # otherwise a rank without SIGTERM may wait for S3, or miss the other one in the next collective
        assert set(codes) == {0}, told
    if 0 in codes:
        assert set(last) == {step}, (step, told)
    else:
        # S3 was down. What had begun may have been committed before, or all the same with its answer lost.
        assert step in {before, *begun}, (step, told)
        assert step >= kept, (step, told)
    if newest is not None:
        # Without collectives a save may be decided whose `.metadata` S3 refused: who restores finishes it.
        decided = {each for each in begun if each > step} if down and 0 not in codes else set()
        found = blank(make_whole_state(trainings[0], 0))
        with CheckpointManager(ROOT) as manager:
            restored = manager.restore(found)
        assert restored in {step, *decided}
        assert_same(found, make_whole_state(trainings[0], restored))
        assert all(info.damage is None for info in list_checkpoints(ROOT) if info.committed)
