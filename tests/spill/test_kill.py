"""Training is killed in the middle of saves, with an S3 that is barely there: what was reported durable is not lost.

Real processes and SIGKILL. DCP_S3_TEST_KILLS says how many kill points there are (9), DCP_S3_TEST_SEED which (0).
Each has a number, which is in the name of its test: ``DCP_S3_TEST_SEED=17 DCP_S3_TEST_KILLS=1`` repeats number 17, as
far as processes and sockets repeat at all.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from dcp_s3 import S3StorageReader, list_checkpoints
from tests.end_to_end.states import assert_same, blank
from tests.faulty import BUCKET, FaultyServer, serve
from tests.killing import AtRequest, kill_all, new_process, read_lines, running, wait_until_quiet
from tests.memory_s3 import Fault
from tests.spill import kill_worker
from tests.spill.kill_worker import Job, make_state

pytestmark = [
    pytest.mark.counted,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
]

ROOT = f"s3://{BUCKET}/run"
KILLS = int(os.environ.get("DCP_S3_TEST_KILLS", "9"))
KEEP = bool(os.environ.get("DCP_S3_TEST_KEEP"))  # what the processes of a kill point that passed have written
FIRST_SEED = int(os.environ.get("DCP_S3_TEST_SEED", "0"))

_START_SECONDS = 60.0
_DRAIN_SECONDS = 60.0
_SURVIVOR_SECONDS = 10.0
_PHASE_SECONDS = (0.1, 1.0)
_LONGEST_LIFE = 3.0

_OPERATIONS = (
    "CreateMultipartUpload", "UploadPart", "UploadPart", "CompleteMultipartUpload", "PutObject", "PutObject",
    "ListMultipartUploads", "ListParts", "ListObjectsV2", "HeadObject", "DeleteObjects", "AbortMultipartUpload",
)  # fmt: skip


@dataclass(frozen=True)
class Scene:
    """Who trains, and who is killed.

    Attributes:
        ranks: processes that train.
        shared: whether they share one spill directory.
        victims: the ranks that are killed; None for all.
        drains: processes that only drain, killed one after the other, before the last one.
        beside: whether a process that only drains runs beside the training, and dies with it.
        lives: how often training is started and killed before the drain.
    """

    ranks: int = 1
    shared: bool = False
    victims: tuple[int, ...] | None = None
    drains: int = 0
    beside: bool = False
    lives: int = 1


SCENES = {
    "one_rank": Scene(),
    "two_ranks": Scene(ranks=2),
    "two_ranks_that_share_a_directory": Scene(ranks=2, shared=True),
    "one_of_two_ranks": Scene(ranks=2, victims=(1,)),
    "a_drain": Scene(drains=3),
    "the_coordinator_of_two_ranks": Scene(ranks=2, victims=(0,)),
    "training_beside_a_drain": Scene(beside=True),
    "training_again_and_again": Scene(lives=3),
    "two_ranks_and_their_drain": Scene(ranks=2, drains=2),
}


def _kill_points() -> list[Any]:
    names = list(SCENES)
    points = [(names[seed % len(names)], seed) for seed in range(FIRST_SEED, FIRST_SEED + KILLS)]
    return [pytest.param(name, seed, id=f"{name}-seed{seed}") for name, seed in points]


@pytest.mark.quick("one_rank-seed0", "one_of_two_ranks-seed3", "a_drain-seed4")
@pytest.mark.skipif(sys.platform != "linux", reason="relies on Linux's signals and file locks")
@pytest.mark.parametrize(("scene", "seed"), _kill_points())
def test_what_was_durable_is_there_after_a_kill_of(
    scene: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_kill_point(SCENES[scene], seed, tmp_path, monkeypatch)
    if not KEEP:
        shutil.rmtree(tmp_path, ignore_errors=True)


def run_kill_point(scene: Scene, seed: int, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Train, kill, drain, look.

    Raises:
        AssertionError: with the seed, and where the output of the processes is.
    """
    for name, value in {
        "DCP_S3_PART_SIZE": "5MiB",
        "DCP_S3_RETRY_ATTEMPTS": "2",
        "DCP_S3_CONCURRENCY": "4",
        "DCP_S3_READ_TIMEOUT": "5s",
        "GLOO_SOCKET_IFNAME": "lo",
        "MASTER_ADDR": "127.0.0.1",
    }.items():
        monkeypatch.setenv(name, value)
    with serve(monkeypatch) as server:
        point = KillPoint(scene, seed, directory, server)
        try:
            point.run()
        except BaseException as error:
            text = f"seed {seed}, {scene}, killed {point.how}; the output of the processes is in {directory}"
            if hasattr(error, "add_note"):
                error.add_note(text)
            print(text)
            raise


