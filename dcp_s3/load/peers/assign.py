"""Stored bytes that several ranks of a load need, and the rank that fetches them for all. Pure.

    items of all ranks -> saved chunks -> those that are shared -> parts -> pieces -> owners

Ranks that need the same, such as replicas, are a team. Teams are looked at, not ranks, until the owners are chosen.

A chunk is shared as a whole or not at all: if the ranks, each on its own, would together fetch at least a quarter more
bytes than one rank would for all. Its parts are cut where its checksums are, so that any rank that fetches one can
verify it.
"""

from __future__ import annotations

import bisect
import functools
import operator
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from dcp_s3.errors import CorruptCheckpointError
from dcp_s3.format.blocks import MIN_BLOCK
from dcp_s3.format.metadata import is_unproven
from dcp_s3.load.boxes import Box
from dcp_s3.load.peers.pieces import Assignment, Boxes, Peer, SharedPart, SharedPiece
from dcp_s3.load.plan import StoredChunk, block_runs, box_of, find_stored

MAX_PIECE = 16 * 2**20
"""Maximum bytes of a piece, unless a block of its checksums is longer."""

_MAX_BLOCK = 64 * 2**20  # a chunk with longer ones is not shared
_MAX_GAP = 64 * 2**10  # gaps between two parts up to this many bytes are fetched and dropped: the framing of items
_SMALL = 2**20  # parts up to here share a piece with their neighbours; no part is cut for less
_TEAM = 32  # bits of the number of an item

_Need = tuple[tuple[str, torch.Size | None], tuple[torch.Size, torch.Size]]  # name and offset of a chunk; a box of it
_where = operator.attrgetter("storage_index.fqn", "storage_index.offset")
_box = operator.attrgetter("storage_offsets", "lengths")


_Runs = tuple[tuple[int, int], ...]  # of bytes of a chunk


class _Want(NamedTuple):
    """A box of a chunk, and who needs it."""

    box: Box
    runs: _Runs  # bytes of the chunk to fetch for it, in whole blocks
    users: list[int]  # team << 32 | number of the item
    total: int  # number of these items on all ranks


class _Users(NamedTuple):
    """Who needs parts of a chunk. By team: the items, in order, and the boxes that these need."""

    items: dict[int, tuple[int, ...]]
    boxes: dict[int, Boxes]
    teams: tuple[int, ...]


class _Part(NamedTuple):
    start: int  # in the object
    stop: int
    chunk: StoredChunk
    first: int  # in the chunk
    users: _Users


def plan_sharing(
    metadata: Metadata,
    plans: Sequence[Sequence[ReadItem]],
    *,
    max_piece: int,
    max_gap: int,
    group: str = "default",
    tag: int = 0,
) -> list[Assignment] | None:
    """Assign the bytes that several ranks need to the ranks that fetch them.

    Args:
        metadata: metadata of the checkpoint.
        plans: the items of each rank.
        max_piece: maximum bytes of a piece, unless a block of its checksums is longer.
        max_gap: longest gap (bytes) between two runs of a box that is fetched rather than skipped.
        group, tag: see `Assignment`.

    Returns:
        An assignment for each rank, None if there is nothing to share. The same arguments give the same result.
    """
    teams = _find_teams(plans)
    wanted = _find_wanted(plans, teams)
    parts: list[_Part] = []
    sizes = [len(ranks) for ranks in teams.values()]
    # Models repeat their shapes.
    covers: dict[tuple[object, ...], _Runs] = {}
    cut = functools.cache(functools.partial(_cut, max_piece))
    for boxes in wanted.values():
        chunk, block, wants = _find_wants(metadata, boxes, sizes, covers, max_gap, max_piece)
        if chunk is not None:
            parts += _share(chunk, block, wants, cut)
    if not parts:
        return None
    pieces = _coalesce(parts, max_piece)
    ranks = list(teams.values())
    order = _choose_owners(pieces, ranks)
    return [each._replace(group=group, tag=tag) for each in _tell(plans, pieces, ranks, order)]


def _find_teams(plans: Sequence[Sequence[ReadItem]]) -> dict[tuple[_Need, ...], list[int]]:
    """The ranks of each team, by what they need, in the order of their first ranks."""
    teams: dict[tuple[_Need, ...], list[int]] = {}
    for rank, items in enumerate(plans):
        teams.setdefault(tuple(zip(map(_where, items), map(_box, items), strict=True)), []).append(rank)
    return teams


_Boxes = dict[tuple[object, ...], tuple[ReadItem, list[int]]]  # boxes of one chunk: an example, and who needs it


