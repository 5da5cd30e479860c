"""Who saves: the attempt that this process is part of. All its ranks compute the same id, and no other attempt does.

With a process group, its first rank says once who they are, through the store by which the group was made. Without
one, what the launcher says must suffice.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import secrets
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dcp_s3 import process
from dcp_s3.errors import SaveProtocolError, StorageError
from dcp_s3.format.layout import CLAIM
from dcp_s3.limit import Limit
from dcp_s3.process import Launch, launch
from dcp_s3.s3.store import store_of
from dcp_s3.settings import Settings
from dcp_s3.torch_private import default_store
from dcp_s3.url import CheckpointURL

logger = logging.getLogger(__name__)

STORE_PREFIX = "dcp_s3/"
"""Begin of our keys in the store of a process group."""

_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.01, 0.5  # seconds between two looks
_CLOCK_SECONDS = 10.0
_LINGER = 10.0  # seconds for which the first rank answers after the end of its group or its program


@dataclass(frozen=True)
class Attempt:
    """One attempt of a run: its processes from their start until the first is restarted. The same on all ranks, but for
    ``rank``."""

    run: str
    """Id of the run, as the launcher or ``DCP_S3_RUN_ID`` gives it; empty if none does."""
    restart: tuple[int, ...]
    """See `Launch.restart`."""
    token: str
    """What no other attempt has; empty if ``run`` and ``restart`` must suffice."""
    began: float | None
    """When the attempt began, in seconds since the epoch on the clock of the object store, which orders attempts; None
    if it is unknown."""
    world_size: int
    rank: int

    @property
    def id(self) -> str:
        """Id (16 hex digits) of the attempt: the same on all ranks, whatever the world size."""
        text = json.dumps((self.run, list(self.restart), self.token))
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def make_attempt(
    settings: Settings, found: Launch, *, rank: int, world_size: int, store: Any = None,
    clock: Callable[[], float | None] = lambda: None,
) -> Attempt:  # fmt: skip
    """The attempt that a process is part of; ``store`` is one of torch that all ranks share, ``clock`` that of the
    object store. A SaveProtocolError if nothing tells this attempt of several ranks from others, or rank 0 does not
    come."""
    run = settings.run_id or found.run
    if store is not None:
        if rank == 0:
            text = json.dumps({"run": run, "restart": found.restart, "token": secrets.token_hex(8), "began": clock()})
            tell(store, text, world_size - 1)
        else:
            text = ask(store, settings.rank_timeout)
        said = json.loads(text)
        # Not what is in this rank's environment: it may differ, for example by the step of SLURM.
        return Attempt(said["run"], tuple(said["restart"]), said["token"], said["began"], world_size, rank)
    if world_size > 1 and not run:
        raise SaveProtocolError(
            f"nothing tells this attempt of {world_size} ranks from earlier ones: there is no process group, and the "
            "launcher gives no id of the run. Remedy: set DCP_S3_RUN_ID on all ranks to the same text, a new one at "
            "each start of the job, or call torch.distributed.init_process_group"
        )
    return Attempt(run, found.restart, secrets.token_hex(8) if world_size == 1 else "", None, world_size, rank)


_counting = threading.Lock()
_current: tuple[tuple[Any, ...], Attempt] | None = None
"""What tells the group from others, and the attempt."""


def current_attempt(where: CheckpointURL, settings: Settings) -> Attempt:
    """The attempt that this process is part of: the same one until its process group is another one. ``where`` is a URL
    in the bucket whose clock orders attempts. Rank and world size are those of the default process group, without one
    those that the launcher says.

    Raises:
        SaveProtocolError, StorageError: see `make_attempt`.
        SettingsError: the launcher's rank or world size is none.
    """
    global _current

    def clock() -> float | None:
        try:
            store = store_of(where, settings, Limit(patience=_CLOCK_SECONDS, hang=_CLOCK_SECONDS))
            return store.page(where.key(CLAIM)).server_time
        except StorageError as error:
            what = "the clock of s3://%s cannot be read, so this attempt is not ordered by it: %s"
            logger.warning(what, where.bucket, error)
            return None

    group, found = default_store(), launch()
    rank, world_size = found.rank, found.world_size
    if process.is_initialized():
        rank, world_size = process.rank(), process.world_size()
    # Weak: a store that is not closed keeps its port. What stands in it does not change with the environment.
    of = (settings.run_id, found, rank, world_size) if group is None else (weakref.ref(group),)
    with _counting:
        if _current is None or _current[0] != of:
            made = make_attempt(settings, found, rank=rank, world_size=world_size, store=group, clock=clock)
            _current = of, made
        return _current[1]


# --- what the first rank tells the others -------------------------------------------------------------
# torch's store may be older than the group: torchrun's agent keeps one over all restarts. So nothing that stands in it
# is believed. Each rank asks with a word that nobody has used, and the first rank, as it is now, answers that word.

_lock = threading.Lock()
_ASKS = f"{STORE_PREFIX}asks"
"""Number of ranks that have asked; their words are at ``ask-{number}``."""
_said = ""
"""What this process says now. It may have said something else for an earlier group."""


def tell(store: Any, said: str, others: int) -> None:
    """On the first rank: answer the ``others`` (a number) with ``said``, which no earlier attempt has said, in the
    background, until all have heard it."""
    global _said
    with _lock:
        _said = said
    if others:
        threading.Thread(target=_answer, args=(store, said, others), name="dcp_s3-attempt").start()


def ask(store: Any, timeout: float) -> str:
    """On another rank: what the first one says, which has to come to its save in ``timeout`` seconds, or it is a
    SaveProtocolError."""
    word, deadline, pause = secrets.token_hex(8), time.monotonic() + timeout, _SHORTEST_PAUSE
    answer = f"{STORE_PREFIX}answer-{word}"
    try:
        store.set(f"{STORE_PREFIX}ask-{store.add(_ASKS, 1)}", word)
        while not store.check([answer]):
            if time.monotonic() > deadline:
                raise SaveProtocolError(
                    f"rank 0 of the process group has not come to a save or a CheckpointManager for "
                    f"DCP_S3_RANK_TIMEOUT = {timeout:g} s, so this rank does not know which attempt of the job it is "
                    "part of. Remedy: see what rank 0 does; save, and make the CheckpointManager, on all ranks"
                )
            time.sleep(pause)
            pause = min(1.5 * pause, _LONGEST_PAUSE)
        found: str = store.get(answer).decode()
        store.add(f"{STORE_PREFIX}heard-{found}", 1)
    except RuntimeError as error:
        raise store_error(error) from error
    return found


def store_error(error: RuntimeError) -> StorageError:
    return StorageError(
        f"the store of the process group does not answer: {error}. Remedy: the process that holds it, mostly rank 0 or "
        "torchrun's agent on the first host, has to live as long as the ranks"
    )


def _answer(store: Any, said: str, others: int) -> None:
    """Answer who asks. Also ranks of earlier attempts, which are gone: they do not hear it."""
    seen, waiting, pause, end = 0, list[int](), _SHORTEST_PAUSE, math.inf
    while time.monotonic() < end:
        if end == math.inf and not (threading.main_thread().is_alive() and default_store() is store):
            end = time.monotonic() + _LINGER  # no longer: a store that is not closed keeps its port
        try:
            asked = store.add(_ASKS, 0)
            waiting += range(seen + 1, asked + 1)
            seen = asked
            for number in list(waiting):
                with _lock:
                    if _said != said:
                        return
                    if not store.check([f"{STORE_PREFIX}ask-{number}"]):
                        continue
                    word = store.get(f"{STORE_PREFIX}ask-{number}").decode()
                    store.set(f"{STORE_PREFIX}answer-{word}", said)
                waiting.remove(number)
                pause = _SHORTEST_PAUSE
            if store.add(f"{STORE_PREFIX}heard-{said}", 0) >= others:
                return
        except RuntimeError as error:  # the process that holds the store has ended
            logger.debug("the ranks are not answered any more: %s", error)
            return
        time.sleep(pause)
        pause = min(1.5 * pause, _LONGEST_PAUSE)
