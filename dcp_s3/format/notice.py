"""A notice: what a merging rank tells the other ranks of a save without collectives. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Notice:
    """Who writes what is missing, or why there is no commit."""

    save: str
    """Id that the ranks of the save have in common."""
    number: int = 0
    """Number of the parts that it asks for, above 0; no two notices of a save have the same."""
    wanted: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """Hashes (`part.item_hash`) of the items to write, by the rank that writes them."""
    failed: str = ""
    """Why the save is given up; empty: it is not."""

    def to_json(self) -> bytes:
        """UTF-8 JSON."""
        wanted = {str(rank): [f"{each:016x}" for each in hashes] for rank, hashes in self.wanted.items()}
        fields: dict[str, object] = {"save": self.save, "number": self.number, "wanted": wanted, "failed": self.failed}
        return (json.dumps(fields) + "\n").encode()

    @classmethod
    def from_json(cls, data: bytes) -> Notice:
        """Parse `to_json`'s output.

        Raises:
            ValueError: not a notice.
        """
        try:
            fields = json.loads(data)
            wanted = {int(rank): [int(each, 16) for each in hashes] for rank, hashes in fields["wanted"].items()}
            return cls(str(fields["save"]), int(fields["number"]), wanted, str(fields["failed"]))
        except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
            raise ValueError(f"not a notice: {error!r}") from error
