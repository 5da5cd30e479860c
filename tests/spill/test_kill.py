"""Training is killed in the middle of saves, with an S3 that is barely there: what was reported durable is not lost.

Real processes and SIGKILL. DCP_S3_TEST_KILLS says how many kill points there are (9), DCP_S3_TEST_SEED which (0).
Each has a number, which is in the name of its test: ``DCP_S3_TEST_SEED=17 DCP_S3_TEST_KILLS=1`` repeats number 17, as
far as processes and sockets repeat at all.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from dcp_s3 import S3StorageWriter, list_checkpoints
from dcp_s3.spill.drain import Drainer
from dcp_s3.spill.store import SpillStore
from tests.end_to_end.loads import assert_loads
from tests.faulty import BUCKET, FaultyServer, serve
from tests.killing import AtRequest, begin, kill_all, new_process, read_lines, running, say, wait_until_quiet
from tests.memory_s3 import Fault

pytestmark = [pytest.mark.counted, pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")]

logger = logging.getLogger(__name__)

MIB = 2**20
ROOT = f"s3://{BUCKET}/run"
KILLS = int(os.environ.get("DCP_S3_TEST_KILLS", "9"))
FIRST_SEED = int(os.environ.get("DCP_S3_TEST_SEED", "0"))

_PATIENCE = 60.0  # seconds for processes to start, or to end
_SURVIVOR_SECONDS = 10.0
_LONGEST_LIFE = 3.0
_STEPS_PER_LIFE = 1000

_OPERATIONS = (
    "CreateMultipartUpload", "UploadPart", "UploadPart", "CompleteMultipartUpload", "PutObject", "PutObject",
    "ListMultipartUploads", "ListParts", "ListObjectsV2", "HeadObject", "DeleteObjects", "AbortMultipartUpload",
)  # fmt: skip
# Audit events of calls that change a directory: https://docs.python.org/3/library/audit_events.html
_CHANGES = ("open", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.truncate")


# --- the processes: one that trains and saves without end, and one that drains ---------------------------


@dataclass(frozen=True)
class Job:
    """What a process that will be killed is to do; pickled. Each life of a rank begins with steps of its own."""

    seed: int
    directory: Path  # for reports, output and rendezvous
    environment: Mapping[str, str]
    rank: int
    world_size: int
    life: int
    die_at_change: int | None = None  # of its spill directory, which it is about to make for this time

    @property
    def report(self) -> Path:
        return self.directory / f"report-{self.life}-{self.rank}.txt"

    def begin(self) -> None:
        begin(self.environment, self.directory / f"output-{self.life}-{self.rank}.log")
        torch.set_num_threads(1)
        if self.die_at_change is not None:
            sys.addaudithook(self._die_in_spill_directory)

    def _die_in_spill_directory(self, event: str, arguments: tuple[Any, ...], seen: list[str] = []) -> None:  # noqa: B006
        if event not in _CHANGES:
            return
        inside = False
        with contextlib.suppress(TypeError):
            inside = os.fsdecode(arguments[0]).startswith(self.environment["DCP_S3_SPILL_DIR"])
        # shutil.rmtree names files relative to their directory.
        if inside or (event in ("os.remove", "os.rmdir") and arguments[1] not in (-1, None)):
            seen.append(event)
            if len(seen) >= (self.die_at_change or 0):
                os.kill(os.getpid(), signal.SIGKILL)


def make_state(seed: int, step: int, world_size: int, rank: int | None = None) -> dict[str, Any]:
    """The state of one rank (None: of all) at a step: 12 to 20 MiB in all, with tensors of more than one part."""
    state: dict[str, Any] = {"step": step}
    for each in range(world_size) if rank is None else [rank]:
        generator = torch.Generator().manual_seed((seed * _STEPS_PER_LIFE * 10 + step) * 8 + each)
        for number in range(3 // world_size):
            words = int(torch.randint(MIB * 11 // 16, MIB * 13 // 16, (), generator=generator))
            state[f"rank-{each}.large-{number}"] = torch.empty(words, dtype=torch.int64).random_(generator=generator)
        for number in range(3):
            state[f"rank-{each}.small-{number}"] = torch.rand(1000 + number, generator=generator)
    return state


def train(job: Job) -> None:
    """Save step after step, for ever; report each that is durable as far as this rank knows."""
    job.begin()
    if job.world_size > 1:
        meeting = f"file://{job.directory / f'rendezvous-{job.life}'}"
        dist.init_process_group(
            "gloo", init_method=meeting, rank=job.rank, world_size=job.world_size, timeout=timedelta(seconds=60)
        )
    with job.report.open("a") as report:
        say(report, "started")
        rng = random.Random(job.seed)  # the same on every rank
        for step in range(1 + job.life * _STEPS_PER_LIFE, (job.life + 1) * _STEPS_PER_LIFE):
            state = make_state(job.seed, step, job.world_size, job.rank)
            durability = ("local", "s3")[(step + job.seed) % 2]
            writer = S3StorageWriter(f"{ROOT}/step-{step}", settings={"durability": durability})
            try:
                if rng.random() < 0.5:
                    saved: Any = dcp.async_save(state, storage_writer=writer)
                    saved.result()
                else:
                    dcp.save(state, storage_writer=writer)
            except BaseException as error:  # torch's CheckpointException is no Exception
                logger.exception("step %d", step)
                say(report, f"step {step} failed {error!r}"[:1000].replace("\n", " "))
                os._exit(1)
            say(report, f"step {step} durable {durability}")


def drain(job: Job, spill_directories: list[Path], *, forever: bool = False) -> None:
    """Drain, until nothing waits unless ``forever``; then report what was set aside, as JSON."""
    job.begin()
    refused: list[str] = []
    while True:
        reports = [Drainer(SpillStore(directory)).run() for directory in spill_directories]
        refused += [f"{name}: {reason}" for each in reports for name, reason in each.refused.items()]
        logger.info("waiting: %s", [each.waiting for each in reports])
        if not forever and not any(each.waiting or each.busy for each in reports):
            break
        time.sleep(0.05)
    job.report.write_text(json.dumps(refused))


@dataclass(frozen=True)
class Scene:
    """Who trains, and who is killed."""

    ranks: int = 1
    shared: bool = False  # one spill directory
    victims: tuple[int, ...] | None = None  # ranks; None: all
    drains: int = 0  # processes that only drain, killed one after the other, before the last one
    beside: bool = False  # one that only drains runs beside the training, and dies with it
    lives: int = 1  # how often training is started and killed before the drain


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
_POINTS = [(list(SCENES)[seed % len(SCENES)], seed) for seed in range(FIRST_SEED, FIRST_SEED + KILLS)]


@pytest.mark.quick("one_rank-seed0", "one_of_two_ranks-seed3", "a_drain-seed4")
@pytest.mark.skipif(sys.platform != "linux", reason="relies on Linux's signals and file locks")
@pytest.mark.parametrize(("scene", "seed"), [pytest.param(*each, id="{}-seed{}".format(*each)) for each in _POINTS])
def test_what_was_durable_is_there_after_a_kill_of(
    scene: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"PART_SIZE": "5MiB", "RETRY_ATTEMPTS": "2", "CONCURRENCY": "4", "READ_TIMEOUT": "5s"}
    settings = {f"DCP_S3_{name}": value for name, value in settings.items()}
    for name, value in {**settings, "GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    with serve(monkeypatch) as server:
        point = KillPoint(SCENES[scene], seed, tmp_path, server)
        try:
            point.run()
        except BaseException:
            print(f"seed {seed}, {scene}, killed {point.how}; the output of the processes is in {tmp_path}")
            raise


class KillPoint:
    """One kill (or several in a row), and what is left of it."""

    def __init__(self, scene: Scene, seed: int, directory: Path, server: FaultyServer) -> None:
        self.scene, self.seed, self.how = scene, seed, list[str]()
        self._rng, self._directory, self._server = random.Random(seed), directory, server
        self._jobs: list[Job] = []
        self._bereaved: set[int] = set()  # lives in which a rank may have seen the end of another
        names = ["shared"] * scene.ranks if scene.shared else [f"rank-{rank}" for rank in range(scene.ranks)]
        self._spill = [directory / "spill" / name for name in names]
        self._environment = {**os.environ, "DCP_S3_SPILL_AFTER": self._rng.choice(["0.5s", "1s"])}

    def run(self) -> None:
        """Train, kill, drain, look."""
        self._server.rule = bad_weather(self._rng.random())
        for life in range(self.scene.lives):
            self._train_and_kill(life)
        for number in range(self.scene.drains):
            self._drain_and_kill(self.scene.lives + number)
        self._server.rule = lambda _: None
        wait_until_quiet(self._server)
        job = self._job(self.scene.ranks, 100)
        with running([new_process(drain, job, sorted(set(self._spill)))]) as (process,):
            process.join(_PATIENCE)
            assert process.exitcode == 0, "the last drain failed, or does not end"
        assert json.loads(job.report.read_text()) == []
        self._check()

    def _job(self, rank: int, life: int, change: int | None = None) -> Job:
        # Who drains names the parent: the directory of each rank is below it.
        spill = self._spill[rank] if rank < self.scene.ranks else self._directory / "spill"
        environment = {**self._environment, "DCP_S3_SPILL_DIR": str(spill)}
        return Job(self.seed, self._directory, environment, rank, self.scene.ranks, life, change)

    def _train_and_kill(self, life: int) -> None:
        ranks, scene = range(self.scene.ranks), self.scene
        change = self._rng.randint(1, 150) if self._rng.random() < 0.4 else None
        doomed = self._rng.choice(scene.victims or ranks)
        jobs = [self._job(rank, life, change if rank == doomed else None) for rank in ranks]
        self._jobs += jobs
        if scene.victims or (change is not None and scene.ranks > 1):
            self._bereaved.add(life)
        trainings = [new_process(train, job) for job in jobs]
        drains = [new_process(drain, self._job(scene.ranks, life), self._spill, forever=True)] * scene.beside
        with running([*trainings, *drains]):
            deadline = time.monotonic() + _PATIENCE
            while not all(read_lines(job.report) for job in jobs) and all(each.exitcode is None for each in trainings):
                assert time.monotonic() < deadline, "training did not start"
                time.sleep(0.01)
            victims = [trainings[rank] for rank in scene.victims or ranks]
            self._kill_some_time([*victims, *drains], change)
            if scene.victims:
                for process in trainings:
                    process.join(_SURVIVOR_SECONDS)
            codes = {process.exitcode for process in [*victims, *drains]}
        assert life in self._bereaved or codes == {-signal.SIGKILL}, f"ended by itself: exit codes {codes}"

    def _drain_and_kill(self, life: int) -> None:
        change = self._rng.randint(1, 30) if self._rng.random() < 0.5 else None
        with running([new_process(drain, self._job(self.scene.ranks, life, change), self._spill)]) as processes:
            self._kill_some_time(processes, change)
            assert processes[0].exitcode in (0, -signal.SIGKILL), "the drain failed"

    def _kill_some_time(self, victims: Sequence[Any], change: int | None) -> None:
        """Kill at a moment, at a request, or when one kills itself in its spill directory."""
        seconds, at_request = self._rng.uniform(0, _LONGEST_LIFE), None
        if change is None and self._rng.random() < 0.6:
            operation, count = self._rng.choice(_OPERATIONS), self._rng.randint(1, 5)
            at_request = AtRequest(operation, count, applied=self._rng.random() < 0.6)
        if change is not None or at_request:
            seconds = _LONGEST_LIFE
        self.how.append(f"at {at_request or (change and f'change {change}') or f'{seconds:.2f} s'}")
        deadline = time.monotonic() + seconds
        with at_request.on(self._server) if at_request else contextlib.nullcontext():
            while time.monotonic() < deadline and all(process.exitcode is None for process in victims):
                if at_request and at_request.reached.wait(0.005):
                    break
                time.sleep(0.002)
            kill_all(victims)

    def _check(self) -> None:
        lines = [(job, line) for job in self._jobs for line in read_lines(job.report)]
        # No save may fail, unless a rank was left without the others.
        failed = [line for job, line in lines if " failed " in line and job.life not in self._bereaved]
        said = Counter(int(line.split()[1]) for _, line in lines if " durable " in line)
        durable = {f"step-{step}" for step, ranks in said.items() if ranks == self.scene.ranks}
        committed = {info.name for info in list_checkpoints(ROOT) if info.committed}
        problems = [*failed, *(f"{name} was durable, but is not committed" for name in durable - committed)]
        for name in sorted(committed):
            try:
                step = int(name.removeprefix("step-"))
                assert_loads(f"{ROOT}/{name}", make_state(self.seed, step, self.scene.ranks))
            except (CheckpointException, AssertionError) as error:
                problems.append(f"{name} is committed, but not whole: {error!r}")
        visible = {key.split("/")[1] for key in self._server.s3.objects(BUCKET) if key.endswith(".metadata")}
        problems += [f"{name} is visible, but not listed" for name in visible - committed]
        problems += [f"a multipart upload of {key} is open" for key in self._server.s3.open_uploads(BUCKET)]
        for directory in set(self._spill):
            problems += [f"{path} is left" for name in ("saves", "refused") for path in (directory / name).glob("*")]
        assert not problems, "\n".join(problems)


def bad_weather(seed: float) -> Callable[[Any], Fault | None]:
    """A rule by which the server works, refuses, is slow, breaks connections or is gone, for some requests each."""
    rng, lock = random.Random(seed), threading.Lock()
    phase, left = "good", 0

    def rule(request: Any) -> Fault | None:
        nonlocal phase, left
        with lock:
            if not left:
                phase = rng.choice(["good", "good", "good", "refusing", "slow", "breaking", "gone"])
                left = rng.randint(3, 60)
            left -= 1
            chance, amount = rng.random(), rng.random()
        if phase == "refusing" and chance < 0.9:
            return Fault.error(503, "SlowDown")
        if phase == "slow":
            # Nobody can find in time an upload that S3 creates after its client gave up waiting and the rest was done.
            return Fault.delay(amount * 0.4 if request.operation == "CreateMultipartUpload" else amount)
        if phase == "gone" or (phase == "breaking" and chance < 0.2):
            return Fault.reset()
        if phase == "breaking" and chance < 0.6:
            return Fault.apply_then_reset() if amount < 0.4 else Fault.reset_request(int(amount * 5 * MIB))
        return None

    return rule
