"""The harness itself: tests on several ranks rely on it to report what went wrong, and to end."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from tests.ranks import RankFailed, run_ranks


def _sum_of_ranks(offset: int) -> tuple[int, int, int]:
    value = torch.tensor([dist.get_rank() + offset])
    dist.all_reduce(value)
    return dist.get_rank(), int(value), torch.get_num_threads()


def test_ranks_talk_to_each_other_and_return_in_order() -> None:
    assert run_ranks(2, _sum_of_ranks, 10) == [(0, 21, 1), (1, 21, 1)]
    assert run_ranks(3, _sum_of_ranks, 0) == [(0, 3, 1), (1, 3, 1), (2, 3, 1)]


def _environment() -> dict[str, str]:
    return dict(os.environ)


def test_ranks_see_the_environment_of_the_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    run_ranks(1, _environment)  # whatever keeps running from here on knows nothing of what follows
    monkeypatch.setenv("DCP_S3_ENDPOINT_URL", "http://now")
    monkeypatch.setenv("AWS_PROFILE", "gone")
    first, second = run_ranks(2, _environment, env={"DCP_S3_EXTRA": "1"})
    assert first["DCP_S3_ENDPOINT_URL"] == second["DCP_S3_ENDPOINT_URL"] == "http://now"
    assert first["DCP_S3_EXTRA"] == "1"
    assert (first["RANK"], second["RANK"]) == ("0", "1")
    monkeypatch.delenv("AWS_PROFILE")
    assert "AWS_PROFILE" not in run_ranks(1, _environment)[0]


class _Unpicklable(Exception):
    def __init__(self, a: int, b: int) -> None:
        super().__init__("only the message is kept")
        self.lock = threading.Lock()


def _fail(rank: int, kind: str) -> None:
    if dist.get_rank() == rank:
        if kind == "value":
            raise ValueError("no such thing")
        if kind == "unpicklable":
            raise _Unpicklable(1, 2)
        if kind == "checkpoint":
            raise CheckpointException("save failed", {rank: (OSError("disk"), None)})  # type: ignore[dict-item]
        os._exit(7)
    time.sleep(600)  # no collective, which might see the end of the other one first


@pytest.mark.parametrize(
    ("ranks", "kind", "match", "exception"),
    [
        (2, "value", r"(?s)rank 1 failed.*_fail.*no such thing", ValueError),
        (2, "checkpoint", "CheckpointException", CheckpointException),  # which is no Exception
        (1, "unpicklable", "only the message is kept", None),
        (2, "die", "exit code 7", None),
    ],
)
def test_a_rank_that_fails_is_reported_while_the_other_hangs(ranks: int, kind: str, match: str, exception: Any) -> None:
    with pytest.raises(RankFailed, match=match) as caught:
        run_ranks(ranks, _fail, ranks - 1, kind, grace=0.5)
    assert caught.value.rank == ranks - 1
    found = caught.value.exception
    assert caught.value.__cause__ is found
    assert found is None if exception is None else isinstance(found, exception)
    if isinstance(found, CheckpointException):
        assert isinstance(found.failures[1][0], OSError)
