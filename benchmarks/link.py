"""What a slow link costs: saves and loads over one, beside the same without a limit and beside plain sockets.

``python -m benchmarks.link`` starts an in-memory S3 server, in each round once without a limit, and once with a
``--latency`` before each answer and a ``--connection-rate`` in bytes per second. It forks a process that saves
``--transfers`` times, one that loads as often, and for each number of ``--raw`` connections one that sends and one that
receives as many bytes over sockets of its own. So the first transfer is the first thing that its process does.
Printed are medians of the first and of the last transfer, and the ratios of the throughput to that without a limit.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import queue
import socket
import statistics
import sys
import threading
import traceback
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from urllib.parse import urlsplit

import torch
import torch.distributed.checkpoint as dcp

from benchmarks.llama import llama_bytes, llama_shapes
from benchmarks.measure import measure
from benchmarks.save_load import DUMMY_CREDENTIALS
from benchmarks.units import GIB, MIB, parse_size
from dcp_s3 import S3StorageReader, S3StorageWriter
from dcp_s3.memory import crc64nvme, encode_crc
from dcp_s3.s3.store import S3Store
from dcp_s3.settings import resolve_settings
from tests.memory_s3 import Link, MemoryS3Process

BUCKET = "bench"
State = dict[str, torch.Tensor]
Times = list[tuple[float, float]]
"""Wall and CPU seconds of each transfer."""


def save(endpoint_url: str, state: State, transfers: int) -> Times:
    """The last checkpoint stays, as ``run``."""
    settings = {"endpoint_url": endpoint_url}
    times = []
    for _ in range(transfers):
        in_child(lambda: _empty(endpoint_url))
        writer = S3StorageWriter(f"s3://{BUCKET}/run", settings=settings)
        times.append(_timed(partial(dcp.save, state, storage_writer=writer, no_dist=True)))
    return times


def load(endpoint_url: str, state: State, transfers: int) -> Times:
    loaded = {name: torch.full_like(tensor, -2.0) for name, tensor in state.items()}
    times = []
    for _ in range(transfers):
        reader = S3StorageReader(f"s3://{BUCKET}/run", settings={"endpoint_url": endpoint_url})
        times.append(_timed(partial(dcp.load, loaded, storage_reader=reader, no_dist=True)))
    if not all(torch.equal(tensor.view(torch.int32), loaded[name].view(torch.int32)) for name, tensor in state.items()):
        raise RuntimeError("it was not loaded as it was saved")
    return times


def _timed(operation: Callable[[], object]) -> tuple[float, float]:
    sample = measure(operation)
    return sample.wall_seconds, sample.cpu_seconds


# --- sockets alone ----------------------------------------------------------------------------------------


def raw(endpoint_url: str, total: int, connections: int, part: int, *, sends: bool) -> Times:
    """Move ``total`` bytes in requests of ``part`` bytes, with their CRC-64 as this package has it."""
    address = urlsplit(endpoint_url)
    memory = [memoryview(bytearray(b"\1") * part) for _ in range(connections)]
    parts: queue.SimpleQueue[int] = queue.SimpleQueue()

    def work(view: memoryview) -> None:
        with socket.create_connection((address.hostname, address.port)) as sock:
            while True:
                try:
                    start = parts.get_nowait()
                except queue.Empty:
                    return
                path = f"/{BUCKET}/raw/{start // part}"
                if sends:
                    crc = encode_crc(crc64nvme(view))
                    head = (
                        f"PUT {path} HTTP/1.1\r\nContent-Length: {len(view)}\r\nx-amz-checksum-crc64nvme: {crc}\r\n\r\n"
                    )
                    sock.sendall(head.encode())
                    for at in range(0, len(view), MIB):
                        sock.sendall(view[at : at + MIB])
                    _head(sock)
                else:
                    sock.sendall(f"GET {path} HTTP/1.1\r\n\r\n".encode())
                    rest = _head(sock)
                    view[: len(rest)] = rest
                    crc, done = crc64nvme(rest), len(rest)
                    while done < len(view):
                        block, at = view[done : done + 4 * MIB], 0
                        while at < len(block):
                            at += sock.recv_into(block[at:])
                        crc = crc64nvme(block, crc)
                        done += len(block)

    def once() -> None:
        for start in range(0, total, part):
            parts.put(start)
        threads = [threading.Thread(target=work, args=(view,)) for view in memory]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    return [_timed(once)]


def _head(sock: socket.socket) -> bytes:
    """Receive the head of an answer; returns what has come of its body."""
    data = b""
    while b"\r\n\r\n" not in data:
        received = sock.recv(8192)
        if not received:
            raise ConnectionError("the server has closed the connection")
        data += received
    if not data.startswith(b"HTTP/1.1 200"):
        raise RuntimeError(f"refused: {data[:200]!r}")
    return data.partition(b"\r\n\r\n")[2]


# --- rounds -------------------------------------------------------------------------------------------------


def in_child(function: Callable[[], Times], name: str = "") -> Times:
    """Run ``function`` in a child of this process, which has imported all and begun nothing."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        status = 1
        try:
            os.close(reader)
            answer = json.dumps(function()).encode()
            os.write(writer, answer)
            status = 0
        except BaseException:  # noqa: BLE001 - it must not return into the parent's code
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(writer)
    with open(reader, "rb") as pipe:
        answer = pipe.read()
    if os.waitpid(child, 0)[1]:
        raise RuntimeError("a child failed")
    times = [(wall, cpu) for wall, cpu in json.loads(answer)]
    if times:
        print(name, *(f"{wall:.2f} s ({cpu:.2f} s of CPU)" for wall, cpu in times), sep="  ", flush=True)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=parse_size, default=3 * GIB, help="of the state; default: 3GiB")
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--transfers", type=int, default=3, help="of one process; default: %(default)s")
    parser.add_argument("--latency", type=float, default=0.06, help="seconds before each answer; default: %(default)s")
    parser.add_argument("--connection-rate", type=parse_size, default=85 * MIB, help="bytes per second; default: 85MiB")
    parser.add_argument("--raw", type=int, nargs="*", default=[32], help="connections of plain sockets")
    parser.add_argument("--part", type=parse_size, default=32 * MIB, help="of plain sockets; default: 32MiB")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)  # a child cannot use threads that its parent had
    os.environ.update(DUMMY_CREDENTIALS, AWS_REGION="us-east-1")
    size, shapes = llama_bytes(options.size), llama_shapes(options.size)
    state = {name: torch.arange(math.prod(shape)).to(torch.float32).view(shape) for name, shape in shapes.items()}
    found: dict[tuple[str, str], list[Times]] = defaultdict(list)
    links = {"free": None, "slow": Link(options.latency, options.connection_rate)}
    for _ in range(options.rounds):
        for link, speed in links.items():
            with MemoryS3Process(size + 512 * MIB, link=speed) as server:
                for name, operation in operations(server.endpoint_url, state, options):
                    found[name, link].append(in_child(operation, f"{name}, {link}:"))
    for name in dict.fromkeys(name for name, _ in found):
        _show(name, found[name, "free"], found[name, "slow"], size)


