"""What lies at a URL: checkpoints under it, one checkpoint, or, further down, roots of checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dcp_s3.checkpoint.info import CheckpointInfo
from dcp_s3.checkpoint.look import inspect_checkpoint
from dcp_s3.coroutines import gather, run
from dcp_s3.format.layout import CONTROL_PREFIX, What, classify
from dcp_s3.retention.catalog import CheckpointCatalog, check_newest
from dcp_s3.s3.async_store import AsyncS3Store, open_async_store
from dcp_s3.settings import SettingsLike, resolve_settings
from dcp_s3.url import CheckpointURL, URLLike, parse_url

MOST_LEVELS = 5
"""Levels below the URL on which roots are looked for: ``bucket/team/project/user/run``."""
MOST_LISTINGS = 300
"""Requests that the search makes at most."""
_LOOKED_AT = 3


@dataclass(frozen=True)
class FoundRoot:
    """A prefix with checkpoints."""

    root: str
    """Its URL."""
    directories: int
    """Number of directories in it, of which at least one is a checkpoint, or was to become one; 1000 may be more."""


@dataclass(frozen=True)
class Contents:
    """What lies at a URL. At most one of the three is not empty."""

    checkpoints: tuple[CheckpointInfo, ...] = ()
    """Checkpoints directly under the URL, oldest first."""
    itself: CheckpointInfo | None = None
    """The checkpoint that lies at the URL."""
    roots: tuple[FoundRoot, ...] = ()
    """Roots further down, by URL."""
    complete: bool = True
    """Whether all levels were looked at within `MOST_LISTINGS`."""


def browse(url: URLLike, *, settings: SettingsLike = None) -> Contents:
    """Find out what lies at a URL, in a bounded number of requests beyond those for the checkpoints themselves.

    Raises:
        InvalidURLError, SettingsError
        StorageError: missing bucket, credentials, permissions, network.
    """
    where, found = parse_url(url), None
    if not where.prefix and run(_is_crowded(where, settings)):  # the catalog would look into each of its directories
        found = run(_browse(where, settings))
        if str(where) not in {each.root for each in found.roots}:
            return found
    catalog = CheckpointCatalog(url, settings=settings)
    checkpoints = catalog.checkpoints()
    if checkpoints:
        check_newest(catalog, checkpoints)
        return Contents(tuple(checkpoints))
    return found or run(_browse(where, settings))


async def _is_crowded(url: CheckpointURL, settings: SettingsLike) -> bool:
    """Whether there are more directories and objects than one listing tells."""
    async with open_async_store(url.bucket, resolve_settings(settings)) as store:
        return (await store.page(url.key(""), "/")).next_token is not None


async def _browse(url: CheckpointURL, settings: SettingsLike) -> Contents:
    async with open_async_store(url.bucket, resolve_settings(settings)) as store:
        itself = await inspect_checkpoint(store, url) if url.prefix else None
        if itself is not None:
            return Contents(itself=itself)
        return await _search(store, url)


async def _search(store: AsyncS3Store, url: CheckpointURL) -> Contents:
    """Breadth first: a directory whose first, middle or last directory is a checkpoint is a root; others are opened."""
    roots: list[FoundRoot] = []
    level, left = [url.key("")], MOST_LISTINGS
    for _ in range(MOST_LEVELS):
        looked, complete = level[:left], len(level) <= left
        left -= len(looked)
        pages = await gather(store.page(prefix, "/") for prefix in looked)
        below = [[each for each in page.prefixes if not each.endswith(f"/{CONTROL_PREFIX}")] for page in pages]
        samples = [(number, sample) for number, prefixes in enumerate(below) for sample in _sample(prefixes)]
        complete = complete and len(samples) <= left
        samples = samples[: max(left, 0)]
        left -= len(samples)
        found = await gather(_is_checkpoint(store, sample) for _, sample in samples)
        are_roots = {number for (number, _), is_checkpoint in zip(samples, found, strict=True) if is_checkpoint}
        for number in sorted(are_roots):
            where = CheckpointURL(url.bucket, looked[number].rstrip("/"))
            roots.append(FoundRoot(str(where), len(below[number])))
        level = [each for number, prefixes in enumerate(below) if number not in are_roots for each in prefixes]
        if not level or left <= 0 or not complete:
            break
    return Contents(roots=tuple(sorted(roots, key=lambda each: each.root)), complete=not level)


def _sample(prefixes: Sequence[str]) -> list[str]:
    middle = len(prefixes) // 2
    return list(dict.fromkeys([*prefixes[:1], *prefixes[middle : middle + 1], *prefixes[-1:]]))[:_LOOKED_AT]


async def _is_checkpoint(store: AsyncS3Store, prefix: str) -> bool:
    page = await store.page(prefix, "/")
    kinds = {classify(each.key[len(prefix) :]).what for each in page.objects}
    if kinds & {What.COMMIT, What.DATA}:
        return True
    if f"{prefix}{CONTROL_PREFIX}" not in page.prefixes:
        return False
    ours = await store.page(f"{prefix}{CONTROL_PREFIX}")  # of a checkpoint, or boards of a run
    return any(classify(each.key[len(prefix) :]).what not in (What.BOARD, What.OTHER) for each in ours.objects)
