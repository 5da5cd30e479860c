"""What parts say of the save as a whole, and what its manifest says of how it came about. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dcp_s3.coordination.joint import JointSave


def make_facts(
    *, started_at: float, throttled: int, metrics: Mapping[str, Any] | None, extra: Mapping[str, Any] | None
) -> dict[str, Any]:
    """The facts of a part.

    Args:
        started_at: when the rank began, seconds since the epoch.
        throttled: requests of the rank that S3 throttled.
        metrics: the user's metrics, and ``extra``, if this rank speaks for the save; otherwise None.
        extra: see ``metrics``.
    """
    facts: dict[str, Any] = {"started_at": started_at, "throttled": throttled}
    if metrics is not None:
        facts |= {"metrics": dict(metrics), "extra": dict(extra or {})}
    return facts


@dataclass(frozen=True)
class Facts:
    """What the parts of a save say of it as a whole."""

    started_at: float
    """When the first rank began, seconds since the epoch; infinity if none says."""
    throttled: int
    """Requests of all ranks that S3 throttled."""
    metrics: Mapping[str, Any]
    """Those of the first rank that has any."""
    extra: Mapping[str, Any]

    @classmethod
    def of(cls, facts: Mapping[tuple[int, int], Mapping[str, Any]]) -> Facts:
        """Those of all parts.

        Args:
            facts: by rank and number of the part.
        """
        speakers = [facts[each] for each in sorted(facts) if "metrics" in facts[each]]
        speaker: Mapping[str, Any] = speakers[0] if speakers else {}
        return cls(
            min((float(each["started_at"]) for each in facts.values() if "started_at" in each), default=math.inf),
            sum(int(each.get("throttled", 0)) for each in facts.values()),
            speaker.get("metrics") or {},
            speaker.get("extra") or {},
        )


def describe(joint: JointSave, digests: Mapping[int, str], made_up: Mapping[int, int]) -> dict[str, Any]:
    """What the manifest says of a save without collectives.

    Args:
        joint: the save.
        digests: what the ranks hold, by rank.
        made_up: rank that stood in, by dead rank.
    """
    known = {**digests, **{dead: digests[stand_in] for dead, stand_in in made_up.items()}}
    return {
        "save": joint.save,
        "run": joint.claim.run,
        "restart": joint.claim.restart,
        "merged_by": joint.rank,
        "made_up": {str(dead): stand_in for dead, stand_in in sorted(made_up.items())},
        "digests": [known.get(rank, "") for rank in range(joint.world_size)],
    }
