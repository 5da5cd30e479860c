"""What hedged GETs do for a load of which some requests straggle, and what they cost one where none does.

``python -m benchmarks.hedging`` starts an in-memory S3 server whose GETs take as long as S3's (a first byte after 30
ms), and loads ranges of one object through `S3Store.read` on as many threads as a load has. Cases alternate: with and
without hedging, and with and without a share of the GETs being late (before the head of the answer, or in the midst of
the body). A short load, of which most requests are made before anything is known, follows a long one; each load is a
process of its own, as far as what is known of latencies goes.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import resource
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from unittest import mock

from rich.console import Console
from rich.table import Table

from benchmarks.units import MIB, parse_size
from dcp_s3.memory import ReadTarget
from dcp_s3.s3 import hedge
from dcp_s3.s3.hedge import HedgeState
from dcp_s3.s3.pressure import known_buckets
from dcp_s3.s3.store import S3Store
from dcp_s3.settings import Settings
from tests.memory_s3 import Fault, MemoryS3, RequestInfo

_BUCKET, _KEY = "bench", "object"


@dataclass(frozen=True)
class Load:
    """One load.

    Attributes:
        seconds: wall time.
        late: requests that the server delayed.
        cpu_seconds: of this process, the server's included.
        hedges: second requests.
    """

    seconds: float
    late: int
    cpu_seconds: float
    hedges: HedgeState


class Delays:
    """Delays a share of the GETs, chosen by a seed; exactly that share of the first requests."""

    def __init__(self, share: float, seconds: float, place: str, requests: int, size: int, first_byte: float) -> None:
        self._share, self._seconds, self._place = share, seconds, place
        self._requests, self._size, self._first_byte = requests, size, first_byte
        self._lock = threading.Lock()
        self.start(0)

    def start(self, seed: int, *, on: bool = False) -> None:
        """For the next load."""
        with self._lock:
            self._rng = random.Random(seed)
            count = round(self._share * self._requests) if on else 0
            self._late = set(self._rng.sample(range(self._requests), count))
            self._on = on
            self._number = 0
            self.late = 0

    def __call__(self, request: RequestInfo) -> Fault | None:
        if request.operation != "GetObject":
            return None
        with self._lock:
            number, self._number = self._number, self._number + 1
            is_late = number in self._late or (
                self._on and number >= self._requests and self._rng.random() < self._share
            )
            self.late += is_late
        if is_late and self._place == "body":
            time.sleep(self._first_byte)
            return Fault.stall(self._size // 2, self._seconds)
        return Fault.straggle(self._first_byte + (self._seconds if is_late else 0))


def main() -> None:
    """Run the benchmark as the command line says and print a table."""
    options = _parse_arguments()
    os.environ.update(AWS_ACCESS_KEY_ID="benchmark", AWS_SECRET_ACCESS_KEY="benchmark")
    os.environ.setdefault("AWS_DEFAULT_REGION", "us-east-1")
    console = Console(width=110)
    for requests in options.requests:
        delays = Delays(options.share, options.delay, options.place, requests, options.request_size, options.first_byte)
        with MemoryS3(fault=delays, record_requests=False) as server:
            server.create_bucket(_BUCKET)
            _run(options, delays, server.endpoint_url, requests, console)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hedging", description="Measure hedged GETs.")
    parser.add_argument("--requests", type=int, nargs="+", default=[64, 20], help="of a load; default: 64 20")
    parser.add_argument("--request-size", type=parse_size, default=16 * MIB, help="default: 16MiB")
    parser.add_argument("--threads", type=int, default=8, help="default: %(default)s")
    parser.add_argument("--share", type=float, default=0.05, help="of the GETs that are late; default: %(default)s")
    parser.add_argument("--delay", type=float, default=2.0, help="seconds; default: %(default)s")
    parser.add_argument("--place", choices=["head", "body"], default="head", help="of the delay; default: %(default)s")
    parser.add_argument("--first-byte", type=float, default=0.03, help="of every GET, seconds; default: %(default)s")
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    return parser.parse_args()


def _run(options: argparse.Namespace, delays: Delays, endpoint_url: str, requests: int, console: Console) -> None:
    size = options.request_size
    settings = Settings(endpoint_url=endpoint_url, concurrency=options.threads)
    bucket = S3Store(_BUCKET, settings)
    data = random.Random(0).randbytes(size)
    bucket.put(_KEY, data)
    # Every range is the same: what is measured is the requests, and the memory is that of one object.
    memory = [bytearray(size) for _ in range(options.threads)]
    loads: dict[tuple[bool, bool], list[Load]] = defaultdict(list)
    for number in range(options.rounds + 1):
        for delayed in (False, True):
            for hedged in (False, True):
                delays.start(number, on=delayed)
                with mock.patch.object(hedge, "_MIN_DELAY", hedge._MIN_DELAY if hedged else math.inf):
                    found = _load(bucket, requests, memory, lambda: delays.late)
                if any(each != data for each in memory[: min(requests, options.threads)]):
                    raise RuntimeError("what was loaded is not what was stored")
                if number:  # the first one opens connections
                    loads[delayed, hedged].append(found)
    _show(loads, f"{requests} x {size // MIB} MiB, {options.threads} threads; {options.share:.0%} of the GETs "
                 f"{options.delay:g} s late ({options.place}); median of {options.rounds}", console)  # fmt: skip


def _load(bucket: S3Store, requests: int, memory: list[bytearray], late: Callable[[], int]) -> Load:
    known_buckets.clear()
    free = list(memory)

    def fetch(_: int) -> None:
        own = free.pop()
        target = ReadTarget(memoryview(own), checksum=True)
        bucket.read(_KEY, 0, [target])
        free.append(own)

    cpu, started = _cpu_seconds(), time.perf_counter()
    with ThreadPoolExecutor(len(memory)) as pool:
        list(pool.map(fetch, range(requests)))
    seconds = time.perf_counter() - started
    return Load(seconds, late(), _cpu_seconds() - cpu, bucket.known.hedges.state)


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _show(loads: dict[tuple[bool, bool], list[Load]], title: str, console: Console) -> None:
    table = Table(title=title)
    for name in ("GETs late", "hedging", "seconds", "lowest-highest", "x undelayed", "CPU s", "late", "hedges", "won",
                 "MiB twice"):  # fmt: skip
        table.add_column(name, justify="right")
    base = statistics.median(load.seconds for load in loads[False, False])
    for (delayed, hedged), found in loads.items():
        times = [load.seconds for load in found]
        median = statistics.median(times)

        def mean(values: list[float]) -> str:
            return f"{statistics.mean(values):.1f}"

        table.add_row(
            "yes" if delayed else "no",
            "on" if hedged else "off",
            f"{median:.2f}",
            f"{min(times):.2f}-{max(times):.2f}",
            f"{median / base:.2f}",
            f"{statistics.median(load.cpu_seconds for load in found):.2f}",
            mean([load.late for load in found]),
            mean([load.hedges.started for load in found]),
            mean([load.hedges.won for load in found]),
            mean([load.hedges.wasted / MIB for load in found]),
        )
    console.print(table)


if __name__ == "__main__":
    main()
