"""What it costs to look at many checkpoints: time, requests and memory of the catalog.

``python -m benchmarks.catalog --checkpoints 10000 --objects 16`` fills an in-memory S3 server in a process of its own
with checkpoints as dcp_s3 writes them (data objects of one byte: nothing reads them) and prints, for each way to look
at them, the seconds, the requests, and how far resident memory rose above what it was before.

The exit status is 1 if a way took more requests than ``docs/retention.md`` promises.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import boto3
from botocore.config import Config
from torch.distributed.checkpoint.metadata import Metadata

from dcp_s3 import CheckpointCatalog, KeepLatest
from dcp_s3.format.control_files import Manifest, ObjectEntry
from dcp_s3.format.layout import SAVE_ID_KEY, manifest_object
from dcp_s3.format.metadata import dump_metadata
from dcp_s3.s3.client import get_client
from tests.memory_s3 import MemoryS3Process

BUCKET = "bench"
ROOT = f"s3://{BUCKET}/run"

WAYS = ("ls", "scan")


def fill(endpoint_url: str, checkpoints: int, objects: int) -> None:
    """Write the checkpoints ``run/step-...``."""
    config = Config(
        s3={"addressing_style": "path"}, max_pool_connections=8, request_checksum_calculation="when_required"
    )
    client = boto3.Session().client("s3", endpoint_url=endpoint_url, config=config)
    client.create_bucket(Bucket=BUCKET)

    metadata = dump_metadata(Metadata(state_dict_metadata={}, storage_data={}))

    def write(step: int) -> None:
        save_id = f"{step:016x}"
        entries = tuple(ObjectEntry(f"__{rank}_0-{step:012x}.distcp", 1, f"{rank:016x}") for rank in range(objects))
        metrics = {"val_loss": 1 / (1 + step)}
        manifest = Manifest(save_id, time.time(), step, objects, entries, objects, metrics=metrics)
        prefix = f"run/step-{step:08}/"
        for entry in entries:
            client.put_object(Bucket=BUCKET, Key=prefix + entry.path, Body=b"x")
        client.put_object(Bucket=BUCKET, Key=prefix + manifest_object(save_id), Body=manifest.to_json())
        client.put_object(Bucket=BUCKET, Key=prefix + ".metadata", Body=metadata, Metadata={SAVE_ID_KEY: save_id})

    with ThreadPoolExecutor(4) as pool:
        for _ in pool.map(write, range(1, checkpoints + 1)):
            pass


def look(way: str) -> dict[str, float]:
    """Look in one way, in this process; what it took."""
    catalog = CheckpointCatalog(ROOT)
    requests: list[str] = []
    get_client(catalog.settings).meta.events.register(
        "before-send.s3.*", lambda event_name, **_: requests.append(event_name)
    )
    before = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20
    cpu = time.process_time()
    began = time.perf_counter()
    if way == "ls":
        found = len(catalog.checkpoints())
    else:
        snapshot = catalog.scan()
        found = len(snapshot.checkpoints)
        snapshot.plan(KeepLatest(3), grace=86400.0)
    return {
        "checkpoints": found,
        "seconds": time.perf_counter() - began,
        "cpu_seconds": time.process_time() - cpu,
        "requests": len(requests),
        "memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - before,
    }


def allowed_requests(way: str, checkpoints: int, objects: int) -> int:
    """The most that ``docs/retention.md`` promises for checkpoints of ours to which no metrics were added."""
    listing = -(-checkpoints // 1000) + 2 * checkpoints
    pages = -(-(objects + 2) // 1000)
    return listing + {"ls": 0, "scan": 1 + (pages - 1) * checkpoints + 1 + pages}[way]


def main() -> int:
    """Fill, look, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoints", type=int, default=10_000)
    parser.add_argument("--objects", type=int, default=16, help="of each checkpoint")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--look", choices=WAYS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.look:
        print(json.dumps(look(arguments.look)))
        return 0
    status = 0
    with MemoryS3Process() as server:
        environment = {
            **os.environ,
            "DCP_S3_ENDPOINT_URL": server.endpoint_url,
            "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_DEFAULT_REGION": "us-east-1",
        }  # fmt: skip
        os.environ.update(environment)
        began = time.perf_counter()
        fill(server.endpoint_url, arguments.checkpoints, arguments.objects)
        print(f"filled in {time.perf_counter() - began:.0f} s: {arguments.checkpoints} checkpoints")
        for way in arguments.ways:
            command = [sys.executable, "-m", "benchmarks.catalog", "--look", way]
            answer = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
            found = json.loads(answer.stdout.splitlines()[-1])
            allowed = allowed_requests(way, arguments.checkpoints, arguments.objects)
            print(
                f"{way}: {found['checkpoints']:.0f} checkpoints in {found['seconds']:.1f} s "
                f"({found['cpu_seconds']:.1f} s CPU), {found['requests']:.0f} requests (at most {allowed}), "
                f"peak memory + {found['memory_mib']:.0f} MiB"
            )
            if found["requests"] > allowed or found["checkpoints"] != arguments.checkpoints:
                status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
