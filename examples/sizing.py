"""What a checkpoint of a training asks for: bytes a rank, host memory, objects, requests, seconds, money.

    python -m examples.sizing --parameters 70e9 --hosts 64 --ranks-per-host 8

Requests follow from the functions that saves use. Seconds and prices follow from what is assumed of the network and of
S3, which are options.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from dcp_s3 import Settings
from dcp_s3.s3.multipart import GETS_PER_SECOND, PUTS_PER_SECOND, plan_part_size
from dcp_s3.save.plan import OBJECTS_PER_RANK
from dcp_s3.stage.memory import GENERATIONS
from dcp_s3.units import format_size

#: What S3 gives one connection, bytes per second.
CONNECTION_RATE = 90e6
DAYS_A_MONTH = 30


@dataclass(frozen=True)
class Training:
    """A training and where it saves to. The defaults are assumptions, not measurements."""

    parameters: float = 70e9
    bytes_each: float = 14.0  # bf16 weights, and in fp32 the master weights and AdamW's two moments: 2 + 4 + 4 + 4
    hosts: int = 64
    ranks_per_host: int = 8
    host_network: float = 100e9  # bits per second of one host towards S3
    rank_rate: float = 0.5e9  # bytes per second that one process sends; `dcp-s3 bench` measures it
    saves_a_day: float = 48
    kept: int = 5
    put_price: float = 0.005  # dollars for 1000 PUT, POST, LIST requests; prices are assumed, too
    get_price: float = 0.0004  # dollars for 1000 GET requests
    storage_price: float = 0.023  # dollars for a GB (1e9 bytes) and month


@dataclass(frozen=True)
class Sizes:
    """What follows for one checkpoint."""

    ranks: int
    checkpoint: float  # bytes
    rank: float  # bytes of one rank
    host_staging: float  # bytes of host memory, two generations
    part: int  # bytes
    objects: int
    puts: int
    gets: int
    puts_a_second: float
    seconds: float
    save_dollars: float
    load_dollars: float
    month_dollars: float


def size(training: Training) -> Sizes:
    """Work it out."""
    settings = Settings(part_size="auto", concurrency="auto")
    ranks = training.hosts * training.ranks_per_host
    checkpoint = training.parameters * training.bytes_each
    rank = checkpoint / ranks

    def plan(most_per_second: int) -> int:
        return plan_part_size(
            int(rank), connections=settings.max_connections, ranks=ranks, most=settings.max_part_size,
            requests_per_second=most_per_second,
        )  # fmt: skip

    part = plan(PUTS_PER_SECOND)
    objects = ranks * OBJECTS_PER_RANK
    parts = objects * -(-int(rank / OBJECTS_PER_RANK) // part)
    # Each object: CreateMultipartUpload, its parts, CompleteMultipartUpload. Then the manifest and .metadata.
    puts = parts + 2 * objects + 2
    rate = min(
        training.host_network / 8 / training.ranks_per_host,
        training.rank_rate,
        settings.max_connections * CONNECTION_RATE,
    )
    seconds = rank / rate
    # Each rank reads its own bytes, in runs of an object; .metadata is read once.
    gets = objects * -(-int(rank / OBJECTS_PER_RANK) // plan(GETS_PER_SECOND)) + 1
    save_dollars = puts / 1000 * training.put_price
    return Sizes(
        ranks=ranks,
        checkpoint=checkpoint,
        rank=rank,
        host_staging=GENERATIONS * rank * training.ranks_per_host,
        part=part,
        objects=objects,
        puts=puts,
        gets=gets,
        puts_a_second=parts / seconds,
        seconds=seconds,
        save_dollars=save_dollars,
        load_dollars=gets / 1000 * training.get_price,
        month_dollars=training.kept * checkpoint / 1e9 * training.storage_price
        + DAYS_A_MONTH * training.saves_a_day * save_dollars,
    )


def report(training: Training) -> str:
    """A table for people."""
    found = size(training)
    rows = [
        ("ranks", f"{found.ranks}"),
        ("checkpoint", format_size(found.checkpoint)),
        ("of each rank", format_size(found.rank)),
        ("host memory, two staged copies", f"{format_size(found.host_staging)} a host"),
        ("objects", f"{found.objects}"),
        ("part", format_size(found.part)),
        ("PUT requests of a save", f"{found.puts} ({found.puts_a_second:.0f} a second)"),
        ("GET requests of a load", f"{found.gets}"),
        ("upload", f"{found.seconds:.1f} s ({found.checkpoint / found.seconds / 2**30:.0f} GiB/s in all)"),
        ("price of the requests of a save", f"${found.save_dollars:.2f}"),
        ("price of the requests of a load", f"${found.load_dollars:.3f}"),
        ("price of a month", f"${found.month_dollars:.0f}"),
    ]
    return "\n".join(f"{name:32}{value}" for name, value in rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print what follows from the options."""
    parser = argparse.ArgumentParser(prog="examples.sizing", description=__doc__.partition("\n")[0])
    for name, default in vars(Training()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default, help="%(default)s")
    print(report(Training(**vars(parser.parse_args(arguments)))))


if __name__ == "__main__":
    main()
