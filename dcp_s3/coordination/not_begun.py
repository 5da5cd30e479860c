"""A save that this rank has counted and not begun: it may still begin it, or tells the others that it does not.

And one that it has begun and does not stand by any more, as it restored a checkpoint since.
"""

from __future__ import annotations

import logging

from dcp_s3.checkpoint.info import find_step
from dcp_s3.coordination.claim import Claim, claim_of, has_gone_past, withdraw
from dcp_s3.coordination.identity import (
    CountedSave,
    count_save,
    current_attempt,
    forget_left,
    leave_save,
    save_of,
    take_left,
)
from dcp_s3.coordination.joint import JointSave, sign_failed
from dcp_s3.errors import CheckpointExistsError, DcpS3Error, ObjectNotFoundError, StorageError
from dcp_s3.format.control_files import Notice
from dcp_s3.format.layout import notice_object
from dcp_s3.s3.store import store_of
from dcp_s3.settings import Settings
from dcp_s3.url import CheckpointURL
from dcp_s3.workers import InTurn

logger = logging.getLogger(__name__)

_telling = InTurn("dcp_s3-not-begun")


def enter_save(url: CheckpointURL, settings: Settings) -> CountedSave:
    """Count a save of all ranks before anything of it can fail on this rank alone, and hold on to who they are.

    A save that this rank has left is the same one at the next call, which the other ranks may be waiting for; unless
    they have given it up, or have begun another one.
    """
    attempt = current_attempt(settings)
    left = take_left(attempt, str(url))
    if left is not None:
        try:
            if not _is_given_up(url, settings, left):
                return left
        except StorageError:
            leave_save(left, str(url))
            raise
    return count_save(attempt, str(url))


def _claim(url: CheckpointURL, settings: Settings, save: CountedSave) -> Claim:
    return claim_of(save.attempt, str(url), save.number, find_step(url.name, settings))


def _is_given_up(url: CheckpointURL, settings: Settings, save: CountedSave) -> bool:
    store = store_of(url, settings)
    notice = url.key(notice_object(save_of(save.attempt, str(url), save.number)))
    try:
        if Notice.from_json(store.get(notice).data).failed:
            return True
    except (ObjectNotFoundError, ValueError):
        pass
    return has_gone_past(store, url, _claim(url, settings, save))


def leave(url: CheckpointURL, settings: Settings, save: CountedSave, error: BaseException) -> None:
    """Note that this rank has failed before it began a save, if it did: it may still begin it. The other ranks are told
    why in the background; not what all find, nor an interrupt: they find out what becomes of this rank."""
    if save.begun:
        return
    leave_save(save, str(url))
    told = isinstance(error, Exception) and not isinstance(error, CheckpointExistsError)
    if save.attempt.world_size > 1 and told:
        why = f"{type(error).__name__}: {error}"  # not the error, whose frames hold the state
        _telling.submit(lambda: _tell_failed(url, settings, save, why))


def _tell_failed(url: CheckpointURL, settings: Settings, save: CountedSave, why: str) -> None:
    claim = _claim(url, settings, save)
    joint = JointSave(url, claim, save.attempt.rank, overwrite=False, rank_timeout=settings.rank_timeout)
    try:
        sign_failed(store_of(url, settings), joint, why)
    except DcpS3Error as failed:
        logger.warning("the other ranks are not told that this one has failed: %s", failed)


def take_back(url: CheckpointURL, settings: Settings, save: CountedSave) -> None:
    """See to it that a save which has ended on this rank, and nobody has committed, is never merged with later ones.
    After an error it may still be committed."""
    if save.begun and save.attempt.world_size > 1:
        withdraw(store_of(url, settings), url, _claim(url, settings, save))
    forget_left(save, str(url))
