"""The benchmark of several ranks on one host."""

from __future__ import annotations

import math

import pytest

from benchmarks.cases import Target
from benchmarks.llama import llama_shapes
from benchmarks.ranks import Cost, Sample, summed_up, training_spec, work
from benchmarks.units import GIB, MIB
from tests.memory_s3 import MemoryS3
from tests.ranks import run_ranks


@pytest.mark.parametrize("size", [200 * MIB, GIB, 100 * GIB])
def test_training_keeps_14_bytes_for_each_parameter(size: int) -> None:
    spec = training_spec(size)
    parameters = sum(math.prod(shape) for shape in llama_shapes(size * 4 // 14, layers=32).values())
    assert sum(tensor.nbytes for tensor in spec.values()) == 14 * parameters
    assert size <= 14 * parameters <= 1.3 * size


def test_the_slowest_rank_counts_and_the_cpu_of_all() -> None:
    first = [[Cost(1.0, 2.0, 0.1, 0.2), Cost(5.0, 6.0, 0.5, 0.6)]]
    second = [[Cost(3.0, 1.0, 0.3, 0.4), Cost(4.0, 7.0, 0.7, 0.8)]]
    assert summed_up([first, second], ["a", "b"], 100) == [
        Sample(2, "a", 1, 100, 3.0, 2.0, pytest.approx(0.4), pytest.approx(0.6)),
        Sample(2, "b", 1, 100, 5.0, 7.0, pytest.approx(1.2), pytest.approx(1.4)),
    ]


def test_ranks_save_and_load_in_rounds() -> None:
    with MemoryS3() as server:
        server.create_bucket("bench")
        target = Target("bench", "ranks", server.endpoint_url, "us-east-1", 2)
        keys = {"AWS_ACCESS_KEY_ID": "benchmark", "AWS_SECRET_ACCESS_KEY": "benchmark", "AWS_REGION": "us-east-1"}
        costs = run_ranks(2, work, 8 * MIB, ["dcp_s3"], 2, target, env=keys)
    assert [[len(of_round) for of_round in of_rank] for of_rank in costs] == [[1, 1], [1, 1]]
    assert all(sample.save_seconds > 0 < sample.load_seconds for sample in summed_up(costs, ["dcp_s3"], 8 * MIB))
