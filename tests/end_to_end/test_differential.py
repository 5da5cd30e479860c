"""Random states against torch's own storage: same values, keys, counters, and all else that a load may touch.

DCP_S3_TEST_STATES says how many states there are without ranks (9); with 1 to 3 ranks a third of it each.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.end_to_end import differential
from tests.end_to_end.random_cases import Case, cases
from tests.ranks import run_ranks

STATES = int(os.environ.get("DCP_S3_TEST_STATES", "9"))
_SECONDS = 20
"""For a state; on an idle machine it takes one."""

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*TypedStorage is deprecated:UserWarning"),
    pytest.mark.timeout(120 + _SECONDS * STATES),
]


def test_states_of_one_process(memory_server: Any, root: str) -> None:
    differential.run_all(drawn(0, STATES), root)


@pytest.mark.quick("2")
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_states_of_ranks(memory_server: Any, root: str, ranks: int) -> None:
    found = drawn(ranks, max(3, STATES // 3))
    run_ranks(ranks, differential.run_all, found, root, timeout=100 + _SECONDS * len(found))


def drawn(ranks: int, count: int) -> list[Case]:
    """Cases, the same for each run. Drawn at once, not tried one by one: to make a failing one smaller would start the
    ranks a hundred times."""
    found: list[Case] = []

    @settings(max_examples=count, phases=[Phase.generate], suppress_health_check=[HealthCheck.too_slow])
    @given(case=cases(ranks))
    def collect(case: Case) -> None:
        found.append(case)

    collect()
    return found
