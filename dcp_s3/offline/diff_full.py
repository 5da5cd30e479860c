"""Compares values that checksums cannot: reads them from both checkpoints, piece by piece."""

from __future__ import annotations

import contextlib
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from dcp_s3 import errors
from dcp_s3.checkpoint.lease import ReaderLease
from dcp_s3.offline.diff_plan import EntryDiff
from dcp_s3.offline.open_checkpoint import OpenCheckpoint, Reading, Target
from dcp_s3.offline.pieces import Box, cut
from dcp_s3.offline.saved import SavedCheckpoint
from dcp_s3.settings import Settings
from dcp_s3.workers import Workers

BATCH = 48 * 2**20
"""Bytes of one checkpoint that are read together."""
_PIECE = BATCH // 4
_LOAD_BUFFERS = 32 * 2**20
_ALIGNMENT = 64
_PIECES = 4096
_MAX_NESTING = 200

_Piece = tuple[str, Box, torch.dtype]
"""Name of a tensor, a part of it, and its dtype."""


def compare_values(
    a: SavedCheckpoint,
    b: SavedCheckpoint,
    entries: Sequence[EntryDiff],
    settings: Settings,
    on_total: Callable[[int], None],
    on_progress: Callable[[int], None],
) -> tuple[list[EntryDiff], int]:
    """Read what is unknown, and objects whose stored bytes differ.

    Returns:
        The entries, with what is known now, and the bytes that were read.

    Raises:
        CorruptCheckpointError, StorageError
    """
    tensors = [each for each in entries if each.status == "unknown" and each.kind == "tensor"]
    objects = [each for each in entries if each.kind == "bytes" and (each.status == "unknown" or each.what == "bytes")]
    if not tensors and not objects:
        return list(entries), 0
    on_total(2 * sum(each.size for each in (*tensors, *objects)))
    found: dict[str, EntryDiff] = {}
    with _reading(a, settings) as one, _reading(b, settings) as two, contextlib.closing(_Pair(one, two)) as pair:
        differ = _compare_tensors(pair, [each.fqn for each in tensors], a, on_progress)
        for each in tensors:
            changed = each.fqn in differ
            found[each.fqn] = replace(each, status="changed" if changed else "same", what="values" if changed else "")
        for each in objects:
            found[each.fqn] = _compare_object(pair, each)
            on_progress(2 * each.size)
    return [found.get(each.fqn, each) for each in entries], pair.bytes_read


@contextlib.contextmanager
def _reading(saved: SavedCheckpoint, settings: Settings) -> Iterator[Reading]:
    """Reads of a checkpoint that no prune deletes meanwhile."""
    checkpoint = OpenCheckpoint(str(saved.url), settings, bounded=False, metadata=saved.metadata)
    lease = ReaderLease(checkpoint.store, saved.url, settings.reader_lease)
    lease.take()
    with lease.renewed():
        lease.check_not_deleted(None, rank=saved.manifests[0].rank if saved.manifests else None)
        with checkpoint.reading(buffers=_LOAD_BUFFERS) as reading:
            yield reading


class _Pair:
    """Both checkpoints, read at the same time."""

    def __init__(self, a: Reading, b: Reading) -> None:
        self._readings = a, b
        self._workers = Workers(2, "dcp_s3-diff")
        self._buffers = [torch.empty(0, dtype=torch.uint8) for _ in range(2)]
        self.bytes_read = 0

    def close(self) -> None:
        self._workers.close()

    def read(self, pieces: Sequence[_Piece]) -> Iterator[tuple[_Piece, torch.Tensor, torch.Tensor]]:
        """The bytes of pieces in both, which are valid until the next call."""
        room = sum(_room(piece) for piece in pieces)
        if self._buffers[0].numel() < room:
            self._buffers = [torch.empty(room, dtype=torch.uint8) for _ in range(2)]
        filled = [
            self._workers.submit(_fill, reading, pieces, buffer)
            for reading, buffer in zip(self._readings, self._buffers, strict=True)
        ]
        for future in filled:
            future.result()
        start = 0
        for piece in pieces:
            size = _size(piece)
            self.bytes_read += 2 * size
            yield piece, self._buffers[0][start : start + size], self._buffers[1][start : start + size]
            start += _room(piece)

    def read_object(self, fqn: str) -> list[Any]:
        """The values of an object in both."""
        return [reading.fill([], [fqn])[fqn] for reading in self._readings]


