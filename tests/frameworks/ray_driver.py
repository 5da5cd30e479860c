"""Runs `examples.ray_train` once for each list of arguments, on a small Ray of its own.

python -m tests.frameworks.ray_driver '["--root", ...]' ...
"""

from __future__ import annotations

import json
import sys

import ray

from examples import ray_train


def main() -> None:
    # Two workers and what Ray needs besides them, whatever this machine has.
    ray.init(num_cpus=4, include_dashboard=False, object_store_memory=80 * 2**20)
    try:
        for arguments in map(json.loads, sys.argv[1:]):
            sys.argv = ["ray_train", *arguments]
            ray_train.main()
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
