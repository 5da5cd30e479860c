"""The prefix that a benchmark writes to: made up, so that nothing lies there, and removed in the end."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Callable, Iterator, Sequence

from dcp_s3 import errors
from dcp_s3.coroutines import run
from dcp_s3.s3.async_store import AsyncS3Store, open_async_store
from dcp_s3.s3.store import S3Store
from dcp_s3.settings import Settings
from dcp_s3.store import DeleteTarget
from dcp_s3.url import CheckpointURL, parse_url

_PASSES = 6
_LATE_SECONDS = 2.0
"""After ranks were killed, until requests that they had sent have been carried out."""


class Scratch:
    """The prefix of one benchmark.

    Args:
        url: URL below which it lies.
        settings: settings that lead to the bucket.
        note: called with a line for people if something cannot be removed.

    Raises:
        InvalidURLError: the URL is too long for names below it.
    """

    def __init__(self, url: CheckpointURL, settings: Settings, note: Callable[[str], None]) -> None:
        self.url = url.child(f"dcp-s3-bench-{uuid.uuid4().hex[:12]}")
        """URL of the prefix."""
        self.removed = False
        """Whether nothing is left there."""
        self._settings = settings
        self._note = note
        self._denied: errors.AccessDeniedError | None = None
        parse_url(str(self.round(999_999)))

    def round(self, number: int) -> CheckpointURL:
        """URL of the checkpoint of one round."""
        return self.url.child(f"round-{number}")

    @contextlib.contextmanager
    def removing(self) -> Iterator[None]:
        """Remove all that is there at the end, also after a failure or Ctrl-C; a second Ctrl-C gives up.

        Whether objects can be listed, written and deleted is tried first, before anything large is written.

        Raises:
            StorageError: there is no such bucket, a permission is missing, ...
        """
        store, key = S3Store(self.url.bucket, self._settings), self.url.key("probe")
        store.page(key)
        try:
            store.put(key, b"")
            self._remove(self.url)
            yield
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                self._note(f"interrupted: removing {self.url}")
            self._clean_up(late=_LATE_SECONDS, interrupted=True)
            raise
        self._clean_up(late=0.0, interrupted=False)

    def remove(self, number: int) -> None:
        """Remove the checkpoint of one round, to make room for the next.

        Raises:
            StorageError: all or some of it is still there.
        """
        self._remove(self.round(number))

    def _remove(self, url: CheckpointURL, *, late: float = 0.0) -> None:
        self._denied = run(_remove(url, self._settings, late=late)) or self._denied

    def _clean_up(self, *, late: float, interrupted: bool) -> None:
        try:
            self._remove(self.url, late=late)
            self.removed = True
        except KeyboardInterrupt:
            if not interrupted:
                self._clean_up(late=late, interrupted=True)
            else:
                self._note(f"not removed: {self.url}: interrupted. Remedy: delete what is below it")
            raise
        except (errors.DcpS3Error, OSError) as error:
            self._note(f"not removed, or not all of it: {self.url}: {error}. Remedy: delete what is below it")
        else:
            if self._denied is not None:
                self._note(f"if the bucket keeps versions, those below {self.url} are still there: {self._denied}")


async def _remove(url: CheckpointURL, settings: Settings, *, late: float) -> errors.AccessDeniedError | None:
    """Remove objects and open uploads below a URL, until a listing shows none.

    Returns:
        Why old versions of what was removed may be left, if a permission is missing.

    Raises:
        StorageError: something is still there.
    """
    prefix = url.key("")
    async with open_async_store(url.bucket, settings) as store:
        for passed in range(_PASSES):
            await asyncio.sleep(late)
            if not await _remove_once(store, prefix):
                denied = await _purge(store, prefix)
                return denied if passed else None
    raise errors.StorageError(f"objects were still written to {url} while they were deleted", bucket=url.bucket)


async def _remove_once(store: AsyncS3Store, prefix: str) -> int:
    """Remove what is listed; returns how much that was. What can be removed is, even if something cannot."""
    objects = [each.key for each in (await store.list(prefix)).objects]
    failure: errors.StorageError | None = None
    uploads: Sequence[object] = ()
    try:
        uploads = open_uploads = await store.uploads(prefix)
        for upload in open_uploads:
            await store.abort(upload)
    except errors.StorageError as error:
        failure = error
    await store.delete(objects)
    if failure is not None:
        raise failure
    return len(objects) + len(uploads)


async def _purge(store: AsyncS3Store, prefix: str) -> errors.AccessDeniedError | None:
    """Delete old versions and delete markers for good; see `_remove`."""
    try:
        versions = await store.list_versions(prefix)
    except errors.AccessDeniedError as error:
        return error
    except errors.StorageError:
        return None  # this store has none
    try:
        await store.delete(DeleteTarget(each.key, version_id=each.version_id) for each in versions)
    except errors.AccessDeniedError as error:
        return error
    return None
