"""Compares saving and loading through dcp_s3 with the other ways to S3, in one run.

``python -m benchmarks.save_load`` starts an in-memory S3 server in a process of its own, then runs
every case once per round, each time in a fresh process, and alternates the cases, so that whatever
else the machine does falls on all of them. A round saves a Llama-shaped state with ``dcp.save`` and
loads it with ``dcp.load`` into memory that has been touched; one rank, no process group. What was
loaded is compared bit by bit, outside the measured time. ``--endpoint-url`` and ``--bucket`` run
the same on any other S3.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import boto3
from botocore.config import Config
from rich.console import Console

from benchmarks.cases import CASES, Target, reason_to_skip
from benchmarks.llama import llama_bytes
from benchmarks.loopback import measure_loopback
from benchmarks.measure import Sample
from benchmarks.report import Results, Round, machine, save_chart, show
from benchmarks.tls import nginx, tls_in_front_of
from benchmarks.units import GIB, MIB, parse_size
from tests.memory_s3 import Link, MemoryS3Process

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
#: For the embedded server only, which accepts any.
DUMMY_CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "benchmark",
    "AWS_SECRET_ACCESS_KEY": "benchmark",
    "AWS_EC2_METADATA_DISABLED": "true",
}


def main() -> None:
    """Run the benchmark as the command line says, print a table, write JSON and a chart."""
    options = _parse_arguments()
    console = Console(width=None if sys.stdout.isatty() else 110)
    if options.tls and nginx() is None:
        console.print("[yellow]TLS skipped: nginx is not installed")
        return
    skipped = {name: reason for name in options.cases if (reason := reason_to_skip(name))}
    for name, reason in skipped.items():
        console.print(f"[yellow]{name} skipped: {reason}")
    names = [name for name in options.cases if name not in skipped]
    link = Link(options.latency, options.connection_rate or math.inf)
    with serve(options, link=link, tls=options.tls) as (endpoint_url, environment):
        results = Results(machine(), _described(options) | {"skipped": skipped})
        for number in range(1, options.rounds + 1):
            console.print(f"[bold]round {number} of {options.rounds}")
            for name in names:
                target = Target(
                    options.bucket,
                    f"dcp-bench-{uuid.uuid4().hex[:8]}",
                    endpoint_url,
                    options.region,
                    options.threads,
                )
                try:
                    outcome = _run(name, number, options.size, target, environment)
                except subprocess.CalledProcessError as error:
                    console.print(f"[red]{name} failed:[/]\n{error.stderr[-2000:]}")
                    results.failures.setdefault(name, []).append(error.stderr[-2000:])
                    continue
                finally:
                    empty(target, environment)
                results.add(name, outcome)
                console.print(f"  {name:18}{outcome}")
            size = llama_bytes(options.size)
            save, load = measure_loopback(size, options.threads, tls=options.tls)
            outcome = Round(number, size, save, load)
            results.add_limit(outcome)
            console.print(f"  {'raw sockets':18}{outcome}")
    show(results, console)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(asdict(results), indent=1, default=str) + "\n")
    console.print(f"samples: {options.json}")
    if options.png:
        options.png.parent.mkdir(parents=True, exist_ok=True)
        save_chart(results, options.png)
        console.print(f"chart: {options.png}")
    if results.failures:
        sys.exit(1)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.save_load",
        description="Compare saving and loading through dcp_s3 with the other ways to S3.",
    )
    parser.add_argument(
        "--cases",
        type=case_names,
        default=list(CASES),
        metavar="NAME,...",
        help=f"default: {','.join(CASES)}",
    )
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--size", type=parse_size, default=GIB, help="of the state; default: 1GiB")
    parser.add_argument("--threads", type=int, default=4, help="for backends that need it; default: %(default)s")
    parser.add_argument("--latency", type=float, default=0.0, help="seconds before each answer (embedded server only)")
    parser.add_argument("--connection-rate", type=parse_size, help="bytes per second of a connection (likewise)")
    parser.add_argument("--tls", action="store_true", help="nginx terminates TLS in front of it (likewise)")
    parser.add_argument("--endpoint-url", help="another S3 than the embedded in-memory server")
    parser.add_argument("--bucket", default="bench", help="must exist unless embedded")
    parser.add_argument("--region", default="us-east-1", help="default: %(default)s")
    parser.add_argument("--json", type=Path, default=RESULTS / "save_load.json", help="default: %(default)s")
    parser.add_argument("--png", type=Path, help="also draw a bar chart")
    return parser.parse_args()


def _described(options: argparse.Namespace) -> dict[str, Any]:
    """The options that bear on the figures."""
    return {name: value for name, value in vars(options).items() if name not in ("json", "png")}


def case_names(text: str) -> list[str]:
    """The names of cases, separated by commas, as an argument.

    Raises:
        argparse.ArgumentTypeError: there is no such case.
    """
    names = [name.strip() for name in text.split(",")]
    unknown = [name for name in names if name not in CASES]
    if unknown:
        raise argparse.ArgumentTypeError(f"no case {', '.join(unknown)}; there are {', '.join(CASES)}")
    return names


@contextlib.contextmanager
def serve(
    options: argparse.Namespace, *, link: Link | None = None, tls: bool = False
) -> Iterator[tuple[str, dict[str, str]]]:
    """The endpoint, and the environment in which its clients run."""
    if options.endpoint_url:
        yield options.endpoint_url, _environment(options.region, options.endpoint_url)
        return
    with serve_embedded(options.bucket, options.region, llama_bytes(options.size), link=link) as (plain, environment):
        if not tls:
            yield plain, environment
            return
        with tls_in_front_of(plain.removeprefix("http://")) as (port, authority):
            secure = f"https://127.0.0.1:{port}"
            # Of boto3; of the AWS Common Runtime, and so s3torchconnector, which reads the system's place otherwise.
            trusted = {"AWS_CA_BUNDLE": str(authority), "SSL_CERT_FILE": str(authority)}
            yield secure, environment | {"AWS_ENDPOINT_URL": secure} | trusted


@contextlib.contextmanager
def serve_embedded(
    bucket: str, region: str, size: int, *, link: Link | None = None
) -> Iterator[tuple[str, dict[str, str]]]:
    """`serve` by an in-memory server of its own, which has ``bucket`` and memory for ``size`` bytes of checkpoints."""
    # Framing, the unused tail of a block per part, and the warm-up.
    with MemoryS3Process(preallocate=size * 5 // 4 + 256 * MIB, link=link) as server:
        environment = _environment(region, server.endpoint_url) | DUMMY_CREDENTIALS
        _client(server.endpoint_url, environment).create_bucket(Bucket=bucket)
        yield server.endpoint_url, environment


def _environment(region: str, endpoint_url: str) -> dict[str, str]:
    own = {"AWS_REGION": region, "AWS_DEFAULT_REGION": region, "AWS_ENDPOINT_URL": endpoint_url}
    return dict(os.environ) | own


def _client(endpoint_url: str, environment: dict[str, str]) -> Any:
    return boto3.client(
        "s3",
        endpoint_url=endpoint_url,
        region_name=environment["AWS_REGION"],
        aws_access_key_id=environment.get("AWS_ACCESS_KEY_ID"),
        aws_secret_access_key=environment.get("AWS_SECRET_ACCESS_KEY"),
        aws_session_token=environment.get("AWS_SESSION_TOKEN"),
        config=Config(s3={"addressing_style": "path"}),
        verify=environment.get("AWS_CA_BUNDLE"),
    )


def _run(name: str, number: int, size: int, target: Target, environment: dict[str, str]) -> Round:
    """Run a case in a process of its own."""
    request = {"case": name, "size": size, "target": asdict(target)}
    (answer,) = run_worker("benchmarks.worker", request, environment)
    return Round(number, answer["state_bytes"], Sample(**answer["save"]), Sample(**answer["load"]))


def run_worker(module: str, request: dict[str, Any], environment: dict[str, str]) -> Iterator[dict[str, Any]]:
    """Run ``module`` in a process of its own, with ``request`` as its argument; what it prints, as it comes.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    command = [sys.executable, "-m", module, json.dumps(request)]
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process,
    ):
        try:
            for line in process.stdout or ():
                if line.startswith("{"):
                    yield json.loads(line)
        except BaseException:
            process.kill()
            raise
        if process.wait():
            errors.seek(0)
            raise subprocess.CalledProcessError(process.returncode, command, stderr=errors.read())


def empty(target: Target, environment: dict[str, str]) -> None:
    """Delete what a case has left, so that the server's memory is used again."""
    client = _client(target.endpoint_url, environment)
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=target.bucket, Prefix=target.prefix + "/")
    for page in pages:
        keys = [{"Key": entry["Key"]} for entry in page.get("Contents", [])]
        if keys:
            client.delete_objects(Bucket=target.bucket, Delete={"Objects": keys, "Quiet": True})
    client.close()


if __name__ == "__main__":
    main()
