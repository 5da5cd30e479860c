"""Runs scripts as `python script.py` does, without importing torch for each: on the path of one interpreter only.

The interpreter imports this module before it opens its script. Here it imports torch, and then forks for each rank
that it is asked for. The child has an environment and output of its own, and goes on to run the script as it is then:
its tracebacks, warnings, exit handlers and exit status are those of any process.
"""

from __future__ import annotations

import json
import os
import sys


def _prepare() -> None:
    import torch
    import torch.distributed.checkpoint  # noqa: F401

    import tests.preload  # noqa: F401


def _become(request: dict[str, object], rank: int) -> None:
    """Be the process of one rank."""
    os.setsid()
    os.environ.clear()
    os.environ.update(request["environment"])  # type: ignore[arg-type]
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    os.chdir(str(request["directory"]))
    out = os.open("out", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(out, 1)
    os.dup2(out, 2)


def _serve() -> None:
    _prepare()
    print("ready", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        children = []
        for rank in range(request["ranks"]):
            child = os.fork()
            if child == 0:
                _become(request, rank)
                return
            children.append(child)
        print(json.dumps({"started": children}), flush=True)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        print(json.dumps(codes), flush=True)
    os._exit(0)


_serve()
