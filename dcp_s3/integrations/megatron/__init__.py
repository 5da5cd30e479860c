"""Megatron-Core's `dist_checkpointing` on s3://. The page docs/megatron.md says how to use it.

>>> from dcp_s3.integrations import megatron
>>> megatron.install()
>>> dist_checkpointing.save(sharded_state_dict, "s3://bucket/run/iter_0001000")
"""

from __future__ import annotations

import functools
import json
import os
import weakref
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch.distributed as dist

from dcp_s3.integrations import require
from dcp_s3.settings import SettingsLike, resolve_settings
from dcp_s3.url import is_s3_url, parse_url

require("megatron", "megatron-core", "0.16", "0.17")

from megatron.core.dist_checkpointing.core import CONFIG_FNAME, CheckpointingConfig  # noqa: E402
from megatron.core.dist_checkpointing.strategies import torch as strategies  # noqa: E402
from megatron.core.msc_utils import MultiStorageClientFeature  # noqa: E402

from dcp_s3.integrations.megatron.files import Files, SmallFiles  # noqa: E402
from dcp_s3.integrations.megatron.writer import MegatronS3Writer, finalize  # noqa: E402

__all__ = ["MegatronS3Writer", "install"]

# All seen in megatron-core 0.16.1; tests/frameworks/megatron/test_beside.py fails when one moves.
REPLACED = (
    (strategies, "FileSystemWriterAsync"),  # the writer of every save
    (strategies, "save_state_dict_async_finalize"),  # what ends a save
    (strategies.TorchDistSaveShardedStrategy, "async_save"),  # every save, synchronous ones too
    (MultiStorageClientFeature, "is_enabled"),  # the switch in front of all other files ...
    (MultiStorageClientFeature, "import_package"),  # ... and what carries them
)

_stock: dict[str, Any] = {}
"""What was there before, by name."""


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
    resolve_settings(settings)
    for owner, name in REPLACED:
        _stock.setdefault(name, getattr(owner, name))
    for (owner, name), new in zip(REPLACED, _replacements(settings), strict=True):
        setattr(owner, name, new)


def _replacements(settings: SettingsLike) -> tuple[Callable[..., Any], ...]:
    stock_writer, stock_finalize, stock_save, is_enabled, import_package = _stock.values()
    small = SmallFiles(settings)
    files = Files(small, is_enabled, import_package)
    was_on_s3: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()  # by strategy, of its last save

    def make_writer(path: Any, *args: Any, use_msc: bool = False, **options: Any) -> Any:
        if not is_s3_url(path):
            return stock_writer(path, *args, use_msc=is_enabled(), **options)
        return MegatronS3Writer(path, attachments=small.take(parse_url(path)), settings=settings, **options)

    def end_save(writer: Any, *args: Any) -> None:
        (finalize if isinstance(writer, MegatronS3Writer) else stock_finalize)(writer, *args)

    @functools.wraps(stock_save)
    def async_save(strategy: Any, sharded_state_dict: Any, checkpoint_dir: str | os.PathLike[str]) -> Any:
        on_s3 = is_s3_url(checkpoint_dir)
        if was_on_s3.get(strategy, on_s3) != on_s3:
            # Megatron would reuse its plans, whose storage_data are the other writer's, and on rank 0 the metadata.
            strategy.cached_central_plan = strategy.cached_local_plan = strategy.cached_global_metadata = None
            strategy.validated_cache_reuse = False
        was_on_s3[strategy] = on_s3
        if on_s3 and dist.get_rank() == 0:
            # Megatron writes it after the commit. It belongs to what is committed: no load works without it.
            config = CheckpointingConfig(strategy.backend, strategy.version)
            small.hold(parse_url(checkpoint_dir), CONFIG_FNAME, json.dumps(asdict(config)).encode())
        return stock_save(strategy, sharded_state_dict, checkpoint_dir)

    return make_writer, end_save, async_save, lambda: True, lambda: files
