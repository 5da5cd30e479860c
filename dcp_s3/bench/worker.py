"""One rank of a benchmark, a process of its own: takes orders on stdin, answers on stdout, a line of JSON each.

It ends when stdin does: with the process that started it, however that ends.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from dcp_s3.bench.figures import NOT_SPILLING, Direction, RankFigures
from dcp_s3.errors import CorruptCheckpointError, DcpS3Error
from dcp_s3.failures import real_causes
from dcp_s3.load.reader import S3StorageReader
from dcp_s3.monitoring import stats
from dcp_s3.ranks import rank
from dcp_s3.save.writer import S3StorageWriter
from dcp_s3.settings import resolve_settings

_TENSOR_BYTES = 64 * 2**20
_DTYPE = torch.int64
_LINKS: dict[Direction, str] = {"save": " upload", "load": " download"}


class State:
    """A synthetic state whose values differ by rank, tensor and round, and are known without a second copy.

    Args:
        size: bytes.
    """

    def __init__(self, size: int) -> None:
        count, most = max(1, size // _DTYPE.itemsize), _TENSOR_BYTES // _DTYPE.itemsize
        generator = torch.Generator().manual_seed(rank())
        self._values = torch.empty(min(count, most), dtype=_DTYPE).random_(generator=generator)
        # Of this rank only, as shards are.
        self.tensors = {
            f"rank-{rank()}/tensor-{start // most}": torch.empty(min(most, count - start), dtype=_DTYPE)
            for start in range(0, count, most)
        }

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def fill(self, number: int) -> None:
        """Set all values to those of a round."""
        for index, tensor in enumerate(self.tensors.values()):
            torch.add(self._values[: len(tensor)], _offset(number, index), out=tensor)

    def clear(self) -> None:
        """Set all values to zero."""
        for tensor in self.tensors.values():
            tensor.zero_()

    def check(self, number: int) -> None:
        """Check that all bits are those of a round.

        Raises:
            CorruptCheckpointError: they are not.
        """
        for index, (name, tensor) in enumerate(self.tensors.items()):
            if not torch.equal(tensor, self._values[: len(tensor)] + _offset(number, index)):
                raise CorruptCheckpointError(f"what was loaded as {name!r} is not what was saved")


def _offset(number: int, index: int) -> int:
    return number * 1_000_003 + index * 7919


def _save(url: str, state: State) -> None:
    save(dict(state.tensors), storage_writer=S3StorageWriter(url, settings=NOT_SPILLING))


def _load(url: str, state: State) -> None:
    load(dict(state.tensors), storage_reader=S3StorageReader(url, settings=NOT_SPILLING))


def _measure(direction: Direction, action: Callable[[], None]) -> RankFigures:
    throttled, hedged = _counts()
    if dist.is_initialized():
        dist.barrier()
    began, cpu = time.perf_counter(), time.process_time()
    action()
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu
    links = [link for name, link in stats().connections.items() if name.endswith(_LINKS[direction])]
    connections = max((int(link["connections"]) for link in links), default=0)
    throttled_now, hedged_now = _counts()
    return RankFigures(
        seconds=seconds,
        cpu_seconds=cpu_seconds,
        connections=min(connections, resolve_settings(NOT_SPILLING).max_connections),
        throttled=throttled_now - throttled,
        hedged=hedged_now - hedged,
    )


def _counts() -> tuple[int, int]:
    """Throttled and hedged requests of this process so far."""
    found = stats()
    throttled = sum(each.throttled for each in found.throttle.values())
    return throttled, sum(each.started for each in found.hedges.values())


class Rank:
    """Carries out the orders of `ranks.Ranks`.

    Args:
        number: number of this rank.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self._state: State | None = None

    def obey(self, order: dict[str, Any]) -> dict[str, Any]:
        """Carry out one order; the answer, for JSON."""
        if order["do"] == "begin":
            return self._begin(order["ranks"], order["size"], order["rendezvous"])
        state, url, number = self._state, order["url"], order["round"]
        if state is None:
            raise ValueError("the first order must be to begin")
        if order["do"] == "save":
            state.fill(number)
            return asdict(_measure("save", lambda: _save(url, state)))
        state.clear()
        figures = _measure("load", lambda: _load(url, state))
        state.check(number)
        return asdict(figures)

    def _begin(self, ranks: int, size: int, rendezvous: str) -> dict[str, Any]:
        torch.set_num_threads(max(1, torch.get_num_threads() // ranks))
        if ranks > 1:
            # The parent ends all ranks if one ends: no rank waits for another for long.
            dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=self._number, world_size=ranks,
                                    timeout=timedelta(days=1))  # fmt: skip
        self._state = State(size)
        return {"size": self._state.size}


def _error(error: BaseException) -> dict[str, str]:
    if isinstance(error, CheckpointException):
        causes = real_causes({number: cause for number, (cause, _) in error.failures.items()})
        error = causes[min(causes)]
    return {"kind": type(error).__name__, "error": str(error) or type(error).__name__}


def main() -> None:
    """Obey until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
    orders: queue.Queue[dict[str, Any]] = queue.Queue()

    def listen() -> None:
        for line in sys.stdin:
            orders.put(json.loads(line))
        os._exit(0)  # also in the middle of a save

    threading.Thread(target=listen, name="dcp_s3-bench", daemon=True).start()
    this = Rank(int(sys.argv[1]))
    while True:
        order = orders.get()
        try:
            answer = this.obey(order)
        except BaseException as error:  # noqa: BLE001 - torch's CheckpointException is no Exception
            answer = _error(error)
            if not isinstance(error, (CheckpointException, DcpS3Error)):
                traceback.print_exc()
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
