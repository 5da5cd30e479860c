"""What ranks agree on, as threads: those that meet, and those that settle it through a store in any order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dcp_s3 import errors
from dcp_s3.manager.select_checkpoint import ChosenCheckpoint
from tests.manager.thread_ranks import MemoryKeys, ThreadRanks, on_threads, store_ranks


def _refuse(failures: dict[int, BaseException]) -> Exception:
    return errors.CheckpointError(f"refused: {failures}")


def _at(step: int) -> ChosenCheckpoint:
    return ChosenCheckpoint(f"s3://bucket/run/step-{step}", step)


def _never(*_: Any) -> Any:
    raise AssertionError("asked, though there is an answer")


def _on_last(error: BaseException) -> Callable[[ThreadRanks], Any]:
    def work(ranks: ThreadRanks) -> int:
        if ranks.rank == ranks.size - 1:
            raise error
        return ranks.rank

    return work


# --- ranks that meet -------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt()])
def test_what_fails_on_one_rank_is_raised_there_and_refused_elsewhere(error: BaseException) -> None:
    work = _on_last(error)
    first, second, last = on_threads(3, lambda ranks: ranks.agree(lambda: work(ranks), _refuse))
    assert last is error
    assert type(first) is type(second) is errors.CheckpointError
    assert f"refused: {{2: {'ValueError' if isinstance(error, ValueError) else 'CheckpointError'}(" in str(first)


def test_what_user_code_raises_is_the_same_error_on_all() -> None:
    error = ValueError("mine")
    work = _on_last(error)
    found = on_threads(3, lambda ranks: ranks.agree(lambda: work(ranks), _refuse, alike=True))
    assert {str(each) for each in found} == {"refused: {2: ValueError('mine')}"}
    assert found[2].__cause__ is error


def test_ranks_that_ask_about_different_steps_all_raise() -> None:
    found = on_threads(2, lambda ranks: ranks.decide(7 + ranks.rank, lambda _: (False, 1), False))
    assert all("different steps on the ranks: 7 and 8" in str(each) for each in found)


def test_a_policy_that_fails_on_the_first_rank_fails_on_all() -> None:
    def broken(_: bool) -> Any:
        raise ZeroDivisionError("mine")

    first, second = on_threads(2, lambda ranks: ranks.decide(2, broken, False))
    assert type(first) is ZeroDivisionError
    assert "step 2 is not known: the policy has failed on rank 0" in str(second)


# --- ranks that settle it through a store ----------------------------------------------------------------


def test_the_first_choice_stands_for_all() -> None:
    ranks = store_ranks(3, MemoryKeys())
    assert ranks[2].choose("latest", lambda: _at(5)) == _at(5)
    assert [each.choose("latest", _never) for each in ranks[:2]] == [_at(5)] * 2
    assert ranks[2].choose("latest", lambda: None) is None
    assert ranks[1].choose("latest", _never) is None, "that there is nothing stands, too"


@pytest.mark.parametrize(
    "data", [b"", b"{}", b'{"note": "[]", "crc64nvme": "0"}', b'{"note": 1, "crc64nvme": "0"}', b"[1]"]
)
def test_an_answer_that_is_damaged_or_foreign_is_refused_rather_than_replaced_by_one_s_own(data: bytes) -> None:
    keys = MemoryKeys()
    first, second = store_ranks(2, keys)
    first.choose("latest", lambda: _at(5))
    [key], store = keys.keys, keys._store
    store.put(key, data)
    with pytest.raises(errors.SaveProtocolError, match=f"{key} is damaged.*Remedy: delete it, and restart"):
        second.choose("latest", lambda: _at(6))
    assert store.get(key).data == data


def test_ranks_that_ask_for_different_checkpoints_are_told() -> None:
    first, second = store_ranks(2, MemoryKeys())
    first.choose(("latest", None, None), lambda: _at(5))
    with pytest.raises(errors.CheckpointError, match="restore asks for different steps"):
        second.choose(("best", "loss", None), _never)


def test_the_first_decision_stands_and_sigterm_of_any_rank_is_in_the_next() -> None:
    ranks = store_ranks(3, MemoryKeys())
    assert ranks[1].decide(10, lambda seen: (seen, 3), False) == (False, 3, False)
    assert ranks[0].decide(10, _never, True) == (False, 3, False), "what another rank decided"
    assert ranks[2].decide(10, _never, False) == (False, 3, False)
    assert ranks[2].decide(13, lambda seen: (seen, 1), False) == (True, 1, True)
    assert ranks[1].decide(13, _never, False) == (True, 1, True)
    with pytest.raises(errors.SaveProtocolError, match="different steps on the ranks: 13 and 14"):
        ranks[0].decide(14, _never, False)


def test_the_answers_that_all_have_read_are_removed_by_one_rank_two_saves_later() -> None:
    keys = MemoryKeys()
    ranks = store_ranks(3, keys)

    def save(step: int) -> None:
        for each in ranks:
            with pytest.raises(errors.SaveProtocolError, match="which is rank 0 of 1 now"):
                each.count(f"s3://bucket/run/step-{step}", step)  # in this process

    def decide(step: int) -> None:
        for each in ranks:
            each.decide(step, lambda _: (True, 1), False)

    def left() -> list[str]:
        return sorted(key.partition("-0-")[2] for key in keys.keys)

    ranks[0].choose("latest", lambda: _at(5))
    decide(10)
    save(10)
    decide(11)
    for each in ranks:
        each.committed(10)
    assert left() == ["decision-0", "decision-1", "restore-1-none"], "one may have been missing in the save"
    assert ranks[1].choose("latest", lambda: _at(6)) == _at(6), "not what was chosen before the save"
    save(11)
    decide(12)
    ranks[1].committed(11)
    assert "decision-0" in left()
    ranks[0].committed(11)
    assert left() == ["decision-1", "decision-2", "restore-1-10"]
