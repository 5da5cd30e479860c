"""Entries of a state that lie in the same memory: tied parameters.

They are received at the same time, and what was saved for them is usually the same. Where it is not (a checkpoint of
untied parameters is loaded into tied ones), the last one in the plan stays, as with torch's readers, which load one
item after the other: such items are read one after the other here, too.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dcp_s3.checkpoint.transfer import ItemTransfer

_Span = tuple[object, int, int, str]  # device, first and last byte, name


def read_in_turn(transfers: Sequence[ItemTransfer]) -> list[list[int]]:
    """Numbers of the items in rounds, to be read one round after the other.

    One round, unless entries of different contents (or of contents that are not known) share memory.
    """
    if not _may_overlap(transfers):
        return [list(range(len(transfers)))]
    by_name: dict[str, list[int]] = {}
    for number, transfer in enumerate(transfers):
        by_name.setdefault(transfer.item.dest_index.fqn, []).append(number)
    turns = dict.fromkeys(by_name, 0)
    for names in _sharing(transfers, by_name):
        if len({_contents(transfers, by_name[name]) for name in names}) > 1 or not _are_known(
            transfers, by_name[names[0]]
        ):
            turns.update({name: turn for turn, name in enumerate(names)})
    rounds: list[list[int]] = [[] for _ in range(1 + max(turns.values(), default=0))]
    for number, transfer in enumerate(transfers):
        rounds[turns[transfer.item.dest_index.fqn]].append(number)
    return rounds


def _may_overlap(transfers: Sequence[ItemTransfer]) -> bool:
    """Whether any two items may have memory in common. Quick: nearly always the answer is no."""
    spans = []
    for transfer in transfers:
        target = transfer.target
        if target is not None:
            if target.layout != torch.strided or not target.is_contiguous():
                return True
            start = target.data_ptr()
            spans.append((start, start + target.nbytes))
    spans.sort()
    end = 0
    for start, stop in spans:
        if start < end:
            return True
        end = stop
    return False


def _sharing(transfers: Sequence[ItemTransfer], by_name: dict[str, list[int]]) -> list[list[str]]:
    """Names of entries whose memory overlaps, in the order of the plan."""
    spans = [span for name, numbers in by_name.items() for span in _spans(name, [transfers[n] for n in numbers])]
    spans.sort(key=lambda span: (str(span[0]), *span[1:]))
    order = {name: place for place, name in enumerate(by_name)}
    found: list[list[str]] = []
    together: set[str] = set()
    device: object = None
    end = 0
    for where, start, stop, name in spans:
        if where != device or start >= end:
            found.append(sorted(together, key=order.__getitem__))
            together, device, end = set(), where, stop
        together.add(name)
        end = max(end, stop)
    found.append(sorted(together, key=order.__getitem__))
    return [names for names in found if len(names) > 1]


def _spans(name: str, transfers: Sequence[ItemTransfer]) -> list[_Span]:
    """Of an entry, one for each storage. Parts of one tensor may interleave; what lies between them is its own."""
    spans: dict[tuple[object, int], tuple[int, int]] = {}
    for transfer in transfers:
        target = transfer.target
        if target is None or target.numel() == 0:
            continue
        try:
            start = target.data_ptr()
            storage = target.untyped_storage().data_ptr()
            strides = target.stride()
        except (RuntimeError, NotImplementedError):
            continue  # no memory of its own: sparse, or a wrapper
        last = sum((size - 1) * stride for size, stride in zip(target.shape, strides, strict=True))
        stop = start + (last + 1) * target.element_size()
        low, high = spans.get((target.device, storage), (start, stop))
        spans[target.device, storage] = min(low, start), max(high, stop)
    return [(device, start, stop, name) for (device, _), (start, stop) in spans.items()]


def _contents(transfers: Sequence[ItemTransfer], numbers: Sequence[int]) -> object:
    """What tells the saved contents of two entries apart."""
    return tuple(
        (item.dest_offsets, item.lengths, item.storage_offsets, tuple(transfers[number].ranges))
        for number in numbers
        for item in (transfers[number].item,)
    )


def _are_known(transfers: Sequence[ItemTransfer], numbers: Sequence[int]) -> bool:
    return all(part.crc is not None for number in numbers for part in transfers[number].ranges)
