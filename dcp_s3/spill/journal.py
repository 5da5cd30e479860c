"""The journal: a small file in the directory of each spilled save that says what is there and what is left to do. Pure.

It is JSON, after one line with the CRC-64 of the rest: either read exactly as written, or known to be damaged.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from dcp_s3.errors import SpillError
from dcp_s3.format.control_files import Entry
from dcp_s3.memory import crc64nvme, crc_hex

MANIFEST, METADATA = "manifest.json", "metadata"
"""Names of a commit's files."""
_MAGIC = "dcp_s3 journal"
# No other names: they could lead out of the save's directory.
_FileName = Annotated[str, Field(pattern="^object-[0-9]+$")]


class JournalError(SpillError):
    """The journal of a spilled save is damaged."""


class State(str, Enum):
    """The progress of a save on one rank."""

    WRITING = "writing"
    """Its process is writing. If the process has ended, the save was never reported durable."""
    SEALED = "sealed"
    """All its objects are on S3, or flushed to this disk."""


@dataclass(frozen=True)
class SpilledObject:
    """One data object, stored in a file of the save's directory."""

    entry: Entry
    file: _FileName
    part_size: int
    """Part size in bytes of its multipart upload."""
    crc64nvme: str
    """CRC-64 of the file's bytes, 16 hex digits. Present even if the entry has none."""


@dataclass(frozen=True)
class SpilledCommit:
    """The coordinator's commit: what to write to S3 when every object is there."""

    objects: tuple[Entry, ...]
    """Every data object of the checkpoint, of all ranks."""
    overwrite: bool = False
    rank: int | None = None
    """Rank in a save without collectives, otherwise None."""
    checksums: dict[str, str] = field(default_factory=dict)
    """CRC-64 of the two files by file name, 16 hex digits."""
    manifest: Literal["manifest.json"] = "manifest.json"
    metadata: Literal["metadata"] = "metadata"


@dataclass(frozen=True)
class Journal:
    """What one rank spilled of one save, or the commit of that save."""

    url: str
    save_id: str
    created_at: float
    """Beginning of the save, in seconds since the epoch."""
    settings: dict[str, Any]
    """Settings of the writer, in the form that `Settings` takes. No credentials."""
    state: State = State.WRITING
    keys: tuple[str, ...] = ()
    """Keys of all objects that this rank may have begun to write to S3."""
    objects: tuple[SpilledObject, ...] = ()
    """The objects that wait on this disk."""
    commit: SpilledCommit | None = None
    """The commit; only on the coordinator, in a directory of its own."""
    format_version: Literal[1] = 1

    @property
    def size(self) -> int:
        return sum(spilled.entry.size for spilled in self.objects)

    def to_bytes(self) -> bytes:
        body = json.dumps(asdict(self), indent=1, allow_nan=False).encode() + b"\n"
        return f"{_MAGIC} {crc_hex(crc64nvme(body))}\n".encode() + body

    @classmethod
    def from_bytes(cls, data: bytes) -> Journal:
        """Parse the output of `to_bytes`. A JournalError if it is cut off, damaged, or of a version that this dcp_s3
        cannot read."""
        head, _, body = data.partition(b"\n")
        if head != f"{_MAGIC} {crc_hex(crc64nvme(body))}".encode():
            raise JournalError("it is cut off or damaged: its checksum does not match")
        try:
            return _JOURNALS.validate_python(json.loads(body))
        except (KeyError, TypeError, ValueError) as error:
            raise JournalError(f"it is not a journal that this dcp_s3 can read: {error}") from error


_JOURNALS = TypeAdapter(Journal)
