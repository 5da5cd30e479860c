"""``.metadata`` fetched by one of a host's ranks, where they load without a process group."""

from __future__ import annotations

import json

from dcp_s3 import errors
from dcp_s3.checkpoint.stored_metadata import fetch_metadata, not_found_error
from dcp_s3.format.layout import metadata_object
from dcp_s3.load.host_files import fetch_for_host
from dcp_s3.store import Store, StoredObject
from dcp_s3.url import CheckpointURL
from dcp_s3.workers import Workers

SHARED_FROM = 2**20
"""Bytes that each rank reads in any case, in one request that also names the version: S3 sends them in 12 ms. What is
not longer is not shared."""

# S3 gives a connection 90 MB/s. All ranks of the host wait for this one.
_PIECE = 8 * 2**20
_CONNECTIONS = 8

_ATTEMPTS = 3  # each of them found that the checkpoint had been replaced since it began


def fetch_metadata_for_host(store: Store, url: CheckpointURL, origin: str, *, ranks: int) -> StoredObject:
    """`fetch_metadata`, of which one of this host's ranks fetches most, for all that found the same version.

    Each rank asks S3 for the first bytes: it uses the version that is there now, and only if S3 lets it read.

    Args:
        store: store with the checkpoint.
        url: URL of the checkpoint.
        origin: where the store is; a bucket of this name elsewhere is another one.
        ranks: number of ranks on this host.

    Raises:
        CheckpointNotFoundError: there is none.
        StorageError: missing bucket, credentials, network.
    """
    key = url.key(metadata_object())
    for _ in range(_ATTEMPTS if ranks > 1 else 0):
        try:
            start = store.get_start(key, SHARED_FROM)
        except errors.ObjectNotFoundError:
            raise not_found_error(url, why=f": it has no {metadata_object()}") from None
        found, size = start.object, start.size
        if len(found.data) >= size:
            return found
        identity = json.dumps([origin, store.name, key, found.etag, size])
        try:
            data = fetch_for_host(identity, size, lambda: _fetch_rest(store, key, found, size), processes=ranks)  # noqa: B023
        except (errors.PreconditionFailedError, errors.OutOfRangeError, errors.ObjectNotFoundError):
            continue  # replaced, or deleted
        if data.startswith(found.data):
            return StoredObject(data, found.metadata, found.etag)
    return fetch_metadata(store, url)


def _fetch_rest(store: Store, key: str, found: StoredObject, size: int) -> bytes:
    data = bytearray(size)
    view = memoryview(data)
    begin = len(found.data)
    view[:begin] = found.data
    starts = range(begin, size, _PIECE)
    workers = Workers(min(_CONNECTIONS, len(starts)), "dcp_s3-metadata")
    try:
        pieces = [workers.submit(store.read, key, each, view[each : each + _PIECE], found.etag) for each in starts]
        for piece in pieces:
            piece.result()
    finally:
        workers.close()
    return bytes(data)
