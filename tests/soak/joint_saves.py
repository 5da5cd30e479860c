"""Saves by processes that a test kills: how they begin, and what must be there afterwards."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import boto3
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader

from dcp_s3 import S3StorageReader, latest, verify
from dcp_s3.url import parse_url
from tests.end_to_end.states import assert_same, blank
from tests.killing import read_lines
from tests.soak.joint_worker import Job, make_whole_state

ENVIRONMENT = {
    "DCP_S3_PART_SIZE": "5MiB",
    "DCP_S3_CONCURRENCY": "4",
    "DCP_S3_RANK_TIMEOUT": "3",
    "DCP_S3_RUN_ID": "training",
    "GLOO_SOCKET_IFNAME": "lo",
    "MASTER_ADDR": "127.0.0.1",
}

_LONGEST = 120.0  # seconds: many times rank_timeout, for a busy machine


def make_jobs(
    root: str, directory: Path, ranks: int, layout: Any, by: Any, *, overwrite: bool, attempt: int = 0,
    numbers: tuple[int, ...] = (1, 2), environment: dict[str, str] | None = None, large: bool = False,
) -> list[Job]:  # fmt: skip
    """One for each rank of two saves, the second of which waits for the test."""
    known = dict(os.environ) if environment is None else environment
    return [
        Job(root, directory, known, layout, by, overwrite, numbers, rank, ranks, attempt, large)
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


def committed_number(job: Job) -> int:
    """Which save is the newest one."""
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
