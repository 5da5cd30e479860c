"""Which checkpoint to restore, and the load of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import LoadPlanner

from dcp_s3 import errors
from dcp_s3.checkpoint.reader import S3StorageReader
from dcp_s3.manager.ranks import portable
from dcp_s3.retention.catalog import CheckpointCatalog
from dcp_s3.retention.checkpoint_info import CheckpointInfo, newest_first
from dcp_s3.retention.inspect import find_damage, run
from dcp_s3.retention.policy import AnyOf, KeepBest, Mode, PolicyFunction, best_first
from dcp_s3.transport.async_client import open_bucket
from dcp_s3.url import parse_url

logger = logging.getLogger(__name__)

Order = Callable[[Sequence[CheckpointInfo]], list[CheckpointInfo]]
"""The committed checkpoints that will do, the one to try first in front."""

# What says that this checkpoint can not be loaded now, and another one may.
_UNUSABLE = (
    errors.CheckpointNotFoundError,
    errors.CorruptCheckpointError,
    errors.CorruptMetadataError,
    errors.UnsafeMetadataError,
    errors.ObjectNotFoundError,
)


def latest_order(infos: Sequence[CheckpointInfo]) -> list[CheckpointInfo]:
    """Highest step first. Those without a step are not of the run."""
    return newest_first(info for info in infos if info.step is not None)


def step_order(step: int) -> Order:
    """Only those of one step, the newest first."""
    return lambda infos: [info for info in latest_order(infos) if info.step == step]


def best_order(metric: str, mode: Mode) -> Order:
    """Those with a finite value of a metric, the best first."""
    return lambda infos: best_first(latest_order(infos), metric, mode)


def best_of(policy: PolicyFunction | None, metric: str | None, mode: Mode | None) -> tuple[str, Mode]:
    """What "best" means: as given, or as the `KeepBest` of the retention policy says.

    Raises:
        PolicyError: nothing says it, or two policies differ.
    """
    if metric is not None:
        return metric, mode or "min"
    parts = policy.policies if isinstance(policy, AnyOf) else (policy,)
    found = {(part.metric, part.mode) for part in parts if isinstance(part, KeepBest)}
    if len(found) != 1:
        why = f"there are several KeepBest in the retention policy: {sorted(found)}" if found else (
            "there is no KeepBest in the retention policy"
        )  # fmt: skip
        raise errors.PolicyError(f"which checkpoint is the best? {why}. Remedy: pass metric='val_loss', mode='min'")
    return found.pop()


def find(catalog: CheckpointCatalog, order: Order, *, passed_over: Collection[str] = ()) -> CheckpointInfo | None:
    """The first checkpoint in ``order`` that can be loaded, None if no checkpoint was ever committed.

    Args:
        catalog: of the run.
        order: which will do.
        passed_over: URLs of those that could not be loaded.

    Raises:
        CheckpointNotFoundError: there are committed ones, but none that will do.
        CorruptCheckpointError: those that will do can not be loaded.
        StorageError
    """
    found = [info for info in catalog.checkpoints() if info.committed and info.step is not None]
    candidates = order(found)
    if not candidates and found and not passed_over:
        steps = sorted({info.step for info in found if info.step is not None})
        raise errors.CheckpointNotFoundError(
            f"none of the {len(found)} committed checkpoints under {catalog.root} is what was asked for (steps "
            f"{steps[0]} to {steps[-1]}). Remedy: `dcp-s3 ls {catalog.root}` shows their steps and metrics",
            url=str(catalog.root),
        )
    tried: set[str] = set()
    usable = None
    while usable is None:
        left = [info for info in candidates if info.url not in passed_over and info.url not in tried]
        if not left:
            break
        usable = run(_first_loadable(catalog, left))
        tried |= {info.url for info in left}
        if usable is None:  # a prune may have been faster: then there are newer ones
            candidates = order([info for info in catalog.checkpoints() if info.committed and info.step is not None])
    if usable is None and (tried or passed_over):
        raise errors.CorruptCheckpointError(
            f"there are checkpoints under {catalog.root}, and none of those asked for can be loaded: "
            f"{', '.join(sorted({*passed_over, *tried}))}. Remedy: `dcp-s3 verify` "
            "says what is wrong with each",
            url=str(catalog.root),
        )
    return usable


async def _first_loadable(catalog: CheckpointCatalog, infos: Sequence[CheckpointInfo]) -> CheckpointInfo | None:
    async with open_bucket(catalog.root.bucket, catalog.settings) as bucket:
        for info in infos:
            damage = await find_damage(bucket, parse_url(info.url))
            if damage is None:
                return info
            logger.warning("%s is passed over: %s", info.url, damage)
    return None


def load(
    state: dict[str, Any],
    reader: S3StorageReader,
    *,
    group: dist.ProcessGroup | None,
    rank: int,
    planner: LoadPlanner | None,
) -> dict[int, BaseException]:
    """`dcp.load` in place; what it failed with, by rank."""
    try:
        state_dict_loader.load(state, storage_reader=reader, process_group=group, planner=planner)
    except CheckpointException as error:
        return {failed: portable(cause) for failed, (cause, _) in error.failures.items()}
    except Exception as error:  # noqa: BLE001 - all ranks are told
        return {rank: portable(error)}
    return {}


def is_unusable(failures: dict[int, BaseException]) -> bool:
    """Whether a load failed only because the checkpoint has vanished or is damaged."""
    return bool(failures) and all(isinstance(error, _UNUSABLE) for error in failures.values())
