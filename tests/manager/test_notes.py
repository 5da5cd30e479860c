"""What ranks tell each other on a board, in any order."""

from __future__ import annotations

from typing import Any

import pytest

from dcp_s3 import errors
from dcp_s3.coordination.board import Board
from dcp_s3.manager.choosing import ChosenCheckpoint
from dcp_s3.manager.notes import Notes, Numbers


class _Board(Board):
    def __init__(self) -> None:
        self.notes: dict[str, str] = {}

    def offer(self, key: str, value: str) -> str:
        assert key.replace("-", "").isalnum()
        return self.notes.setdefault(key, value)

    def look(self, key: str) -> str | None:
        return self.notes.get(key)

    def remove(self, *keys: str) -> None:
        for key in keys:
            self.notes.pop(key, None)


@pytest.fixture
def board() -> _Board:
    return _Board()


@pytest.fixture
def ranks(board: _Board, monkeypatch: pytest.MonkeyPatch) -> list[Notes]:
    """The notes of three ranks, each as in a process of its own."""
    made = []
    for rank in range(3):
        monkeypatch.setattr("dcp_s3.manager.notes.numbers", Numbers())
        made.append(Notes(board, "run", tidies=rank == 0))
        made[-1].saving("not a step")
        made[-1]._key("")
    return made


def _at(step: int) -> ChosenCheckpoint:
    return ChosenCheckpoint(f"s3://bucket/run/step-{step}", step)


def _never() -> Any:
    raise AssertionError("asked, though there is an answer")


def test_the_first_choice_stands_for_all(ranks: list[Notes]) -> None:
    assert ranks[2].choose("latest", lambda: _at(5)) == _at(5)
    assert [each.choose("latest", _never) for each in ranks] == [_at(5)] * 3
    ranks[2].restored()
    assert ranks[2].choose("latest", lambda: _at(7)) == _at(7)
    assert ranks[1].choose("latest", _never) == _at(5), "the first restore of this rank"


def test_that_there_is_nothing_stands_for_all(ranks: list[Notes]) -> None:
    assert ranks[0].choose("latest", lambda: None) is None
    assert ranks[1].choose("latest", lambda: _at(5)) is None


def test_a_rank_that_fails_gets_the_same_again_until_it_asks_for_another(ranks: list[Notes]) -> None:
    for each in ranks:
        assert each.choose("latest", lambda: _at(5)) == _at(5)
    for each in ranks[1:]:
        each.restored()
    assert ranks[0].choose("latest", _never) == _at(5)
    assert ranks[1].choose("4", lambda: _at(4)) == _at(4)
    assert ranks[0].choose("4", _never) == _at(4)


def test_a_rank_that_has_lost_count_takes_no_old_choice(ranks: list[Notes]) -> None:
    for number in (5, 6):
        assert ranks[1].choose("latest", lambda number=number: _at(number)) == _at(number)  # type: ignore[misc]
        ranks[1].restored()
    for each in ranks:
        each.saving(10)
    assert ranks[0].choose("latest", lambda: _at(10)) == _at(10)


def test_ranks_that_ask_for_different_checkpoints_are_told(ranks: list[Notes]) -> None:
    ranks[0].choose(("latest", None, None), lambda: _at(5))
    with pytest.raises(errors.CheckpointError, match="restore different checkpoints"):
        ranks[1].choose(("best", "loss", None), _never)


def test_the_first_decision_stands_and_sigterm_of_any_rank_is_in_the_next(ranks: list[Notes]) -> None:
    assert ranks[1].decide(10, lambda seen: (int(seen), 3), seen=False) == (0, 3, False)
    assert ranks[0].decide(10, _never, seen=True) == (0, 3, False), "what another rank was told"
    assert ranks[2].decide(10, _never, seen=False) == (0, 3, False)
    assert ranks[2].decide(13, lambda seen: (int(seen), 1), seen=False) == (1, 1, True)
    assert ranks[1].decide(13, _never, seen=False) == (1, 1, True)
    with pytest.raises(errors.SaveProtocolError, match="different steps: 13 to 14"):
        ranks[0].decide(14, _never, seen=False)


def test_the_notes_that_all_have_read_are_removed_by_one_rank(ranks: list[Notes], board: _Board) -> None:
    for each in ranks:
        each.choose("latest", lambda: _at(5))
        each.restored()
        each.decide(10, lambda _: (1, 1), seen=False)
    first = [each.saving(10) for each in ranks]
    for each in ranks:
        each.decide(11, lambda _: (1, 1), seen=False)
    before = dict(board.notes)
    for each in first:
        each()
    assert board.notes == before, "the save may be committed without a rank that has not read them"
    second = [each.saving(11) for each in ranks]
    for each in ranks:
        each.decide(12, lambda _: (0, 1), seen=False)
    before = dict(board.notes)
    for each in reversed(second):
        assert board.notes == before
        each()
    assert sorted(left.rsplit("-", 2)[1:] for left in board.notes) == [["look", "1"], ["look", "2"]]


def test_a_rank_that_a_save_was_committed_without_hears_what_was_decided(ranks: list[Notes]) -> None:
    for each in ranks[:2]:
        each.decide(10, lambda _: (1, 1), seen=False)
    for each in ranks[:2]:
        each.saving(10)()
    assert ranks[2].decide(10, _never, seen=False) == (1, 1, False)


def test_managers_of_a_process_have_notes_of_their_own(board: _Board) -> None:
    for _ in range(2):
        assert Notes(board, "another run").choose("latest", lambda: _at(1)) == _at(1)
    assert len(board.notes) == 2
