"""A joint save: several ranks save one checkpoint through an object store, without collectives. Pure.

One object, the claim, decides. It moves only by conditional writes: ``open -> full -> committing`` or ``aborted``, and
what is decided ``-> open`` with another nonce. Ranks join an open claim with an intent, and write their parts once it
is full, so all who wrote a part of a commit were inside that save at one instant. ``.metadata`` follows from the
decision: anybody may write it, on the condition that the checkpoint to be replaced is still there.

The functions are generators, which yield operations and get their answers; `driving` carries them out on a Store, and
tests explore their interleavings. docs/design.md says which failure each rule is for.
"""

from __future__ import annotations

import secrets
from collections.abc import Generator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

from dcp_s3.coordination import values
from dcp_s3.coordination.identity import Attempt
from dcp_s3.coordination.values import ABORTED, CLAIM, COMMITTING, FULL, METADATA, OPEN, Claim, Found, Key, Merged

T = TypeVar("T")
Steps = Generator[Any, Any, T]

# Verdicts on a save; ABORTED is one, too.
COMMITTED = "committed"
EXISTS = "exists"  # there is a checkpoint, which is not to be overwritten; or one that came first
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
    is_fresh: bool = False


class Wait(NamedTuple):
    """Pause, then answer the lowest of these ranks that has shown nothing new (an object, or progress in its intent)
    for so many rank timeouts of this process's monotonic clock; None if none."""

    ranks: frozenset[int]
    patience: float


class Task(NamedTuple):
    """What is for the rank itself to do: `driving.Driver` calls its work's method of this name.

    - ``join``. Answer: this rank's `Intent`, but for the process.
    - ``write``: the data of ``rank``: what it is to write by itself while the claim is open, and what the roll adds
      once it is full; or, with its intent, all of another rank. Answer: its part as bytes, once the claim is full.
    - ``call_roll``: read all intents, and write down what ranks have to write that all others have left to ones that
      lack it. Answer: id of that, empty if there is nothing.
    - ``merge``: read all parts, write the manifest, and what is to become ``.metadata``. Answer: `Merged`.
    - ``clean``: remove what the committed save does not need any more, and what it has replaced. No answer.

    Instead of an answer a FailedError may be thrown into the generator.
    """

    what: str
    claim: Claim
    rank: int = 0
    intent: values.Intent | None = None


class Present(NamedTuple):
    """The ranks whose intents and parts are there."""

    intents: frozenset[int] = frozenset()
    parts: frozenset[int] = frozenset()


class FailedError(Exception):
    """The rank cannot do its task, for the reason given: the save is aborted, unless it is decided already, which is
    also why an intent or a part may be gone."""


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
    intent: values.Intent = field(default_factory=lambda: values.Intent("", 0, ""))
    """In the save that is under way."""

    def draw(self) -> str:
        """A new nonce."""
        return secrets.token_hex(8)


_JOIN = "join"
_PATIENCE_FOR_STAND_INS = 1.75
"""Rank timeouts. Those who hold what a silent rank held begin to write it after 1.5 at most; nobody waits for two."""


# --- a save -------------------------------------------------------------------------------------------


def save(me: Member, number: values.Number | None, step: int | None) -> Steps[tuple[str, str | None]]:
    """Take part in a save. Returns the verdict, and the nonce if this rank has joined.

    ``number`` was counted; or it is None, if no rank is here while another one is at an earlier save.
    """
    claim: Claim | str | None = None
    try:
        claim = yield from begin(me, number, step)
        if not isinstance(claim, Claim):
            return claim, None
        try:
            return (yield from take_part(me, claim)), claim.nonce
        except FailedError as error:
            return (yield from abort(claim, str(error))), claim.nonce
    except UnreachableError as error:
        if not isinstance(claim, Claim):
            return UNKNOWN, None
        me.left.add(claim.nonce)
        why = str(error) or f"rank {me.rank} could not reach the store, or its time was over"
    try:
        return (yield from abort(claim, why)), claim.nonce
    except UnreachableError:
        return UNKNOWN, claim.nonce


