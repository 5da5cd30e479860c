"""Ranks are killed in the middle of saves: the checkpoint is whole, or the one before it stays. And a training gets
SIGTERM, and SIGKILL when the grace period is over: the newest step is there, or nothing new.

Real processes and signals. DCP_S3_TEST_KILLS says how many times for each test (10), DCP_S3_TEST_SIGTERMS how many for
the training (20), DCP_S3_TEST_SEED the first seed (0). What was killed, and where, is a property of the test in
pytest's JUnit XML (``-o junit_family=xunit1``). Where a machine is so busy that a process stands still for seconds,
more ranks count as dead than were killed.
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
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader

from dcp_s3 import CheckpointManager, S3StorageReader, S3StorageWriter, latest, list_checkpoints, verify
from dcp_s3.format.layout import manifest_object
from dcp_s3.url import parse_url
from tests import killing
from tests.end_to_end.states import assert_same, blank
from tests.faulty import BUCKET, FaultyServer, close_clients
from tests.killing import AtRequest, Shooting, Shot, join_all, new_process, read_lines, running, wait_until
from tests.memory_s3 import Fault
from tests.soak.workers import ROOT, Job, Training, make_whole_state, save_when_told, train_for_ever

pytestmark = [
    pytest.mark.counted,
    pytest.mark.skipif(sys.platform != "linux", reason="relies on Linux's signals"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
]

KILLS = int(os.environ.get("DCP_S3_TEST_KILLS", "10"))
SIGTERMS = int(os.environ.get("DCP_S3_TEST_SIGTERMS", "20"))
FIRST_SEED = int(os.environ.get("DCP_S3_TEST_SEED", "0"))
SEEDS = pytest.mark.parametrize("seed", range(FIRST_SEED, FIRST_SEED + KILLS))
_SETTINGS = {"DCP_S3_PART_SIZE": "5MiB", "DCP_S3_CONCURRENCY": "4", "DCP_S3_RANK_TIMEOUT": "3"}
_KINDS = (
    ("PutObject", "claim.json"), ("GetObject", "claim.json"), ("PutObject", ".intent."), ("PutObject", ".part."),
    ("PutObject", ".merged."), ("PutObject", "manifest-"),
    ("PutObject", "/.metadata"), ("CreateMultipartUpload", ""), ("UploadPart", ""), ("CompleteMultipartUpload", ""),
    ("PutObject", ".distcp"), ("ListObjectsV2", ""), ("GetObject", ""), ("GetObject", ".part."), ("HeadObject", ""),
    ("DeleteObjects", ""),
)  # fmt: skip


# --- the tests -------------------------------------------------------------------------------------------


@pytest.mark.quick("5", "7")
@SEEDS
def test_without_replicas_a_checkpoint_is_whole_or_the_one_before_stays(
    faulty: FaultyServer, tmp_path: Path, record_property: Any, seed: int
) -> None:
    rng = random.Random(seed)
    layout, by = [("sharded", "dcp"), ("fsdp", "separately"), ("sharded", "manager"), ("fsdp", "manager")][seed % 4]
    overwrite = by != "manager" and rng.random() < 0.5
    jobs = make_jobs(tmp_path, 3, layout=layout, by=by, overwrite=overwrite, large=seed % 3 == 0)
    shots = [draw_shot(rng, 3)]
    shooting, told = save_twice(faulty, jobs, shots)
    record_property("hit", describe(jobs[0], shots))
    assert all(words[0] in ("saved", "failed") for words in told.values()), told
    committed = {words[0] for words in told.values()}
    number = committed_number(jobs[0])
    assert len(committed) == 1, told
    if "saved" in committed or not shooting.hit:
        assert number == 2, told
    for words in told.values():
        assert words[0] == "saved" or ROOT in " ".join(words), told
    check_whole(faulty, jobs[0], number, tmp_path)
    record_property("committed", number)


@pytest.mark.quick("2", "7")
@SEEDS
def test_with_replicas_what_a_rank_has_joined_is_saved_without_it(
    faulty: FaultyServer, tmp_path: Path, record_property: Any, seed: int
) -> None:
    rng = random.Random(seed)
    layout, by = [
        ("hsdp", "manager"), ("plain", "dcp"), ("boxes", "dcp"), ("hsdp", "separately"), ("plain", "manager"),
    ][seed % 5]  # fmt: skip
    overwrite = by != "manager" and rng.random() < 0.5
    ranks = 3 if layout == "plain" and rng.random() < 0.5 else 4
    jobs = make_jobs(tmp_path, ranks, layout=layout, by=by, overwrite=overwrite, large=seed % 3 == 0)
    shots = [draw_shot(rng, ranks)]
    if rng.random() < 0.5:
        shots.append(draw_shot(rng, ranks))  # perhaps of one that makes up for the first one
    in_pairs = layout in ("hsdp", "boxes")
    shooting, told = save_twice(
        faulty, jobs, shots, lambda rank, hit: rank in hit or (in_pairs and (rank + 2) % 4 in hit)
    )
    record_property("hit", describe(jobs[0], shots))
    said_last = {words[0] for words in told.values()}
    # On a busy machine, or killed before the body was sent. Lines are wrapped anywhere.
    too_late = any("has not begun it" in " ".join(words).replace("\\n", "") for words in told.values())
    if all(has_written(shooting, rank, ".intent.") for rank in shooting.hit) and not too_late:
        said = [f"rank {rank}: {' '.join(words)}" for rank, words in told.items()]
        assert said_last == {"saved"}, "\n".join([*said, describe(jobs[0], shots)])
        made_up = read_made_up(faulty, jobs[0])
        silent = {rank for rank in shooting.hit if not has_written(shooting, rank, ".part.")}
        assert silent <= made_up, (silent, made_up)
        record_property("made_up", sorted(made_up))
    else:  # nobody knows what it would have written
        assert said_last in ({"saved"}, {"failed"}), (told, describe(jobs[0], shots))
    number = committed_number(jobs[0])
    assert number == 2 or said_last == {"failed"}, told
    check_whole(faulty, jobs[0], number, tmp_path)


@pytest.mark.quick("0")
@SEEDS
def test_a_stopped_rank_of_an_older_attempt_is_refused_when_it_goes_on(
    faulty: FaultyServer, tmp_path: Path, record_property: Any, seed: int
) -> None:
    rng = random.Random(seed)
    layout, overwrite = rng.choice(["sharded", "plain"]), rng.random() < 0.5
    old, new = (
        make_jobs(
            tmp_path, 2, {"TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_RESTART_COUNT": str(attempt)},
            layout=layout, by="dcp", overwrite=overwrite, attempt=attempt, numbers=numbers,
        )
        for attempt, numbers in ((0, (1, 2)), (1, (2,)))
    )  # fmt: skip
    stop = draw_shot(rng, 2)
    stop.count = 1 + stop.count % 12 if stop.rank is not None else stop.count  # a save of one rank has about as many
    stop.signal_number, stop.held = signal.SIGSTOP, rng.random() < 0.5
    early = rng.random() < 0.3
    with saving(old) as zombies:
        shooting = Shooting(zombies, [stop])
        with shooting.on(faulty):
            old[0].gate(2).touch()
            wait_until(lambda: shooting.over.is_set() or all(process.exitcode is not None for process in zombies))
            record_property("hit", describe(old[0], [stop]))
            for rank, process in enumerate(zombies):
                if rank != stop.hit:
                    process.kill()
            with running([new_process(save_when_told, job) for job in new]) as processes:
                if early:
                    wait_until(lambda: all(job.report.exists() for job in new))
                    time.sleep(rng.uniform(0, 0.3))  # any instant will do
                else:
                    join_all(processes)
                if stop.hit is not None:
                    shooting.release()
                    os.kill(zombies[stop.hit].pid, signal.SIGCONT)
                    join_all([zombies[stop.hit]])
                join_all(processes)
    killing.wait_until_quiet(faulty)
    told_new = [last_words(job) for job in new]
    told_old = None if stop.hit is None else last_words(old[stop.hit])
    record_property("told", [told_old and told_old[:3], *[words[:3] for words in told_new]])
    assert {words[0] for words in told_new} <= {"saved", "failed"}, told_new
    assert list_checkpoints(ROOT)[-1].committed
    saved_by_new = {words[0] for words in told_new} == {"saved"}
    if not saved_by_new:
        # The old attempt had committed before: that is no longer to be had for a save that does not overwrite.
        assert not overwrite, told_new
        assert "CheckpointExistsError" in {words[2].partition("(")[0] for words in told_new}, told_new
    elif told_old is not None and not overwrite:
        assert told_old[0] == "failed", told_old
        assert told_old[2].partition("(")[0] in ("SaveProtocolError", "CheckpointExistsError"), told_old
        assert "Remedy" in " ".join(told_old), told_old
    check_whole(faulty, (new if saved_by_new else old)[0], 2, tmp_path)


@pytest.mark.quick("0", "3")
@SEEDS
def test_all_ranks_of_a_save_with_collectives_are_killed_at_once(
    faulty: FaultyServer, tmp_path: Path, record_property: Any, seed: int
) -> None:
    rng = random.Random(seed)
    overwrite, by = seed % 4 > 1, "async" if rng.random() < 0.3 else "collectives"
    jobs = make_jobs(tmp_path, 1 + seed % 2, by=by, overwrite=overwrite, large=rng.random() < 0.5)
    operation, key = rng.choice([each for each in _KINDS if not each[1].startswith((".", "claim")) or "dis" in each[1]])
    moment = AtRequest(operation, rng.randint(1, 4), applied=rng.random() < 0.5, key=key)
    with saving(jobs) as processes, moment.on(faulty):
        jobs[0].gate(2).touch()
        wait_until(lambda: moment.reached.is_set() or all(process.exitcode is not None for process in processes))
        killing.kill_all(processes)
    close_clients()
    killing.wait_until_quiet(faulty)
    number = committed_number(jobs[0])
    record_property("committed", f"{number}, killed at {moment}")
    assert number == 2 or not any("saved 2" in read_lines(job.report) for job in jobs)
    check_whole(faulty, jobs[0], number, tmp_path)
    again, url = make_whole_state(jobs[0], 3), jobs[0].url(2)
    dcp.save(again, storage_writer=S3StorageWriter(url, overwrite=overwrite or number == 2), no_dist=True)
    assert_same(load(jobs[0], S3StorageReader(url)), again)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(FIRST_SEED, FIRST_SEED + SIGTERMS))
def test_after_sigterm_the_newest_step_is_there_or_nothing_new(faulty: FaultyServer, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    coordination, group = [("collectives", True), ("s3", True), ("s3", False)][seed % 3]
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
        codes, told, kept = preempt(faulty, trainings, rng, down=down)
        check_preempted(trainings, codes, told, before, kept, down=down)


# --- ranks, and what happens to them ------------------------------------------------------------------------


def make_jobs(directory: Path, ranks: int, run: dict[str, str] | None = None, **job: Any) -> list[Job]:
    """One for each rank of two saves, the second of which waits for the test."""
    environment = {**os.environ, **_SETTINGS, **(run or {"DCP_S3_RUN_ID": "training"})}
    return [
        Job(directory=directory, environment=environment, rank=rank, world_size=ranks, **job) for rank in range(ranks)
    ]


@contextlib.contextmanager
def saving(jobs: Sequence[Job]) -> Iterator[list[Any]]:
    """Processes that have saved once, and are about to save again."""
    with running([new_process(save_when_told, job) for job in jobs]) as processes:
        wait_until(lambda: all("ready 2" in read_lines(job.report) for job in jobs), processes)
        yield processes


def draw_shot(rng: random.Random, ranks: int) -> Shot:
    """Any request of one rank, or any of a kind, whosever it is."""
    applied = rng.random() < 0.5
    if rng.random() < 0.5:
        return Shot(rng.randrange(ranks), rng.randint(1, 1000), applied)
    operation, key = rng.choice(_KINDS)
    most = 1 if key in ("manifest-", ".merged.", "/.metadata") else ranks
    return Shot(None, rng.randint(1, most), applied, operation, key)


def save_twice(
    server: FaultyServer,
    jobs: Sequence[Job],
    shots: Sequence[Shot],
    spares: Callable[[int, Sequence[int]], bool] = lambda rank, hit: rank in hit,
) -> tuple[Shooting, dict[int, list[str]]]:
    """Two saves, the second with the shots; what each rank that lives has said of it, in words."""
    requests: Counter[int | None] = Counter()
    server.rule = lambda request: requests.update([killing.rank_of(request)])
    with saving(jobs) as processes:
        for shot in shots:
            if shot.rank is not None:  # a number of the save's requests, of which there are about as many as before
                shot.count = 1 + shot.count % requests[shot.rank]
        shooting = Shooting(processes, shots, spares)
        with shooting.on(server), readable(jobs[0]):
            jobs[0].gate(2).touch()
            join_all(processes)
        server.rule = lambda _: None
        assert {process.exitcode for rank, process in enumerate(processes) if rank in shooting.hit} <= {-9}
    close_clients()  # of the reader
    killing.wait_until_quiet(server)
    return shooting, {job.rank: last_words(job) for job in jobs if job.rank not in shooting.hit}


@contextlib.contextmanager
def readable(job: Job) -> Iterator[None]:
    """Meanwhile a checkpoint that is overwritten is whole whenever it is read."""
    over, torn = threading.Event(), []

    def read() -> None:
        while job.overwrite and not (over.is_set() or torn):
            try:
                found = load(job, S3StorageReader(job.url(1)))
                assert found["number"] in (1, 2)
                assert_same(found, make_whole_state(job, found["number"]))
            except BaseException as error:  # noqa: BLE001 - torch's CheckpointException is no Exception
                # It read the old metadata, and objects of it are deleted already: the next look is at the new one.
                if "Remedy: load it again" not in str(error) and "does not exist" not in str(error):
                    torn.append(error)
            over.wait(0.05)

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    if torn:
        raise torn[0]


# --- what is there afterwards -------------------------------------------------------------------------------


def committed_number(job: Job) -> int:
    newest = latest(ROOT)
    assert newest is not None
    if not job.overwrite:
        assert newest.step is not None
        return newest.step
    found = {"number": 0}
    dcp.load(found, storage_reader=S3StorageReader(job.url(1)), no_dist=True)
    return found["number"]


def check_whole(server: FaultyServer, job: Job, number: int, directory: Path) -> None:
    """The checkpoint of a save is what was saved, for our reader and for torch's, and nothing newer is there."""
    url, expected = job.url(number), make_whole_state(job, number)
    newest = latest(ROOT)
    assert newest is not None
    assert newest.url == url
    assert_same(load(job, S3StorageReader(url)), expected)
    report = verify(url, full=True)
    assert report.ok, report
    copy, prefix = directory / "copy", parse_url(url).key("")
    for key in server.s3.objects(BUCKET):
        if key.startswith(prefix):
            path = copy / key.removeprefix(prefix)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(server.s3.read(BUCKET, key))
    assert_same(load(job, FileSystemReader(copy)), expected)
    shutil.rmtree(copy)  # of many tests, whose directories pytest keeps