def _find_wanted(
    plans: Sequence[Sequence[ReadItem]], teams: dict[tuple[_Need, ...], list[int]]
) -> dict[tuple[object, ...], _Boxes]:
    """The boxes that are needed of chunks that several ranks need, by name and offset of the chunk."""
    counts: Counter[object] = Counter()
    for needs in teams:
        counts.update({where for where, _ in needs})
    wanted: dict[tuple[object, ...], _Boxes] = {}
    for team, (needs, ranks) in enumerate(teams.items()):
        items, alone = plans[ranks[0]], len(ranks) == 1
        for number, (where, box) in enumerate(needs):
            if alone and counts[where] == 1:
                continue
            boxes = wanted.get(where)
            if boxes is None:
                boxes = wanted[where] = {}
            found = boxes.get(box)
            if found is None:
                boxes[box] = (items[number], [team << _TEAM | number])
            else:
                found[1].append(team << _TEAM | number)
    return wanted


def _find_wants(
    metadata: Metadata,
    boxes: _Boxes,
    sizes: Sequence[int],
    covers: dict[tuple[object, ...], _Runs],
    max_gap: int,
    max_piece: int,
) -> tuple[StoredChunk | None, int, list[_Want]]:
    """The chunk, the bytes at whose multiples it can be cut, and who needs what of it; None if it cannot be shared.

    ``sizes`` are those of the teams. An item that every rank has to decode is shared if it is small, and all of it is
    needed.
    """
    items = [item for item, _ in boxes.values()]
    try:
        stored = find_stored(metadata, items[0].storage_index, items[0].type, "")
    except CorruptCheckpointError:
        return None, 0, []  # the rank that reads it reports what is wrong
    if stored.nbytes <= 0 or any(item.type != items[0].type for item in items):
        return None, 0, []
    if stored.whole:
        needed = stored.tensor is None or all(item.lengths == stored.tensor[1] for item in items)
        block = stored.nbytes
        if block > max_piece or not needed or (stored.tensor is None and items[0].type != LoadItemType.BYTE_IO):
            return None, 0, []
    elif is_unproven(metadata):
        return None, 0, []  # each rank that needs it looks at its head
    else:
        block = MIN_BLOCK if (blocks := stored.blocks) is None else blocks.size
    wants = []
    for item, users in boxes.values():
        shape = (stored.sizes, stored.dtype, block, item.storage_offsets, item.lengths)
        if shape not in covers:
            try:
                found = block_runs(stored.sizes, box_of(item, stored), stored.dtype.itemsize, block, max_gap)
            except ValueError:
                found = []  # the rank that reads it reports what is wrong
            covers[shape] = tuple(found)
        if covers[shape]:
            total = sum([sizes[user >> _TEAM] for user in users])
            wants.append(_Want(box_of(item, stored), covers[shape], users, total))
    return stored, block, wants


def _share(chunk: StoredChunk, block: int, wants: list[_Want], cut: Callable[..., _Cuts]) -> list[_Part]:
    """Cut a chunk into parts; returns none if sharing is not worth it."""
    known: dict[tuple[int, ...], _Users] = {}
    found = []
    for begin, end, here in cut(block, tuple([(want.runs, want.total) for want in wants])):
        if here not in known:
            known[here] = _sort_by_team(tuple([wants[i] for i in here]))
        found.append(_Part(chunk.base + begin, chunk.base + end, chunk, begin, known[here]))
    return found


_Cuts = list[tuple[int, int, tuple[int, ...]]]  # parts of a chunk: first byte, end, and the numbers of the wants there


