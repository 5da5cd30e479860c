"""Checks the state of a `dcp.load` before torch plans, which stops at the first name that differs."""

from __future__ import annotations

import copy
import logging
import math
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.tensor import DTensor

from dcp_s3.errors import CorruptMetadataError
from dcp_s3.load.aliases import without_tied
from dcp_s3.load.names import count_by_prefix, find_mismatch
from dcp_s3.load.planner import S3LoadPlanner
from dcp_s3.torch_private import find_load_planner

logger = logging.getLogger(__name__)


def check_state(metadata: Metadata, url: str | None, is_coordinator: bool) -> None:
    """Check the metadata, and the state of the calling `dcp.load` if its planner is torch's. Others check it.

    A missing name is left out of the planner's state if it has the memory of one that is saved. The coordinator logs in
    one line which saved names are not loaded.

    Raises:
        MissingKeysError, TensorMismatchError
        CorruptMetadataError: the metadata does not say where items lie.
    """
    if not isinstance(metadata.storage_data, dict):
        raise CorruptMetadataError(
            f"the metadata of {url} does not say where its items lie (storage_data is "
            f"{type(metadata.storage_data).__name__})",
            url=str(url),
        )
    planner = find_load_planner()
    state = getattr(planner, "state_dict", None)
    if not isinstance(planner, DefaultLoadPlanner) or planner.metadata is not metadata or not isinstance(state, dict):
        return
    planner.state_dict = state = without_tied(state, metadata.state_dict_metadata)
    if type(planner).create_local_plan is DefaultLoadPlanner.create_local_plan:
        strict = not planner.allow_partial_load
        found = find_mismatch(state, metadata, str(url or ""), strict=strict)
        if found is not None:
            # Lists had other names before torch 2.4. torch finds that out when it plans.
            found = find_mismatch(_with_old_names(planner), metadata, str(url or ""), strict=strict)
        if found is not None:
            raise found
    unexpected = [name for name in metadata.state_dict_metadata if name not in state]
    if unexpected and is_coordinator:
        count, names = len(unexpected), count_by_prefix(unexpected)
        logger.info("%d names in %s are not in the state and are not loaded: %s", count, url, names)


def check_filled(plan: LoadPlan, planner: LoadPlanner, metadata: Metadata, url: str) -> None:
    """Check that a plan of torch's planner, or ours, fills the tensors of its state: torch itself leaves as it is what
    no saved chunk covers.

    Raises:
        CorruptMetadataError
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
            raise CorruptMetadataError(
                f"the metadata of {url} has chunks with {planned.get(fqn, 0)} of the {local.numel()} elements of "
                f"{fqn!r} that are to be loaded here. It is damaged, or was merged wrongly: load an earlier checkpoint",
                url=url,
            )


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _with_old_names(planner: DefaultLoadPlanner) -> dict[str, Any]:
    """The planner's state with the names that it would adopt for a checkpoint from before torch 2.4."""
    tried: Any = copy.copy(planner)
    tried.metadata = Metadata(dict.fromkeys(planner.metadata.state_dict_metadata, BytesStorageMetadata()))  # type: ignore[union-attr]
    tried.allow_partial_load = True
    tried.create_local_plan()
    state: dict[str, Any] = tried.state_dict
    return state
