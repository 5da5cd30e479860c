"""What is shared among the ranks of a load, by whom it is fetched, and what each gets: without processes."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import (
    MetadataIndex,
)
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from dcp_s3 import errors
from dcp_s3.load import assign as sharing
from dcp_s3.load.assign import Assignment, SharedPart, SharedPiece, plan_sharing
from dcp_s3.load.exchange import Exchange
from dcp_s3.load.messages import Offer, choose_group
from dcp_s3.load.pieces import Piece
from dcp_s3.load.plan import Box, find_stored
from dcp_s3.load.read import LoadExecutor
from dcp_s3.memory import crc64nvme
from dcp_s3.torch_private import ReaderTransforms
from tests.load.sources import BLOCK, KINDS, PATH, URL, Case, MemoryFetcher, cases, make_case

pytestmark = pytest.mark.timeout(60)

PIECE = 256


@pytest.fixture(autouse=True)
def _small() -> Iterator[None]:
    """What counts as a small part, and as a gap, for tensors of some hundred bytes."""
    with mock.patch.multiple(sharing, _SMALL=BLOCK, _MAX_GAP=64):
        yield


def plan(case: Case) -> list[Assignment] | None:
    return plan_sharing(case.metadata, case.plans, max_piece=PIECE, max_gap=0)


# --- who fetches what ----------------------------------------------------------------------------------


@given(cases(), st.integers(1, 3))
def test_every_byte_comes_from_one_place(case: Case, replicas: int) -> None:
    case = case._replace(wants=[*case.wants, *case.wants[1:] * (replicas - 1)])
    assignments = plan(case)
    assert plan(case) == assignments, "not deterministic"
    if assignments is None:
        return
    assert len(assignments) == len(case.wants)
    assert pickle.loads(pickle.dumps(assignments)) == assignments
    seen: dict[int, dict[int, SharedPiece]] = {}
    for rank, assignment in enumerate(assignments):
        assert assignment.items == tuple(case.plans[rank])
        numbers = [piece.number for piece in assignment.pieces]
        assert numbers == sorted(set(numbers))
        for piece in assignment.pieces:
            seen.setdefault(piece.number, {})[rank] = piece
    fetched: list[tuple[str, int, int]] = []
    for views in seen.values():
        (owner,) = {piece.owner for piece in views.values()}
        assert owner in views, "the owner does not need it"
        assert len({tuple((part.start, part.stop) for part in piece.parts) for piece in views.values()}) == 1
        assert {peer for peer, _ in views[owner].peers} == set(views) - {owner}
        assert not any(piece.peers for rank, piece in views.items() if rank != owner)
        for part in views[owner].parts:
            item = case.plans[owner][part.items[0]]
            stored = find_stored(case.metadata, item.storage_index, item.type, URL)
            assert part.start % BLOCK == 0
            assert part.stop % BLOCK == 0 or part.stop == stored.nbytes
            fetched.append((item.storage_index.fqn, part.start, part.stop))
        assert sum(part.stop - part.start for part in views[owner].parts) <= PIECE
    fetched.sort()
    for (name, _, stop), (other, start, _) in itertools.pairwise(fetched):
        assert name != other or stop <= start, "fetched twice"


def _tensor(*sizes: int) -> torch.Tensor:
    return torch.arange(torch.Size(sizes).numel(), dtype=torch.float32).view(sizes)


def test_two_ranks_that_touch_one_block_share_nothing() -> None:
    tensor = _tensor(10, 24)  # 15 blocks, the 8th of which both need
    wants = [[("t", Box((5 * rank, 0), (5, 24)))] for rank in range(2)]
    assert plan(make_case({"t": tensor}, wants)) is None
    small = _tensor(2, 8)  # one block, which both would fetch
    found = plan(make_case({"t": small}, [[("t", Box((rank, 0), (1, 8)))] for rank in range(2)]))
    assert found is not None
    assert [len(assignment.pieces) for assignment in found] == [1, 1]


def _offers(*ranks: int, **fields: Any) -> list[Offer]:
    offer = Offer(rank=0, shares=True, checkpoint="a", version=1, world_size=3, given=0)
    return [offer._replace(rank=rank, **fields) for rank in ranks]


@pytest.mark.parametrize(
    ("offers", "group", "reason"),
    [
        (_offers(0, 1, 2), "default", ""),
        (_offers(0, 1, 2, given=hash((0, 1, 2))), "given", ""),
        (_offers(0, 1, 2, given=hash((0, 1))), "default", ""),
        (_offers(0, 1, 2, given=hash((0, 1, 2)), world_size=0), "given", ""),
        (_offers(1, 0, 2, given=hash((0, 1, 2))), "", "S3StorageReader(process_group=...)"),
        (_offers(0, 1), "", "S3StorageReader(process_group=...)"),
        (_offers(0, given=hash((0, 1))) + _offers(1), "", "S3StorageReader(process_group=...)"),
        (_offers(0, 1, 2, world_size=0), "", 'init_process_group("cpu:gloo,cuda:nccl")'),
        (_offers(0, 1) + _offers(2, shares=False), "", "load_sharing"),
        (_offers(0, 1) + _offers(2, checkpoint="b", version=2), "", "not all ranks load it"),
        (_offers(0), "", "not all ranks load it"),
    ],
)
def test_ranks_exchange_in_a_group_of_exactly_these(offers: list[Offer], group: str, reason: str) -> None:
    found, why = choose_group(offers, URL)
    assert found == group
    assert reason in why
    assert bool(why) != bool(group)


def test_ranks_that_read_different_metadata_do_not_load() -> None:
    with pytest.raises(errors.CorruptCheckpointError, match="ranks 0 and 1 read different metadata"):
        choose_group(_offers(0) + _offers(1, 2, version=2), URL)


# --- the bytes themselves ------------------------------------------------------------------------------


def shared_items(assignment: Assignment) -> set[int]:
    return {number for piece in assignment.pieces for part in piece.parts for number in part.items}


def exchange(case: Case, targets: list[list[torch.Tensor]]) -> list[set[int]]:
    """Carry out the assignments: what each rank's shared items are loaded into. Returns those that were finished."""
    fetcher = MemoryFetcher({PATH: case.stored})
    executor = LoadExecutor(fetcher, case.metadata, ReaderTransforms(None))
    assignments = plan(case)
    assert assignments is not None
    finished: list[set[int]] = [set() for _ in case.plans]
    pieces: list[dict[int, Piece]] = []
    for rank, assignment in enumerate(assignments):
        planner = mock.Mock(resolve_tensor=mock.Mock(side_effect=targets[rank]))
        made, _ = executor.prepare(case.plans[rank], planner, shared_items(assignment))

        def note(transfer: Any, rank: int = rank, made: Any = made) -> None:
            finished[rank].add(made.index(transfer))

        pieces.append({piece.number: Piece(piece, dict(enumerate(made)), note, URL) for piece in assignment.pieces})
    for owner, assignment in enumerate(assignments):
        for shared_piece in assignment.pieces:
            if shared_piece.owner != owner:
                continue
            piece = pieces[owner][shared_piece.number]
            piece.fetch(fetcher)
            for peer, _ in shared_piece.peers:
                incoming = pieces[peer][shared_piece.number]
                assert incoming.owner == owner
                message, crc = piece.message(peer)
                if message.numel():
                    incoming.buffer(message.numel()).copy_(message)
                    incoming.received(crc)
            piece.sent()
    return finished