def operations(url: str, state: State, options: argparse.Namespace) -> Iterator[tuple[str, Callable[[], Times]]]:
    """What is measured against one server, in this order; it holds one checkpoint at a time."""
    store, size = S3Store(BUCKET, resolve_settings({"endpoint_url": url})), sum(each.nbytes for each in state.values())
    in_child(lambda: store.client.create_bucket(Bucket=BUCKET) and [])
    yield "save", lambda: save(url, state, options.transfers)
    yield "load", lambda: load(url, state, options.transfers)
    in_child(lambda: _empty(url))
    for count in options.raw:
        move = partial(raw, url, size, count, options.part)
        yield f"raw save, {count} connections", partial(move, sends=True)
        yield f"raw load, {count} connections", partial(move, sends=False)


def _empty(url: str) -> Times:
    store = S3Store(BUCKET, resolve_settings({"endpoint_url": url}))
    store.delete([found.key for found in store.list("run/").objects])
    return []


def _show(name: str, free: list[Times], slow: list[Times], size: int) -> None:
    for number in sorted({0, len(free[0]) - 1}):
        walls, cpus = [], []
        for times in (free, slow):
            walls.append(statistics.median(each[number][0] for each in times))
            cpus.append(statistics.median(each[number][1] for each in times) * GIB / size)
        every = " ".join(f"{each[number][0]:.2f}" for each in slow)
        print(
            f"{name}, transfer {number + 1}: free {walls[0]:.2f} s ({cpus[0]:.2f} CPU s/GiB), slow {walls[1]:.2f} s "
            f"({cpus[1]:.2f}), ratio {walls[0] / walls[1]:.2f}; slow: {every}",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())
