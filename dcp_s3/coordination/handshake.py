"""Tells all ranks of a process group what its first rank says, through the store by which the group was made. No
collective.

That store may be older than the group: torchrun's agent keeps one over all restarts. So nothing that stands in it is
believed. Each rank asks with a word that nobody has used, and the first rank, as it is now, answers that word.
"""

from __future__ import annotations

import logging
import math
import secrets
import threading
import time
from typing import Any

from dcp_s3.errors import SaveProtocolError, StorageError
from dcp_s3.torch_private import default_store

STORE_PREFIX = "dcp_s3/"
"""Begin of our keys in the store of a process group."""

logger = logging.getLogger(__name__)

_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.01, 0.5  # seconds between two looks
_LINGER = 10.0  # seconds for which the first rank answers after the end of its group or its program

_lock = threading.Lock()
_telling: dict[str, object] = {}
"""What this process says now, by group. It may have said something else for an earlier group of the same ranks."""


def tell(store: Any, said: str, others: int, group: str = "") -> None:
    """On the first rank: answer the others with ``said``, in the background, until all have heard it.

    Args:
        store: torch's store of the group.
        said: what they are told. No earlier attempt has said the same.
        others: number of the other ranks.
        group: name of a group that is a part of the ranks.
    """
    turn = object()
    with _lock:
        _telling[group] = turn
    if others:
        threading.Thread(target=_answer, args=(store, turn, said, others, group), name="dcp_s3-attempt").start()


def ask(store: Any, timeout: float, group: str = "") -> str:
    """On another rank: what the first one says.

    Args:
        store: torch's store of the group.
        timeout: seconds in which the first rank has to come to its save.
        group: name of a group that is a part of the ranks.

    Raises:
        SaveProtocolError: the first rank did not answer in time.
        StorageError: the store does not answer.
    """
    word, deadline, pause = secrets.token_hex(8), time.monotonic() + timeout, _SHORTEST_PAUSE
    try:
        store.set(_ask(group, store.add(_asks(group), 1)), word)
        while not store.check([_answer_to(word)]):
            if time.monotonic() > deadline:
                raise SaveProtocolError(
                    f"rank 0 of the process group has not come to a save or a CheckpointManager for {timeout:g} s (ten "
                    "times DCP_S3_RANK_TIMEOUT), so this rank does not know which attempt of the job it is part of. "
                    "Remedy: see what rank 0 does; save, and make the CheckpointManager, on all ranks"
                )
            time.sleep(pause)
            pause = min(1.5 * pause, _LONGEST_PAUSE)
        found: bytes = store.get(_answer_to(word))
        store.add(_heard(found.decode()), 1)
    except RuntimeError as error:
        raise store_error(error) from error
    return found.decode()


def store_error(error: RuntimeError) -> StorageError:
    """The error of a store of torch as one of ours."""
    return StorageError(
        f"the store of the process group does not answer: {error}. Remedy: the process that holds it, mostly rank 0 or "
        "torchrun's agent on the first host, has to live as long as the ranks"
    )


def _asks(group: str) -> str:
    return f"{STORE_PREFIX}{group}asks"


def _ask(group: str, number: int) -> str:
    return f"{STORE_PREFIX}{group}ask-{number}"


def _answer_to(word: str) -> str:
    return f"{STORE_PREFIX}answer-{word}"


def _heard(said: str) -> str:
    return f"{STORE_PREFIX}heard-{said}"


def _answer(store: Any, turn: object, said: str, others: int, group: str) -> None:
    """Answer who asks. Also ranks of earlier attempts, which are gone: they do not hear it."""
    seen, waiting, pause, end = 0, list[int](), _SHORTEST_PAUSE, math.inf
    while time.monotonic() < end:
        if end == math.inf and not (threading.main_thread().is_alive() and default_store() is store):
            end = time.monotonic() + _LINGER  # no longer: a store that is not closed keeps its port
        try:
            asked = store.add(_asks(group), 0)
            waiting += range(seen + 1, asked + 1)
            seen = asked
            for number in list(waiting):
                with _lock:
                    if _telling.get(group) is not turn:
                        return
                    if not store.check([_ask(group, number)]):
                        continue
                    store.set(_answer_to(store.get(_ask(group, number)).decode()), said)
                waiting.remove(number)
                pause = _SHORTEST_PAUSE
            if store.add(_heard(said), 0) >= others:
                return
        except RuntimeError as error:  # the process that holds the store has ended
            logger.debug("the ranks are not answered any more: %s", error)
            return
        time.sleep(pause)
        pause = min(1.5 * pause, _LONGEST_PAUSE)
