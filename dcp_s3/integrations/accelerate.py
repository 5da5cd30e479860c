"""Accelerate: everything that `Accelerator.save_state` saves, as one state for `CheckpointManager`, so that it commits
once.

>>> from dcp_s3.integrations.accelerate import training_state
>>> state = training_state(accelerator)
>>> with CheckpointManager("s3://bucket/run") as manager:
...     step = manager.restore(state) or 0
...     manager.save(step + 1000, state)

Accelerate itself makes two DCP checkpoints, of the model and of the optimizer, and files on each rank's disk.

Saved are models, optimizers, schedulers, the gradient scaler, registered objects, dataloaders, the random number
generators of every rank and the count of micro-batches. All of it loads on another number of ranks, and into a plain,
DDP or FSDP2 model, whichever it was saved from.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.checkpoint.stateful import Stateful

from dcp_s3 import ranks
from dcp_s3.errors import CheckpointError
from dcp_s3.integrations import require
from dcp_s3.integrations.training_parts import (
    ModelPart,
    OptimizerPart,
    agree,
    as_item,
    from_item,
    has,
    owner,
    rng_state,
    set_rng_state,
)

require("accelerate", "accelerate", "1.15", "2")

from accelerate import Accelerator, DistributedType  # noqa: E402
from accelerate.data_loader import SeedableRandomSampler  # noqa: E402
from accelerate.utils import extract_model_from_parallel  # noqa: E402

logger = logging.getLogger(__name__)

PRIVATE = ("_models", "_optimizers", "_schedulers", "_dataloaders", "_custom_objects")
"""The private attributes of Accelerator (1.15) that are read here: it has no public list of what it has prepared."""

_UNSUPPORTED = (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA)


def training_state(accelerator: Accelerator) -> dict[str, Stateful]:
    """All that an accelerator has prepared, as a state for `CheckpointManager`, `dcp.save` and `dcp.load`.

    Entries are ``model``, ``optimizer`` (``model_1``, ``optimizer_1`` and so on for further ones) and ``training`` for
    everything else. Make it when everything is prepared and registered; it can be used for any number of saves. To load
    it, there must be as many models, optimizers and so on as were saved, in the same order.

    Raises:
        CheckpointError: the accelerator uses DeepSpeed, Megatron-LM or XLA.
    """
    check_supported(accelerator)
    models, optimizers = accelerator._models, accelerator._optimizers
    return {
        **{_numbered("model", number): model_part(model) for number, model in enumerate(models)},
        **{_numbered("optimizer", number): optimizer_part(each, models) for number, each in enumerate(optimizers)},
        # Last also by name, in which order DCP loads: the random number generators come after all else.
        "training": TrainingPart(
            accelerator, accelerator._schedulers, accelerator._dataloaders, accelerator._custom_objects
        ),
    }


def check_supported(accelerator: Accelerator) -> None:
    """Raises `CheckpointError` for DeepSpeed, Megatron-LM and XLA: they keep the state themselves."""
    if accelerator.distributed_type in _UNSUPPORTED:
        raise CheckpointError(
            f"dcp_s3.integrations.accelerate does not know {accelerator.distributed_type}, which keeps the state "
            "itself. Supported are one process, DDP and FSDP2"
        )


def model_part(model: nn.Module) -> ModelPart:
    """The part of a model that Accelerate has prepared; of one with PEFT adapters these alone."""
    inner = extract_model_from_parallel(model)
    return AdapterPart(model, inner) if hasattr(inner, "peft_config") else ModelPart(model)


@dataclass(frozen=True)
class AdapterPart(ModelPart):
    """What PEFT would save of a model, of all its adapters, and any other parameter that is trained."""

    inner: nn.Module
    """The model without what Accelerate wraps around it."""

    def state_dict(self) -> dict[str, Any]:
        from peft import get_peft_model_state_dict

        state = super().state_dict()
        kept = {_WRAPPERS.sub("", name) for name, each in self.inner.named_parameters() if each.requires_grad}
        resized = _has_other_vocabulary(self.inner)
        ids = {
            id(tensor)
            for adapter in self.inner.peft_config  # type: ignore[union-attr]
            for tensor in get_peft_model_state_dict(
                self.inner, state, adapter_name=adapter, save_embedding_layers=resized
            ).values()
        }
        return {name: tensor for name, tensor in state.items() if name in kept or id(tensor) in ids}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # The base model stays as it is.
        set_model_state_dict(self.model, state_dict, options=StateDictOptions(strict=False))


_WRAPPERS = re.compile(r"\b(_checkpoint_wrapped_module|_orig_mod|_fsdp_wrapped_module)\.")


def _has_other_vocabulary(model: Any) -> bool:
    """Whether the embeddings are not those of the base model, which PEFT saves then. PEFT asks the Hub about it; here
    the files count that the model was loaded from."""
    name: str = getattr(model, "name_or_path", "")
    config: Any = getattr(model, "config", None)
    if not name or not hasattr(config, "vocab_size"):
        return False
    try:
        return bool(type(config).from_pretrained(name, local_files_only=True).vocab_size != config.vocab_size)
    except OSError:
        return False


def optimizer_part(prepared: Any, models: Sequence[nn.Module]) -> OptimizerPart:
    # Accelerate's wrapper skips steps; DCP makes one, of zero length, where there is no state yet.
    optimizer = getattr(prepared, "optimizer", prepared)
    return OptimizerPart(optimizer, owner(optimizer, models))


def _numbered(name: str, number: int) -> str:
    return f"{name}_{number}" if number else name


@dataclass
class TrainingPart(Stateful):
    """What is neither model nor optimizer. Of registered objects, the first rank's are saved, as by Accelerate; if they
    hold tensors, those of any rank: they must be alike."""

    accelerator: Accelerator
    schedulers: list[Any]
    dataloaders: list[Any]
    registered: list[Any]
    loaded_rng: list[dict[str, Any]] = field(default_factory=list)  # by rank

    def state_dict(self) -> dict[str, Any]:
        """Gathers from all ranks what differs between them."""
        accelerator, scaler = self.accelerator, self.accelerator.scaler
        state: dict[str, Any] = {}
        own: list[Any] = []

        def collect() -> tuple[dict[str, Any], list[Any]]:
            state["step"] = accelerator.step
            state["schedulers"] = as_item([scheduler.state_dict() for scheduler in self.schedulers])
            state["scaler"] = as_item(None if scaler is None else scaler.state_dict())
            own.extend(as_item(each.state_dict()) for each in self.registered)
            mine = {
                "rng": rng_state(accelerator.device),
                "dataloaders": [_dataloader_state(loader, accelerator) for loader in self.dataloaders],
            }
            # Those with tensors may be large, and are not sent.
            return mine, [None if ranks.rank() > 0 or has(torch.Tensor, each) else each for each in own]

        # Everything that may raise on one rank alone, so that the others do not wait for it.
        told = agree(collect, "the state of the training cannot be collected")
        counts = [len(registered) for _, registered in told]
        if len(set(counts)) > 1:
            raise CheckpointError(
                f"the ranks have registered different numbers of objects: {counts} (by rank). Remedy: "
                "register_for_checkpointing the same ones on all"
            )
        firsts = told[0][1]
        return {
            **state,
            "ranks": as_item([mine for mine, _ in told]),
            "registered": {str(at): own[at] if first is None else first for at, first in enumerate(firsts)},
            "number_of_registered": len(own),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        accelerator, rank = self.accelerator, ranks.rank()
        saved = from_item(state_dict["ranks"])
        mine = saved[rank if rank < len(saved) else 0]
        accelerator.step = state_dict["step"]
        for scheduler, state in _pair("schedulers", self.schedulers, from_item(state_dict["schedulers"])):
            scheduler.load_state_dict(state)
        if accelerator.scaler is not None and (state := from_item(state_dict["scaler"])) is not None:
            accelerator.scaler.load_state_dict(state)
        registered = [state_dict["registered"].get(str(each)) for each in range(state_dict["number_of_registered"])]
        for each, state in _pair("registered objects", self.registered, registered):
            each.load_state_dict(from_item(state))
        for loader, state in _pair("dataloaders", self.dataloaders, mine["dataloaders"]):
            _load_dataloader(loader, state, accelerator)
        self.loaded_rng = [each["rng"] for each in saved]
        self.set_rng()

    def set_rng(self) -> None:
        """Set this rank's random number generators to what was loaded."""
        set_rng_state(ranks.rank(), self.loaded_rng, self.accelerator.device)


