"""A save that this rank has counted and not begun: it may still begin it, or tells the others that it does not.

And one that it has begun and does not stand by any more, as it restored a checkpoint since.
"""

from __future__ import annotations

import logging

from dcp_s3.checkpoint.info import find_step
from dcp_s3.coordination.claim import Claim, claim_of, has_gone_past, withdraw
from dcp_s3.coordination.identity import CountedSave, counts, current_attempt, save_of
from dcp_s3.coordination.joint import JointSave, sign_failed
from dcp_s3.errors import CheckpointExistsError, DcpS3Error, ObjectNotFoundError, StorageError
from dcp_s3.format.control_files import Notice
from dcp_s3.format.layout import notice_object
from dcp_s3.s3.store import S3Store
from dcp_s3.settings import Settings
from dcp_s3.url import CheckpointURL
from dcp_s3.workers import InTurn

logger = logging.getLogger(__name__)

_telling = InTurn("dcp_s3-not-begun")


def enter_save(url: CheckpointURL, settings: Settings) -> CountedSave:
    """Count a save of all ranks before anything of it can fail on this rank alone, and hold on to who they are.

    A save that this rank has left is the same one at the next call, which the other ranks may be waiting for; unless
    they have given it up, or have begun another one.

    Raises:
        SaveProtocolError, SettingsError, StorageError
    """
    attempt = current_attempt(settings)
    left = counts.take_left(attempt, str(url))
    if left is not None:
        try:
            if not _is_given_up(url, settings, left):
                return left
        except StorageError:
            counts.leave(left, str(url))
            raise
    return counts.count(attempt, str(url))


def _claim(url: CheckpointURL, settings: Settings, save: CountedSave) -> Claim:
    return claim_of(save.attempt, str(url), save.number, find_step(url.name, settings))


def _notice_key(url: CheckpointURL, save: CountedSave) -> str:
    return url.key(notice_object(save_of(save.attempt, str(url), save.number)))


def _is_given_up(url: CheckpointURL, settings: Settings, save: CountedSave) -> bool:
    store = S3Store(url.bucket, settings)
    try:
        if Notice.from_json(store.get(_notice_key(url, save)).data).failed:
            return True
    except (ObjectNotFoundError, ValueError):
        pass
    return has_gone_past(store, url, _claim(url, settings, save))


def leave(url: CheckpointURL, settings: Settings, save: CountedSave, error: BaseException) -> None:
    """Note that this rank has failed before it began a save, if it did: it may still begin it. The other ranks are told
    why in the background; not what all find, nor an interrupt: they find out what becomes of this rank."""
    if save.begun:
        return
    counts.leave(save, str(url))
    told = isinstance(error, Exception) and not isinstance(error, CheckpointExistsError)
    if save.attempt.world_size > 1 and told:
        why = f"{type(error).__name__}: {error}"  # not the error, whose frames hold the state
        _telling.submit(lambda: _tell_failed(url, settings, save, why))


def _tell_failed(url: CheckpointURL, settings: Settings, save: CountedSave, why: str) -> None:
    claim = _claim(url, settings, save)
    joint = JointSave(url, claim, save.attempt.rank, overwrite=False, rank_timeout=settings.rank_timeout)
    try:
        sign_failed(S3Store(url.bucket, settings), joint, why)
    except DcpS3Error as failed:
        logger.warning("the other ranks are not told that this one has failed: %s", failed)


def take_back(url: CheckpointURL, settings: Settings, save: CountedSave) -> None:
    """See to it that a save which has ended on this rank, and nobody has committed, is never merged with later ones.

    Raises:
        StorageError: it may still be committed.
    """
    if save.begun and save.attempt.world_size > 1:
        withdraw(S3Store(url.bucket, settings), url, _claim(url, settings, save))
    counts.forget_left(save, str(url))
