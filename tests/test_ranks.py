"""The harness itself: tests on several ranks rely on it to report what went wrong, and to end."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from tests.ranks import RankFailed, run_ranks


def _fail(rank: int, kind: str) -> None:
    if dist.get_rank() == rank:
        if kind == "checkpoint":
            raise CheckpointException("save failed", {rank: (OSError("disk"), None)})  # type: ignore[dict-item]
        os._exit(7)
    time.sleep(600)  # no collective, which might see the end of the other one first


@pytest.mark.parametrize(
    ("kind", "match", "exception"),
    [("checkpoint", "CheckpointException", CheckpointException), ("die", "exit code 7", type(None))],
)
def test_a_rank_that_fails_is_reported_while_the_other_hangs(kind: str, match: str, exception: Any) -> None:
    with pytest.raises(RankFailed, match=match) as caught:
        run_ranks(2, _fail, 1, kind, grace=0.5)
    assert caught.value.rank == 1
    assert isinstance(caught.value.exception, exception)  # torch's is no Exception
