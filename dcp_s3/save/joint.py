"""A joint save: several ranks save one checkpoint without collectives, see `dcp_s3.coordination.protocol`."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from dcp_s3 import errors
from dcp_s3.checkpoint.attachments import check_distinct
from dcp_s3.checkpoint.commit import Commit, delete_quietly, versions
from dcp_s3.checkpoint.commit_state import SaveIdentity, exists_error, find_previous, find_save_id
from dcp_s3.checkpoint.info import find_step
from dcp_s3.checkpoint.readback import check_readable
from dcp_s3.coordination import protocol, values
from dcp_s3.coordination.driving import Driver
from dcp_s3.coordination.identity import Attempt, current_attempt
from dcp_s3.coordination.merge import Merging
from dcp_s3.coordination.ownership import OwnedItem, Replicas, find_owners, lookup_in
from dcp_s3.coordination.processes import CountedSave, count_of, make_member
from dcp_s3.coordination.values import NONCE_DIGITS, OPEN, Claim, Intent, Join, Key, Merged, Write
from dcp_s3.failures import name_ranks
from dcp_s3.format.control_files import Manifest
from dcp_s3.format.layout import joint_object, manifest_object, new_nonce
from dcp_s3.format.part import Part, WrittenItem, digest_of, encode, item_hash
from dcp_s3.process import collector_paused
from dcp_s3.save.objects import ItemWriteResult
from dcp_s3.save.save import Save, SaveOptions
from dcp_s3.store import Batch
from dcp_s3.url import CheckpointURL

logger = logging.getLogger(__name__)

_learned: set[int] = set()
"""Hashes of items that this process had to write besides its own: what one rank alone has, by a rule that gives it to
others. It writes them at once from then on."""


class JointSave(Save):
    """One rank's part in such a save. Without ``counted`` the ranks save in lockstep."""

    _spills = False

    def __init__(
        self,
        url: CheckpointURL,
        options: SaveOptions,
        attempt: Attempt,
        counted: CountedSave | None,
        step: int | None,
        replicas: Replicas,
    ) -> None:
        super().__init__(url, "", options, rank=attempt.rank, is_coordinator=attempt.rank == 0)
        self._attempt, self._counted, self._step = attempt, counted, step
        self._replicas, self._world_size = replicas, attempt.world_size
        self._nonce: str | None = None
        self._was_committed = False
        self._planner: SavePlanner | None = None
        self._held: list[OwnedItem] = []
        self._results: list[WriteResult] = []
        self._paths: Mapping[str, tuple[str | int, ...]] | None = None
        self._replaced: frozenset[str] = frozenset()
        self._batches: list[Batch] = []
        self._ended = threading.Event()
        self._driver: Driver | None = None
        self._steps: protocol.Steps[tuple[str, str | None]] | None = None

    # --- in the order of DCP's calls ----------------------------------------------------------------

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Join the save, before any byte moves."""
        self._deadline = self._start_deadline()
        member = make_member(self._attempt, self.url, overwrite=self._options.overwrite)
        self._driver = Driver(self._store(), self.url, member, self._settings.rank_timeout, self)
        self._steps = protocol.save(member, None if self._counted is None else self._counted.number, self._step)
        self._go_on(None, Join)
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
                plan.items, lookup_in(planner), world_size=self._world_size, rank=self._rank, replicas=self._replicas
            )
            intent = self.join(None)
        asked = self._go_on(intent, Write)
        with self._withdrawing():
            threading.Thread(
                target=self._going.show_progress, args=(self._ended,), name="dcp_s3-progress", daemon=True
            ).start()
            answer = self._going.carry_out(asked)
        if answer != b"":
            self._go_on(answer)
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

    # --- after the save -----------------------------------------------------------------------------

    def is_committed(self) -> bool:
        """Whether the save is committed, and was not replaced since. A CheckpointError if it is no longer there."""
        identity = SaveIdentity(self.url, self.save_id)
        try:
            found = find_save_id(self._s3, identity)
        except errors.ObjectNotFoundError:
            found = None
        if found is not None and found[:NONCE_DIGITS] == self._nonce:
            return True
        if self._was_committed:
            raise errors.CheckpointError(
                f"{self.url} no longer holds this save: it was replaced or deleted", url=str(self.url)
            )
        return False

    # --- what the driver calls ------------------------------------------------------------------------

    @property
    def moved(self) -> int:
        """Bytes that this rank has uploaded so far."""
        return sum(each.sent for each in self._batches)

    def join(self, _: Claim | None) -> Intent:
        """What this rank says of itself when it joins."""
        writes: list[int] = []
        leaves: list[int] = []
        for each in self._held:
            if len(each.holders) > 1:
                (writes if self._is_own(each) else leaves).append(item_hash(each.item))
        held = (item_hash(each.item) for each in self._held)
        digest = digest_of(held, [each.name for each in self._options.attachments])
        return Intent("", 0, digest, tuple(writes), tuple(leaves))

    def write(self, claim: Claim, rank: int, intent: Intent | None) -> bytes:
        """Write this rank's share, or what is left to be written of any rank's: then returns its part."""
        if claim.state == OPEN:
            own = [each.item for each in self._held if self._is_own(each)]
            self._results = self._upload(claim, own)
            return b""
        more = {*self._going.read_roll(claim, rank), *(intent.writes if intent is not None else ())}
        missing = [each.item for each in self._held if more and item_hash(each.item) in more]
        results = self._upload(claim, missing, again=True)
        if rank == self._rank:
            _learned.update(item_hash(each) for each in missing if each.type != WriteItemType.SHARD)
            results = [*self._results, *results]
        else:
            logger.warning("%s: rank %d writes what rank %d was to write", self.url, self._rank, rank)
        return encode(self._make_part(claim, rank, results))

    def merge(self, claim: Claim, parts: Iterator[bytes]) -> Merged:
        """Make the checkpoint of all parts, and write all of it but ``.metadata``."""
        merging, sample = (Merging(claim.nonce, self._world_size) for _ in range(2))
        for number, data in enumerate(parts):
            if merging.add(data) or not number:
                sample.add(data)
        store, identity = self._store(), SaveIdentity(self.url, claim.nonce + new_nonce()[:8])
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
            world_size=self._world_size,
            objects=merged.objects,
            items=merged.items,
            metrics=dict(facts.get("metrics") or {}),
            extra=dict(facts.get("extra") or {}),
            writer=versions(),
            started_at=min(float(each["started_at"]) for each in merging.facts),
            coordination={
                "save": claim.nonce, "run": claim.run, "restart": claim.restart, "merged_by": self._rank,
                "made_up": made_up,
            },
        )  # fmt: skip
        self._replaced = find_previous(store, identity).keys if self._options.overwrite else frozenset()
        store.put(identity.url.key(Key("merged", identity.save_id).path), merged.metadata)
        store.put(identity.manifest_key, manifest.to_json())
        return Merged(identity.save_id, merged.metadata)

    def clean(self, claim: Claim) -> None:
        """Remove what the ranks told each other, and what the checkpoint has replaced."""
        store = self._s3.within(self._store().limit.for_cleanup())
        identity = SaveIdentity(self.url, claim.save_id)
        try:
            if find_save_id(store, identity) != claim.save_id:
                return
            listed = store.list(self.url.key(joint_object(claim.nonce, ""))).objects
            objects = Manifest.from_json(store.get(identity.manifest_key).data).objects
        except (errors.StorageError, errors.CheckpointError, ValueError) as error:
            logger.warning("what the save to %s does not need any more is left for pruning: %s", self.url, error)
            return
        kept = Commit(identity, b"", b"", objects).keys
        delete_quietly(store, {each.key for each in listed} | (self._replaced - kept), "of a save without collectives")

    # --- internal -----------------------------------------------------------------------------------

    @property
    def _going(self) -> Driver:
        if self._driver is None:
            raise errors.SaveProtocolError("this save has not begun", url=str(self.url))
        return self._driver

    def _go_on(self, answer: Any, until: type | None = None) -> Any:
        """Go on with the protocol; raise what the save fails with, if it ends without a commit."""
        driver, steps = self._going, self._steps
        if steps is None:
            raise errors.SaveProtocolError("this save has ended", url=str(self.url))
        with self._withdrawing():
            found = driver.go_on(steps, answer, until=until)
        if until is not None and isinstance(found, until):
            return found
        self._end()
        verdict, self._nonce = found
        if self._counted is not None:
            self._counted.decided(verdict)
        if verdict != values.COMMITTED:
            raise verdict_error(self.url, verdict, driver.claim, self._nonce, driver.error)
        self._report()
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
            if self._driver is not None and self._steps is not None:
                with contextlib.suppress(Exception):
                    self._driver.leave(self._steps, f"rank {self._rank}: {type(error).__name__}: {error}"[:2000])
            self._end()
            raise

    def _is_own(self, each: OwnedItem) -> bool:
        return each.owner == self._rank or (bool(_learned) and item_hash(each.item) in _learned)

    def _upload(self, claim: Claim, items: Sequence[WriteItem], *, again: bool = False) -> list[WriteResult]:
        if self._planner is None:
            raise errors.SaveProtocolError("this save has ended", url=str(self.url))
        nonce = claim.nonce + new_nonce()
        return self._write_items(items, self._planner, nonce, again=again, watch=self._batches.append)

    def _make_part(self, claim: Claim, rank: int, results: Sequence[WriteResult]) -> Part:
        items = {each.item.index: each.item for each in self._held}
        written = [
            WrittenItem(
                each.index, items[each.index].tensor_data, each.storage_data,
                items[each.index].type == WriteItemType.SHARD,
            )
            for each in results
            if each.storage_data is not None
        ]  # fmt: skip
        objects = [
            each.object_entry for each in results if isinstance(each, ItemWriteResult) and each.object_entry is not None
        ]
        facts: dict[str, Any] = {"started_at": self._beginning.at, "by": self._rank}
        if rank == 0:
            facts |= {"metrics": dict(self._options.metrics), "extra": dict(self._options.extra)}
        paths = None if self._paths is None else {each.index.fqn: self._paths[each.index.fqn] for each in written}
        return Part(claim.nonce, rank, self._world_size, tuple(written), tuple(objects), paths, facts)

    def _report(self) -> None:
        """Tell what was committed: on the first rank, for all."""
        self._was_committed = True
        try:
            identity = SaveIdentity(self.url, "")
            self.save_id = find_save_id(self._s3, identity) or ""
            if self._rank != 0:
                return
            manifest = Manifest.from_json(self._s3.get(self.url.key(manifest_object(self.save_id))).data)
        except (errors.StorageError, ValueError) as error:
            logger.info("%s is committed (its manifest is not read: %s)", self.url, error)
            return
        if made_up := manifest.coordination.get("made_up"):
            names = name_ranks(map(int, made_up))
            logger.warning("%s is committed without %s, which others made up for", self.url, names)
        commit = Commit(SaveIdentity(self.url, self.save_id), b"", b"", manifest.objects)
        self._tell_committed(commit, ranks=self._world_size, spilled=0, copied=None, throttled=self.throttled)


def begin_joint_save(
    url: CheckpointURL,
    save_id: str,
    options: SaveOptions,
    replicas: Replicas,
    *,
    counted: CountedSave | None = None,
    step: int | None = None,
    in_lockstep: bool = True,
) -> Save:
    """A save of all ranks of the job; a plain one, of ``save_id``, if this is the only one. ``in_lockstep``: it is
    synchronous, so no rank is here while another one is at an earlier save. A SaveProtocolError if nothing tells this
    attempt from others, or this save from an earlier one."""
    attempt = current_attempt(url, options.settings) if counted is None else counted.attempt
    if attempt.world_size == 1:
        return Save(url, save_id, options, rank=0, is_coordinator=True)
    if options.transforms.extensions:
        raise errors.SaveProtocolError(
            f"{url} is not saved: stream extensions need a save with collectives. Remedy: use_collectives=True, or no "
            "_extensions",
            url=str(url),
        )
    if options.settings.spill_dir is not None:
        _warn_of_spilling(str(options.settings.spill_dir))
    step = find_step(url.name, options.settings) if step is None else step
    if counted is None and not in_lockstep:
        counted = count_of(attempt, url, step)
        if step is None and not counted.is_new:
            raise errors.SaveProtocolError(
                f"{url} is saved to again, asynchronously and without collectives, and nothing tells this save from "
                "the one before if that fails on some rank. Remedy: S3StorageWriter(url, step=...), or another URL for "
                "each step",
                url=str(url),
            )
    return JointSave(url, options, attempt, counted, step, replicas)


@functools.cache
def _warn_of_spilling(directory: str) -> None:
    logger.warning("saves without collectives do not spill to DCP_S3_SPILL_DIR=%s: they fail if S3 refuses", directory)


def verdict_error(
    url: CheckpointURL, verdict: str, claim: Claim | None, nonce: str | None, error: Exception | None
) -> Exception:
    """What a rank raises if a save was not committed, or may not have been.

    Args:
        claim: as the rank has seen it last.
        nonce: of the save; None if the rank has not joined it.
        error: what failed on this rank, if anything did.
    """
    if verdict == values.EXISTS:
        return exists_error(url)
    if error is not None and verdict in (values.ABORTED, values.UNKNOWN):
        return error
    # Without a nonce another rank has ended it before this one came to it.
    aborted = claim.why if claim is not None and nonce in (None, claim.nonce) else ""
    why = _WHY.get(verdict) or aborted or _WHY[values.SUPERSEDED]
    return errors.SaveProtocolError(
        f"{url} is not committed by this save: {why}; what was there before is untouched", url=str(url)
    )


_NEW_ID = "give each start of the job a DCP_S3_RUN_ID (with torchrun: an --rdzv-id) of its own"
_WHY = {
    values.UNKNOWN: "the store could not be reached, and it may have been committed all the same",
    values.BEHIND: "other ranks of this run are at a later save to it, or have restored a checkpoint more often. "
    "Remedy: restart all processes together, and call save and restore equally often on all ranks",
    values.REFUSED: "another process is, or was, in the place of this rank, or the ranks disagree on WORLD_SIZE. "
    f"Remedy: {_NEW_ID}, or call torch.distributed.init_process_group; and restart all ranks together",
    values.SUPERSEDED: "a newer attempt of the training, or a later save, has begun to save there, or the checkpoint "
    "was deleted since. Remedy: end this process, if another one has taken its place; two trainings at a time need two "
    f"URLs; if the job was started anew, with restarts counted from 0 again, {_NEW_ID}",
}
