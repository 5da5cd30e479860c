"""Asynchronous saves that must not overlap, because their collectives would mix, take turns.

If two saves of one process group overlap, one rank's plan of the first save meets another rank's plan of the second.
DCP leaves it to its caller to avoid that. Here the later save waits until the earlier one has ended in this process.
That gives all ranks the same order: that of the calls.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Sequence
from concurrent.futures import Future, wait
from typing import Any

from dcp_s3.torch_private import find_upload_future

logger = logging.getLogger(__name__)

_REPORT_SECONDS = 30.0

_saves: list[tuple[str, Future[Any]]] = []
"""The asynchronous saves under way, in order. Changed only by single operations, without a lock that a fork could leave
locked."""


def take_turn(key: str) -> None:
    """Wait for the asynchronous saves of this process that took their turn earlier. May be called again.

    Args:
        key: what the saves share: the name of a process group, or a URL.
    """
    future = find_upload_future()
    ours = None if future is None else (key, future)
    if future is not None and ours not in _saves:
        _saves.append((key, future))
        future.add_done_callback(functools.partial(_forget, key))
    earlier = [each for each in list(_saves) if each[0] == key]
    if ours is not None:
        earlier = earlier[: earlier.index(ours)]
    _wait_for([each for _, each in earlier], key)


def _forget(key: str, ended: Future[Any]) -> None:
    """Drop a future that has ended: that of a failed save holds the state."""
    with contextlib.suppress(ValueError):
        _saves.remove((key, ended))


def _wait_for(earlier: Sequence[Future[Any]], key: str) -> None:
    waited = 0.0
    while wait(earlier, _REPORT_SECONDS).not_done:
        waited += _REPORT_SECONDS
        logger.warning(
            "a save has waited %.0f s for an earlier one that shares %s with it. Remedy: wait for the future of a save "
            "before the next one, or give each overlapping save its own process group",
            waited,
            key,
        )
