"""What is wrong with the metadata of a load, or with its state, and torch does not say."""

from __future__ import annotations

import logging
import math
from typing import Any, NoReturn

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.tensor import DTensor

from dcp_s3 import errors
from dcp_s3.errors import CorruptCheckpointError
from dcp_s3.load.names import count_by_prefix
from dcp_s3.load.planner import S3LoadPlanner

logger = logging.getLogger(__name__)


class UnreadableMetadata(Metadata):
    """Stands in for metadata that could not be read; raises the reason as soon as it is used."""

    def __init__(self, error: errors.DcpS3Error) -> None:
        object.__setattr__(self, "_reason", error)

    def fail(self) -> NoReturn:
        raise object.__getattribute__(self, "_reason")

    def __getattribute__(self, name: str) -> Any:
        if name in (
            "state_dict_metadata",
            "planner_data",
            "storage_data",
            "storage_meta",
            "version",
        ):
            UnreadableMetadata.fail(self)
        return object.__getattribute__(self, name)


def log_unexpected(planner: LoadPlanner, metadata: Metadata, url: str) -> None:
    """Log in one line which saved names are not loaded, if the planner is torch's or ours."""
    state = getattr(planner, "state_dict", None)
    if not isinstance(planner, DefaultLoadPlanner) or not isinstance(state, dict):
        return
    unexpected = [name for name in metadata.state_dict_metadata if name not in state]
    if unexpected:
        count, names = len(unexpected), count_by_prefix(unexpected)
        logger.info("%d names in %s are not in the state and are not loaded: %s", count, url, names)


def check_filled(plan: LoadPlan, planner: LoadPlanner, metadata: Metadata, url: str) -> None:
    """Check that a plan of torch's planner, or ours, fills the tensors of its state: torch itself leaves as it is what
    no saved chunk covers.

    Raises:
        CorruptCheckpointError
    """
    state = getattr(planner, "state_dict", None)
    if not isinstance(planner, DefaultLoadPlanner) or not isinstance(state, dict):
        return
    if type(planner).create_local_plan not in (DefaultLoadPlanner.create_local_plan, S3LoadPlanner.create_local_plan):
        return
    planned: dict[str, int] = {}
    for item in plan.items:
        fqn = item.dest_index.fqn
        planned[fqn] = planned.get(fqn, 0) + math.prod(item.lengths)
    for fqn, entry in state.items():
        if not isinstance(metadata.state_dict_metadata.get(fqn), TensorStorageMetadata):
            continue
        local = entry.to_local() if isinstance(entry, DTensor) else entry
        if type(local) in _PLAIN and local.numel() != planned.get(fqn, 0):
            raise CorruptCheckpointError(
                f"the metadata of {url} has chunks with {planned.get(fqn, 0)} of the {local.numel()} elements of "
                f"{fqn!r} that are to be loaded here. It is damaged, or was merged wrongly: load an earlier checkpoint",
                url=url,
            )


_PLAIN = (torch.Tensor, torch.nn.Parameter)
