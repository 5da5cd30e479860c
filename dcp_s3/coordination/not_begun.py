"""A save that this rank has counted and not begun: it may still begin it, or tells the others that it does not."""

from __future__ import annotations

from dcp_s3.checkpoint.commit import delete_quietly
from dcp_s3.coordination.claim import claim_of
from dcp_s3.coordination.identity import CountedSave, count_save, current_attempt, leave_save, save_of, take_left
from dcp_s3.coordination.joint import JointSave, sign_failed
from dcp_s3.errors import ObjectNotFoundError, StorageError
from dcp_s3.format.layout import notice_object
from dcp_s3.format.notice import Notice
from dcp_s3.s3.store import S3Store
from dcp_s3.settings import Settings
from dcp_s3.url import CheckpointURL


def enter_save(url: CheckpointURL, settings: Settings) -> CountedSave:
    """Count a save of all ranks before anything of it can fail on this rank alone, and hold on to who they are.

    A save that this rank has left is the same one at the next call, which the other ranks may be waiting for; unless
    they have given it up.

    Args:
        url: URL of the checkpoint.
        settings: the writer's settings.

    Raises:
        SaveProtocolError, SettingsError, StorageError
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
    return CountedSave(attempt, count_save(attempt, str(url)))


def _is_given_up(url: CheckpointURL, settings: Settings, save: CountedSave) -> bool:
    key = url.key(notice_object(save_of(save.attempt, str(url), save.number)))
    try:
        notice = Notice.from_json(S3Store(url.bucket, settings).get(key).data)
    except (ObjectNotFoundError, ValueError):
        return False
    return bool(notice.failed)


def tell_failed(url: CheckpointURL, settings: Settings, save: CountedSave, error: BaseException) -> None:
    """Tell the other ranks that this one has failed before it began a save. It may still begin it.

    Args:
        url: URL of the checkpoint.
        settings: the writer's settings.
        save: the save.
        error: why.

    Raises:
        StorageError
    """
    attempt = save.attempt
    claim = claim_of(attempt, str(url), save.number, None)
    joint = JointSave(url, claim, attempt.rank, overwrite=False, rank_timeout=settings.rank_timeout)
    sign_failed(S3Store(url.bucket, settings), joint, error)


def tell_superseded(url: CheckpointURL, settings: Settings, save: CountedSave, *, step: int, by: int) -> None:
    """Tell the other ranks that this one makes no part of a save, before it has begun it: it can never be whole.

    Args:
        url: URL of the checkpoint.
        settings: the writer's settings.
        save: the save.
        step: its step.
        by: step that is saved instead.

    Raises:
        StorageError
    """
    reason = f"step {step} is not saved to {url}: rank {save.attempt.rank} saves step {by} instead"
    notice = Notice(save_of(save.attempt, str(url), save.number), 0, {}, reason, by)
    S3Store(url.bucket, settings).put(url.key(notice_object(notice.save)), notice.to_json())


def forget_superseded(url: CheckpointURL, settings: Settings, save: CountedSave) -> None:
    """Remove what `tell_superseded` wrote, when all ranks have come past that save."""
    key = url.key(notice_object(save_of(save.attempt, str(url), save.number)))
    delete_quietly(S3Store(url.bucket, settings), {key}, "of a save that was superseded")
