"""Makes and reads the names of a checkpoint's objects, relative to its URL. Pure.

`classify` reads what the other functions write; `dcp_s3.checkpoint.directory` does so for a whole listing.
"""

from __future__ import annotations

import hashlib
import re
from enum import Enum
from typing import Any, NamedTuple

METADATA = ".metadata"
DCP_VERSION = "1.0.0"
"""Version of DCP's format, in ``Metadata.version``: what torch 2.9 to 2.15 write."""
DATA_SUFFIX = ".distcp"
CONTROL_PREFIX = ".dcp_s3/"
METRICS = CONTROL_PREFIX + "metrics.json"
PIN = CONTROL_PREFIX + "pin"
CLAIM = CONTROL_PREFIX + "claim.json"
"""Says which save without collectives the ranks write now, and decides what becomes of it."""
JOINT_PREFIX = CONTROL_PREFIX + "joint-"
BOARD_PREFIX = CONTROL_PREFIX + "board-"
"""Below the URL above the checkpoints: what ranks of a run tell each other through S3."""
LEASE_PREFIX = CONTROL_PREFIX + "lease-"
DELETION_PREFIX = CONTROL_PREFIX + "deletion-"
FILES_PREFIX = CONTROL_PREFIX + "files-"
"""Records of files with names of their own, as torch-checkpointing writes them: where one is, all files are ours."""

SAVE_ID_KEY = "dcp-s3-save-id"
"""User metadata of ``.metadata`` that says which manifest belongs to it."""

METADATA_CRC_KEY = "dcp-s3-crc64nvme"
"""User metadata of ``.metadata`` with the CRC-64/NVME of its bytes (16 hex digits)."""

# Control characters, lone surrogates, and the backslash, which separates directories on Windows: no writer uses them.
_NO_KEY = re.compile(r"[\x00-\x1f\x7f\\\ud800-\udfff]")


def data_object(rank: int, index: int, nonce: str) -> str:
    """Relative path of data object number ``index`` of ``rank``: ``__{rank}_{index}-{nonce}.distcp``.

    The nonce keeps the objects of two saves to one URL apart: the old checkpoint stays whole until the new
    ``.metadata`` is there.
    """
    return f"__{rank}_{index}-{nonce}{DATA_SUFFIX}"


def spread(name: str, digits: int) -> str:
    """Relative path of a data object in earlier versions with ``prefix_spread`` set: ``a7/__0_0-....distcp``."""
    return f"{hashlib.blake2b(name.encode(), digest_size=8).hexdigest()[:digits]}/{name}"


def metadata_object(rank: int | None = None) -> str:
    """Relative path of the commit: ``.metadata``, or ``__{rank}.metadata`` with ``use_collectives=False``."""
    return METADATA if rank is None else f"__{rank}{METADATA}"


def manifest_object(save_id: str, rank: int | None = None) -> str:
    """Relative path of the manifest of one save (and of one rank, without collectives)."""
    return f"{CONTROL_PREFIX}manifest-{save_id}{'' if rank is None else f'.{rank}'}.json"


def lease_object(lease_id: str, seconds: int) -> str:
    """Relative path of a reader's lease, which ends ``seconds`` after S3 stored the object, by S3's clock."""
    return f"{LEASE_PREFIX}{lease_id}.{seconds}"


def joint_object(nonce: str, kind: str, name: object = "") -> str:
    """Relative path of what the ranks of a save without collectives (its nonce, hex) tell each other.

    Kinds: ``intent`` and ``part`` with a rank as name, ``roll`` and ``merged`` with hex digits. Without a kind: what
    all of them begin with.
    """
    return f"{JOINT_PREFIX}{nonce}.{kind}{'.' if kind else ''}{name}"


def is_merged(path: str) -> bool:
    """Whether this is what a save without collectives is to commit, or has committed, as ``.metadata``."""
    return path.startswith(JOINT_PREFIX) and ".merged." in path


