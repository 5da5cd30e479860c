"""The small JSON files in ``.dcp_s3/``: the manifest, added metrics, the list of a deletion. Pure."""

from __future__ import annotations

import functools
import json
import math
import reprlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import AfterValidator, PlainValidator, TypeAdapter

from dcp_s3.errors import SaveProtocolError, SettingsError
from dcp_s3.format.layout import classify, is_attachment_name, is_inside

_T = TypeVar("_T", bound="_ControlFile")


@dataclass(frozen=True)
class _ControlFile:
    what: ClassVar[str]
    """For messages."""
    format_version: Literal[1] = field(default=1, kw_only=True)
    """Version of this file's format."""

    def to_json(self) -> bytes:
        """UTF-8 JSON; a manifest's total size is repeated for people and for shell scripts."""
        fields = asdict(self)
        if isinstance(self, Manifest):
            fields["total_size"] = sum(entry.size for entry in self.objects)
        if "metrics" in fields:
            fields["metrics"] = {name: number_to_json(value) for name, value in fields["metrics"].items()}
        return (json.dumps(fields, indent=1, allow_nan=False) + "\n").encode()

    @classmethod
    def from_json(cls: type[_T], data: bytes) -> _T:
        """Parse `to_json`'s output; unknown fields of later versions are ignored.

        Raises:
            ValueError: not such a file, of a version that this one cannot read, or with impossible values.
        """
        try:
            fields: dict[str, Any] = json.loads(data)
            if fields["format_version"] != 1:
                raise ValueError(f"format version {fields['format_version']}, this dcp_s3 reads 1")
            found: _T = _adapter(cls).validate_python(fields)
            return found
        except (KeyError, TypeError, AttributeError, RecursionError, ValueError, OverflowError) as error:
            raise ValueError(f"not {cls.what}: {error!r}") from error


_adapter: Callable[[Any], TypeAdapter[Any]] = functools.cache(TypeAdapter)


# JSON has no numbers for these, and a loss may well be NaN.
_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_Number = Annotated[
    Any, AfterValidator(lambda value: _NOT_FINITE.get(value, value) if isinstance(value, str) else value)
]


def number_to_json(value: Any) -> Any:
    """A metric's value for JSON: NaN and the infinities become text."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


# --- the manifest ---------------------------------------------------------------------------------


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


Entry = Annotated[ObjectEntry, PlainValidator(ObjectEntry.of)]
"""For pydantic: from the fields that `dataclasses.asdict` gave."""


@dataclass(frozen=True)
class Manifest(_ControlFile):
    """A description of what one save committed."""

    what = "a dcp_s3 manifest"
    save_id: str
    """Id of the save; ``.metadata`` carries the same id."""
    created_at: float
    """Seconds since the epoch, on the coordinator's clock, when the save was committed."""
    step: int | None
    """Training step; None if the checkpoint's name has no number."""
    world_size: int
    """Number of ranks that wrote (one, for the manifest of a rank without collectives)."""
    objects: tuple[Entry, ...]
    """All data objects."""
    items: int
    """Number of saved items (tensor chunks and others)."""
    metrics: dict[str, _Number] = field(default_factory=dict)
    """The user's metrics, as given with the save."""
    rank: int | None = None
    """Rank, in a save without collectives; otherwise None."""
    writer: dict[str, str] = field(default_factory=dict)
    """Libraries that wrote it, and their versions."""
    started_at: float | None = None
    """Seconds since the epoch when the save began; None if not recorded."""
    extra: dict[str, Any] = field(default_factory=dict)
    """What else the user stored with the save (`check_extra`)."""
    coordination: dict[str, Any] = field(default_factory=dict)
    """Of a save without collectives: how its ranks came to be one save (docs/format.md); otherwise empty."""

    @property
    def attachments(self) -> dict[str, AttachmentEntry]:
        """Attachments by name."""
        return attachments_of(self.objects)


def attachments_of(objects: Iterable[ObjectEntry]) -> dict[str, AttachmentEntry]:
    """The attachments among data objects, by name. Ranks may have attached the same bytes: the first one counts."""
    found: dict[str, AttachmentEntry] = {}
    for entry in objects:
        if isinstance(entry, AttachmentEntry):
            found.setdefault(entry.attachment, entry)
    return found