@given(cases(), st.sampled_from(KINDS))
def test_every_rank_gets_its_boxes(case: Case, kind: str) -> None:
    assignments = plan(case)
    if assignments is None:
        return
    targets = [[case.target(want, kind) for want in wants] for wants in case.wants]
    finished = exchange(case, targets)
    assert finished == [shared_items(assignment) for assignment in assignments]
    for rank, numbers in enumerate(finished):
        for number in numbers:
            case.check(case.wants[rank][number], targets[rank][number])


def test_damage_at_rest_is_an_error_of_the_owner_and_damage_between_ranks_is_found() -> None:
    case = make_case({"t": _tensor(40)}, [[("t", Box((0,), (40,)))]] * 2)
    damaged = bytearray(case.stored)
    damaged[100] ^= 1
    with pytest.raises(errors.CorruptCheckpointError, match=r"'t' in s3://bucket/run: bytes .* of __0_0.distcp"):
        exchange(case._replace(stored=bytes(damaged)), [[torch.zeros(40)], [torch.zeros(40)]])
    with (
        mock.patch.object(Piece, "message", return_value=(torch.ones(160, dtype=torch.uint8), crc64nvme(b"other"))),
        pytest.raises(errors.PeerReadError, match="damaged on its way from rank 0") as caught,
    ):
        exchange(case, [[torch.zeros(40)], [torch.zeros(40)]])
    assert caught.value.rank == 0


def test_a_planner_must_not_change_what_was_shared_out() -> None:
    size = torch.Size((4,))
    items = [ReadItem(LoadItemType.TENSOR, i, size, i, size, size) for i in map(MetadataIndex, "abc")]
    piece = SharedPiece(0, 1, (SharedPart((0, 2), 0, 64),), ())
    group: Any = None  # nothing is sent
    with mock.patch.object(dist, "get_rank", return_value=0):
        exchange, fetcher = Exchange(group, Assignment(tuple(items), (piece,)), url=URL), MemoryFetcher({})
    assert exchange.shared == {0, 2}
    for changed in (items[:2], items[::-1]):
        with pytest.raises(errors.SaveProtocolError, match="load_sharing=False"):
            exchange.provide(changed, [], fetcher)
