"""The parts of a training run as DCP's Stateful objects, such that they load on any number of ranks. Needs no framework
but torch."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

from dcp_s3.errors import CheckpointError, SaveProtocolError
from dcp_s3.failures import name_failed
from dcp_s3.manager.agree import Ranks
from dcp_s3.ranks import is_initialized

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class ModelPart(Stateful):
    """The parameters and buffers of a model: plain, DDP, FSDP2 or other DTensors. Names are the module's own, without
    what wrappers put before them, so that each of these loads what another one has saved."""

    model: nn.Module

    def state_dict(self) -> dict[str, Any]:
        return dict(get_model_state_dict(self.model))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_model_state_dict(self.model, state_dict)


@dataclass(frozen=True)
class OptimizerPart(Stateful):
    """The state of torch's own optimizer, by the names of the parameters; see `owner` for the model."""

    optimizer: torch.optim.Optimizer
    model: nn.Module

    def state_dict(self) -> dict[str, Any]:
        # An optimizer that has not stepped gets its state from a step of zero length.
        return dict(get_optimizer_state_dict(self.model, self.optimizer))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_optimizer_state_dict(self.model, self.optimizer, state_dict)


def owner(optimizer: torch.optim.Optimizer, models: Sequence[nn.Module]) -> nn.Module:
    """The module with the parameters of an optimizer: one of ``models``, or a list of several."""
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    owners = [model for model in models if any(id(parameter) in stepped for parameter in model.parameters())]
    if not owners:
        raise SaveProtocolError(
            f"the parameters of a {type(optimizer).__name__} belong to none of the {len(models)} models. Remedy: "
            "prepare the model and its optimizer together"
        )
    return owners[0] if len(owners) == 1 else nn.ModuleList(owners)


def as_item(state: Any) -> Any:
    """A state in a form that DCP saves as one item, whatever its structure is when it is loaded. One with DTensors
    stays as it is, because each of them must be an item of its own to load on another number of ranks."""
    return state if has(DTensor, state) else (state,)


def from_item(item: Any) -> Any:
    """What was given to `as_item`."""
    return item[0] if isinstance(item, tuple) else item


def has(kind: type[torch.Tensor], state: Any) -> bool:
    """Whether a tensor of this kind is in a state."""
    if isinstance(state, Mapping):
        return any(has(kind, value) for value in state.values())
    if isinstance(state, (list, tuple)):
        return any(has(kind, value) for value in state)
    return isinstance(state, kind)


def agree(work: Callable[[], T], failed: str) -> list[T]:
    """Run ``work`` on each rank. Returns the results in rank order; if it raises on one rank, all raise. A collective
    of the default process group; results are pickled.

    Raises:
        CheckpointError: it raised on another rank; the message is ``failed`` with the cause. Where it raised, that
            error is raised.
    """
    ranks = Ranks(dist.group.WORLD if is_initialized() else None)
    return ranks.agree(work, lambda failures: CheckpointError(f"{failed}: {name_failed(failures)}"))


# --- random numbers -------------------------------------------------------------------------------------


def rng_state(device: torch.device) -> dict[str, Any]:
    """The states of this rank's generators: Python's, numpy's if it is there, and torch's on the CPU and ``device``."""
    states = {"python": random.getstate(), "torch": torch.get_rng_state()}
    try:
        import numpy
    except ImportError:
        pass
    else:
        states["numpy"] = numpy.random.get_state()
    if device.type != "cpu":
        states[device.type] = torch.get_device_module(device).get_rng_state()
    return states


def set_rng_state(rank: int, saved: Sequence[Mapping[str, Any]], device: torch.device) -> None:
    """Restore what `rng_state` has returned on each rank; generators that were not saved are left alone. A rank that
    did not exist gets the state that all ranks had; if they had different ones, it keeps its own, for no rank may draw
    another's numbers. Which, torch's generator on the CPU tells: whoever seeds ranks differently seeds it, too."""
    if rank >= len(saved) and not all(torch.equal(states["torch"], saved[0]["torch"]) for states in saved):
        logger.warning(
            "the checkpoint has the random number generators of %d ranks: rank %d keeps its own as it was seeded",
            len(saved), rank,
        )  # fmt: skip
        return
    states = saved[rank if rank < len(saved) else 0]
    random.setstate(states["python"])
    torch.set_rng_state(states["torch"])
    if "numpy" in states:
        import numpy

        numpy.random.set_state(states["numpy"])
    if device.type in states:
        torch.get_device_module(device).set_rng_state(states[device.type])
