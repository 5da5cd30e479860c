"""Ranks are killed in the middle of saves: the checkpoint is whole, or the one before it stays.

Real processes and SIGKILL. DCP_S3_TEST_KILLS says how many times for each test (10), DCP_S3_TEST_SEED the first seed
(0). What was killed, and where, is a property of the test in pytest's JUnit XML (``-o junit_family=xunit1``). Where a
machine is so busy that a process stands still for seconds, more ranks count as dead than were killed.
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

import boto3
import pytest
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader

from dcp_s3 import S3StorageReader, S3StorageWriter, latest, list_checkpoints, verify
from dcp_s3.format.layout import manifest_object
from dcp_s3.url import parse_url
from tests.end_to_end.states import assert_same, blank
from tests.faulty import BUCKET, FaultyServer, close_clients, serve
from tests.killing import (
    AtRequest,
    Shooting,
    Shot,
    kill_all,
    new_process,
    rank_of,
    read_lines,
    running,
    wait_until_quiet,
)
from tests.soak.workers import Job, make_whole_state, save_when_told

pytestmark = [
    pytest.mark.counted,
    pytest.mark.skipif(sys.platform != "linux", reason="relies on Linux's signals"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
]

ROOT = f"s3://{BUCKET}/run"
KILLS = int(os.environ.get("DCP_S3_TEST_KILLS", "10"))
FIRST_SEED = int(os.environ.get("DCP_S3_TEST_SEED", "0"))
SEEDS = range(FIRST_SEED, FIRST_SEED + KILLS)
ENVIRONMENT = {
    "DCP_S3_PART_SIZE": "5MiB",
    "DCP_S3_CONCURRENCY": "4",
    "DCP_S3_RANK_TIMEOUT": "3",
    "DCP_S3_RUN_ID": "training",
    "GLOO_SOCKET_IFNAME": "lo",
    "MASTER_ADDR": "127.0.0.1",
}
_LONGEST = 120.0  # seconds: many times rank_timeout, for a busy machine

_KINDS = (
    ("PutObject", "claim.json"), ("GetObject", "claim.json"), ("PutObject", ".intent."), ("PutObject", ".part."),
    ("PutObject", ".merged."), ("PutObject", "manifest-"),
    ("PutObject", "/.metadata"), ("CreateMultipartUpload", ""), ("UploadPart", ""), ("CompleteMultipartUpload", ""),
    ("PutObject", ".distcp"), ("ListObjectsV2", ""), ("GetObject", ""), ("GetObject", ".part."), ("HeadObject", ""),
    ("DeleteObjects", ""),
)  # fmt: skip


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyServer]:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    with serve(monkeypatch) as server:
        yield server


# --- the tests -------------------------------------------------------------------------------------------


@pytest.mark.quick("5", "7")
@pytest.mark.parametrize("seed", SEEDS)
def test_without_replicas_a_checkpoint_is_whole_or_the_one_before_stays(
    faulty: FaultyServer, tmp_path: Path, record_property: Callable[[str, object], None], seed: int
) -> None:
    rng = random.Random(seed)
    layout, by = [("sharded", "dcp"), ("fsdp", "separately"), ("sharded", "manager"), ("fsdp", "manager")][seed % 4]
    overwrite = by != "manager" and rng.random() < 0.5
    jobs = make_jobs(tmp_path, 3, layout, by, overwrite=overwrite, large=seed % 3 == 0)
    shots = [draw_shot(rng, 3)]
    with ended(faulty, jobs, rng, shots) as (shooting, told):
        record_property("hit", describe(jobs[0], shots))
        assert all(words[0] in ("saved", "failed") for words in told.values()), told
        committed = {words[0] for words in told.values()}
        number = committed_number(jobs[0])
        assert len(committed) == 1, told
        if "saved" in committed or not shooting.hit:
            assert number == 2, told
        for words in told.values():
            assert words[0] == "saved" or jobs[0].root in " ".join(words), told
    check_whole(jobs[0], number, tmp_path)
    record_property("committed", number)


@pytest.mark.quick("2", "7")
@pytest.mark.parametrize("seed", SEEDS)
def test_with_replicas_what_a_rank_has_joined_is_saved_without_it(
    faulty: FaultyServer, tmp_path: Path, record_property: Callable[[str, object], None], seed: int
) -> None:
    rng = random.Random(seed)
    layout, by = [
        ("hsdp", "manager"), ("plain", "dcp"), ("boxes", "dcp"), ("hsdp", "separately"), ("plain", "manager"),
    ][seed % 5]  # fmt: skip
    overwrite = by != "manager" and rng.random() < 0.5
    ranks = 3 if layout == "plain" and rng.random() < 0.5 else 4
    jobs = make_jobs(tmp_path, ranks, layout, by, overwrite=overwrite, large=seed % 3 == 0)
    shots = [draw_shot(rng, ranks)]
    if rng.random() < 0.5:
        shots.append(draw_shot(rng, ranks))  # perhaps of one that makes up for the first one
    spared = (lambda rank, hit: rank in hit or (rank + 2) % 4 in hit) if layout in ("hsdp", "boxes") else None
    with ended(faulty, jobs, rng, shots, spared) as (shooting, told):
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
    check_whole(jobs[0], number, tmp_path)


@pytest.mark.quick("0")
@pytest.mark.parametrize("seed", SEEDS)
def test_a_stopped_rank_of_an_older_attempt_is_refused_when_it_goes_on(
    faulty: FaultyServer, tmp_path: Path, record_property: Callable[[str, object], None], seed: int
) -> None:
    rng = random.Random(seed)
    environment = {**os.environ, "TORCHELASTIC_RUN_ID": "job", "DCP_S3_RUN_ID": ""}
    del environment["DCP_S3_RUN_ID"]
    layout, overwrite = rng.choice(["sharded", "plain"]), rng.random() < 0.5
    old, new = (
        make_jobs(
            tmp_path, 2, layout, "dcp", overwrite=overwrite, attempt=attempt, numbers=numbers,
            environment={**environment, "TORCHELASTIC_RESTART_COUNT": str(attempt)},
        )
        for attempt, numbers in ((0, (1, 2)), (1, (2,)))
    )  # fmt: skip
    stop = draw_shot(rng, 2)
    stop.count = 1 + stop.count % 12 if stop.rank is not None else stop.count  # a save of one rank has about as many
    stop.signal_number, stop.held = signal.SIGSTOP, rng.random() < 0.5
    early = rng.random() < 0.3
    with running([new_process(save_when_told, job) for job in old]) as zombies:
        wait_until(lambda: all(said(job, "ready 2") for job in old), zombies)
        shooting = Shooting(zombies, [stop])
        with shooting.on(faulty):
            old[0].gate(2).touch()
            while not shooting.over.wait(0.01) and not all(process.exitcode is not None for process in zombies):
                pass
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
    wait_until_quiet(faulty)
    told_new = [read_lines(job.report)[-1].split() for job in new]
    told_old = None if stop.hit is None else read_lines(old[stop.hit].report)[-1].split()
    record_property("told", [told_old and told_old[:3], *[words[:3] for words in told_new]])
    assert {words[0] for words in told_new} <= {"saved", "failed"}, told_new
    found = list_checkpoints(ROOT)[-1]
    assert found.committed
    saved_by_new = {words[0] for words in told_new} == {"saved"}
    if saved_by_new:
        check_whole(new[0], 2, tmp_path)
    else:
        # The old attempt had committed before: that is no longer to be had for a save that does not overwrite.
        assert not overwrite, told_new
        assert "CheckpointExistsError" in {words[2].partition("(")[0] for words in told_new}, told_new
        check_whole(old[0], 2, tmp_path)
    if told_old is not None and saved_by_new and not overwrite:
        assert told_old[0] == "failed", told_old
        assert told_old[2].partition("(")[0] in ("SaveProtocolError", "CheckpointExistsError"), told_old
        assert "Remedy" in " ".join(told_old), told_old


@pytest.mark.quick("0", "3")
@pytest.mark.parametrize("seed", SEEDS)
def test_all_ranks_of_a_save_with_collectives_are_killed_at_once(
    faulty: FaultyServer, tmp_path: Path, record_property: Callable[[str, object], None], seed: int
) -> None:
    rng = random.Random(seed)
    ranks, overwrite = 1 + seed % 2, seed % 4 > 1
    by = "async" if rng.random() < 0.3 else "collectives"
    jobs = make_jobs(tmp_path, ranks, "sharded", by, overwrite=overwrite, large=rng.random() < 0.5)
    operation, key = rng.choice([each for each in _KINDS if not each[1].startswith((".", "claim")) or "dis" in each[1]])
    moment = AtRequest(operation, rng.randint(1, 4), applied=rng.random() < 0.5, key=key)
    with running([new_process(save_when_told, job) for job in jobs]) as processes:
        wait_until(lambda: all(said(job, "ready 2") for job in jobs), processes)
        with moment.on(faulty):
            jobs[0].gate(2).touch()
            while not moment.reached.wait(0.01) and any(process.exitcode is None for process in processes):
                pass
            kill_all(processes)
    close_clients()
    wait_until_quiet(faulty)
    number = committed_number(jobs[0])
    record_property("committed", f"{number}, killed at {moment}")
    assert number == 2 or not any(said(job, "saved 2") for job in jobs)
    check_whole(jobs[0], number, tmp_path)
    again = make_whole_state(jobs[0], 3)
    writer = S3StorageWriter(jobs[0].url(2), overwrite=overwrite or number == 2)
    dcp.save(again, storage_writer=writer, no_dist=True)
    assert_same(load(jobs[0], jobs[0].url(2), S3StorageReader(jobs[0].url(2))), again)


# --- ranks, and what happens to them ------------------------------------------------------------------------


def make_jobs(
    directory: Path, ranks: int, layout: Any, by: Any, *, overwrite: bool, attempt: int = 0,
    numbers: tuple[int, ...] = (1, 2), environment: dict[str, str] | None = None, large: bool = False,
) -> list[Job]:  # fmt: skip
    """One for each rank of two saves, the second of which waits for the test."""
    known = dict(os.environ) if environment is None else environment
    return [
        Job(ROOT, directory, known, layout, by, overwrite, numbers, rank, ranks, attempt, large)
        for rank in range(ranks)
    ]


def wait_until(done: Callable[[], bool], processes: Sequence[Any] = ()) -> None:
    deadline = time.monotonic() + _LONGEST
    while not done():
        assert time.monotonic() < deadline, "the ranks did not come so far"
        assert all(process.exitcode is None for process in processes), "a rank ended before"
        time.sleep(0.005)


def join_all(processes: Sequence[Any]) -> None:
    deadline = time.monotonic() + _LONGEST
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        assert process.exitcode is not None, "a save does not end"


def said(job: Job, line: str) -> bool:
    return line in read_lines(job.report)


def draw_shot(rng: random.Random, ranks: int) -> Shot:
    """Any request of one rank, or any of a kind, whosever it is."""
    applied = rng.random() < 0.5
    if rng.random() < 0.5:
        return Shot(rng.randrange(ranks), rng.randint(1, 1000), applied)
    operation, key = rng.choice(_KINDS)
    most = 1 if key in ("manifest-", ".merged.", "/.metadata") else ranks
    return Shot(None, rng.randint(1, most), applied, operation, key)


@contextlib.contextmanager
def ended(
    server: FaultyServer,
    jobs: Sequence[Job],
    rng: random.Random,
    shots: Sequence[Shot],
    spares: Callable[[int, Sequence[int]], bool] | None = None,
) -> Iterator[tuple[Shooting, dict[int, list[str]]]]:
    """Two saves are over, the second with the shots; what each rank that lives has said of it, in words."""
    requests: Counter[int | None] = Counter()
    with running([new_process(save_when_told, job) for job in jobs]) as processes:
        server.rule = lambda request: requests.update([rank_of(request)])
        wait_until(lambda: all(said(job, "ready 2") for job in jobs), processes)
        for shot in shots:
            if shot.rank is not None:  # a number of the save's requests, of which there are about as many as before
                shot.count = 1 + shot.count % requests[shot.rank]
        shooting = Shooting(processes, shots, *([] if spares is None else [spares]))
        with shooting.on(server), readable(jobs[0]):
            jobs[0].gate(2).touch()
            join_all(processes)
        server.rule = lambda request: None
        assert {process.exitcode for rank, process in enumerate(processes) if rank in shooting.hit} <= {-9}
        close_clients()  # of the reader
        wait_until_quiet(server)
        last = {
            rank: read_lines(jobs[rank].report)[-1].split() for rank in range(len(jobs)) if rank not in shooting.hit
        }
        yield shooting, last


@contextlib.contextmanager
def readable(job: Job) -> Iterator[None]:
    """Meanwhile a checkpoint that is overwritten is whole whenever it is read."""
    over, torn = threading.Event(), []

    def read() -> None:
        while not over.is_set():
            try:
                found = load(job, job.url(1), S3StorageReader(job.url(1)))
                assert found["number"] in (1, 2)
                assert_same(found, make_whole_state(job, found["number"]))
            except BaseException as error:  # noqa: BLE001 - torch's CheckpointException is no Exception
                # It read the old metadata, and objects of it are deleted already: the next look is at the new one.
                if "Remedy: load it again" not in str(error) and "does not exist" not in str(error):
                    torn.append(error)
                    return
            over.wait(0.05)

    thread = threading.Thread(target=read)
    if job.overwrite:
        thread.start()
    try:
        yield
    finally:
        over.set()
        if job.overwrite:
            thread.join()
    if torn:
        raise torn[0]


# --- what is there afterwards -------------------------------------------------------------------------------


def committed_number(job: Job) -> int:
    newest = latest(job.root)
    assert newest is not None
    if not job.overwrite:
        assert newest.step is not None
        return newest.step
    found = {"number": 0}
    dcp.load(found, storage_reader=S3StorageReader(job.url(1)), no_dist=True)
    return found["number"]


def check_whole(job: Job, number: int, directory: Path) -> None:
    """The checkpoint of a save is what was saved, for our reader and for torch's, and nothing newer is there."""
    url = job.url(number)
    newest = latest(job.root)
    assert newest is not None
    assert newest.url == url
    expected = make_whole_state(job, number)
    assert_same(load(job, url, S3StorageReader(url)), expected)
    report = verify(url, full=True)
    assert report.ok, report
    download(url, directory / "download")
    assert_same(load(job, url, FileSystemReader(directory / "download")), expected)
    shutil.rmtree(directory / "download")  # of many tests, whose directories pytest keeps


def load(job: Job, url: str, reader: Any) -> dict[str, Any]:
    found: dict[str, Any] = blank(make_whole_state(job, 0))
    dcp.load(found, storage_reader=reader, no_dist=True)
    return found


def download(url: str, directory: Path) -> None:
    place, client = parse_url(url), boto3.Session().client("s3", endpoint_url=os.environ["DCP_S3_ENDPOINT_URL"])
    prefix = place.key("")
    for found in client.list_objects_v2(Bucket=place.bucket, Prefix=prefix)["Contents"]:
        path = directory / found["Key"].removeprefix(prefix)
        path.parent.mkdir(parents=True, exist_ok=True)
        client.download_file(place.bucket, found["Key"], str(path))


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