def judge(found: Claim | None, me: Member, number: values.Number | None, step: int | None) -> str:
    """What a rank that begins a save does about the claim that it finds: join it, open another one, or end. Pure."""
    if found is None:
        return OPEN
    if found.attempt != me.attempt.id:
        return SUPERSEDED if values.is_newer(found, me.attempt) else OPEN
    if found.world_size != me.attempt.world_size:
        return REFUSED
    if number is None or found.number is None:  # of two kinds, it is another save
        is_this = found.number == number and found.is_undecided and found.nonce not in me.left and found.step == step
        return _JOIN if is_this else OPEN
    if found.number != number:
        return OPEN if found.number < number else BEHIND
    if found.state == COMMITTING:
        return REFUSED  # without this process: another one was in its place
    return _JOIN if found.is_undecided and found.nonce not in me.left else ABORTED


def begin(me: Member, number: values.Number | None, step: int | None) -> Steps[Claim | str]:
    """Returns the open claim of the save, or the verdict."""
    while True:
        claim, found = yield from _get_claim()
        what = judge(claim, me, number, step)
        if claim is not None and what == _JOIN:
            return claim
        if what != OPEN:
            return what
        replaces, last = yield from _look_at_checkpoint(claim)
        if replaces and not me.overwrite:
            return EXISTS
        claim = values.open_claim(me.attempt, me.draw(), number, step, replaces, last)
        if (yield from put(CLAIM, claim, found)):
            return claim


def _look_at_checkpoint(claim: Claim | None) -> Steps[tuple[str, str]]:
    """ETag and nonce of the ``.metadata`` that is there, after what was decided has been done."""
    if claim is not None and claim.state == COMMITTING:
        yield from finish(claim)
    there = yield Get(METADATA)
    return ("", "") if there is None else (there.etag, there.body)


def put(key: Key, body: Any, found: Found | None) -> Steps[bool]:
    """Write in the place of what was found, again if answers are lost. Returns whether that was done; if not, it may be
    there all the same: whoever needs to know looks."""
    while (answer := (yield Put(key, body, "" if found is None else found.etag))) == LOST:
        pass
    return bool(answer == DONE)


def _get_claim() -> Steps[tuple[Claim | None, Found | None]]:
    found: Found | None = yield Get(CLAIM)
    return (None if found is None else found.body), found


def take_part(me: Member, claim: Claim) -> Steps[str]:
    """Write, and see the save through to its decision. Returns the verdict."""
    nonce, everybody, merger = claim.nonce, frozenset(range(claim.world_size)), merger_of(claim)
    place = (me.rank - merger) % claim.world_size
    patience = 1 + min(place, 8) / 16  # so that not all of them do the same
    me.intent = (yield Task("join", claim))._replace(process=me.process)
    key = Key("intent", nonce, me.rank)
    if not (yield from put(key, me.intent, None)):
        found = yield Get(key)  # it may be this one's, whose answer was lost
        if found is not None and (found.body is None or found.body.process != me.process):
            yield from abort(claim, f"two processes are rank {me.rank} of it")
            return REFUSED
    yield Task("write", claim, me.rank)
    has_part, is_merger = False, me.rank == merger
    while True:
        now, found = yield from _get_claim()
        if now is None or now.nonce != nonce or not now.is_undecided:
            return (yield from decided(claim, now))
        if now.state == FULL and not has_part:
            part = yield Task("write", now, me.rank)
            # If the key is taken, another rank has written this one's share.
            yield from put(Key("part", nonce, me.rank), part, None)
            has_part = True
            continue
        present = yield Look(now)
        missing = everybody - (present.parts | {me.rank} if now.state == FULL else present.intents)
        silent: Any = None
        if missing or not is_merger:
            silent = yield Wait(missing or frozenset({merger}), patience)
            if silent is None:
                continue
            is_merger = is_merger or silent == merger  # several may be: the claim moves once
        if missing:
            yield from _make_up_for(me, now, silent)
        elif now.state == FULL:
            if (verdict := (yield from _merge(now, found))) is not None:
                return verdict
        else:  # all have joined
            roll = yield Task("call_roll", now)
            yield from put(CLAIM, replace(now, state=FULL, roll=roll), found)


def merger_of(claim: Claim) -> int:
    """The rank that merges; any other does if it does not."""
    return int(claim.nonce, 16) % claim.world_size


