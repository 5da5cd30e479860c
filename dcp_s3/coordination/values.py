"""What `protocol` yields and gets, and its verdicts: values only."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dcp_s3.coordination.identity import Attempt
from dcp_s3.coordination.records import Claim, Intent, Key

# Verdicts on a save; ABORTED is one, too.
COMMITTED = "committed"
EXISTS = "exists"  # there is a checkpoint, which is not to be overwritten
BEHIND = "behind"  # other ranks of the attempt are at a later save, or have restored more often
REFUSED = "refused"  # another process is in this rank's place, or the ranks disagree on their number
SUPERSEDED = "superseded"  # others save there since; if this rank had joined: not known whether it was committed
UNKNOWN = "unknown"  # the store could not be reached: it may or may not be committed

# Answers to a Put
DONE = "done"
TAKEN = "taken"  # its condition did not hold
LOST = "lost"  # no answer: perhaps applied, now or later


class Get(NamedTuple):
    """Answer: `Found`, or None."""

    key: Key


class Put(NamedTuple):
    """Answer: DONE, TAKEN or LOST."""

    key: Key
    body: Any
    expect: str
    """The ETag of what is there; empty: nothing is."""


class Look(NamedTuple):
    """Lists a save's intents and parts, now or as they were shortly ago. Answer: `Present`."""

    claim: Claim


class Wait(NamedTuple):
    """Pause, then answer the lowest of these ranks that has shown nothing new (an object, or progress in its intent)
    for so many rank timeouts of this process's monotonic clock; None if none."""

    ranks: frozenset[int]
    patience: float


class Join(NamedTuple):
    """Answer: this rank's `Intent`, but for the process."""

    claim: Claim


class Write(NamedTuple):
    """Upload the data of a rank: what it is to write by itself while the claim is open, and what the roll adds once it
    is full; or all of it, for another one. Answer: the bytes of its part, once the claim is full; or `Failed`."""

    claim: Claim
    rank: int
    intent: Intent | None = None
    """That of another rank."""


class CallRoll(NamedTuple):
    """Read all intents, and write down what ranks have to write that all others have left to ones that lack it. Answer:
    id of that, empty if there is nothing; `Failed`; or None if an intent is gone."""

    claim: Claim


class Merge(NamedTuple):
    """Read all parts, and write the manifest, and what is to become ``.metadata``. Answer: `Merged`; `Failed`; or None
    if a part is gone."""

    claim: Claim


class Clean(NamedTuple):
    """Remove what the committed save does not need any more, and what it has replaced. No answer."""

    claim: Claim


class Failed(NamedTuple):
    why: str


class Present(NamedTuple):
    """The ranks whose intents and parts are there."""

    intents: frozenset[int]
    parts: frozenset[int]


class UnreachableError(Exception):
    """This rank cannot go on, because the store did not answer until the time of the save was over, or for the reason
    given. Thrown into the generator, which then has only a little time left."""


@dataclass
class Member:
    """A rank in its saves to one URL."""

    rank: int
    attempt: Attempt
    process: str
    """Random: no other process has it."""
    overwrite: bool = False
    left: set[str] = field(default_factory=set)
    """Nonces of the saves that this process has left undecided: it never joins them again."""
    intent: Intent = field(default_factory=lambda: Intent("", 0, "", False))
    """In the save that is under way."""

    def draw(self) -> str:
        """A new nonce."""
        return secrets.token_hex(8)
