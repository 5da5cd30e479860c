"""A save without collectives, as torch's ``_save_state_dict(use_collectives=False)`` drives it.

That ends with a barrier, and `dcp.async_save` needs a process group with a CPU backend. Here is neither.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.storage import WriteResult

from dcp_s3.coordination.processes import withdraw
from dcp_s3.save.writer import S3StorageWriter
from dcp_s3.stage.handover import FailedStaging, forget
from dcp_s3.stage.stager import S3Stager
from dcp_s3.workers import InTurn

T = TypeVar("T")


def stage_separately(state: dict[str, Any], writer: S3StorageWriter, stager: S3Stager) -> dict[str, Any]:
    """Copy this rank's part of a state without Stateful objects, for `begin_separately`."""
    began = time.monotonic()
    staged = _told(writer, _stage, stager, state)
    stalled = time.monotonic() - began
    writer.stall_since = lambda _: stalled
    return staged


def begin_separately(
    staged: dict[str, Any], writer: S3StorageWriter, *, rank: int, planner: SavePlanner | None = None
) -> Future[None]:
    """Save this rank's part of a state (`stage_separately`) in the background. Done when the whole is committed, or has
    failed. Arguments as for `save_separately`."""
    return InTurn("dcp_s3-save").submit(save_separately, staged, writer, rank, planner)


def _stage(stager: S3Stager, state: dict[str, Any]) -> dict[str, Any]:
    staged = stager.stage_now(state)
    if isinstance(staged, FailedStaging):  # for the other ranks, which a save with collectives fails on all
        forget(staged)
        raise staged.error
    return staged


def save_separately(
    state: dict[str, Any], writer: S3StorageWriter, rank: int, planner: SavePlanner | None = None
) -> None:
    """Save this rank's part of a state that does not change meanwhile, and wait until the whole is committed. ``rank``
    is that in the job."""
    counted = writer.counted
    try:
        written, metadata = _write(state, writer, rank, DefaultSavePlanner() if planner is None else planner)
        writer.finish(metadata, [written])
    except BaseException as error:
        if counted is not None:
            withdraw(counted, writer.settings, error)
        raise


def _write(
    state: dict[str, Any], writer: S3StorageWriter, rank: int, planner: SavePlanner
) -> tuple[list[WriteResult], Metadata]:
    ask = functools.partial(_told, writer)
    is_first = rank == 0
    writer.reset()
    ask(planner.set_up_planner, state_dict=state, storage_meta=writer.storage_meta(), is_coordinator=is_first)
    writer.set_up_storage_writer(is_first, rank=rank, use_collectives=False)
    plan = writer.prepare_local_plan(ask(planner.create_local_plan))
    plans, metadata = ask(planner.create_global_plan, [plan])
    plan = ask(planner.finish_plan, writer.prepare_global_plan(plans)[0])
    written = writer.write_data(plan, planner)
    written.wait()
    return written.value(), metadata


def _told(writer: S3StorageWriter, work: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """What ``work`` returns. If it fails, the writer tells subscribers to events, as it does of its own failures."""
    try:
        return work(*args, **kwargs)
    except Exception as error:
        writer._tell_failed(error)
        raise
