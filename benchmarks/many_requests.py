"""Many small requests at once: boto3 in threads, or aiobotocore in one event loop.

``python -m benchmarks.many_requests --latency 0.03`` asks an in-memory S3 server in a process of its own for the heads,
then the bytes, of 2,000 small objects, and prints the seconds and the CPU seconds of this process, the median of a few
rounds. The ways take turns.

- ``map``: `Store.map`, as the catalog and a prune use it.
- ``boto3 in 64 threads``: no more than that.
- ``aiobotocore, 64 tasks``: no more than that; what is asked for next must be a coroutine, too.
- ``aiobotocore, 64 threads``: an event loop in a thread of its own, behind functions that wait for its answers.

aiobotocore must be installed (s3fs needs it, too).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from aiobotocore.config import AioConfig
from aiobotocore.session import AioSession

from dcp_s3.s3.client import client_options
from dcp_s3.s3.store import S3Store
from dcp_s3.settings import Settings, resolve_settings
from tests.memory_s3 import Link, MemoryS3Process

BUCKET = "bench"
OPERATIONS = ("head", "get")


def by_map(store: S3Store, operation: str, keys: list[str]) -> None:
    store.map(lambda store, key: getattr(store, operation)(key), keys)


def by_boto3(store: S3Store, operation: str, keys: list[str], threads: int) -> None:
    client = store.client

    def ask(key: str) -> None:
        if operation == "head":
            client.head_object(Bucket=BUCKET, Key=key)
        else:
            client.get_object(Bucket=BUCKET, Key=key)["Body"].read()

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(ask, keys))


def _connect(settings: Settings, connections: int) -> Any:
    session = AioSession()
    options, config = client_options(settings, session)
    return session.create_client("s3", config=AioConfig(**config | {"max_pool_connections": connections}), **options)


async def _ask(client: Any, operation: str, key: str) -> None:
    if operation == "head":
        await client.head_object(Bucket=BUCKET, Key=key)
    else:
        async with (await client.get_object(Bucket=BUCKET, Key=key))["Body"] as body:
            await body.read()


def by_tasks(store: S3Store, operation: str, keys: list[str], tasks: int) -> None:
    async def work() -> None:
        pending = iter(keys)
        async with _connect(store.settings, tasks) as client:

            async def ask() -> None:
                for key in pending:
                    await _ask(client, operation, key)

            await asyncio.gather(*(ask() for _ in range(tasks)))

    asyncio.run(work())


def by_threads_and_a_loop(store: S3Store, operation: str, keys: list[str], threads: int) -> None:
    loop = asyncio.new_event_loop()
    runner = threading.Thread(target=loop.run_forever)
    runner.start()

    def wait(coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result()

    connection = _connect(store.settings, threads)
    client = wait(connection.__aenter__())
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda key: wait(_ask(client, operation, key)), keys))
    wait(connection.__aexit__(None, None, None))
    loop.call_soon_threadsafe(loop.stop)
    runner.join()
    loop.close()


def ways() -> dict[str, Callable[[S3Store, str, list[str]], None]]:
    found: dict[str, Callable[[S3Store, str, list[str]], None]] = {"map": by_map}
    for name, way, counts in (
        ("boto3 in {} threads", by_boto3, (16, 32, 64)),
        ("aiobotocore, {} tasks", by_tasks, (32, 64, 256)),
        ("aiobotocore, {} threads", by_threads_and_a_loop, (32, 64)),
    ):
        for count in counts:
            found[name.format(count)] = lambda *arguments, way=way, count=count: way(*arguments, count)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--latency", type=float, default=0.03, help="seconds before each answer; default: %(default)s")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    os.environ.update({"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_DEFAULT_REGION": "us-east-1"})
    with MemoryS3Process(link=Link(options.latency)) as server:
        store = S3Store(BUCKET, resolve_settings({"endpoint_url": server.endpoint_url}))
        store.client.create_bucket(Bucket=BUCKET)
        keys = [f"run/step-{number:08}" for number in range(options.requests)]
        store.map(lambda store, key: store.put(key, b"x" * 2000), keys)
        for operation in OPERATIONS:
            took: dict[str, list[tuple[float, float]]] = {}
            for _ in range(options.rounds):
                for name, way in ways().items():
                    wall, cpu = time.perf_counter(), time.process_time()
                    way(store, operation, keys)
                    took.setdefault(name, []).append((time.perf_counter() - wall, time.process_time() - cpu))
            for name, samples in took.items():
                seconds, cpu = (statistics.median(each) for each in zip(*samples, strict=True))
                print(f"{operation}, {name}: {seconds:.2f} s, {cpu:.2f} s of CPU", flush=True)


if __name__ == "__main__":
    main()
