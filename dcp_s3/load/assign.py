"""Stored bytes that several ranks of a load need, and the rank that fetches them for all. Pure.

    items of all ranks -> saved chunks -> those that are shared -> parts -> pieces -> owners

Ranks that need the same, such as replicas, are a team. A chunk is shared as a whole or not at all: if the ranks, each
on its own, would together fetch at least a quarter more bytes than one rank would for all. Its parts are cut where its
checksums are, so that any rank that fetches one can verify it.
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
from dcp_s3.load.plan import Box, StoredChunk, block_runs, box_of, find_stored

MAX_PIECE = 16 * 2**20
"""Maximum bytes of a piece, unless a block of its checksums is longer."""

_MAX_BLOCK = 64 * 2**20  # a chunk with longer ones is not shared
_MAX_GAP = 64 * 2**10  # gaps between two parts up to this many bytes are fetched and dropped: the framing of items
_SMALL = 2**20  # parts up to here share a piece with their neighbours; no part is cut for less

# --- what each rank is told ---------------------------------------------------------------------------

Boxes = tuple[Box, ...]
_Peer = tuple[int, tuple[Boxes, ...]]  # a rank that gets a piece, and for each part of it the boxes of its items


class SharedPart(NamedTuple):
    """A run of bytes of a stored chunk, as one rank sees it."""

    items: tuple[int, ...]  # numbers of the rank's items that need bytes of the part
    start: int  # first byte in the chunk
    stop: int  # the byte after the last


class SharedPiece(NamedTuple):
    """The bytes that one request fetches and several ranks need, as seen by one of these ranks."""

    number: int  # place in the order in which all ranks process the pieces
    owner: int  # rank that fetches the piece
    parts: tuple[SharedPart, ...]  # parts in the order in which they lie in the object
    peers: tuple[_Peer, ...]  # ranks that the piece is sent to, in order; for the owner only


class Assignment(NamedTuple):
    """One rank's work on shared pieces."""

    items: tuple[ReadItem, ...]
    """The items of the plan that was shared out: a planner must not change it afterwards."""
    pieces: tuple[SharedPiece, ...]  # pieces that the rank fetches or needs, in order of their numbers
    group: str = "default"  # the process group to exchange them in, see `messages.choose_group`
    tag: int = 0  # the first tag of messages, another one for each load


# --- the plan -----------------------------------------------------------------------------------------

_Need = tuple[tuple[str, torch.Size | None], tuple[torch.Size, torch.Size]]  # name and offset of a chunk; a box of it
_where = operator.attrgetter("storage_index.fqn", "storage_index.offset")
_box = operator.attrgetter("storage_offsets", "lengths")
_Runs = tuple[tuple[int, int], ...]  # of bytes of a chunk
_Wanted = dict[tuple[object, ...], tuple[ReadItem, list[tuple[int, int]]]]
"""Boxes of one chunk: an item that needs it, and all that do, by team and number."""


class _Want(NamedTuple):
    """A box of a chunk, and who needs it."""

    box: Box
    runs: _Runs  # bytes of the chunk to fetch for it, in whole blocks
    users: list[tuple[int, int]]  # team, number of the item
    total: int  # number of these items on all ranks


class _Part(NamedTuple):
    start: int  # in the object
    stop: int
    chunk: StoredChunk
    first: int  # in the chunk
    users: dict[int, tuple[tuple[int, ...], Boxes]]  # by team, in order: the items, and the boxes that these need