def load(job: Job, reader: Any) -> dict[str, Any]:
    found: dict[str, Any] = blank(make_whole_state(job, 0))
    dcp.load(found, storage_reader=reader, no_dist=True)
    return found


def last_words(job: Job) -> list[str]:
    return read_lines(job.report)[-1].split()


def has_written(shooting: Shooting, rank: int, kind: str) -> bool:
    """Its intent or part of the second save."""
    return any(operation == "PutObject" and key.endswith(f"{kind}{rank}") for operation, key in shooting.done[rank])


def read_made_up(server: FaultyServer, job: Job) -> set[int]:
    """The ranks that others made up for, as the manifest of the second save says."""
    found = list_checkpoints(ROOT)[-1]
    assert found.save_id is not None
    data = server.s3.read(BUCKET, parse_url(job.url(2)).key(manifest_object(found.save_id)))
    return set(map(int, json.loads(data)["coordination"]["made_up"]))


def describe(job: Job, shots: Sequence[Shot]) -> str:
    told = [
        f"rank {shot.hit} {'' if shot.applied else 'not applied'} {shot.operation}{shot.key}"
        if shot.hit is not None
        else f"nobody ({shot})"
        for shot in shots
    ]
    return f"{job.layout} {job.by} {'overwrite' if job.overwrite else 'new URL'}: {'; '.join(told)}"


# --- a training that is preempted ------------------------------------------------------------------------


def preempt(
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
        until = time.monotonic() + (6.0 if down else 50.0)  # this machine may be slow to end a process
        for process in processes:
            process.join(max(0.0, until - time.monotonic()))
        killing.kill_all(processes)
        codes = [process.exitcode for process in processes]
    server.rule = lambda _: None
    return codes, told, 0 if newest is None else newest.step or 0


def check_preempted(
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
