"""MegatronS3Writer: the contract of Megatron-Core's FileSystemWriterAsync, on S3.

Megatron plans in the trainer. It writes there (a synchronous save), in a forked process, or in a spawned one that stays
(persistent), and commits in the trainer. What goes to that process is this rank's `Save`, its plan and its data.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import os
import pickle
import queue
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.strategies.filesystem_async import (
    _get_write_results_queue as write_results_queue,  # a queue of a process of its own: works with fork and spawn
)
from torch.distributed.checkpoint.api import WRAPPED_EXCEPTION
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from dcp_s3 import ranks
from dcp_s3.coordination.participant import Participant
from dcp_s3.errors import CheckpointError, DcpS3Error, SaveProtocolError
from dcp_s3.failures import name_ranks
from dcp_s3.save.save import Save
from dcp_s3.save.without_collectives import SaveWithoutCollectives
from dcp_s3.save.writer import S3StorageWriter
from dcp_s3.settings import SettingsLike, resolve_settings
from dcp_s3.torch_private import DistWrapper, wrap_exception

Outcome = list[WriteResult] | BaseException
"""The results of a save on one rank, or what made it fail."""


class Prepared(NamedTuple):
    """What one rank writes in one save. Picklable."""

    save: Save
    plan: SavePlan
    data: dict[MetadataIndex, torch.Tensor | io.BytesIO]


class MergedSave(SaveWithoutCollectives):
    """One rank's part in such a save. Megatron has its ranks wait for each other, so none is taken for dead."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Claim the URL, on rank 0."""
        if self._is_coordinator:
            super().prepare_local_plan(plan)
            self._participant = None  # what follows may be in another process, and has a deadline
        return plan

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        """Upload all items of the plan, and this rank's part. Returns no results: they stand in the part."""
        results = super().write_data(plan, planner)
        self._planner = None  # with the state
        self._taking_part.publish(self._make_part(results, 0))
        return []

    def commit(self, saves: Sequence[str]) -> None:
        """Merge and commit, on rank 0. Every rank has written its part; ``saves`` are the ids of their saves."""
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