def plan_sharing(
    metadata: Metadata,
    plans: Sequence[Sequence[ReadItem]],
    *,
    max_piece: int,
    max_gap: int,
) -> list[Assignment] | None:
    """Assign the bytes that several ranks need to the ranks that fetch them; the same arguments give the same result.

    Args:
        plans: the items of each rank.
        max_piece: maximum bytes of a piece, unless a block of its checksums is longer.
        max_gap: longest gap (bytes) between two runs of a box that is fetched rather than skipped.

    Returns:
        An assignment for each rank, None if there is nothing to share.
    """
    teams: dict[tuple[_Need, ...], list[int]] = {}  # in the order of their first ranks
    for rank, items in enumerate(plans):
        teams.setdefault(tuple(zip(map(_where, items), map(_box, items), strict=True)), []).append(rank)
    members = list(teams.values())
    counts: Counter[object] = Counter()
    for needs in teams:
        counts.update({where for where, _ in needs})
    wanted: dict[object, _Wanted] = {}  # by name and offset of a chunk that several ranks need
    for team, needs in enumerate(teams):
        items, alone = plans[members[team][0]], len(members[team]) == 1
        for number, (where, box) in enumerate(needs):
            if not alone or counts[where] > 1:
                wanted.setdefault(where, {}).setdefault(box, (items[number], []))[1].append((team, number))
    covers: dict[tuple[object, ...], _Runs] = {}  # models repeat their shapes
    cut = functools.cache(functools.partial(_cut, max_piece))
    sizes = [len(each) for each in members]
    parts: list[_Part] = []
    for boxes in wanted.values():
        parts += _share(metadata, boxes, sizes, covers, cut, max_gap, max_piece)
    if not parts:
        return None
    # Neighbours that the same ranks need are one piece.
    pieces: list[list[_Part]] = []
    for part in sorted(parts, key=lambda p: (p.chunk.info.relative_path, p.start, p.stop)):
        last = pieces[-1][-1] if pieces else None
        if (
            last is not None
            and part.chunk.info.relative_path == last.chunk.info.relative_path
            and 0 <= part.start - last.stop <= _MAX_GAP
            and max(part.stop - part.start, last.stop - last.start) <= _SMALL
            and part.stop - pieces[-1][0].start <= max_piece
            and part.users.keys() == last.users.keys()
        ):
            pieces[-1].append(part)
        else:
            pieces.append([part])
    told: list[list[SharedPiece]] = [[] for _ in members]
    owned: dict[int, list[tuple[int, tuple[_Peer, ...]]]] = {}  # by rank: where the piece is in ``told``, and its peers
    team_of = {rank: team for team, each in enumerate(members) for rank in each}
    for number, (index, owner) in enumerate(_choose_owners(pieces, members)):
        piece, peers = pieces[index], list[_Peer]()
        views: dict[tuple[tuple[int, ...], ...], SharedPiece] = {}
        for team in sorted(piece[0].users):
            seen = tuple([part.users[team][0] for part in piece])
            if seen not in views:
                own = [SharedPart(a, p.first, p.first + p.stop - p.start) for a, p in zip(seen, piece, strict=True)]
                views[seen] = SharedPiece(number, owner, tuple(own), ())
            told[team].append(views[seen])
            boxes_of = tuple([part.users[team][1] for part in piece])
            peers += [(rank, boxes_of) for rank in members[team] if rank != owner]
        peers.sort(key=operator.itemgetter(0))
        owned.setdefault(owner, []).append((len(told[team_of[owner]]) - 1, tuple(peers)))
    assignments = []
    for rank, items in enumerate(plans):
        found = told[team_of[rank]].copy()
        for place, peers_of_piece in owned.get(rank, ()):
            found[place] = found[place]._replace(peers=peers_of_piece)
        assignments.append(Assignment(tuple(items), tuple(found)))
    return assignments


_Cuts = list[tuple[int, int, tuple[int, ...]]]  # parts of a chunk: first byte, end, and the numbers of the wants there


