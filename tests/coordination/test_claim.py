"""Of two saves to one URL the newer attempt's has the claim, and the ranks of one save agree on theirs."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_s3.coordination.claim import (
    Claim,
    FoundClaim,
    Join,
    Refuse,
    Write,
    claim,
    claim_of,
    decide,
    has_gone_past,
    is_still_ours,
    parse_claim,
    withdraw,
)
from dcp_s3.coordination.identity import Attempt
from dcp_s3.errors import PreconditionFailedError, SaveProtocolError
from dcp_s3.format.layout import CLAIM
from dcp_s3.s3.store import S3Store
from dcp_s3.settings import Settings
from dcp_s3.store import ABSENT, Expect
from dcp_s3.url import parse_url
from tests.memory_store import MemoryStore

_URL = parse_url("s3://bucket/run/step-1")
_KEY = _URL.key(CLAIM)
_ATTEMPT = Attempt("slurm-1", (1,), "t", 1000.0, 4, 0)


def _claim(number: int = 1, step: int | None = 1, **changes: Any) -> Claim:
    return claim_of(replace(_ATTEMPT, **changes), str(_URL), number, step)


def _put(store: MemoryStore, found: Claim | bytes) -> None:
    store.put(_KEY, found if isinstance(found, bytes) else found.to_json())


_OURS = _claim()
_OLDER = [
    _claim(restart=(0,)),
    _claim(restart=(2,), began=0.0, world_size=8),  # an earlier start of the job, by its clock
    _claim(run="slurm-0"),
    _claim(run="slurm-0", began=1050.0),  # as far as clocks can tell
    _claim(run="slurm-0", began=None, restart=(7,)),
    _claim(token="u"),
    _claim(token="u", began=900.0, world_size=8),
]
_NEWER = [
    _claim(restart=(2,)),
    _claim(restart=(0,), began=9000.0),  # a later start of the job, which counts its restarts anew
    _claim(restart=(1, 1)),
    _claim(run="slurm-2", began=1100.0),
    _claim(token="u", began=1100.0),
]


@pytest.mark.parametrize("theirs", _OLDER, ids=range(len(_OLDER)))
def test_the_claim_of_an_older_attempt_is_replaced(theirs: Claim) -> None:
    assert decide(FoundClaim(theirs, "e"), _OURS) == Write(Expect("e"))
    store = MemoryStore()
    _put(store, theirs)
    claim(store, _URL, _OURS)
    assert is_still_ours(store, _URL, _OURS)
    assert not is_still_ours(store, _URL, theirs)


@pytest.mark.parametrize("theirs", _NEWER, ids=range(len(_NEWER)))
def test_the_claim_of_a_newer_attempt_stays(theirs: Claim) -> None:
    store = MemoryStore()
    _put(store, theirs)
    with pytest.raises(
        SaveProtocolError, match=r"s3://bucket/run/step-1 is refused: a newer attempt.*Remedy"
    ) as raised:
        claim(store, _URL, _OURS)
    assert raised.value.url == str(_URL)
    assert is_still_ours(store, _URL, theirs)


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        (_claim(world_size=8), "8 ranks, this one with 4.*WORLD_SIZE"),
        (_claim(number=2), "number 2.*number 1"),
        (_claim(step=2), "different steps there: 2 and 1"),
    ],
)
def test_ranks_of_one_attempt_that_do_not_fit_are_refused(theirs: Claim, message: str) -> None:
    store = MemoryStore()
    _put(store, theirs)
    with pytest.raises(SaveProtocolError, match=message):
        claim(store, _URL, _OURS)


def test_the_next_save_of_an_attempt_replaces_the_last_one() -> None:
    store = MemoryStore()
    claim(store, _URL, _OURS)
    claim(store, _URL, _claim(number=2))
    assert not is_still_ours(store, _URL, _OURS)


def test_ranks_join_what_another_one_wrote() -> None:
    store = MemoryStore()
    assert not is_still_ours(store, _URL, _OURS)
    claim(store, _URL, _OURS)
    before = store.head(_KEY).etag
    claim(store, _URL, _claim(rank=3))
    assert store.head(_KEY).etag == before, "written again"
    assert decide(None, _OURS) == Write(ABSENT)
    assert decide(FoundClaim(_OURS, "e"), _OURS) == Join()


_TEXT = _OURS.to_json()


@pytest.mark.parametrize(
    "data",
    [b"", b"{}", b"[]", b"null", b"7", b"\xff", _TEXT[:-3], _TEXT.replace(b"slurm-1", b"slurm-2"), b'{"claim": 3}'],
)
def test_a_damaged_or_foreign_claim_is_replaced(data: bytes) -> None:
    assert parse_claim(data) is None
    store = MemoryStore()
    _put(store, data)
    assert not is_still_ours(store, _URL, _OURS)
    claim(store, _URL, _OURS)
    assert is_still_ours(store, _URL, _OURS)


def test_a_claim_with_fields_of_other_kinds_is_foreign() -> None:
    for wrong in ({"world_size": "4"}, {"restart": ("1",)}, {"run": None}, {"began": float("nan")}, {"number": True}):
        values: Mapping[str, Any] = wrong
        assert parse_claim(replace(_OURS, **values).to_json()) is None, wrong


_CLAIMS = st.builds(
    _claim,
    number=st.integers(1, 3),
    run=st.sampled_from(["a", "b", "+ \N{SNOWMAN}\ud800"]),
    restart=st.lists(st.integers(0, 3), max_size=2).map(tuple),
    token=st.sampled_from(["", "t"]),
    began=st.none() | st.floats(0, 1e10),
    world_size=st.integers(1, 5),
    step=st.none() | st.integers(0, 10),
)


@given(_CLAIMS)
def test_claims_survive_the_way_there_and_back(found: Claim) -> None:
    assert parse_claim(found.to_json()) == found


@given(_CLAIMS, _CLAIMS)
def test_no_two_claims_refuse_each_other_unless_they_are_of_one_attempt(one: Claim, other: Claim) -> None:
    """Otherwise nobody could save there any more."""
    both = [decide(FoundClaim(a, "e"), b) for a, b in ((one, other), (other, one))]
    refused = [each for each in both if isinstance(each, Refuse)]
    assert len(refused) < 2 or one.attempt == other.attempt
    assert [isinstance(each, Join) for each in both] == [one == other] * 2


def test_races_are_tried_again_and_end() -> None:
    class Contested(MemoryStore):
        losses = 3

        def put(self, key: str, data: bytes | memoryview, **options: Any) -> None:
            if self.losses:
                self.losses -= 1
                super().put(key, _claim(run=f"other-{self.losses}").to_json())
            super().put(key, data, **options)

    store = Contested()
    claim(store, _URL, _OURS)
    assert is_still_ours(store, _URL, _OURS)
    store.losses = 10**6
    with pytest.raises(SaveProtocolError, match=r"does not begin.*another URL"):
        claim(store, _URL, _claim(number=2))


def test_ranks_that_come_at_once_all_join(root: str) -> None:
    url = parse_url(root).child("step-1")
    store = S3Store(url.bucket, Settings())
    for number in (1, 2):  # the second one replaces
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(lambda rank: claim(store, url, _claim(number, rank=rank)), range(16)))  # noqa: B023
        assert is_still_ours(store, url, _claim(number))
    newer = _claim(restart=(2,))
    claim(store, url, newer)
    with pytest.raises(SaveProtocolError, match="newer attempt"):
        claim(store, url, _OURS)
    assert is_still_ours(store, url, newer)


def test_what_is_withdrawn_is_begun_by_nobody_until_the_next_save() -> None:
    store = MemoryStore()
    ours, later = _claim(), _claim(2)
    claim(store, _URL, ours)
    assert not has_gone_past(store, _URL, ours)
    withdraw(store, _URL, ours)
    assert has_gone_past(store, _URL, ours)
    assert not is_still_ours(store, _URL, ours)
    with pytest.raises(SaveProtocolError, match="has restored a checkpoint since it began its save number 1"):
        claim(store, _URL, ours)
    claim(store, _URL, later)
    assert has_gone_past(store, _URL, ours)
    assert not has_gone_past(store, _URL, later)
    withdraw(store, _URL, ours)
    assert is_still_ours(store, _URL, later), "another save's claim stays"


def test_a_claim_that_another_rank_changes_meanwhile_is_withdrawn_all_the_same() -> None:
    store, ours = MemoryStore(), _claim()
    claim(store, _URL, ours)
    put, raced = store.put, []

    def race(*args: Any, **options: Any) -> Any:
        if not raced:
            raced.append(put(_URL.key(CLAIM), ours.to_json() + b"\n"))
        return put(*args, **options)

    store.put = race  # type: ignore[method-assign]
    withdraw(store, _URL, ours)
    assert raced
    assert not is_still_ours(store, _URL, ours)


def test_a_store_with_conditions_lets_one_of_two_attempts_win_each_time() -> None:
    """Whatever the order of two attempts' requests, the newer one has the claim at the end."""
    older, newer = _claim(restart=(0,)), _claim(restart=(1,))
    for order in itertools.permutations(["read", "write", "newer"]):
        store = MemoryStore()
        held: FoundClaim | None = None
        for event in order:
            if event == "newer":
                claim(store, _URL, newer)
            elif event == "read":
                held = (
                    FoundClaim(parse_claim(store.get(_KEY).data), store.head(_KEY).etag) if store.exists(_KEY) else None
                )
            else:
                decision = decide(held, older)
                try:
                    if isinstance(decision, Write):
                        store.put(_KEY, older.to_json(), expect=decision.expect)
                except PreconditionFailedError:
                    pass
        assert is_still_ours(store, _URL, newer), order
