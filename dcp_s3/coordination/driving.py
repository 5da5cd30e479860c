"""Carries out what `protocol` asks for, on a Store, and watches the other ranks meanwhile."""

from __future__ import annotations

import json
import logging
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar, cast

import numpy as np

from dcp_s3 import errors
from dcp_s3.coordination.merge import assign
from dcp_s3.coordination.protocol import Steps, merger_of
from dcp_s3.coordination.values import (
    CLAIM,
    DONE,
    LOST,
    METADATA,
    NONCE_DIGITS,
    TAKEN,
    CallRoll,
    Claim,
    Failed,
    Found,
    Get,
    Intent,
    Join,
    Key,
    Look,
    Member,
    Merge,
    Merged,
    Present,
    Put,
    UnreachableError,
    Wait,
    Write,
    parse_claim,
    parse_intent,
)
from dcp_s3.coordination.watch import LOOKS, Watch
from dcp_s3.failures import without_tracebacks
from dcp_s3.format.layout import METADATA_CRC_KEY, SAVE_ID_KEY, joint_object, metadata_object, new_nonce
from dcp_s3.memory import crc64nvme, crc_hex
from dcp_s3.s3.store import S3Store
from dcp_s3.store import ABSENT, Expect, Store
from dcp_s3.url import CheckpointURL

logger = logging.getLogger(__name__)

T = TypeVar("T")

_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.05, 0.5  # seconds between two looks
_PAUSE_PER_RANK = 1e-3  # S3 answers thousands of requests a second below one prefix: more ranks look less often
_FEW_RANKS = 16  # of as many, each may list at each look
_CLEANUP_SECONDS = 10.0
_AT_A_TIME = 256  # objects of ranks that are read in one go


@dataclass(frozen=True)
class Clock:
    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


class Work(Protocol):
    """What a rank does in a save, besides what all ranks do alike: see the operations of these names. Each raises what
    makes the save fail, and ObjectNotFoundError if something is gone."""

    @property
    def moved(self) -> int:
        """Grows while it makes progress. Asked by another thread."""

    def join(self, claim: Claim) -> Intent: ...

    def write(self, claim: Claim, rank: int, intent: Intent | None) -> bytes: ...

    def merge(self, claim: Claim, parts: Iterator[bytes]) -> Merged: ...

    def clean(self, claim: Claim) -> None: ...


