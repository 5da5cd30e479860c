"""Megatron-Core's `dist_checkpointing` on s3://. The page docs/megatron.md says how to use it.

>>> from dcp_s3.integrations import megatron
>>> megatron.install()
>>> dist_checkpointing.save(sharded_state_dict, "s3://bucket/run/iter_0001000")
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata

from dcp_s3.checkpoint.commit import Commit, publish
from dcp_s3.checkpoint.commit_state import Previous, SaveIdentity
from dcp_s3.checkpoint.stored_metadata import check_metadata, fetch_metadata
from dcp_s3.checksum import crc64nvme, crc_hex
from dcp_s3.errors import ObjectNotFoundError
from dcp_s3.format.control_files import AddedMetrics, Manifest
from dcp_s3.format.layout import METADATA_CRC_KEY, METRICS, manifest_object, metadata_object, new_save_id
from dcp_s3.format.metadata import dump_metadata
from dcp_s3.format.saved_entries import needed_objects
from dcp_s3.integrations.requirement import require
from dcp_s3.s3.store import store_of
from dcp_s3.settings import SettingsLike, resolve_settings
from dcp_s3.store import Expect, Store
from dcp_s3.url import CheckpointURL, is_s3_url, parse_url

require("megatron", "megatron-core", "0.16", "0.17")

from megatron.core.dist_checkpointing.core import CONFIG_FNAME, CheckpointingConfig  # noqa: E402
from megatron.core.dist_checkpointing.strategies import torch as strategies  # noqa: E402
from megatron.core.msc_utils import MultiStorageClientFeature  # noqa: E402

from dcp_s3.integrations.megatron.files import Files, SmallFiles  # noqa: E402
from dcp_s3.integrations.megatron.writer import MegatronS3Writer, finalize  # noqa: E402

__all__ = ["MegatronS3Writer", "install", "uninstall"]

logger = logging.getLogger(__name__)

# All seen in megatron-core 0.16.1; tests/frameworks/megatron/test_beside.py fails when one moves.
REPLACED = (
    (strategies, "FileSystemWriterAsync"),  # the writer of every save
    (strategies, "save_state_dict_async_finalize"),  # what ends a save
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
    stock_writer, stock_finalize, stock_save, stock_remove, is_enabled, import_package = (
        getattr(owner, name) for owner, name in REPLACED
    )
    small = SmallFiles(settings)
    files = Files(small, lambda: import_package() if is_enabled() else None)
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

    @functools.wraps(stock_remove)
    def remove(strategy: Any, checkpoint_dir: str | os.PathLike[str], key_prefix: str) -> None:
        if is_s3_url(checkpoint_dir):
            _remove_sharded_tensors(parse_url(checkpoint_dir), key_prefix, settings)
        else:
            stock_remove(strategy, checkpoint_dir, key_prefix)

    return make_writer, end_save, async_save, remove, lambda: True, lambda: files


def _replace(owner: Any, name: str, new: Any) -> Callable[[], None]:
    """Set an attribute. Returns what sets it back."""
    own = vars(owner)
    if name not in own:  # a method, on an instance
        setattr(owner, name, new)
        return lambda: delattr(owner, name)
    old = own[name]
    setattr(owner, name, new)
    return lambda: setattr(owner, name, old)


# --- remove_sharded_tensors -----------------------------------------------------------------------------


def _remove_sharded_tensors(url: CheckpointURL, key_prefix: str, settings: SettingsLike) -> None:
    """Remove the entries whose names begin with ``key_prefix``, and the objects that held nothing else.

    At every instant the checkpoint is whole, with the entries or without.
    """
    store = store_of(url, resolve_settings(settings))
    stored = fetch_metadata(store, url)
    metadata = check_metadata(stored, url)
    kept = _without(metadata, key_prefix)
    dropped = needed_objects(metadata).keys() - needed_objects(kept).keys()
    if not dropped:
        warnings.warn(
            f"no object of {url} holds only what begins with {key_prefix!r}: nothing is removed. Remedy: save with "
            f"separation_hint={key_prefix!r}",
            stacklevel=3,
        )
        return
    save_id = getattr(metadata.storage_meta, "save_id", None)
    try:
        path = manifest_object(str(save_id))
        manifest = Manifest.from_json(store.get(url.key(path)).data)
    except ObjectNotFoundError:  # another library's
        data = dump_metadata(kept)
        crc = {METADATA_CRC_KEY: crc_hex(crc64nvme(data))}
        store.put(url.key(metadata_object()), data, expect=Expect(stored.etag), metadata=crc)
        store.delete(map(url.key, sorted(dropped)))
        return
    _commit(store, SaveIdentity(url, new_save_id(), None), kept, manifest, Previous(
        frozenset(map(url.key, {path, *dropped})), stored.etag
    ))  # fmt: skip
    logger.info("removed %d objects with %s* from %s", len(dropped), key_prefix, url)


def _without(metadata: Metadata, key_prefix: str) -> Metadata:
    planned = metadata.planner_data
    return dataclasses.replace(
        metadata,
        state_dict_metadata={k: v for k, v in metadata.state_dict_metadata.items() if not k.startswith(key_prefix)},
        planner_data=(
            {k: v for k, v in planned.items() if not k.startswith(key_prefix)} if isinstance(planned, dict) else planned
        ),
        storage_data={k: v for k, v in (metadata.storage_data or {}).items() if not k.fqn.startswith(key_prefix)},
    )


def _commit(store: Store, identity: SaveIdentity, metadata: Metadata, old: Manifest, previous: Previous) -> None:
    gone = {key.removeprefix(identity.url.key("")) for key in previous.keys}
    if metadata.storage_meta is not None:
        metadata.storage_meta = dataclasses.replace(metadata.storage_meta, save_id=identity.save_id)
    objects = tuple(entry for entry in old.objects if entry.path not in gone)
    manifest = dataclasses.replace(
        old,
        save_id=identity.save_id,
        objects=objects,
        items=len(metadata.storage_data or {}),
        metrics={**old.metrics, **_added_metrics(store, identity.url, old.save_id)},
    )
    publish(
        store,
        Commit(identity, manifest.to_json(), dump_metadata(metadata), objects),
        previous,
        keep_objects=True,  # should this come too late, they are somebody else's
        is_late=lambda: True,  # a prune may delete the checkpoint meanwhile
    )


def _added_metrics(store: Store, url: CheckpointURL, save_id: str) -> Mapping[str, Any]:
    """Metrics that were added to a save. They name it, so the next one would lose them."""
    try:
        added = AddedMetrics.from_json(store.get(url.key(METRICS)).data)
    except (ObjectNotFoundError, ValueError):
        return {}
    return added.metrics if added.of == save_id else {}
