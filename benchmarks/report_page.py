"""The screenshot of ``docs/report.md``: ``python -m benchmarks.report_page``.

It saves checkpoints through `CheckpointManager` to an in-memory S3 server, at a clock that runs ahead, with what
happens to a run in two days: a crash, saves that fail, a loss that is not a number, a pin. Then it writes the report
and takes a picture of it with a headless Chromium.
"""

from __future__ import annotations

import argparse
import io
import math
import os
import random
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from unittest.mock import patch

import boto3
import torch
from PIL import Image

from dcp_s3 import CheckpointManager, errors, pin
from dcp_s3.checkpoint.commit_state import Beginning
from dcp_s3.reporting.report import report
from dcp_s3.url import parse_url
from tests.chromium import Page, visit
from tests.memory_s3 import Fault, MemoryS3, RequestInfo

BUCKET = "training"
ROOT = f"s3://{BUCKET}/llama-70b/run-7"
POLICY = "latest:5 best:2:val_loss:min every:10000 daily:3"

PICTURE = ("report.png", 1400, 2350)
"""File, width and height."""

_FAST = 200.0  # how much faster than the host's the clock runs, so that saves take minutes
_HOUR = 3600.0


class Clock:
    """Seconds since the epoch that run ahead, and jump."""

    def __init__(self, start: float) -> None:
        self._start, self._began = start, time.monotonic()

    def __call__(self) -> float:
        return self._start + _FAST * (time.monotonic() - self._began)

    def go_to(self, when: float) -> None:
        """Jump; never back."""
        self._start += max(0.0, when - self())


@contextmanager
def serve(clock: Clock) -> Iterator[MemoryS3]:
    """An S3 server with a bucket; the environment leads to it, and all clocks of this process are ``clock``."""
    real = time.time
    with MemoryS3(clock=clock) as server:
        os.environ |= {
            "DCP_S3_ENDPOINT_URL": server.endpoint_url, "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b",
            "AWS_DEFAULT_REGION": "us-east-1", "DCP_S3_RETRY_ATTEMPTS": "1",
        }  # fmt: skip
        server.create_bucket(BUCKET)
        time.time = clock
        try:
            with patch("dcp_s3.save.save.Beginning", lambda: Beginning(at=clock())):  # it has bound the real clock
                yield server
        finally:
            time.time = real


def train(server: MemoryS3, clock: Clock, *, saves: int = 96) -> None:
    """A run of two days that saves every half hour."""
    chance = random.Random(7)
    when = clock()
    with CheckpointManager(ROOT) as manager:
        for number in range(1, saves + 1):
            step = 500 * number
            when += _HOUR / 2 + chance.uniform(-60, 60)
            if number == 41:
                when += 5.2 * _HOUR  # the node failed at night
            clock.go_to(when)
            loss = 1.9 + 6 * math.exp(-number / 14) + chance.gauss(0, 0.05)
            state = {"weight": torch.zeros(2**20 + (2**17 if number > 60 else 0)), "step": step}
            metrics = {"val_loss": math.nan if number in (40, 71) else loss, "learning_rate": 3e-4 * min(1, number / 10)
                       * (0.1 + 0.9 * (1 + math.cos(math.pi * number / saves)) / 2)}  # fmt: skip
            server.fault = refuse_commits if number in (39, saves) else None
            with suppress(errors.DcpS3Error, BaseException if server.fault else ()):
                manager.save(step, state, metrics=metrics, blocking=True)
    server.fault = None


def refuse_commits(request: RequestInfo) -> Fault | None:
    """As a policy that allows data, but neither the commit nor cleaning up."""
    if request.operation.startswith("Delete") or request.key.endswith(".metadata"):
        return Fault.error(403, "AccessDenied") if request.method != "GET" else None
    return None


def meddle(server: MemoryS3, clock: Clock) -> None:
    """What else happens to a root."""
    pin(f"{ROOT}/{name(12_000)}", "figure 3 of the paper")
    client = boto3.client("s3", endpoint_url=server.endpoint_url)
    where = parse_url(f"{ROOT}/{name(6_000)}")
    found = client.list_objects_v2(Bucket=BUCKET, Prefix=where.key("__"))["Contents"]
    client.delete_object(Bucket=BUCKET, Key=found[0]["Key"])  # somebody tidied up


def name(step: int) -> str:
    """Name of a checkpoint as `CheckpointManager` gives it."""
    return f"step-{step:08}"


def main(arguments: list[str] | None = None) -> int:
    """Write the page and the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--page", type=Path, default=Path("benchmarks/results/report.html"), help="where to write the page"
    )
    parser.add_argument("--pictures", type=Path, default=Path("docs"), help="where to write the screenshot")
    parser.add_argument("--saves", type=int, default=96)
    given = parser.parse_args(arguments)
    given.page.parent.mkdir(parents=True, exist_ok=True)
    clock = Clock(1_772_400_000.0)
    with serve(clock) as server:
        train(server, clock, saves=given.saves)
        meddle(server, clock)
        found = report(ROOT, given.page, POLICY)
    size = given.page.stat().st_size / 2**20
    sys.stdout.write(f"{given.page}: {size:.2f} MiB, {len(found.plan.decisions)} checkpoints\n")

    path = given.page.resolve()

    file, width, height = PICTURE

    async def take(page: Page) -> bytes:
        await page.show(path, width=width)
        sys.stdout.write("".join(f"{each}\n" for each in page.complaints))
        return await page.screenshot(height=height)

    given.pictures.mkdir(parents=True, exist_ok=True)
    (given.pictures / file).write_bytes(smaller(visit(take)))
    return 0


def smaller(data: bytes) -> bytes:
    """A PNG with a palette: a quarter of the bytes, and nobody sees a difference."""
    image = Image.open(io.BytesIO(data)).convert("RGB").quantize(256, kmeans=3, dither=Image.Dither.NONE)
    out = io.BytesIO()
    image.save(out, "PNG", optimize=True)
    return out.getvalue()


if __name__ == "__main__":
    raise SystemExit(main())
