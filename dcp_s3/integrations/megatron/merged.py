"""Saves whose ranks gather neither plans nor results: what each wrote stands in a part on S3, and rank 0 merges these.

Megatron's plan is decentralized: each rank writes all of its own plan, which holds what it is the main replica of. So
no rank has to know another one's plan before the commit, and that reads the parts (`dcp_s3.coordination`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from dcp_s3.coordination.participant import Participant
from dcp_s3.errors import SaveProtocolError
from dcp_s3.failures import name_ranks
from dcp_s3.save.without_collectives import SaveWithoutCollectives
from dcp_s3.settings import SettingsLike, resolve_settings
from dcp_s3.torch_private import DistWrapper


def merges(settings: SettingsLike) -> bool:
    """Whether saves with these settings go without gathering. The same on all ranks.

    Those of one rank have nothing to gather. Those that may spill to a local disk are committed by rank 0 once that
    disk is drained: it must know the results.
    """
    return resolve_settings(settings).spill_dir is None and dist.get_world_size() > 1


class MergedSave(SaveWithoutCollectives):
    """One rank's part in such a save. Megatron has its ranks wait for each other, so none is taken for dead."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Claim the URL, on rank 0.

        Raises:
            SaveProtocolError, StorageError
        """
        if self._is_coordinator:
            super().prepare_local_plan(plan)
            self._participant = None  # what follows may be in another process, and has a deadline
        return plan

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        """Upload all items of the plan, and this rank's part. Returns no results: they stand in the part.

        Raises:
            DeadlineExceededError: `save_timeout` has passed.
            StorageError, SaveProtocolError
        """
        results = super().write_data(plan, planner)
        self._planner = None  # with the state
        self._taking_part.publish(self._make_part(results, 0))
        return []

    def commit(self, saves: Sequence[str]) -> None:
        """Merge and commit, on rank 0. Every rank has written its part.

        Args:
            saves: id of each rank's save.

        Raises:
            CheckpointDeletedError: the save took so long that a prune deleted its objects as leftovers.
            CheckpointExistsError: another save has committed meanwhile.
            SaveProtocolError: the ranks wrote for different saves.
            ShardingError: what the ranks wrote does not fit together.
            DeadlineExceededError, StorageError
        """
        if others := [rank for rank, save in enumerate(saves) if save != self._claim.save]:
            raise SaveProtocolError(
                f"two saves overlapped: {name_ranks(others)} did not save to {self.url}, or not as often as rank 0; "
                "nothing was committed. Remedy: begin saves in the same order on every rank",
                url=str(self.url),
            )
        self._deadline = self._deadline or self._start_deadline()
        self._report(Participant(self._store(), self._joint).wait(self._write_missing, turn=0))

    def _find_own(self, plan: SavePlan, planner: SavePlanner) -> Sequence[WriteItem]:
        return plan.items

    def _alive(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


def plan_without_gathering(
    state: dict[str, Any],
    writer: Any,
    planner: Any,
    cached: tuple[SavePlan | None, SavePlan | None, bool] | None,
) -> tuple[tuple[Any, None, Any], SavePlan, SavePlan, bool, bool]:
    """What Megatron's ``save_state_dict_async_plan`` does, without collectives and so without global metadata.

    Args:
        state: flat state of this rank.
        writer: a `MegatronS3Writer`.
        planner: one that can run a decentralized plan.
        cached: global and local plan of the save before this one, and whether they were those of the one before that.

    Returns:
        As Megatron's: what ends the save gets; the global and the local plan of this rank; whether the former equals
        that of the save before; whether metadata that were loaded hold for this save: no, none are needed.
    """
    ranks = DistWrapper(None, True, 0)
    global_plan, plan, is_valid = cached or (None, None, False)
    planner.set_up_planner(state, is_coordinator=ranks.is_coordinator)
    writer.begin_merged(ranks.is_coordinator)
    if plan is None:
        plan = planner.create_local_plan()
    plan = writer.prepare_local_plan(plan)
    if is_valid and global_plan is not None:
        found = global_plan
    else:
        plan = found = writer.prepare_decentralized_global_plan(planner.create_decentralized_global_plan(plan))
    found = planner.finish_plan(found)
    writer.prepare_write_data(found, planner)
    return (writer, None, ranks), found, plan, global_plan == found, False
