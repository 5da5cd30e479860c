"""When a rank counts as dead, and when others make up for it."""

from __future__ import annotations

from dcp_s3.coordination.merger import Seen, Verdict, judge

_A, _B = "a" * 16, "b" * 16


def _judge(parts: dict[int, str], silent: dict[int, float], **seen: object) -> Verdict:
    return judge(Seen(4, parts, **{"intents": {}, "silent": silent, **seen}), rank_timeout=60.0)  # type: ignore[arg-type]


def test_who_gave_a_sign_lately_may_still_write() -> None:
    assert _judge({0: _A, 1: _A}, {2: 59.0, 3: 61.0}) == Verdict(waiting=(2,))


def test_a_rank_that_said_what_it_holds_is_made_up_for_by_one_that_holds_the_same() -> None:
    found = _judge({0: _A, 1: _B, 2: _B}, {3: 61.0}, intents={3: _B})
    assert found.made_up == {3: 1}


def test_what_nobody_else_holds_is_lost() -> None:
    found = _judge({0: _A, 1: _A, 2: _A}, {3: 61.0}, intents={3: _B})
    assert found == Verdict(lost=(3,))


def test_what_nobody_knows_is_lost_in_the_end() -> None:
    parts = {0: _A, 1: _A, 2: _A}
    assert _judge(parts, {3: 61.0}) == Verdict(waiting=(3,))  # it may not have begun
    assert _judge(parts, {3: 601.0}) == Verdict(lost=(3,))


def test_a_rank_that_failed_before_it_began_is_not_waited_for_any_longer() -> None:
    parts = {0: _A, 1: _A, 2: _A}
    assert _judge(parts, {3: 59.0}, failed={3}) == Verdict(waiting=(3,))  # it may try again
    assert _judge(parts, {3: 61.0}, failed={3}) == Verdict(lost=(3,))
    assert _judge(parts, {3: 61.0}, failed={3}, before=[_A] * 4).made_up == {3: 0}
    assert _judge(parts, {3: 61.0}, failed={3}, intents={3: _A}).made_up == {3: 0}, "it has begun since"


def test_a_rank_holds_what_it_held_before_if_all_others_do() -> None:
    before = [_A, _B, _A, _B]
    assert _judge({0: _A, 1: _B, 2: _A}, {3: 61.0}, before=before).made_up == {3: 1}
    assert _judge({0: _A, 1: _A, 2: _A}, {3: 601.0}, before=before) == Verdict(lost=(3,))
    assert _judge({0: _A, 1: _B}, {2: 61.0, 3: 601.0}, before=before, intents={2: _B}) == Verdict(lost=(3,))
    assert _judge({0: _A, 1: _B, 2: _A}, {3: 601.0}, before=before[:3]) == Verdict(lost=(3,))


def test_several_dead_ranks_are_spread_over_those_that_live() -> None:
    found = _judge({0: _A, 1: _A}, {2: 61.0, 3: 61.0}, intents={2: _A, 3: _A})
    assert found.made_up == {2: 0, 3: 1}


def test_nobody_is_missing() -> None:
    assert _judge(dict.fromkeys(range(4), _A), {}).made_up == {}