def board_object(attempt: str, key: str) -> str:
    """Path, relative to the root of a run, of what the ranks of one attempt (hex) tell each other under a key."""
    return f"{BOARD_PREFIX}{attempt}-{key}"


def deletion_id(save_id: str | None, etag: str | None) -> str:
    """Id (hex) of a checkpoint's deletion: the save id, or a hash of a foreign ``.metadata``'s ETag."""
    return save_id or hashlib.blake2b((etag or "").strip('"').encode(), digest_size=8).hexdigest()


def deletion_object(deletion: str, attempt: str = "0") -> str:
    """Relative path of the list of what a deletion (`deletion_id`) removes. Each attempt (hex) has its own, so that
    nobody withdraws another's."""
    return f"{DELETION_PREFIX}{deletion}-{attempt}.json"


class What(Enum):
    """The kinds of objects in a checkpoint's directory."""

    DATA = "data"
    COMMIT = "commit"
    """Makes the directory a checkpoint by its presence: ``.metadata``, or one rank's without collectives."""
    MANIFEST = "manifest"
    METRICS = "metrics"
    PIN = "pin"
    LEASE = "lease"
    DELETION = "deletion"
    COORDINATION = "coordination"
    """Of a save without collectives: the claim, or what has its nonce in its name."""
    BOARD = "board"
    """Something that ranks tell each other, below the URL above the checkpoints. Says nothing about a checkpoint."""
    CONTROL = "control"
    """Something else in our own directory, ``.dcp_s3/``."""
    NESTED = "nested"
    """Shows that a directory right below is a checkpoint of its own."""
    NESTED_DATA = "nested data"
    """Data in a directory below, where no save to this checkpoint puts any."""
    OTHER = "other"


class Kind(NamedTuple):
    """The information in the name of an object in a checkpoint's directory. A tuple: a listing has many."""

    what: What
    rank: int | None = None
    number: int | None = None  # of a data object among its rank's
    nonce: str = ""
    """Nonce of a data object; empty if another library named it."""
    spread: int = 0
    """Number of hex digits of the hash in front of a data object's name (`spread`)."""
    save_id: str = ""
    """Save id of a manifest; nonce of what the ranks of a save without collectives tell each other."""
    seconds: int = 0  # of a lease
    deletion: str = ""
    """Id (`deletion_id`) of a deletion's list."""
    attempt: str = ""  # of a deletion's list
    below: str = ""  # name of the directory of a nested object


_NUMBER = "(0|[1-9][0-9]*)"
_RANK_METADATA = re.compile(f"__{_NUMBER}{re.escape(METADATA)}")
_OUR_DATA = re.compile(f"__{_NUMBER}_{_NUMBER}-([0-9a-f]+){re.escape(DATA_SUFFIX)}")
_RANK_DATA = re.compile(f"__{_NUMBER}_{_NUMBER}[^0-9].*")
_SPREAD = re.compile("[0-9a-f]{1,4}")
_FIXED = {METRICS: Kind(What.METRICS), PIN: Kind(What.PIN), CLAIM: Kind(What.COORDINATION)}
_CONTROL = [
    (what, re.compile(re.escape(CONTROL_PREFIX) + pattern))
    for what, pattern in (
        (What.MANIFEST, r"manifest-(?P<save_id>[0-9a-f]+)(?:\.(?P<rank>0|[1-9][0-9]*))?\.json"),
        (What.LEASE, r"lease-[0-9a-f]+\.(?P<seconds>0|[1-9][0-9]{0,8})"),
        (What.DELETION, r"deletion-(?P<deletion>[0-9a-f]+)-(?P<attempt>[0-9a-f]+)\.json"),
        (What.COORDINATION, r"joint-(?P<save_id>[0-9a-f]+)\.(?:intent|part|roll|merged)\.[0-9a-f]+"),
        (What.COORDINATION, r"(?:part|intent|notice)-(?P<save_id>[0-9a-f]+)\.[0-9a-z.]+"),  # of version 0.1
    )
]


