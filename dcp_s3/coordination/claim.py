"""The claim: a small object beside a checkpoint that says which save without collectives writes there now.

It is the first thing that a rank writes. Its bytes are the same whichever rank of the save writes them, so they do no
harm on a store that ignores conditions.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from dcp_s3 import errors
from dcp_s3.checksum import crc64nvme, crc_hex
from dcp_s3.coordination.identity import Attempt, save_of
from dcp_s3.format.layout import CLAIM
from dcp_s3.store import ABSENT, Expect, Store
from dcp_s3.url import CheckpointURL

_CLOCKS_DIFFER = 60.0
"""Seconds by which the clocks of hosts may differ: only an attempt that began that much later is surely newer."""

_WITHDRAWN = "withdrawn"
"""In the place of a save's id."""

_MAX_LOST_RACES = 20
"""Each one was won by another attempt: the ranks of one write the same bytes."""


@dataclass(frozen=True)
class Claim:
    """Says that a save writes to a URL. The bytes are the same on all ranks of the save."""

    save: str
    """`save_of` it."""
    number: int
    """Which save of its attempt to this URL it is, from 1."""
    attempt: str
    """`Attempt.id`."""
    run: str
    restart: tuple[int, ...]
    began: float | None
    world_size: int
    step: int | None

    def to_json(self) -> bytes:
        body = json.dumps(asdict(self), sort_keys=True)
        return (json.dumps({"claim": body, "crc64nvme": crc_hex(crc64nvme(body.encode()))}) + "\n").encode()


def claim_of(attempt: Attempt, url: str, number: int, step: int | None) -> Claim:
    return Claim(
        save_of(attempt, url, number), number, attempt.id, attempt.run, attempt.restart, attempt.began,
        attempt.world_size, step,
    )  # fmt: skip


def parse_claim(data: bytes) -> Claim | None:
    """The claim from its bytes; None if they are damaged, or of something else."""
    try:
        outer = json.loads(data)
        body = outer["claim"]
        if outer["crc64nvme"] != crc_hex(crc64nvme(body.encode())):
            return None
        found = json.loads(body)
        claim = Claim(**{**found, "restart": tuple(found["restart"])})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return claim if _is_sound(claim) else None


def _is_sound(claim: Claim) -> bool:
    numbers: tuple[Any, ...] = (claim.number, claim.world_size, *claim.restart)
    return (
        all(isinstance(text, str) for text in (claim.save, claim.attempt, claim.run))
        and all(type(number) is int for number in numbers)
        and (claim.step is None or type(claim.step) is int)
        and (claim.began is None or (type(claim.began) in (int, float) and math.isfinite(claim.began)))
    )


# --- deciding ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Join:
    """The claim stands already."""


@dataclass(frozen=True)
class Write:
    expect: Expect


@dataclass(frozen=True)
class Refuse:
    reason: str
    """What was found, and the remedy."""


@dataclass(frozen=True)
class FoundClaim:
    claim: Claim | None
    """None if it is damaged, or something else."""
    etag: str


def decide(found: FoundClaim | None, ours: Claim) -> Join | Write | Refuse:
    """What a rank does about the claim that it finds, if any. Pure.

    Of two attempts the one that began later is newer. Where that is not known, or not by more than clocks differ, the
    one of a run after more restarts; of different runs, the one that comes later.
    """
    if found is None:
        return Write(ABSENT)
    theirs = found.claim
    if theirs == ours:
        return Join()
    if theirs is None:
        return Write(Expect(found.etag))
    if theirs.attempt == ours.attempt:
        if theirs.world_size != ours.world_size:
            return Refuse(
                f"other ranks of this run save with {theirs.world_size} ranks, this one with {ours.world_size}. "
                "Remedy: give all ranks the same WORLD_SIZE, and each start of the job a new DCP_S3_RUN_ID"
            )
        if theirs.number > ours.number:
            return Refuse(
                f"other ranks have begun their save number {theirs.number} to it, this one only its number "
                f"{ours.number}. Remedy: call save on all ranks, equally often for each URL"
            )
        if theirs.number == ours.number and theirs.save == _WITHDRAWN:
            return Refuse(
                f"another rank has restored a checkpoint since it began its save number {theirs.number} to it. Remedy: "
                "restore on all ranks, and save again"
            )
        if theirs.number == ours.number:
            return Refuse(
                f"the ranks save different steps there: {theirs.step} and {ours.step}. Remedy: call save with the same "
                "step on all ranks"
            )
    elif _is_newer(theirs, ours):
        return Refuse(
            f"a newer attempt of the training saves there ({_describe(theirs)}; this one is {_describe(ours)}). "
            "Remedy: end this process, whose place another one has taken; two trainings at a time need two URLs"
        )
    return Write(Expect(found.etag))


