"""Attachments of a checkpoint whose commit still waits on this host's disk."""

from __future__ import annotations

import contextlib

from dcp_s3.checkpoint.attachments import check_bytes, missing_error
from dcp_s3.format.manifest import Manifest
from dcp_s3.s3.download import ReadTarget
from dcp_s3.settings import Settings
from dcp_s3.spill.local import LocalObjects
from dcp_s3.spill.session import open_store
from dcp_s3.store import Store
from dcp_s3.url import CheckpointURL


def read_waiting(store: Store, settings: Settings, url: CheckpointURL, manifest: bytes, name: str) -> bytes:
    """The bytes of one attachment, from this host's disk if it is there, else from S3.

    Raises:
        AttachmentNotFoundError: there is none.
        CorruptCheckpointError: it is damaged.
        StorageError
    """
    known = Manifest.from_json(manifest).attachments
    if name not in known:
        raise missing_error(url, name, known)
    entry, spill = known[name], open_store(settings)
    data = bytearray(entry.size)
    if spill is not None:
        with contextlib.closing(LocalObjects(spill, str(url))) as local:
            if local.read_into(entry.path, 0, [ReadTarget(memoryview(data))]):
                return check_bytes(bytes(data), url, entry)
    return check_bytes(store.get(url.key(entry.path)).data, url, entry)
