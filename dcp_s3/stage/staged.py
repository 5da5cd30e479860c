"""A state that is staged before its save begins."""

from __future__ import annotations

from typing import Any

from torch.distributed.checkpoint.staging import AsyncStager

from dcp_s3.stage.process_saves import draw_turn
from dcp_s3.stage.turns import StagedDict


class StagedBefore(AsyncStager):
    """Hands a `dcp.async_save` the copy that was made for it, whatever state it is called with.

    Args:
        staged: what `S3Stager.stage_now` returned. Given away by the first `stage`.
        stall_seconds: seconds for which the training waited for the copy.
    """

    _synchronize_after_execute = False

    def __init__(self, staged: dict[str, Any], stall_seconds: float) -> None:
        self._staged: dict[str, Any] | None = staged
        self._stall_seconds = stall_seconds

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """The copy."""
        staged, self._staged = self._staged, None
        if staged is None:
            return state_dict
        turn = draw_turn()
        if turn is not None and isinstance(staged, StagedDict):
            turn.stall_seconds = self._stall_seconds
            turn.go_with(staged)
        return staged

    def synchronize_staging(self) -> None:
        """The copy is complete."""

    def close(self) -> None:
        """Nothing is left to clean up: the copy belongs to the stager that made it."""
