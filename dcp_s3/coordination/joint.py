"""One save of several ranks without collectives: what it is, how it is recognised, and what is said of it."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dcp_s3 import errors
from dcp_s3.checkpoint.commit_state import SaveIdentity, save_id_in
from dcp_s3.coordination.claim import Claim
from dcp_s3.failures import name_ranks
from dcp_s3.format.layout import INTENT_PREFIX, PART_PREFIX, intent_object
from dcp_s3.store import Store
from dcp_s3.url import CheckpointURL

FAILED = b"failed: "
"""Begin of an intent that says why its rank has failed."""

UNSAID = "0"
"""In the place of a digest in the intent of a rank that failed before it knew what it would hold."""


@dataclass(frozen=True)
class Clock:
    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


@dataclass(frozen=True)
class JointSave:
    """One save of several ranks without collectives, as one of them knows it."""

    url: CheckpointURL
    claim: Claim
    rank: int
    """This one, as its place among the ranks of the save."""
    overwrite: bool
    rank_timeout: float
    """Seconds without a sign of a rank after which it counts as dead."""
    step: int | None = None
    before: Callable[[], Sequence[str] | None] = lambda: None
    """Digests by rank of what the ranks held in the save before this one, if it was committed."""
    members: Sequence[int] = ()
    """The ranks of the save as numbers of the whole job; empty: all of the job. For messages."""

    @property
    def save(self) -> str:
        """Id that the ranks have in common."""
        return self.claim.save

    @property
    def world_size(self) -> int:
        return self.claim.world_size

    @property
    def prefixes(self) -> tuple[str, str]:
        """Prefixes of the keys of parts and of intents."""
        return self.url.key(f"{PART_PREFIX}{self.save}."), self.url.key(f"{INTENT_PREFIX}{self.save}.")

    def number(self, rank: int) -> int:
        """The number of a rank of the save in the whole job."""
        return self.members[rank] if self.members else rank

    def turn_of(self, rank: int) -> int:
        """Place of a rank in the order in which they merge, from 0."""

        def draw(rank: int) -> bytes:
            return hashlib.blake2b(f"{self.save}.{rank}".encode(), digest_size=8).digest()

        return sorted(range(self.world_size), key=draw).index(rank)


def find_commit(store: Store, joint: JointSave) -> str | None:
    """Save id of the commit of this save; None: it is not the checkpoint at its URL."""
    identity = SaveIdentity(joint.url, joint.save)
    try:
        save_id = save_id_in(store, identity, store.head(identity.metadata_key))
    except errors.ObjectNotFoundError:
        return None
    return save_id if save_id is not None and save_id.startswith(joint.save) else None


def sign_failed(store: Store, joint: JointSave, why: str, digest: str = UNSAID) -> None:
    """Say that this rank has failed, and why: the others need not wait for it."""
    text = FAILED + why.encode("utf-8", "replace")[:2000]
    store.put(joint.url.key(intent_object(joint.save, joint.rank, digest)), text)


def lost_error(joint: JointSave, lost: Sequence[int], causes: Mapping[int, str]) -> errors.SaveProtocolError:
    """The error for a save some of whose ranks are dead, when no other rank holds the same; ``causes``: what failed, as
    far as they could say so."""
    names = name_ranks(map(joint.number, lost))
    if causes:
        told = "; ".join(f"rank {joint.number(rank)}: {cause}" for rank, cause in causes.items())
        return errors.SaveProtocolError(
            f"{joint.url} is not committed: {names} could not write; what was there before is untouched. {told}",
            url=str(joint.url),
        )
    return errors.SaveProtocolError(
        f"{joint.url} is not committed: {names} wrote nothing for at least "
        f"DCP_S3_RANK_TIMEOUT = {joint.rank_timeout:g} s, and no other rank is known to hold the same; what was there "
        "before is untouched. Remedy: see what happened there (all ranks of the job have to save), and save again",
        url=str(joint.url),
    )


def taken_over_error(joint: JointSave) -> errors.SaveProtocolError:
    return errors.SaveProtocolError(
        f"{joint.url} is not committed by this save: another attempt of the run, or a later save, has begun to save "
        "there, or a rank has restored a checkpoint since. Remedy: none if the run was restarted; otherwise save to a "
        "URL of its own",
        url=str(joint.url),
    )


# --- what parts and the manifest say of it ------------------------------------------------------------


def make_facts(
    *, started_at: float, throttled: int, metrics: Mapping[str, Any] | None, extra: Mapping[str, Any] | None
) -> dict[str, Any]:
    """What a part says of the save as a whole; ``metrics`` and ``extra`` only if its rank speaks for the save."""
    facts: dict[str, Any] = {"started_at": started_at, "throttled": throttled}
    if metrics is not None:
        facts |= {"metrics": dict(metrics), "extra": dict(extra or {})}
    return facts


def describe(joint: JointSave, digests: Mapping[int, str], made_up: Mapping[int, int]) -> dict[str, Any]:
    """What the manifest says of a save without collectives; ``made_up`` is the rank that stood in, by dead rank."""
    known = {**digests, **{dead: digests[stand_in] for dead, stand_in in made_up.items()}}
    return {
        "save": joint.save,
        "run": joint.claim.run,
        "restart": joint.claim.restart,
        "merged_by": joint.rank,
        "made_up": {str(dead): stand_in for dead, stand_in in sorted(made_up.items())},
        "digests": [known.get(rank, "") for rank in range(joint.world_size)],
    }


# --- the saves before it ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Last:
    """A save that was committed."""

    order: int
    """See `CountedSave`."""
    url: CheckpointURL
    save_id: str
    digest: str
    """Digest of what this rank held."""
    asked: frozenset[int] = frozenset()
    """Hashes of the items that no rank had written, and this one was asked for: it writes them from now on."""


class History:
    """Of the saves of the same ranks, the last one that was committed. Thread safe.

    The ranks of a job make the same saves in the same order, so each knows that the others know of that one, too.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: Last | None = None

    def committed(self, save: Last) -> None:
        with self._lock:
            if self._last is None or self._last.order < save.order:
                self._last = save

    def before(self, order: int) -> Last | None:
        """The save right before this one; None if it is not known to be committed."""
        with self._lock:
            return self._last if self._last is not None and self._last.order == order - 1 else None
