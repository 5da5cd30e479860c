from __future__ import annotations

import os
from pathlib import Path

from dcp_s3 import read_tensors
from examples.hand_sharded import HEAD, KEYS, QUERIES, WIDTH, train
from tests.ranks import run_ranks
from tests.servers import S3Server


def _train_in(directory: str, url: str, steps: int) -> int:
    os.chdir(directory)
    return train(url, steps)


def test_the_training_goes_on_with_other_ranks(root: str, memory_server: S3Server, tmp_path: Path) -> None:
    assert run_ranks(4, _train_in, str(tmp_path), root, 2) == [0] * 4
    assert run_ranks(2, _train_in, str(tmp_path), root, 3) == [2] * 2
    first, last = (read_tensors(f"{root}/step-{step}") for step in (2, 3))
    rows = HEAD * (QUERIES + 2 * KEYS)
    shapes = {name: tuple(tensor.shape) for name, tensor in last.items() if name.startswith("momentum.")}
    assert shapes == {
        "momentum.qkv.weight": (rows, WIDTH),
        "momentum.qkv.bias": (rows,),
        "momentum.dense.weight": (WIDTH, HEAD * QUERIES),
        "momentum.norm.weight": (WIDTH,),
        "momentum.norm.bias": (WIDTH,),
    }
    assert all(not first[name].equal(last[name]) for name in shapes)
    assert last["step"] == 3
    assert not list(tmp_path.iterdir())
