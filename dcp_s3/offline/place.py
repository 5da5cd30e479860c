"""A place with files (an S3 prefix or a directory), and work on several things at once, in order."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import TypeAlias, TypeVar

from dcp_s3.limit import UNLIMITED
from dcp_s3.s3.store import store_of
from dcp_s3.settings import Settings
from dcp_s3.store import ListedObject, Store
from dcp_s3.stores.directory import DirectoryStore
from dcp_s3.url import CheckpointURL, is_s3_url, parse_url
from dcp_s3.workers import Workers

T = TypeVar("T")
U = TypeVar("U")
OnTotal: TypeAlias = Callable[[int], None]
"""Called with the number of bytes that will move."""
OnProgress: TypeAlias = Callable[[int], None]
"""Called from several threads with the number of bytes moved since the last call."""


@dataclass(frozen=True)
class Place:
    name: str
    """Its URL or path."""
    store: Store
    url: CheckpointURL | None = None
    """None of a directory."""

    @classmethod
    def of(cls, where: str | os.PathLike[str], settings: Settings) -> Place:
        if is_s3_url(where):
            url = parse_url(where)
            return cls(str(url), store_of(url, settings, UNLIMITED.shared(settings.stall_timeout)), url)
        return cls(os.fspath(where), DirectoryStore(where))

    def key(self, path: str) -> str:
        return path if self.url is None else self.url.key(path)

    def objects(self) -> dict[str, ListedObject]:
        """Everything there, by relative path."""
        prefix = self.key("")
        return {each.key.removeprefix(prefix): each for each in self.store.list(prefix).objects}


def ahead(
    function: Callable[[T], U],
    items: Iterable[T],
    width: int,
    *,
    waiting: int = 0,
    cancel: threading.Event | None = None,
) -> contextlib.closing[Generator[U, None, None]]:
    """Results of a function for items, in their order: ``width`` threads are at those that follow, and some wait.

    Use as a context manager: at its end nothing is under way. ``cancel`` is set if that is before the last result.
    """

    def results() -> Generator[U, None, None]:
        left = iter(items)
        workers = Workers(width, "dcp_s3-offline")
        try:
            pending = deque(workers.submit(function, item) for item in islice(left, width + waiting))
            while pending:
                result = pending.popleft().result()
                pending.extend(workers.submit(function, item) for item in islice(left, 1))
                yield result
        except BaseException:
            if cancel is not None:
                cancel.set()
            raise
        finally:
            workers.close()

    return contextlib.closing(results())
