"""A save whose ranks tell each other what they must through the store alone, see `dcp_s3.coordination`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from dcp_s3.checkpoint.commit import Commit
from dcp_s3.checkpoint.commit_state import SaveIdentity
from dcp_s3.checkpoint.info import find_step
from dcp_s3.coordination.claim import Claim, claim_of
from dcp_s3.coordination.identity import CountedSave, count_save, current_attempt
from dcp_s3.coordination.joint import History, JointSave, Last, find_commit, make_facts
from dcp_s3.coordination.ownership import Replicas, lookup_in, own_items
from dcp_s3.coordination.participant import Participant
from dcp_s3.errors import CheckpointError, SaveProtocolError, StorageError
from dcp_s3.failures import name_ranks
from dcp_s3.format.control_files import Manifest
from dcp_s3.format.layout import manifest_object, new_nonce
from dcp_s3.format.part import Part, WrittenItem, digest_of, item_hash
from dcp_s3.process import collector_paused
from dcp_s3.s3.store import store_of
from dcp_s3.save.objects import ItemWriteResult, ObjectNames, write_buckets
from dcp_s3.save.plan import WriteBucket, plan_buckets
from dcp_s3.save.save import Save, SaveOptions
from dcp_s3.url import CheckpointURL

logger = logging.getLogger(__name__)


_histories: dict[tuple[str, tuple[int, ...]], History] = {}
"""By attempt and ranks."""


def begin_without_collectives(
    url: CheckpointURL,
    save_id: str,
    options: SaveOptions,
    replicas: Replicas,
    ranks: Sequence[int] | None = None,
    kind: type[SaveWithoutCollectives] | None = None,
    counted: CountedSave | None = None,
) -> Save:
    """A save of this rank and others.

    Args:
        url: URL of the checkpoint.
        save_id: random id, for a save of this rank alone.
        options: the writer's options.
        replicas: see `S3StorageWriter`.
        ranks: the ranks of the save's process group; None: all ranks of the job.
        kind: class of the save; None: `SaveWithoutCollectives`.
        counted: see `S3StorageWriter.counted`.

    Raises:
        SaveProtocolError: nothing tells the ranks of this attempt from those of others.
        SettingsError, StorageError
    """
    alone = ranks is not None and len(ranks) == 1
    attempt = None if alone else current_attempt(options.settings, ranks or ()) if counted is None else counted.attempt
    if attempt is None or attempt.world_size == 1:
        return Save(url, save_id, options, rank=0, is_coordinator=True, use_collectives=True)
    members = tuple(range(attempt.world_size) if ranks is None else ranks)
    if options.settings.spill_dir is not None:
        _warn_of_spilling(str(options.settings.spill_dir))
    place = members.index(attempt.rank)
    # Ranks that are not all of the job have ids of their own: two such groups must not be taken for one.
    token = attempt.token + ("" if len(members) == attempt.world_size else f" of {members}")
    joint = dataclasses.replace(attempt, token=token, world_size=len(members), rank=place)
    if counted is None:
        counted = count_save(joint, str(url))
    claim = claim_of(joint, str(url), counted.number, find_step(url.name, options.settings))
    for key in [each for each in list(_histories) if each[0] != attempt.id and each[1] == members]:
        _histories.pop(key, None)  # a process may outlive many process groups
    history = _histories.setdefault((attempt.id, members), History())
    kind = SaveWithoutCollectives if kind is None else kind
    return kind(url, options, claim, counted, ranks=members, place=place, replicas=replicas, history=history)


@functools.cache
def _warn_of_spilling(directory: str) -> None:
    logger.warning("saves without collectives do not spill to DCP_S3_SPILL_DIR=%s: they fail if S3 refuses", directory)


class SaveWithoutCollectives(Save):
    """One rank's part in such a save.

    Args:
        url: URL of the checkpoint.
        options: the writer's options when the save began.
        claim: identity of the save, the same on all ranks.
        counted: the same, as this rank has counted it.
        ranks: the ranks that save, as numbers of the whole job.
        place: place of this rank among them.
        replicas: which ranks hold the same plain tensors and objects, see `S3StorageWriter`.
        history: the saves of this process before this one.
    """

    _spills = False

    def __init__(
        self,
        url: CheckpointURL,
        options: SaveOptions,
        claim: Claim,
        counted: CountedSave,
        *,
        ranks: Sequence[int],
        place: int,
        replicas: Replicas,
        history: History,
    ) -> None:
        super().__init__(url, claim.save, options, rank=place, is_coordinator=place == 0, use_collectives=False)
        self._claim, self._ranks, self._replicas, self._history = claim, tuple(ranks), replicas, history
        self._overwrite = options.overwrite
        self._world_size = len(ranks)
        self._counted = counted
        self._participant: Participant | None = None
        self._planner: SavePlanner | None = None
        self._items: dict[int, WriteItem] = {}
        self._held: frozenset[int] = frozenset()
        self._asked: frozenset[int] = frozenset()
        self._paths: Mapping[str, tuple[str | int, ...]] | None = None
        self._was_committed = False
        self.durable = threading.Event()
        """Set when all that this rank writes is in the store, though the save may not be committed yet."""

    # --- in the order of DCP's calls ----------------------------------------------------------------

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Take part in the save, before any byte moves.

        Raises:
            CheckpointExistsError, SaveProtocolError, StorageError
        """
        self._deadline = self._start_deadline()
        self._taking_part.begin()
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """The plan as it is: each rank knows by itself what it writes."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        """Upload this rank's share of its items. Returns when all objects are complete, or raises and leaves nothing
        open.

        Raises:
            DeadlineExceededError: `save_timeout` has passed.
            StorageError, SaveProtocolError
        """
        began = time.monotonic()
        if self._taking_part.committed is not None:
            return []  # others have made up for this rank
        with collector_paused():
            self._items = {item_hash(item): item for item in plan.items}
            own = self._find_own(plan, planner)
            learned = self._learned(own)
            # What one rank alone has is learned for good. An owner of shards may have been slow only once.
            self._asked |= {item_hash(item) for item in learned if item.type != WriteItemType.SHARD}
            own = [*own, *learned]
        self._planner, self._held = planner, frozenset(self._items)
        self._counted.begun = True
        with self._alive():
            results = self._write(own, attachments=True)
        self.written = True
        self._progress.written(results, time.monotonic() - began)
        return results

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write this rank's part, and wait until the whole is committed, by this rank or another one.

        Raises:
            CheckpointDeletedError: the save took so long that a prune deleted its objects as leftovers.
            CheckpointExistsError: another save has committed meanwhile.
            DeadlineExceededError: `save_timeout` has passed since this rank began to write.
            SaveProtocolError: the save cannot be whole: a rank is dead, and no other one holds the same.
            ShardingError: what the ranks wrote does not fit together.
            StorageError
        """
        try:
            if self._taking_part.committed is None:
                with self._taking_part.alive(self._held, self._attached, is_known=True):
                    self._paths = _paths_in(metadata)
                    self._taking_part.publish(self._make_part([each for rank in results for each in rank], 0))
            self.durable.set()
            committed = self._taking_part.wait(self._write_missing)
        finally:
            self._planner = None  # with the state
        self._history.committed(Last(self._counted.order, self.url, committed, self._digest, self._asked))
        self._report(committed)

    # --- after the save -----------------------------------------------------------------------------

    def is_committed(self) -> bool:
        """Whether the save is committed, and was not replaced since.

        Raises:
            CheckpointError: it was committed, and is no longer there.
            StorageError
        """
        if find_commit(self._s3, self._joint) is not None:
            return True
        if self._was_committed:
            raise CheckpointError(
                f"{self.url} no longer holds this save: it was replaced or deleted", url=str(self.url)
            )
        return False

    def __getstate__(self) -> dict[str, Any]:
        # For a process of its own, which writes and does not commit.
        return {**self.__dict__, "durable": None, "_participant": None, "_history": None}

    # --- internal -----------------------------------------------------------------------------------

    @property
    def _joint(self) -> JointSave:
        return JointSave(
            self.url,
            self._claim,
            self._rank,
            overwrite=self._overwrite,
            rank_timeout=self._settings.rank_timeout,
            step=self._progress.step,
            before=self._find_digests_before,
            members=self._ranks,
        )

    @property
    def _taking_part(self) -> Participant:
        if self._participant is None:
            self._participant = Participant(self._store(), self._joint)
        return self._participant

    @property
    def _attached(self) -> list[str]:
        return [each.name for each in self._options.attachments]

    @property
    def _digest(self) -> str:
        return digest_of(self._held, self._attached)

    def _find_own(self, plan: SavePlan, planner: SavePlanner) -> Sequence[WriteItem]:
        """The items of the plan that this rank is to write."""
        return own_items(
            plan.items, lookup_in(planner), world=self._ranks, rank=self._ranks[self._rank], replicas=self._replicas
        )

    def _alive(self) -> contextlib.AbstractContextManager[None]:
        """Shows while this rank writes that it is alive."""
        return self._taking_part.alive(self._held, self._attached, is_known=self._is_known())

    def _write(self, items: Sequence[WriteItem], *, attachments: bool) -> list[WriteResult]:
        if self._planner is None:
            raise SaveProtocolError("this save has ended", url=str(self.url))
        buckets = plan_buckets(
            items,
            max_buckets=self._options.max_objects,
            min_bucket_size=self._settings.max_part_size,
            separate=self._options.separate,
        )
        if attachments:
            buckets += [WriteBucket((), len(each.data), each) for each in self._options.attachments]
        names = ObjectNames(self.url, self._rank, new_nonce())
        return write_buckets(
            self._store(), buckets, self._planner, self._options.transforms, names, ranks=self._world_size
        )

    def _write_missing(self, hashes: Sequence[int], number: int) -> Part:
        """Write what another rank, now dead, was to write."""
        missing = [each for each in hashes if each not in self._items]
        if missing:
            raise SaveProtocolError(
                f"{self.url}: rank {self._joint.number(self._rank)} is asked for {len(missing)} items that it lacks"
            )
        logger.info("%s: rank %d writes %d items that no other rank has written", self.url, self._rank, len(hashes))
        self._asked |= frozenset(hashes)
        with self._taking_part.alive(self._held, self._attached, is_known=True):
            results = self._write([self._items[each] for each in hashes], attachments=False)
        return self._make_part(results, number)

    def _make_part(self, results: Sequence[WriteResult], number: int) -> Part:
        items = {item.index: item for item in self._items.values()}
        written = [
            WrittenItem(each.index, items[each.index].tensor_data, each.storage_data)
            for each in results
            if each.storage_data is not None
        ]
        objects = [
            each.object_entry for each in results if isinstance(each, ItemWriteResult) and each.object_entry is not None
        ]
        speaks = self._rank == 0 or number > 0
        return Part(
            self._claim.save,
            self._rank,
            self._world_size,
            tuple(written),
            tuple(objects),
            self._held,
            None if self._paths is None else {each.index.fqn: self._paths[each.index.fqn] for each in written},
            number,
            make_facts(
                started_at=self._beginning.at,
                throttled=self._progress.throttled,
                metrics=self._options.metrics if speaks else None,
                extra=self._options.extra if speaks else None,
            ),
        )

    def _learned(self, own: Sequence[WriteItem]) -> list[WriteItem]:
        """What the rule gives to others, but had to be written by this rank in the save before."""
        last = self._history.before(self._counted.order) if self._history is not None else None
        if last is None:
            return []
        return [
            self._items[each] for each in sorted(last.asked & self._items.keys() - {item_hash(item) for item in own})
        ]

    def _is_known(self) -> bool:
        """Whether the save before this one says what this rank holds."""
        last = self._history.before(self._counted.order)
        return last is not None and last.digest == self._digest

    def _find_digests_before(self) -> Sequence[str] | None:
        """What the ranks held in the save before this one, by rank; None: not known."""
        last = self._history.before(self._counted.order)
        if last is None:
            return None
        try:
            manifest = self._read_manifest(last.url, last.save_id)
        except (StorageError, ValueError):
            return None
        found = manifest.coordination.get("digests")
        return found if isinstance(found, list) else None

    def _read_manifest(self, url: CheckpointURL, save_id: str) -> Manifest:
        return Manifest.from_json(store_of(url, self._settings).get(url.key(manifest_object(save_id))).data)

    def _report(self, save_id: str) -> None:
        """Tell what was committed: on the first rank, for all."""
        self.save_id, self._was_committed = save_id, True
        if self._rank != 0:
            return
        try:
            manifest = self._read_manifest(self.url, save_id)
        except (StorageError, ValueError) as error:
            logger.info("%s is committed (its manifest is not read: %s)", self.url, error)
            return
        made_up = manifest.coordination.get("made_up")
        if made_up:
            names = name_ranks(self._ranks[int(place)] for place in made_up)
            logger.warning("%s is committed without %s, which is made up for", self.url, names)
        identity = SaveIdentity(self.url, save_id)
        commit = Commit(identity, b"", b"", manifest.objects)
        self._progress.committed(commit, ranks=self._world_size, spilled=0, throttled=self._progress.throttled)


def _paths_in(metadata: Metadata) -> Mapping[str, tuple[str | int, ...]] | None:
    """Where each name is in the nested state, as DCP's planner says."""
    paths = metadata.planner_data
    if paths is None:
        return None
    if not isinstance(paths, dict) or not all(
        isinstance(name, str) and isinstance(path, tuple) and all(isinstance(step, str | int) for step in path)
        for name, path in paths.items()
    ):
        raise SaveProtocolError(
            f"the planner's data are a {type(paths).__name__} that cannot be merged without collectives. Remedy: use "
            "DefaultSavePlanner, or save with collectives"
        )
    return paths
