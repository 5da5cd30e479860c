"""The failure detector of a save without collectives: the progress of each rank, and which of them are silent."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dcp_s3.coordination.values import Claim, Present

LOOKS = 4
"""Signs of life in each rank timeout, and listings by those whose turn it is not."""


class Watch:
    """What a rank has seen of the others."""

    def __init__(self, now: Callable[[], float], rank_timeout: float) -> None:
        self._now, self._rank_timeout = now, rank_timeout
        self.present = Present(frozenset(), frozenset())
        self.progress = 0
        self._nonce = ""
        self._phases: set[str] = set()
        self._phase_at = self._listed_at = now()
        self._signs: dict[int, object] = {}
        self._changed_at: dict[int, float] = {}

    def see_claim(self, claim: Claim | None) -> None:
        if claim is None:
            return
        if claim.nonce != self._nonce:
            self._nonce, self.present = claim.nonce, Present(frozenset(), frozenset())
            self._signs, self._changed_at, self._phases = {}, {}, set()
        self._enter(claim.state)

    def _enter(self, phase: str) -> None:
        """Nobody was expected to show anything of this phase before."""
        if phase not in self._phases:
            self._phases.add(phase)
            self._phase_at = self._now()

    def is_stale(self, share: float) -> bool:
        """Whether to list again; ``share``: ranks whose turn it is not do so at different times."""
        return self._now() - self._listed_at > self._rank_timeout / LOOKS * (0.5 + share / 2)

    def see(self, names: Sequence[tuple[Sequence[str], object]], world_size: int) -> bool:
        """Note what is listed; returns whether there is anything new."""
        now = self._listed_at = self._now()
        found: dict[str, set[int]] = {"intent": set(), "part": set()}
        is_new = False
        for (kind, name, *_), sign in ((each, sign) for each, sign in names if len(each) == 2):
            if kind in found and name.isdecimal() and int(name) < world_size:
                rank = int(name)
                is_known = kind == "part" and rank in self.present.parts
                if not is_known and (kind == "part" or self._signs.get(rank) != sign):
                    self._changed_at[rank], is_new = now, True
                if kind == "intent":
                    self._signs[rank] = sign
                found[kind].add(rank)
        self.present = Present(frozenset(found["intent"]), frozenset(found["part"]))
        for phase, ranks in (("joined", self.present.intents), ("merging", self.present.parts)):
            if len(ranks) == world_size:
                self._enter(phase)
        return is_new

    def find_silent(self, ranks: frozenset[int], patience: float) -> int | None:
        # When it was listed, not now: who slept, or could not reach the store, has to look first.
        now = self._listed_at
        return min(
            (
                rank
                for rank in ranks
                if now - max(self._phase_at, self._changed_at.get(rank, 0.0)) >= patience * self._rank_timeout
            ),
            default=None,
        )
