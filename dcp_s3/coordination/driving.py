"""Carries out what `protocol` asks for, on a Store, and watches the other ranks meanwhile."""

from __future__ import annotations

import json
import logging
import random
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

import numpy as np

from dcp_s3 import errors
from dcp_s3.coordination import protocol, values
from dcp_s3.coordination.merge import assign
from dcp_s3.coordination.protocol import FailedError, Get, Look, Put, Steps, Task, UnreachableError, Wait
from dcp_s3.coordination.values import CLAIM, METADATA, NONCE_DIGITS, Claim, Found, Intent, Key, Merged
from dcp_s3.failures import without_tracebacks
from dcp_s3.format.layout import METADATA_CRC_KEY, SAVE_ID_KEY, joint_object, metadata_object
from dcp_s3.memory import crc64nvme, crc_hex
from dcp_s3.s3.store import S3Store
from dcp_s3.store import ABSENT, Expect, Store
from dcp_s3.url import CheckpointURL

logger = logging.getLogger(__name__)

T = TypeVar("T")

_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.05, 0.5  # seconds between two looks
_PAUSE_PER_RANK = 1e-3  # S3 answers thousands of requests a second below one prefix: more ranks look less often
_FEW_RANKS = 16  # of as many, each may list at each look
_LOOKS = 4  # signs of life in each rank timeout, and listings by those whose turn it is not
_CLEANUP_SECONDS = 10.0
_AT_A_TIME = 256  # objects of ranks that are read in one go


class Driver:
    """Drives one rank's generators on a store, whose limit is that of the save.

    ``work``, for whole saves, has the methods ``join()``, ``write(claim, rank, intent)``, ``merge(claim, parts)`` and
    ``clean(claim)``, see `Task`; each raises what makes the save fail. Its ``moved`` grows while it makes progress.
    """

    def __init__(
        self,
        store: Store,
        url: CheckpointURL,
        me: protocol.Member,
        rank_timeout: float,
        work: Any = None,
        *,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._store, self._url, self._me, self._work = store, url, me, work
        self._rank_timeout, self._now, self._sleep_for = rank_timeout, now, sleep
        self._watch = Watch(now, rank_timeout)
        self._pause = _SHORTEST_PAUSE
        self._refused_since: float | None = None
        self._is_leaving = False
        self._stands_in_for: Task | None = None
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
        self, steps: Steps[Any], answer: Any = None, *, error: Exception | None = None, until: str | None = None
    ) -> Any:
        """Go on with a generator, whose last operation has this answer or error, until a task of this name, which is
        returned and not carried out; or to the end: returns the result."""
        while True:
            try:
                operation = steps.send(answer) if error is None else steps.throw(error)
            except StopIteration as end:
                return end.value
            if isinstance(operation, Task) and operation.what == until:
                return operation
            answer = error = None
            try:
                answer = self.carry_out(operation)
            except (UnreachableError, FailedError) as thrown:
                error = thrown

    # --- operations -----------------------------------------------------------------------------------

    def carry_out(self, operation: Any) -> Any:
        """The answer to an operation; raises UnreachableError or FailedError."""
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
        return self._do(operation)

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
        body: Any = Merged(key.id, found.data)
        if key.kind != "merged":
            body = (values.parse_claim if key == CLAIM else values.parse_intent)(found.data)
        return Found(body, found.etag)

    def _put(self, operation: Put) -> str:
        key, body = operation.key, operation.body
        data, metadata = body, None
        if isinstance(body, (Claim, Intent)):
            data = body.to_json()
        elif isinstance(body, Merged):
            data = body.data
            metadata = {SAVE_ID_KEY: body.save_id, METADATA_CRC_KEY: crc_hex(crc64nvme(body.data))}

        def put(store: Store) -> str:
            try:
                if key == CLAIM:
                    check_conditions(store, self._url, body)
                expect = Expect(operation.expect, required=True)
                store.put(self._url.key(key.path), data, expect=expect, metadata=metadata)
            except (errors.PreconditionFailedError, errors.ObjectNotFoundError):
                return protocol.TAKEN
            return protocol.DONE

        answer: str = self._ask(put, or_else=protocol.LOST)
        if answer == protocol.DONE and key == CLAIM:
            self.claim = body  # nothing shows progress in a save that is decided
        return answer

    def _look(self, operation: Look) -> protocol.Present:
        claim = operation.claim
        is_few = claim.world_size <= _FEW_RANKS or protocol.merger_of(claim) == self._me.rank
        if is_few or operation.is_fresh or self._watch.is_stale(self._me.rank / claim.world_size):
            prefix = self._url.key(joint_object(claim.nonce, ""))
            listed = self._ask(lambda store: store.list(prefix)).objects
            names = [(each.key[len(prefix) :].split("."), (each.etag, each.modified_at, each.size)) for each in listed]
            if self._watch.see(names, claim.world_size):
                self._pause = _SHORTEST_PAUSE
        return self._watch.present

    def _do(self, task: Task) -> Any:
        what, claim, work = task.what, task.claim, self._work
        if what in ("join", "clean"):
            return work.join() if what == "join" else work.clean(claim)
        try:
            if what == "call_roll":
                return self._call_roll(claim)
            if what == "merge":
                return work.merge(claim, self._read("part", claim))
            self._stands_in_for = task if task.intent is not None else None
            return work.write(claim, task.rank, task.intent)
        except Exception as error:  # the others are told
            found: Exception = error
            if isinstance(error, errors.ObjectNotFoundError):
                found = errors.SaveProtocolError(f"{self._url}: {error}")
            self.error = self.error or found
            raise FailedError(f"rank {self._me.rank}: {type(found).__name__}: {found}"[:2000]) from error
        finally:
            self._stands_in_for = None

    def _call_roll(self, claim: Claim) -> str:
        leaves, writes = [], []
        for rank, data in enumerate(self._read("intent", claim)):
            intent = values.parse_intent(data)
            if intent is None:
                raise errors.SaveProtocolError(f"{self._url} is not committed: the intent of rank {rank} is damaged")
            leaves.append(np.array(intent.leaves, np.uint64))
            writes.append(np.array(intent.writes, np.uint64))
        missing = assign(leaves, writes)
        if not missing:
            return ""
        key = Key("roll", claim.nonce + secrets.token_hex(8))
        self._store.put(
            self._url.key(key.path), json.dumps({str(rank): each for rank, each in missing.items()}).encode()
        )
        return key.id

    def read_roll(self, claim: Claim, rank: int) -> list[int]:
        """Hashes of what a rank has to write besides, by the roll."""
        if not claim.roll:
            return []
        data = self._store.get(self._url.key(Key("roll", claim.roll).path)).data
        return [int(each) for each in json.loads(data).get(str(rank), ())]

    def _read(self, kind: str, claim: Claim) -> Iterator[bytes]:
        """The intents or parts of all ranks, in order."""
        keys = [self._url.key(Key(kind, claim.nonce, rank).path) for rank in range(claim.world_size)]
        for start in range(0, len(keys), _AT_A_TIME):
            yield from self._store.map(lambda store, key: store.get(key).data, keys[start : start + _AT_A_TIME])
            self._watch.progress += 1

    # --- requests ---------------------------------------------------------------------------------------

    def _ask(self, request: Callable[[Store], Any], *, or_else: Any = None) -> Any:
        """The answer of the store; ``or_else`` (None: try again) if it may or may not have been carried out."""
        while True:
            try:
                answer = request(self._store)
            except errors.TransferError as error:
                # Go on in spite of it, but not for ever.
                now = self._now()
                self._refused_since = now if self._refused_since is None else self._refused_since
                longest = min(self._rank_timeout, _CLEANUP_SECONDS) if self._is_leaving else self._rank_timeout
                if now - self._refused_since > longest:
                    self._give_up(error)
                without_tracebacks(error)
                logger.warning("the save to %s waits for S3: %s", self._url, error)
                self._sleep()
                if or_else is not None:
                    return or_else
            except errors.StorageError as error:
                self._give_up(error)
            else:
                self._refused_since = None
                return answer

    def _give_up(self, error: errors.StorageError) -> None:
        self.error = self.error or error
        self._is_leaving, self._refused_since = True, None
        self._store = self._store.within(self._store.limit.for_cleanup())
        raise UnreachableError(f"rank {self._me.rank}: {error}"[:2000]) from error

    def _sleep(self) -> None:
        self._sleep_for(self._pause * random.uniform(0.75, 1.25))
        is_merger = self.claim is not None and protocol.merger_of(self.claim) == self._me.rank
        ranks = 0 if is_merger else self._me.attempt.world_size
        self._pause = min(1.5 * self._pause, max(_LONGEST_PAUSE, _PAUSE_PER_RANK * ranks))

    # --- signs of life ----------------------------------------------------------------------------------

    def show_progress(self, ended: threading.Event) -> None:
        """Write the intent again whenever there was progress, until ``ended``. Runs in a thread of its own."""
        shown = 0
        while not ended.wait(max(_SHORTEST_PAUSE, self._rank_timeout / _LOOKS)):
            moved, claim = self._watch.progress + self._work.moved, self.claim
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


