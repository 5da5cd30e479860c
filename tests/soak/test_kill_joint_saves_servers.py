"""As test_kill_joint_saves.py, on real servers: a rank is killed at some instant, as nothing sees its requests.

DCP_S3_TEST_KILLS says how many times on each server (10), DCP_S3_TEST_SEED the first seed (0).
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.killing import new_process, read_lines, running
from tests.soak.joint_saves import (
    ENVIRONMENT,
    check_whole,
    committed_number,
    join_all,
    make_jobs,
    said,
    wait_until,
)  # fmt: skip
from tests.soak.joint_worker import save_when_told

pytestmark = [
    pytest.mark.counted,
    pytest.mark.soak,
    pytest.mark.servers("moto"),
    pytest.mark.skipif(sys.platform != "linux", reason="relies on Linux's signals"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
]

KILLS = int(os.environ.get("DCP_S3_TEST_KILLS", "10"))
FIRST_SEED = int(os.environ.get("DCP_S3_TEST_SEED", "0"))

_CASES = (
    ("sharded", "dcp", 3), ("hsdp", "manager", 4), ("fsdp", "separately", 3), ("plain", "dcp", 3),
    ("fsdp", "manager", 3), ("boxes", "dcp", 4), ("sharded", "manager", 3), ("plain", "manager", 4),
)  # fmt: skip
_REPLICATED = ("hsdp", "plain", "boxes")


@pytest.mark.parametrize("seed", range(FIRST_SEED, FIRST_SEED + KILLS))
def test_a_rank_is_killed_at_some_instant(
    s3: Any,
    bucket: str,
    root: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
    seed: int,
) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    rng = random.Random(seed)
    layout, by, ranks = _CASES[seed % len(_CASES)]
    overwrite = by != "manager" and rng.random() < 0.5
    jobs = make_jobs(root, tmp_path, ranks, layout, by, overwrite=overwrite, large=rng.random() < 0.5, own_keys=False)
    victim = rng.randrange(ranks)
    with running([new_process(save_when_told, job) for job in jobs]) as processes:
        began = time.monotonic()
        wait_until(lambda: all(said(job, "ready 2") for job in jobs), processes)
        jobs[0].gate(2).touch()
        time.sleep(rng.uniform(0, min(1.0, time.monotonic() - began)))
        processes[victim].kill()
        join_all(processes)
        killed = processes[victim].exitcode == -9
    record_property("killed", f"{layout} {by} {'overwrite' if overwrite else 'new URL'}: {victim if killed else None}")
    told = {
        rank: read_lines(job.report)[-1].split() for rank, job in enumerate(jobs) if not (killed and rank == victim)
    }
    if not killed or layout in _REPLICATED:
        assert {words[0] for words in told.values()} == {"saved"}, told
    assert {words[0] for words in told.values()} <= {"saved", "failed"}, told
    number = committed_number(jobs[0])
    if "saved" in {words[0] for words in told.values()}:
        assert number == 2, told
    check_whole(jobs[0], number, tmp_path)
    with contextlib.suppress(s3.exceptions.NoSuchUpload):  # rclone's answer where none was ever begun
        for upload in s3.list_multipart_uploads(Bucket=bucket).get("Uploads", ()) if killed else ():
            s3.abort_multipart_upload(Bucket=bucket, Key=upload["Key"], UploadId=upload["UploadId"])
    record_property("committed", number)