class KillPoint:
    """One kill (or several in a row), and what is left of it."""

    def __init__(self, scene: Scene, seed: int, directory: Path, server: FaultyServer) -> None:
        self.scene = scene
        self.seed = seed
        self.how: list[str] = []
        self._rng = random.Random(seed)
        self._directory = directory
        self._server = server
        self._jobs: list[Job] = []
        self._bereaved: set[int] = set()  # lives in which a rank may have seen the end of another
        names = ["shared"] * scene.ranks if scene.shared else [f"rank-{rank}" for rank in range(scene.ranks)]
        self._spill = [directory / "spill" / name for name in names]
        self._environment = {**os.environ, "DCP_S3_SPILL_AFTER": self._rng.choice(["0.5s", "1s"])}

    def run(self) -> None:
        """All of it.

        Raises:
            AssertionError: something is lost, or left.
        """
        with Weather(self._server, self._rng.random()):
            for life in range(self.scene.lives):
                self._train_and_kill(life)
            for number in range(self.scene.drains):
                self._drain_and_kill(self.scene.lives + number)
        wait_until_quiet(self._server)
        self._drain_all()
        self._check()

    # --- what happens ---------------------------------------------------------------------------------

    def _train_and_kill(self, life: int) -> None:
        change = self._rng.randint(1, 150) if self._rng.random() < 0.4 else None
        doomed = self._rng.choice(self.scene.victims or range(self.scene.ranks))
        jobs = [
            Job(
                self.seed, ROOT, self._directory,
                {**self._environment, "DCP_S3_SPILL_DIR": str(self._spill[rank])},
                rank, self.scene.ranks, life, change if rank == doomed else None,
            )
            for rank in range(self.scene.ranks)
        ]  # fmt: skip
        self._jobs += jobs
        if self.scene.victims or (change is not None and self.scene.ranks > 1):
            self._bereaved.add(life)
        trainings = [new_process(kill_worker.train, job) for job in jobs]
        drains = [new_process(kill_worker.drain, self._drain_job(life), self._spill, forever=True)] * self.scene.beside
        with running([*trainings, *drains]):
            deadline = time.monotonic() + _START_SECONDS
            while not all(map(_has_begun, jobs)) and all(process.exitcode is None for process in trainings):
                assert time.monotonic() < deadline, "training did not start"
                time.sleep(0.01)
            victims = [trainings[rank] for rank in self.scene.victims or range(self.scene.ranks)]
            self._kill_some_time([*victims, *drains], change)
            if self.scene.victims:
                for process in trainings:
                    process.join(_SURVIVOR_SECONDS)
            codes = [process.exitcode for process in [*victims, *drains]]
        assert life in self._bereaved or set(codes) == {-signal.SIGKILL}, f"ended by itself: exit codes {codes}"

    def _drain_and_kill(self, life: int) -> None:
        change = self._rng.randint(1, 30) if self._rng.random() < 0.5 else None
        with running([new_process(kill_worker.drain, self._drain_job(life, change), self._spill)]) as processes:
            self._kill_some_time(processes, change)
            assert processes[0].exitcode in (0, -signal.SIGKILL), "the drain failed"

    def _drain_job(self, life: int, change: int | None = None) -> Job:
        # The directory's parent: that of each rank is below it.
        environment = {**self._environment, "DCP_S3_SPILL_DIR": str(self._directory / "spill")}
        return Job(
            self.seed, ROOT, self._directory, environment, rank=self.scene.ranks, life=life, die_at_change=change
        )  # fmt: skip

    def _kill_some_time(self, victims: Sequence[Any], change: int | None) -> None:
        """Kill at a moment, at a request, or when one kills itself in its spill directory."""
        seconds = self._rng.uniform(0, _LONGEST_LIFE)
        at_request = None
        if change is not None:
            self.how.append(f"at change {change} of the directory")
            seconds = _LONGEST_LIFE
        elif self._rng.random() < 0.6:
            operation, count = self._rng.choice(_OPERATIONS), self._rng.randint(1, 5)
            at_request = AtRequest(operation, count, applied=self._rng.random() < 0.6)
            self.how.append(f"at {at_request}")
            seconds = _LONGEST_LIFE
        else:
            self.how.append(f"after {seconds:.2f} s")
        deadline = time.monotonic() + seconds
        with at_request.on(self._server) if at_request else contextlib.nullcontext():
            while time.monotonic() < deadline and all(process.exitcode is None for process in victims):
                if at_request and at_request.reached.wait(0.005):
                    break
                time.sleep(0.002)
            kill_all(victims)

    def _drain_all(self) -> None:
        job = self._drain_job(life=100)
        with running([new_process(kill_worker.drain, job, sorted(set(self._spill)))]) as (process,):
            process.join(_DRAIN_SECONDS)
            assert process.exitcode is not None, "the last drain does not end"
            assert process.exitcode == 0, "the last drain failed"
        assert json.loads(job.report.read_text())["refused"] == []

    # --- what is left ---------------------------------------------------------------------------------

    def _check(self) -> None:
        problems = self._failed_saves()
        found = list_checkpoints(ROOT)
        committed = {info.name for info in found if info.committed}
        lost = {f"step-{step}" for step in self._durable_steps()} - committed
        problems += [f"{name} was reported durable, but is not committed" for name in sorted(lost)]
        for name in sorted(committed):
            expected = make_state(self.seed, int(name.removeprefix("step-")), self.scene.ranks)
            loaded = blank(expected)
            try:
                dcp.load(loaded, storage_reader=S3StorageReader(f"{ROOT}/{name}"), no_dist=True)
                assert_same(loaded, expected, name)
            except (CheckpointException, AssertionError) as error:
                problems.append(f"{name} is committed, but not whole: {error!r}")
        visible = {key.split("/")[1] for key in self._server.s3.objects(BUCKET) if key.endswith(".metadata")}
        problems += [f"{name} is visible, but not listed" for name in sorted(visible - committed)]
        problems += [f"a multipart upload of {key} is open" for key in self._server.s3.open_uploads(BUCKET)]
        for directory in set(self._spill):
            left = [*(directory / "saves").glob("*"), *(directory / "refused").glob("*")]
            problems += [f"{path} is left" for path in left]
        assert not problems, "\n".join(problems)

    def _durable_steps(self) -> set[int]:
        """Steps that every rank reported."""
        said = Counter(
            int(line.split()[1]) for job in self._jobs for line in read_lines(job.report) if " durable " in line
        )
        return {step for step, ranks in said.items() if ranks == self.scene.ranks}

    def _failed_saves(self) -> list[str]:
        """No save may fail, unless a rank was left without the others."""
        return [
            f"a save failed on rank {job.rank}: {line}"
            for job in self._jobs
            for line in read_lines(job.report)
            if " failed " in line and job.life not in self._bereaved
        ]


