"""Names of the objects of a checkpoint, relative to its URL. Pure."""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Iterable

METADATA = ".metadata"
DATA_SUFFIX = ".distcp"
CONTROL_PREFIX = ".dcp_s3/"
METRICS = CONTROL_PREFIX + "metrics.json"
PIN = CONTROL_PREFIX + "pin"
LEASE_PREFIX = CONTROL_PREFIX + "lease-"
DELETION_PREFIX = CONTROL_PREFIX + "deletion-"

SAVE_ID_KEY = "dcp-s3-save-id"
"""User metadata of ``.metadata`` that says which manifest belongs to it."""

METADATA_CRC_KEY = "dcp-s3-crc64nvme"
"""User metadata of ``.metadata`` with the CRC-64/NVME of its bytes (16 hex digits)."""

# Control characters, lone surrogates, and the backslash, which separates directories on Windows: no writer uses them.
_NO_KEY = re.compile(r"[\x00-\x1f\x7f\\\ud800-\udfff]")

_MANIFEST = re.compile(re.escape(CONTROL_PREFIX) + r"manifest-([0-9a-f]+)(?:\.(\d+))?\.json")


def new_save_id() -> str:
    """A random id of one save of one checkpoint (hex)."""
    return secrets.token_hex(8)


def new_nonce() -> str:
    """A random part for the object names of one rank in one save (hex)."""
    return secrets.token_hex(6)


def data_object(rank: int, index: int, nonce: str, *, prefix_spread: int = 0) -> str:
    """Relative path of data object number ``index`` of ``rank``: ``[xx/]__{rank}_{index}-{nonce}.distcp``.

    The nonce keeps the objects of two saves to one URL apart, so that overwriting a checkpoint leaves the old
    one whole until the new ``.metadata`` is there.
    """
    name = f"__{rank}_{index}-{nonce}{DATA_SUFFIX}"
    if not prefix_spread:
        return name
    return f"{hashlib.blake2b(name.encode(), digest_size=8).hexdigest()[:prefix_spread]}/{name}"


def metadata_object(rank: int | None = None) -> str:
    """``.metadata``, or ``__{rank}.metadata`` of a save with ``use_collectives=False``."""
    return METADATA if rank is None else f"__{rank}{METADATA}"


_RANK_METADATA = re.compile(r"__(\d+)" + re.escape(METADATA))


def rank_of_metadata(relative_path: str) -> int | None:
    """The rank in the name of one rank's metadata, None if it is something else."""
    match = _RANK_METADATA.fullmatch(relative_path)
    return int(match[1]) if match else None


def manifest_object(save_id: str, rank: int | None = None) -> str:
    """Relative path of the manifest of one save (and of one rank, without collectives)."""
    return f"{CONTROL_PREFIX}manifest-{save_id}{'' if rank is None else f'.{rank}'}.json"


def parse_manifest_object(relative_path: str) -> str | None:
    """The save id in a manifest's relative path, None if it is not one."""
    match = _MANIFEST.fullmatch(relative_path)
    return match[1] if match else None


def lease_object(lease_id: str, seconds: int) -> str:
    """Relative path of a reader's lease of ``seconds``: ``.dcp_s3/lease-{id}.{seconds}``.

    The lease ends ``seconds`` after S3 stored the object, so a listing tells it, by S3's clock.
    """
    return f"{LEASE_PREFIX}{lease_id}.{seconds}"


_LEASE = re.compile(re.escape(LEASE_PREFIX) + r"[0-9a-f]+\.(\d{1,9})")


def parse_lease_object(relative_path: str) -> int | None:
    """Seconds of the lease in a lease's relative path, None if it is not one."""
    match = _LEASE.fullmatch(relative_path)
    return int(match[1]) if match else None


def deletion_id(save_id: str | None, etag: str | None) -> str:
    """What the deletion of a checkpoint is known by (hex): the save id, or a hash of a foreign ``.metadata``'s ETag."""
    return save_id or hashlib.blake2b((etag or "").strip('"').encode(), digest_size=8).hexdigest()


def deletion_object(deletion: str, attempt: str = "0") -> str:
    """Relative path of the list of what a deletion (`deletion_id`) removes: written before ``.metadata`` is deleted,
    there until all is gone. Each attempt (hex) has one of its own, so that nobody withdraws another's."""
    return f"{DELETION_PREFIX}{deletion}-{attempt}.json"


_DELETION = re.compile(re.escape(DELETION_PREFIX) + r"([0-9a-f]+)-[0-9a-f]+\.json")


def parse_deletion_object(relative_path: str) -> str | None:
    """The `deletion_id` in the relative path of a deletion's list, None if it is not one."""
    match = _DELETION.fullmatch(relative_path)
    return match[1] if match else None


def is_inside(relative_path: str) -> bool:
    """Whether a path from a checkpoint's metadata stays below the checkpoint's prefix, on S3 and in a directory."""
    return (
        bool(relative_path)
        and not relative_path.startswith("/")
        and ".." not in relative_path.split("/")
        and "://" not in relative_path
        and _NO_KEY.search(relative_path) is None
    )


_STEP = re.compile(r"(\d+)(?!.*\d)")


def step_of(name: str) -> int | None:
    """The step in a checkpoint's name: its last run of digits (``step-00001000`` -> 1000), None without."""
    return step_by_patterns(name, (_STEP,))


def step_by_patterns(name: str, patterns: Iterable[re.Pattern[str]]) -> int | None:
    """The step by the first pattern that is found in ``name`` and whose first group is digits, None if none is."""
    for pattern in patterns:
        match = pattern.search(name)
        if match and match[1] and match[1].isascii() and match[1].isdigit():
            return int(match[1])
    return None
