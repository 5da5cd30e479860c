"""Puts this backend where Megatron-Core looks for storage; everything it replaces is named here."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CONFIG_FNAME, CheckpointingConfig
from megatron.core.dist_checkpointing.strategies import torch as strategies
from megatron.core.msc_utils import MultiStorageClientFeature

from dcp_s3.integrations.megatron.files import Files, SmallFiles
from dcp_s3.integrations.megatron.merged import merges, plan_without_gathering
from dcp_s3.integrations.megatron.remove import remove_sharded_tensors
from dcp_s3.integrations.megatron.writer import MegatronS3Writer, finalize
from dcp_s3.settings import SettingsLike, resolve_settings
from dcp_s3.url import is_s3_url, parse_url

# All seen in megatron-core 0.16.1; tests/frameworks/megatron/test_beside.py fails when one moves.
REPLACED = (
    (strategies, "FileSystemWriterAsync"),  # the writer of every save
    (strategies, "save_state_dict_async_plan"),  # what begins a save ...
    (strategies, "save_state_dict_async_finalize"),  # ... and ends it
    (strategies.TorchDistSaveShardedStrategy, "async_save"),  # every save, synchronous ones too
    (strategies.TorchDistLoadShardedStrategy, "remove_sharded_tensors"),
    (MultiStorageClientFeature, "is_enabled"),  # the switch in front of all other files ...
    (MultiStorageClientFeature, "import_package"),  # ... and what carries them
)

_lock = threading.Lock()
_undo: contextlib.ExitStack | None = None


def install(*, settings: SettingsLike = None) -> None:
    """Make `megatron.core.dist_checkpointing` save and load checkpoints at s3:// URLs.

    Every other path goes where it went before, msc:// and a real multistorageclient included. Call it on each rank
    before the first save or load. Another call replaces the arguments of the previous one.

    Args:
        settings: a `Settings`, or a mapping of settings that override the environment. The environment is read at each
            save and load.

    Raises:
        SettingsError: a setting, in the environment or given here, is not allowed.
    """
    global _undo
    resolve_settings(settings)
    uninstall()
    with _lock:
        _undo = contextlib.ExitStack()
        for (owner, name), new in zip(REPLACED, _replacements(settings), strict=True):
            _undo.callback(_replace(owner, name, new))


def uninstall() -> None:
    """Undo `install`, when no save is under way. Further calls change nothing."""
    global _undo
    with _lock:
        if _undo is not None:
            _undo.close()
        _undo = None


def _replacements(settings: SettingsLike) -> tuple[Callable[..., Any], ...]:
    stock_writer, stock_plan, stock_finalize, stock_save, stock_remove, is_enabled, import_package = (
        getattr(owner, name) for owner, name in REPLACED
    )
    small = SmallFiles(settings)
    without_metadata: weakref.WeakSet[Any] = weakref.WeakSet()
    files = Files(small, lambda: import_package() if is_enabled() else None)

    def make_writer(path: Any, *args: Any, use_msc: bool = False, **options: Any) -> Any:
        if not is_s3_url(path):
            return stock_writer(path, *args, use_msc=is_enabled(), **options)
        return MegatronS3Writer(path, attachments=small.take(parse_url(path)), settings=settings, **options)

    @functools.wraps(stock_plan)
    def begin_save(
        state: Any,
        writer: Any,
        group: Any = None,
        coordinator_rank: int = 0,
        planner: Any = None,
        cached_ckpt_structure: Any = None,
        loaded_all_plans: Any = None,
    ) -> Any:
        is_decentralized = getattr(planner, "can_run_decentralized_global_plan", False)
        is_usual = group is None and coordinator_rank == 0  # as in all saves of Megatron's strategy
        if isinstance(writer, MegatronS3Writer) and is_decentralized and is_usual and merges(settings):
            return plan_without_gathering(state, writer, planner, cached_ckpt_structure)
        return stock_plan(state, writer, group, coordinator_rank, planner, cached_ckpt_structure, loaded_all_plans)

    def end_save(writer: Any, *args: Any) -> None:
        (finalize if isinstance(writer, MegatronS3Writer) else stock_finalize)(writer, *args)

    @functools.wraps(stock_save)
    def async_save(strategy: Any, sharded_state_dict: Any, checkpoint_dir: str | os.PathLike[str]) -> Any:
        if is_s3_url(checkpoint_dir) and dist.get_rank() == 0:
            # Megatron writes it after the commit. It belongs to what is committed: no load works without it.
            config = CheckpointingConfig(strategy.backend, strategy.version)
            small.hold(parse_url(checkpoint_dir), CONFIG_FNAME, json.dumps(asdict(config)).encode())
        if is_s3_url(checkpoint_dir) and merges(settings):
            without_metadata.add(strategy)
        elif strategy in without_metadata:
            # Megatron would reuse its plans, with metadata that its other saves have made and these have not.
            strategy.cached_central_plan = strategy.cached_local_plan = None
            strategy.validated_cache_reuse = False
            without_metadata.discard(strategy)
        return stock_save(strategy, sharded_state_dict, checkpoint_dir)

    @functools.wraps(stock_remove)
    def remove(strategy: Any, checkpoint_dir: str | os.PathLike[str], key_prefix: str) -> None:
        if is_s3_url(checkpoint_dir):
            remove_sharded_tensors(checkpoint_dir, key_prefix, settings=settings)
        else:
            stock_remove(strategy, checkpoint_dir, key_prefix)

    return make_writer, begin_save, end_save, async_save, remove, lambda: True, lambda: files


def _replace(owner: Any, name: str, new: Any) -> Callable[[], None]:
    """Set an attribute. Returns what sets it back."""
    own = vars(owner)
    if name not in own:  # a method, on an instance
        setattr(owner, name, new)
        return lambda: delattr(owner, name)
    old = own[name]
    setattr(owner, name, new)
    return lambda: setattr(owner, name, old)
