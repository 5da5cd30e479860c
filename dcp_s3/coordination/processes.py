"""What a process remembers for saves without collectives: its count of saves, and those that it left."""

from __future__ import annotations

import logging
import secrets
import threading
from collections import defaultdict
from dataclasses import dataclass, field

from dcp_s3.coordination.driving import Driver
from dcp_s3.coordination.identity import Attempt, current_attempt
from dcp_s3.coordination.protocol import UNKNOWN, Member, settle
from dcp_s3.coordination.protocol import withdraw as withdraw_from
from dcp_s3.coordination.values import Number
from dcp_s3.errors import DcpS3Error, StorageError
from dcp_s3.process import reset_in_child
from dcp_s3.s3.store import store_of
from dcp_s3.settings import Settings
from dcp_s3.store import Store
from dcp_s3.url import CheckpointURL
from dcp_s3.workers import InTurn

logger = logging.getLogger(__name__)

_PATIENCE = 20.0
"""Seconds for which the store may refuse what is no part of a save."""


@dataclass
class _Memory:
    lock: threading.Lock = field(default_factory=threading.Lock)
    process: str = field(default_factory=lambda: secrets.token_hex(8))
    eras: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    """Restores so far, by root."""
    counts: defaultdict[tuple[object, ...], int] = field(default_factory=lambda: defaultdict(int))
    """Saves so far, by attempt, URL, era and step."""
    left: defaultdict[tuple[str, str], set[str]] = field(default_factory=lambda: defaultdict(set))
    """See `Member.left`, by attempt and URL."""
    undecided: list[CountedSave] = field(default_factory=list)


_memory = _Memory()


@reset_in_child
def _forget() -> None:
    global _memory
    _memory = _Memory()


@dataclass(eq=False)
class CountedSave:
    """A save that this process has counted, told apart from all others of its attempt to that URL."""

    attempt: Attempt
    url: CheckpointURL
    number: Number
    step: int | None

    def decided(self, verdict: str) -> None:
        """Note what has become of it."""
        with _memory.lock:
            if verdict != UNKNOWN and self in _memory.undecided:
                _memory.undecided.remove(self)

    @property
    def is_decided(self) -> bool:
        with _memory.lock:
            return self not in _memory.undecided


def count_save(url: CheckpointURL, settings: Settings, *, step: int | None) -> CountedSave:
    """Count a save, before anything of it can fail on this rank alone."""
    return count_of(current_attempt(url, settings), url, step)


def count_of(attempt: Attempt, url: CheckpointURL, step: int | None) -> CountedSave:
    """See `count_save`."""
    with _memory.lock:
        era = _memory.eras[str(url.parent)]
        key = (attempt.id, str(url), era, step)
        _memory.counts[key] += 1
        save = CountedSave(attempt, url, (era, step or 0, _memory.counts[key]), step)
        if attempt.world_size > 1:
            _memory.undecided.append(save)
        return save


def make_member(attempt: Attempt, url: CheckpointURL, *, overwrite: bool) -> Member:
    """This process in its saves to a URL."""
    return Member(attempt.rank, attempt, _memory.process, overwrite, _memory.left[attempt.id, str(url)])


def withdraw(counted: CountedSave, settings: Settings, error: BaseException) -> None:
    """Abort a save that this rank has counted and does not begin, with that reason, in the background. Nothing is done
    if it is decided already."""
    if counted.is_decided:
        return
    why = f"rank {counted.attempt.rank}: {type(error).__name__}: {error}"[:2000]  # not the error: it holds the state

    def tell() -> None:
        try:
            _abort(counted, settings, why, is_new=True)
        except DcpS3Error as failed:
            logger.warning("the other ranks are not told that this one has failed: %s", failed)

    _telling.submit(tell)


_telling = InTurn("dcp_s3-withdraw")


def end_era(root: CheckpointURL, settings: Settings) -> None:
    """What is saved below ``root`` from here on has nothing to do with what was saved before: a checkpoint is restored.
    Every rank calls it equally often. Aborts what this process has counted before and what is not decided.

    Raises:
        StorageError: that is not certain.
    """
    with _memory.lock:
        _memory.eras[str(root)] += 1
        before = [each for each in _memory.undecided if each.url.parent == root]
    failure = None
    for counted in before:
        try:
            _abort(counted, settings, f"rank {counted.attempt.rank} has restored a checkpoint since", is_new=False)
        except StorageError as error:
            failure = failure or error
    if failure is not None:
        raise failure


def _abort(counted: CountedSave, settings: Settings, why: str, *, is_new: bool) -> None:
    member = make_member(counted.attempt, counted.url, overwrite=True)
    driver = Driver(store_of(counted.url, settings), counted.url, member, settings.rank_timeout)
    counted.decided(driver.run(withdraw_from(member, counted.number, counted.step, why, is_new=is_new)))


def settle_saves(store: Store, url: CheckpointURL, *, why: str = "") -> str | None:
    """Write ``.metadata`` of a joint save that was decided, and whose merger has died; with ``why`` also abort one that
    is not: from then on it cannot commit. Returns the claim's ETag; None if there is none."""
    nobody = Member(0, Attempt("", (), "", None, 1, 0), "", overwrite=True)
    found = Driver(store, url, nobody, _PATIENCE).run(settle(why=why))
    return None if found is None else found.etag