def _cut(max_piece: int, block: int, wanted: tuple[tuple[_Runs, int], ...]) -> _Cuts:
    """Where to cut a chunk of which these runs are wanted so often; nothing if sharing is not worth it."""
    if block > _MAX_BLOCK:
        return []
    runs: list[list[int]] = []
    for start, stop in sorted({run for each, _ in wanted for run in each}):
        if runs and start <= runs[-1][1]:
            runs[-1][1] = max(runs[-1][1], stop)
        else:
            runs.append([start, stop])
    union = sum(stop - start for start, stop in runs)
    if 4 * sum(_size(each) * total for each, total in wanted) < 5 * union:
        return []
    ends = sorted({end for each, _ in wanted for run in each for end in run})
    found = []
    for first, last in runs:
        cuts = [first]
        for end in ends:
            if cuts[-1] + _SMALL <= end <= last - _SMALL:
                cuts.append(end)
        for start, stop in zip(cuts, [*cuts[1:], last], strict=True):
            step = -(-(stop - start) // -(-(stop - start) // max_piece))  # equal parts
            step = min(-(-step // block), max(1, max_piece // block)) * block
            for begin in range(start, stop, step):
                end = min(begin + step, stop)
                here = tuple([number for number, (each, _) in enumerate(wanted) if _touches(each, begin, end)])
                found.append((begin, end, here))
    return found


def _size(runs: _Runs) -> int:
    return sum([stop - start for start, stop in runs])


def _touches(runs: _Runs, begin: int, end: int) -> bool:
    at = bisect.bisect_left(runs, (end, 0)) - 1 if len(runs) > 1 else 0
    return at >= 0 and runs[at][0] < end and begin < runs[at][1]


def _sort_by_team(wants: tuple[_Want, ...]) -> _Users:
    found: dict[int, list[tuple[int, int]]] = {}
    for kind, want in enumerate(wants):
        for user in want.users:
            found.setdefault(user >> _TEAM, []).append((user & (1 << _TEAM) - 1, kind))
    for each in found.values():
        if len(each) > 1:
            each.sort()
    items = {team: tuple([item for item, _ in each]) for team, each in found.items()}
    boxes = {team: tuple([wants[kind].box for _, kind in each]) for team, each in found.items()}
    return _Users(items, boxes, tuple(sorted(found)))


def _coalesce(parts: list[_Part], max_piece: int) -> list[list[_Part]]:
    """Join neighbours that the same ranks need into one piece."""
    pieces: list[list[_Part]] = []
    begin = 0
    for part in sorted(parts, key=lambda p: (p.chunk.info.relative_path, p.start, p.stop)):
        last = pieces[-1][-1] if pieces else None
        if (
            last is not None
            and part.chunk.info.relative_path == last.chunk.info.relative_path
            and 0 <= part.start - last.stop <= _MAX_GAP
            and max(part.stop - part.start, last.stop - last.start) <= _SMALL
            and part.stop - begin <= max_piece
            and part.users.teams == last.users.teams
        ):
            pieces[-1].append(part)
        else:
            pieces.append([part])
            begin = part.start
    return pieces


def _choose_owners(pieces: list[list[_Part]], teams: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """(index of the piece, owner) in the order in which all ranks take them: each owner's first, second, and so on."""
    load = {rank: 0 for ranks in teams for rank in ranks}
    candidates: dict[tuple[int, ...], list[int]] = {}  # in order: of ranks with the same load the first is taken
    queues: dict[int, list[int]] = {}
    sizes = [piece[-1].stop - piece[0].start for piece in pieces]
    for index in sorted(range(len(pieces)), key=lambda i: (-sizes[i], i)):
        needed_by = pieces[index][0].users.teams
        if needed_by not in candidates:
            candidates[needed_by] = sorted(rank for team in needed_by for rank in teams[team])
        owner = min(candidates[needed_by], key=load.__getitem__)
        load[owner] += sizes[index]
        queues.setdefault(owner, []).append(index)
    turns = [(turn, owner, index) for owner, queue in queues.items() for turn, index in enumerate(sorted(queue))]
    return [(index, owner) for _, owner, index in sorted(turns)]


def _tell(
    plans: Sequence[Sequence[ReadItem]],
    pieces: list[list[_Part]],
    teams: Sequence[Sequence[int]],
    order: list[tuple[int, int]],
) -> list[Assignment]:
    told: list[list[SharedPiece]] = [[] for _ in teams]
    owned: dict[int, list[tuple[int, tuple[Peer, ...]]]] = {}  # by rank: where the piece is in ``told``, and its peers
    team_of = {rank: team for team, ranks in enumerate(teams) for rank in ranks}
    for number, (index, owner) in enumerate(order):
        piece = pieces[index]
        peers: list[Peer] = []
        views: dict[tuple[tuple[int, ...], ...], SharedPiece] = {}
        for team in piece[0].users.teams:
            items = tuple([part.users.items[team] for part in piece])
            if items not in views:
                parts = zip(items, piece, strict=True)
                seen = [SharedPart(own, part.first, part.first + part.stop - part.start) for own, part in parts]
                views[items] = SharedPiece(number, owner, tuple(seen), ())
            told[team].append(views[items])
            needs = tuple([part.users.boxes[team] for part in piece])
            peers += [Peer(rank, needs) for rank in teams[team] if rank != owner]
        peers.sort(key=operator.itemgetter(0))
        owned.setdefault(owner, []).append((len(told[team_of[owner]]) - 1, tuple(peers)))
    assignments = []
    for rank, items_of_rank in enumerate(plans):
        found = told[team_of[rank]].copy()
        for place, peers_of_piece in owned.get(rank, ()):
            found[place] = found[place]._replace(peers=peers_of_piece)
        assignments.append(Assignment(tuple(items_of_rank), tuple(found)))
    return assignments