def check_distinct(objects: Iterable[ObjectEntry]) -> None:
    """Refuse two attachments of one name, unless ranks attached the same bytes."""
    seen: dict[str, AttachmentEntry] = {}
    for entry in objects:
        if isinstance(entry, AttachmentEntry):
            first = seen.setdefault(entry.attachment, entry)
            if (first.size, first.crc64nvme) != (entry.size, entry.crc64nvme):
                raise SaveProtocolError(
                    f"ranks attached different files as {entry.attachment!r}, so nothing was committed. Remedy: attach "
                    "it on one rank, or under a name with the rank in it"
                )
    for name in seen:
        if above := next((other for other in seen if name.startswith(f"{other}/")), None):
            raise SaveProtocolError(
                f"{above!r} and {name!r} cannot both be attached: in a directory the first would be a file and a "
                "directory. Nothing was committed"
            )


MAX_EXTRA_BYTES = 2**16
"""Most bytes of it, as JSON. It is in the manifest, which every listing and every prune reads for each checkpoint."""


def check_extra(extra: Mapping[str, Any] | None) -> dict[str, Any]:
    """A copy of what is to be stored. What is read back equals what was given.

    Args:
        extra: text, whole numbers, finite floats, bools and None by name; lists of these; and such dicts again. None:
            nothing.

    Raises:
        SettingsError: it holds something else, or is larger than `MAX_EXTRA_BYTES`.
    """
    try:
        text = json.dumps({} if extra is None else extra, allow_nan=False)
        copied: dict[str, Any] = json.loads(text)
        if not isinstance(copied, dict) or copied != (extra or {}):
            raise ValueError(f"{reprlib.repr(extra)} would not be the same when it is read back")
        if len(text) > MAX_EXTRA_BYTES:
            raise ValueError(f"it has {len(text)} bytes as JSON, at most {MAX_EXTRA_BYTES}: every listing reads them")
    except (TypeError, ValueError, RecursionError) as error:
        raise SettingsError(
            f"extra cannot be stored with a checkpoint: {error}. It holds text, numbers, bools, None, lists and dicts "
            "of these by text (a tensor: tensor.item() or tensor.tolist()). Remedy: convert it, save it in the state, "
            "or attach it (S3StorageWriter.attach)"
        ) from None
    return copied


@dataclass(frozen=True)
class AddedMetrics(_ControlFile):
    """Metrics that were added to one save."""

    what = "a file of metrics"
    save_id: str
    """Owner of the metrics: the save id, or for a foreign checkpoint the ETag of its ``.metadata``."""
    metrics: Mapping[str, _Number] = field(default_factory=dict)


def check_added(metrics: Mapping[str, Any], *, url: str) -> None:
    """Refuse metrics that cannot be added.

    Raises:
        SettingsError: there are none, a name is not text, or a value is not a finite number, NaN, text or bool.
    """
    if not isinstance(metrics, Mapping) or not metrics:
        raise SettingsError(f"metrics for {url}: expected a mapping of names to values, found {metrics!r}")
    for name, value in metrics.items():
        good = isinstance(value, (int, str)) or (isinstance(value, float) and not math.isinf(value))
        if not isinstance(name, str) or not name or not good:
            raise SettingsError(
                f"metric {name!r} = {value!r} of {url} cannot be stored: names are text, values finite numbers, NaN, "
                "text or bools (a tensor: pass tensor.item())"
            )


def _check_inside(path: str) -> str:
    if not is_inside(path):
        raise ValueError(f"it names {path!r}, which is not in the checkpoint")
    return path


_Inside = Annotated[str, AfterValidator(_check_inside)]


@dataclass(frozen=True)
class DeletionList(_ControlFile):
    """A deletion's list. Written before the first object is deleted: its finder knows exactly what else to delete."""

    what = "a list of a deletion"
    save_id: str | None
    """Save id of the checkpoint; None for a foreign one."""
    commits: Mapping[_Inside, str]
    """ETags of the commits (``.metadata``, or each rank's) by relative path. They are deleted first."""
    objects: Mapping[_Inside, str]
    """ETags of all other objects by relative path; empty where the store gave none."""
