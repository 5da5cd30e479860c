"""Finds everything under a root that retention decides on."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dcp_s3 import errors
from dcp_s3.checkpoint.info import CheckpointInfo, LeftoverObject, age_order, newest_first
from dcp_s3.checkpoint.look import find_damage, inspect, look_deeper, tell_unreadable
from dcp_s3.coroutines import map_bounded
from dcp_s3.format.layout import BOARD_PREFIX, CONTROL_PREFIX, What, classify
from dcp_s3.reprs import one_line
from dcp_s3.retention.plan import OpenUpload, Plan, make_plan
from dcp_s3.retention.policy import PolicyFunction
from dcp_s3.s3.async_store import AsyncS3Store
from dcp_s3.store import ListedObject, Upload
from dcp_s3.units import plural
from dcp_s3.url import CheckpointURL

logger = logging.getLogger(__name__)

# Path parts that no checkpoint URL may have, and our own directory: with boards, or of a root that is a checkpoint.
_CONTROL = CONTROL_PREFIX.rstrip("/")
_NO_CHILD = frozenset({"", ".", "..", _CONTROL})

# Attempts to look at a checkpoint that was listed, but whose .metadata is gone a moment later.
_LOOKS = 4


@dataclass(frozen=True)
class CatalogSnapshot:
    """The contents of a root at one time.

    >>> snapshot = CheckpointCatalog("s3://bucket/run").scan()
    >>> snapshot
    CatalogSnapshot('s3://bucket/run', 2 checkpoints)
    >>> snapshot.plan(KeepLatest(2), grace=86400)
    Plan(2 kept, 0 to delete (0 B))
    """

    root: str
    """URL of the root."""
    now: float
    """Seconds since the epoch, on the clock of S3, from before anything else was looked at."""
    checkpoints: tuple[CheckpointInfo, ...]
    """Checkpoints, oldest first (`age_order`)."""
    uploads: tuple[OpenUpload, ...] = ()
    """Open multipart uploads of data objects in directories right under the root, by key."""
    leftovers: tuple[LeftoverObject, ...] = ()
    """Objects in committed checkpoints' directories that the checkpoints do not need, by key; empty unless ``deep``."""
    deep: bool = False
    """Whether each committed checkpoint's objects were listed."""
    requests: int = 0
    """Number of requests that the scan took."""
    boards: tuple[ListedObject, ...] = ()
    """Objects through which ranks told each other something, by key; empty unless ``deep``."""

    def __repr__(self) -> str:
        counts = {"uploads": len(self.uploads) or None, "leftovers": len(self.leftovers) or None}
        return one_line("CatalogSnapshot", repr(self.root), f"{plural(len(self.checkpoints), 'checkpoint')}", **counts)

    def plan(self, policy: PolicyFunction | None, *, grace: float) -> Plan:
        """`make_plan` for this snapshot.

        Raises:
            PolicyError: the policy failed or answered nonsense.
        """
        return make_plan(
            self.checkpoints, policy, now=self.now, grace=grace, uploads=self.uploads, leftovers=self.leftovers,
            boards=self.boards,
        )  # fmt: skip


@dataclass(frozen=True)
class Listing:
    """The checkpoints under a root."""

    found: tuple[CheckpointInfo, ...]
    """Checkpoints, oldest first."""
    now: float
    """Seconds since the epoch on the clock of S3, from before they were looked at."""
    leftovers: tuple[LeftoverObject, ...] = ()
    """Leftover objects, as in `CatalogSnapshot`."""
    boards: tuple[ListedObject, ...] = ()
    """As in `CatalogSnapshot`."""