def _pair(what: str, prepared: list[Any], saved: list[Any]) -> list[tuple[Any, Any]]:
    if len(prepared) != len(saved):
        raise CheckpointError(
            f"the checkpoint has {len(saved)} {what}, and the accelerator has {len(prepared)}. Remedy: prepare and "
            "register the same ones, in the same order"
        )
    return list(zip(prepared, saved, strict=True))


# --- dataloaders ----------------------------------------------------------------------------------------

_INNER = ("_index_sampler_state", "_sampler_iter_state", "fetcher_state", "dataset_state")
"""Keys in the state of torchdata's StatefulDataLoader (0.11) for the states of what is in it."""


def _dataloader_state(loader: Any, accelerator: Accelerator) -> dict[str, Any]:
    """The position of a dataloader on this rank. A plain one knows its epoch only."""
    inside = any(each is loader for each in accelerator.gradient_state.dataloader_references)
    ended = inside and loader.end_of_dataloader  # Accelerate counts the epoch after the loop's last round
    state: dict[str, Any] = {"iteration": loader.iteration + ended, "shards": _shards(loader)}
    sampler, generator = _sources_of_chance(loader)
    if sampler is not None:
        state["seed"] = sampler.initial_seed
    if generator is not None:
        state["generator"] = generator.get_state()
    if loader.use_stateful_dataloader:
        state["position"] = loader.state_dict()
    return state


def _sources_of_chance(loader: Any) -> tuple[SeedableRandomSampler | None, torch.Generator | None]:
    sampler = loader.get_sampler() if hasattr(loader, "get_sampler") else None
    seeded = sampler if isinstance(sampler, SeedableRandomSampler) else None
    return seeded, getattr(loader, "synchronized_generator", None)


def _load_dataloader(loader: Any, state: dict[str, Any], accelerator: Accelerator) -> None:
    loader.iteration = state["iteration"]
    sampler, generator = _sources_of_chance(loader)
    if sampler is not None and "seed" in state:
        sampler.initial_seed = state["seed"]
    if generator is not None and "generator" in state:
        generator.set_state(state["generator"])
    if not loader.use_stateful_dataloader or "position" not in state:
        return
    position, shards, now = state["position"], state["shards"], _shards(loader)
    own = any(position.get(key, "?") is not None for key in _INNER)
    if shards != now and (own or not accelerator.split_batches):
        logger.warning(
            "the position of a dataloader on %d ranks is no position on %d, without split_batches=True or with workers "
            "or a dataset that have states: it begins its epoch again. Remedy: accelerator.skip_first_batches",
            shards, now,
        )  # fmt: skip
        return
    loader.load_state_dict(position)


def _shards(loader: Any) -> int:
    """Number of shards of the data, of which each rank takes one: the ranks, without those that share their data."""
    sharded = loader.dataset if loader.batch_sampler is None else loader.batch_sampler
    return int(getattr(sharded, "num_processes", 1))
