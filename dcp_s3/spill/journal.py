"""The journal: a small file in the directory of each spilled save that says what is there and what is left to do. Pure.

JSON behind one line with the CRC-64 of the rest: a journal is read as it was written, or it is known to be damaged.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from typing import Any

from dcp_s3.checksum import crc64nvme, crc_hex
from dcp_s3.errors import JournalError
from dcp_s3.format.manifest import ObjectEntry

FORMAT_VERSION = 1
_MAGIC = "dcp_s3 journal"


class State(str, Enum):
    """How far a save has come on one rank."""

    WRITING = "writing"
    """Its process is writing. If that has ended, nothing of it was ever reported durable."""
    SEALED = "sealed"
    """All its objects are on this disk, flushed, or on S3."""


@dataclass(frozen=True)
class SpilledObject:
    """One data object in a file.

    Attributes:
        entry: path relative to the checkpoint, bytes and CRC-64.
        file: name of the file in the save's directory.
        part_size: bytes of the parts of its multipart upload.
        crc64nvme: of the file's bytes, 16 hex digits; also when the entry has none.
    """

    entry: ObjectEntry
    file: str
    part_size: int
    crc64nvme: str


@dataclass(frozen=True)
class SpilledCommit:
    """The coordinator's part: what is to be written to S3 when every object is there.

    Attributes:
        manifest: name of the file with the manifest's bytes.
        metadata: name of the file with those of ``.metadata``.
        objects: every data object of the checkpoint, of all ranks.
        overwrite: whether a checkpoint at the URL may be replaced, if it is older.
        rank: of a save without collectives, otherwise None.
        checksums: CRC-64 of the two files, by name, 16 hex digits.
    """

    manifest: str
    metadata: str
    objects: tuple[ObjectEntry, ...]
    overwrite: bool = False
    rank: int | None = None
    checksums: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Journal:
    """What one rank spilled of one save, or the commit of one.

    Attributes:
        url: of the checkpoint.
        save_id: of the save.
        created_at: seconds since the epoch, when the save began.
        settings: of the writer, as `Settings` takes them; no credentials.
        state: see `State`.
        keys: of all objects that this rank may have begun to write to S3.
        objects: those that wait on this disk.
        commit: on the coordinator, in a directory of its own.
    """

    url: str
    save_id: str
    created_at: float
    settings: dict[str, Any]
    state: State = State.WRITING
    keys: tuple[str, ...] = ()
    objects: tuple[SpilledObject, ...] = ()
    commit: SpilledCommit | None = None
    format_version: int = field(default=FORMAT_VERSION)

    @property
    def size(self) -> int:
        """Bytes that wait on this disk."""
        return sum(spilled.entry.size for spilled in self.objects)

    def without(self, file: str) -> Journal:
        """The journal when the object in ``file`` is on S3."""
        return replace(self, objects=tuple(spilled for spilled in self.objects if spilled.file != file))

    def to_bytes(self) -> bytes:
        """As it is stored."""
        body = json.dumps(asdict(self), indent=1, allow_nan=False).encode() + b"\n"
        return f"{_MAGIC} {crc_hex(crc64nvme(body))}\n".encode() + body

    @classmethod
    def from_bytes(cls, data: bytes) -> Journal:
        """Parse what `to_bytes` made.

        Raises:
            JournalError: it is cut off, damaged, or of a version that this one can not read.
        """
        head, _, body = data.partition(b"\n")
        if head != f"{_MAGIC} {crc_hex(crc64nvme(body))}".encode():
            raise JournalError("it is cut off or damaged: its checksum does not match")
        try:
            fields: dict[str, Any] = json.loads(body)
            version = fields["format_version"]
            if version != FORMAT_VERSION:
                raise JournalError(f"it has format version {version}, this dcp_s3 reads {FORMAT_VERSION}")
            commit = fields["commit"]
            return cls(
                url=fields["url"],
                save_id=fields["save_id"],
                created_at=float(fields["created_at"]),
                settings=dict(fields["settings"]),
                state=State(fields["state"]),
                keys=tuple(fields["keys"]),
                objects=tuple(
                    SpilledObject(ObjectEntry(**each["entry"]), each["file"], int(each["part_size"]), each["crc64nvme"])
                    for each in fields["objects"]
                ),
                commit=commit
                and SpilledCommit(
                    commit["manifest"],
                    commit["metadata"],
                    tuple(ObjectEntry(**each) for each in commit["objects"]),
                    bool(commit["overwrite"]),
                    commit["rank"],
                    dict(commit["checksums"]),
                ),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise JournalError(f"it is not a journal: {error!r}") from error
