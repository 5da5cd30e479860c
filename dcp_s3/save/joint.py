"""A joint save: several ranks save one checkpoint without collectives, see `dcp_s3.coordination.protocol`."""

from __future__ import annotations

import contextlib
import functools
import logging
import secrets
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from dcp_s3 import errors
from dcp_s3.checkpoint.commit import Commit, check_readable, delete_quietly
from dcp_s3.checkpoint.commit_state import SaveIdentity, exists_error, find_previous, find_save_id
from dcp_s3.coordination import protocol
from dcp_s3.coordination.driving import Driver
from dcp_s3.coordination.identity import Attempt, current_attempt
from dcp_s3.coordination.merge import Merging
from dcp_s3.coordination.ownership import OwnedItem, Replicas, find_owners, lookup_in
from dcp_s3.coordination.processes import CountedSave, count_of, make_member
from dcp_s3.coordination.protocol import FailedError, UnreachableError
from dcp_s3.coordination.values import ABORTED, OPEN, Claim, Intent, Key, Merged
from dcp_s3.failures import name_ranks
from dcp_s3.format.control_files import Manifest, check_distinct
from dcp_s3.format.layout import joint_object, manifest_object, step_of
from dcp_s3.format.metadata import VERSIONS
from dcp_s3.format.part import Part, WrittenItem, digest_of, encode, item_hash
from dcp_s3.process import collector_paused
from dcp_s3.save.save import Save, objects_of
from dcp_s3.settings import Settings
from dcp_s3.store import Batch
from dcp_s3.url import CheckpointURL

logger = logging.getLogger(__name__)

_learned: set[int] = set()
"""Hashes of items that this process had to write besides its own: what one rank alone has, by a rule that gives it to
others. It writes them at once from then on."""


