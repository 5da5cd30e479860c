"""The work that is lost when a training is killed, by when it saves.

    python -m benchmarks.lost_work --kills 20

A process trains on a state of ``--size`` and saves to the in-memory server, over a link of ``--link`` bytes/s. It is
killed (SIGKILL) at random moments, restarted, and goes on from the newest checkpoint. What it had done beyond that is
lost: at the least what it did while the last committed state was uploaded. Saves by count and by the clock come more
often than they can be uploaded.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3

from benchmarks.save_load import DUMMY_CREDENTIALS
from benchmarks.units import parse_size
from dcp_s3 import CheckpointManager, SaveContinuously, SaveEvery, SavePolicy
from tests.memory_s3 import Link, MemoryS3Process

_BUCKET = "benchmark"
_SETTINGS: dict[str, Any] = {"part_size": "64MiB", "concurrency": 1}  # its rate is the link's
_LEAST_SECONDS = 0.3  # that a process trains before it may be killed


@dataclass(frozen=True)
class Case:
    """How a training saves."""

    when: str

    def policy(self, every: int, seconds: float) -> SavePolicy:
        """The policy of which steps to save."""
        policies: dict[str, Callable[[], SavePolicy]] = {
            f"every {every} steps": lambda: SaveEvery(steps=every),
            f"every {seconds:g} s": lambda: SaveEvery(seconds=seconds),
            "continuously": SaveContinuously,
        }
        return policies[self.when]()


@dataclass(frozen=True)
class Lost:
    """What kills cost one case: for each kill, and of the training as a whole."""

    steps: list[int]
    seconds: list[float]
    pace: float
    """Steps per second while it trained."""


def cases(every: int, seconds: float) -> list[Case]:
    """All of them."""
    return [Case(when) for when in (f"every {every} steps", f"every {seconds:g} s", "continuously")]


def train(root: str, options: argparse.Namespace, case: Case, log: str, environment: dict[str, str]) -> None:
    """Train until killed. Each step adds a line to the log: its number and the time."""
    import torch

    os.environ.update(environment)  # a fork server has that of its own start
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    weight = torch.zeros(parse_size(options.size) // 4)
    policy = case.policy(options.every, options.seconds)
    settings = {**_SETTINGS, **({} if options.endpoint_url is None else {"endpoint_url": options.endpoint_url})}
    with (
        CheckpointManager(root, should_save=policy, settings=settings) as manager,
        open(log, "a", buffering=1) as report,
    ):
        step = manager.restore({"weight": weight}) or 0
        report.write(f"restored {step} {time.monotonic()}\n")
        while True:
            time.sleep(options.step_seconds)
            step += 1
            weight.add_(1.0)
            report.write(f"step {step} {time.monotonic()}\n")
            manager.save(step, {"weight": weight})


def run(root: str, options: argparse.Namespace, case: Case) -> Lost:
    """Train, kill and restart."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "dcp_s3", "dcp_s3.manager.manager", __name__])
    chance = random.Random(options.seed)
    steps: list[int] = []
    seconds: list[float] = []
    trained, took = 0, 0.0
    done: dict[int, float] = {}
    with tempfile.TemporaryDirectory() as directory:
        for number in range(options.kills + 1):
            log = Path(directory) / str(number)
            process: Any = context.Process(
                target=train, args=(root, options, case, str(log), dict(os.environ)), daemon=True
            )
            process.start()
            restored, began = _wait_for_restore(log, process)
            if number:
                last = max(done, default=0)
                steps.append(last - restored)
                seconds.append(done[last] - done[restored])
            if number < options.kills:
                time.sleep(_LEAST_SECONDS + chance.random() * options.life)
            process.kill()
            process.join()
            done = {restored: began, **_steps(log)}
            trained, took = trained + max(done) - restored, took + done[max(done)] - began
    return Lost(steps, seconds, trained / took)


def _wait_for_restore(log: Path, process: Any) -> tuple[int, float]:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.is_alive():
        lines = log.read_text().splitlines() if log.exists() else []
        if lines and len(lines[0].split()) == 3:
            _, step, moment = lines[0].split()
            return int(step), float(moment)
        time.sleep(0.005)
    raise RuntimeError("the training did not begin")


def _steps(log: Path) -> dict[int, float]:
    lines = [line.split() for line in log.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return {int(step): float(moment) for kind, step, moment in lines if kind == "step"}


def show(results: Sequence[tuple[Case, Lost]]) -> str:
    """A table in Markdown."""
    lines = ["| saves | steps lost per kill, median (worst) | seconds lost | steps/s |", "| --- " * 4 + "|"]
    lines += [
        f"| {case.when} | {statistics.median(lost.steps):g} ({max(lost.steps)}) "
        f"| {statistics.median(lost.seconds):.2f} ({max(lost.seconds):.2f}) | {lost.pace:.1f} |"
        for case, lost in results
    ]
    return "\n".join(lines)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lost_work", description=__doc__)
    parser.add_argument("--kills", type=int, default=20, help="kills of each case")
    parser.add_argument("--size", default="8MiB", help="of the state")
    parser.add_argument("--link", default="32MiB", help="bytes per second that the server takes")
    parser.add_argument("--step-seconds", type=float, default=0.02)
    parser.add_argument("--every", type=int, default=10, help="steps from save to save")
    parser.add_argument("--seconds", type=float, default=0.2, help="seconds from save to save")
    parser.add_argument("--life", type=float, default=1.5, help="the most seconds that a process trains")
    parser.add_argument("--seed", type=int, default=17)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run all cases and print what they lose."""
    options = parse(arguments)
    os.environ |= {**DUMMY_CREDENTIALS, "AWS_DEFAULT_REGION": "us-east-1"}
    results = []
    for number, case in enumerate(cases(options.every, options.seconds)):
        with MemoryS3Process(link=Link(0.005, parse_size(options.link))) as server:
            boto3.client("s3", endpoint_url=server.endpoint_url).create_bucket(Bucket=_BUCKET)
            options.endpoint_url = server.endpoint_url
            results.append((case, run(f"s3://{_BUCKET}/{number}", options, case)))
        print(f"{case}: {results[-1][1]}", file=sys.stderr)
    print(show(results))


if __name__ == "__main__":
    main()