class Watch:
    """The failure detector: what a rank has seen of the others, and which of them are silent."""

    def __init__(self, now: Callable[[], float], rank_timeout: float) -> None:
        self._now, self._rank_timeout = now, rank_timeout
        self.present = protocol.Present()
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
            self._nonce, self.present = claim.nonce, protocol.Present()
            self._signs, self._changed_at, self._phases = {}, {}, set()
        self._enter(claim.state)

    def _enter(self, phase: str) -> None:
        """Nobody was expected to show anything of this phase before."""
        if phase not in self._phases:
            self._phases.add(phase)
            self._phase_at = self._now()

    def is_stale(self, share: float) -> bool:
        """Whether to list again; ``share``: ranks whose turn it is not do so at different times."""
        return self._now() - self._listed_at > self._rank_timeout / _LOOKS * (0.5 + share / 2)

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
        self.present = protocol.Present(frozenset(found["intent"]), frozenset(found["part"]))
        for phase, ranks in (("joined", self.present.intents), ("merging", self.present.parts)):
            if len(ranks) == world_size:
                self._enter(phase)
        return is_new

    def find_silent(self, ranks: frozenset[int], patience: float) -> int | None:
        # When it was listed, not now: who slept, or could not reach the store, has to look first.
        since = self._listed_at - patience * self._rank_timeout
        return min(
            (each for each in ranks if max(self._phase_at, self._changed_at.get(each, 0.0)) <= since), default=None
        )


# --- what the store must be able to do ------------------------------------------------------------------

_checked: set[tuple[str, str | None]] = set()
"""By bucket and endpoint."""


def check_conditions(store: Store, url: CheckpointURL, claim: Claim) -> None:
    """Refuse (SaveProtocolError) stores whose conditional writes cannot decide anything; once in a process for each."""
    where = store.name, store.settings.endpoint_url if isinstance(store, S3Store) else None
    if where in _checked:
        return
    key = url.key(Key("roll", f"{claim.nonce}00{secrets.token_hex(8)}").path)
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
