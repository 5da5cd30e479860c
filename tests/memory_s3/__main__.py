"""``python -m tests.memory_s3``: run the server until SIGTERM or SIGINT."""

from __future__ import annotations

import argparse
import math
import signal
import sys
import threading

from benchmarks.units import parse_size

from .http import Link
from .server import MemoryS3


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.memory_s3", description="An S3 server that keeps all in memory."
    )
    parser.add_argument("--port", type=int, default=0, help="0 picks a free port (default)")
    parser.add_argument(
        "--preallocate",
        type=parse_size,
        default=0,
        metavar="SIZE",
        help="memory to touch at start, e.g. 4GiB, so that receiving costs no page faults",
    )
    parser.add_argument("--latency", type=float, default=0.0, metavar="SECONDS", help="before each answer")
    parser.add_argument("--connection-rate", type=parse_size, metavar="SIZE", help="bytes per second of a connection")
    parser.add_argument("--until-stdin-closes", action="store_true", help="also stop when standard input ends")
    options = parser.parse_args()
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    server = MemoryS3(
        port=options.port,
        preallocate=options.preallocate,
        record_requests=False,
        link=Link(options.latency, options.connection_rate or math.inf),
    )
    with server:
        print(server.endpoint_url, flush=True)
        if options.until_stdin_closes:
            threading.Thread(target=_watch_stdin, args=(stopping,), daemon=True).start()
        stopping.wait()


def _watch_stdin(stopping: threading.Event) -> None:
    sys.stdin.buffer.read()
    stopping.set()


if __name__ == "__main__":
    main()