def _has_begun(job: Job) -> bool:
    return bool(read_lines(job.report))


# --- the server ---------------------------------------------------------------------------------------


class Weather:
    """Phases of a second or less, in which the server works, refuses, is slow, breaks connections, or is gone."""

    def __init__(self, server: FaultyServer, seed: float) -> None:
        self._server = server
        self._rng = random.Random(seed)  # of the phases
        self._each = random.Random(seed)  # of the requests, in the order in which they come
        self._lock = threading.Lock()
        self._phase = "good"
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._work, name="weather")

    def __enter__(self) -> Weather:
        self._server.rule = self._rule
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
        self._server.rule = lambda _: None

    def _work(self) -> None:
        phases = ["good", "good", "good", "refusing", "slow", "breaking", "gone"]
        while not self._end.is_set():
            self._phase = self._rng.choice(phases)
            if self._phase == "gone":
                self._server.s3.stop()
            try:
                self._end.wait(self._rng.uniform(*_PHASE_SECONDS))
            finally:
                if self._phase == "gone":
                    self._server.s3.start()

    def _rule(self, request: Any) -> Fault | None:
        with self._lock:
            chance, amount = self._each.random(), self._each.random()
        if self._phase == "refusing" and chance < 0.9:
            return Fault.error(503, "SlowDown")
        if self._phase == "slow":
            # Nobody can find in time an upload that S3 creates after its client gave up waiting and the rest was done.
            return Fault.delay(amount * 0.4 if request.operation == "CreateMultipartUpload" else amount)
        if self._phase == "breaking" and chance < 0.6:
            if amount < 0.4:
                return Fault.reset()
            return Fault.apply_then_reset() if amount < 0.6 else Fault.reset_request(int(amount * 5 * 2**20))
        return None
