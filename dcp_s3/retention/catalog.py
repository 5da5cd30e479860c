"""The catalog: which checkpoints lie under a root, and from which one to resume.

It takes one listing of the root, and two to four small requests for each checkpoint (`inspect`). Data objects are not
touched. `latest` looks closer at the checkpoint that it returns.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from itertools import chain
from typing import Any

from dcp_s3 import errors
from dcp_s3.checkpoint.commit_state import check_metadata, not_found_error
from dcp_s3.checkpoint.directory import Directory
from dcp_s3.checkpoint.info import CheckpointInfo, LeftoverObject, age_order, summarize
from dcp_s3.checkpoint.look import Inspected, find_damage, inspect, tell_unreadable
from dcp_s3.format.control_files import Manifest
from dcp_s3.format.layout import BOARD_PREFIX, METADATA, What, classify, step_of
from dcp_s3.format.saved_entries import SavedEntry, needed_objects, saved_entries
from dcp_s3.retention.plan import BOARDS, BOARDS_STAY, CatalogSnapshot, OpenUpload
from dcp_s3.s3.store import store_of
from dcp_s3.settings import SettingsLike, resolve_settings
from dcp_s3.spill.local import find_commits
from dcp_s3.spill.store import SpillStore
from dcp_s3.store import Store
from dcp_s3.url import URLLike, parse_url

logger = logging.getLogger(__name__)

# Path parts that no checkpoint URL may have, and our own directory: with boards, or of a root that is a checkpoint.
_NO_CHILD = frozenset({"", ".", "..", BOARDS})


class CheckpointCatalog:
    """The checkpoints directly under a root, with everything that retention decides on. Holds no connection.

    >>> CheckpointCatalog("s3://bucket/run").latest().step
    2000

    Args:
        root: ``s3://bucket/run`` for checkpoints at ``s3://bucket/run/step-1000`` and so on. The step of one is the
            number after ``step``, ``iter``, ``checkpoint`` or ``epoch`` in its name, or all of it, if that is a number.
        settings: a `Settings`, or a mapping of those that differ from the environment.
        store: where the checkpoints are, if not in the root's bucket as the settings reach it.
    """

    def __init__(self, root: URLLike, *, settings: SettingsLike = None, store: Store | None = None) -> None:
        self.root = parse_url(root)
        self.settings = resolve_settings(settings)
        self.store = store_of(self.root, self.settings) if store is None else store

    def checkpoints(self) -> list[CheckpointInfo]:
        """The checkpoints, oldest first. An uncommitted one is ``in_progress``, or ``leftover`` if it is older than the
        grace period (setting ``retention_grace``). One that waits in this host's spill directory is ``local``.

        >>> [(info.step, info.state) for info in CheckpointCatalog("s3://bucket/run").checkpoints()]
        [(1000, 'committed'), (2000, 'committed')]

        Raises StorageError: missing bucket, credentials, permissions, network.
        """
        now, _, infos, _ = self._look(self.local())
        since, found = now - self.settings.retention_grace, []
        for info in infos:
            if info.state == "incomplete":
                young = info.modified_at is None or info.modified_at > since
                info = replace(info, state="in_progress" if young else "leftover")
            found.append(info)
        return found

    def scan(self) -> CatalogSnapshot:
        """Everything that a plan needs: also leftovers in the directories of committed checkpoints, damage, and open
        multipart uploads. Takes two requests for each checkpoint and 1000 objects. Raises StorageError.

        >>> CheckpointCatalog("s3://bucket/run").scan().leftovers
        ()
        """
        local, start = self.local(), self.root.key("")
        # Before the objects: an upload that completes meanwhile is then seen as an upload, an object, or both.
        uploads = []
        for each in sorted(self.store.uploads(start), key=lambda each: (each.key, each.upload_id)):
            name, _, path = each.key[len(start) :].partition("/")
            if name and classify(path).what is What.DATA:
                uploads.append(OpenUpload(each.key, each.upload_id, each.initiated_at, name))
        now, names, infos, found = self._look(local, whole=True)
        boards = self.store.list(self.root.key(BOARD_PREFIX)).objects if BOARDS in names else ()
        leftovers = [
            LeftoverObject(each.key, each.size, each.modified_at, BOARDS, etag=each.etag)
            for each in boards
            if each.modified_at < now - BOARDS_STAY
        ]
        damages, loadable = dict[str, str](), None
        for info in reversed(infos):  # as `latest` does, until one can be loaded
            if info.committed:
                damage = info.damage or find_damage(self.store, found[info.name].url, found[info.name])
                if damage is None:
                    loadable = info.url
                    break
                damages[info.url] = damage
        tell_unreadable(damages, loadable)
        return CatalogSnapshot(
            root=str(self.root),
            now=now,
            checkpoints=tuple(replace(info, damage=damages.get(info.url, info.damage)) for info in infos),
            uploads=tuple(uploads),
            leftovers=tuple(
                sorted(chain(leftovers, *(each.leftovers for each in found.values())), key=lambda left: left.key)
            ),
        )

    def latest(self) -> CheckpointInfo | None:
        """The checkpoint to resume from, as in `dcp_s3.latest`: it can be loaded. None if there is none. Raises
        StorageError.

        >>> CheckpointCatalog("s3://bucket/run").latest().url
        's3://bucket/run/step-00002000'
        """
        while True:
            damages: dict[str, str] = {}
            _, _, infos, found = self._look()
            for info in reversed(infos):
                if not info.committed:
                    continue
                url = found[info.name].url
                damage = find_damage(self.store, url)
                if damage is None:
                    tell_unreadable(damages, info.url)
                    return info
                now = inspect(self.store, url)
                if now is None or not now.info.committed:
                    break  # a prune was faster: there is a newer one
                damages[info.url] = damage
            else:
                tell_unreadable(damages, None)
                return None

    def local(self) -> list[CheckpointInfo]:
        """The checkpoints whose commits wait in this host's spill directory, oldest first. Makes no request.

        >>> CheckpointCatalog("s3://bucket/run", settings={"spill_dir": "/nvme/spill"}).local()
        []
        """
        return sorted((info for info, _ in self.waiting()), key=age_order)

    def waiting(self) -> list[tuple[CheckpointInfo, Manifest]]:
        """The ``local`` checkpoints and their manifests, in the order in which they were saved.

        >>> CheckpointCatalog("s3://bucket/run").waiting()
        []
        """
        found: list[tuple[CheckpointInfo, Manifest]] = []
        if self.settings.spill_dir is None:
            return found
        for journal, data, _ in find_commits(SpillStore(self.settings.spill_dir)):
            url = parse_url(journal.url)
            if str(url) == str(self.root.child(url.name)):
                manifest = Manifest.from_json(data)
                info = summarize(url, Directory.of_sizes({METADATA: 0}), {None: manifest})
                found.append((replace(info, state="local", etag=None, modified_at=None), manifest))
        return found

    def _look(
        self, local: Collection[CheckpointInfo] = (), *, whole: bool = False
    ) -> tuple[float, dict[str, int], list[CheckpointInfo], dict[str, Inspected]]:
        """When the root was listed, by the clock of S3; the names right there, with their steps; the checkpoints among
        them and the ``local`` ones, one per name, oldest first; and what was found of them on S3, by name.

        That of the highest step is there, or a higher one. ``local`` was found before: a checkpoint drained meanwhile
        is then seen twice, not missed.
        """
        while True:
            now, names, found = self._inspect(whole=whole)
            newest = max((names[each.info.name] for each in found.values() if each.info.committed), default=-2)
            # A prune may be faster than a look at what was the newest: then there is a newer one.
            above = any(step > newest for step in names.values())
            if not above or not any(each.info.committed for each in self._inspect(newest)[2].values()):
                break
        infos = {name: each.info for name, each in found.items()}
        for info in local:
            before = infos.get(info.name)
            keep = before if before is not None and before.committed else info
            infos[info.name] = replace(keep, waiting=True)
        return now, names, sorted(infos.values(), key=age_order), found

    def _inspect(self, above: int = -2, *, whole: bool = False) -> tuple[float, dict[str, int], dict[str, Inspected]]:
        """One look, at what has a step ``above`` this one; -1 stands for none."""
        start = self.root.key("")
        listed = self.store.list(start, "/")
        now = time.time() if listed.server_time is None else listed.server_time
        steps = {name: step_of(name) for name in (prefix[len(start) : -1] for prefix in listed.prefixes)}
        names = {name: -1 if step is None else step for name, step in steps.items()}
        looked = self.store.map(
            lambda store, name: inspect(store, self.root.child(name), whole=whole),
            [name for name, step in names.items() if step > above and name not in _NO_CHILD],
        )
        return now, names, {each.info.name: each for each in looked if each is not None}


def list_checkpoints(root: URLLike, *, settings: SettingsLike = None) -> list[CheckpointInfo]:
    """The checkpoints directly under ``root``, committed or not, by step, time and name. Arguments and errors:
    `CheckpointCatalog.checkpoints`.

    ``committed`` says that the commit is there; it does not look at every data object, as `latest` does.

    >>> [(info.step, info.metrics) for info in list_checkpoints("s3://bucket/run")]
    [(1000, {'val_loss': 1.25}), (2000, {'val_loss': 1.5})]
    """
    return CheckpointCatalog(root, settings=settings).checkpoints()


def latest(root: URLLike, *, include_uncommitted: bool = False, settings: SettingsLike = None) -> CheckpointInfo | None:
    """The checkpoint to resume from: the committed one under ``root`` with the highest step, then the newest. None if
    there is none.

    It can be loaded: its metadata is readable, and every data object that it names is there and long enough. Others
    are skipped with a warning in the log.

    >>> latest("s3://bucket/run").step
    2000

    Args:
        root: the URL above the checkpoints.
        include_uncommitted: also consider checkpoints whose commit still waits in this host's spill directory
            (``state`` is ``local``). Meant for a job on one host: on several, parts of such a checkpoint may be
            missing. To load one, S3StorageReader needs ``include_uncommitted``, too.
        settings: a `Settings`, or a mapping of those that differ from the environment.

    Raises:
        InvalidURLError, SettingsError
        StorageError: missing bucket, credentials, permissions, network. Never None because of a failure.
    """
    catalog = CheckpointCatalog(root, settings=settings)
    waiting = catalog.local() if include_uncommitted else []
    try:
        found = catalog.latest()
    except errors.TransferError as error:
        if not waiting:
            raise
        logger.warning("S3 does not answer, so that only this host's spill directory was looked at: %s", error)
        found = None
    return max([*waiting, *([] if found is None else [found])], key=age_order, default=None)


# --- one checkpoint, for people to read ----------------------------------------------------------------


@dataclass(frozen=True)
class ObjectDetails:
    """One data object of a checkpoint."""

    path: str
    """Path relative to the checkpoint."""
    size: int | None
    """Bytes; None if the metadata names it but it is not there."""
    crc64nvme: str | None
    """CRC-64/NVME as recorded in the manifest, 16 hex digits; None if not recorded."""
    used: bool
    """Whether the checkpoint needs it; otherwise it is a leftover of another save."""
    attachment: str | None = None
    """Name of the attachment that it holds; None if it holds items."""


@dataclass(frozen=True)
class CheckpointDetails:
    """Details of one checkpoint. Made by `describe`.

    >>> [entry.fqn for entry in describe("s3://bucket/run/step-00001000").entries]
    ['weight', 'step']
    """

    info: CheckpointInfo
    """The catalog's summary, including metrics that were added after the save."""
    writer: dict[str, str]
    """Library versions that wrote it; empty if it is foreign."""
    items: int
    """Number of saved items (tensor chunks and others)."""
    objects: tuple[ObjectDetails, ...]
    """Data objects of the checkpoint."""
    entries: tuple[SavedEntry, ...]
    """Entries of the saved state dict; empty if the checkpoint is incomplete."""

    def to_dict(self) -> dict[str, Any]:
        """The fields, for JSON."""
        return asdict(self)


