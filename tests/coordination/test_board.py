"""The first note under a key stands, on all ranks, whatever the board is made of."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist

from dcp_s3 import CheckpointCatalog, list_checkpoints
from dcp_s3.coordination.board import Board, GroupBoard, StoredBoard, open_board
from dcp_s3.coordination.identity import Attempt, current_attempt
from dcp_s3.errors import StorageError
from dcp_s3.s3.store import S3Store
from dcp_s3.settings import Settings
from dcp_s3.url import parse_url
from tests.memory_store import MemoryStore
from tests.ranks import run_ranks
from tests.servers import S3Server

_ATTEMPT = Attempt("slurm-1", (1,), "t", 1000.0, 4, 0)
_OTHER = replace(_ATTEMPT, token="u")
_ROOT = parse_url("s3://bucket/run")


def _check(board: Board, other: Board) -> None:
    assert board.look("stop") is None
    assert board.offer("stop", "7") == "7"
    assert board.offer("stop", "8") == "7"
    assert (board.look("stop"), board.look("stop-2")) == ("7", None)
    assert other.look("stop") is None, "of another attempt"


def test_a_store_of_torch() -> None:
    store = dist.HashStore()
    _check(GroupBoard(store, _ATTEMPT), GroupBoard(store, _OTHER))


def test_objects(root: str, server: S3Server) -> None:
    url = parse_url(root)
    store = S3Store(url.bucket, Settings())
    boards = [StoredBoard(store, url, attempt) for attempt in (_ATTEMPT, _OTHER)]
    _check(*boards)
    if server.name == "rclone":
        return  # no conditional writes
    with ThreadPoolExecutor(8) as threads:
        said = list(threads.map(lambda rank: boards[1].offer("stop", str(rank)), range(8)))
    assert len(set(said)) == 1
    assert said[0] == boards[1].look("stop")


def test_a_damaged_note_is_none_and_a_removed_one_is_gone() -> None:
    store = MemoryStore()
    board = StoredBoard(store, _ROOT, _ATTEMPT)
    board.offer("stop", "7")
    [listed] = store.list("").objects
    store.put(listed.key, store.get(listed.key).data.replace(b"7", b"8", 1))
    assert board.look("stop") is None
    board.remove("stop")
    assert not store.list("").objects
    assert board.offer("stop", "9") == "9"


def test_a_store_of_torch_that_is_gone_is_an_error_of_ours() -> None:
    class Gone:
        def check(self, *_: object) -> bool:
            raise dist.DistNetworkError("connection reset")

    with pytest.raises(StorageError, match="store of the process group"):
        GroupBoard(Gone(), _ATTEMPT).look("stop")


@pytest.mark.servers("memory")
def test_notes_are_no_checkpoint_to_whoever_looks(root: str, memory_server: Any) -> None:
    url = parse_url(root)
    open_board(url, _ATTEMPT, Settings()).offer("stop", "7")
    assert list_checkpoints(root) == []
    assert list_checkpoints(root.rpartition("/")[0]) == [], "the run is no checkpoint"
    snapshot = CheckpointCatalog(root).scan(deep=True)
    assert (snapshot.checkpoints, snapshot.leftovers) == ((), ())


def list_objects(memory_server: Any, root: str) -> list[str]:
    return sorted(memory_server.handle.objects(parse_url(root).bucket))


def _offer(root: str) -> tuple[str, str | None, bool]:
    attempt = current_attempt(Settings())
    board = open_board(parse_url(root), attempt, Settings())
    said = board.offer("stop", str(attempt.rank))
    found = said, board.look("stop"), board.nearby
    dist.barrier()  # the first rank has to be there for the others
    return found


@pytest.mark.servers("memory")
def test_ranks_see_the_first_note(root: str, memory_server: Any) -> None:
    found = run_ranks(3, _offer, root)
    assert len(set(found)) == 1
    said, seen, nearby = found[0]
    assert said == seen
    assert nearby
    assert not list_objects(memory_server, root), "nothing on S3"
