"""The manifest: a small JSON file that says what a committed checkpoint consists of. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from dcp_s3.format.layout import classify, is_attachment_name, manifest_object

FORMAT_VERSION = 1


@dataclass(frozen=True)
class ObjectEntry:
    """One data object."""

    path: str
    """Path relative to the checkpoint."""
    size: int
    """Bytes."""
    crc64nvme: str | None = None
    """CRC-64/NVME of all its bytes as 16 hex digits; None if checksums were off."""

    @staticmethod
    def of(fields: Mapping[str, Any]) -> ObjectEntry:
        """The entry with the fields that `dataclasses.asdict` gave; others, of later versions, are ignored.

        Raises:
            KeyError, TypeError, ValueError: a field is missing or no such value.
        """
        path, size, crc = str(fields["path"]), int(fields["size"]), fields.get("crc64nvme")
        name = fields.get("attachment")
        if name is not None:
            if not isinstance(name, str) or not is_attachment_name(name) or not classify(path).nonce:
                raise ValueError(f"{path!r} cannot hold an attachment {name!r}")
            return AttachmentEntry(path, size, crc, name)
        return ObjectEntry(path, size, crc)


@dataclass(frozen=True)
class AttachmentEntry(ObjectEntry):
    """A data object that holds an attachment: a small file that belongs to the checkpoint."""

    attachment: str = ""
    """Name of the attachment. It is also the path, relative to the checkpoint, of a plain copy for other tools."""


@dataclass(frozen=True)
class Manifest:
    """A description of what one save committed."""

    save_id: str
    """Id of the save; ``.metadata`` carries the same id."""
    created_at: float
    """Seconds since the epoch, on the coordinator's clock, when the save was committed."""
    step: int | None
    """Training step; None if the checkpoint's name has no number."""
    world_size: int
    """Number of ranks that wrote (one, for the manifest of a rank without collectives)."""
    objects: tuple[ObjectEntry, ...]
    """All data objects."""
    items: int
    """Number of saved items (tensor chunks and others)."""
    metrics: dict[str, Any] = field(default_factory=dict)
    """The user's metrics, as given with the save."""
    rank: int | None = None
    """Rank, in a save without collectives; otherwise None."""
    format_version: int = FORMAT_VERSION
    """Version of this file's format."""
    writer: dict[str, str] = field(default_factory=dict)
    """Libraries that wrote it, and their versions."""
    started_at: float | None = None
    """Seconds since the epoch when the save began; None if not recorded."""
    extra: dict[str, Any] = field(default_factory=dict)
    """What else the user stored with the save (`extra.check_extra`)."""
    coordination: dict[str, Any] = field(default_factory=dict)
    """Of a save without collectives: how its ranks came to be one save (docs/format.md); otherwise empty."""

    @property
    def total_size(self) -> int:
        """Bytes of all data objects."""
        return sum(entry.size for entry in self.objects)

    @property
    def attachments(self) -> dict[str, AttachmentEntry]:
        """Attachments by name."""
        return attachments_of(self.objects)

    @property
    def paths(self) -> set[str]:
        """Relative paths of the data objects and of the manifest itself."""
        return {manifest_object(self.save_id, self.rank), *(entry.path for entry in self.objects)}

    def to_json(self) -> bytes:
        """UTF-8 JSON, with the totals repeated for people and for shell scripts."""
        fields = asdict(self)
        fields["total_size"] = self.total_size
        fields["metrics"] = {name: number_to_json(value) for name, value in self.metrics.items()}
        return (json.dumps(fields, indent=1, allow_nan=False) + "\n").encode()

    @classmethod
    def from_json(cls, data: bytes) -> Manifest:
        """Parse `to_json`'s output; unknown fields of later versions are ignored.

        Raises:
            ValueError: not a manifest, or of a version that this one cannot read.
        """
        try:
            fields: dict[str, Any] = json.loads(data)
            version = fields["format_version"]
            if version != FORMAT_VERSION:
                raise ValueError(f"manifest has format version {version}, this dcp_s3 reads {FORMAT_VERSION}")
            objects = tuple(ObjectEntry.of(entry) for entry in fields["objects"])
            return cls(
                save_id=str(fields["save_id"]),
                created_at=float(fields["created_at"]),
                step=None if fields["step"] is None else int(fields["step"]),
                world_size=int(fields["world_size"]),
                objects=objects,
                items=int(fields["items"]),
                metrics={name: number_from_json(value) for name, value in (fields.get("metrics") or {}).items()},
                extra=dict(fields.get("extra") or {}),
                rank=fields.get("rank"),
                writer=dict(fields.get("writer") or {}),
                started_at=None if fields.get("started_at") is None else float(fields["started_at"]),
                coordination=dict(fields.get("coordination") or {}),
            )
        except (
            KeyError,
            TypeError,
            AttributeError,
            UnicodeDecodeError,
            RecursionError,
            json.JSONDecodeError,
        ) as error:
            raise ValueError(f"not a dcp_s3 manifest: {error!r}") from error


def attachments_of(objects: Iterable[ObjectEntry]) -> dict[str, AttachmentEntry]:
    """The attachments among data objects, by name. Ranks may have attached the same bytes: the first one counts."""
    found: dict[str, AttachmentEntry] = {}
    for entry in objects:
        if isinstance(entry, AttachmentEntry):
            found.setdefault(entry.attachment, entry)
    return found


# JSON has no numbers for these, and a loss may well be NaN.
_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def number_to_json(value: Any) -> Any:
    """A metric's value for JSON: NaN and the infinities become text."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def number_from_json(value: Any) -> Any:
    """A metric's value from JSON: the reverse of `number_to_json`."""
    return _NOT_FINITE.get(value, value) if isinstance(value, str) else value
