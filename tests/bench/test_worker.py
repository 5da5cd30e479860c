from __future__ import annotations

import pytest

from dcp_s3.bench import worker
from dcp_s3.bench.worker import State
from dcp_s3.errors import CorruptCheckpointError


@pytest.fixture(autouse=True)
def _small_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "_TENSOR_BYTES", 1024)


def test_a_state_has_the_size_that_was_asked_for() -> None:
    assert [State(size).size for size in (8, 1024, 1032, 5000)] == [8, 1024, 1032, 5000]
    assert len(State(1032).tensors) == 2


def test_one_bit_that_differs_is_found() -> None:
    state = State(5000)
    state.fill(1)
    state.check(1)
    list(state.tensors.values())[-1][-1] ^= 1
    with pytest.raises(CorruptCheckpointError, match="rank-0/tensor-4"):
        state.check(1)


def test_what_another_round_saved_is_found() -> None:
    state = State(5000)
    state.fill(1)
    with pytest.raises(CorruptCheckpointError):
        state.check(2)
    state.clear()
    with pytest.raises(CorruptCheckpointError):
        state.check(1)


def test_no_two_tensors_are_the_same() -> None:
    state = State(2048)
    state.fill(1)
    one, other = state.tensors.values()
    assert not one.equal(other)
