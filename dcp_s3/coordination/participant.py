"""One rank's part in a save without collectives: it begins, writes its part, and waits for the commit, which it makes
itself if it is its turn."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

from dcp_s3 import errors
from dcp_s3.checkpoint.commit import delete_quietly
from dcp_s3.checkpoint.commit_state import Beginning, SaveIdentity, check_absent
from dcp_s3.coordination.claim import claim
from dcp_s3.coordination.joint import Clock, JointSave, find_commit, sign_failed
from dcp_s3.coordination.merger import READERS, Merger
from dcp_s3.failures import without_tracebacks
from dcp_s3.format.control_files import Manifest, Notice, attachments_of
from dcp_s3.format.layout import intent_object, manifest_object, notice_object, part_object
from dcp_s3.format.part import Part, digest_of, encode
from dcp_s3.store import Store

logger = logging.getLogger(__name__)

_SHORTEST_PAUSE = 0.05  # seconds between two looks
_PAUSE_PER_RANK = 1e-3  # S3 answers thousands of requests a second below one prefix: more ranks look less often
_MOST_TURNS = 16
_SIGNS = 3  # in each rank_timeout

WriteMissing = Callable[[Sequence[int], int], Part]
"""Writes the items with these hashes to further objects. Gets the number of the part to make of them."""


class Participant:
    """One rank in one save; ``readers``: see `Merger`."""

    def __init__(self, store: Store, joint: JointSave, clock: Clock | None = None, *, readers: int = READERS) -> None:
        self._readers = readers
        self._store, self._joint, self._clock = store, joint, clock or Clock()
        self._beginning = Beginning()
        self._own: list[str] = []  # keys of this rank's parts
        self._answered: set[int] = set()  # numbers of notices
        self._refused_since: float | None = None
        self.committed: str | None = None
        """Save id of the commit; None: not known to be committed."""

    def begin(self) -> None:
        """Take part in the save: before any byte moves.

        Raises:
            CheckpointExistsError: another save is committed at the URL, and is not to be replaced.
            SaveProtocolError: the save is of another attempt, has another number of ranks, or its id was used before.
        """
        joint = self._joint
        if joint.overwrite and self._is_late():
            return
        try:
            if not joint.overwrite:
                check_absent(self._store, SaveIdentity(joint.url, joint.save))
            claim(self._store, joint.url, joint.claim)
        except errors.CheckpointError:
            if not self._is_late():
                raise

    @contextlib.contextmanager
    def alive(self, held: frozenset[int], attached: Iterable[str] = (), *, is_known: bool) -> Iterator[None]:
        """Show while this rank writes that it is alive, and what it holds, so that others can make up for it.

        With ``is_known`` the save before this one says so. Then there is a sign only if it takes long.
        """
        digest = digest_of(held, attached)
        if not is_known:
            self._sign(digest, b"0")
        ended = threading.Event()

        def show() -> None:
            count = 0
            while not ended.wait(self._joint.rank_timeout / _SIGNS):
                count += 1
                try:
                    self._sign(digest, b"%d" % count)
                except Exception as error:  # noqa: BLE001 - the upload itself finds out
                    without_tracebacks(error)
                    logger.warning("the sign that rank %d is alive: %s", self._joint.rank, error)

        thread = threading.Thread(target=show, name="dcp_s3-alive", daemon=True)
        thread.start()
        try:
            yield
        except Exception as error:
            ended.set()
            thread.join()
            with contextlib.suppress(errors.StorageError):
                self._store = self._store.within(self._store.limit.for_cleanup())
                sign_failed(self._store, self._joint, f"{type(error).__name__}: {error}", digest)
            raise
        finally:
            ended.set()
            thread.join()

    def publish(self, part: Part) -> None:
        """Write a part: all that it names is in the store."""
        digest = digest_of(part.held, attachments_of(part.objects))
        key = self._joint.url.key(part_object(part.save, part.rank, part.number, digest))
        self._own.append(key)
        self._store.put(key, encode(part))

    def wait(self, write_missing: WriteMissing, *, turn: int | None = None) -> str:
        """Wait until the save is committed; commit it if it is this rank's turn. Returns the save id of the commit.

        ``turn`` is the place of this rank in the order in which they merge; None: as the save's id says.

        Raises:
            SaveProtocolError: the save cannot be whole, or was given up.
            CheckpointExistsError: another save has committed meanwhile.
        """
        joint, clock = self._joint, self._clock
        began, merger, pause = clock.now(), None, _SHORTEST_PAUSE
        place = joint.turn_of(joint.rank) if turn is None else turn
        due = began + min(place, _MOST_TURNS) * joint.rank_timeout
        longest = max(0.5, _PAUSE_PER_RANK * joint.world_size)
        while self.committed is None:
            try:
                if merger is None and clock.now() >= due:
                    merger = Merger(self._store, joint, self._beginning, clock, self._readers)
                self._look(write_missing)
                if self.committed is None and merger is not None:
                    self.committed = merger.step()
                self._refused_since = None
            except errors.TransferError as error:
                self._bear(error)
            except (errors.AccessDeniedError, errors.CredentialsError) as error:
                self._abandon(f"rank {joint.number(joint.rank)}, which merges what the ranks wrote: {error}", error)
            if self.committed is None:
                clock.sleep(pause)
                has_moved = merger is not None and merger.has_moved
                pause = _SHORTEST_PAUSE if has_moved else min(1.5 * pause, 0.5 if merger is not None else longest)
        if merger is None:
            # One that was made up for wrote its part in vain; the merger has removed all others.
            delete_quietly(self._store, set(self._own), "of a save without collectives")
        return self.committed

    def _is_late(self) -> bool:
        """Whether the save is committed already: others have made up for this rank, which has not begun.

        Raises:
            SaveProtocolError: nobody has: it is another save with the same id.
        """
        joint = self._joint
        found = find_commit(self._store, joint)
        if found is None:
            return False
        with contextlib.suppress(errors.ObjectNotFoundError, ValueError):
            manifest = Manifest.from_json(self._store.get(joint.url.key(manifest_object(found))).data)
            if str(joint.rank) not in manifest.coordination.get("made_up", {}):
                raise errors.SaveProtocolError(
                    f"{joint.url} is not saved: an earlier start of the job has committed a save with the same id "
                    f"there (run {joint.claim.run!r}). Remedy: give each start of the job a new DCP_S3_RUN_ID, or call "
                    "torch.distributed.init_process_group",
                    url=str(joint.url),
                )
        self.committed = found
        return True

    def _sign(self, digest: str, data: bytes) -> None:
        self._store.put(self._joint.url.key(intent_object(self._joint.save, self._joint.rank, digest)), data)

    def _look(self, write_missing: WriteMissing) -> None:
        """See whether the save is committed, and what the others want of this rank."""
        self.committed = find_commit(self._store, self._joint)
        if self.committed is not None:
            return
        try:
            notice = Notice.from_json(self._store.get(self._joint.url.key(notice_object(self._joint.save))).data)
        except (errors.ObjectNotFoundError, ValueError):
            return
        if notice.failed:
            self.committed = find_commit(self._store, self._joint)
            if self.committed is not None:
                return
            raise errors.SaveProtocolError(notice.failed, url=str(self._joint.url))
        elif notice.number not in self._answered and self._joint.rank in notice.wanted:
            self.publish(write_missing(notice.wanted[self._joint.rank], notice.number))
            self._answered.add(notice.number)

    def _abandon(self, reason: str, cause: errors.StorageError) -> None:
        """Give the save up, and tell the others."""
        text = f"{self._joint.url} is not committed: {reason}"
        notice = Notice(self._joint.save, failed=text)
        store = self._store.within(self._store.limit.for_cleanup())
        try:
            store.put(self._joint.url.key(notice_object(self._joint.save)), notice.to_json())
            self.committed = find_commit(store, self._joint)
        except errors.StorageError:
            raise cause from None
        if self.committed is None:
            raise cause

    def _bear(self, error: errors.TransferError) -> None:
        """Go on in spite of a request that failed, but not for ever."""
        now = self._clock.now()
        self._refused_since = now if self._refused_since is None else self._refused_since
        if now - self._refused_since > self._joint.rank_timeout:
            raise error
        without_tracebacks(error)
        logger.warning("the commit of %s waits for S3: %s", self._joint.url, error)
