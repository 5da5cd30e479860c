"""Compares what several ranks saved under one name, without collectives. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from torch.distributed.checkpoint.metadata import Metadata

from dcp_s3.format.blocks import get_crc, get_raw_offset
from dcp_s3.offline.diff_plan import EntryDiff, encoding_of
from dcp_s3.torch_private import StorageInfo

_Copies = Mapping[str, Mapping[tuple[int, ...] | None, Sequence[StorageInfo]]]


def compare_copies(entries: Iterable[EntryDiff], a: Sequence[Metadata], b: Sequence[Metadata]) -> list[EntryDiff]:
    """Compare what several ranks wrote under one name. Without collectives each has a copy, perhaps with values of its
    own, and loads that one.

    Args:
        entries: how they compare by their first copies.
        a, b: metadata of the ranks of each checkpoint.
    """
    if len(a) == len(b) == 1:
        return list(entries)
    copies_a, copies_b = _copies(a), _copies(b)
    return [_with_copies(each, copies_a, copies_b) if each.status == "same" else each for each in entries]


def _copies(parts: Sequence[Metadata]) -> _Copies:
    found: dict[str, dict[tuple[int, ...] | None, list[StorageInfo]]] = {}
    for part in parts:
        for index, info in (part.storage_data or {}).items():
            found.setdefault(index.fqn, {}).setdefault(index.offset, []).append(info)
    return found


def _with_copies(entry: EntryDiff, copies_a: _Copies, copies_b: _Copies) -> EntryDiff:
    of_a, of_b = copies_a.get(entry.fqn, {}), copies_b.get(entry.fqn, {})
    unknown, is_tensor = False, entry.kind == "tensor"
    for offset in {**of_a, **of_b}:
        a, b = of_a.get(offset, ()), of_b.get(offset, ())
        contents_a, contents_b = [_content(info) for info in a], [_content(info) for info in b]
        if all(len(each) < 2 or (len({*each}) < 2 and None not in each) for each in (contents_a, contents_b)):
            continue  # the first stands for all
        comparable = len(a) == len(b) or 1 in (len(a), len(b))
        encoded = any(encoding_of(each) or (is_tensor and get_raw_offset(each) is None) for each in (*a, *b))
        if None in (*contents_a, *contents_b) or not comparable:
            unknown = True
        elif contents_a != contents_b:
            if not encoded:
                what = "values" if is_tensor else "bytes"
                return replace(entry, status="changed", what=f"{what} of another rank")
            unknown = True
    return replace(entry, status="unknown", what="several ranks wrote it, not all the same") if unknown else entry


def _content(info: StorageInfo) -> tuple[object, ...] | None:
    """What two copies with the same bytes have in common; None if that is not known."""
    crc = get_crc(info)
    length = None if get_raw_offset(info) is not None else info.length
    return None if crc is None else (crc, length, encoding_of(info))
