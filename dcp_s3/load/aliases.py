"""Entries of a state that share memory: tied parameters.

They are received at the same time, and what was saved for them is usually the same. Where it is not (a checkpoint of
untied parameters is loaded into tied ones), the last one in the plan wins, as with torch's readers, which load one item
after the other. Here, too, such items are read one after the other. Files of Hugging Face have one of the tied names:
the others are found by it.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from dcp_s3.load.item_transfer import ItemTransfer
from dcp_s3.tensor_memory import is_plain

_Span = tuple[object, int, int, str]  # device, first and last byte, name


def without_tied(state: dict[str, Any], saved: Container[str]) -> dict[str, Any]:
    """A flat state without the names that are not ``saved`` but are the same memory as one that is."""
    missing = [name for name in state if name not in saved]
    if not missing:
        return state
    found = {_memory(entry) for name, entry in state.items() if name in saved} | {_NOTHING}
    tied = {name for name in missing if _memory(state[name]) in found - {None}}
    return {name: entry for name, entry in state.items() if name not in tied} if tied else state


_NOTHING = "a shard without elements"


def _memory(entry: Any) -> object:
    """What two entries have in common if they are the same memory; None if that cannot be told."""
    local = entry.to_local() if isinstance(entry, DTensor) else entry
    if not isinstance(local, torch.Tensor) or not is_plain(local) or entry.numel() == 0:
        return None
    if local.numel() == 0:
        return _NOTHING  # of this rank; the other ranks tell whether the name is missing
    return local.data_ptr(), local.shape, local.stride(), local.dtype, local.device, entry.shape


def read_in_turn(transfers: Sequence[ItemTransfer]) -> list[list[int]]:
    """Group the items' numbers in rounds, to be read one round after the other.

    There is one round, unless entries with different or unknown contents share memory.
    """
    if all(find_exclusive(transfers)):
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


def find_exclusive(transfers: Sequence[ItemTransfer]) -> list[bool]:
    """Tell for each item whether it shares its memory with no other."""
    spans = []
    for number, transfer in enumerate(transfers):
        span = _span(transfer.target)
        if span is not None:
            spans.append((*span, number))
    spans.sort()
    found = [True] * len(transfers)
    end, last = -1, -1
    for start, stop, number in spans:
        if start < end:
            found[number] = found[last] = False
        if stop > end:
            end, last = stop, number
    return found


def _span(target: torch.Tensor | None) -> tuple[int, int] | None:
    """Addresses of a tensor's first byte and of the byte after its last; None if it has no memory of its own."""
    if target is None or not is_plain(target) or target.numel() == 0:
        return None
    start = target.data_ptr()
    if target.is_contiguous():
        return start, start + target.nbytes
    last = sum((size - 1) * stride for size, stride in zip(target.shape, target.stride(), strict=True))
    return start, start + (last + 1) * target.element_size()


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
    """Spans of an entry, one for each storage. Parts of one tensor may interleave; the gaps count as its own."""
    spans: dict[tuple[object, int], tuple[int, int]] = {}
    for transfer in transfers:
        span, target = _span(transfer.target), transfer.target
        if span is not None and target is not None:
            where = target.device, target.untyped_storage().data_ptr()
            low, high = spans.get(where, span)
            spans[where] = min(low, span[0]), max(high, span[1])
    return [(device, start, stop, name) for (device, _), (start, stop) in spans.items()]


def _contents(transfers: Sequence[ItemTransfer], numbers: Sequence[int]) -> object:
    """A value that tells the saved contents of two entries apart."""
    return tuple(
        (item.dest_offsets, item.lengths, item.storage_offsets, tuple(transfers[number].ranges))
        for number in numbers
        for item in (transfers[number].item,)
    )


def _are_known(transfers: Sequence[ItemTransfer], numbers: Sequence[int]) -> bool:
    return all(part.crc is not None for number in numbers for part in transfers[number].ranges)
