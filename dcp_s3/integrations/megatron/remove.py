"""Removes tensors from a checkpoint, as Megatron-Core's `remove_sharded_tensors` does on a disk."""

from __future__ import annotations

import dataclasses
import logging
import warnings
from collections.abc import Mapping
from typing import Any

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
from dcp_s3.s3.store import S3Store
from dcp_s3.settings import SettingsLike, resolve_settings
from dcp_s3.store import Expect, Store
from dcp_s3.url import CheckpointURL, URLLike, parse_url

logger = logging.getLogger(__name__)


def remove_sharded_tensors(checkpoint_dir: URLLike, key_prefix: str, *, settings: SettingsLike = None) -> None:
    """Remove the entries whose names begin with ``key_prefix``, and the objects that held nothing else.

    As in Megatron, this does nothing but warn if no object holds such entries alone: save with ``separation_hint``. At
    every instant the checkpoint is whole, with the entries or without. Call it on one rank.

    Raises:
        CheckpointNotFoundError: no committed checkpoint is there.
        CheckpointExistsError, CheckpointDeletedError: somebody else replaced or deleted the checkpoint meanwhile; this
            changed nothing.
        StorageError, CheckpointError
    """
    url = parse_url(checkpoint_dir)
    store = S3Store(url.bucket, resolve_settings(settings))
    stored = fetch_metadata(store, url)
    metadata = check_metadata(stored, url)
    kept = without(metadata, key_prefix)
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


def without(metadata: Metadata, key_prefix: str) -> Metadata:
    """``metadata`` without the entries whose names begin with ``key_prefix``."""
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
