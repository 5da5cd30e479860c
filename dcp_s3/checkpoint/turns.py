"""Asynchronous saves that must not run side by side: those whose collectives would meet.

Two saves of one process group mix their collectives if they overlap: one rank's plan of the first save meets another
rank's plan of the second. DCP leaves that to its caller. Here the later save waits until the earlier one has ended in
this process, which gives all ranks the same order, that of the calls.
"""

from __future__ import annotations

import contextlib
import logging
import threading

from dcp_s3.checkpoint._torch import ends_with_its_save

logger = logging.getLogger(__name__)

_REPORT_SECONDS = 30.0

_turns: dict[str, list[threading.Thread]] = {}
"""The threads of saves, in their order. Changed by single operations of list and dict only: there is no lock that a
fork could leave locked."""


def take_turn(key: str) -> None:
    """Wait for the asynchronous saves of this process that took their turn before. May be called again.

    Args:
        key: what the saves share: the name of a process group, or a URL.
    """
    me, threads = threading.current_thread(), _turns.setdefault(key, [])
    if me not in threads and ends_with_its_save(me):
        threads.append(me)
    for earlier in list(threads):
        if earlier is me:
            return
        _wait_for(earlier, key)
        with contextlib.suppress(ValueError):  # another one has waited, too
            threads.remove(earlier)


def _wait_for(thread: threading.Thread, key: str) -> None:
    waited = 0.0
    while thread.is_alive():
        thread.join(_REPORT_SECONDS)
        waited += _REPORT_SECONDS
        if thread.is_alive():
            logger.warning(
                "a save has waited %.0f s for an earlier one that shares %s with it. Remedy: wait for the future of a "
                "save before the next one, or give saves that overlap a process group each",
                waited,
                key,
            )
