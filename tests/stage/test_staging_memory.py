"""What staging costs in memory, measured in a process of its own, with the server in another."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import boto3
import pytest

from tests.memory_s3 import MemoryS3Process

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc/self/status")

_ROOT = Path(__file__).parents[2]
_MIB = 2**20

_OVER_BUDGET = """
import json, os, sys, threading, time
import torch, torch.distributed.checkpoint as dcp
from dcp_s3 import S3Stager, S3StorageReader, S3StorageWriter

url, spill = sys.argv[1:]
torch.set_num_threads(1)
sizes = [1, 7, 20, 36, 64, 128, 256, 512]  # MiB: 1 GiB in all
state = {str(number): torch.empty(size * 2**20 // 8, dtype=torch.int64) for number, size in enumerate(sizes)}

def memory():
    "Bytes of anonymous and shared memory."
    with open("/proc/self/status") as file:
        found = dict(line.split(":") for line in file)
    return sum(int(found[f"Rss{name}"].split()[0]) * 1024 for name in ("Anon", "Shmem"))

def fill(seed):
    for number, tensor in enumerate(state.values()):
        torch.arange(seed + number, seed + number + tensor.numel(), out=tensor)

fill(0)
# Clients and all else that comes once.
dcp.async_save({"w": torch.ones(3)}, storage_writer=S3StorageWriter(url + "/small")).result(60)
before, peak, names = memory(), 0, set()
stop = threading.Event()

def sample():
    global peak
    while not stop.is_set():
        peak = max(peak, memory())
        names.update(os.listdir(spill))
        time.sleep(0.002)

sampler = threading.Thread(target=sample)
sampler.start()
stager = S3Stager(asynchronous=True)  # blocking differs in who waits only
answer = dcp.async_save(state, storage_writer=S3StorageWriter(url + "/large"), async_stager=stager)
answer.staging_completion.result(60)
fill(1000)
answer.upload_completion.result(100)
stop.set()
sampler.join()
stager.close()
dcp.load(state, storage_reader=S3StorageReader(url + "/large"))
right = all(
    torch.equal(tensor, torch.arange(number, number + tensor.numel())) for number, tensor in enumerate(state.values())
)
print(json.dumps({"grown": peak - before, "right": right, "names": sorted(names), "left": os.listdir(spill)}))
"""
_OF_THE_SPILL_TIER = {"drainer.lock", "new", "saves"}


@pytest.fixture
def environment() -> Iterator[dict[str, str]]:
    """Leads a process to a server, with a bucket, in another one."""
    with MemoryS3Process() as server:
        aws = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_DEFAULT_REGION": "us-east-1"}
        with closing(boto3.client(
            "s3", endpoint_url=server.endpoint_url, aws_access_key_id="a", aws_secret_access_key="b",
            region_name="us-east-1",
        )) as client:  # fmt: skip
            client.create_bucket(Bucket="bucket")
        yield {**os.environ, **aws, "PYTHONPATH": str(_ROOT), "DCP_S3_ENDPOINT_URL": server.endpoint_url}


def _run(script: str, environment: dict[str, str], *arguments: Any) -> Any:
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, *map(str, arguments)],
        env=environment, timeout=150, check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])


def _file_system(path: Path) -> str:
    return subprocess.run(
        ["stat", "-f", "-c", "%T", str(path)], check=False, capture_output=True, text=True
    ).stdout.strip()


@pytest.mark.soak
def test_what_exceeds_the_budget_is_not_in_memory(environment: dict[str, str], tmp_path: Path) -> None:
    if _file_system(tmp_path) in ("tmpfs", "ramfs"):
        pytest.skip("the temporary directory is memory")
    spill = tmp_path / "spill"
    spill.mkdir()
    environment = {**environment, "DCP_S3_STAGING_LIMIT": "256MiB", "DCP_S3_SPILL_DIR": str(spill)}
    found = _run(_OVER_BUDGET, environment, "s3://bucket/run", spill)
    print(found)
    assert found["right"]
    assert [name for name in found["names"] + found["left"] if name not in _OF_THE_SPILL_TIER] == []
    assert 100 * _MIB < found["grown"] <= 300 * _MIB, found["grown"] / _MIB
