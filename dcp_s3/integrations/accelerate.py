"""Accelerate: everything that `Accelerator.save_state` saves, as one state that commits once.

>>> from dcp_s3.integrations.accelerate import training_state
>>> state = training_state(accelerator)
>>> with CheckpointManager("s3://bucket/run") as manager:
...     step = manager.restore(state) or 0
...     manager.save(step + 1000, state)

It loads on another number of ranks, and into a plain, DDP or FSDP2 model, whichever it was saved from.
"""

from __future__ import annotations

import logging
import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

from dcp_s3 import process
from dcp_s3.errors import CheckpointError, SaveProtocolError
from dcp_s3.failures import name_failed
from dcp_s3.integrations import require
from dcp_s3.manager.agree import Ranks

require("accelerate", "1.15", "2")

import numpy  # noqa: E402 - Accelerate needs it
from accelerate import Accelerator, DistributedType  # noqa: E402
from accelerate.data_loader import SeedableRandomSampler  # noqa: E402
from accelerate.utils import extract_model_from_parallel  # noqa: E402

logger = logging.getLogger(__name__)

# The private attributes of Accelerator (1.15) that are read here: it has no public list of what it has prepared.
PRIVATE = ("_models", "_optimizers", "_schedulers", "_dataloaders", "_custom_objects")


def training_state(accelerator: Accelerator) -> dict[str, Stateful]:
    """All that an accelerator has prepared, as a state for `CheckpointManager`, `dcp.save` and `dcp.load`.

    Entries are ``model``, ``optimizer`` (``model_1``, ``optimizer_1`` and so on for further ones) and ``training``: the
    schedulers, the gradient scaler, registered objects, dataloaders, the random number generators of every rank and the
    count of micro-batches. Make it when everything is prepared and registered; it can be used for any number of saves.
    It loads if there are as many models, optimizers and so on as were saved, in the same order.

    Raises:
        CheckpointError: the accelerator uses DeepSpeed, Megatron-LM or XLA.
        SaveProtocolError: an optimizer has no parameter of these models.
    """
    check_supported(accelerator)
    models, optimizers = accelerator._models, accelerator._optimizers
    return {
        **{f"model_{n}" if n else "model": ModelPart(each) for n, each in enumerate(models)},
        **{f"optimizer_{n}" if n else "optimizer": OptimizerPart(each, models) for n, each in enumerate(optimizers)},
        # Last also by name, in which order DCP loads: the random number generators come after all else.
        "training": TrainingPart(
            accelerator, accelerator._schedulers, accelerator._dataloaders, accelerator._custom_objects
        ),
    }


def check_supported(accelerator: Accelerator) -> None:
    """Raises `CheckpointError` for DeepSpeed, Megatron-LM and XLA: they keep the state themselves."""
    if accelerator.distributed_type in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA):
        raise CheckpointError(
            f"dcp_s3.integrations.accelerate does not know {accelerator.distributed_type}, which keeps the state "
            "itself. Supported are one process, DDP and FSDP2"
        )


def all_ranks() -> Ranks:
    """All ranks of the job, in the default process group."""
    return Ranks(dist.group.WORLD if process.is_initialized() else None)


