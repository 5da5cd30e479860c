"""Which ranks of a save without collectives count as dead, and whether others make up for them. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

NOT_BEGUN = 10
"""Rank timeouts for which a rank that was never heard of may still begin, if nobody can make up for it."""


@dataclass(frozen=True)
class Seen:
    """What a merging rank has seen of a save."""

    world_size: int
    parts: Mapping[int, str]
    """Digest of what it holds, by rank, of those that have written their part."""
    intents: Mapping[int, str]
    """Digest by rank, of those that said what they hold. They show that they live while they write."""
    silent: Mapping[int, float]
    """Seconds since the last sign of each rank without a part."""
    failed: Collection[int] = ()
    """Ranks that said that they failed before they knew what they would hold."""
    before: Sequence[str] | None = None
    """Digests by rank in the save before this one, if it was committed; None: not known."""

    @property
    def missing(self) -> list[int]:
        """Ranks without a part."""
        return [rank for rank in range(self.world_size) if rank not in self.parts]

    def digest_of(self, rank: int) -> str | None:
        """Digest of what a rank without a part holds; None: nobody knows.

        It holds what it held before if that is so for all whose parts are there: they run the same program.
        """
        said = self.intents.get(rank)
        if said is not None or self.before is None or len(self.before) != self.world_size:
            return said
        unchanged = all(self.before[each] == digest for each, digest in {**self.intents, **self.parts}.items())
        return self.before[rank] if unchanged else None


@dataclass(frozen=True)
class Verdict:
    """What becomes of a save some of whose parts are missing."""

    waiting: tuple[int, ...] = ()
    """Ranks that may still write."""
    made_up: Mapping[int, int] | None = None
    """Rank that holds the same, by dead rank; None: not all ranks are made up for, or some may still write."""
    lost: tuple[int, ...] = ()
    """Dead ranks that nobody can make up for."""


def judge(seen: Seen, rank_timeout: float) -> Verdict:
    """What becomes of the save.

    Args:
        seen: what was seen.
        rank_timeout: seconds without a sign after which a rank counts as dead, if another one can make up for it, or if
            it had begun. Without both it has ten times as long.
    """
    waiting = tuple(rank for rank in seen.missing if seen.silent.get(rank, 0.0) < rank_timeout)
    if waiting:
        return Verdict(waiting)
    holders: dict[str, list[int]] = {}
    for rank, digest in sorted(seen.parts.items()):
        holders.setdefault(digest, []).append(rank)
    made_up, lost = {}, []
    for number, rank in enumerate(seen.missing):
        alike = holders.get(seen.digest_of(rank) or "")
        if alike:
            made_up[rank] = alike[number % len(alike)]
        else:
            lost.append(rank)
    if not lost:
        return Verdict(made_up=made_up)
    # They may be at something that takes long, an evaluation for example, and save afterwards.
    not_heard_of = [rank for rank in lost if rank not in seen.intents and rank not in seen.failed]
    not_begun = [rank for rank in not_heard_of if seen.silent[rank] < NOT_BEGUN * rank_timeout]
    return Verdict(waiting=tuple(not_begun)) if not_begun else Verdict(lost=tuple(lost))