def _make_up_for(me: Member, now: Claim, silent: int) -> Steps[None]:
    """Write what a silent rank was to write. A FailedError if no rank holds the same."""
    key = Key("intent", now.nonce, silent)
    if now.state == OPEN:
        raise FailedError(f"rank {silent} has not begun it")
    found = yield Get(key)
    if found is None:
        raise FailedError(f"the intent of rank {silent} is gone")
    intent = found.body
    if intent.digest != me.intent.digest:
        # Others may hold the same, whatever the silent rank knew of them; they have less patience.
        for _ in range(2):
            if (yield Wait(frozenset({silent}), _PATIENCE_FOR_STAND_INS)) is None:
                return
            yield Look(now, is_fresh=True)
        raise FailedError(f"rank {silent} has stopped")
    # Says to others who hold the same that one of them writes.
    marked = intent._replace(stand_in=me.process, moved=intent.moved + 1)
    if (yield from put(key, marked, found)):
        part = yield Task("write", now, silent, marked)
        yield from put(Key("part", now.nonce, silent), part, None)


def _merge(claim: Claim, found: Found | None) -> Steps[str | None]:
    """Commit: all parts are there. Returns the verdict; None if it was decided meanwhile."""
    merged = yield Task("merge", claim)
    committing = replace(claim, state=COMMITTING, save_id=merged.save_id)
    if not (yield from put(CLAIM, committing, found)):
        now, _ = yield from _get_claim()
        if now != committing:  # or the answer was lost
            return None
    if not (yield from finish(committing, merged)):
        return EXISTS
    yield Task("clean", committing)
    return COMMITTED


def abort(claim: Claim, why: str) -> Steps[str]:
    """End a save without success, unless it is decided already. Returns the verdict."""
    while True:
        now, found = yield from _get_claim()
        if now is None or now.nonce != claim.nonce or not now.is_undecided:
            return (yield from decided(claim, now))
        yield from put(CLAIM, replace(now, state=ABORTED, why=why), found)


def decided(claim: Claim, now: Claim | None) -> Steps[str]:
    """The verdict on a save that the claim (as it is now) does not leave open any more."""
    if now is None:
        return SUPERSEDED
    if now.nonce == claim.nonce:
        if now.state == ABORTED:
            return ABORTED
        return COMMITTED if (yield from finish(now)) else EXISTS
    if now.last == claim.nonce:
        return COMMITTED
    return ABORTED if now.replaces == claim.replaces else SUPERSEDED


def finish(claim: Claim, merged: Merged | None = None) -> Steps[bool]:
    """Do what was decided: after it ``.metadata`` is that of this save, or of a later one. Returns whether that is so;
    if not, somebody has saved there meanwhile who knows nothing of claims."""
    while True:
        there = yield Get(METADATA)
        if there is not None and there.body == claim.nonce:
            return True
        if merged is None:
            found = yield Get(Key("merged", claim.save_id))
            if found is None:
                return True  # it was done, replaced and removed
            merged = found.body
        expect = "" if there is None else there.etag
        if expect != claim.replaces:
            found = yield Get(CLAIM)
            is_last = found is not None and found.body == claim
            if there is not None or not is_last:
                return not is_last
            # A prune has deleted what was to be replaced.
        if (yield Put(METADATA, merged, expect)) == DONE:
            return True


# --- beside a save ------------------------------------------------------------------------------------


def withdraw(me: Member, number: values.Number, step: int | None, why: str, *, is_new: bool = True) -> Steps[str]:
    """Abort a save that this rank has counted and cannot begin, or has restored since. Returns the verdict. ``is_new``:
    the others are to find that out, also if none of them has begun it."""
    while True:
        claim, found = yield from _get_claim()
        what = judge(claim, me, number, step)
        if claim is not None and claim.number == number and claim.is_undecided and claim.nonce in me.left:
            what = _JOIN
        if what not in (_JOIN, OPEN) or (what == OPEN and not is_new):
            return what
        if claim is not None and what == _JOIN:
            claim = replace(claim, state=ABORTED, why=why)
        else:
            replaces, last = yield from _look_at_checkpoint(claim)
            claim = values.open_claim(me.attempt, me.draw(), number, step, replaces, last, why=why)
        if (yield from put(CLAIM, claim, found)):
            return ABORTED


def settle(*, why: str = "") -> Steps[Found | None]:
    """Do what was decided, and abort what is not, if there is a reason. Returns the claim as it is then."""
    while True:
        claim, found = yield from _get_claim()
        if claim is None:
            return found
        if claim.state == COMMITTING:
            yield from finish(claim)
        if not why or not claim.is_undecided:
            return found
        yield from put(CLAIM, replace(claim, state=ABORTED, why=why), found)
