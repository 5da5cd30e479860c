"""The report of `verify`. Pure."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from dcp_s3.reprs import one_line
from dcp_s3.units import plural

Mode = Literal["fast", "full"]


@dataclass(frozen=True)
class Problem:
    """Something about a checkpoint that is not as it was saved.

    >>> for problem in verify("s3://bucket/run/step-00002000").problems:
    ...     print(problem)
    """

    path: str
    """Path of the object, relative to the checkpoint."""
    fqn: str | None
    """Fully qualified name of the affected entry; None for the object as a whole."""
    what: str
    """What is wrong."""

    def __repr__(self) -> str:
        return one_line("Problem", repr(self.path), self.what, fqn=self.fqn)

    def __str__(self) -> str:
        return f"{self.path}: {self.what}" if self.fqn is None else f"{self.path}: {self.fqn!r} {self.what}"


@dataclass(frozen=True)
class VerifyReport:
    """The things that `verify` checked, and the problems that it found.

    >>> verify("s3://bucket/run/step-00002000")
    VerifyReport('s3://bucket/run/step-00002000', ok, fast, objects=1, items=2)
    """

    url: str
    """URL of the checkpoint."""
    mode: Mode
    """``fast`` (metadata, manifest, presence of the objects) or ``full`` (their bytes, too)."""
    objects: int
    """Number of data objects checked."""
    items: int
    """Number of saved items (tensor chunks and others) checked."""
    bytes_read: int
    """Bytes read from all objects, metadata included."""
    objects_without_checksum: int
    """Number of data objects whose checksum is not recorded."""
    items_without_checksum: int
    """Number of items whose checksum is not recorded; ``full`` decodes them, unless their object has one."""
    items_not_decoded: int
    """Number of these items that went through a stream extension unknown here: nothing is known of their bytes."""
    problems: tuple[Problem, ...]
    """Problems found, by object."""

    def __repr__(self) -> str:
        found = "ok" if self.ok else f"{plural(len(self.problems), 'problem')}"
        first = str(self.problems[0]) if self.problems else None
        return one_line(
            "VerifyReport", repr(self.url), found, self.mode, objects=self.objects, items=self.items, first=first
        )

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong, as far as the mode tells."""
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """The fields and ``ok``, for JSON."""
        return {**asdict(self), "ok": self.ok}
