"""Copies within host memory, by a few threads that share the work.

torch's own copy splits each tensor among its threads and waits for all of them. With a hundred tensors, and one core
busy with a data loader or an upload, it waits a hundred times for the slowest thread. Here each thread takes the next
piece.
"""

from __future__ import annotations

import ctypes
import queue
from collections.abc import Sequence
from typing import NamedTuple

import torch

from dcp_s3.workers import Workers

_PIECE = 8 * 2**20  # bytes
_MAX_THREADS = 8  # more do not copy faster: they share the memory's bandwidth


class MemoryCopy(NamedTuple):
    """``size`` bytes, copied from address ``source`` to address ``target``."""

    target: int
    source: int
    size: int


def run_copies(copies: Sequence[MemoryCopy]) -> None:
    """Carry out ``copies``, which must not overlap. Returns when all are done."""
    pieces: queue.SimpleQueue[MemoryCopy] = queue.SimpleQueue()
    count = 0
    for target, source, size in copies:
        for start in range(0, size, _PIECE):
            pieces.put(MemoryCopy(target + start, source + start, min(_PIECE, size - start)))
            count += 1
    helpers = min(_MAX_THREADS, torch.get_num_threads(), count) - 1
    if helpers < 1:
        _work(pieces)
        return
    workers = Workers(helpers, "dcp_s3-copy")
    try:
        futures = [workers.submit(_work, pieces) for _ in range(helpers)]
        _work(pieces)
        for future in futures:
            future.result()
    finally:
        workers.close()


def _work(pieces: queue.SimpleQueue[MemoryCopy]) -> None:
    while True:
        try:
            target, source, size = pieces.get_nowait()
        except queue.Empty:
            return
        ctypes.memmove(target, source, size)  # releases the interpreter's lock