def describe(where: URLLike, *, settings: SettingsLike = None, store: Store | None = None) -> CheckpointDetails:
    """Look at what a checkpoint holds: its listing, manifests and metadata, no data. Takes those of other DCP writers,
    and those that each rank committed for itself, too.

    >>> sum(entry.parameters for entry in describe("s3://bucket/run/step-00001000").entries)
    8

    Raises:
        CheckpointNotFoundError: nothing of a checkpoint is there.
        CorruptCheckpointError, UnsafeMetadataError: its metadata cannot, or must not, be read.
        InvalidURLError, SettingsError, StorageError
    """
    url = parse_url(where)
    store = store_of(url, resolve_settings(settings)) if store is None else store
    looked = inspect(store, url, whole=True)
    if looked is None:
        raise not_found_error(url, "nothing of a checkpoint")
    directory, manifests = looked.directory, list(looked.manifests.values())
    ranks = directory.committing
    commits = store.map(lambda store, rank: store.get(directory.commits[rank].key), ranks)
    metadata = [check_metadata(stored, url, rank) for rank, stored in zip(ranks, commits, strict=True)]
    entries: dict[str, SavedEntry] = {}
    for entry in chain(*map(saved_entries, metadata)):  # each rank describes only what it wrote
        if before := entries.get(entry.fqn):
            chunks, size = before.chunks + entry.chunks, before.size + entry.size
            entry = replace(entry, chunks=chunks, size=size, checksum=None)
        entries[entry.fqn] = entry
    recorded = {entry.path: entry.crc64nvme for manifest in manifests for entry in manifest.objects}
    attached = {entry.path: name for manifest in manifests for name, entry in manifest.attachments.items()}
    needed = {*attached, *chain(*map(needed_objects, metadata))}
    sizes: dict[str, int | None] = dict.fromkeys(needed) | {path: each.size for path, each in directory.data.items()}
    return CheckpointDetails(
        info=looked.info,
        writer=manifests[0].writer if manifests else {},
        items=sum(len(loaded.storage_data or {}) for loaded in metadata),
        objects=tuple(
            ObjectDetails(path, sizes[path], recorded.get(path), path in needed, attached.get(path))
            for path in sorted(sizes)
        ),
        entries=tuple(entries.values()),
    )