class MegatronS3Writer(S3StorageWriter):
    """Writes one checkpoint to S3 as Megatron's saves ask for it. A checkpoint that is there is replaced.

    A failure while a save is planned is kept until its results are asked for: there it is raised on every rank, and
    none waits for the one that failed.

    Args:
        checkpoint_dir: ``s3://bucket/prefix`` of the checkpoint, as text or as a path.
        separation_hint: a prefix of FQNs; what begins with it gets objects of its own.
        thread_count: most objects of this rank; half of them for each group with ``separation_hint``.
        attachments: small files that belong to the checkpoint, by name.
        settings: a `Settings`, or a mapping of settings that override the environment.

    Raises:
        InvalidURLError: ``checkpoint_dir`` is not an S3 URL.
        SettingsError: a setting, in the environment or given here, is not allowed.
    """

    can_run_decentralized_global_plan = True
    _joint_save: type[SaveWithoutCollectives] = MergedSave

    def __init__(
        self,
        checkpoint_dir: str | os.PathLike[str],
        *,
        separation_hint: str | None = None,
        thread_count: int = 2,
        attachments: Mapping[str, bytes] | None = None,
        settings: SettingsLike = None,
    ) -> None:
        super().__init__(
            checkpoint_dir,
            overwrite=True,
            separate=None if separation_hint is None else [f"{separation_hint}*"],
            max_objects=max(1, thread_count if separation_hint is None else thread_count // 2),
            settings=settings,
        )
        self._failure: DcpS3Error | None = None
        self._prepared: Prepared | None = None
        self._is_sent = False
        self.is_merged = False  # whether the save goes without gathering
        self._has_attachments = bool(attachments)
        for name, data in (attachments or {}).items():
            try:
                self.attach(name, data)
            except DcpS3Error as error:
                self._failure = error

    # --- planning ----------------------------------------------------------------------------------------

    def begin_merged(self, is_coordinator: bool) -> None:
        """Begin a save that goes without gathering. A failure is kept."""
        self.is_merged = True
        try:
            self.set_up_storage_writer(is_coordinator, use_collectives=False)
        except DcpS3Error as error:
            self._failure = self._failure or error

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Check the URL. A failure is kept: Megatron has other ranks wait for this one's plan."""
        try:
            return plan if self._failure is not None else super().prepare_local_plan(plan)
        except DcpS3Error as error:
            self._failure = error
            return plan

    def prepare_decentralized_global_plan(self, local_plan: SavePlan) -> SavePlan:
        """This rank's plan. Nothing needs coordination: names are unique, and results say what they belong to."""
        return dataclasses.replace(local_plan, storage_data=None)  # equal in all saves: Megatron compares its caches

    # --- writing -----------------------------------------------------------------------------------------

    def prepare_write_data(self, plan: SavePlan, planner: SavePlanner) -> None:
        """Collect what this rank writes. Tensors stay where they are until the preload."""
        if self._failure is not None:
            return
        data = {item.index: _own_memory(planner.resolve_data(item)) for item in plan.items}
        self._prepared = Prepared(self._save, plan, data)

    def get_save_function_and_args(
        self,
    ) -> tuple[Callable[..., None] | None, Callable[[], Prepared] | None, list[Any]]:
        """What Megatron runs, here or in another process: the function that saves; the one that brings the data to host
        memory, whose result takes the place of the second argument; the three arguments. None if this rank writes
        nothing."""
        if self._failure is not None:
            return None, None, []
        prepared, self._prepared = self._prepared, None
        if prepared is None:
            raise SaveProtocolError("there is nothing to save: Megatron calls prepare_write_data first")
        if not (prepared.plan.items or self._has_attachments):
            return None, None, []
        self._is_sent = True
        return write, functools.partial(preload, prepared), [ranks.rank(), prepared, write_results_queue()]

    def retrieve_write_results(self) -> list[WriteResult] | WRAPPED_EXCEPTION:
        """The results of this rank's save; what made it fail, if it did."""
        try:
            if self._failure is not None:
                raise self._failure
            return self._retrieve()
        except BaseException as error:  # noqa: BLE001 - it is raised on all ranks
            return wrap_exception(error)

    def _retrieve(self) -> list[WriteResult]:
        if not self._is_sent:
            # A merge waits for the part of every rank.
            return self._save.write_data(SavePlan([]), cast(SavePlanner, _Resolved({}))) if self.is_merged else []
        outcome = _take_outcome(self._save.save_id)
        if outcome is None:
            raise CheckpointError(
                f"the process that saves to {self.checkpoint_id} ended without a result on rank {ranks.rank()}, so "
                "nothing was committed. Remedy: see whether it was killed, for example because memory was short",
                url=str(self.checkpoint_id),
            )
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome


def finalize(writer: MegatronS3Writer, metadata: Metadata | None, ranks_of_save: Any) -> None:
    """Commit when every rank has written. Takes the place of Megatron's ``save_state_dict_async_finalize``.

    That one leaves the other ranks waiting if the commit fails, and tells them no cause of any failure.

    ``metadata`` is None on ranks other than the coordinator, and if the save is merged.

    Raises:
        CheckpointException: on all ranks, with the cause of each that failed.
    """

    def results() -> list[WriteResult]:
        found = writer.retrieve_write_results()
        if isinstance(found, tuple):
            raise found[0]
        return found

    def commit(all_results: list[list[WriteResult]]) -> None:
        if metadata is None:
            raise SaveProtocolError("Megatron planned this save without metadata")
        writer.finish(metadata, all_results)

    def wrote_part() -> str:
        results()
        return writer.save_id

    def merge(saves: list[str]) -> None:
        cast(MergedSave, writer._save).commit(saves)

    # Of a merged save the ranks tell each other no more than that they have written, or why they have not.
    ranks_of_save.all_reduce("write", *((wrote_part, merge) if writer.is_merged else (results, commit)))


# --- saves without gathering ------------------------------------------------------------------------------

# Megatron's plan is decentralized: each rank writes all of its own plan, which holds what it is the main replica of. So
# no rank has to know another one's plan or results before the commit. Each writes a part, and rank 0 merges these.


def merges(settings: SettingsLike) -> bool:
    """Whether saves with these settings go without gathering. The same on all ranks.

    Those of one rank have nothing to gather. Those that may spill to a local disk are committed by rank 0 once that
    disk is drained: it must know the results.
    """
    found = resolve_settings(settings)
    return found.spill_dir is None and dist.get_world_size() > 1


def plan_without_gathering(
    state: dict[str, Any],
    writer: Any,
    planner: Any,
    cached: tuple[SavePlan | None, SavePlan | None, bool] | None,
) -> tuple[tuple[Any, None, Any], SavePlan, SavePlan, bool, bool]:
    """What Megatron's ``save_state_dict_async_plan`` does, without collectives and so without global metadata.

    ``cached`` are global and local plan of the save before this one, and whether they were those of the one before
    that. Returns, as Megatron's: what ends the save gets; the global and the local plan of this rank; whether the
    former equals that of the save before; whether metadata that were loaded hold for this save: no, none are needed.
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


# --- what runs in the process that saves --------------------------------------------------------------------


def preload(prepared: Prepared) -> Prepared:
    """Bring the tensors to host memory that nobody else changes."""
    data, is_copying = dict(prepared.data), False
    for index, value in data.items():
        if isinstance(value, torch.Tensor):
            if value.device.type != "cpu":
                data[index], is_copying = value.to("cpu", non_blocking=True), True
            elif value.is_shared():  # type: ignore[no-untyped-call]  # with the trainer, which goes on after this
                data[index] = value.clone()
    if is_copying:
        torch.accelerator.synchronize()
    return prepared._replace(data=data)


def write(rank: int, prepared: Prepared, results: Any) -> None:
    """Upload what this rank saves, and put the outcome into ``results``."""
    outcome: Outcome
    try:
        outcome = prepared.save.write_data(prepared.plan, cast(SavePlanner, _Resolved(prepared.data)))
    except BaseException as error:  # noqa: BLE001 - the trainer raises it; this process may have more saves to do
        outcome = _portable(error, rank)
    results.put((prepared.save.save_id, outcome))


class _Resolved:
    """A planner that has the data already."""

    def __init__(self, data: Mapping[MetadataIndex, torch.Tensor | io.BytesIO]) -> None:
        self._data = data

    def resolve_data(self, item: WriteItem) -> torch.Tensor | io.BytesIO:
        return self._data[item.index]


def _portable(error: BaseException, rank: int) -> BaseException:
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301 - what this process has just pickled
    except Exception:  # noqa: BLE001 - whatever its __reduce__ does
        text = "".join(traceback.format_exception(error))
        return RuntimeError(f"the save failed on rank {rank}:\n{text}")
    return error


# --- in the trainer -------------------------------------------------------------------------------------------

_outcomes: dict[str, Outcome] = {}
"""Outcomes that have come, by save id: of two saves under way, the later one may end first."""


def _take_outcome(save_id: str) -> Outcome | None:
    arrived = write_results_queue()
    with contextlib.suppress(queue.Empty):
        while save_id not in _outcomes:
            other, outcome = arrived.get_nowait()
            _outcomes[other] = outcome
    return _outcomes.pop(save_id, None)


def _own_memory(value: Any) -> Any:
    """A tensor with no more memory than its own: to a persistent process all of it would go."""
    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach()
    is_part = value.device.type == "cpu" and value.untyped_storage().nbytes() != value.nbytes
    return value.clone() if is_part else value