@dataclass(eq=False, kw_only=True)
class JointSave(Save):
    """One rank's part in such a save. Without ``counted`` the ranks save in lockstep."""

    attempt: Attempt
    counted: CountedSave | None = None
    of_step: int | None = None
    """What tells it from other saves to the URL, besides their count."""
    replicas: Replicas = None

    spills: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self.rank, self.is_coordinator = self.attempt.rank, self.attempt.rank == 0
        super().__post_init__()
        self.world_size = self.attempt.world_size
        self._start_deadline()
        member = make_member(self.attempt, self.url, overwrite=self.overwrite)
        self._driver = Driver(self._store, self.url, member, self.settings.rank_timeout, self)
        number = None if self.counted is None else self.counted.number
        self._steps: protocol.Steps[tuple[str, str | None]] | None = protocol.save(member, number, self.of_step)
        self._was_committed = False
        self._planner: SavePlanner | None = None
        self._held: list[OwnedItem] = []
        self._results: list[WriteResult] = []
        self._paths: Mapping[str, tuple[str | int, ...]] | None = None
        self._replaced: frozenset[str] = frozenset()
        self._batches: list[Batch] = []
        self._ended = threading.Event()

    # --- in the order of DCP's calls ----------------------------------------------------------------

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Join the save, before any byte moves."""
        self._go_on(until="join")
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """The plan as it is: each rank knows by itself what it writes."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        """Upload this rank's share of its items. Returns when all objects are complete, or raises and leaves nothing
        open."""
        began, self._planner = time.monotonic(), planner
        with collector_paused(), self._withdrawing():
            self._held = find_owners(
                plan.items, lookup_in(planner), world_size=self.world_size, rank=self.rank, replicas=self.replicas
            )
            intent = self.join()
        asked = self._go_on(intent, until="write")
        failed: FailedError | None = None
        with self._withdrawing():
            threading.Thread(
                target=self._driver.show_progress, args=(self._ended,), name="dcp_s3-progress", daemon=True
            ).start()
            try:
                self._driver.carry_out(asked)
            except FailedError as error:
                failed = error
        if failed is not None:
            try:
                self._go_on(error=failed)
            finally:
                failed = None  # its traceback has this frame, and so the state
        self._tell_written(self._results, time.monotonic() - began)
        return self._results

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write this rank's part, and wait until the whole is committed, by this rank or another one."""
        if self._was_committed:
            return  # without this rank, whose own writing failed: others have made up for it
        with self._withdrawing():
            self._paths = metadata.planner_data
            if not isinstance(self._paths, dict | None):
                kind = type(self._paths).__name__
                why = f"the planner's data are a {kind}, which cannot be merged without collectives"
                raise errors.SaveProtocolError(f"{why}. Remedy: DefaultSavePlanner, or a save with collectives")
        self._go_on(b"")

    # --- what the driver calls ------------------------------------------------------------------------

    @property
    def moved(self) -> int:
        """Bytes that this rank has uploaded so far."""
        return sum(each.sent for each in self._batches)

    def join(self) -> Intent:
        """What this rank says of itself when it joins."""
        shared: dict[bool, list[int]] = {True: [], False: []}
        for each in self._held:
            if len(each.holders) > 1:
                shared[self._is_own(each)].append(item_hash(each.item))
        held = (item_hash(each.item) for each in self._held)
        digest = digest_of(held, [each.name for each in self.attachments])
        return Intent("", 0, digest, tuple(shared[True]), tuple(shared[False]))

    def write(self, claim: Claim, rank: int, intent: Intent | None) -> bytes:
        """Write this rank's share, or what is left to be written of any rank's: then returns its part."""
        if claim.state == OPEN:
            self._results = self._upload(claim, [each.item for each in self._held if self._is_own(each)])
            return b""
        more = {*self._driver.read_roll(claim, rank), *(intent.writes if intent is not None else ())}
        missing = [each.item for each in self._held if more and item_hash(each.item) in more]
        results = self._upload(claim, missing, again=True)
        if rank == self.rank:
            _learned.update(item_hash(each) for each in missing if each.type != WriteItemType.SHARD)
            results = [*self._results, *results]
        else:
            logger.warning("%s: rank %d writes what rank %d was to write", self.url, self.rank, rank)
        items = {each.item.index: each.item for each in self._held}
        written = tuple(
            WrittenItem(each.index, item.tensor_data, each.storage_data, item.type == WriteItemType.SHARD)
            for each, item in ((each, items[each.index]) for each in results if each.storage_data is not None)
        )
        facts: dict[str, Any] = {"started_at": self._beginning.at, "by": self.rank}
        if rank == 0:
            facts |= {"metrics": dict(self.metrics), "extra": dict(self.extra)}
        paths = None if self._paths is None else {each.index.fqn: self._paths[each.index.fqn] for each in written}
        objects, _, _ = objects_of(results)
        return encode(Part(claim.nonce, rank, self.world_size, written, tuple(objects), paths, facts))

    def merge(self, claim: Claim, parts: Iterator[bytes]) -> Merged:
        """Make the checkpoint of all parts, and write all of it but ``.metadata``."""
        merging, sample = (Merging(claim.nonce, self.world_size) for _ in range(2))
        for number, data in enumerate(parts):
            if merging.add(data) or not number:
                sample.add(data)
        store, identity = self._store, SaveIdentity(self.url, claim.nonce + secrets.token_hex(4))
        merged = merging.merged(save_id=identity.save_id, checkpoint_id=str(self.url))
        check_distinct(merged.objects)
        # Not all of it: to load it takes many times its memory.
        few = sample.merged(save_id=identity.save_id, checkpoint_id=str(self.url), is_whole=False)
        check_readable(few.metadata, self.url)
        facts: Mapping[str, Any] = merging.facts[0]
        made_up = {str(rank): by for rank, each in enumerate(merging.facts) if (by := each.get("by", rank)) != rank}
        manifest = Manifest(
            save_id=identity.save_id,
            created_at=time.time(),
            step=claim.step,
            world_size=self.world_size,
            objects=merged.objects,
            items=merged.items,
            metrics=dict(facts.get("metrics") or {}),
            extra=dict(facts.get("extra") or {}),
            writer=VERSIONS,
            started_at=min(float(each["started_at"]) for each in merging.facts),
            coordination={
                "save": claim.nonce, "run": claim.run, "restart": claim.restart, "merged_by": self.rank,
                "made_up": made_up,
            },
        )  # fmt: skip
        self._replaced = find_previous(store, identity).keys if self.overwrite else frozenset()
        store.put(identity.url.key(Key("merged", identity.save_id).path), merged.metadata)
        store.put(self.url.key(manifest_object(identity.save_id)), manifest.to_json())
        return Merged(identity.save_id, merged.metadata)

    def clean(self, claim: Claim) -> None:
        """Remove what the ranks told each other, and what the checkpoint has replaced."""
        store = self._s3.within(self._store.limit.for_cleanup())
        identity = SaveIdentity(self.url, claim.save_id)
        try:
            if find_save_id(store, identity) != claim.save_id:
                return
            listed = store.list(self.url.key(joint_object(claim.nonce, ""))).objects
            objects = Manifest.from_json(store.get(self.url.key(manifest_object(claim.save_id))).data).objects
        except (errors.StorageError, errors.CheckpointError, ValueError) as error:
            logger.warning("what the save to %s does not need any more is left for pruning: %s", self.url, error)
            return
        kept = Commit(identity, b"", b"", objects).keys
        delete_quietly(store, {each.key for each in listed} | (self._replaced - kept), "of a save without collectives")

    # --- internal -----------------------------------------------------------------------------------

    def _go_on(self, answer: Any = None, *, error: Exception | None = None, until: str | None = None) -> Any:
        """Go on with the protocol, see `Driver.go_on`; raise what the save fails with, if it ends without a commit."""
        if self._steps is None:
            raise errors.SaveProtocolError("this save has ended", url=str(self.url))
        with self._withdrawing():
            found = self._driver.go_on(self._steps, answer, error=error, until=until)
        if isinstance(found, protocol.Task):
            return found
        self._end()
        verdict, nonce = found
        if self.counted is not None:
            self.counted.decided(verdict)
        if verdict != protocol.COMMITTED:
            raise verdict_error(self.url, verdict, self._driver.claim, nonce, self._driver.error)
        self._was_committed = True
        try:
            found_id = find_save_id(self._s3, self._identity) or ""
            if found_id.startswith(nonce or ""):  # and nobody has replaced it since
                self.save_id, self._identity = found_id, SaveIdentity(self.url, found_id)
            if self.rank != 0:
                return None
            manifest = Manifest.from_json(self._s3.get(self.url.key(manifest_object(self.save_id))).data)
        except (errors.StorageError, ValueError) as unread:
            logger.info("%s is committed (its manifest is not read: %s)", self.url, unread)
            return None
        if made_up := manifest.coordination.get("made_up"):
            names = name_ranks(map(int, made_up))
            logger.warning("%s is committed without %s, which others made up for", self.url, names)
        self._tell_committed(manifest.objects, ranks=self.world_size, spilled=0, copied=None, throttled=self.throttled)
        return None

    def _end(self) -> None:
        self._ended.set()
        self._planner, self._held, self._steps, self._batches = None, [], None, []  # with the state

    @contextlib.contextmanager
    def _withdrawing(self) -> Iterator[None]:
        """Tells the other ranks if the body fails, or is interrupted."""
        try:
            yield
        except BaseException as error:
            if self._steps is not None:
                why = UnreachableError(f"rank {self.rank}: {type(error).__name__}: {error}"[:2000])
                with contextlib.suppress(Exception):
                    self._driver.go_on(self._steps, error=why)
            self._end()
            raise

    def _is_own(self, each: OwnedItem) -> bool:
        return each.owner == self.rank or (bool(_learned) and item_hash(each.item) in _learned)

    def _upload(self, claim: Claim, items: Sequence[WriteItem], *, again: bool = False) -> list[WriteResult]:
        if self._planner is None:
            raise errors.SaveProtocolError("this save has ended", url=str(self.url))
        nonce = claim.nonce + secrets.token_hex(8)
        return self._write_items(items, self._planner, nonce, again=again, watch=self._batches.append)


