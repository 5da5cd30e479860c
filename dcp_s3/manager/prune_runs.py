"""A prune as a `CheckpointManager` runs it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dcp_s3.retention import counts
from dcp_s3.retention.policy import PolicyFunction
from dcp_s3.retention.prune import prune
from dcp_s3.settings import Settings


def prune_after_save(root: str, policy: PolicyFunction, settings: Settings) -> Callable[[Callable[[], None]], object]:
    """The work of `BackgroundRetention`: prune ``root`` once; counted by `counts`."""

    def run(check: Callable[[], None]) -> object:
        def progress(*_: Any) -> None:
            check()

        return prune(root, policy, settings=settings, progress=progress)

    return run
