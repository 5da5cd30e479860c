"""Where a writer saves to: the URL and id of its next save, in each thread that uses it."""

from __future__ import annotations

import threading
from typing import Any

from dcp_s3.errors import InvalidURLError, SaveProtocolError
from dcp_s3.format.layout import new_save_id
from dcp_s3.save.save import Save
from dcp_s3.url import CheckpointURL


class ThreadTarget(threading.local):
    """That of one thread: DCP makes all calls of a save in one thread."""

    url: CheckpointURL | None = None
    """URL of its next save."""
    save_id: str | None = None
    """Id of its next save; None if not chosen yet."""
    save: Save | None = None
    """The save under way, or the last one."""
    is_home: bool = False
    """Whether the writer was made in this thread."""

    def __reduce__(self) -> Any:
        return ThreadTarget, (), {"is_home": True}  # in another process, nothing has begun


class Target:
    """URL and id of a writer's next save. Can be sent to other processes."""

    def __init__(self, url: CheckpointURL | None) -> None:
        self.url = url
        """URL of saves that were given none."""
        self.here = ThreadTarget()
        self.here.is_home = True
        self._unused = set() if url is None else {url}

    def reset(self, url: CheckpointURL | None) -> None:
        """Begin a new save in this thread, to ``url`` if given; at home that counts for later ones, too."""
        here = self.here
        here.url = here.url if url is None else url
        if url is not None and here.is_home:
            self.url = url
            self._unused.add(url)
        here.save_id = None

    def choose(self, *, begin: bool = False) -> CheckpointURL:
        """The URL; with ``begin`` its save begins.

        Raises:
            InvalidURLError: there is none.
            SaveProtocolError: several are possible.
        """
        url = self.here.url or self.url
        if url is None:
            raise InvalidURLError(
                "S3StorageWriter has no URL. Remedy: S3StorageWriter('s3://bucket/prefix'), or pass "
                "checkpoint_id='s3://bucket/prefix' to dcp.save"
            )
        if self.here.url is None and (candidates := self._unused - {url}):
            raise SaveProtocolError(
                "it is unclear which URL this asynchronous save is for: before it began the writer was given "
                f"{', '.join(sorted(str(each) for each in candidates | {url}))}; nothing was written. Remedy: "
                "pass checkpoint_id=... to each dcp.async_save, or make a writer for each"
            )
        if begin:
            self._unused.discard(url)
        return url

    @property
    def next_id(self) -> str:
        """Random id of the next save in this thread."""
        if self.here.save_id is None:
            self.here.save_id = new_save_id()
        return self.here.save_id