def begin_joint_save(
    url: CheckpointURL,
    save_id: str,
    settings: Settings,
    *,
    replicas: Replicas = None,
    counted: CountedSave | None = None,
    step: int | None = None,
    **options: Any,
) -> Save:
    """A save of all ranks of the job; a plain one, of ``save_id``, if this is the only one. If the ``options`` of
    `Save` have ``is_blocking``, no rank is here while another one is at an earlier save. A SaveProtocolError if nothing
    tells this attempt from others, or this save from an earlier one."""
    attempt = current_attempt(url, settings) if counted is None else counted.attempt
    if attempt.world_size == 1:
        return Save(url, save_id, settings, **options)
    if settings.spill_dir is not None:
        _warn_of_spilling(str(settings.spill_dir))
    step = step_of(url.name) if step is None else step
    if counted is None and not options.get("is_blocking"):
        counted = count_of(attempt, url, step)
        if step is None and counted.number[2] > 1:
            raise errors.SaveProtocolError(
                f"{url} is saved to again, asynchronously and without collectives, and nothing tells this save from "
                "the one before if that fails on some rank. Remedy: S3StorageWriter(url, step=...), or another URL for "
                "each step",
                url=str(url),
            )
    return JointSave(url, "", settings, attempt=attempt, counted=counted, of_step=step, replicas=replicas, **options)


@functools.cache
def _warn_of_spilling(directory: str) -> None:
    logger.warning("saves without collectives do not spill to DCP_S3_SPILL_DIR=%s: they fail if S3 refuses", directory)


def verdict_error(
    url: CheckpointURL, verdict: str, claim: Claim | None, nonce: str | None, error: Exception | None
) -> Exception:
    """What a rank raises if a save was not committed, or may not have been: it has seen the claim last, and joined the
    save of that nonce (None: none), and that error, if any, is its own."""
    if verdict == protocol.EXISTS:
        return exists_error(url)
    if error is not None and verdict in (ABORTED, protocol.UNKNOWN):
        return error
    # Without a nonce another rank has ended it before this one came to it.
    aborted = claim.why if claim is not None and nonce in (None, claim.nonce) else ""
    why = _WHY.get(verdict) or aborted or _WHY[protocol.SUPERSEDED]
    return errors.SaveProtocolError(
        f"{url} is not committed by this save: {why}; what was there before is untouched", url=str(url)
    )


_NEW_ID = "give each start of the job a DCP_S3_RUN_ID (with torchrun: an --rdzv-id) of its own"
_WHY = {
    protocol.UNKNOWN: "the store could not be reached, and it may have been committed all the same",
    protocol.BEHIND: "other ranks of this run are at a later save to it, or have restored a checkpoint more often. "
    "Remedy: restart all processes together, and call save and restore equally often on all ranks",
    protocol.REFUSED: "another process is, or was, in the place of this rank, or the ranks disagree on WORLD_SIZE. "
    f"Remedy: {_NEW_ID}, or call torch.distributed.init_process_group; and restart all ranks together",
    protocol.SUPERSEDED: "a newer attempt of the training, or a later save, has begun to save there, or the checkpoint "
    "was deleted since. Remedy: end this process, if another one has taken its place; two trainings at a time need two "
    f"URLs; if the job was started anew, with restarts counted from 0 again, {_NEW_ID}",
}
