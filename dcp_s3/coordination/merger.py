"""Merges the parts of a save without collectives, and commits it. Any rank may do so, and several at the same time.

Parts are only ever added while a save goes on, each under a name of its own, so whoever has read parts that cover all
has read a whole checkpoint. Two mergers may choose different copies of what was written twice. Each commits what it
read, with a manifest of its own name; one commit wins.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dcp_s3 import errors
from dcp_s3.checkpoint.attachments import check_distinct
from dcp_s3.checkpoint.commit import Commit, delete_quietly, publish, versions
from dcp_s3.checkpoint.commit_state import Beginning, Previous, SaveIdentity, exists_error, find_previous
from dcp_s3.checkpoint.readback import check_readable
from dcp_s3.coordination.claim import is_still_ours
from dcp_s3.coordination.identity import NOT_BEGUN
from dcp_s3.coordination.joint import (
    FAILED,
    UNSAID,
    Clock,
    JointSave,
    describe,
    find_commit,
    lost_error,
    taken_over_error,
)
from dcp_s3.coordination.merge import Merging
from dcp_s3.format.control_files import Manifest, Notice
from dcp_s3.format.layout import intent_object, new_save_id, notice_object
from dcp_s3.store import Store, StoredObject
from dcp_s3.workers import Workers

logger = logging.getLogger(__name__)

READERS = 64
"""Parts that are read at the same time."""


# --- which ranks count as dead, and whether others make up for them. Pure. -----------------------------


@dataclass(frozen=True)
class Seen:
    """What a merging rank has seen of a save."""

    world_size: int
    parts: Mapping[int, str]
    """Digest of what it holds, by rank, of those that have written their part."""
    intents: Mapping[int, str]
    """Digest by rank, of those that said what they hold. They show that they live while they write."""
    silent: Mapping[int, float]
    """Seconds since the last sign of each rank without a part."""
    failed: Collection[int] = ()
    """Ranks that said that they failed before they knew what they would hold."""
    before: Sequence[str] | None = None
    """Digests by rank in the save before this one, if it was committed; None: not known."""

    @property
    def missing(self) -> list[int]:
        return [rank for rank in range(self.world_size) if rank not in self.parts]

    def digest_of(self, rank: int) -> str | None:
        """Digest of what a rank without a part holds; None: nobody knows.

        It holds what it held before if that is so for all whose parts are there: they run the same program.
        """
        said = self.intents.get(rank)
        if said is not None or self.before is None or len(self.before) != self.world_size:
            return said
        unchanged = all(self.before[each] == digest for each, digest in {**self.intents, **self.parts}.items())
        return self.before[rank] if unchanged else None


@dataclass(frozen=True)
class Verdict:
    """What becomes of a save some of whose parts are missing."""

    waiting: tuple[int, ...] = ()
    """Ranks that may still write."""
    made_up: Mapping[int, int] | None = None
    """Rank that holds the same, by dead rank; None: not all ranks are made up for, or some may still write."""
    lost: tuple[int, ...] = ()
    """Dead ranks that nobody can make up for."""


def judge(seen: Seen, rank_timeout: float) -> Verdict:
    """What becomes of the save. A rank counts as dead after ``rank_timeout`` seconds without a sign, if another one can
    make up for it, or if it had begun. Without both it has ten times as long."""
    waiting = tuple(rank for rank in seen.missing if seen.silent.get(rank, 0.0) < rank_timeout)
    if waiting:
        return Verdict(waiting)
    holders: dict[str, list[int]] = {}
    for rank, digest in sorted(seen.parts.items()):
        holders.setdefault(digest, []).append(rank)
    made_up, lost = {}, []
    for number, rank in enumerate(seen.missing):
        alike = holders.get(seen.digest_of(rank) or "")
        if alike:
            made_up[rank] = alike[number % len(alike)]
        else:
            lost.append(rank)
    if not lost:
        return Verdict(made_up=made_up)
    # They may be at something that takes long, an evaluation for example, and save afterwards.
    not_heard_of = [rank for rank in lost if rank not in seen.intents and rank not in seen.failed]
    not_begun = [rank for rank in not_heard_of if seen.silent[rank] < NOT_BEGUN * rank_timeout]
    return Verdict(waiting=tuple(not_begun)) if not_begun else Verdict(lost=tuple(lost))


# --- merging -------------------------------------------------------------------------------------------


class Merger:
    """Merges one save, step by step. It reads at most ``readers`` parts at the same time; 1: in the calling thread."""

    def __init__(
        self, store: Store, joint: JointSave, beginning: Beginning, clock: Clock, readers: int = READERS
    ) -> None:
        self._readers = readers
        self._store, self._joint, self._beginning, self._clock = store, joint, beginning, clock
        self._merging = Merging(joint.save, joint.world_size, joint.number)
        self._read: set[str] = set()
        self.has_moved = False
        """Whether the last step found parts that had not been there."""
        self._intents: dict[int, str] = {}
        self._failed: set[int] = set()  # ranks whose intent has no digest
        self._signs: dict[str, object] = {}  # by key of an intent: what it was like
        self._signed_at: dict[int, float] = {}  # by rank: when one of its intents was another one than before
        self._began = clock.now()
        self._notice: Notice | None = None
        self._asked_at = 0.0
        self._slow: set[int] = set()  # ranks that were asked, and did not write in time

    def step(self) -> str | None:
        """Do what can be done now. Returns the save id of the commit; None: some part is missing still.

        Raises:
            SaveProtocolError: it cannot be whole, or is no longer to be committed. All ranks are told.
            ShardingError: the parts do not fit each other. All ranks are told.
            CheckpointExistsError, CheckpointDeletedError: see `publish`.
            StorageError: a request failed; `step` may be called again.
        """
        try:
            return self._step()
        except errors.DcpS3Error as error:
            if isinstance(error, errors.StorageError):
                raise
            # Perhaps another merger has committed, and has removed what this one looked for.
            found = find_commit(self._store, self._joint)
            if found is not None:
                return found
            if isinstance(error, errors.SaveProtocolError) and not is_still_ours(
                self._store, self._joint.url, self._joint.claim
            ):
                error = taken_over_error(self._joint)  # that is why, whatever it looks like from here
            self._put_notice(Notice(self._joint.save, failed=str(error)))
            raise error from None

    def _step(self) -> str | None:
        self._read_parts()
        made_up: Mapping[int, int] = {}
        if len(self._merging.ranks) < self._joint.world_size:
            self._look_for_signs()
            is_anyone_silent = self._clock.now() - self._began >= self._joint.rank_timeout
            before = self._joint.before() if is_anyone_silent else None
            verdict = judge(self._seen(before), self._joint.rank_timeout)
            if verdict.lost:
                raise lost_error(self._joint, verdict.lost, self._causes(verdict.lost))
            if verdict.made_up is None:
                return None
            made_up = verdict.made_up
        if needed := self._needed(made_up):
            self._ask(needed, made_up)
            return None
        return self._commit(made_up)

    # --- reading -------------------------------------------------------------------------------------

    def _read_parts(self) -> None:
        prefix, _ = self._joint.prefixes
        new = [each.key for each in self._store.list(prefix).objects if each.key not in self._read]
        self.has_moved = bool(new)
        if self._readers == 1 or len(new) < 2:
            for key in new:
                self._add(key, functools.partial(self._store.get, key))
            return
        workers = Workers(min(self._readers, len(new)), "dcp_s3-merge")
        try:
            for key, read in [(key, workers.submit(self._store.get, key)) for key in new]:
                self._add(key, read.result)
        finally:
            workers.close()

    def _add(self, key: str, read: Callable[[], StoredObject]) -> None:
        try:
            self._merging.add(read().data)
        except errors.ObjectNotFoundError:
            return  # another merger has committed, and removes them
        except ValueError as error:
            raise errors.SaveProtocolError(
                f"{self._joint.url} is not committed: {key} cannot be merged: {error}. Remedy: save again",
                url=str(self._joint.url),
            ) from None
        self._read.add(key)

    def _look_for_signs(self) -> None:
        """Look which ranks have said what they hold, and go on saying it while they write."""
        _, prefix = self._joint.prefixes
        for each in self._store.list(prefix).objects:
            rank, _, digest = each.key[len(prefix) :].partition(".")
            if not rank.isdecimal() or int(rank) >= self._joint.world_size:
                continue
            if digest == UNSAID:
                self._failed.add(int(rank))
            else:
                self._intents[int(rank)] = digest
            sign = (each.etag, each.modified_at, each.size)
            if self._signs.get(each.key) != sign:
                self._signs[each.key], self._signed_at[int(rank)] = sign, self._clock.now()

    def _causes(self, ranks: Sequence[int]) -> dict[int, str]:
        found = {}
        for rank in ranks[:8]:
            if rank in self._intents or rank in self._failed:
                with contextlib.suppress(errors.StorageError):
                    digest = self._intents.get(rank, UNSAID)
                    key = self._joint.url.key(intent_object(self._joint.save, rank, digest))
                    data = self._store.get(key).data
                    if data.startswith(FAILED):
                        found[rank] = data[len(FAILED) :].decode("utf-8", "replace")
        return found

    def _silence(self, rank: int, since: float = 0.0) -> float:
        return self._clock.now() - max(self._began, since, self._signed_at.get(rank, 0.0))

    def _seen(self, before: Sequence[str] | None) -> Seen:
        ranks = range(self._joint.world_size)
        silent = {rank: self._silence(rank) for rank in ranks if rank not in self._merging.ranks}
        return Seen(self._joint.world_size, self._merging.digests, self._intents, silent, self._failed, before)

    # --- what is missing -----------------------------------------------------------------------------

    def _needed(self, made_up: Mapping[int, int]) -> dict[int, list[int]]:
        """Hashes of what is to be written, by the rank that is to write it."""
        try:
            wanted = self._merging.unwritten(excluded=self._slow)
        except errors.SaveProtocolError as error:
            url = str(self._joint.url)
            raise errors.SaveProtocolError(f"{url} is not committed: {error}", url=url) from None
        return {rank: wanted.get(rank, []) for rank in {*wanted, *self._carriers(made_up)}}

    def _carriers(self, made_up: Mapping[int, int]) -> set[int]:
        """The rank that stands in for the first one, until it has said what belongs to the save as a whole."""
        has_told = 0 not in made_up or any(number > 0 for _, number in self._merging.parts)
        if has_told:
            return set()
        return {made_up[0]} if made_up[0] not in self._slow else {self._joint.rank}  # this one answers

    def _ask(self, wanted: Mapping[int, Sequence[int]], made_up: Mapping[int, int]) -> None:
        """Ask ranks to write what is missing, once; others if they do not."""
        if self._notice is not None:
            asked, number = self._notice.wanted, self._notice.number
            late = [each for each in asked if (each, number) not in self._merging.parts]
            if late:
                if self._clock.now() - self._asked_at < self._joint.rank_timeout:
                    return
                self._look_for_signs()
                silent = [each for each in late if self._silence(each, self._asked_at) >= self._joint.rank_timeout]
                if not silent:
                    return  # what they write is large
                self._slow.update(silent)
                wanted = self._needed(made_up)
        round_number = 0 if self._notice is None else self._notice.number // self._joint.world_size + 1
        number = round_number * self._joint.world_size + self._joint.rank + 1
        self._notice, self._asked_at = Notice(self._joint.save, number, wanted), self._clock.now()
        self._put_notice(self._notice)

    def _put_notice(self, notice: Notice) -> None:
        self._store.put(
            self._joint.url.key(notice_object(self._joint.save)), notice.to_json(), content_type="application/json"
        )

    # --- the commit ----------------------------------------------------------------------------------

    def _commit(self, made_up: Mapping[int, int]) -> str | None:
        joint, url = self._joint, self._joint.url
        save_id = joint.save + new_save_id()[:8]
        identity = SaveIdentity(url, save_id)
        merged = self._merging.merged(save_id=save_id, checkpoint_id=str(url))
        check_distinct(merged.objects)
        facts = self._merging.facts
        speaker: Mapping[str, Any] = next((each for each in facts if "metrics" in each), {})
        began = [float(each["started_at"]) for each in facts if "started_at" in each]
        beginning = self._beginning.at_the_earliest(began)
        manifest = Manifest(
            save_id=save_id,
            created_at=time.time(),
            step=joint.step,
            world_size=joint.world_size,
            objects=merged.objects,
            items=merged.items,
            metrics=dict(speaker.get("metrics") or {}),
            extra=dict(speaker.get("extra") or {}),
            writer=versions(),
            started_at=beginning.at,
            coordination=describe(joint, self._merging.digests, made_up),
        )
        check_readable(merged.metadata, url)
        commit = Commit(identity, manifest.to_json(), merged.metadata, merged.objects)
        while (found := find_commit(self._store, joint)) is None:
            previous = find_previous(self._store, identity) if joint.overwrite else Previous()
            # After that look, so that a save which takes over later finds the condition of this commit broken, or this
            # commit as its own previous one.
            if not is_still_ours(self._store, url, joint.claim):
                raise taken_over_error(joint)
            if (found := find_commit(self._store, joint)) is not None:
                break  # by another merger meanwhile: it must not be taken for the checkpoint to replace
            try:
                publish(
                    self._store,
                    commit,
                    previous,
                    keep_objects=True,  # the winner may be another merger of the same
                    is_late=lambda: self._may_be_second() or beginning.is_late(),
                )
            except errors.CheckpointExistsError:
                delete_quietly(self._store, {identity.manifest_key}, "of a merge that lost")
                if not joint.overwrite and find_commit(self._store, joint) is None:
                    raise exists_error(url) from None
            else:
                found = save_id
                break
        self._clean()
        return found

    def _may_be_second(self) -> bool:
        """Whether another merger may have committed this save: a prune may even have deleted it since."""
        waited = self._clock.now() - self._began
        return self._joint.turn_of(self._joint.rank) > 0 or waited > self._joint.rank_timeout / 2

    def _clean(self) -> None:
        """Remove what the ranks told each other. The claim stays: it refuses what is left of older attempts."""
        keys = {each.key for prefix in self._joint.prefixes for each in self._store.list(prefix).objects}
        delete_quietly(
            self._store, keys | {self._joint.url.key(notice_object(self._joint.save))}, "of a save without collectives"
        )