class Driver:
    """Drives one rank's generators on a store, whose limit is that of the save; ``work`` is needed for whole saves."""

    def __init__(
        self,
        store: Store,
        url: CheckpointURL,
        me: Member,
        rank_timeout: float,
        work: Work | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._store, self._url, self._me, self._work = store, url, me, work
        self._rank_timeout, self._clock = rank_timeout, clock or Clock()
        self._watch = Watch(self._clock.now, rank_timeout)
        self._pause = _SHORTEST_PAUSE
        self._refused_since: float | None = None
        self._is_leaving = False
        self._stands_in_for: Write | None = None
        self.error: Exception | None = None
        """What failed on this rank, if anything did."""
        self.claim: Claim | None = None
        """As it was seen last."""

    def run(self, steps: Steps[T]) -> T:
        """Run a generator to its end; returns its result. A StorageError if the store does not answer, and the
        generator does not bear that."""
        try:
            return cast(T, self.go_on(steps))
        except UnreachableError:
            raise self.error or errors.TransferError(f"{self._url}: the store does not answer") from None

    def go_on(
        self, steps: Steps[Any], answer: Any = None, *, error: UnreachableError | None = None, until: type | None = None
    ) -> Any:
        """Go on with a generator, whose last operation has this answer or error, until an operation of a type, which is
        returned and not carried out; or to the end: returns the result."""
        while True:
            try:
                operation = steps.send(answer) if error is None else steps.throw(error)
            except StopIteration as end:
                return end.value
            if until is not None and isinstance(operation, until):
                return operation
            answer = error = None
            try:
                answer = self.carry_out(operation)
            except UnreachableError as unreachable:
                error = unreachable

    def leave(self, steps: Steps[T], why: str) -> T:
        """End a generator that this rank cannot go on with; returns its result."""
        return cast(T, self.go_on(steps, error=UnreachableError(why)))

    # --- operations -----------------------------------------------------------------------------------

    def carry_out(self, operation: Any) -> Any:
        """The answer to an operation; raises UnreachableError."""
        if isinstance(operation, Get):
            found = self._ask(lambda store: self._get(store, operation.key))
            if operation.key == CLAIM and found is not None:
                self._watch.see_claim(found.body)
                self.claim = found.body
            return found
        if isinstance(operation, Put):
            return self._put(operation)
        if isinstance(operation, Look):
            return self._look(operation)
        if isinstance(operation, Wait):
            self._sleep()
            return self._watch.find_silent(operation.ranks, operation.patience)
        if isinstance(operation, CallRoll):
            return self._try(lambda: self._call_roll(operation.claim))
        if self._work is None:
            raise TypeError(operation)
        work = self._work
        if isinstance(operation, Join):
            self.claim = operation.claim
            return work.join(operation.claim)
        if isinstance(operation, Write):
            return self._try(lambda: self._write(work, operation))
        if isinstance(operation, Merge):
            return self._try(lambda: work.merge(operation.claim, self._read("part", operation.claim)))
        return work.clean(operation.claim)

    def _get(self, store: Store, key: Key) -> Found | None:
        path = self._url.key(key.path)
        try:
            if key == METADATA:
                head = store.head(path)
                return Found(head.metadata.get(SAVE_ID_KEY, "")[:NONCE_DIGITS], head.etag)
            found = store.get(path)
        except errors.ObjectNotFoundError:
            if key == METADATA and not self._me.overwrite and store.exists(self._url.key(metadata_object(0))):
                return Found("", "checkpoints of single ranks")
            return None
        if key == CLAIM:
            return Found(parse_claim(found.data), found.etag)
        if key.kind == "intent":
            return Found(parse_intent(found.data), found.etag)
        if key.kind == "merged":
            return Found(Merged(key.id, found.data), found.etag)
        return Found(found.data, found.etag)

    def _put(self, operation: Put) -> str:
        key, body = operation.key, operation.body
        data, metadata = body, None
        if isinstance(body, (Claim, Intent)):
            data = body.to_json()
        elif isinstance(body, Merged):
            data = body.data
            metadata = {SAVE_ID_KEY: body.save_id, METADATA_CRC_KEY: crc_hex(crc64nvme(body.data))}
        expect = Expect(operation.expect, required=True)

        def put(store: Store) -> str:
            try:
                if key == CLAIM:
                    check_conditions(store, self._url, body)
                store.put(self._url.key(key.path), data, expect=expect, metadata=metadata)
            except (errors.PreconditionFailedError, errors.ObjectNotFoundError):
                return TAKEN
            return DONE

        answer: str = self._ask(put, or_else=LOST)
        if answer == DONE and key == CLAIM:
            self.claim = body  # nothing shows progress in a save that is decided
        return answer

    def _look(self, operation: Look) -> Present:
        claim = operation.claim
        is_few = claim.world_size <= _FEW_RANKS or merger_of(claim) == self._me.rank
        if is_few or operation.is_fresh or self._watch.is_stale(self._me.rank / claim.world_size):
            prefix = self._url.key(joint_object(claim.nonce, ""))
            listed = self._ask(lambda store: store.list(prefix)).objects
            names = [(each.key[len(prefix) :].split("."), (each.etag, each.modified_at, each.size)) for each in listed]
            if self._watch.see(names, claim.world_size):
                self._pause = _SHORTEST_PAUSE
        return self._watch.present

    def _write(self, work: Work, operation: Write) -> bytes:
        self._stands_in_for = operation if operation.intent is not None else None
        try:
            return work.write(*operation)
        except errors.ObjectNotFoundError as error:
            raise errors.SaveProtocolError(f"{self._url}: {error}") from error
        finally:
            self._stands_in_for = None

    def _call_roll(self, claim: Claim) -> str:
        """See `CallRoll`."""
        leaves, writes = [], []
        for rank, data in enumerate(self._read("intent", claim)):
            intent = parse_intent(data)
            if intent is None:
                raise errors.SaveProtocolError(f"{self._url} is not committed: the intent of rank {rank} is damaged")
            leaves.append(np.array(intent.leaves, np.uint64))
            writes.append(np.array(intent.writes, np.uint64))
        missing = assign(leaves, writes)
        if not missing:
            return ""
        key = Key("roll", claim.nonce + new_nonce())
        text = json.dumps({str(rank): [f"{each:016x}" for each in hashes] for rank, hashes in missing.items()})
        self._store.put(self._url.key(key.path), text.encode())
        return key.id

    def read_roll(self, claim: Claim, rank: int) -> list[int]:
        """Hashes of what a rank has to write besides, by the roll."""
        if not claim.roll:
            return []
        data = self._store.get(self._url.key(Key("roll", claim.roll).path)).data
        return [int(each, 16) for each in json.loads(data).get(str(rank), ())]

    def _read(self, kind: str, claim: Claim) -> Iterator[bytes]:
        """The intents or parts of all ranks, in order."""
        keys = [self._url.key(Key(kind, claim.nonce, rank).path) for rank in range(claim.world_size)]
        for start in range(0, len(keys), _AT_A_TIME):
            yield from self._store.map(lambda store, key: store.get(key).data, keys[start : start + _AT_A_TIME])
            self._watch.progress += 1

    def _try(self, work: Callable[[], Any]) -> Any:
        """The result; None if something is gone, which means that the save is decided; or why it failed."""
        try:
            return work()
        except errors.ObjectNotFoundError:
            return None
        except Exception as error:  # noqa: BLE001 - the others are told
            self.error = self.error or error
            return Failed(f"rank {self._me.rank}: {type(error).__name__}: {error}"[:2000])

    # --- requests ---------------------------------------------------------------------------------------

    def _ask(self, request: Callable[[Store], Any], *, or_else: Any = None) -> Any:
        """The answer of the store; ``or_else`` (None: try again) if it may or may not have been carried out."""
        while True:
            try:
                answer = request(self._store)
            except errors.TransferError as error:
                self._bear(error)
                if or_else is not None:
                    return or_else
            except errors.StorageError as error:
                self._give_up(error)
            else:
                self._refused_since = None
                return answer

    def _bear(self, error: errors.TransferError) -> None:
        """Go on in spite of a request that failed, but not for ever."""
        now = self._clock.now()
        self._refused_since = now if self._refused_since is None else self._refused_since
        longest = min(self._rank_timeout, _CLEANUP_SECONDS) if self._is_leaving else self._rank_timeout
        if now - self._refused_since > longest:
            self._give_up(error)
        without_tracebacks(error)
        logger.warning("the save to %s waits for S3: %s", self._url, error)
        self._sleep()

    def _give_up(self, error: errors.StorageError | errors.SaveProtocolError) -> None:
        self.error = self.error or error
        self._is_leaving, self._refused_since = True, None
        self._store = self._store.within(self._store.limit.for_cleanup())
        raise UnreachableError(f"rank {self._me.rank}: {error}"[:2000]) from error

    def _sleep(self) -> None:
        self._clock.sleep(self._pause * random.uniform(0.75, 1.25))
        world = self._me.attempt.world_size
        is_merger = self.claim is not None and merger_of(self.claim) == self._me.rank
        longest = _LONGEST_PAUSE if is_merger else max(_LONGEST_PAUSE, _PAUSE_PER_RANK * world)
        self._pause = min(1.5 * self._pause, longest)

    # --- signs of life ----------------------------------------------------------------------------------

    def show_progress(self, ended: threading.Event) -> None:
        """Write the intent again whenever there was progress, until ``ended``. Runs in a thread of its own."""
        shown = 0
        while not ended.wait(max(_SHORTEST_PAUSE, self._rank_timeout / LOOKS)):
            moved = self._watch.progress + (0 if self._work is None else self._work.moved)
            claim = self.claim
            if moved == shown or claim is None or not claim.is_undecided:
                continue
            shows = {self._me.rank: self._me.intent}
            if (other := self._stands_in_for) is not None and other.intent is not None:
                shows[other.rank] = other.intent
            for rank, intent in shows.items():
                path = self._url.key(Key("intent", claim.nonce, rank).path)
                try:
                    self._store.put(path, intent._replace(moved=intent.moved + moved).to_json())
                    shown = moved
                except Exception as error:  # noqa: BLE001 - the upload itself finds out
                    without_tracebacks(error)
                    logger.warning("the progress of rank %d of the save to %s: %s", rank, self._url, error)


# --- what the store must be able to do ------------------------------------------------------------------

_checked: set[tuple[str, str | None]] = set()
"""By bucket and endpoint."""


def check_conditions(store: Store, url: CheckpointURL, claim: Claim) -> None:
    """Refuse (SaveProtocolError) stores whose conditional writes cannot decide anything; once in a process for each."""
    where = store.name, store.settings.endpoint_url if isinstance(store, S3Store) else None
    if where in _checked:
        return
    key = url.key(Key("roll", f"{claim.nonce}00{new_nonce()}").path)
    store.put(key, b"1")
    is_good = _refuses(store, key, ABSENT) and _refuses(store, key, Expect('"00000000000000000000000000000000"'))
    is_good = is_good and not _refuses(store, key, Expect(store.get(key).etag))
    store.delete([key])
    if not is_good:
        raise errors.SaveProtocolError(
            f"{url} is not saved: {store.name} does not know conditional writes (If-None-Match and If-Match), which "
            "alone can decide a save without collectives. Remedy: save with collectives (use_collectives=True, or "
            'CheckpointManager(coordination="collectives")), or on another store; `dcp-s3 doctor` shows what it knows',
            url=str(url),
        )
    _checked.add(where)


def _refuses(store: Store, key: str, expect: Expect) -> bool:
    try:
        store.put(key, b"2", expect=replace(expect, required=True))
    except (errors.PreconditionFailedError, errors.ObjectNotFoundError):
        return True
    return False