def classify(path: str) -> Kind:
    """Classify an object by its path relative to the checkpoint. One that is not `is_inside` is `What.OTHER`."""
    directory, slash, rest = path.partition("/")
    if not slash:
        return _classify_name(path)
    if path in _FIXED:
        return _FIXED[path]
    if path.startswith(CONTROL_PREFIX):
        for what, pattern in _CONTROL:
            if match := pattern.fullmatch(path):
                found: dict[str, Any] = {name: value for name, value in match.groupdict().items() if value is not None}
                return Kind(what, **found | {name: int(found[name]) for name in ("rank", "seconds") if name in found})
    if not is_inside(path):
        return Kind(What.OTHER)
    if path.startswith(CONTROL_PREFIX):
        return Kind(What.BOARD if path.startswith(BOARD_PREFIX) else What.CONTROL)
    data = _classify_name(rest) if "/" not in rest else None
    if data is not None and data.nonce and _SPREAD.fullmatch(directory) and path == spread(rest, len(directory)):
        return Kind(What.DATA, data.rank, data.number, data.nonce, spread=len(directory))
    if rest.startswith(BOARD_PREFIX):
        return Kind(What.OTHER)
    if rest.startswith(CONTROL_PREFIX) or (data is not None and data.what is What.COMMIT):
        return Kind(What.NESTED, below=directory)
    if path.endswith(DATA_SUFFIX):
        return Kind(What.NESTED_DATA, None if data is None else data.rank, below=directory)
    return Kind(What.OTHER)


def _classify_name(name: str) -> Kind:
    if name.endswith(DATA_SUFFIX):
        if match := _OUR_DATA.fullmatch(name):
            return Kind(What.DATA, int(match[1]), int(match[2]), match[3])
        if not is_inside(name):
            return Kind(What.OTHER)
        match = _RANK_DATA.fullmatch(name)
        return Kind(What.DATA, int(match[1]), int(match[2])) if match else Kind(What.DATA)
    if name == METADATA:
        return Kind(What.COMMIT)
    match = _RANK_METADATA.fullmatch(name)
    return Kind(What.COMMIT, int(match[1])) if match else Kind(What.OTHER)


def is_inside(relative_path: str) -> bool:
    """Whether a path from a checkpoint's metadata stays below the checkpoint's prefix, on S3 and in a directory."""
    return (
        bool(relative_path)
        and not relative_path.startswith("/")
        and ".." not in relative_path.split("/")
        and "://" not in relative_path
        and _NO_KEY.search(relative_path) is None
    )


_MAX_ATTACHMENT_BYTES = 90  # with the slash before it, within what `parse_url` keeps free below a prefix


def is_attachment_name(name: str) -> bool:
    """Whether a small file of this name may lie in a checkpoint's directory: a relative path that means nothing to
    dcp_s3 or torch, there and in a directory below."""
    segments = name.split("/")
    return (
        is_inside(name)
        and not any(
            each in ("", ".", CONTROL_PREFIX.rstrip("/")) or each.endswith((METADATA, DATA_SUFFIX)) for each in segments
        )
        and len(name.encode()) <= _MAX_ATTACHMENT_BYTES
    )


_STEPS = (
    re.compile(
        r"(?i).*(?<![a-z])(?:global)?(?:step|iter|iteration|checkpoint|ckpt|epoch)s?[^a-z0-9]*(\d+)(?![a-z0-9])"
    ),
    re.compile(r"^(\d+)$"),
)


def step_of(name: str) -> int | None:
    """The step in the last part of a checkpoint's URL or name: the number after ``step``, ``iter``, ``checkpoint`` or
    ``epoch``, the last of them (``epoch=1-step=1000`` -> 1000); or all of it, if that is a number. None of any other
    (``llama-8b``): what it was named for is not known."""
    name = name.rstrip("/").rpartition("/")[2]
    for each in _STEPS:
        match = each.search(name)
        if match and match[1] and match[1].isascii() and match[1].isdigit():
            return int(match[1])
    return None
