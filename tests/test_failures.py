"""The panel of a failure: each cause once, narrow, and short."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dcp_s3 import errors
from dcp_s3.failures import WIDTH, Failed, first_cause, headline, name_ranks, panel

_URL = "s3://bucket/run/step-00001000"


def _denied(rank: int) -> errors.AccessDeniedError:
    return errors.AccessDeniedError(
        f"PutObject on {_URL}/__{rank}_0-ab{rank}f.distcp failed: AccessDenied. Remedy: the role needs s3:PutObject"
    )


def test_equal_causes_of_all_ranks_are_told_once() -> None:
    failed = Failed(
        f"the save of step 1000 to {_URL}",
        {rank: _denied(rank) for rank in range(512)},
        left="nothing",
        last_good="step 900",
        resume="manager.restore(state)",
    )
    assert panel(failed).splitlines() == [
        f"the save of step 1000 to {_URL} failed on ranks 0 to 511",
        f"  Cause: AccessDeniedError: PutObject on {_URL}/__0_0-ab0f.distcp failed:",
        "    AccessDenied",
        "  Remedy: the role needs s3:PutObject",
        "  Left: nothing",
        "  Last good: step 900",
        "  Resume: manager.restore(state)",
    ]
    assert headline(failed) == panel(failed).splitlines()[0]


def test_different_causes_name_their_ranks() -> None:
    failures: dict[int, BaseException] = {0: _denied(0), 2: _denied(2), 1: ZeroDivisionError("in the planner")}
    lines = panel(Failed("the save", failures)).splitlines()
    assert lines[0] == "the save failed on ranks 0 to 2"
    assert lines[1].startswith("  On ranks 0, 2: AccessDeniedError: ")
    assert "  On rank 1: ZeroDivisionError: in the planner" in lines
    assert first_cause(failures).endswith("AccessDenied (and other causes)")


def test_a_rank_that_failed_because_of_another_one_is_left_out() -> None:
    failures: dict[int, BaseException] = {0: errors.PeerReadError("rank 1 failed", rank=1), 1: _denied(1)}
    assert panel(Failed("the load", failures)).startswith("the load failed on rank 1\n  Cause: AccessDeniedError")


def test_a_failure_without_ranks() -> None:
    assert panel(Failed("the save", {}, ValueError("x"))) == "the save failed\n  Cause: ValueError: x"


@given(st.dictionaries(st.integers(0, 1000), st.text(max_size=3000), min_size=1, max_size=20))
def test_a_panel_is_narrow_and_short_whatever_the_errors_say(texts: dict[int, str]) -> None:
    lines = panel(Failed("the save", {rank: ValueError(text) for rank, text in texts.items()})).split("\n")
    words = [word for text in texts.values() for word in text.split()]
    assert all(len(line) <= max(WIDTH, 20 + max(map(len, words), default=0)) for line in lines)
    assert first_cause({rank: ValueError(text) for rank, text in texts.items()}).count("\n") == 0


def test_ranks_are_named_in_runs() -> None:
    assert name_ranks([0, 1, 2, 5, 7, 8]) == "ranks 0 to 2, 5, 7 to 8"
    assert name_ranks([3]) == "rank 3"