def _fill(reading: Reading, pieces: Sequence[_Piece], buffer: torch.Tensor) -> None:
    targets, start = [], 0
    for piece in pieces:
        fqn, box, dtype = piece
        tensor = buffer[start : start + _size(piece)].view(dtype).view(box.lengths)
        targets.append(Target(fqn, box.offsets, tensor))
        start += _room(piece)
    reading.fill(targets)


def _size(piece: _Piece) -> int:
    return math.prod(piece[1].lengths) * piece[2].itemsize


def _room(piece: _Piece) -> int:
    return -(-_size(piece) // _ALIGNMENT) * _ALIGNMENT


def _compare_tensors(
    pair: _Pair, names: Sequence[str], a: SavedCheckpoint, on_progress: Callable[[int], None]
) -> set[str]:
    """The names of tensors that differ, bit for bit. One that is known to differ is not read further."""
    differ: set[str] = set()
    for pieces in _batches(names, a, differ, on_progress):
        for piece, one, two in pair.read(pieces):
            on_progress(2 * len(one))
            if not torch.equal(one, two):
                differ.add(piece[0])
    return differ


def _batches(
    names: Sequence[str], a: SavedCheckpoint, differ: set[str], on_progress: Callable[[int], None]
) -> Iterator[list[_Piece]]:
    pieces: list[_Piece] = []
    room = 0
    for fqn in names:
        saved: Any = a.metadata.state_dict_metadata[fqn]
        dtype = saved.properties.dtype
        for box in cut(saved.size, _PIECE // dtype.itemsize):
            piece = fqn, box, dtype
            if fqn in differ:
                on_progress(2 * _size(piece))
                continue
            if pieces and (room + _room(piece) > BATCH or len(pieces) == _PIECES):
                yield pieces
                pieces, room = [], 0
            pieces.append(piece)
            room += _room(piece)
    if pieces:
        yield pieces


def _compare_object(pair: _Pair, entry: EntryDiff) -> EntryDiff:
    try:
        one, two = pair.read_object(entry.fqn)
    except errors.UnsafeItemError as error:
        pair.bytes_read += 2 * entry.size
        return replace(entry, what=f"{entry.what}; not compared: {_first_line(error)}")
    pair.bytes_read += 2 * entry.size
    if equal_values(one, two):
        return replace(entry, status="same", what="")
    return replace(entry, status="changed", what="values")


def _first_line(error: Exception) -> str:
    return str(error).split("\n", 1)[0].split(". Remedy", 1)[0]


def equal_values(a: Any, b: Any) -> bool:
    """Whether two values that were unpickled are the same: of one type, tensors and numbers bit for bit, NaN too.

    What cannot be compared is not the same.
    """
    return _equal(a, b, set(), 0)


def _equal(a: Any, b: Any, seen: set[tuple[int, int]], nesting: int) -> bool:
    if type(a) is not type(b) or nesting > _MAX_NESTING:
        return False
    if isinstance(a, torch.Tensor):
        return _equal_tensors(a, b)
    if isinstance(a, np.ndarray):
        return bool(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes())
    if isinstance(a, np.generic):
        return bool(a.dtype == b.dtype and a.tobytes() == b.tobytes())
    if isinstance(a, float):
        return bool(a.hex() == b.hex())
    if isinstance(a, complex):
        return (a.real.hex(), a.imag.hex()) == (b.real.hex(), b.imag.hex())
    if isinstance(a, (dict, list, tuple)):
        pair = id(a), id(b)
        if pair in seen:  # a value may contain others many times, and itself
            return True
        seen.add(pair)
        if isinstance(a, dict):
            if {(type(key), key) for key in a} != {(type(key), key) for key in b}:  # 1 == True
                return False
            if isinstance(a, OrderedDict) and list(a) != list(b):
                return False
            return all(_equal(a[key], b[key], seen, nesting + 1) for key in a)
        return len(a) == len(b) and all(_equal(x, y, seen, nesting + 1) for x, y in zip(a, b, strict=True))
    try:
        return bool(a == b)
    except (TypeError, ValueError, RuntimeError):
        return False


def _equal_tensors(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape or a.layout != torch.strided or b.layout != torch.strided:
        return False
    try:
        views = [
            each.detach().cpu().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8) for each in (a, b)
        ]
    except (RuntimeError, TypeError):  # for example a quantized one
        return False
    return torch.equal(*views)