def _share(
    metadata: Metadata,
    boxes: _Wanted,
    sizes: Sequence[int],
    covers: dict[tuple[object, ...], _Runs],
    cut: Callable[..., _Cuts],
    max_gap: int,
    max_piece: int,
) -> list[_Part]:
    """Cut a chunk into parts; none if sharing it is not worth it, or if its reader has to report what is wrong with it.
    ``sizes`` are those of the teams."""
    items = [item for item, _ in boxes.values()]
    kind = items[0].type
    try:
        stored = find_stored(metadata, items[0].storage_index, kind, "")
    except CorruptCheckpointError:
        return []
    if stored.nbytes <= 0 or any(item.type != kind for item in items):
        return []
    block = stored.nbytes
    if stored.whole:
        known = kind == LoadItemType.BYTE_IO if stored.tensor is None else True
        if not known or block > max_piece or any(stored.tensor and item.lengths != stored.tensor[1] for item in items):
            return []
    elif is_unproven(metadata):
        return []  # each rank that needs it looks at its head
    else:
        block = MIN_BLOCK if (blocks := stored.blocks) is None else blocks.size
    wants = []
    for item, users in boxes.values():
        shape = (stored.sizes, stored.dtype, block, item.storage_offsets, item.lengths)
        if shape not in covers:
            try:
                found = block_runs(stored.sizes, box_of(item, stored), stored.dtype.itemsize, block, max_gap)
            except ValueError:
                found = []
            covers[shape] = tuple(found)
        if covers[shape]:
            wants.append(_Want(box_of(item, stored), covers[shape], users, sum([sizes[team] for team, _ in users])))
    known_users: dict[tuple[int, ...], dict[int, tuple[tuple[int, ...], Boxes]]] = {}
    parts = []
    for begin, end, here in cut(block, tuple([(want.runs, want.total) for want in wants])):
        if here not in known_users:
            by_team: dict[int, list[tuple[int, Box]]] = {}
            for team, number, box in sorted((team, n, wants[i].box) for i in here for team, n in wants[i].users):
                by_team.setdefault(team, []).append((number, box))
            known_users[here] = {
                team: (tuple([number for number, _ in each]), tuple([box for _, box in each]))
                for team, each in by_team.items()
            }
        parts.append(_Part(stored.base + begin, stored.base + end, stored, begin, known_users[here]))
    return parts


def _cut(max_piece: int, block: int, wanted: tuple[tuple[_Runs, int], ...]) -> _Cuts:
    """Where to cut a chunk of which these runs are wanted so often; nothing if sharing is not worth it."""
    runs: list[list[int]] = []
    for start, stop in sorted({run for each, _ in wanted for run in each}):
        if runs and start <= runs[-1][1]:
            runs[-1][1] = max(runs[-1][1], stop)
        else:
            runs.append([start, stop])
    union = sum([stop - start for start, stop in runs])
    fetched = sum([total * (stop - start) for each, total in wanted for start, stop in each])
    if block > _MAX_BLOCK or 4 * fetched < 5 * union:
        return []

    def touches(each: _Runs, begin: int, end: int) -> bool:
        at = bisect.bisect_left(each, (end, 0)) - 1 if len(each) > 1 else 0
        return at >= 0 and each[at][0] < end and begin < each[at][1]

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
                here = tuple([number for number, (each, _) in enumerate(wanted) if touches(each, begin, end)])
                found.append((begin, end, here))
    return found


def _choose_owners(pieces: list[list[_Part]], teams: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """(index of the piece, owner) in the order in which all ranks take them: each owner's first, second, and so on."""
    load = {rank: 0 for ranks in teams for rank in ranks}
    candidates: dict[tuple[int, ...], list[int]] = {}  # in order: of ranks with the same load the first is taken
    queues: dict[int, list[int]] = {}
    sizes = [piece[-1].stop - piece[0].start for piece in pieces]
    for index in sorted(range(len(pieces)), key=lambda i: (-sizes[i], i)):
        needed_by = tuple(pieces[index][0].users)
        if needed_by not in candidates:
            candidates[needed_by] = sorted(rank for team in needed_by for rank in teams[team])
        owner = min(candidates[needed_by], key=load.__getitem__)
        load[owner] += sizes[index]
        queues.setdefault(owner, []).append(index)
    turns = [(turn, owner, index) for owner, queue in queues.items() for turn, index in enumerate(sorted(queue))]
    return [(index, owner) for _, owner, index in sorted(turns)]