class ModelPart(Stateful):
    """The parameters and buffers of a model: plain, DDP, FSDP2 or other DTensors, by the module's own names, so that
    each of these loads what another one has saved. With PEFT adapters: these, and what else is trained."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.adapters = frozenset(getattr(extract_model_from_parallel(model), "peft_config", ()))

    def state_dict(self) -> dict[str, Any]:
        state = dict(states.get_model_state_dict(self.model))
        if not self.adapters:
            return state
        parameters = extract_model_from_parallel(self.model).named_parameters(remove_duplicate=False)
        trained = {_WRAPPERS.sub("", name) for name, each in parameters if each.requires_grad}
        kept = (name for name in state if name in trained or not self.adapters.isdisjoint(name.split(".")))
        return {name: state[name] for name in kept}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        states.set_model_state_dict(self.model, state_dict, options=states.StateDictOptions(strict=not self.adapters))


_WRAPPERS = re.compile(r"\b(_checkpoint_wrapped_module|_orig_mod|_fsdp_wrapped_module)\.")


class OptimizerPart(Stateful):
    """The state of an optimizer that Accelerate has prepared, by the names of the parameters of its model or models."""

    def __init__(self, prepared: Any, models: Sequence[nn.Module]) -> None:
        # Accelerate's wrapper skips steps; DCP makes one, of zero length, where there is no state yet.
        self.optimizer = getattr(prepared, "optimizer", prepared)
        stepped = {id(parameter) for group in self.optimizer.param_groups for parameter in group["params"]}
        owners = [model for model in models if any(id(parameter) in stepped for parameter in model.parameters())]
        if not owners:
            raise SaveProtocolError(
                f"the parameters of a {type(self.optimizer).__name__} belong to none of the {len(models)} models. "
                "Remedy: prepare the model and its optimizer together"
            )
        self.model = owners[0] if len(owners) == 1 else nn.ModuleList(owners)

    def state_dict(self) -> dict[str, Any]:
        return dict(states.get_optimizer_state_dict(self.model, self.optimizer))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        states.set_optimizer_state_dict(self.model, self.optimizer, state_dict)


class TrainingPart(Stateful):
    """What is neither model nor optimizer. Of registered objects, the first rank's are saved, as by Accelerate; if they
    hold tensors, those of any rank: they must be alike."""

    def __init__(
        self, accelerator: Accelerator, schedulers: list[Any], dataloaders: list[Any], registered: list[Any]
    ) -> None:
        self.accelerator, self.schedulers = accelerator, schedulers
        self.dataloaders, self.registered = dataloaders, registered
        self.loaded: list[dict[str, Any]] = []  # what the ranks had of their own

    def state_dict(self) -> dict[str, Any]:
        """Gathers from all ranks what differs between them."""
        accelerator, scaler = self.accelerator, self.accelerator.scaler
        state: dict[str, Any] = {}

        # Everything that may raise on one rank alone, so that the others do not wait for it.
        def collect() -> tuple[dict[str, Any], list[Any]]:
            own = [_as_item(each.state_dict()) for each in self.registered]
            state.update(
                step=accelerator.step,
                schedulers=_as_item([scheduler.state_dict() for scheduler in self.schedulers]),
                scaler=_as_item(None if scaler is None else scaler.state_dict()),
                registered={str(at): each for at, each in enumerate(own)},
                number_of_registered=len(own),
            )
            loaders = [_dataloader_state(loader, accelerator) for loader in self.dataloaders]
            # Registered objects with tensors may be large, and are not sent.
            sent = [None if process.rank() > 0 or _has(torch.Tensor, each) else each for each in own]
            return {"rng": rng_state(accelerator.device), "dataloaders": loaders}, sent

        found = all_ranks().agree(
            collect, lambda failures: CheckpointError(f"the state of the training: {name_failed(failures)}")
        )
        state["registered"] |= {str(at): each for at, each in enumerate(found[0][1]) if each is not None}
        return {**state, "ranks": _as_item([mine for mine, _ in found])}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        accelerator, rank = self.accelerator, process.rank()
        self.loaded = _from_item(state_dict["ranks"])
        dataloaders = self.loaded[rank if rank < len(self.loaded) else 0]["dataloaders"]
        accelerator.step = state_dict["step"]
        for scheduler, state in _pair("schedulers", self.schedulers, _from_item(state_dict["schedulers"])):
            scheduler.load_state_dict(state)
        if accelerator.scaler is not None and (state := _from_item(state_dict["scaler"])) is not None:
            accelerator.scaler.load_state_dict(state)
        registered = [state_dict["registered"].get(str(each)) for each in range(state_dict["number_of_registered"])]
        for each, state in _pair("registered objects", self.registered, registered):
            each.load_state_dict(_from_item(state))
        for loader, state in _pair("dataloaders", self.dataloaders, dataloaders):
            _load_dataloader(loader, state, len(self.loaded) == process.world_size())
        self.set_rng()

    def set_rng(self) -> None:
        """Set this rank's random number generators to what was loaded."""
        set_rng_state(process.rank(), [each["rng"] for each in self.loaded], self.accelerator.device)


