"""The catalog: which checkpoints lie under a root, and from which one to resume.

It takes one listing of the root, and two to four small requests for each checkpoint (`inspect`). Data objects are not
touched. `latest` and `best` look closer at the checkpoint that they return.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import re
from collections.abc import Callable, Iterable, Sequence

from dcp_s3 import errors
from dcp_s3.checkpoint.info import (
    CheckpointInfo,
    age_order,
    from_manifest,
    in_grace,
    newest_first,
    with_step,
)
from dcp_s3.checkpoint.look import find_damage, inspect_checkpoint, tell_unreadable
from dcp_s3.coroutines import run
from dcp_s3.format.control_files import Manifest
from dcp_s3.reprs import one_line
from dcp_s3.retention.policy import Mode, best_first
from dcp_s3.retention.scan import CatalogSnapshot, list_root, merge_local, scan_root
from dcp_s3.s3.async_store import AsyncS3Store, open_async_store
from dcp_s3.setting_values import compile_step_pattern
from dcp_s3.settings import Settings, SettingsLike, resolve_settings
from dcp_s3.spill.local import find_commits
from dcp_s3.spill.session import open_store
from dcp_s3.url import CheckpointURL, URLLike, parse_url

logger = logging.getLogger(__name__)


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

    Raises:
        InvalidURLError, SettingsError
    """

    def __init__(
        self, root: URLLike, *, settings: SettingsLike = None, patterns: str | Sequence[str] | None = None
    ) -> None:
        self.root = parse_url(root)
        self.settings = resolve_settings(settings)
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
        return run(self._checkpoints())

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
        return run(self.scan_async(deep))

    def latest(self) -> CheckpointInfo | None:
        """The checkpoint to resume from, as in `dcp_s3.latest`: it can be loaded. None if there is none.

        >>> CheckpointCatalog("s3://bucket/run").latest().url
        's3://bucket/run/step-00002000'

        Raises:
            StorageError: missing bucket, credentials, permissions, network.
        """
        return run(self._first(newest_first))

    def best(self, metric: str, mode: Mode = "min") -> CheckpointInfo | None:
        """The loadable committed checkpoint with the best value of a metric; None if there is none.

        Values that are not finite numbers count as missing. Among equal values, the newest checkpoint wins.

        >>> CheckpointCatalog("s3://bucket/run").best("val_loss").step
        1000

        Args:
            metric: name of the metric.
            mode: ``min`` if low values are better, or ``max``.

        Raises:
            PolicyError: ``mode`` is neither.
            StorageError: missing bucket, credentials, permissions, network.
        """
        best_first((), metric, mode)
        return run(self._first(lambda infos: best_first([info for info in infos if info.committed], metric, mode)))

    async def _checkpoints(self) -> list[CheckpointInfo]:
        local = self.local()  # first: a checkpoint drained meanwhile is then seen twice, not missed
        async with open_async_store(self.root.bucket, self.settings) as store:
            listing = await list_root(store, self.root, self._patterns)
        grace = self.settings.retention_grace
        found = merge_local(listing.found, local)
        return sorted((in_grace(info, now=listing.now, grace=grace) for info in found), key=age_order)

    async def scan_async(self, deep: bool) -> CatalogSnapshot:
        local = self.local()
        async with open_async_store(self.root.bucket, self.settings) as store:
            return await scan_root(store, self.root, self._patterns, deep=deep, local=local)

    def local(self) -> list[CheckpointInfo]:
        """The checkpoints whose commits wait in this host's spill directory, oldest first. Makes no request.

        >>> CheckpointCatalog("s3://bucket/run", settings={"spill_dir": "/nvme/spill"}).local()
        []
        """
        return [with_step(info, self._patterns) for info in find_local(str(self.root), settings=self.settings)]

    async def _first(self, order: Callable[[Iterable[CheckpointInfo]], list[CheckpointInfo]]) -> CheckpointInfo | None:
        async with open_async_store(self.root.bucket, self.settings) as store:
            return await _first_loadable(store, self.root, self._patterns, order)


def check_newest(catalog: CheckpointCatalog, infos: Iterable[CheckpointInfo]) -> None:
    """Warn if the newest of the committed checkpoints cannot be loaded.

    Says nothing where S3 refuses a request, nor of other libraries' checkpoints, as that takes long.
    """
    with contextlib.suppress(errors.StorageError):
        run(_check_newest(catalog, infos))


async def _check_newest(catalog: CheckpointCatalog, infos: Iterable[CheckpointInfo]) -> None:
    damages: dict[str, str] = {}
    loadable = None
    async with open_async_store(catalog.root.bucket, catalog.settings) as store:
        for info in newest_first(infos):
            damage = await find_damage(store, parse_url(info.url), foreign=False)
            if damage is None:
                loadable = info.url
                break
            damages[info.url] = damage
    tell_unreadable(damages, loadable)


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


async def _first_loadable(
    store: AsyncS3Store,
    root: CheckpointURL,
    patterns: Sequence[re.Pattern[str]],
    order: Callable[[Iterable[CheckpointInfo]], list[CheckpointInfo]],
) -> CheckpointInfo | None:
    while True:
        vanished = False
        damages: dict[str, str] = {}
        for info in order((await list_root(store, root, patterns)).found):
            url = root.child(info.name)
            damage = await find_damage(store, url)
            if damage is None:
                tell_unreadable(damages, info.url)
                return info
            now = await inspect_checkpoint(store, url)
            if now is None or not now.committed:
                vanished = True  # a prune was faster: there is a newer one
                break
            damages[info.url] = damage
        if not vanished:
            tell_unreadable(damages, None)
            return None


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
    return run(list_checkpoints_async(root, settings=settings))


async def list_checkpoints_async(root: URLLike, *, settings: SettingsLike = None) -> list[CheckpointInfo]:
    """`list_checkpoints` for asyncio."""
    url = parse_url(root)
    async with open_async_store(url.bucket, resolve_settings(settings)) as store:
        return list((await list_root(store, url, _compile(None, store.settings))).found)


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
        found = run(latest_async(root, settings=resolved))
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


async def latest_async(root: URLLike, *, settings: SettingsLike = None) -> CheckpointInfo | None:
    """`latest` for asyncio."""
    url = parse_url(root)
    async with open_async_store(url.bucket, resolve_settings(settings)) as store:
        return await _first_loadable(store, url, _compile(None, store.settings), newest_first)
