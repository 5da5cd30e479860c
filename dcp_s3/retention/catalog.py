"""The catalog: which checkpoints lie under a root, and from which one to resume.

It takes one listing of the root, and two to four small requests for each checkpoint (`inspect`). Data objects are not
touched. `latest` and `best` look closer at the checkpoint that they return.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from dcp_s3 import errors
from dcp_s3.checkpoint.directory import time_of
from dcp_s3.checkpoint.info import (
    CheckpointInfo,
    LeftoverObject,
    age_order,
    from_manifest,
    in_grace,
    newest_first,
    with_step,
)
from dcp_s3.checkpoint.look import find_damage, inspect, inspect_checkpoint, look_deeper, tell_unreadable
from dcp_s3.format.control_files import Manifest
from dcp_s3.format.layout import BOARD_PREFIX, CONTROL_PREFIX, What, classify
from dcp_s3.retention.plan import OpenUpload, Plan, make_plan
from dcp_s3.retention.policy import Mode, PolicyFunction, best_first
from dcp_s3.s3.store import store_of
from dcp_s3.settings import Settings, SettingsLike, compile_step_pattern, resolve_settings
from dcp_s3.spill.local import find_commits
from dcp_s3.spill.store import open_store
from dcp_s3.store import ListedObject, Store, Upload
from dcp_s3.units import one_line, plural
from dcp_s3.url import CheckpointURL, URLLike, parse_url

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
    boards: tuple[ListedObject, ...] = ()
    """Objects through which ranks told each other something, by key; empty unless ``deep``."""

    def __repr__(self) -> str:
        counts = {"uploads": len(self.uploads) or None, "leftovers": len(self.leftovers) or None}
        return one_line("CatalogSnapshot", repr(self.root), f"{plural(len(self.checkpoints), 'checkpoint')}", **counts)

    def plan(self, policy: PolicyFunction | None, *, grace: float) -> Plan:
        """`make_plan` for this snapshot.

        Raises:
            SettingsError: the policy failed or answered nonsense.
        """
        return make_plan(
            self.checkpoints, policy, now=self.now, grace=grace, uploads=self.uploads, leftovers=self.leftovers,
            boards=self.boards,
        )  # fmt: skip


class CheckpointCatalog:
    """The checkpoints directly under a root, with everything that retention decides on. Holds no connection.

    >>> CheckpointCatalog("s3://bucket/run").latest().step
    2000

    Args:
        root: ``s3://bucket/run`` for checkpoints at ``s3://bucket/run/step-1000`` and so on.
        settings: a `Settings`, or a mapping of those that differ from the environment.
        patterns: one or more regular expressions, each with a group of digits, that find the step in a checkpoint's
            name. The first one that matches counts; a name that none matches has no step. The default is the setting
            ``step_pattern``; without that, the step is the number after ``step``, ``iter``,
            ``checkpoint`` or ``epoch``, or the whole name.
        store: where the checkpoints are, if not in the root's bucket as the settings reach it.

    Raises:
        InvalidURLError, SettingsError
    """

    def __init__(
        self,
        root: URLLike,
        *,
        settings: SettingsLike = None,
        patterns: str | Sequence[str] | None = None,
        store: Store | None = None,
    ) -> None:
        self.root = parse_url(root)
        self.settings = resolve_settings(settings)
        self.store = store_of(self.root, self.settings) if store is None else store
        self._patterns = _compile(patterns, self.settings)

    def __repr__(self) -> str:
        return one_line("CheckpointCatalog", repr(str(self.root)))

    def checkpoints(self) -> list[CheckpointInfo]:
        """The checkpoints, oldest first. An uncommitted one is ``in_progress``, or ``leftover`` if it is older than the
        grace period (setting ``retention_grace``). One that waits in this host's spill directory is ``local``.

        >>> [(info.step, info.state) for info in CheckpointCatalog("s3://bucket/run").checkpoints()]
        [(1000, 'committed'), (2000, 'committed')]

        Raises:
            StorageError: missing bucket, credentials, permissions, network.
        """
        local = self.local()  # first: a checkpoint drained meanwhile is then seen twice, not missed
        listing = self._list()
        grace = self.settings.retention_grace
        found = merge_local(listing.checkpoints, local)
        return sorted((in_grace(info, now=listing.now, grace=grace) for info in found), key=age_order)

    def scan(self, *, deep: bool = False) -> CatalogSnapshot:
        """Everything that a plan needs, including open multipart uploads.

        >>> CheckpointCatalog("s3://bucket/run").scan(deep=True).leftovers
        ()

        Args:
            deep: also look for leftovers in the directories of committed checkpoints, and for damage: two more
                requests for each checkpoint and 1000 objects.

        Raises:
            StorageError: missing bucket, credentials, permissions, network.
        """
        local = self.local()
        # Before the objects: an upload that completes meanwhile is then seen as an upload, an object, or both.
        uploads = sorted(self.store.uploads(self.root.key("")), key=lambda each: (each.key, each.upload_id))
        listing = self._list(deep=deep)
        infos = merge_local(self._with_damage(listing.checkpoints) if deep else listing.checkpoints, local)
        return dataclasses.replace(
            listing,
            checkpoints=tuple(sorted(infos, key=age_order) if local else infos),
            uploads=tuple(each for upload in uploads if (each := open_upload(self.root, upload)) is not None),
        )

    def _with_damage(self, infos: Sequence[CheckpointInfo]) -> list[CheckpointInfo]:
        """The checkpoints, the newest of which were looked at as `latest` does, until one can be loaded."""
        damages = _damages(
            newest_first(infos), lambda info: info.damage or find_damage(self.store, self.root.child(info.name))
        )
        return [dataclasses.replace(each, damage=damages[each.url]) if each.url in damages else each for each in infos]

    def latest(self) -> CheckpointInfo | None:
        """The checkpoint to resume from, as in `dcp_s3.latest`: it can be loaded. None if there is none.

        >>> CheckpointCatalog("s3://bucket/run").latest().url
        's3://bucket/run/step-00002000'

        Raises:
            StorageError: missing bucket, credentials, permissions, network.
        """
        return self._first(newest_first)

    def best(self, metric: str, mode: Mode = "min") -> CheckpointInfo | None:
        """The loadable committed checkpoint with the best value of a metric; None if there is none.

        Values that are not finite numbers count as missing. Among equal values, the newest checkpoint wins.

        >>> CheckpointCatalog("s3://bucket/run").best("val_loss").step
        1000

        Args:
            metric: name of the metric.
            mode: ``min`` if low values are better, or ``max``.

        Raises:
            SettingsError: ``mode`` is neither.
            StorageError: missing bucket, credentials, permissions, network.
        """
        best_first((), metric, mode)
        return self._first(lambda infos: best_first([info for info in infos if info.committed], metric, mode))

    def local(self) -> list[CheckpointInfo]:
        """The checkpoints whose commits wait in this host's spill directory, oldest first. Makes no request.

        >>> CheckpointCatalog("s3://bucket/run", settings={"spill_dir": "/nvme/spill"}).local()
        []
        """
        return [with_step(info, self._patterns) for info in find_local(str(self.root), settings=self.settings)]

    def _first(self, order: Callable[[Iterable[CheckpointInfo]], list[CheckpointInfo]]) -> CheckpointInfo | None:
        """The first in this order that can be loaded."""
        while True:
            damages: dict[str, str] = {}
            for info in order(self._list().checkpoints):
                url = self.root.child(info.name)
                damage = find_damage(self.store, url)
                if damage is None:
                    tell_unreadable(damages, info.url)
                    return info
                now = inspect_checkpoint(self.store, url)
                if now is None or not now.committed:
                    break  # a prune was faster: there is a newer one
                damages[info.url] = damage
            else:
                tell_unreadable(damages, None)
                return None

    def _list(self, *, deep: bool = False) -> CatalogSnapshot:
        """The checkpoints, without uploads and what waits on this host."""
        listed = self.store.list(self.root.key(""), "/")
        now, skip = time_of(listed), len(self.root.key(""))
        names = [prefix[skip:-1] for prefix in listed.prefixes]
        del listed
        boards: Sequence[ListedObject] = ()
        if deep and _CONTROL in names:
            boards = self.store.list(self.root.key(BOARD_PREFIX)).objects
        looked = self.store.map(
            lambda store, name: self._look(store, name, deep=deep), [name for name in names if name not in _NO_CHILD]
        )
        found = [each for each in looked if each is not None]
        return CatalogSnapshot(
            root=str(self.root),
            now=now,
            checkpoints=tuple(sorted((info for info, _ in found), key=age_order)),
            leftovers=tuple(sorted((each for _, left in found for each in left), key=lambda each: each.key)),
            deep=deep,
            boards=tuple(boards),
        )

    def _look(self, store: Store, name: str, *, deep: bool) -> tuple[CheckpointInfo, list[LeftoverObject]] | None:
        """A checkpoint and, if ``deep``, its leftovers; None if there is nothing of one."""
        url = self.root.child(name)
        for attempt in range(_LOOKS):
            time.sleep(0.05 * (2**attempt - 1))
            found = inspect(store, url, self._patterns, whole=deep)
            if found is None or not (deep and found.info.committed):
                return None if found is None else (found.info, [])
            with contextlib.suppress(errors.ObjectNotFoundError):  # deleted meanwhile
                return look_deeper(store, url, found)
        assert found is not None  # noqa: S101 - otherwise it would have returned
        return dataclasses.replace(found.info, damage="its .metadata is listed, but cannot be read"), []


def check_newest(catalog: CheckpointCatalog, infos: Iterable[CheckpointInfo]) -> None:
    """Warn if the newest of the committed checkpoints cannot be loaded.

    Says nothing where S3 refuses a request, nor of other libraries' checkpoints, as that takes long.
    """
    with contextlib.suppress(errors.StorageError):
        _damages(newest_first(infos), lambda info: find_damage(catalog.store, parse_url(info.url), foreign=False))


def _damages(infos: Iterable[CheckpointInfo], damage_of: Callable[[CheckpointInfo], str | None]) -> Mapping[str, str]:
    """Why the first ones cannot be loaded, by URL, up to one that can be; the log says so once."""
    damages: dict[str, str] = {}
    for info in infos:
        damage = damage_of(info)
        if damage is None:
            tell_unreadable(damages, info.url)
            return damages
        damages[info.url] = damage
    tell_unreadable(damages, None)
    return damages


def _compile(patterns: str | Sequence[str] | None, settings: Settings) -> tuple[re.Pattern[str], ...]:
    given = [patterns] if isinstance(patterns, str) else patterns
    if given is None:
        given = [] if settings.step_pattern is None else [settings.step_pattern]
    compiled = []
    for pattern in given:
        try:
            compiled.append(compile_step_pattern(pattern))
        except (ValueError, TypeError) as error:
            raise errors.SettingsError(f"step pattern {pattern!r} is not allowed: {error}") from None
    return tuple(compiled)


def list_checkpoints(root: URLLike, *, settings: SettingsLike = None) -> list[CheckpointInfo]:
    """The checkpoints directly under ``root``, committed or not, oldest first.

    Sorted by step, time and name. Directories that hold nothing of a checkpoint are left out. ``committed`` says
    that the commit is there; it does not look at every data object, as `latest` does.

    >>> [(info.step, info.metrics) for info in list_checkpoints("s3://bucket/run")]
    [(1000, {'val_loss': 1.25}), (2000, {'val_loss': 1.5})]

    Args:
        root: ``s3://bucket/run`` for checkpoints at ``s3://bucket/run/step-1000`` and so on.
        settings: a `Settings`, or a mapping of those that differ from the environment.

    Raises:
        InvalidURLError, SettingsError
        StorageError: missing bucket, credentials, permissions, network.
    """
    return list(CheckpointCatalog(root, settings=settings)._list().checkpoints)


def latest(root: URLLike, *, include_uncommitted: bool = False, settings: SettingsLike = None) -> CheckpointInfo | None:
    """The checkpoint to resume from: the committed one under ``root`` with the highest step, then the newest. None if
    there is none.

    It can be loaded: its metadata is readable, and every data object that it names is there and long enough. Others
    (a copy that was cut off, objects that somebody deleted) are skipped with a warning in the log.

    >>> latest("s3://bucket/run").step
    2000
    >>> latest("s3://bucket/nothing") is None
    True

    Args:
        root: the URL above the checkpoints.
        include_uncommitted: also consider checkpoints whose commit still waits in this host's spill directory
            (``DCP_S3_SPILL_DIR``). Meant for a job on one host: on several, parts of such a checkpoint may be missing.
            Their ``state`` is ``local``; to load one, S3StorageReader needs ``include_uncommitted``, too.
        settings: a `Settings`, or a mapping of those that differ from the environment.

    Raises:
        InvalidURLError, SettingsError
        StorageError: missing bucket, credentials, permissions, network. Never None because of a failure.
    """
    resolved = resolve_settings(settings)
    waiting = find_local(root, settings=resolved) if include_uncommitted else []
    try:
        found = CheckpointCatalog(root, settings=resolved).latest()
    except errors.TransferError as error:
        if not waiting:
            raise
        logger.warning("S3 does not answer, so that only this host's spill directory was looked at: %s", error)
        found = None
    return max([*waiting, *([] if found is None else [found])], key=age_order, default=None)


def find_local(root: URLLike, *, settings: Settings) -> list[CheckpointInfo]:
    """The checkpoints directly under ``root`` whose commits wait in this host's spill directory, oldest first."""
    spill = open_store(settings)
    found = []
    for journal, data, _ in find_commits(spill) if spill else ():
        url = parse_url(journal.url)
        if str(url) == str(parse_url(root).child(url.name)):
            found.append(dataclasses.replace(from_manifest(url, Manifest.from_json(data)), state="local"))
    return sorted(found, key=age_order)


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