async def list_root(
    store: AsyncS3Store, root: CheckpointURL, patterns: Sequence[re.Pattern[str]] = (), *, deep: bool = False
) -> Listing:
    """The checkpoints directly under ``root``.

    Args:
        store: store with the root.
        root: the URL above the checkpoints.
        patterns: expressions that find the step in a name, instead of the rules of `step_of`.
        deep: also look for leftovers and damage in committed ones: one more listing and HEAD for each.

    Raises:
        StorageError
    """
    listed = await store.list(root.key(""), "/")
    now = listed.server_time
    if now is None:
        logger.warning("the S3 endpoint does not tell its time; ages are by the clock of this host")
        now = time.time()
    skip = len(root.key(""))
    names = [prefix[skip:-1] for prefix in listed.prefixes]
    del listed
    boards: Sequence[ListedObject] = ()
    if deep and _CONTROL in names:
        boards = (await store.list(root.key(BOARD_PREFIX))).objects
    leftovers: list[LeftoverObject] = []

    async def look(name: str) -> CheckpointInfo | None:
        url = root.child(name)
        found = None
        for attempt in range(_LOOKS):
            await asyncio.sleep(0.05 * (2**attempt - 1))
            found = await inspect(store, url, patterns)
            if found is None or not deep or not found.info.committed:
                return None if found is None else found.info
            try:
                info, unneeded = await look_deeper(store, url, found, now)
            except errors.ObjectNotFoundError:
                continue  # deleted meanwhile
            leftovers.extend(unneeded)
            return info
        if found is None:
            return None
        return dataclasses.replace(found.info, damage="its .metadata is listed, but cannot be read")

    looked = await map_bounded(look, [name for name in names if name not in _NO_CHILD])
    found = sorted((info for info in looked if info is not None), key=age_order)
    return Listing(tuple(found), now, tuple(sorted(leftovers, key=lambda each: each.key)), tuple(boards))


async def scan_root(
    store: AsyncS3Store,
    root: CheckpointURL,
    patterns: Sequence[re.Pattern[str]] = (),
    *,
    deep: bool,
    local: Iterable[CheckpointInfo] = (),
) -> CatalogSnapshot:
    """Scan ``root`` for everything that a plan needs.

    With ``deep``, it then checks the newest checkpoints like `latest` does, until one can be loaded.

    Args:
        store: store with the root.
        root: the URL above the checkpoints.
        patterns: expressions that find the step in a name, instead of the rules of `step_of`.
        deep: also look for leftovers and damage.
        local: checkpoints whose commits wait in this host's spill directory.

    Raises:
        StorageError
    """
    # Before the objects: an upload that completes meanwhile is then seen as an upload, an object, or both.
    uploads = sorted(await store.uploads(root.key("")), key=lambda each: (each.key, each.upload_id))
    listing = await list_root(store, root, patterns, deep=deep)
    found = {info.name: info for info in listing.found}
    if deep:
        damages: dict[str, str] = {}
        loadable = None
        for info in newest_first(listing.found):
            damage = info.damage or await find_damage(store, root.child(info.name))
            found[info.name] = dataclasses.replace(info, damage=damage)
            if damage is None:
                loadable = info.url
                break
            damages[info.url] = damage
        tell_unreadable(damages, loadable)
    return CatalogSnapshot(
        root=str(root),
        now=listing.now,
        checkpoints=tuple(sorted(merge_local(found.values(), local), key=age_order)),
        uploads=tuple(each for upload in uploads if (each := open_upload(root, upload)) is not None),
        leftovers=listing.leftovers,
        deep=deep,
        requests=store.requests,
        boards=listing.boards,
    )


def merge_local(found: Iterable[CheckpointInfo], local: Iterable[CheckpointInfo]) -> list[CheckpointInfo]:
    """The checkpoints on S3 merged with those whose commits wait on this host, one per name."""
    merged = {info.name: info for info in found}
    for info in local:
        before = merged.get(info.name)
        keep = before if before is not None and before.committed else info
        merged[info.name] = dataclasses.replace(keep, waiting=True)
    return list(merged.values())


def open_upload(root: CheckpointURL, upload: Upload) -> OpenUpload | None:
    """An open upload of a data object in a directory right under ``root``; None if it is of anything else."""
    name, _, path = upload.key[len(root.key("")) :].partition("/")
    if not name or classify(path).what is not What.DATA:
        return None
    return OpenUpload(upload.key, upload.upload_id, upload.initiated_at, name)
