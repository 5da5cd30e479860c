"""Attachments: small files that belong to a checkpoint, for example a framework's ``common.pt``.

Each is a data object of its save, named like one and listed in the manifest with its name and CRC-64. A copy of the
checkpoint on a disk has it under its own name, too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dcp_s3 import errors
from dcp_s3.checkpoint.commit_state import find_manifest, not_found_error
from dcp_s3.checkpoint.directory import list_directory
from dcp_s3.format.control_files import AttachmentEntry, Manifest
from dcp_s3.format.layout import METADATA, is_attachment_name
from dcp_s3.memory import crc64nvme, crc_hex
from dcp_s3.store import Store
from dcp_s3.units import format_size
from dcp_s3.url import CheckpointURL

MAX_SIZE = 2**28
"""Bytes of the largest attachment: it is kept in memory, by the writer and by each reader."""


@dataclass(frozen=True)
class Attachment:
    """A file to be attached to a save."""

    name: str
    data: bytes


def make_attachment(name: str, data: bytes | bytearray | memoryview) -> Attachment:
    """Check an attachment, and copy its bytes."""
    if not isinstance(name, str) or not is_attachment_name(name):
        raise errors.SaveProtocolError(
            f"{name!r} cannot be the name of an attachment: it is a short path relative to the checkpoint, such as "
            "'common.pt', that neither dcp_s3 nor torch uses for its own files"
        )
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise errors.SaveProtocolError(
            f"the attachment {name!r} is a {type(data).__name__}. Remedy: pass its bytes, for example those of an "
            "io.BytesIO that torch.save has written to"
        )
    size = memoryview(data).nbytes
    if size > MAX_SIZE:
        raise errors.SaveProtocolError(
            f"the attachment {name!r} has {format_size(size)}, at most {format_size(MAX_SIZE)} are allowed. Remedy: "
            "save large values as part of the state"
        )
    return Attachment(name, bytes(data))


def check_bytes(data: bytes, url: CheckpointURL, entry: AttachmentEntry) -> bytes:
    """The bytes of an attachment, if they are those that were attached."""
    found = crc_hex(crc64nvme(data))
    if len(data) == entry.size and entry.crc64nvme in (None, found):
        return data
    raise errors.CorruptCheckpointError(
        f"the attachment {entry.attachment} of {url} ({entry.path}) is damaged: it has {len(data)} bytes with "
        f"CRC-64/NVME {found}, recorded were {entry.size} with {entry.crc64nvme}. Remedy: load an earlier checkpoint, "
        "or restore the object from a backup",
        url=str(url),
    )


def find_attachments(store: Store, url: CheckpointURL) -> Mapping[str, AttachmentEntry] | None:
    """The attachments of the checkpoint at ``url``, by name; None without a manifest (another library's)."""
    manifests = _find_manifests(store, url)
    if not manifests:
        return None
    return {name: entry for each in reversed(manifests) for name, entry in each.attachments.items()}


def read_extra(store: Store, url: CheckpointURL) -> dict[str, Any]:
    """What the user stored with the checkpoint (``extra=``). Without collectives: that of the lowest rank."""
    manifests = _find_manifests(store, url)
    return manifests[0].extra if manifests else {}


def read_attachment(store: Store, url: CheckpointURL, name: str) -> bytes:
    """The bytes of one attachment. Of another library's checkpoint: those of the object with that name."""
    known = find_attachments(store, url)
    if known is None and is_attachment_name(name):
        with contextlib.suppress(errors.ObjectNotFoundError):
            return store.get(url.key(name)).data
    entry = (known or {}).get(name)
    if entry is None:
        raise missing_error(url, name, known or ())
    try:
        return check_bytes(store.get(url.key(entry.path)).data, url, entry)
    except errors.ObjectNotFoundError as error:
        raise errors.CorruptCheckpointError(
            f"the attachment {name} of {url} is gone: its object {entry.path} is not there. Remedy: read it again if a "
            "save has just replaced the checkpoint, else load another one",
            url=str(url),
        ) from error


def missing_error(url: CheckpointURL, name: str, known: Collection[str]) -> errors.EntryNotFoundError:
    """The error for an attachment that is not there, where ``known`` ones are."""
    has = f"it has {', '.join(sorted(known))}" if known else "it has none"
    return errors.EntryNotFoundError(f"{url} has no attachment {name!r}: {has}", url=str(url), fqn=name)


def _find_manifests(store: Store, url: CheckpointURL) -> list[Manifest]:
    """The manifest of the checkpoint at ``url``, or those of its ranks; empty if another library wrote it."""
    ranks: Sequence[int | None] = ()
    if not store.exists(url.key(METADATA)):
        ranks = list_directory(store, url, "__").ranks
    try:
        found = [find_manifest(store, url, rank) for rank in ranks or [None]]
    except errors.ObjectNotFoundError:
        raise not_found_error(url) from None
    return [manifest for manifest in found if manifest is not None]
