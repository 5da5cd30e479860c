"""Small objects beside a checkpoint that mark it: metrics that were added later, and the pin."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

from dcp_s3 import errors
from dcp_s3.checkpoint.commit_state import not_found_error
from dcp_s3.checkpoint.info import CheckpointInfo
from dcp_s3.checkpoint.lease import check_not_deleted
from dcp_s3.checkpoint.look import inspect, read_added
from dcp_s3.format.control_files import AddedMetrics, check_added
from dcp_s3.format.layout import METRICS, PIN
from dcp_s3.s3 import retry
from dcp_s3.s3.store import store_of
from dcp_s3.settings import SettingsLike, resolve_settings
from dcp_s3.store import Expect, Store
from dcp_s3.url import CheckpointURL, URLLike, parse_url

# Conflicts before it gives up. Whenever writers collide, one of them succeeds.
_CONFLICTS = 50


def annotate(
    url: URLLike, metrics: Mapping[str, Any], *, settings: SettingsLike = None, store: Store | None = None
) -> dict[str, Any]:
    """Add metrics to a committed checkpoint, or replace single ones. Several processes may do so at once. A save that
    overwrites the checkpoint starts without them. Returns all that were added so far.

    >>> annotate("s3://bucket/run/step-00002000", {"accuracy": 0.75})
    {'accuracy': 0.75}

    Args:
        url: URL of the checkpoint.
        metrics: finite numbers, NaN (which `KeepBest` takes for missing), text and bools by name.
        settings: a `Settings`, or a mapping of those that differ from the environment.
        store: where the checkpoint is, if not in the URL's bucket as the settings reach it.

    Raises:
        SettingsError: a name or a value cannot be stored.
        CheckpointNotFoundError: no committed checkpoint is there.
        InvalidURLError, StorageError
    """
    check_added(metrics, url=str(parse_url(url)))
    where, store, info = _open_committed(url, settings, store)
    conflicts = 0
    of = info.save_id or info.etag or ""
    while True:
        etag, before = read_added(store, where)
        added = AddedMetrics(of, {**(before.metrics if before.save_id == of else {}), **metrics})
        try:
            store.put(where.key(METRICS), added.to_json(), expect=Expect(etag or ""))
            return dict(added.metrics)
        except errors.PreconditionFailedError:
            conflicts += 1
            if conflicts == _CONFLICTS:
                raise
            time.sleep(retry.backoff(min(conflicts, 4)))


def pin(url: URLLike, reason: str | None = None, *, settings: SettingsLike = None, store: Store | None = None) -> None:
    """Protect a committed checkpoint from every policy until `unpin`. Pinning it again replaces the reason; a save that
    overwrites the checkpoint leaves the pin there.

    >>> pin("s3://bucket/run/step-00001000", "the paper's baseline")
    >>> [info.name for info in list_checkpoints("s3://bucket/run") if info.pinned]
    ['step-00001000']

    Raises:
        CheckpointNotFoundError: no committed checkpoint is there.
        CheckpointDeletedError: a prune is deleting it; it is not pinned.
        InvalidURLError, SettingsError, StorageError
    """
    where, store, info = _open_committed(url, settings, store)
    body = {"reason": reason, "pinned_at": time.time()}
    store.put(where.key(PIN), (json.dumps(body) + "\n").encode())
    try:
        check_not_deleted(store, where, {info.deletion_id}, rank=None if info.etag else 0)
    except errors.CheckpointDeletedError:  # a prune was faster
        store.delete([where.key(PIN)])
        raise


def unpin(url: URLLike, *, settings: SettingsLike = None, store: Store | None = None) -> bool:
    """Remove the pin. Returns whether there was one. Raises InvalidURLError, SettingsError, StorageError.

    >>> pin("s3://bucket/run/step-00001000")
    >>> unpin("s3://bucket/run/step-00001000")
    True
    """
    where = parse_url(url)
    store = store_of(where, resolve_settings(settings)) if store is None else store
    pinned = store.exists(where.key(PIN))
    if pinned:
        store.delete([where.key(PIN)])
    return pinned


def _open_committed(
    url: URLLike, settings: SettingsLike, store: Store | None
) -> tuple[CheckpointURL, Store, CheckpointInfo]:
    where = parse_url(url)
    store = store_of(where, resolve_settings(settings)) if store is None else store
    found = inspect(store, where)
    if found is None or not found.info.committed:
        raise not_found_error(where)
    return where, store, found.info