def _pair(what: str, prepared: list[Any], saved: list[Any]) -> list[tuple[Any, Any]]:
    if len(prepared) != len(saved):
        raise CheckpointError(
            f"the checkpoint has {len(saved)} {what}, and the accelerator has {len(prepared)}. Remedy: prepare and "
            "register the same ones, in the same order"
        )
    return list(zip(prepared, saved, strict=True))


def _as_item(state: Any) -> Any:
    """A state in a form that DCP saves as one item, whatever its structure is when it is loaded. One with DTensors
    stays as it is, because each of them must be an item of its own to load on another number of ranks."""
    return state if _has(DTensor, state) else (state,)


def _from_item(item: Any) -> Any:
    return item[0] if isinstance(item, tuple) else item


def _has(kind: type[torch.Tensor], state: Any) -> bool:
    """Whether a tensor of this kind is in a state."""
    if isinstance(state, (Mapping, list, tuple)):
        return any(_has(kind, each) for each in (state.values() if isinstance(state, Mapping) else state))
    return isinstance(state, kind)


def _dataloader_state(loader: Any, accelerator: Accelerator) -> dict[str, Any]:
    """The epoch of a dataloader, what decides its order, and of a stateful one its position on this rank."""
    inside = any(each is loader for each in accelerator.gradient_state.dataloader_references)
    ended = inside and loader.end_of_dataloader  # Accelerate counts the epoch after the loop's last round
    sampler, generator = _sources_of_chance(loader)
    return {
        "iteration": loader.iteration + ended,
        "seed": None if sampler is None else sampler.initial_seed,
        "generator": None if generator is None else generator.get_state(),
        "position": loader.state_dict() if loader.use_stateful_dataloader else None,
    }


def _load_dataloader(loader: Any, state: dict[str, Any], same_ranks: bool) -> None:
    loader.iteration = state["iteration"]
    sampler, generator = _sources_of_chance(loader)
    if sampler is not None and state.get("seed") is not None:
        sampler.initial_seed = state["seed"]
    if generator is not None and state.get("generator") is not None:
        generator.set_state(state["generator"])
    if loader.use_stateful_dataloader and state.get("position") is not None:
        if same_ranks:
            loader.load_state_dict(state["position"])
        else:
            what = "the position of a dataloader is none on another number of ranks: it begins its epoch again"
            logger.warning("%s. Remedy: accelerator.skip_first_batches", what)


def _sources_of_chance(loader: Any) -> tuple[SeedableRandomSampler | None, torch.Generator | None]:
    sampler = loader.get_sampler() if hasattr(loader, "get_sampler") else None
    seeded = sampler if isinstance(sampler, SeedableRandomSampler) else None
    return seeded, getattr(loader, "synchronized_generator", None)


def rng_state(device: torch.device) -> dict[str, Any]:
    """The states of this rank's generators: Python's, numpy's, and torch's on the CPU and ``device``."""
    found = {"python": random.getstate(), "torch": torch.get_rng_state(), "numpy": numpy.random.get_state()}
    if device.type != "cpu":
        found[device.type] = torch.get_device_module(device).get_rng_state()
    return found


def set_rng_state(rank: int, saved: Sequence[Mapping[str, Any]], device: torch.device) -> None:
    """Restore what `rng_state` has returned on each rank. A rank that did not exist gets the state that all ranks had;
    if they had different ones (by torch's generator on the CPU), it keeps its own: no rank may draw another's numbers.
    """
    if rank >= len(saved) and not all(torch.equal(each["torch"], saved[0]["torch"]) for each in saved):
        logger.warning("rank %d was not saved: its random number generators stay as they were seeded", rank)
        return
    found = saved[rank if rank < len(saved) else 0]
    random.setstate(found["python"])
    torch.set_rng_state(found["torch"])
    numpy.random.set_state(found["numpy"])
    if device.type in found:
        torch.get_device_module(device).set_rng_state(found[device.type])
