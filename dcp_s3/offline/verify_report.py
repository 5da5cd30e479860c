"""What `verify` found. Pure."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Mode = Literal["fast", "full"]


@dataclass(frozen=True)
class Problem:
    """Something about a checkpoint that is not as it was saved."""

    path: str
    """Object, relative to the checkpoint."""
    fqn: str | None
    """Fully qualified name of the entry that is affected; None for the object as a whole."""
    what: str
    """Is wrong."""

    def __str__(self) -> str:
        return f"{self.path}: {self.what}" if self.fqn is None else f"{self.path}: {self.fqn!r} {self.what}"


@dataclass(frozen=True)
class VerifyReport:
    """What was looked at, and what is wrong."""

    url: str
    """Of the checkpoint."""
    mode: Mode
    """``fast`` (metadata, manifest, and that the objects are there) or ``full`` (their bytes, too)."""
    objects: int
    """Data objects checked."""
    items: int
    """Saved items (tensor chunks and others) checked."""
    bytes_read: int
    """Bytes of all objects that were read, metadata included."""
    objects_without_checksum: int
    """Data objects whose checksum is not recorded."""
    items_without_checksum: int
    """Items whose checksum is not recorded; ``full`` decodes them, unless their object has one."""
    items_not_decoded: int
    """Of those, the ones that went through a stream extension that is not known here, so that nothing is known of their
    bytes."""
    problems: tuple[Problem, ...]
    """What is wrong, by object."""

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong, as far as the mode tells."""
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """The fields and ``ok``, for JSON."""
        return {**asdict(self), "ok": self.ok}
