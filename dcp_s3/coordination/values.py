"""The objects by which the ranks of a joint save (several ranks, without collectives) meet, with their names and their
JSON. Pure."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from dcp_s3.coordination.identity import Attempt
from dcp_s3.format import layout
from dcp_s3.memory import crc64nvme, crc_hex

OPEN, FULL, COMMITTING, ABORTED = "open", "full", "committing", "aborted"
"""States of a claim: ranks may join; all have joined; decided, one way or the other."""

Number = tuple[int, int, int]
"""Tells a save from the others of its attempt: restores so far, step (0: none), saves of that step since."""

NONCE_DIGITS = 16
"""Of a save's nonce, with which its save id begins, too."""


class Key(NamedTuple):
    """An object of the checkpoint."""

    kind: str
    """``claim``, ``metadata``, ``intent``, ``part``, ``roll`` or ``merged``."""
    id: str = ""
    """Nonce of the save; the save id, for ``merged``."""
    rank: int = 0

    @property
    def path(self) -> str:
        """Relative to the checkpoint."""
        if self.kind in ("claim", "metadata"):
            return layout.CLAIM if self.kind == "claim" else layout.METADATA
        name = self.rank if self.kind in ("intent", "part") else self.id[NONCE_DIGITS:]
        return layout.joint_object(self.id[:NONCE_DIGITS], self.kind, name)


CLAIM, METADATA = Key("claim"), Key("metadata")


class Found(NamedTuple):
    """An object that is there."""

    body: Any
    """What it says. Of ``.metadata``: nonce of the save that wrote it, empty if no joint save did. Of a claim that
    another version wrote, or that is damaged: None."""
    etag: str


@dataclass(frozen=True)
class Claim:
    """Decides what becomes of the saves to one URL, and says which is the last one."""

    state: str
    nonce: str
    """16 hex digits, drawn by the rank that opened it. All that the save writes has it in its name."""
    attempt: str
    """`Attempt.id`; then what else tells attempts apart and orders them."""
    run: str
    restart: tuple[int, ...]
    began: float | None
    world_size: int
    number: Number | None
    """None: of ranks that save in lockstep (synchronous saves): the ranks of one are at no other save."""
    step: int | None
    replaces: str
    """ETag of the ``.metadata`` that is there before; empty: none is."""
    last: str
    """Nonce of the save that wrote it."""
    roll: str = ""
    """Id of the roll, if all have joined, and ranks have to write more than they were going to."""
    save_id: str = ""
    """Of what is to be committed."""
    why: str = ""
    """Why it was aborted."""

    @property
    def is_undecided(self) -> bool:
        return self.state in (OPEN, FULL)

    def to_json(self) -> bytes:
        return seal_text("claim", json.dumps(asdict(self), sort_keys=True))


def open_claim(
    attempt: Attempt, nonce: str, number: Number | None, step: int | None, replaces: str, last: str, *, why: str = ""
) -> Claim:
    """A claim for a new save; with ``why``, one that is aborted from the beginning."""
    return Claim(
        ABORTED if why else OPEN, nonce, attempt.id, attempt.run, attempt.restart, attempt.began, attempt.world_size,
        number, step, replaces, last, why=why,
    )  # fmt: skip


def parse_claim(data: bytes) -> Claim | None:
    """The claim from its bytes; None if they are damaged, or of another version."""
    try:
        found = json.loads(unseal_text("claim", data) or "null")
        first, second, third = found["number"] or (0, 0, 0)
        claim = Claim(
            **{
                **found,
                **{name: str(found[name]) for name in ("attempt", "run", "replaces", "last", "why")},
                "restart": tuple(map(int, found["restart"])),
                "began": None if found["began"] is None else float(found["began"]),
                "world_size": int(found["world_size"]),
                "number": None if found["number"] is None else (int(first), int(second), int(third)),
                "step": None if found["step"] is None else int(found["step"]),
            }
        )
        is_sound = (
            claim.state in (OPEN, FULL, COMMITTING, ABORTED)
            and claim.world_size > 0
            and set(claim.nonce + claim.roll + claim.save_id) <= set("0123456789abcdef")  # names of objects
            and len(claim.nonce) == NONCE_DIGITS
            and {each[:NONCE_DIGITS] for each in (claim.roll, claim.save_id)} <= {"", claim.nonce}
        )
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return None
    return claim if is_sound else None


def seal_text(name: str, text: str) -> bytes:
    """Text under a name, with its checksum, as JSON."""
    return (json.dumps({name: text, "crc64nvme": crc_hex(crc64nvme(text.encode()))}) + "\n").encode()


def unseal_text(name: str, data: bytes) -> str | None:
    """The reverse of `seal_text`; None if it is damaged, or something else."""
    try:
        found = json.loads(data)
        text: str = found[name]
        return text if found["crc64nvme"] == crc_hex(crc64nvme(text.encode())) else None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def is_newer(claim: Claim, attempt: Attempt) -> bool:
    """Whether a claim is of an attempt that began after this one: by the store's clock, if both know it; else by
    restarts of one run. Otherwise of two attempts the one that comes later counts as the newer one."""
    if claim.attempt == attempt.id:
        return False
    if claim.began is not None and attempt.began is not None and claim.began != attempt.began:
        return claim.began > attempt.began
    return bool(claim.run) and claim.run == attempt.run and claim.restart > attempt.restart


class Intent(NamedTuple):
    """A rank has joined. It writes that again while it moves bytes."""

    process: str
    """See `Member.process`."""
    moved: int
    """Bytes so far, or other signs of progress."""
    digest: str
    """Of all that the rank holds, see `part.digest_of`."""
    writes: tuple[int, ...] = ()
    """Hashes of the items that it writes and others are supposed to hold, too."""
    leaves: tuple[int, ...] = ()
    """Hashes of the items that it holds, and leaves to others."""
    stand_in: str = ""
    """Process that writes in its place, as it was silent."""

    def to_json(self) -> bytes:
        return json.dumps(self._asdict()).encode()


def parse_intent(data: bytes) -> Intent | None:
    """The intent from its bytes; None if it is none."""
    try:
        found = Intent(**json.loads(data))
        hashes = tuple(map(int, found.writes)), tuple(map(int, found.leaves))
        return Intent(str(found.process), int(found.moved), str(found.digest), *hashes, str(found.stand_in))
    except (ValueError, TypeError, OverflowError, RecursionError):
        return None


class Merged(NamedTuple):
    """What a save commits: the bytes of ``.metadata``."""

    save_id: str
    data: bytes | memoryview