def _is_newer(one: Claim, other: Claim) -> bool:
    # The clock first: many give each start of a job the same id, and restarts count from 0 in each.
    if one.began is not None and other.began is not None and abs(one.began - other.began) > _CLOCKS_DIFFER:
        return one.began > other.began
    return one.run == other.run and one.restart > other.restart


def _describe(claim: Claim) -> str:
    restarts = ".".join(map(str, claim.restart)) or "0"
    return f"run {claim.run or claim.attempt!r}, restart {restarts}"


# --- acting --------------------------------------------------------------------------------------


def claim(store: Store, url: CheckpointURL, ours: Claim) -> None:
    """Claim a checkpoint's URL for a save. Every rank of the save does so first.

    Raises:
        SaveProtocolError: a newer attempt, or other ranks of this attempt with another world size, save there.
    """
    key = url.key(CLAIM)
    for _ in range(_MAX_LOST_RACES):
        decision = decide(_find(store, key), ours)
        if isinstance(decision, Join):
            return
        if isinstance(decision, Refuse):
            raise errors.SaveProtocolError(f"this rank's save to {url} is refused: {decision.reason}", url=str(url))
        try:
            store.put(key, ours.to_json(), expect=decision.expect, content_type="application/json")
        except (errors.PreconditionFailedError, errors.ObjectNotFoundError):
            continue
        return
    raise errors.SaveProtocolError(
        f"the save to {url} does not begin: others claimed it {_MAX_LOST_RACES} times meanwhile. Remedy: end the other "
        "training that saves there, or give this one another URL",
        url=str(url),
    )


def is_still_ours(store: Store, url: CheckpointURL, ours: Claim) -> bool:
    """Whether the claim still stands. Asked right before the commit.

    If not, another save has taken over, or this one is committed already and its claim removed.
    """
    found = _find(store, url.key(CLAIM))
    return found is not None and found.claim == ours


def has_gone_past(store: Store, url: CheckpointURL, ours: Claim) -> bool:
    """Whether other ranks of the attempt can no longer take part in a save: they have begun a later one there, or have
    withdrawn it."""
    found = _find(store, url.key(CLAIM))
    if found is None or found.claim is None or found.claim.attempt != ours.attempt:
        return False
    return found.claim.number > ours.number or found.claim.save == _WITHDRAWN


def withdraw(store: Store, url: CheckpointURL, ours: Claim) -> None:
    """See to it that no rank begins a save any more, and none commits it, if its claim still stands. After an error it
    may still be committed."""
    key = url.key(CLAIM)
    while (found := _find(store, key)) is not None and found.claim == ours:
        try:
            store.put(
                key, replace(ours, save=_WITHDRAWN).to_json(), expect=Expect(found.etag),
                content_type="application/json",
            )  # fmt: skip
        except (errors.PreconditionFailedError, errors.ObjectNotFoundError):
            continue
        return


def _find(store: Store, key: str) -> FoundClaim | None:
    try:
        found = store.get(key)
    except errors.ObjectNotFoundError:
        return None
    return FoundClaim(parse_claim(found.data), found.etag)
